"""Search spaces of this package's algorithms."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import optuna
from rl_zoo3.hyperparams_opt import HYPERPARAMS_SAMPLER
from torch import nn

from sb3_ano._registry import ALGORITHMS
from sb3_ano.zoo.hyperparameters import Hyperparameters

#: Samples per rollout, over all environments.
MIN_ROLLOUT = 256
MAX_ROLLOUT = 16_384
#: A trial's budget holds at least this many of the largest rollouts. Otherwise an agent could be evaluated untrained.
MIN_UPDATES = 8
#: Samples per minibatch.
MIN_BATCH = 32

_NETWORKS = {"tiny": [64], "small": [64, 64], "medium": [256, 256]}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}

# Hyperparameter: the parameters that decide about it, each a range of integers, the bounds of a log-uniform float, or a list
# of choices. A discount factor is searched as its distance from 1, on which the horizon depends.
_SHARED: dict[str, dict[str, Any]] = {
    "batch_size": {"n_minibatches_pow": range(6)},
    "learning_rate": {"learning_rate": (1e-5, 5e-3), "lr_schedule": ["constant", "linear"]},
    "n_epochs": {"n_epochs": [2, 5, 10, 20]},
    "gamma": {"one_minus_gamma": (1e-4, 0.1)},
    "gae_lambda": {"one_minus_gae_lambda": (1e-3, 0.3)},
    "ent_coef": {"ent_coef": (1e-8, 0.1)},
    "max_grad_norm": {"max_grad_norm": (0.3, 2.0)},
    "clip_range": {"clip_range": (0.05, 2.0)},
    "clip_range_high": {"clip_range_high_factor": [None, 0.7, 1.4, 2.0]},  # None: symmetric
    "policy_kwargs": {"net_arch": list(_NETWORKS), "activation_fn": list(_ACTIVATIONS)},
}


def register_search_spaces() -> None:
    """Add this package's algorithms to RL Zoo's samplers; entries that exist stay."""
    for algo in ALGORITHMS:
        HYPERPARAMS_SAMPLER.setdefault(algo, functools.partial(sample_params, algo))


def sample_params(
    algo: str, trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: Mapping[str, Any]
) -> Hyperparameters:
    """Sample hyperparameters of one of this package's algorithms.

    With the first argument bound, this is a function of RL Zoo's ``HYPERPARAMS_SAMPLER``.

    :param algo: RL Zoo's name of the algorithm
    :param trial: trial that stores the sampled parameters
    :param n_actions: size of the action space; not used
    :param n_envs: number of environments
    :param additional_args: ``fixed``, a mapping of the hyperparameters that are not searched, and ``n_timesteps``, the budget
        of a trial; both are optional
    :return: sampled hyperparameters in RL Zoo's format
    """
    fixed = additional_args.get("fixed", {})
    budget = additional_args.get("n_timesteps", MIN_UPDATES * MAX_ROLLOUT)
    largest = min(MAX_ROLLOUT, budget // MIN_UPDATES)
    # At least 8 steps: with many environments, advantages would hardly look ahead.
    shortest = max(3, math.ceil(math.log2(MIN_ROLLOUT / n_envs)))
    longest = max(shortest, math.floor(math.log2(max(largest / n_envs, 1.0))))

    # The number of minibatches is converted with the number of steps, which thus comes first.
    space: dict[str, dict[str, Any]] = {"n_steps": {"n_steps_pow": range(shortest, longest + 1)}, **_SHARED}
    for name, values in ALGORITHMS[algo].search_space.items():
        space[name] = {name: values}
    if "clip_range" in fixed:
        del space["clip_range_high"]  # a multiple of it
    has_schedule = isinstance(fixed.get("clip_range"), str) or isinstance(fixed.get("clip_range_high"), str)
    if has_schedule:
        space.pop("desired_kl", None)  # no target goes with a schedule

    params = {}
    if "n_steps" in fixed:
        params["n_steps"] = fixed["n_steps"]
    for hyperparameter, parameters in space.items():
        if hyperparameter in fixed:
            continue
        for name, values in parameters.items():
            params[name] = _suggest(trial, name, values)
    return convert_params(params, n_envs)


def convert_params(params: Hyperparameters, n_envs: int) -> Hyperparameters:
    """Convert the parameters of a trial to hyperparameters in RL Zoo's format.

    :param params: values by the names under which the trial stores them, and ``n_steps`` if it is not searched
    :param n_envs: number of environments
    """
    converted = dict(params)
    if "n_steps_pow" in params:
        converted["n_steps"] = 2 ** converted.pop("n_steps_pow")
    if "n_minibatches_pow" in params:
        n_minibatches = 2 ** converted.pop("n_minibatches_pow")
        converted["batch_size"] = _batch_size(converted["n_steps"] * n_envs, n_minibatches)
    for name in ("gamma", "gae_lambda"):
        if f"one_minus_{name}" in params:
            converted[name] = 1.0 - converted.pop(f"one_minus_{name}")
    if converted.pop("lr_schedule", "constant") == "linear":
        converted["learning_rate"] = f"lin_{converted['learning_rate']!r}"

    if "clip_range_high_factor" in params:
        factor = converted.pop("clip_range_high_factor")
        converted["clip_range_high"] = None
        if factor is not None:
            converted["clip_range_high"] = factor * converted["clip_range"]
    if "net_arch" in params:
        layers = _NETWORKS[converted.pop("net_arch")]
        converted["policy_kwargs"] = {
            "net_arch": {"pi": list(layers), "vf": list(layers)},
            "activation_fn": _ACTIVATIONS[converted.pop("activation_fn")],
        }
    return converted


def _suggest(trial: optuna.Trial, name: str, values: range | tuple[float, float] | list[Any]) -> Any:
    if isinstance(values, range):
        return trial.suggest_int(name, values[0], values[-1])
    if isinstance(values, tuple):
        return trial.suggest_float(name, *values, log=True)
    return trial.suggest_categorical(name, values)


def _batch_size(rollout: int, n_minibatches: int) -> int:
    """Return the size of equal minibatches, fewer than asked for if they would be too small or unequal."""
    while n_minibatches > 1:
        size = rollout // n_minibatches
        if rollout % n_minibatches == 0 and size >= MIN_BATCH:
            return size
        n_minibatches //= 2
    return rollout
