"""The command ``train``: PPO, SPO and ANO with a critic, GRPO and GANO."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import AutoPeftModelForCausalLM
from transformers.utils import find_adapter_config_file
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sb3_ano._io import replace_directory
from sb3_ano.cli import Parser
from sb3_ano.llm.config import ShapedGRPOConfig, option
from sb3_ano.llm.data import FORMATS, load_reward_function, load_split, load_tokenizer
from sb3_ano.llm.grpo import GANOTrainer, ShapedGRPOTrainer
from sb3_ano.llm.ppo import ANOTrainer, PPOTrainer, ShapedPPOTrainer, SPOTrainer
from sb3_ano.llm.resume import last_checkpoint
from sb3_ano.llm.rewards import LearnedReward

#: 1,000,000 completions by 64, which the paper calls steps; a critic's algorithms make four updates of each of them.
_CRITIC_STEPS = {"max_steps": 62_500}
#: Trainer of each algorithm, and differences from its settings' defaults. The paper's GRPO makes one update per completion.
ALGORITHMS: dict[str, tuple[type[ShapedGRPOTrainer], dict[str, Any]]] = {
    "ppo": (PPOTrainer, _CRITIC_STEPS),
    "spo": (SPOTrainer, _CRITIC_STEPS),
    "ano": (ANOTrainer, _CRITIC_STEPS),
    "grpo": (GANOTrainer, {"shaping": "ppo", "kl_in": "loss", "num_iterations": 1}),
    "gano": (GANOTrainer, {}),
}
#: Other defaults than in Python.
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
    """Hold the options that are neither of the model nor of the trainer's settings, under TRL's names where it has them."""

    _argument_group_name: ClassVar[str] = "task"
    algo: str = option("gano", "Algorithm; it sets defaults, which --help shows.", choices=list(ALGORITHMS))
    dataset_name: str | None = option(None, "Hub id, directory or file; it has a column 'prompt'.", aliases=["--dataset"])
    dataset_config: str | None = option(None, "Configuration of a data set on the Hub.")
    dataset_train_split: str = option("train", "Split to train on.", aliases=["--split"])
    dataset_test_split: str | None = option(
        None, "Split for evaluations, 'test' with --eval_strategy.", aliases=["--eval_split"]
    )
    reward_model: str | None = option(None, "Hub id or directory of a reward model.", aliases=["--reward_model_name_or_path"])
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Reward functions as module:function, or TRL's.", "aliases": ["--reward_function"]}
    )
    value_model: str | None = option(None, "Start of the critic (ppo, spo, ano); the reward model by default.")
    resume: bool = option(False, "Resume from the last complete checkpoint in --output_dir.")


@dataclass
class PolicyConfig(ModelConfig):
    """Hold TRL's options of the model, with the defaults of this package."""

    _argument_group_name: ClassVar[str] = "model"
    model_name_or_path: str = option(
        "EleutherAI/pythia-1b-deduped", "Hub id or directory of a model or of a LoRA adapter.", aliases=["--model"]
    )
    lora_r: int | None = option(None, "Rank of LoRA adapters; 16 with --use_peft.")
    # Dropout would make the ratio differ from 1 before the first update.
    lora_dropout: float = option(0.0, "Dropout of LoRA adapters.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.use_peft: bool = self.use_peft or bool(self.lora_r)
        for lora_option in () if self.use_peft else fields(self):
            if lora_option.name.startswith("lora_") and getattr(self, lora_option.name) != lora_option.default:
                raise ValueError(f"{lora_option.name} has no effect without LoRA; add --use_peft")
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
    sys.path.append(os.getcwd())  # for module:function; only "python -m" looks in the current directory
    names = {"prog": f"{program} train", "allow_abbrev": False, "add_help": False}
    algo = _TrlParser(Options, **names).parse_known_args(list(arguments))[0].algo
    trainer_class, defaults = ALGORITHMS[algo]
    parser = _TrlParser((Options, PolicyConfig, trainer_class.config_class), **names)
    parser.set_defaults(**DEFAULTS, **({} if torch.accelerator.is_available() else CPU_DEFAULTS))
    parser.set_defaults(algo=algo, **defaults)
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
    parser.usage = f"{parser.prog} --dataset_name NAME [OPTIONS]"
    algo = parser.get_default("algo")
    example = f"--algo {algo} --model_name_or_path sft --reward_model reward --dataset_name trl-lib/tldr --output_dir {algo}"
    parser.description = f"Train a policy against a reward model or functions. Example: {parser.prog} {example}"
    parser.epilog = f"All other options are TRL's; 'trl grpo --help' describes them: {', '.join(sorted({*others}))}."
    parser.print_help()


def parse(parser: TrlParser, arguments: Sequence[str]) -> tuple[Options, PolicyConfig, ShapedGRPOConfig]:
    """Parse the options, and check those that decide whether a training can start.

    :param parser: parser of the three classes of options
    :param arguments: command line
    :raises ValueError: if an option is unknown, invalid or has no effect, or the output directory holds another training
    """
    # The file of --config changes the defaults.
    epochs, steps = parser.get_default("num_train_epochs"), parser.get_default("max_steps")
    options, policy, config, unknown = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r} ('{parser.prog} --help' shows the options)")
    if options.dataset_name is None:
        raise ValueError("dataset_name=None is not allowed; give --dataset_name")
    if Path(options.dataset_name).suffix in FORMATS and not Path(options.dataset_name).is_file():
        raise ValueError(f"dataset_name={options.dataset_name!r} does not exist")  # before anything asks the Hub
    if options.reward_model is None and options.reward_funcs is None:
        raise ValueError("nothing is rewarded; give --reward_model or --reward_funcs")
    if options.value_model is not None and not issubclass(ALGORITHMS[options.algo][0], ShapedPPOTrainer):
        raise ValueError(
            f"value_model has no effect with algo={options.algo!r}, which has no critic; allowed are ppo, spo, ano"
        )
    if config.eval_strategy != "no":
        options.dataset_test_split = options.dataset_test_split or "test"
    elif options.dataset_test_split is not None:
        raise ValueError(f"dataset_test_split={options.dataset_test_split!r} has no effect without --eval_strategy")
    if config.max_steps == 0:
        raise ValueError("max_steps=0 trains nothing; allowed are positive integers, and -1 for num_train_epochs")
    if config.num_train_epochs != epochs and config.max_steps == steps:
        config.max_steps = -1  # or the default would decide over the given number of epochs
    output = Path(config.output_dir)
    is_finished = (output / "final").exists()
    resumes = options.resume or config.resume_from_checkpoint is not None
    if not resumes and (any(output.glob("checkpoint-*")) or is_finished):
        raise ValueError(f"output_dir={config.output_dir!r} holds a training; add --resume, or choose another directory")
    if options.resume and is_finished and last_checkpoint(output) is None:
        raise ValueError(f"output_dir={config.output_dir!r} has no checkpoint to resume from, only the final model")
    loading = {"revision": policy.model_revision, "attn_implementation": policy.attn_implementation, "dtype": policy.dtype}
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return options, policy, config


def _make_trainer(options: Options, policy: PolicyConfig, config: ShapedGRPOConfig) -> ShapedGRPOTrainer:
    data = (str(options.dataset_name), options.dataset_config)
    train_dataset = load_split(*data, options.dataset_train_split)
    eval_dataset = load_split(*data, options.dataset_test_split) if options.dataset_test_split else None
    model: Any = policy.model_name_or_path
    code = {"trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(model, revision=policy.model_revision, **code)
    rewards: list[Any] = [load_reward_function(name) for name in options.reward_funcs or ()]
    if options.reward_model is not None:
        rewards.insert(0, LearnedReward.load(options.reward_model, tokenizer, config.device, **code))
    quantization = get_quantization_config(policy)
    if find_adapter_config_file(model, revision=policy.model_revision) is not None:
        # The adapter is trained further, and TRL's reference is a copy of it.
        loading = code | config.model_init_kwargs | {"quantization_config": quantization}
        model = AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, **loading)
        quantization = config.model_init_kwargs = None
    extras: dict[str, Any] = {"quantization_config": quantization, "peft_config": get_peft_config(policy)}
    if options.value_model is not None:
        extras["value_model"] = options.value_model
    return ALGORITHMS[options.algo][0](model, rewards, config, train_dataset, eval_dataset, tokenizer, **extras)


def run(trainer: Any, resume: bool = False) -> None:
    """Train, and save the model and its tokenizer in the directory ``final``, complete or not at all.

    :param trainer: trainer of TRL
    :param resume: resume from the last complete checkpoint, if there is one
    """
    output = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(output) if resume else trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    unfinished, final = output / ".final", output / "final"
    # Every process saves, because each may hold a part of the model. Without _internal_call, this would push the directory.
    trainer.save_model(str(unfinished), _internal_call=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        with replace_directory(final) as directory:
            directory.rmdir()
            unfinished.rename(directory)
        if isinstance(trainer, ShapedPPOTrainer):
            with replace_directory(output / "critic") as directory:
                trainer.save_critic(directory)
    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer.args.output_dir = str(final)  # which is pushed; the rest of OUT is for resumption
        trainer.push_to_hub(model_name=output.name)
