"""Check the names and values of arguments, environments and spaces."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._system import warn_user
from sb3_ano.extras import hint


class NamedArguments:
    """Name the class, and the most similar argument, if a constructor gets a keyword argument that it does not have.

    Python's own message names the base class whose constructor it is, and suggests nothing before Python 3.13. Type checkers
    and ``inspect.signature`` look at the constructors, which subclasses define.
    """

    def __new__(cls, *positional: object, **keywords: object) -> Self:
        # A model that is copied or unpickled gets no keyword arguments.
        if keywords:
            # Of this class, not of the base class whose constructor would raise.
            parameters = inspect.signature(cls.__init__).parameters
            takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            if not takes_others:
                require_known(cls.__name__, keywords, list(parameters)[1:])

        return super().__new__(cls)


def require_known(function: str, names: Iterable[str], allowed: Collection[str]) -> None:
    """Check the names of keyword arguments.

    :param function: name of the class or function that is called, for the message
    :param names: names to check
    :param allowed: names of the function's arguments
    :raises TypeError: for the first unknown name; the message suggests an argument with a similar spelling
    """
    for name in names:
        if name not in allowed:
            similar = hint(name, allowed) or f"; allowed are {', '.join(allowed)}"
            raise TypeError(f"{function} got an unexpected keyword argument {name!r}{similar}")


class _Rule(NamedTuple):
    """The types and the range of an argument. True and False do not count as numbers.

    :param types: allowed types; others raise TypeError
    :param allowed: description of the allowed values, for messages
    :param accepts: function that tells whether a value of these types is in range; False raises ValueError
    """

    types: tuple[type, ...]
    allowed: str
    accepts: Callable[[Any], bool] = lambda value: True


def _integer(low: int, allowed: str, high: float = math.inf) -> _Rule:
    # Any number has an allowed type, so that 2.5 raises ValueError, not TypeError. NumPy's integers count.
    def accepts(value: Real) -> bool:
        return isinstance(value, Integral) and low <= int(value) <= high

    return _Rule((Real,), allowed, accepts)


def _optional(rule: _Rule) -> _Rule:
    def accepts(value: object) -> bool:
        return value is None or rule.accepts(value)

    types = (*rule.types, NoneType)
    return _Rule(types, f"None and {rule.allowed}", accepts)


_POSITIVE = _Rule((Real,), "numbers above 0", lambda value: value > 0.0)

# A table, because loading and changing an attribute have to be checked as the constructor is, and messages are then alike.
#: Rules of the attributes of a model; those that an algorithm does not have are skipped.
_RULES: dict[tuple[str, ...], _Rule] = {
    ("n_steps", "batch_size", "n_epochs", "_stats_window_size"): _integer(1, "positive integers"),
    ("sde_sample_freq",): _integer(-1, "integers from -1"),
    ("seed",): _optional(_integer(0, "integers from 0 to 2**32 - 1", 2**32 - 1)),
    ("gamma", "gae_lambda"): _Rule((Real,), "numbers from 0 to 1", lambda value: 0.0 <= value <= 1.0),
    ("ent_coef",): _Rule((Real,), "finite numbers", math.isfinite),
    ("vf_coef",): _Rule((Real,), "finite numbers from 0", lambda value: 0.0 <= value < math.inf),
    ("max_grad_norm",): _Rule((Real,), "numbers from 0, inf for no clipping", lambda value: value >= 0.0),
    ("k", "omega1", "omega2"): _POSITIVE,
    ("target_kl", "max_epoch_kl"): _optional(_POSITIVE),
    ("normalize_advantage", "use_sde", "check_finite"): _Rule((bool, np.bool_), "True and False"),
    ("torch_compile",): _Rule((bool, str), "'auto', True and False", lambda value: value in (True, False, "auto")),
    ("precision",): _Rule((str,), "'float32' and 'bfloat16'", lambda value: value in ("float32", "bfloat16")),
    ("rollout_buffer_class",): _optional(_Rule((Callable,), "rollout buffer classes")),  # type: ignore[arg-type]
}


def require_arguments(model: object) -> None:
    """Check the constructor arguments that a model keeps as attributes.

    :raises TypeError: if one is of the wrong type
    :raises ValueError: if one is out of range
    """
    attributes = vars(model)
    for names, rule in _RULES.items():
        for attribute in names:
            if attribute not in attributes:
                continue

            # SB3 keeps stats_window_size in a private attribute.
            name = attribute.lstrip("_")
            value = attributes[attribute]
            # bool is a subclass of int.
            is_stray_bool = isinstance(value, bool) and bool not in rule.types
            if not isinstance(value, rule.types) or is_stray_bool:
                raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; allowed are {rule.allowed}")
            if not rule.accepts(value):
                raise ValueError(f"{name}={value!r} is not allowed; allowed are {rule.allowed}")


def require_batches(model: Any) -> None:
    """Check that advantages can be normalized, and warn of a last minibatch that is smaller than the others.

    :raises ValueError: if minibatches of one sample are to be normalized
    """
    # SB3's PPO checks this with an assert, in a constructor that does not run here.
    size = model.n_steps * model.n_envs
    if model.normalize_advantage and min(model.batch_size, size) == 1:
        raise ValueError(
            f"batch_size={model.batch_size} with a rollout of {size} samples (n_steps={model.n_steps}) leaves nothing to "
            "normalize; allowed are 2 and more, or normalize_advantage=False"
        )

    # SB3 loads models without an environment.
    if model.env is not None and size % model.batch_size > 0:
        warn_user(
            f"batch_size={model.batch_size} does not divide the rollout of {size} samples (n_steps={model.n_steps} x "
            f"{model.n_envs} environments): each epoch ends with a minibatch of {size % model.batch_size}"
        )


def require_env(env: gym.Env | VecEnv) -> None:
    """Check what SB3 does not about the spaces of an environment: it counts discrete values from 0.

    :raises ValueError: if a space is not supported
    """
    parts = [env.observation_space]
    if isinstance(env.observation_space, spaces.Dict):
        parts = list(env.observation_space.values())

    for space in (env.action_space, *parts):
        # A number, or one for each dimension of a MultiDiscrete space. Other spaces have none.
        start = np.asarray(getattr(space, "start", 0))
        if start.ndim > 1 or start.any():
            raise ValueError(
                f"env has the space {space}, which is not supported; allowed are one-dimensional discrete spaces with start 0"
            )
