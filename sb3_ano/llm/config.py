"""Settings of the trainers: TRL's, and how the ratio is shaped."""

import math
from dataclasses import dataclass, field

from sb3_ano.extras import missing_extra
from sb3_ano.llm.objective import DUALS
from sb3_ano.shaping import resolve

try:
    from trl import GRPOConfig
except ImportError as error:
    raise missing_extra("llm", error.name or "trl") from error

#: The losses of TRL that are made of a clipped ratio, which is what a shape replaces.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
#: Where the divergence from the reference model is paid for.
KL_PLACES = ("loss", "reward")


@dataclass
class ShapedGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig``, with a shaping function in place of the clip of the ratio.

    ``epsilon`` and ``epsilon_high`` are the radii for negative and positive advantages. ``use_bias_correction_kl`` is off,
    where TRL's is on, because it weights the KL divergence by the ratio that the shape replaces.

    :param shaping: name of a shape, or ``"module:function"``; a callable is given to the trainer
    :param kl_in: ``"loss"``, as TRL does it, or ``"reward"``: each completion's reward is lowered by ``beta`` times the sum of
        ``log pi_old - log pi_ref`` over its tokens, before rewards are normalised within their group
    :param dual: ``"paper"``, or ``"official_rlhf"`` for the sign error of the official trainers, for comparison
    :raises ValueError: if a setting is not allowed, or cannot be honoured together with a shape
    """

    shaping: str = field(default="ano", metadata={"help": "ano, spo, ppo, identity, or module:function for one of your own."})
    kl_in: str = field(
        default="loss",
        metadata={"help": "Where beta * KL goes: 'loss', or 'reward' (before rewards are normalised within their group)."},
    )
    dual: str = field(
        default="paper",
        metadata={"help": "'paper', or 'official_rlhf' to reproduce the official trainers where advantages are negative."},
    )
    use_bias_correction_kl: bool = field(
        default=False, metadata={"help": "Weight the KL divergence by the ratio; not possible with kl_in='loss'."}
    )

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()


@dataclass
class GANOConfig(ShapedGRPOConfig):
    """The settings of the paper's GANO (Section 5.2 and its table of hyperparameters), for 64 completions an update."""

    learning_rate: float = field(default=3e-6, metadata={"help": "The initial learning rate for AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "The scheduler of the learning rate."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Completions a device and forward pass."})
    gradient_accumulation_steps: int = field(default=4, metadata={"help": "Forward passes an update."})
    num_generations: int | None = field(default=4, metadata={"help": "Completions a prompt (G)."})
    num_iterations: int = field(default=3, metadata={"help": "Updates with the same completions."})
    max_completion_length: int | None = field(default=53, metadata={"help": "Most tokens of a completion."})
    temperature: float = field(default=0.7, metadata={"help": "Temperature of sampling."})
    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL divergence from the reference model."})
    kl_in: str = field(default="reward", metadata={"help": "Where beta * KL goes: 'loss' or 'reward'."})
    loss_type: str = field(default="grpo", metadata={"help": f"One of {', '.join(LOSS_TYPES)}."})


def _check(config: ShapedGRPOConfig) -> None:
    resolve(config.shaping)
    for name, value, allowed in (
        ("loss_type", config.loss_type, LOSS_TYPES),
        ("kl_in", config.kl_in, KL_PLACES),
        ("dual", config.dual, DUALS),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not allowed with a shape; allowed are {', '.join(map(repr, allowed))}")
    for name, radius in (("epsilon", config.epsilon), ("epsilon_high", config.epsilon_high)):
        if radius is not None and not (math.isfinite(radius) and radius > 0):
            raise ValueError(f"{name}={radius} is not a radius; allowed are finite numbers above 0")
    if not (math.isfinite(config.beta) and config.beta >= 0):
        raise ValueError(f"beta={config.beta} is not allowed; allowed are finite numbers from 0")
    _refuse_what_the_shape_overrides(config)
    if config.kl_in == "reward" and config.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={config.multi_objective_aggregation!r} is not allowed with kl_in='reward', because "
            "it would normalise the KL divergence on its own; allowed is 'sum_then_normalize'"
        )


def _refuse_what_the_shape_overrides(config: ShapedGRPOConfig) -> None:
    """Settings that act on TRL's own ratio or on the sign of the advantage, where the trainer has put the shaped objective."""
    for name, unset, why in (
        ("delta", None, "the shape replaces the clip of the ratio, and delta is a second one"),
        ("off_policy_mask_threshold", None, "its mask looks at the advantages, which the shape has been applied to"),
    ):
        value = getattr(config, name)
        if value is not unset:
            raise ValueError(f"{name}={value} is not allowed with a shape: {why}; allowed is {unset}")
    if config.use_bias_correction_kl and config.beta != 0.0 and config.kl_in == "loss":
        raise ValueError(
            "use_bias_correction_kl=True is not allowed with a shape: it weights the KL divergence by the ratio that the "
            "shape replaces; allowed is False, or kl_in='reward'"
        )
