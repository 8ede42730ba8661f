"""Completions of the same prompts by several policies."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, set_seed

from sb3_ano._io import read_json, write_json
from sb3_ano.llm.data import load_tokenizer


def read_completions(path: Path) -> dict[str, dict[str, Any]]:
    """Read completions from a JSONL file, by prompt.

    :param path: file whose rows have the columns ``prompt`` and ``completion``; ``completion_ids`` is optional
    :raises ValueError: if a row is no JSON object or lacks a column, or a prompt occurs twice
    """
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            prompt, _ = row["prompt"], row["completion"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a JSON object with 'prompt' and 'completion'") from error
        if prompt in rows:
            raise ValueError(f"{path}, line {number}, repeats a prompt; allowed is one completion per prompt")
        rows[prompt] = row
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def generate(
    name: str,
    prompts: Sequence[Any],
    out: Path,
    temperature: float,
    seed: int = 0,
    max_completion_length: int = 53,
    batch_size: int = 32,
) -> dict[str, dict[str, Any]]:
    """Let a policy complete prompts, and write the completions to a JSONL file. A killed run resumes at its last batch.

    :param name: directory or Hub id of a causal language model, or of a PEFT adapter
    :param prompts: texts, or conversations for the chat template of the tokenizer
    :param out: file to write; its settings are in the file of the same name with the ending ``.json``
    :param temperature: sampling temperature; 0 is greedy decoding
    :param seed: seed of the sampling
    :param max_completion_length: maximum number of tokens of a completion
    :param batch_size: number of prompts at the same time; with padding, it can change the last bits of the probabilities
    :return: rows by prompt
    :raises ValueError: if the model cannot be loaded, or ``out`` was made with other settings
    """
    settings = {"model": name, "temperature": temperature, "seed": seed, "batch_size": batch_size}
    settings |= {"max_completion_length": max_completion_length, "prompts": len(prompts)}
    description = out.with_suffix(".json")
    if not description.exists():
        out.unlink(missing_ok=True)
        write_json(description, settings)
    elif (previous := read_json(description)) != settings:
        changed = next(key for key in settings if previous.get(key) != settings[key])
        raise ValueError(
            f"{out} was made with {changed}={previous.get(changed)}, not {settings[changed]}; choose another --out"
        )
    lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
    complete = sum(line.endswith(b"\n") for line in lines) // batch_size * batch_size
    if len(lines) < len(prompts) or not lines[-1].endswith(b"\n"):
        _generate(name, prompts, out, b"".join(lines[:complete]), complete, settings)
    return read_completions(out)


@torch.inference_mode()
def _generate(name: str, prompts: Sequence[Any], out: Path, known: bytes, start: int, settings: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(name)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(name).eval().to(device)
    temperature, size = settings["temperature"], settings["batch_size"]
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": settings["max_completion_length"]}
    # All tokens can be sampled, as in training; a model's generation_config may say otherwise.
    sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    with open(out, "wb") as file:
        file.write(known)
        for first in tqdm(range(start, len(prompts), size), desc=out.stem, unit="batch", initial=start // size):
            texts = [_text(prompt, tokenizer) for prompt in prompts[first : first + size]]
            inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
            set_seed(settings["seed"] * 1_000_003 + first)
            tokens = model.generate(**inputs, **sampling, pad_token_id=tokenizer.pad_token_id)
            new_tokens = tokens[:, inputs["input_ids"].shape[1] :].tolist()
            for prompt, row in zip(prompts[first : first + size], new_tokens, strict=True):
                # The first EOS belongs to the completion, padding does not.
                ids = row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row
                completion = tokenizer.decode(ids, skip_special_tokens=True)
                file.write(
                    (json.dumps({"prompt": plain(prompt), "completion": completion, "completion_ids": ids}) + "\n").encode()
                )
            file.flush()


def plain(prompt: Any) -> str:
    """Return a prompt as a judge reads it.

    :param prompt: text, or a conversation: list of messages with ``role`` and ``content``
    """
    return prompt if isinstance(prompt, str) else "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _text(prompt: Any, tokenizer: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
