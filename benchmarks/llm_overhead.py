"""Compare the time and memory of an update: TRL's GRPO, and the same with ANO's shape.

    python benchmarks/llm_overhead.py --pairs 5 --updates 30
    python benchmarks/llm_overhead.py --model smollm2-135m --pairs 3 --updates 3     # a real model, ten minutes

Every timing has a process of its own, and the two trainers take turns.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sb3_ano.llm import ShapedGRPOConfig, ShapedGRPOTrainer, model_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llm"))
import llm_task

TRAINERS = {"trl": (GRPOTrainer, GRPOConfig), "ano": (ShapedGRPOTrainer, ShapedGRPOConfig)}
WARM_UP = 6  # two generations
#: Settings of the two models: that of the example of reward hacking, larger, and SmolLM2-135M.
MODELS: dict[str, dict[str, Any]] = {
    "toy": {"tokens": 32, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
    "smollm2-135m": {"tokens": 16, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}


class Clock(TrainerCallback):
    """Record processor time, which other processes disturb less, at the start of each update and the end of the last."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time())


def measure(model_name: str, name: str, updates: int) -> dict[str, float]:
    """Return the mean processor time of an update, generation included, and the peak memory of this process."""
    settings = dict(MODELS[model_name])
    tokens = settings.pop("tokens")
    torch.manual_seed(0)
    if model_name == "toy":
        tokenizer: Any = llm_task.make_tokenizer()
        model = llm_task.make_model(tokenizer, hidden_size=256, layers=4)
        reward: Any = llm_task.gold
        prompts = llm_task.make_posts(2000, seed=0).select_columns(["prompt"])
    else:
        # Needs packages of the extra smollm.
        import smollm_task

        tokenizer = AutoTokenizer.from_pretrained(model_path(model_name), padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(model_path(model_name), dtype=torch.float32)
        reward = smollm_task.proxy
        prompts = smollm_task.make_prompts("train")

    trainer_class, config_class = TRAINERS[name]
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        config = config_class(
            directory,
            num_generations=4,
            num_iterations=3,
            max_steps=WARM_UP + updates,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},  # otherwise the two would learn to write more or less
            learning_rate=1e-4,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        trainer_class(model, reward, config, prompts, None, tokenizer, callbacks=[clock]).train()
    seconds = (clock.times[-1] - clock.times[WARM_UP]) / updates
    return {"seconds": seconds, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Print the measurements of each pair, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="number of timings of each trainer")
    parser.add_argument("--updates", type=int, default=60, help="updates per timing, three per generation")
    parser.add_argument("--model", choices=MODELS, default="toy", help="model")
    parser.add_argument("--one", choices=TRAINERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.model, options.one, options.updates)))
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pairs = []
    for index in range(options.pairs):
        pair = {}
        for name in sorted(TRAINERS, reverse=index % 2 == 0):
            command = [sys.executable, __file__, "--one", name, "--model", options.model, "--updates", str(options.updates)]
            finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            pair[name] = json.loads(finished.stdout.strip().splitlines()[-1])
        pairs.append(pair)
        print(json.dumps(pair), flush=True)
    for quantity, title in (("seconds", "processor time of an update"), ("megabytes", "peak memory")):
        ratios = [pair["ano"][quantity] / pair["trl"][quantity] for pair in pairs]
        interval = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{title}: {statistics.median(ratios):.3f} of TRL's (median of {len(ratios)} pairs; {interval})")


if __name__ == "__main__":
    main()
