"""The command ``generate``: completions of a model, as a file."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.llm.data import check_prompts, load_split, load_tokenizer
from sb3_ano.llm.files import write_whole

try:
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, set_seed
except ImportError as error:
    raise missing_extra("llm", error.name or "transformers") from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def generate(arguments: Sequence[str]) -> int:
    """Write the completions of a model to a file of JSON lines, each with ``prompt`` and ``completion``."""
    options = _options(arguments)
    tokenizer = load_tokenizer(options.model)
    data = load_split(options.dataset, options.split)
    check_prompts(data, f"dataset={options.dataset!r}, split {options.split!r},")
    prompts = data["prompt"][: options.limit]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device).eval()
    set_seed(options.seed)
    written = completions(
        model, tokenizer, prompts, options.max_new_tokens, options.temperature, batch_size=options.batch_size
    )
    write_whole(options.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written))
    print(f"{len(prompts)} completions in {options.out}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        "python -m sb3_ano.llm generate", description=generate.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="Hub id or folder")
    add("--dataset", required=True, help="Hub id, folder or file with a column 'prompt'")
    add("--split", default="test", help="split of the dataset")
    add("--out", type=Path, default=Path("completions.jsonl"), help="file to write")
    add("--limit", type=int, help="so many prompts, from the first; all without it")
    add("--max_new_tokens", type=int, default=53, help="most tokens of a completion")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token")
    add("--batch_size", type=int, default=32, help="prompts at a time")
    add("--seed", type=int, default=0, help="of the sampling")
    options = parser.parse_args(list(arguments))
    for name in ("max_new_tokens", "batch_size", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not allowed; allowed are whole numbers from 1")
    if not 0.0 <= options.temperature < float("inf"):
        raise ValueError(f"temperature={options.temperature} is not allowed; allowed are finite numbers from 0")
    return options


@torch.inference_mode()
def completions(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, temperature: float, batch_size: int = 32
) -> Iterator[dict[str, str]]:
    """Completions one after another, as ``prompt`` and ``completion``.

    :param model: causal language model
    :param tokenizer: its tokenizer, padding on the left
    :param prompts: texts
    :param max_new_tokens: most tokens of a completion
    :param temperature: of the sampling; 0 takes the likeliest token
    :param batch_size: prompts at a time
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    for start in tqdm(range(0, len(prompts), batch_size), desc="batches"):
        texts = list(prompts[start : start + batch_size])
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        produced = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **sampling,
        )[:, inputs["input_ids"].shape[1] :]
        for prompt, completion in zip(texts, tokenizer.batch_decode(produced, skip_special_tokens=True), strict=True):
            yield {"prompt": prompt, "completion": completion}
