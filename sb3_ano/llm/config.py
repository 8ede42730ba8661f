"""Settings of the trainers: TRL's, plus how the ratio is shaped."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from sb3_ano.shaping import resolve

#: TRL's losses that are made of a clipped ratio, which is what a shape replaces.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
#: Where the KL divergence from the reference model is paid for.
KL_PLACES = ("loss", "reward")


@dataclass
class ShapedGRPOConfig(GRPOConfig):
    """Extend TRL's ``GRPOConfig`` by a shaping function, which replaces the clip of the ratio.

    ``epsilon`` and ``epsilon_high`` are the radii for negative and positive advantages. ``use_bias_correction_kl`` is off,
    unlike in TRL, because it weights the KL divergence by the ratio that the shape replaces.

    :param shaping: name of a shape, or ``"module:function"``; the trainer also takes a callable
    :param kl_in: ``"loss"`` (TRL's way), or ``"reward"``: ``beta`` times the sum of ``log pi_old - log pi_ref`` over a
        completion is subtracted from its reward, before rewards are normalized within their group
    :raises ValueError: if a setting is invalid, or cannot be combined with a shape
    """

    shaping: str = field(default="ano", metadata={"help": "Shape: ano, spo, ppo, identity, or module:function."})
    kl_in: str = field(
        default="loss",
        metadata={"choices": KL_PLACES, "help": "Place of beta * KL; 'reward' is before the normalization in groups."},
    )
    epsilon: float = field(default=0.2, metadata={"help": "Radius of the shape for negative advantages."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Radius of the shape for positive advantages; epsilon by default."}
    )
    use_bias_correction_kl: bool = field(
        default=False, metadata={"help": "Weight the KL divergence by the ratio; impossible with kl_in='loss'."}
    )

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()


@dataclass
class GANOConfig(ShapedGRPOConfig):
    """Hold the settings of GANO, with 64 completions per update.

    Shape, radius, group size, iterations, batch, learning rate and schedule are the paper's (Section 5.2 and its table of
    hyperparameters). The place of the KL divergence, ``beta``, temperature and length are those of the official code.
    """

    learning_rate: float = field(default=3e-6, metadata={"help": "The initial learning rate for AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Completions per device and forward pass."})
    gradient_accumulation_steps: int = field(default=4, metadata={"help": "Forward passes per update."})
    num_generations: int | None = field(default=4, metadata={"help": "Completions per prompt (G)."})
    num_iterations: int = field(default=3, metadata={"help": "Updates with the same completions."})
    max_completion_length: int | None = field(default=53, metadata={"help": "Maximum number of tokens of a completion."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL divergence from the reference model."})
    kl_in: str = field(default="reward", metadata=ShapedGRPOConfig.__dataclass_fields__["kl_in"].metadata)
    loss_type: str = field(default="grpo", metadata={"help": f"One of {', '.join(LOSS_TYPES)}."})


def _check(config: ShapedGRPOConfig) -> None:
    resolve(config.shaping)
    for name, allowed in (("loss_type", LOSS_TYPES), ("kl_in", KL_PLACES)):
        if getattr(config, name) not in allowed:
            options = ", ".join(map(repr, allowed))
            raise ValueError(f"{name}={getattr(config, name)!r} is not allowed with a shape; allowed are {options}")
    for name in ("epsilon", "epsilon_high"):
        radius = getattr(config, name)
        if radius is not None and not (math.isfinite(radius) and radius > 0):
            raise ValueError(f"{name}={radius} is not a radius; allowed are positive finite numbers")
    if not (math.isfinite(config.beta) and config.beta >= 0):
        raise ValueError(f"beta={config.beta} is not allowed; allowed are finite numbers from 0")
    if config.num_iterations < 1:
        raise ValueError(f"num_iterations={config.num_iterations} is not allowed; allowed are positive integers")
    # These act on TRL's ratio or on the sign of the advantage, where the trainer has put the shaped objective.
    for name, reason in (
        ("delta", "the shape replaces the clip of the ratio, and delta is a second one"),
        ("off_policy_mask_threshold", "its mask depends on the advantages, which already contain the shape"),
    ):
        if (value := getattr(config, name)) is not None:
            raise ValueError(f"{name}={value} is not allowed with a shape: {reason}; allowed is None")
    if config.use_bias_correction_kl and config.beta != 0.0 and config.kl_in == "loss":
        raise ValueError(
            "use_bias_correction_kl=True is not allowed with a shape: it weights the KL divergence by the ratio that the "
            "shape replaces; allowed is False, or kl_in='reward'"
        )
    if config.kl_in == "reward" and config.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={config.multi_objective_aggregation!r} is not allowed with kl_in='reward': it would "
            "normalize the KL divergence separately; allowed is 'sum_then_normalize'"
        )
