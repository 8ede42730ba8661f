"""The command ``train``: PPO, SPO and ANO with a critic, GRPO and GANO."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import AutoPeftModelForCausalLM
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import find_adapter_config_file
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sb3_ano._io import replace_directory, restore
from sb3_ano.cli import Parser, check_names
from sb3_ano.llm.config import ShapedGRPOConfig, option
from sb3_ano.llm.data import check_paths, load_reward_function, load_split, load_tokenizer
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
    # With --push_to_hub, the policy is pushed once, at the end.
    "hub_strategy": "end",
    # No parameter is unused, and the search for such parameters would slow down each update of several processes.
    "ddp_find_unused_parameters": False,
}
#: Defaults without an accelerator; the trainers require one, and bfloat16, otherwise.
CPU_DEFAULTS = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}


@dataclass
class Options:
    """Hold the options that are neither of the model nor of the trainer's settings, under TRL's names where it has them."""

    _argument_group_name: ClassVar[str] = "task"
    algo: str = option("gano", "Algorithm; it sets defaults, which --help shows.", choices=list(ALGORITHMS))
    dataset_name: str | None = option(None, "Hub id, directory or file; it has a column 'prompt'.")
    dataset_config: str | None = option(None, "Configuration of a data set on the Hub.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split for evaluations, with --eval_strategy.")
    reward_model: str | None = option(None, "Hub id or directory of a reward model.", aliases=["--reward_model_name_or_path"])
    reward_funcs: list[str] | None = option(None, "Reward functions as module:function, or TRL's.")  # noqa: RUF009
    value_model: str | None = option(None, "Start of the critic (ppo, spo, ano); the reward model by default.")
    resume: bool = option(False, "Resume from the last complete checkpoint in --output_dir.")


@dataclass
class PolicyConfig(ModelConfig):
    """Hold TRL's options of the model, with the defaults of this package."""

    _argument_group_name: ClassVar[str] = "model"
    model_name_or_path: str = option("EleutherAI/pythia-1b-deduped", "Hub id or directory of a model or of a LoRA adapter.")
    # Dropout would make the ratio differ from 1 before the first update.
    lora_dropout: float = option(0.0, "Dropout of LoRA adapters.")

    def __post_init__(self) -> None:
        super().__post_init__()
        adapters = [field for field in fields(self) if field.name.startswith(("lora_", "use_rslora", "use_dora"))]
        changed = [field.name for field in adapters if getattr(self, field.name) != field.default]
        if changed and not self.use_peft:
            raise ValueError(f"{changed[0]} has no effect without LoRA; add --use_peft")


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
    task = _TrlParser(Options, **names).parse_args_and_config(arguments, return_remaining_strings=True)[0]
    check_names("algorithm", [task.algo], ALGORITHMS)  # argparse does not check the file of --config
    trainer_class, defaults = ALGORITHMS[task.algo]
    parser = _TrlParser((Options, PolicyConfig, trainer_class.config_class), **names)
    parser.set_defaults(**DEFAULTS, **({} if torch.accelerator.is_available() else CPU_DEFAULTS))
    parser.set_defaults(algo=task.algo, **defaults)
    if {"-h", "--help"} & set(arguments):
        _print_help(parser)
    else:
        options, policy, config = parse(parser, arguments)
        run(_make_trainer(options, policy, config), options.resume)


def _print_help(parser: TrlParser) -> None:
    """Print the options that this package adds or changes; TRL has 200 more."""
    upstream = [(action.default, action.help) for action in TrlParser((ModelConfig, GRPOConfig))._actions]
    for action in parser._actions:  # argparse has no public list of its options
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]  # each has a twin with _
        action.help = argparse.SUPPRESS if (action.default, action.help) in upstream else action.help
    parser.usage = f"{parser.prog} --dataset_name NAME [OPTIONS]"
    algo = parser.get_default("algo")
    example = f"--algo {algo} --model_name_or_path sft --reward_model reward --dataset_name trl-lib/tldr --output_dir {algo}"
    parser.description = f"Train a policy against a reward model or functions. Example: {parser.prog} {example}"
    parser.epilog = "--config FILE.yaml reads options from a file. All other options are TRL's: see 'trl grpo --help'."
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
    output, start = Path(config.output_dir), config.resume_from_checkpoint
    restore(output / "final")
    is_finished = (output / "final").exists()
    is_used = is_finished or any(output.glob("checkpoint-*"))
    has_critic = issubclass(ALGORITHMS[options.algo][0], ShapedPPOTrainer)
    options.reward_funcs = [options.reward_funcs] if isinstance(options.reward_funcs, str) else options.reward_funcs  # of YAML
    problems = {
        f"unknown option {' '.join(unknown[:1])!r} ('{parser.prog} --help' shows the options)": unknown,
        "dataset_name=None is not allowed; give --dataset_name": options.dataset_name is None,
        "nothing is rewarded; give --reward_model or --reward_funcs": not (options.reward_model or options.reward_funcs),
        "value_model has no effect without a critic, which only ppo, spo and ano have": options.value_model and not has_critic,
        "dataset_test_split needs --eval_strategy": options.dataset_test_split != "test" and config.eval_strategy == "no",
        "max_steps=0 trains nothing; allowed are positive integers, and -1 for num_train_epochs": config.max_steps == 0,
        "resume and resume_from_checkpoint exclude each other": options.resume and start,
        f"resume_from_checkpoint={start!r} is no complete checkpoint": start and not Path(start, TRAINER_STATE_NAME).is_file(),
        f"{output} holds a training; add --resume, or choose another --output_dir": is_used and not (options.resume or start),
        f"{output} has no checkpoint to resume from": options.resume and is_finished and last_checkpoint(output) is None,
    }
    for message, is_problem in problems.items():
        if is_problem:
            raise ValueError(message)
    own = {name: getattr(options, name) for name in ("dataset_name", "reward_model", "value_model")}
    check_paths(own | {"model_name_or_path": policy.model_name_or_path})
    # Identity, because a given value may be equal to the default.
    if config.num_train_epochs is not epochs and config.max_steps is steps:
        config.max_steps = -1  # or the default would decide over the given number of epochs
    loading = {"revision": policy.model_revision, "attn_implementation": policy.attn_implementation, "dtype": policy.dtype}
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return options, policy, config


def _make_trainer(options: Options, policy: PolicyConfig, config: ShapedGRPOConfig) -> ShapedGRPOTrainer:
    rewards: list[Any] = [load_reward_function(name) for name in options.reward_funcs or ()]
    data = (str(options.dataset_name), options.dataset_config)
    train_dataset = load_split(*data, options.dataset_train_split)
    eval_dataset = None if config.eval_strategy == "no" else load_split(*data, options.dataset_test_split)
    model: Any = policy.model_name_or_path
    code = {"trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(model, revision=policy.model_revision, **code)
    if options.reward_model is not None:
        template = {"chat_template_kwargs": config.chat_template_kwargs}
        rewards.insert(0, LearnedReward.load(options.reward_model, tokenizer, config.device, **code, **template))
    quantization = get_quantization_config(policy)
    if find_adapter_config_file(model, revision=policy.model_revision) is not None:
        # The adapter is trained further, and TRL's reference is a copy of it.
        loading = code | config.model_init_kwargs | {"quantization_config": quantization}
        model = AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, **loading)
        quantization = config.model_init_kwargs = None
    extras: dict[str, Any] = {"quantization_config": quantization, "peft_config": get_peft_config(policy)}
    extras |= {"value_model": options.value_model} if options.value_model else {}
    return ALGORITHMS[options.algo][0](model, rewards, config, train_dataset, eval_dataset, tokenizer, **extras)


def _load_complete(trainer: Any, checkpoint: str | Path) -> bool:
    """Load a checkpoint that is the end of the training, where ``train`` would make another step; tell whether it is that."""
    state, args = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))), trainer.args
    is_complete = state.global_step >= args.max_steps if args.max_steps > 0 else (state.epoch or 0.0) >= args.num_train_epochs
    if is_complete:
        state.best_model_checkpoint = (args.load_best_model_at_end and state.best_model_checkpoint) or str(checkpoint)
        trainer.state = state
        trainer._load_best_model()
    return is_complete


def run(trainer: Any, resume: bool = False) -> None:
    """Train, and save the model and its tokenizer in the directory ``final``, complete or not at all.

    :param trainer: trainer of TRL
    :param resume: resume from the last complete checkpoint, if there is one
    """
    output = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(output) if resume else trainer.args.resume_from_checkpoint
    if checkpoint is None or not _load_complete(trainer, checkpoint):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    unfinished, final = output / ".final", output / "final"
    # Every process saves, because each may hold a part of the model. Without _internal_call, this would push the directory.
    trainer.save_model(str(unfinished), _internal_call=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        # Files that the user has added stay.
        with replace_directory(final, keep_others=True) as directory:
            for file in unfinished.iterdir():
                file.rename(directory / file.name)
            unfinished.rmdir()
        if isinstance(trainer, ShapedPPOTrainer):
            with replace_directory(output / "critic", keep_others=True) as directory:
                trainer.save_critic(directory)
    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer.args.output_dir = str(final)  # which is pushed; the rest of OUT is for resumption
        trainer.push_to_hub(model_name=output.name)
