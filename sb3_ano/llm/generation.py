"""Completions of the same prompts by several policies."""

from collections.abc import Sequence

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from sb3_ano.llm.data import Prompt, load_split, load_tokenizer, tokenize_prompts
from sb3_ano.llm.judges import Ledger, Row, hash_key, plain
from sb3_ano.llm.smollm import model_path


def read_completions(path: str) -> dict[str, Row]:
    """Read completions from a file, by prompt.

    :param path: JSON, CSV or Parquet file with the columns ``prompt`` and ``completion``; ``completion_ids`` is optional
    :raises ValueError: if the file cannot be read, a column is missing, a completion is no text, or a prompt occurs twice
    """
    rows: dict[str, Row] = {}
    for row in load_split(path, None, "train", columns=("prompt", "completion")):
        # A completion in a conversation is a message of the assistant.
        completion = row["completion"]
        if isinstance(completion, list) and len(completion) == 1:
            completion = completion[0].get("content")
        if not isinstance(completion, str):
            raise ValueError(f"{path} has the completion {completion!r}; allowed are texts, and lists of one message")

        prompt = plain(row["prompt"])
        if prompt in rows:
            raise ValueError(f"{path} repeats a prompt; allowed is one completion per prompt")
        rows[prompt] = {**row, "completion": completion}
    return rows


def generate(
    name: str,
    prompts: Sequence[Prompt],
    ledger: Ledger,
    temperature: float,
    seed: int,
    length: int,
    batch_size: int,
) -> dict[str, Row]:
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
    settings = {
        "model": name,
        "temperature": temperature,
        "seed": seed,
        "max_completion_length": length,
    }
    # The model is loaded when the first batch needs it.
    policy = None
    rows: dict[str, Row] = {}
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc=f"{name}, T = {temperature:g}", unit="batch"):
        # Samples depend on the whole batch.
        batch = list(prompts[start : start + batch_size])
        keys = [hash_key(settings, batch, row) for row in range(len(batch))]

        if not ledger.rows.keys() >= set(keys):
            policy = policy or _Policy(name, temperature, length)
            # The same for all policies
            torch.manual_seed(seed * 1_000_003 + start)
            completions = policy.complete(batch)

            for key, prompt, ids in zip(keys, batch, completions, strict=True):
                # A process that was killed in the middle of the batch has written some of them.
                if key in ledger.rows:
                    continue
                completion = policy.tokenizer.decode(ids, skip_special_tokens=True)
                ledger.add(key, **settings, prompt=prompt, completion=completion, completion_ids=ids)

        # With the prompts as they are, because the file has no keys and passwords.
        for key, prompt in zip(keys, batch, strict=True):
            rows[plain(prompt)] = {**ledger.rows[key], "prompt": prompt}
    return rows


class _Policy:
    """A model with its sampling.

    :param name: directory or Hub id of a causal language model, or of a PEFT adapter
    :param temperature: sampling temperature; 0 is greedy decoding
    :param length: maximum number of tokens of a completion
    """

    def __init__(self, name: str, temperature: float, length: int) -> None:
        self.tokenizer = load_tokenizer(name)
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model_path(name)).eval().to(device)

        # As in training, every EOS token of the model is an end, and all tokens can be sampled.
        ends = self.model.generation_config.eos_token_id
        self.ends = {self.tokenizer.eos_token_id}
        self.ends.update(ends if isinstance(ends, list) else [ends])
        self.ends.discard(None)
        generation = GenerationConfig(
            do_sample=temperature > 0,
            eos_token_id=list(self.ends),
            pad_token_id=self.tokenizer.pad_token_id,
            max_new_tokens=length,
        )
        # Greedy decoding does not take these.
        if generation.do_sample:
            generation.temperature = temperature
            generation.top_k = 0
        self.model.generation_config = generation

    @torch.inference_mode()
    def complete(self, prompts: list[Prompt]) -> list[list[int]]:
        """Return the tokens of a completion of each prompt."""
        prompt_ids = tokenize_prompts(prompts, self.tokenizer)
        inputs = self.tokenizer.pad({"input_ids": prompt_ids}, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        # Prompts are padded on the left, so that all completions start at the same position.
        outputs = self.model.generate(**inputs)

        completions = []
        prompt_length = inputs["input_ids"].shape[1]
        for row in outputs[:, prompt_length:].tolist():
            # The first EOS belongs to the completion, padding does not.
            length = len(row)
            for number, token in enumerate(row, start=1):
                if token in self.ends:
                    length = number
                    break
            completions.append(row[:length])
        return completions
