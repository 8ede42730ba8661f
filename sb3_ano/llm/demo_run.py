"""One training of the demo, and what all of them start from."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.llm import task
from sb3_ano.llm.config import GANOConfig
from sb3_ano.llm.demo import CONTENDERS, run_file
from sb3_ano.llm.files import write_whole
from sb3_ano.llm.grpo import GANOTrainer
from sb3_ano.llm.rewards import LearnedReward

if TYPE_CHECKING:
    from sb3_ano.llm.demo import Plan

try:
    from datasets import Dataset, disable_progress_bars, load_from_disk
except ImportError as error:
    raise missing_extra("llm", error.name or "datasets") from error

# TRL's name of a metric, and ours.
_CURVES = {
    "rewards/gold/mean": "gold",
    "rewards/reward_model/mean": "proxy",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "ratio/outside_low": "outside_low",
    "ratio/outside_high": "outside_high",
    "ratio/max": "ratio_max",
}
_COMPLETIONS = 64


def make_inputs(out: Path, plan: "Plan") -> None:
    """The base model and all data, unless they are there: folders ``base``, ``posts``, ``comparisons``, ``prompts``."""
    disable_progress_bars()
    tokenizer = task.make_tokenizer()
    prompts = task.make_posts(2000, seed=3).select_columns(["prompt"])
    for name, data in (
        ("posts", task.make_posts(plan.posts, seed=1)),
        ("comparisons", task.make_comparisons(plan.comparisons, seed=2)),
        ("prompts", prompts),
    ):
        _save(out / name, data)
    torch.manual_seed(0)
    _save(out / "base", task.make_model(tokenizer), tokenizer)


def _save(folder: Path, *things: Any) -> None:
    """Save data, or a model with its tokenizer, in a folder that is there whole or not at all."""
    if folder.exists():
        return
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    for thing in things:
        if isinstance(thing, Dataset):
            thing.save_to_disk(str(unfinished))
        else:
            thing.save_pretrained(unfinished)
    os.replace(unfinished, folder)


def run_one(out: Path, plan: "Plan", name: str, seed: str) -> None:
    """Train one contender with one seed, and write its curves.

    :param out: folder of the demo
    :param plan: how much is trained
    :param name: key of :data:`~sb3_ano.llm.demo.CONTENDERS`
    :param seed: a whole number
    """
    tokenizer = task.make_tokenizer()
    proxy = LearnedReward.load(str(out / "reward/final"), tokenizer, "cpu", missing_eos_penalty=1.0)
    config = GANOConfig(
        str(out / "policies" / f"{name}_{seed}"),
        per_device_train_batch_size=_COMPLETIONS,
        gradient_accumulation_steps=1,
        num_iterations=plan.iterations,
        max_steps=plan.generations * plan.iterations,
        max_completion_length=task.MAX_SUMMARY,
        learning_rate=plan.learning_rate,
        beta=plan.beta,
        temperature=1.0,
        reward_weights=[1.0, 0.0],  # gold is looked at, not learned from
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        seed=int(seed),
        **CONTENDERS[name],  # type: ignore[arg-type]
    )
    prompts = load_from_disk(str(out / "prompts"))
    trainer = GANOTrainer(str(out / "sft/final"), [proxy, task.gold], config, prompts, None, tokenizer)
    trainer.train()
    trainer.save_model(str(out / "policies" / f"{name}_{seed}" / "final"))
    write_whole(run_file(out, name, seed), _curves(trainer.state.log_history, plan.iterations))


def _curves(history: list[dict[str, float]], iterations: int) -> dict[str, list[float]]:
    """One value for each generation: rewards and length of its completions, means over its updates of everything else."""
    updates = [entry for entry in history if "loss" in entry]
    rounds = [updates[start : start + iterations] for start in range(0, len(updates), iterations)]
    curves: dict[str, list[float]] = {"completions": [_COMPLETIONS * (index + 1) for index in range(len(rounds))]}
    for metric, name in _CURVES.items():
        values = [[entry[metric] for entry in each if metric in entry] for each in rounds]
        curves[name] = [round(sum(each) / len(each), 5) for each in values]
    return curves
