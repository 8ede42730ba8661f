"""The command ``overhead``: time and memory of an update, with a shape and with TRL's own trainer."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.llm import task
from sb3_ano.llm.config import ShapedGRPOConfig
from sb3_ano.llm.grpo import ShapedGRPOTrainer

try:
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise missing_extra("llm", error.name or "trl") from error

_CONTENDERS = ("trl", "ano")
_WARM_UP = 6  # two generations
_TOKENS = 32


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def overhead(arguments: Sequence[str]) -> int:
    """Time updates of TRL's GRPO and of the same with ANO's shape, in processes of their own, one after the other."""
    parser = _Parser(
        "python -m sb3_ano.llm overhead", description=overhead.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="how often each is timed")
    parser.add_argument("--updates", type=int, default=60, help="updates that are timed each time, three to a generation")
    parser.add_argument("--one", choices=_CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(list(arguments))
    if options.one is not None:
        print(json.dumps(_measure(options.one, options.updates)))
        return 0
    pairs = []
    for index in range(options.pairs):
        order = _CONTENDERS if index % 2 == 0 else _CONTENDERS[::-1]
        pairs.append({name: _in_a_process(name, options.updates) for name in order})
        print(json.dumps(pairs[-1]), flush=True)
    for quantity, unit in (("seconds", "processor time of an update"), ("megabytes", "peak memory")):
        ratios = [pair["ano"][quantity] / pair["trl"][quantity] for pair in pairs]
        print(f"{unit}: {statistics.median(ratios):.3f} of TRL's (median of {len(ratios)} pairs; {_range(ratios)})")
    return 0


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def _in_a_process(name: str, updates: int) -> dict[str, float]:
    command = [sys.executable, "-m", "sb3_ano.llm", "overhead", "--one", name, "--updates", str(updates)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise ValueError(f"{name} could not be timed: {finished.stderr.strip().splitlines()[-1]}")
    return json.loads(finished.stdout.strip().splitlines()[-1])


class _Clock(TrainerCallback):
    """Processor time at which each update began and the last one ended, which neighbours on the machine disturb less."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time())


def _measure(name: str, updates: int) -> dict[str, float]:
    """Mean processor seconds of an update, generation included, and the peak memory of this process."""
    tokenizer = task.make_tokenizer()
    torch.manual_seed(0)
    model = task.make_model(tokenizer, hidden_size=256, layers=4)
    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if name == "trl" else (ShapedGRPOTrainer, ShapedGRPOConfig)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            num_generations=4,
            num_iterations=3,
            max_steps=_WARM_UP + updates,
            max_completion_length=_TOKENS,
            generation_kwargs={"min_new_tokens": _TOKENS},  # or the contenders would learn to write more or less
            learning_rate=1e-4,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        clock = _Clock()
        data = task.make_posts(2000, seed=0).select_columns(["prompt"])
        trainer = trainer_class(model, task.gold, config, data, None, tokenizer, callbacks=[clock])
        trainer.train()
    seconds = (clock.times[-1] - clock.times[_WARM_UP]) / updates
    return {"seconds": seconds, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
