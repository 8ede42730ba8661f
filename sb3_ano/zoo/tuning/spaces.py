"""The search spaces of ANO, SPO and PAPO, and the way back from a trial's parameters to hyperparameters."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sb3_ano.extras import missing_extra

try:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager
    from torch import nn
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

#: Samples of a rollout, over all environments.
MIN_ROLLOUT, MAX_ROLLOUT = 256, 16_384
#: A trial's budget holds at least so many of the largest rollouts, so that what is evaluated was trained.
MIN_UPDATES = 8
#: Samples of a minibatch.
MIN_BATCH = 32

_NETWORKS = {"tiny": [64], "small": [64, 64], "medium": [256, 256]}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}

Sampler = Callable[[optuna.Trial, int, int, dict[str, Any]], dict[str, Any]]


def search_space_sampler(algo: str) -> Sampler:
    """The sampler of ``ano``, ``spo`` or ``papo``, as the zoo's ``HYPERPARAMS_SAMPLER`` has them.

    It returns arguments of the constructor. Of its last argument it reads ``fixed``, a mapping of hyperparameters that are
    not searched, and ``n_timesteps``, the budget of a trial; both may be missing.
    """

    def sample(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
        fixed = additional_args.get("fixed", {})
        _suggest_rollout(trial, n_envs, fixed, additional_args.get("n_timesteps"))
        _suggest_optimization(trial, fixed)
        _suggest_surrogate(trial, algo, fixed)
        if "policy_kwargs" not in fixed:
            trial.suggest_categorical("net_arch", list(_NETWORKS))
            trial.suggest_categorical("activation_fn", list(_ACTIVATIONS))
        hyperparameters = convert_params(trial.params)
        del hyperparameters["n_envs"]
        return ExperimentManager._preprocess_schedules(hyperparameters)

    return sample


def convert_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters, in the zoo's format, of the parameters that a trial's study stores.

    ``n_envs`` is among them, since rollouts and minibatches are divided over the environments.

    :param params: ``trial.params``
    """
    derived = {
        "n_steps_pow",
        "n_minibatches_pow",
        "one_minus_gamma",
        "one_minus_gae_lambda",
        "lr_schedule",
        "clip_range_high_factor",
        "net_arch",
        "activation_fn",
    }
    hyperparameters = {name: value for name, value in params.items() if name not in derived}
    if "n_steps_pow" in params:
        hyperparameters["n_steps"] = 2 ** params["n_steps_pow"]
    if "n_minibatches_pow" in params:
        rollout = hyperparameters["n_steps"] * params["n_envs"]
        hyperparameters["batch_size"] = _batch_size(rollout, 2 ** params["n_minibatches_pow"])
    for name in ("gamma", "gae_lambda"):
        if f"one_minus_{name}" in params:
            hyperparameters[name] = 1.0 - params[f"one_minus_{name}"]
    if params.get("lr_schedule") == "linear":
        hyperparameters["learning_rate"] = f"lin_{params['learning_rate']!r}"
    if "clip_range_high_factor" in params:
        factor = params["clip_range_high_factor"]
        hyperparameters["clip_range_high"] = None if factor is None else factor * params["clip_range"]
    if "net_arch" in params:
        layers = _NETWORKS[params["net_arch"]]
        hyperparameters["policy_kwargs"] = {
            "net_arch": {"pi": list(layers), "vf": list(layers)},
            "activation_fn": _ACTIVATIONS[params["activation_fn"]],
        }
    return hyperparameters


def _suggest_rollout(trial: optuna.Trial, n_envs: int, fixed: Mapping[str, Any], n_timesteps: int | None) -> None:
    # A distribution of one value: stored with the trial, and no dimension of the search.
    trial.suggest_int("n_envs", n_envs, n_envs)
    if "n_steps" in fixed:
        trial.suggest_int("n_steps", fixed["n_steps"], fixed["n_steps"])
    else:
        trial.suggest_int("n_steps_pow", *_n_steps_pow_range(n_envs, n_timesteps))
    if "batch_size" not in fixed:
        trial.suggest_int("n_minibatches_pow", 0, 5)


def _n_steps_pow_range(n_envs: int, n_timesteps: int | None) -> tuple[int, int]:
    largest = MAX_ROLLOUT if n_timesteps is None else min(MAX_ROLLOUT, n_timesteps // MIN_UPDATES)
    # At least 8 steps, or advantages would hardly look ahead with many environments.
    low = max(3, math.ceil(math.log2(MIN_ROLLOUT / n_envs)))
    high = math.floor(math.log2(max(largest / n_envs, 1.0)))
    return low, max(low, high)


def _batch_size(rollout: int, n_minibatches: int) -> int:
    """Samples of a minibatch where ``n_minibatches``, or the next smaller power of two, divide the rollout."""
    while n_minibatches > 1 and (rollout % n_minibatches or rollout // n_minibatches < MIN_BATCH):
        n_minibatches //= 2
    return rollout // n_minibatches


def _suggest_optimization(trial: optuna.Trial, fixed: Collection[str]) -> None:
    if "learning_rate" not in fixed:
        trial.suggest_float("learning_rate", 1e-5, 5e-3, log=True)
        trial.suggest_categorical("lr_schedule", ["constant", "linear"])
    if "n_epochs" not in fixed:
        trial.suggest_categorical("n_epochs", [2, 5, 10, 20])
    if "gamma" not in fixed:
        trial.suggest_float("one_minus_gamma", 1e-4, 0.1, log=True)
    if "gae_lambda" not in fixed:
        trial.suggest_float("one_minus_gae_lambda", 1e-3, 0.3, log=True)
    if "ent_coef" not in fixed:
        trial.suggest_float("ent_coef", 1e-8, 0.1, log=True)
    if "max_grad_norm" not in fixed:
        trial.suggest_float("max_grad_norm", 0.3, 2.0)


def _suggest_surrogate(trial: optuna.Trial, algo: str, fixed: Collection[str]) -> None:
    if "clip_range" not in fixed:
        trial.suggest_float("clip_range", 0.05, 0.6, log=True)
        if "clip_range_high" not in fixed:
            # None is the symmetric region.
            trial.suggest_categorical("clip_range_high_factor", [None, 0.7, 1.4, 2.0])
    if algo == "ano" and "shaping" not in fixed:
        trial.suggest_categorical("shaping", ["ano", "spo", "ppo"])
    if algo == "papo":
        for name, low, high in (("k", 1.0, 20.0), ("omega1", 5e-4, 0.05), ("omega2", 5e-4, 0.05)):
            if name not in fixed:
                trial.suggest_float(name, low, high, log=True)
        if "max_epoch_kl" not in fixed:
            trial.suggest_categorical("max_epoch_kl", [0.02, 0.05, 0.1, None])
