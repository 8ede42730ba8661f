"""Settings of the trainers: TRL's, plus how the ratio is shaped."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from trl import GRPOConfig

from sb3_ano._secrets import hide, remember
from sb3_ano.shaping import ShapingPair, as_pair, ppo

T = TypeVar("T")

#: TRL's losses that are made of a clipped ratio, which is what a shape replaces.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
#: Where the KL divergence from the reference model is paid for.
KL_PLACES = ("loss", "reward")
_KL_HELP = "Place of beta * KL; 'reward' is before advantages are normalized."

# Ranges of settings, by what messages call them.
_NOT_NEGATIVE = "finite numbers from 0"
_POSITIVE = "positive finite numbers"
_COUNT = "positive integers"
_FRACTION = "numbers from 0 to 1"
_RANGES: dict[str, Callable[[float], bool]] = {
    _NOT_NEGATIVE: lambda value: value >= 0,
    _POSITIVE: lambda value: value > 0,
    _COUNT: lambda value: value >= 1,
    _FRACTION: lambda value: 0 <= value <= 1,
}


def option(
    default: T,
    text: str,
    choices: Collection[str] | None = None,
    aliases: Collection[str] = (),
) -> T:
    """Return a field of settings that are also options of the command line.

    :param default: default value
    :param text: text of its help
    :param choices: allowed values
    :param aliases: other names of the option
    """
    # transformers' parser passes the metadata on to argparse.
    metadata: dict[str, object] = {"help": text}
    if choices is not None:
        metadata["choices"] = list(choices)
    if aliases:
        metadata["aliases"] = list(aliases)
    return field(default=default, metadata=metadata)


@dataclass
class ShapedGRPOConfig(GRPOConfig):
    """Extend TRL's ``GRPOConfig`` by a shaping function, which replaces the clip of the ratio.

    ``epsilon`` and ``epsilon_high`` are the radii for negative and positive advantages. With PPO's shape, everything that TRL
    accepts is allowed, because TRL's clip is that shape.

    :param shaping: name of a published objective, or ``"module:function"``; the trainer also takes a callable
    :param kl_in: ``"loss"`` (TRL's way), or ``"reward"``: ``beta`` times the sum of ``log pi_old - log pi_ref`` over a
        completion is subtracted from its reward, before rewards are normalized within their group
    :param missing_eos_penalty: amount subtracted from the reward of a completion without EOS
    :param disable_dropout: whether the policy, the reference and the critic are without dropout, which would make the ratio
        differ from 1 before the first update
    :param reward_timeout: seconds that a call of a reward function may take
    :param use_bias_correction_kl: weight of the KL divergence in the loss by the ratio; None: as in TRL (yes) with PPO's
        shape and no critic, and no otherwise, because that ratio is replaced
    :raises ValueError: if a setting is invalid, has no effect, or cannot be combined with a shape
    """

    _argument_group_name: ClassVar[str] = "training"

    shaping: str | None = option("ano", "Shape: ano, ppo, cispo or another published objective, or module:function.")
    kl_in: str = option("loss", _KL_HELP, choices=KL_PLACES)
    epsilon: float = option(0.2, "Radius of the shape for negative advantages.")
    epsilon_high: float | None = option(None, "Radius of the shape for positive advantages; epsilon by default.")
    missing_eos_penalty: float = option(0.0, "Reward penalty for completions without EOS.")
    disable_dropout: bool = option(True, "Turn off dropout, which makes the ratio random.")
    reward_timeout: float = option(1800.0, "Seconds that a call of a reward function may take.")
    use_bias_correction_kl: bool | None = option(None, "Weight KL in the loss by the ratio; by default with PPO's shape.")

    def __post_init__(self) -> None:
        # Keys and passwords, before anything can be printed
        remember(vars(self))

        # The trainer checks again, with its own shape.
        shape = None if self.shaping is None else as_pair(self.shaping)
        check(self, shape)
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        # transformers pickles the settings in training_args.bin, and pushes it.
        return {**hide(vars(self)), "hub_token": None}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for logs such as TensorBoard's and Weights & Biases', without keys and passwords."""
        return hide(super().to_dict())


@dataclass
class _OfficialDefaults:
    """Defaults for TL;DR: the first two are the paper's, the others those of its official code, which has no schedule."""

    learning_rate: float = option(3e-6, "The initial learning rate for AdamW.")
    lr_scheduler_type: str = option("cosine", "Schedule of the learning rate.")
    max_completion_length: int | None = option(53, "Maximum number of tokens of a completion.")
    temperature: float = option(0.7, "Sampling temperature.")
    beta: float = option(0.05, "Coefficient of the KL divergence from the reference model.")
    kl_in: str = option("reward", _KL_HELP, choices=KL_PLACES)


@dataclass
class GANOConfig(_OfficialDefaults, ShapedGRPOConfig):
    """Hold the settings of GANO, with 64 completions per update.

    Shape, radius, group size, iterations, batch, learning rate and schedule are the paper's (its Table 3). The place of the
    KL divergence, ``beta`` and length are those of the official code, which the paper does not mention. The temperature is
    that code's for PPO, SPO and ANO; its GANO has 1.0.
    """

    per_device_train_batch_size: int = option(16, "Completions per device and forward pass.")
    gradient_accumulation_steps: int = option(4, "Forward passes per update.")
    num_generations: int | None = option(4, "Completions per prompt (G).")
    num_iterations: int = option(3, "Updates with the same completions.")
    loss_type: str = option("grpo", f"One of {', '.join(LOSS_TYPES)}.")


@dataclass
class ShapedPPOConfig(_OfficialDefaults, ShapedGRPOConfig):
    """Hold the settings of PPO, SPO and ANO with a critic, with 64 completions per update.

    Radius, iterations, batch, learning rate and schedule are the paper's; most others are those of the official code. With
    ``kl_in="reward"``, ``beta * (log pi_old - log pi_ref)`` is subtracted from the reward of each token.

    :param shaping: shape of :class:`~sb3_ano.llm.ShapedPPOTrainer`, ``"ano"`` by default; the other trainers have their own
    :param gamma: discount factor
    :param lam: lambda of generalized advantage estimation
    :param vf_coef: coefficient of the value loss
    :param cliprange_value: largest change of a value, relative to that at generation, that lowers the value loss
    :param push_critic: whether the Hub also gets the critic, in the directory ``critic``
    """

    shaping: str | None = option(None, "Shape; ppo, spo and ano have their own.")
    per_device_train_batch_size: int = option(8, "Completions per device and forward pass.")
    gradient_accumulation_steps: int = option(8, "Forward passes per update.")
    num_generations: int | None = option(1, "Completions per prompt.")
    num_generations_eval: int | None = option(1, "Completions per prompt in evaluations.")
    num_iterations: int = option(4, "Updates with the same completions.")
    missing_eos_penalty: float = option(1.0, "Reward penalty for completions without EOS.")
    loss_type: str = option("bnpo", "bnpo: mean over the tokens of a batch; dapo: of an update.")
    gamma: float = option(1.0, "Discount factor.")
    lam: float = option(0.95, "Lambda of generalized advantage estimation.")
    vf_coef: float = option(0.1, "Coefficient of the value loss.")
    cliprange_value: float = option(0.2, "Clip range of the value loss.")
    push_critic: bool = option(False, "Push the critic to the Hub, too.")

    def __post_init__(self) -> None:
        # TRL compares completions within groups, and rejects groups of one. Any divisor of the batch passes its checks.
        generations = self.num_generations
        if generations == 1:
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            batch = self.generation_batch_size or self.per_device_train_batch_size * steps
            self.num_generations = max(2, batch)

        super().__post_init__()
        self.num_generations = generations


def check(config: ShapedGRPOConfig, shape: ShapingPair | None) -> None:
    """Check the settings that this package adds, or that cannot be combined with a shape or a critic.

    :param config: settings
    :param shape: shape of the trainer, or None if it is not known yet
    :raises ValueError: if a setting is not allowed; the message says what is
    """
    # Settings of their own
    check_range("beta", config.beta, _NOT_NEGATIVE)
    check_range("missing_eos_penalty", config.missing_eos_penalty, _NOT_NEGATIVE)
    check_range("num_iterations", config.num_iterations, _COUNT)
    check_range("reward_timeout", config.reward_timeout, _POSITIVE)
    _check_choice(config, "kl_in", KL_PLACES)
    _check_choice(config, "importance_sampling_level", ("token", "sequence"))

    # TRL's default of beta is 0, so that the place alone would have no effect.
    if config.kl_in == "reward" and type(config).kl_in == "loss":
        check_range("beta", config.beta, _POSITIVE)

    has_critic = isinstance(config, ShapedPPOConfig)
    if has_critic:
        # TRL's losses that average over tokens, as a critic's loss does: per batch (PPO), or per update.
        _check_choice(config, "loss_type", ("bnpo", "dapo"), " with a critic")
        when = " with a critic, which does not normalize within groups"
        _check_choice(config, "scale_rewards", ("group", True), when)
        check_range("gamma", config.gamma, _FRACTION)
        check_range("lam", config.lam, _FRACTION)
        check_range("vf_coef", config.vf_coef, _NOT_NEGATIVE)
        check_range("cliprange_value", config.cliprange_value, _POSITIVE)

    kl_in_reward = config.kl_in == "reward" and config.beta != 0.0
    if kl_in_reward:
        when = " with kl_in='reward', because TRL hides truncated completions from the models, so that their KL would be 0"
        _check_choice(config, "mask_truncated_completions", (False,), when)

    # These are subtracted from the sum of the rewards.
    if kl_in_reward or config.missing_eos_penalty or has_critic:
        when = " with a critic, kl_in='reward' or missing_eos_penalty, because it would normalize rewards separately"
        _check_choice(config, "multi_objective_aggregation", ("sum_then_normalize",), when)

    # A critic's loss takes the place of TRL's clip, with PPO's shape, too.
    is_shaped = has_critic or (shape is not None and replaces_clip(shape))
    if config.beta != 0.0 and (kl_in_reward or is_shaped):
        when = " without shaping='ppo' and kl_in='loss', or with a critic: it weights the KL divergence by TRL's ratio"
        _check_choice(config, "use_bias_correction_kl", (False, None), when)

    # What else reads or clips the ratio
    if is_shaped:
        when = " with a shape; shaping='cispo' and shaping='sapo' are the objectives of those losses"
        _check_choice(config, "loss_type", LOSS_TYPES, when)
        when = " with a shape, because it is a second clip of the ratio, which shaping='two_sided_clip' has"
        _check_choice(config, "delta", (None,), when)
        when = " with a shape, because its mask depends on the advantages, which already contain the shape"
        _check_choice(config, "off_policy_mask_threshold", (None,), when)
        check_range("epsilon", config.epsilon, _POSITIVE)
        check_range("epsilon_high", config.epsilon_high, _POSITIVE)


def replaces_clip(shape: ShapingPair) -> bool:
    """Return whether a shape is another one than PPO's, which TRL's clip is.

    :param shape: shape of a trainer
    """
    return not (shape.f is ppo and shape.g is ppo)


def check_range(name: str, value: float | None, description: str) -> None:
    """Check a number; None stands for one that is not set.

    :param name: name of the number in messages
    :param value: number
    :param description: allowed numbers, a key of ``_RANGES``
    :raises ValueError: if the number is not allowed
    """
    if value is None:
        return

    # NaN is in no range.
    if not math.isfinite(value) or not _RANGES[description](value):
        raise ValueError(f"{name}={value} is not allowed; allowed are {description}")


def _check_choice(
    config: ShapedGRPOConfig,
    name: str,
    allowed: Collection[object],
    when: str = "",
) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed{when}; allowed are {', '.join(map(repr, allowed))}")
