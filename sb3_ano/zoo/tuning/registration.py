"""Puts our search into the RL Zoo of this process."""

import copy
import functools
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.tuning import run_folder
from sb3_ano.zoo.tuning.search import run_search
from sb3_ano.zoo.tuning.spaces import convert_params, search_space_sampler
from sb3_ano.zoo.tuning.studies import load_study
from sb3_ano.zoo.tuning.trials import HYPERPARAMETERS, run_trial

try:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

OWN = ("ano", "spo", "papo")


def register() -> None:
    """Put our search spaces into the zoo's dictionaries, and our search in place of its own.

    The zoo's own search keeps nothing between two starts unless a storage was named, counts the trials of dead processes,
    fails at the end without a complete trial, and pickles the study.
    """
    for algo in OWN:
        HYPERPARAMS_SAMPLER.setdefault(algo, search_space_sampler(algo))
        HYPERPARAMS_CONVERTER.setdefault(algo, convert_params)
    if hasattr(ExperimentManager.hyperparameters_optimization, "__wrapped__"):
        return
    if run_folder.is_needed():
        run_folder.apply()
    ExperimentManager.read_hyperparameters = _keep_base(ExperimentManager.read_hyperparameters)
    ExperimentManager.hyperparameters_optimization = _search_in_place_of(ExperimentManager.hyperparameters_optimization)
    ExperimentManager.load_trial = _load_whole_trial(ExperimentManager.load_trial)


def _keep_base(read: Any) -> Any:
    """The zoo hands the hyperparameters of the file on and forgets them; a search puts each trial's into them."""

    @functools.wraps(read)
    def read_hyperparameters(self: ExperimentManager) -> tuple[dict[str, Any], dict[str, Any]]:
        hyperparameters, saved = read(self)
        self.base_hyperparameters = copy.deepcopy(dict(saved))
        if self.env_kwargs:
            self.base_hyperparameters["env_kwargs"] = copy.deepcopy(self.env_kwargs)
        return hyperparameters, saved

    return read_hyperparameters


def _search_in_place_of(optimize: Any) -> Any:
    @functools.wraps(optimize)
    def hyperparameters_optimization(self: ExperimentManager) -> None:
        base = self.base_hyperparameters

        def objective(trial: optuna.Trial) -> float:
            return run_trial(self, base, trial) if self.algo in OWN else self.objective(trial)

        run_search(self, objective, base)

    return hyperparameters_optimization


def _load_whole_trial(load: Any) -> Any:
    """The zoo puts what was sampled into the hyperparameters of the file, which may have changed; our trials keep all."""

    @functools.wraps(load)
    def load_trial(
        self: ExperimentManager, storage: str, study_name: str, trial_id: int | None = None, convert: bool = True
    ) -> dict[str, Any]:
        study = load_study(storage, study_name)
        trial = study.best_trial if trial_id is None else study.trials[trial_id]
        if convert and HYPERPARAMETERS in trial.user_attrs:
            return dict(trial.user_attrs[HYPERPARAMETERS])
        return load(self, storage, study_name, trial_id, convert)

    return load_trial
