"""The trainings of the command line: ``sft``, ``reward`` and ``train``."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.llm.arguments import (
    ALGORITHMS,
    PAPERS_SETTINGS,
    PAPERS_STEPS,
    PolicySource,
    Source,
    algorithm_in,
    parse,
    reward_function,
)
from sb3_ano.llm.config import GANOConfig
from sb3_ano.llm.data import COLUMNS, check_columns, check_not_empty, load_split, load_tokenizer
from sb3_ano.llm.grpo import GANOTrainer
from sb3_ano.llm.resume import RestoresRenamedParameters, last_checkpoint
from sb3_ano.llm.rewards import LearnedReward

try:
    from peft import LoraConfig
    from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
except ImportError as error:
    raise missing_extra("llm", error.name or "trl") from error


class _SFTTrainer(RestoresRenamedParameters, SFTTrainer):
    pass


class _RewardTrainer(RestoresRenamedParameters, RewardTrainer):
    pass


def sft(arguments: Sequence[str]) -> int:
    """Supervised fine-tuning on the columns ``prompt`` and ``completion``."""
    source, config = parse("sft", Source, SFTConfig, arguments, PAPERS_SETTINGS)
    tokenizer = load_tokenizer(source.model)
    data = _splits(source, "sft")
    run(
        _SFTTrainer(source.model, config, **data, processing_class=tokenizer, peft_config=_lora(source, "CAUSAL_LM")),
        source.resume,
    )
    return 0


def reward(arguments: Sequence[str]) -> int:
    """A reward model from the columns ``prompt``, ``chosen`` and ``rejected``."""
    source, config = parse("reward", Source, RewardConfig, arguments, PAPERS_SETTINGS)
    tokenizer = load_tokenizer(source.model)
    data = _splits(source, "reward")
    run(
        _RewardTrainer(source.model, config, **data, processing_class=tokenizer, peft_config=_lora(source, "SEQ_CLS")),
        source.resume,
    )
    return 0


def train(arguments: Sequence[str]) -> int:
    """GANO or GRPO on the column ``prompt``."""
    defaults = {"max_steps": PAPERS_STEPS, **ALGORITHMS[algorithm_in(arguments)]}
    source, config = parse("train", PolicySource, GANOConfig, arguments, defaults)
    tokenizer = load_tokenizer(source.model)
    data = _splits(source, "train")
    rewards: list[Any] = []
    if source.reward_model is not None:
        rewards.append(LearnedReward.load(source.reward_model, tokenizer, config.device, source.missing_eos_penalty))
    if source.reward_function is not None:
        rewards.append(reward_function(source.reward_function))
    if not rewards:
        raise ValueError("nothing is rewarded; give --reward_model or --reward_function")
    trainer = GANOTrainer(
        source.model, rewards, config, **data, processing_class=tokenizer, peft_config=_lora(source, "CAUSAL_LM")
    )
    run(trainer, source.resume)
    return 0


def _splits(source: Source, command: str) -> dict[str, Any]:
    """The data of a training, with its columns and prompts looked at."""
    found = {}
    for role, split in (("train_dataset", source.split), ("eval_dataset", source.eval_split)):
        if split is not None:
            data, name = load_split(source.dataset, split), f"dataset={source.dataset!r}, split {split!r},"
            check_columns(data, COLUMNS[command], name)
            check_not_empty(data, COLUMNS[command], name)
            found[role] = data.select_columns(list(COLUMNS[command])) if command != "train" else data
    return found


def _lora(source: Source, task: str) -> LoraConfig | None:
    if source.lora_r == 0:
        return None
    return LoraConfig(
        r=source.lora_r,
        lora_alpha=source.lora_alpha,
        target_modules=source.lora_target_modules,
        task_type=task,
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )


def run(trainer: Any, resume: bool = False) -> None:
    """Train, and save the model and its tokenizer in the folder ``final``, whole or not at all.

    :param trainer: any trainer of TRL's
    :param resume: go on from the last complete checkpoint, if there is one
    """
    folder = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(folder) if resume else None
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    unfinished, final = folder / ".final", folder / "final"
    trainer.save_model(str(unfinished))  # by all processes, where each holds a part
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        if final.exists():
            shutil.rmtree(final)
        os.replace(unfinished, final)
    trainer.accelerator.wait_for_everyone()
