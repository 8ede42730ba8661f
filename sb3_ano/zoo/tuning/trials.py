"""A trial: training with sampled hyperparameters as ``train`` would, and the return that comes out."""

import copy
import math
import os
from collections.abc import Mapping
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.tuning.seeding import trial_seed

try:
    import optuna
    from rl_zoo3.callbacks import TrialEvalCallback
    from rl_zoo3.exp_manager import ExperimentManager
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
    from rl_zoo3.utils import ALGOS, get_callback_list
    from stable_baselines3.common.callbacks import BaseCallback, ProgressBarCallback
    from torch import nn
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

#: Attribute of a trial: everything that it was trained with, in the zoo's format.
HYPERPARAMETERS = "hyperparameters"


def run_trial(manager: ExperimentManager, base: Mapping[str, Any], trial: optuna.Trial) -> float:
    """Train one agent and evaluate it on the way, as often as the pruner is asked.

    Hyperparameters pass through the same code of the zoo as in a training from a file, so that the best trial's agent can be
    trained again. Whatever ``-params`` sets is not searched.

    :param manager: a manager that was set up for a search
    :param base: the hyperparameters in which the sampled ones are put, in the zoo's format
    :param trial: the trial, which gets all of its hyperparameters as an attribute
    :return: mean return of the last evaluation
    :raises optuna.TrialPruned: if the pruner stops the trial, or its numbers leave what is finite
    """
    experiment = copy.copy(manager)
    experiment.verbose = manager.verbose if manager.verbose >= 2 else 0
    hyperparameters = _sample(experiment, base, trial)
    trial.set_user_attr(HYPERPARAMETERS, hyperparameters)

    experiment.normalize_kwargs = {}  # is filled with the trial's discount factor
    arguments, experiment.env_wrapper, _, experiment.vec_env_wrapper = experiment._preprocess_hyperparams(
        copy.deepcopy(hyperparameters)
    )
    if manager._eval_env_kwargs_args is None:
        experiment.eval_env_kwargs = experiment.env_kwargs
    env = experiment.create_envs(experiment.n_envs, no_log=True)
    eval_env = experiment.create_envs(experiment.n_eval_envs, eval_env=True)
    try:
        model = ALGOS[experiment.algo](
            env=env,
            seed=trial_seed(experiment.seed, trial.number),
            verbose=experiment.verbose,
            device=experiment.device,
            **arguments,
        )
        evaluation = _evaluation(experiment, eval_env, trial)
        try:
            model.learn(experiment.n_timesteps, callback=[*_callbacks(experiment), evaluation])
        except (AssertionError, ValueError, ArithmeticError) as error:
            # Some of what is sampled diverges; to the sampler a pruned trial is a bad one, and a failed one is nothing.
            print(f"trial {trial.number} cannot go on: {error}")
            raise optuna.TrialPruned(str(error)) from error
    finally:
        env.close()
        eval_env.close()
    value = float(evaluation.last_mean_reward)
    if evaluation.is_pruned or not math.isfinite(value):
        raise optuna.TrialPruned
    return value


def hyperparameters_of(trial: optuna.trial.FrozenTrial, algo: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters of a trial, in the zoo's format.

    :param trial: a trial that has been sampled
    :param algo: the zoo's name of the algorithm
    :param base: hyperparameters in which those of the trial are put, unless the trial has them all
    """
    stored = trial.user_attrs.get(HYPERPARAMETERS)
    return dict(stored) if stored is not None else merged(base, HYPERPARAMS_CONVERTER[algo](trial.params))


def merged(base: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """Put sampled hyperparameters into those of a file; what the file says of the policy beside them stays.

    :raises ValueError: if a value could not be written to a file
    """
    before, after = as_texts(base), as_texts(sampled)
    result = before | after
    if before.get("policy_kwargs") and "policy_kwargs" in after:
        result["policy_kwargs"] = f"dict({before['policy_kwargs']}, **{after['policy_kwargs']})"
    for name, value in result.items():
        if not _is_plain(value):
            raise ValueError(f"{name}={value!r} cannot be stored with a trial; allowed are numbers, text, lists and mappings")
    return result


def as_texts(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with those of the policy as text, as in the zoo's files.

    :raises ValueError: if the policy's hold something that has no text
    """
    policy_kwargs = hyperparameters.get("policy_kwargs")
    if not isinstance(policy_kwargs, Mapping):
        return dict(hyperparameters)
    return {**hyperparameters, "policy_kwargs": _as_text(policy_kwargs)}


def _sample(experiment: ExperimentManager, base: Mapping[str, Any], trial: optuna.Trial) -> dict[str, Any]:
    fixed = dict(experiment.custom_hyperparams or {})
    if base.get("policy") == "CnnPolicy":
        fixed["policy_kwargs"] = None  # its convolutions are most of the network
    additional_args = {"fixed": fixed, "n_timesteps": experiment.n_timesteps}
    HYPERPARAMS_SAMPLER[experiment.algo](trial, experiment.n_actions, experiment.n_envs, additional_args)
    return merged(base, HYPERPARAMS_CONVERTER[experiment.algo](trial.params))


def _evaluation(experiment: ExperimentManager, eval_env: Any, trial: optuna.Trial) -> TrialEvalCallback:
    log_path = experiment.optimization_log_path
    folder = None if log_path is None else os.path.join(log_path, f"trial_{trial.number}")
    return TrialEvalCallback(
        eval_env,
        trial,
        n_eval_episodes=experiment.n_eval_episodes,
        eval_freq=max(experiment.n_timesteps // experiment.n_evaluations // experiment.n_envs, 1),
        deterministic=experiment.deterministic_eval,
        best_model_save_path=folder,
        log_path=folder,
    )


def _callbacks(experiment: ExperimentManager) -> list[BaseCallback]:
    callbacks = get_callback_list({"callback": experiment.specified_callbacks})
    if experiment.show_progress and experiment.n_jobs == 1:
        callbacks.append(ProgressBarCallback())
    return callbacks


def _as_text(value: Any) -> str:
    """Text that the zoo evaluates to the value."""
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{name}={_as_text(item)}' for name, item in value.items())})"
    if isinstance(value, type) and value in vars(nn).values():
        return f"nn.{value.__name__}"
    if not _is_plain(value):
        raise ValueError(f"{value!r} in policy_kwargs cannot be stored with a trial; give policy_kwargs as text")
    return repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
