"""The command ``train``: PPO, SPO and ANO with a critic, GRPO and GANO."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from peft import AutoPeftModelForCausalLM
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import find_adapter_config_file
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sb3_ano._io import replace_directory, restore
from sb3_ano.cli import Parser, check_names
from sb3_ano.llm.config import ShapedGRPOConfig, option
from sb3_ano.llm.data import check_paths, load_reward_function, load_split, load_tokenizer
from sb3_ano.llm.grpo import GANOTrainer, ShapedGRPOTrainer
from sb3_ano.llm.ppo import ANOTrainer, PPOTrainer, ShapedPPOTrainer, SPOTrainer
from sb3_ano.llm.resume import last_checkpoint
from sb3_ano.llm.rewards import LearnedReward
from sb3_ano.llm.smollm import model_path


class BaselineTrainer(GANOTrainer):
    """Train with the paper's GRPO, which has the settings of GANO but TRL's objective."""

    _name = "GRPO"
    _tag_names = GRPOTrainer._tag_names
    _paper = GRPOTrainer._paper


class Algorithm(NamedTuple):
    """An algorithm of the command line.

    :param trainer_class: class of its trainer
    :param defaults: settings whose defaults differ from those of the trainer's class of settings
    """

    trainer_class: type[ShapedGRPOTrainer]
    defaults: dict[str, object]


# 1,000,000 completions by 64, which the paper calls steps. With a critic, each of them has four updates.
_STEPS = 15_625
_CRITIC_DEFAULTS: dict[str, object] = {"max_steps": 4 * _STEPS}
# The paper's GRPO makes one update per completion.
_GRPO_DEFAULTS: dict[str, object] = {
    "shaping": "ppo",
    "kl_in": "loss",
    "num_iterations": 1,
}

ALGORITHMS = {
    "ppo": Algorithm(PPOTrainer, _CRITIC_DEFAULTS),
    "spo": Algorithm(SPOTrainer, _CRITIC_DEFAULTS),
    "ano": Algorithm(ANOTrainer, _CRITIC_DEFAULTS),
    "grpo": Algorithm(BaselineTrainer, _GRPO_DEFAULTS),
    "gano": Algorithm(GANOTrainer, {}),
}
#: Other defaults than in Python.
DEFAULTS = {
    "max_steps": _STEPS,
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
    algo: str = option("gano", "Algorithm; it sets defaults, which --help shows.", choices=ALGORITHMS)
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
        if self.use_peft:
            return
        for setting in fields(self):
            is_of_adapters = setting.name.startswith(("lora_", "use_rslora", "use_dora"))
            if is_of_adapters and getattr(self, setting.name) != setting.default:
                raise ValueError(f"{setting.name} has no effect without LoRA; add --use_peft")


class _TrlParser(TrlParser):
    """Parse dataclasses with TRL's parser; an error is one line."""

    error = Parser.error


def train(arguments: Sequence[str], program: str) -> None:
    """Train the policy that the command line describes, and save it in ``OUTPUT_DIR/final``.

    :param arguments: command line after ``train``
    :param program: name of the program in help texts
    :raises ValueError: if an option is invalid, or the output directory holds another training
    """
    # For module:function; only "python -m" looks in the current directory.
    sys.path.append(os.getcwd())

    # The algorithm decides which settings there are, and their defaults.
    names = {"prog": f"{program} train", "allow_abbrev": False, "add_help": False}
    task = _TrlParser(Options, **names).parse_args_and_config(arguments, return_remaining_strings=True)[0]
    check_names("algorithm", [task.algo], ALGORITHMS)  # argparse does not check the file of --config
    algorithm = ALGORITHMS[task.algo]

    parser = _TrlParser((Options, PolicyConfig, algorithm.trainer_class.config_class), **names)
    parser.set_defaults(**DEFAULTS)
    if not torch.accelerator.is_available():
        parser.set_defaults(**CPU_DEFAULTS)
    parser.set_defaults(algo=task.algo, **algorithm.defaults)

    if "-h" in arguments or "--help" in arguments:
        _print_help(parser)
        return
    options, policy, config = parse(parser, arguments)
    run(_make_trainer(options, policy, config), options.resume)


def _print_help(parser: TrlParser) -> None:
    """Print the options that this package adds or changes; TRL has 200 more."""
    # argparse has no public list of its options.
    upstream = []
    for action in TrlParser((ModelConfig, GRPOConfig))._actions:
        upstream.append((action.default, action.help))

    for action in parser._actions:
        # Each name has a twin with _ instead of -.
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        if (action.default, action.help) in upstream:
            action.help = argparse.SUPPRESS

    algo = parser.get_default("algo")
    example = f"--algo {algo} --model_name_or_path sft --reward_model reward --dataset_name trl-lib/tldr --output_dir {algo}"
    parser.usage = f"{parser.prog} --dataset_name NAME [OPTIONS]"
    parser.description = f"Train a policy against a reward model or functions. Example: {parser.prog} {example}"
    parser.epilog = "--config FILE.yaml reads options from a file. All other options are TRL's: see 'trl grpo --help'."
    parser.print_help()


def parse(parser: TrlParser, arguments: Sequence[str]) -> tuple[Options, PolicyConfig, ShapedGRPOConfig]:
    """Parse the options, and check those that decide whether a training can start.

    :param parser: parser of the three classes of options
    :param arguments: command line
    :raises ValueError: if an option is unknown, invalid or has no effect, or the output directory holds another training
    """
    # Before the file of --config changes the defaults.
    epochs = parser.get_default("num_train_epochs")
    steps = parser.get_default("max_steps")
    options, policy, config, unknown = parser.parse_args_and_config(arguments, return_remaining_strings=True)

    # The options themselves
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r} ('{parser.prog} --help' shows the options)")
    if options.dataset_name is None:
        raise ValueError("dataset_name=None is not allowed; give --dataset_name")
    if isinstance(options.reward_funcs, str):  # of YAML
        options.reward_funcs = [options.reward_funcs]
    if not options.reward_model and not options.reward_funcs:
        raise ValueError("nothing is rewarded; give --reward_model or --reward_funcs")
    if options.value_model and not issubclass(ALGORITHMS[options.algo].trainer_class, ShapedPPOTrainer):
        raise ValueError("value_model has no effect without a critic, which only ppo, spo and ano have")
    if options.dataset_test_split != "test" and config.eval_strategy == "no":
        raise ValueError("dataset_test_split needs --eval_strategy")
    if config.max_steps == 0:
        raise ValueError("max_steps=0 trains nothing; allowed are positive integers, and -1 for num_train_epochs")

    # The output directory
    output = Path(config.output_dir)
    start = config.resume_from_checkpoint
    restore(output / "final")
    is_finished = (output / "final").exists()
    is_used = is_finished or any(output.glob("checkpoint-*"))
    if options.resume and start:
        raise ValueError("resume and resume_from_checkpoint exclude each other")
    if start and not Path(start, TRAINER_STATE_NAME).is_file():
        raise ValueError(f"resume_from_checkpoint={start!r} is no complete checkpoint")
    if is_used and not (options.resume or start):
        raise ValueError(f"{output} holds a training; add --resume, or choose another --output_dir")
    if options.resume and is_finished and last_checkpoint(output) is None:
        raise ValueError(f"{output} has no checkpoint to resume from")

    # Files, before anything asks the Hub
    check_paths(
        {
            "model_name_or_path": policy.model_name_or_path,
            "dataset_name": options.dataset_name,
            "reward_model": options.reward_model,
            "value_model": options.value_model,
        }
    )

    # The default of max_steps would decide over a given number of epochs. Identity, because that may equal its default.
    if config.num_train_epochs is not epochs and config.max_steps is steps:
        config.max_steps = -1

    # TRL loads a model by its name with these.
    loading = {
        "revision": policy.model_revision,
        "attn_implementation": policy.attn_implementation,
        "dtype": policy.dtype,
    }
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return options, policy, config


def _make_trainer(options: Options, policy: PolicyConfig, config: ShapedGRPOConfig) -> ShapedGRPOTrainer:
    rewards: list[Any] = []
    for function in options.reward_funcs or []:
        rewards.append(load_reward_function(function))

    # Data
    dataset_name = str(options.dataset_name)
    train_dataset = load_split(dataset_name, options.dataset_config, options.dataset_train_split)
    eval_dataset = None
    if config.eval_strategy != "no":
        eval_dataset = load_split(dataset_name, options.dataset_config, options.dataset_test_split)

    # The reward model comes first, because a critic starts as it.
    model: Any = model_path(policy.model_name_or_path)
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(model, revision=policy.model_revision, trust_remote_code=trust)
    if options.reward_model is not None:
        reward_model = LearnedReward.load(
            options.reward_model,
            tokenizer,
            config.device,
            trust,
            config.chat_template_kwargs,
        )
        rewards.insert(0, reward_model)

    # An adapter is trained further, and TRL's reference is a copy of it.
    quantization = get_quantization_config(policy)
    if find_adapter_config_file(model, revision=policy.model_revision) is not None:
        model = AutoPeftModelForCausalLM.from_pretrained(
            model,
            is_trainable=True,
            trust_remote_code=trust,
            quantization_config=quantization,
            **config.model_init_kwargs,
        )
        quantization = None
        config.model_init_kwargs = None

    # Trainers without a critic do not have this argument.
    critic: dict[str, Any] = {}
    if options.value_model:
        critic["value_model"] = options.value_model
    return ALGORITHMS[options.algo].trainer_class(
        model,
        rewards,
        config,
        train_dataset,
        eval_dataset,
        tokenizer,
        quantization_config=quantization,
        peft_config=get_peft_config(policy),
        **critic,
    )


def run(trainer: ShapedGRPOTrainer, resume: bool = False) -> None:
    """Train, and save the model and its tokenizer in the directory ``final``, complete or not at all.

    :param trainer: trainer
    :param resume: resume from the last complete checkpoint, if there is one
    """
    output = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(output) if resume else trainer.args.resume_from_checkpoint
    if checkpoint is None:
        trainer.train()
    elif not _load_complete(trainer, Path(checkpoint)):
        trainer.train(resume_from_checkpoint=str(checkpoint))

    # Every process saves, because each may hold a part of the model. Without _internal_call, this would push the directory.
    unfinished = output / ".final"
    final = output / "final"
    trainer.save_model(str(unfinished), _internal_call=True)
    trainer.accelerator.wait_for_everyone()

    # Files that the user has added stay.
    if trainer.accelerator.is_main_process:
        with replace_directory(final, keep_others=True) as directory:
            for file in unfinished.iterdir():
                file.rename(directory / file.name)
            unfinished.rmdir()
        if isinstance(trainer, ShapedPPOTrainer):
            with replace_directory(output / "critic", keep_others=True) as directory:
                trainer.save_critic(directory)
    trainer.accelerator.wait_for_everyone()

    # The rest of the output directory is for resumption.
    if trainer.args.push_to_hub:
        trainer.args.output_dir = str(final)
        trainer.push_to_hub(model_name=output.name)


def _load_complete(trainer: ShapedGRPOTrainer, checkpoint: Path) -> bool:
    """Load a checkpoint that is the end of the training, where ``train`` would make another step; tell whether it is that."""
    args = trainer.args
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    has_steps = args.max_steps > 0 and state.global_step >= args.max_steps
    has_epochs = args.max_steps <= 0 and (state.epoch or 0.0) >= args.num_train_epochs
    if not has_steps and not has_epochs:
        return False

    # Without another choice, the last model is the best one.
    if not args.load_best_model_at_end or not state.best_model_checkpoint:
        state.best_model_checkpoint = str(checkpoint)
    trainer.state = state
    trainer._load_best_model()
    return True
