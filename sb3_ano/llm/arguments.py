"""The options of the commands: the trainer's own, and which model and data."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from sb3_ano.extras import missing_extra

try:
    from transformers import HfArgumentParser
except ImportError as error:
    raise missing_extra("llm", error.name or "transformers") from error

#: The paper's table of hyperparameters, as far as it does not depend on the algorithm.
PAPERS_SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-6,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
}
#: What the algorithms change of GANOConfig; the paper's GRPO uses each completion for one update.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gano": {},
    "grpo": {"shaping": "ppo", "kl_in": "loss", "num_iterations": 1},
}
#: Defaults where there is no accelerator: the trainers take one, and bfloat16, for granted.
ON_A_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
#: 1,000,000 completions by 64.
PAPERS_STEPS = 15_625


@dataclass
class Source:
    """Which model and data, and where to go on."""

    dataset: str = field(metadata={"help": "Hub id, folder or file, in TL;DR format."})
    model: str = field(default="EleutherAI/pythia-1b-deduped", metadata={"help": "Hub id or folder."})
    split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split for evaluations (with --eval_strategy)."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last complete checkpoint in the output folder."})
    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA adapters; 0 trains all parameters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of LoRA adapters."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers with adapters; PEFT's choice without."}
    )


@dataclass
class PolicySource(Source):
    """Also what the policy is rewarded for."""

    algo: str = field(default="gano", metadata={"help": f"{' or '.join(ALGORITHMS)}; sets the defaults of other options."})
    reward_model: str | None = field(default=None, metadata={"help": "Hub id or folder of a reward model."})
    reward_function: str | None = field(default=None, metadata={"help": "module:function, a reward function as TRL takes it."})
    missing_eos_penalty: float = field(default=0.0, metadata={"help": "What a completion without its end loses of its score."})


class OneLineParser(HfArgumentParser):
    """Errors of one line, raised."""

    def error(self, message: str) -> NoReturn:
        """:raises ValueError: always"""
        raise ValueError(message)


def parse(
    command: str, source: type[Source], config: type[Any], arguments: Sequence[str], defaults: dict[str, Any]
) -> tuple[Any, Any]:
    """Parse the options of a trainer and of its model and data.

    :param command: its name
    :param source: class of the options that are not the trainer's
    :param config: class of the trainer's settings
    :param arguments: of the command line
    :param defaults: what differs from the trainer's defaults
    :return: instances of both classes
    :raises ValueError: if an option is unknown or not allowed, or the output folder holds another training
    """
    parser = OneLineParser((source, config), prog=f"python -m sb3_ano.llm {command}", allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    # Looking for unused parameters costs several processes a walk through the graph each time, and there are none.
    parser.set_defaults(report_to="tensorboard", save_total_limit=2, ddp_find_unused_parameters=False, **defaults)
    if not torch.accelerator.is_available():
        parser.set_defaults(**ON_A_CPU)
    chosen, settings, unknown = parser.parse_args_into_dataclasses(list(arguments), return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r} ('{command} --help' shows those that there are)")
    folder = Path(settings.output_dir)
    if not chosen.resume and (any(folder.glob("checkpoint-*")) or (folder / "final").exists()):
        raise ValueError(
            f"output_dir={settings.output_dir!r} holds a training; --resume goes on with it, or name another folder"
        )
    return chosen, settings


def algorithm_in(arguments: Sequence[str]) -> str:
    """The option ``--algo``, which decides the defaults of others.

    :raises ValueError: if it is none of :data:`ALGORITHMS`
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--algo", default="gano")
    algo = parser.parse_known_args(list(arguments))[0].algo
    if algo not in ALGORITHMS:
        raise ValueError(f"algo={algo!r} is not allowed; allowed are {', '.join(ALGORITHMS)}")
    return algo


def reward_function(name: str) -> Callable[..., list[float]]:
    """Import ``module:function``.

    :raises ValueError: if it cannot be imported
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the module, which may fail in any way
        raise ValueError(
            f"reward_function={name!r} cannot be imported ({type(error).__name__}: {error}); allowed is module:function"
        ) from error
    if not callable(found):
        raise ValueError(f"reward_function={name!r} is a {type(found).__name__}; allowed is a function")
    return found
