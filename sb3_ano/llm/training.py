"""The command ``train``: GANO and GRPO."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sb3_ano.cli import Parser
from sb3_ano.llm.config import GANOConfig
from sb3_ano.llm.data import FORMATS, load_reward_function, load_split, load_tokenizer
from sb3_ano.llm.grpo import GANOTrainer, ShapedGRPOTrainer
from sb3_ano.llm.resume import last_checkpoint
from sb3_ano.llm.rewards import LearnedReward

#: Trainer of each algorithm, and its differences from GANOConfig. The paper's GRPO uses each completion for one update.
ALGORITHMS: dict[str, tuple[type[ShapedGRPOTrainer], dict[str, Any]]] = {
    "gano": (GANOTrainer, {}),
    "grpo": (ShapedGRPOTrainer, {"shaping": "ppo", "kl_in": "loss", "num_iterations": 1}),
}
#: Other defaults than in Python. 15,625 updates are the paper's 1,000,000 completions by 64.
DEFAULTS = {
    "max_steps": 15_625,
    "report_to": "tensorboard",
    "save_total_limit": 2,
    # Looking for unused parameters costs several processes a walk through the graph per update, and there are none.
    "ddp_find_unused_parameters": False,
}
#: Defaults without an accelerator; the trainers require one, and bfloat16, otherwise.
CPU_DEFAULTS = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}


@dataclass
class Options:
    """Hold the options that neither TRL nor the trainer's settings have."""

    _argument_group_name: ClassVar[str] = "options added by sb3_ano"
    algo: str = field(
        default="gano", metadata={"choices": list(ALGORITHMS), "help": "Algorithm; it sets defaults, which --help shows."}
    )
    dataset: str | None = field(default=None, metadata={"help": "Hub id, directory or file; it has a column 'prompt'."})
    split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split for evaluations (with --eval_strategy)."})
    reward_model: str | None = field(default=None, metadata={"help": "Hub id or directory of a reward model."})
    reward_function: str | None = field(default=None, metadata={"help": "module:function, a reward function as in TRL."})
    missing_eos_penalty: float = field(default=0.0, metadata={"help": "Score penalty for completions without EOS."})
    resume: bool = field(default=False, metadata={"help": "Resume from the last complete checkpoint in --output_dir."})


@dataclass
class PolicyConfig(ModelConfig):
    """Hold TRL's options of the model, with the defaults of this package."""

    model_name_or_path: str = field(
        default="EleutherAI/pythia-1b-deduped", metadata={"aliases": ["--model"], "help": "Hub id or directory."}
    )
    lora_r: int | None = field(default=None, metadata={"help": "Rank of LoRA adapters; 16 with --use_peft."})
    # Dropout would make the ratio differ from 1 before the first update.
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of LoRA adapters."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.use_peft: bool = self.use_peft or bool(self.lora_r)
        self.lora_r = self.lora_r or 16


class _TrlParser(TrlParser):
    """Parse dataclasses with TRL's parser; an error is one line."""

    error = Parser.error


def train(arguments: Sequence[str], program: str) -> None:
    """Train the policy that the command line describes, and save it in ``OUTPUT_DIR/final``.

    :param arguments: command line after ``train``
    :param program: name of the program in help texts
    :raises ValueError: if an option is invalid, or the output directory holds another training
    """
    parser = _TrlParser((Options, PolicyConfig, GANOConfig), prog=f"{program} train", allow_abbrev=False, add_help=False)
    sys.path.append(os.getcwd())  # for module:function; only "python -m" looks in the current directory
    parser.set_defaults(**DEFAULTS, **({} if torch.accelerator.is_available() else CPU_DEFAULTS))
    algo = parser.parse_known_args(list(arguments))[0].algo
    parser.set_defaults(**ALGORITHMS[algo][1])
    if {"-h", "--help"} & set(arguments):
        _print_help(parser)
        return
    options, policy, config = parse(parser, arguments)
    if options.algo != algo:
        raise ValueError(f"algo={options.algo!r} is not allowed in the file of --config; give --algo on the command line")
    run(_make_trainer(options, policy, config), options.resume)


def _print_help(parser: TrlParser) -> None:
    """Print the options that this package adds or changes, and only the names of TRL's other 200 options."""
    # argparse and TRL's parser have no public list of their options.
    trl = TrlParser((GRPOConfig, ModelConfig))
    unchanged = [(action.dest, trl.get_default(action.dest), action.help) for action in trl._actions]
    others = []
    for action in parser._actions:
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]  # each has a twin with _
        if (action.dest, parser.get_default(action.dest), action.help) in unchanged:
            others.append(action.dest)
            action.help = argparse.SUPPRESS
    parser.usage = f"{parser.prog} --dataset NAME [OPTIONS]"
    example = f"{parser.prog} --model sft --reward_model reward --dataset trl-lib/tldr --output_dir gano"
    parser.description = f"Train a policy with GANO or GRPO. Example: {example}"
    parser.epilog = f"All other options are TRL's; 'trl grpo --help' describes them: {', '.join(sorted({*others}))}."
    parser.print_help()


def parse(parser: TrlParser, arguments: Sequence[str]) -> tuple[Options, PolicyConfig, GANOConfig]:
    """Parse the options, and check those that decide whether a training can start.

    :param parser: parser of the three classes of options
    :param arguments: command line
    :raises ValueError: if an option is unknown or invalid, or the output directory holds another training
    """
    options, policy, config, unknown = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r} ('{parser.prog} --help' shows the options)")
    if options.dataset is None:
        raise ValueError("dataset=None is not allowed; give --dataset")
    if Path(options.dataset).suffix in FORMATS and not Path(options.dataset).is_file():
        raise ValueError(f"dataset={options.dataset!r} does not exist")  # before anything asks the Hub
    if options.reward_model is None and options.reward_function is None:
        raise ValueError("nothing is rewarded; give --reward_model or --reward_function")
    if config.num_train_epochs != parser.get_default("num_train_epochs") and config.max_steps == DEFAULTS["max_steps"]:
        config.max_steps = -1  # or the default would decide over the given number of epochs
    output = Path(config.output_dir)
    resumes = options.resume or config.resume_from_checkpoint is not None
    if not resumes and (any(output.glob("checkpoint-*")) or (output / "final").exists()):
        raise ValueError(f"output_dir={config.output_dir!r} holds a training; add --resume, or choose another directory")
    loading = {"revision": policy.model_revision, "attn_implementation": policy.attn_implementation, "dtype": policy.dtype}
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return options, policy, config


def _make_trainer(options: Options, policy: PolicyConfig, config: GANOConfig) -> ShapedGRPOTrainer:
    train_dataset = load_split(str(options.dataset), options.split)
    eval_dataset = None if options.eval_split is None else load_split(str(options.dataset), options.eval_split)
    name = policy.model_name_or_path
    tokenizer = load_tokenizer(name, revision=policy.model_revision, trust_remote_code=config.trust_remote_code)
    rewards: list[Any] = []
    if options.reward_model is not None:
        rewards.append(LearnedReward.load(options.reward_model, tokenizer, config.device, options.missing_eos_penalty))
    if options.reward_function is not None:
        rewards.append(load_reward_function(options.reward_function))
    adapters = {"quantization_config": get_quantization_config(policy), "peft_config": get_peft_config(policy)}
    return ALGORITHMS[options.algo][0](name, rewards, config, train_dataset, eval_dataset, tokenizer, **adapters)


def run(trainer: Any, resume: bool = False) -> None:
    """Train, and save the model and its tokenizer in the directory ``final``, complete or not at all.

    :param trainer: trainer of TRL
    :param resume: resume from the last complete checkpoint, if there is one
    """
    output = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(output) if resume else trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    unfinished, final = output / ".final", output / "final"
    trainer.save_model(str(unfinished))  # every process saves, because each may hold a part of the model
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        previous = output / ".previous"
        shutil.rmtree(previous, ignore_errors=True)
        if final.exists():
            os.replace(final, previous)
        os.replace(unfinished, final)
        shutil.rmtree(previous, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
