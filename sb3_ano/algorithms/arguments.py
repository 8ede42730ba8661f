"""Check arguments, environments and spaces, and give constructors the signature of SB3's PPO."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces


def inherit_signature(
    base: type, without: str = "", positional: type | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a constructor the arguments of a base class in addition to its own, which are keyword-only.

    A call is checked against the whole signature, and the constructor gets all arguments by name, defaults included. The RL
    Zoo, the Hub's loader and ``help`` read the signature.

    :param base: class whose constructor takes the other arguments
    :param without: argument of the base class that the constructor does not take
    :param positional: class whose constructor's positional arguments replace those of the base class, in order and defaults
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        inherited = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        first = inspect.signature((positional or base).__init__).parameters.values()  # type: ignore[misc]
        ordered = [parameter for parameter in first if parameter.kind is not parameter.KEYWORD_ONLY]
        keywords = [
            parameter
            for parameter in (*inspect.signature(init).parameters.values(), *inherited)
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != without
        ]
        signature = inspect.Signature([*ordered, *keywords])

        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            init(**call.arguments)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


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
    return _Rule((Real,), allowed, lambda value: isinstance(value, Integral) and low <= int(value) <= high)


def _optional(rule: _Rule) -> _Rule:
    return _Rule((*rule.types, NoneType), f"None and {rule.allowed}", lambda value: value is None or rule.accepts(value))


_POSITIVE = _Rule((Real,), "numbers above 0", lambda value: value > 0.0)

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


def require_arguments(model: Any) -> None:
    """Check the constructor arguments that a model keeps as attributes.

    :raises TypeError: if one is of the wrong type
    :raises ValueError: if one is out of range
    """
    present = [(name, rule) for names, rule in _RULES.items() for name in names if name in vars(model)]
    for attribute, rule in present:
        name, value = attribute.lstrip("_"), vars(model)[attribute]
        if not isinstance(value, rule.types) or (isinstance(value, bool) and bool not in rule.types):
            raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; allowed are {rule.allowed}")
        if not rule.accepts(value):
            raise ValueError(f"{name}={value!r} is not allowed; allowed are {rule.allowed}")


def require_batches(model: Any) -> None:
    """Check that advantages can be normalized, and warn of a last minibatch that is smaller than the others.

    :raises ValueError: if minibatches of one sample are to be normalized
    """
    size = model.n_steps * model.n_envs
    if model.normalize_advantage and min(model.batch_size, size) == 1:
        raise ValueError(
            f"batch_size={model.batch_size} with a rollout of {size} samples (n_steps={model.n_steps}) leaves nothing to "
            "normalize; allowed are 2 and more, or normalize_advantage=False"
        )
    if model.env is not None and size % model.batch_size > 0:
        warnings.warn(
            f"batch_size={model.batch_size} does not divide the rollout of {size} samples (n_steps={model.n_steps} x "
            f"{model.n_envs} environments): each epoch ends with a minibatch of {size % model.batch_size}",
            stacklevel=3,
        )


def require_env(env: Any) -> None:
    """Check what SB3 does not about the spaces of an environment: it counts discrete values from 0.

    :raises ValueError: if a space is not supported
    """
    parts = env.observation_space.values() if isinstance(env.observation_space, spaces.Dict) else [env.observation_space]
    for space in (env.action_space, *parts):
        start = np.asarray(getattr(space, "start", 0))
        if start.ndim > 1 or start.any():
            raise ValueError(
                f"env has the space {space}, which is not supported; allowed are one-dimensional discrete spaces with start 0"
            )
