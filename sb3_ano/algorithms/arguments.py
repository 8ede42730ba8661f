"""The constructor's arguments that ANO, SPO and PAPO share with SB3's PPO, written once."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import Schedule


class PPOArguments(TypedDict, total=False):
    """Types of PPO's arguments after policy and environment, for type checkers and editors."""

    learning_rate: float | Schedule
    n_steps: int
    batch_size: int
    n_epochs: int
    gamma: float
    gae_lambda: float
    clip_range: float | Schedule
    clip_range_vf: float | Schedule | None
    normalize_advantage: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    use_sde: bool
    sde_sample_freq: int
    rollout_buffer_class: type[RolloutBuffer] | None
    rollout_buffer_kwargs: dict[str, Any] | None
    target_kl: float | None
    stats_window_size: int
    tensorboard_log: str | None
    policy_kwargs: dict[str, Any] | None
    verbose: int
    seed: int | None
    device: torch.device | str
    _init_setup_model: bool


class Arguments(PPOArguments, total=False):
    """The same for the arguments that ANO, SPO and PAPO share."""

    clip_range_high: float | str | Schedule | None
    torch_compile: bool | Literal["auto"]
    precision: Literal["float32", "bfloat16"]
    desired_kl: float | str | Schedule | None
    check_finite: bool


def bound_arguments(base: type, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a constructor by name, defaults included, without ``self``.

    :param base: class of the constructor
    """
    bound = inspect.signature(base.__init__).bind(*args, **kwargs)  # type: ignore[misc]
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def inherit_signature(base: type, without: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a constructor that takes ``*args`` and ``**kwargs`` a full signature, and check calls against it.

    The RL Zoo, the Hub's loader and ``help`` read the signature.

    :param base: class whose constructor takes the arguments besides the constructor's own, which are keyword-only
    :param without: argument of the base class that the constructor does not take
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        inherited = list(inspect.signature(base.__init__).parameters.values())  # type: ignore[misc]
        kinds = inspect.Parameter
        own = [parameter for parameter in inspect.signature(init).parameters.values() if parameter.kind is kinds.KEYWORD_ONLY]
        positional = [parameter for parameter in inherited if parameter.kind is not kinds.KEYWORD_ONLY]
        keywords = [parameter for parameter in inherited[len(positional) :] if parameter.name != without]
        signature = inspect.Signature([*positional, *own, *keywords])

        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            signature.bind(*args, **kwargs)
            init(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate
