"""Check arguments, environments and spaces; an error says in one line what is wrong and what is allowed."""

import math
import os
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

#: The action spaces that SB3's policies have a distribution for.
ACTION_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class _Rule(NamedTuple):
    """The types and the range of an argument. True and False do not count as numbers.

    :param types: allowed types; others raise TypeError
    :param accepts: function that tells whether a value of these types is in range; False raises ValueError
    :param allowed: description of the allowed values, for messages
    """

    types: tuple[type, ...]
    accepts: Callable[[Any], bool]
    allowed: str


def _number(accepts: Callable[[Any], bool], allowed: str) -> _Rule:
    return _Rule((Real,), accepts, allowed)


def _integer(low: int, high: float, allowed: str) -> _Rule:
    return _number(lambda value: isinstance(value, Integral) and low <= int(value) <= high, allowed)


def _optional(rule: _Rule) -> _Rule:
    return _Rule((*rule.types, NoneType), lambda value: value is None or rule.accepts(value), f"None and {rule.allowed}")


def _instance(allowed: str, *types: type) -> _Rule:
    return _Rule(types, lambda value: True, allowed)


_COUNT = _integer(1, math.inf, "positive integers")
_FRACTION = _number(lambda value: 0.0 <= value <= 1.0, "numbers from 0 to 1")
_POSITIVE = _number(lambda value: value > 0.0, "numbers above 0")
_FLAG = _instance("True and False", bool, np.bool_)
_DICT = _instance("dictionaries", Mapping)

#: Attributes of a model by name; those that an algorithm does not have are skipped.
_RULES: dict[str, _Rule] = {
    "policy_class": _instance("policy names and policy classes", Callable),  # type: ignore[arg-type]
    "n_steps": _COUNT,
    "batch_size": _COUNT,
    "n_epochs": _COUNT,
    "_stats_window_size": _COUNT,
    "gamma": _FRACTION,
    "gae_lambda": _FRACTION,
    "ent_coef": _number(math.isfinite, "finite numbers"),
    "vf_coef": _number(lambda value: 0.0 <= value < math.inf, "finite numbers from 0"),
    "max_grad_norm": _number(lambda value: value >= 0.0, "numbers from 0, inf for no clipping"),
    "target_kl": _optional(_POSITIVE),
    "sde_sample_freq": _integer(-1, math.inf, "integers from -1"),
    "seed": _optional(_integer(0, 2**32 - 1, "integers from 0 to 2**32 - 1")),
    "normalize_advantage": _FLAG,
    "use_sde": _FLAG,
    "check_finite": _FLAG,
    "policy_kwargs": _DICT,
    "rollout_buffer_kwargs": _DICT,
    "rollout_buffer_class": _optional(_instance("rollout buffer classes", Callable)),  # type: ignore[arg-type]
    "tensorboard_log": _optional(_instance("paths", str, os.PathLike)),
    "torch_compile": _Rule((bool, str), lambda value: value in (True, False, "auto"), "'auto', True and False"),
    "precision": _Rule((str,), lambda value: value in ("float32", "bfloat16"), "'float32' and 'bfloat16'"),
    "k": _POSITIVE,
    "omega1": _POSITIVE,
    "omega2": _POSITIVE,
    "max_epoch_kl": _optional(_POSITIVE),
}
_TOTAL_TIMESTEPS = _number(lambda value: value >= 0, "numbers from 0")


def require_arguments(model: Any) -> None:
    """Check the constructor arguments that a model keeps as attributes.

    :raises TypeError: if one is of the wrong type
    :raises ValueError: if one is out of range
    """
    for name, rule in _RULES.items():
        if name in vars(model):
            _require(name.lstrip("_"), vars(model)[name], rule)


def require_batches(model: Any) -> None:
    """Check that advantages can be normalized, and warn of a last minibatch that is smaller than the others.

    :raises ValueError: if a minibatch or rollout of one sample is to be normalized
    """
    if model.normalize_advantage and model.batch_size == 1:
        raise ValueError("batch_size=1 leaves nothing to normalize; allowed are 2 and more, or normalize_advantage=False")
    if model.env is None:
        return
    size = model.n_steps * model.n_envs
    if model.normalize_advantage and size == 1:
        raise ValueError(f"n_steps={model.n_steps} with one environment leaves nothing to normalize; allowed are 2 and more")
    if size % model.batch_size > 0:
        warnings.warn(
            f"batch_size={model.batch_size} does not divide the rollout of {size} samples (n_steps={model.n_steps} x "
            f"{model.n_envs} environments): each epoch ends with a minibatch of {size % model.batch_size}",
            stacklevel=3,
        )


def require_training(model: Any, total_timesteps: Any) -> None:
    """Check that a model has an environment, and the argument of ``learn``; warn if it is 0.

    :raises TypeError: if the argument is not a number
    :raises ValueError: if it is negative or NaN, or there is no environment
    """
    _require("total_timesteps", total_timesteps, _TOTAL_TIMESTEPS)
    if model.env is None:
        raise ValueError("there is no environment to train in; pass env= to load, or call set_env first")
    if total_timesteps == 0:
        warnings.warn("total_timesteps=0: callbacks and logger are set up, and nothing is trained", stacklevel=3)


def _require(name: str, value: Any, rule: _Rule) -> None:
    if not isinstance(value, rule.types) or (isinstance(value, bool) and bool not in rule.types):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; allowed are {rule.allowed}")
    if not rule.accepts(value):
        raise ValueError(f"{name}={value!r} is not allowed; allowed are {rule.allowed}")


def require_env(env: Any) -> None:
    """Check that an object is an environment whose spaces SB3's policies support.

    :raises TypeError: if it is not an environment
    :raises ValueError: if a space is not supported
    """
    # An environment of OpenAI Gym, which SB3 converts, is known by its method.
    if isinstance(env, type) or not hasattr(env, "step"):
        raise TypeError(
            f"env={env!r} is of type {type(env).__name__}, not an environment; allowed are a registered id, a Gymnasium "
            "environment, and a VecEnv"
        )
    if not isinstance(env, gym.Env | VecEnv):
        return
    space = env.observation_space
    for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else [("", space)]:
        if not _has_supported_values(part):
            where = f" {key!r}" if key else ""
            raise ValueError(
                f"env has the observation space{where} {_one_line(part)}, which is not supported; allowed are Box, Discrete "
                "and one-dimensional MultiDiscrete with start 0, MultiBinary, and a Dict of these"
            )
    space = env.action_space
    two_dimensional = isinstance(space, spaces.MultiBinary) and not isinstance(space.n, int)
    if not _has_supported_values(space) or two_dimensional:
        raise ValueError(
            f"env has the action space {_one_line(space)}, which is not supported; allowed are Box, Discrete and "
            "one-dimensional MultiDiscrete with start 0, and one-dimensional MultiBinary"
        )
    if isinstance(space, spaces.Box) and not np.isfinite([space.low, space.high]).all():
        raise ValueError(f"env has the unbounded action space {_one_line(space)}; allowed are Box spaces with finite bounds")


def _has_supported_values(space: spaces.Space) -> bool:
    """Tell whether SB3 represents the values of a space; it counts discrete values from 0."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ndim == 1 and not space.start.any()
    if isinstance(space, spaces.Discrete):
        return bool(space.start == 0)
    return isinstance(space, ACTION_SPACES)


def _one_line(space: spaces.Space) -> str:
    return " ".join(str(space).split())
