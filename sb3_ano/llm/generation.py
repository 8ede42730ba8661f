"""Completions of the same prompts by several policies."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from sb3_ano.llm.data import load_split, load_tokenizer, tokenize_prompts
from sb3_ano.llm.judges import Ledger, hash_key, plain


def read_completions(path: str) -> dict[str, dict[str, Any]]:
    """Read completions from a file, by prompt.

    :param path: JSON, CSV or Parquet file with the columns ``prompt`` and ``completion``; ``completion_ids`` is optional
    :raises ValueError: if the file cannot be read, a column is missing, a completion is no text, or a prompt occurs twice
    """
    dataset = load_split(path, None, "train", columns=("prompt", "completion"))
    rows = {plain(row["prompt"]): {**row, "completion": _text(row["completion"], path)} for row in dataset}
    if len(rows) < len(dataset):
        raise ValueError(f"{path} repeats a prompt; allowed is one completion per prompt")
    return rows


def _text(completion: Any, path: str) -> str:
    if isinstance(completion, list) and len(completion) == 1:  # a message of the assistant
        completion = completion[0].get("content")
    if not isinstance(completion, str):
        raise ValueError(f"{path} has the completion {completion!r}; allowed are texts, and lists of one message")
    return completion


@torch.inference_mode()
def generate(
    name: str, prompts: Sequence[Any], ledger: Ledger, temperature: float, seed: int, length: int, batch_size: int
) -> dict[str, dict[str, Any]]:
    """Let a policy complete prompts. Batches whose completions are known are not generated again.

    :param name: directory or Hub id of a causal language model, or of a PEFT adapter
    :param prompts: texts, or conversations for the chat template of the tokenizer
    :param ledger: completions that are known already
    :param temperature: sampling temperature; 0 is greedy decoding
    :param seed: seed of the sampling
    :param length: maximum number of tokens of a completion
    :param batch_size: number of prompts at the same time; with padding, it can change the last bits of the probabilities
    :return: rows by prompt
    :raises ValueError: if the model cannot be loaded
    """
    settings = {"model": name, "temperature": temperature, "seed": seed, "max_completion_length": length}
    batches = [list(prompts[start : start + batch_size]) for start in range(0, len(prompts), batch_size)]
    keys = [[hash_key(settings, batch, row) for row in range(len(batch))] for batch in batches]
    missing = [index for index, batch in enumerate(keys) if not ledger.rows.keys() >= {*batch}]
    if missing:
        tokenizer, device = load_tokenizer(name), torch.accelerator.current_accelerator(check_available=True)
        model = AutoModelForCausalLM.from_pretrained(name).eval().to(device or "cpu")
        ends = model.generation_config.eos_token_id
        ends = [*{tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
        tokens = {"eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
        # All tokens can be sampled, as in training; the model's own configuration may say otherwise.
        model.generation_config = GenerationConfig(**sampling, **tokens, max_new_tokens=length)
    for index in tqdm(missing, desc=f"{name}, T = {temperature:g}", unit="batch", disable=not missing or None):
        batch = batches[index]
        inputs = tokenizer.pad({"input_ids": tokenize_prompts(batch, tokenizer)}, return_tensors="pt").to(model.device)
        torch.manual_seed(seed * 1_000_003 + index * batch_size)  # the same for all policies
        new_tokens = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :].tolist()
        for key, prompt, row in zip(keys[index], batch, new_tokens, strict=True):
            # The first EOS belongs to the completion, padding does not.
            ids = row[: next((number for number, token in enumerate(row, start=1) if token in ends), len(row))]
            completion = tokenizer.decode(ids, skip_special_tokens=True)
            if key not in ledger.rows:  # the process was killed in the middle of the batch
                ledger.add(key, **settings, prompt=prompt, completion=completion, completion_ids=ids)
    # With the prompts as they are, because the file has no keys and passwords.
    rows = {}
    for batch, names in zip(batches, keys, strict=True):
        for prompt, key in zip(batch, names, strict=True):
            rows[plain(prompt)] = {**ledger.rows[key], "prompt": prompt}
    return rows
