"""``train -optimize`` for this package's algorithms: studies on disk, a seed for each trial, and a report."""

import contextlib
import copy
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna import storages
from optuna.samplers import BaseSampler
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, TrialState
from rl_zoo3.callbacks import TrialEvalCallback
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from rl_zoo3.utils import ALGOS, get_callback_list
from torch import nn

from sb3_ano._io import DirectoryLock, write_file
from sb3_ano._registry import ALGORITHMS

#: Attribute of a trial: all hyperparameters that it was trained with, in RL Zoo's format.
HYPERPARAMETERS = "hyperparameters"
#: Seconds between two heartbeats of a running trial. After twice as many without one, its process counts as dead.
HEARTBEAT_SECONDS = 30
#: Complete trials below which importances would be noise.
MIN_TRIALS = 8
#: Trials in the printed table.
SHOWN = 5


class SearchMixin(ExperimentManager):
    """Search the hyperparameters of this package's algorithms; every other algorithm is left to the inherited methods."""

    storage: str | None
    study_name: str | None
    # Hyperparameters of the file and of -params, into which a trial puts what it samples.
    _unsearched: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.algo in ALGORITHMS:
            # Upstream keeps a study in memory, and loads no --trial-id, unless both are given.
            self.study_name = self.study_name or str(self.env_name)
            self._search_directory = Path(self.log_folder, self.algo, "searches", self.study_name.replace(os.sep, "-"))
            self.storage = self.storage or f"sqlite:///{self._search_directory}/study.db"

    def setup_experiment(self) -> Any:
        """Set up a training, or read what a search starts from.

        A search makes no directory for an agent, as upstream's does: ``enjoy`` would look for the agent.
        """
        if self.algo not in ALGORITHMS or not self.optimize_hyperparameters:
            return super().setup_experiment()
        hyperparameters, saved = self.read_hyperparameters()
        self._unsearched = copy.deepcopy(dict(saved))
        self._preprocess_hyperparams(hyperparameters)  # sets the budget and the number of environments
        if self.env_kwargs:
            self._unsearched["env_kwargs"] = copy.deepcopy(self.env_kwargs)
        return None

    def load_trial(self, storage: str, study_name: str, trial_id: int | None = None, convert: bool = True) -> dict[str, Any]:
        """Return all hyperparameters that a trial was trained with, whatever the file says now.

        :param storage: journal or database of the study
        :param study_name: name of the study
        :param trial_id: number of the trial, or None for the best one
        :param convert: False for the parameters as the study stores them
        :raises ValueError: if there is no such study or trial
        """
        if self.algo not in ALGORITHMS or not convert:
            return super().load_trial(storage, study_name, trial_id, convert)
        opened = open_storage(storage)
        if study_name not in (names := optuna.get_all_study_names(opened)):
            raise ValueError(f"--study-name {study_name} is not in {storage}; studies there: {', '.join(names) or 'none'}")
        study = optuna.load_study(storage=opened, study_name=study_name)
        number = study.best_trial.number if trial_id is None else trial_id
        trained = {trial.number: trial for trial in study.trials if HYPERPARAMETERS in trial.user_attrs}
        if number not in trained:
            known = ", ".join(map(str, trained)) or "none"
            raise ValueError(f"--trial-id {number} is not in study {study_name}; trials there: {known}")
        return dict(trained[number].user_attrs[HYPERPARAMETERS])

    def hyperparameters_optimization(self) -> None:
        """Run trials of a study until the budget is spent, and write the report.

        :raises ValueError: if the storage cannot be opened, or the study's trials are not comparable with this search's
        """
        if self.algo not in ALGORITHMS:
            super().hyperparameters_optimization()
            return
        assert self.storage is not None  # __init__ sets it
        self._search_directory.mkdir(parents=True, exist_ok=True)
        try:
            # Of processes that start together, one creates the tables of a new database, and Optuna fails in the others.
            with DirectoryLock(self._search_directory, patience=60):
                storage = open_storage(self.storage)
            study = optuna.create_study(
                storage=storage,
                sampler=self._create_sampler(self.sampler),
                pruner=self._create_pruner(self.pruner),
                study_name=self.study_name,
                direction="maximize",
                load_if_exists=True,
            )
            self._check_comparable(study)
        except Exception:
            if [path.name for path in self._search_directory.iterdir()] == [".lock"]:
                (self._search_directory / ".lock").unlink()  # so that the command can remove the empty directory
            raise
        try:
            self._optimize(study, has_heartbeat=isinstance(storage, storages.RDBStorage))
        except KeyboardInterrupt:
            print(f"interrupted; the same command resumes study {self.study_name} in {self.storage}")
        self._report(study)

    def _check_comparable(self, study: optuna.Study) -> None:
        budget = f"{self.n_timesteps} steps and {self.n_evaluations} evaluations per trial"
        search = f"{self.algo} on {self.env_name.gym_id} with {budget}"
        stored = study.user_attrs.get("search")
        if stored is None and not study.trials:
            study.set_user_attr("search", search)
            study.set_user_attr("command", " ".join(sys.orig_argv))
        elif stored != search:
            raise ValueError(
                f"study {self.study_name} is about {stored}, which cannot be compared with {search}; give another --study-name"
            )

    def _optimize(self, study: optuna.Study, has_heartbeat: bool) -> None:
        n_trials: int | None = self.n_trials
        callbacks = []
        if self.max_total_trials is not None:
            # Other processes finish their running trials. A journal has no heartbeat: the running trials of killed processes
            # would count for ever.
            counted = (TrialState.COMPLETE, TrialState.PRUNED, *([TrialState.RUNNING] if has_heartbeat else []))
            with _no_experimental_warnings():
                storages.fail_stale_trials(study)
            is_left = len(study.get_trials(deepcopy=False, states=counted)) < self.max_total_trials
            n_trials = None if is_left else 0
            callbacks.append(MaxTrialsCallback(self.max_total_trials, counted))
        study.optimize(self.objective, n_trials=n_trials, n_jobs=self.n_jobs, callbacks=callbacks, gc_after_trial=True)

    def _create_sampler(self, sampler_method: str) -> BaseSampler:
        if self.algo not in ALGORITHMS or sampler_method == "auto":  # a download, which is made once
            return super()._create_sampler(sampler_method)

        def create(number: int) -> BaseSampler:
            seeded = copy.copy(self)
            seeded.seed = trial_seed(self.seed, number)
            return super(SearchMixin, seeded)._create_sampler(sampler_method)

        return SeededByTrial(create)

    def objective(self, trial: optuna.Trial) -> float:
        """Train an agent as ``train`` would with the sampled hyperparameters, and evaluate it along the way.

        Upstream's objective is not called, because it keeps what was made of the file: rewards would be normalized with the
        file's discount factor, and ``policy_kwargs`` of the file would be lost.

        :param trial: trial, which stores all of its hyperparameters
        :return: mean return of the last evaluation
        :raises optuna.TrialPruned: if the pruner stops the trial, or the training diverges
        """
        if self.algo not in ALGORITHMS:
            return super().objective(trial)
        run = copy.copy(self)  # trials run in threads
        run.verbose = self.verbose if self.verbose >= 2 else 0
        hyperparameters = self._sample(trial)
        trial.set_user_attr(HYPERPARAMETERS, hyperparameters)
        run.normalize_kwargs = {}  # is filled with the trial's discount factor
        arguments, run.env_wrapper, _, run.vec_env_wrapper = run._preprocess_hyperparams(copy.deepcopy(hyperparameters))
        if self._eval_env_kwargs_args is None:
            run.eval_env_kwargs = run.env_kwargs
        env = run.create_envs(run.n_envs, no_log=True)
        eval_env = run.create_envs(run.n_eval_envs, eval_env=True)
        try:
            seed = trial_seed(run.seed, trial.number)
            model = ALGOS[run.algo](env=env, seed=seed, verbose=run.verbose, device=run.device, **arguments)
            evaluation = run._evaluation(eval_env, trial)
            model.learn(run.n_timesteps, callback=[*get_callback_list({"callback": run.specified_callbacks}), evaluation])
        except (AssertionError, ValueError, ArithmeticError) as error:
            # Some samples diverge. A pruned trial tells the sampler that they are bad, a failed one tells it nothing.
            print(f"trial {trial.number} is pruned: {error}")
            raise optuna.TrialPruned(str(error)) from error
        finally:
            env.close()
            eval_env.close()
        if evaluation.is_pruned or not math.isfinite(evaluation.last_mean_reward):
            raise optuna.TrialPruned
        return float(evaluation.last_mean_reward)

    def _sample(self, trial: optuna.Trial) -> dict[str, Any]:
        fixed = dict(self.custom_hyperparams or {})
        if self._unsearched.get("policy") == "CnnPolicy":
            fixed["policy_kwargs"] = None  # its convolutions are most of the network
        arguments = {"fixed": fixed, "n_timesteps": self.n_timesteps}
        HYPERPARAMS_SAMPLER[self.algo](trial, self.n_actions, self.n_envs, arguments)
        return merge(self._unsearched, HYPERPARAMS_CONVERTER[self.algo](trial.params))

    def _evaluation(self, eval_env: Any, trial: optuna.Trial) -> TrialEvalCallback:
        path = self.optimization_log_path and os.path.join(self.optimization_log_path, f"trial_{trial.number}")
        return TrialEvalCallback(
            eval_env,
            trial,
            n_eval_episodes=self.n_eval_episodes,
            eval_freq=max(self.n_timesteps // self.n_evaluations // self.n_envs, 1),
            deterministic=self.deterministic_eval,
            best_model_save_path=path,
            log_path=path,
        )

    def _report(self, study: optuna.Study) -> None:
        """Write trials, figures and the best hyperparameters, and print the best trials and how to train with them."""
        import pandas as pd  # here and below: start-up does not wait for what only a finished search needs

        directory = self._search_directory
        trials = study.trials_dataframe()
        write_file(directory / "trials.csv", trials.to_csv(index=False))
        complete = trials.query("state == 'COMPLETE'") if len(trials) else trials
        print(f"study {self.study_name} in {self.storage}: {len(complete)} of {len(trials)} trials are complete")
        if complete.empty:
            return
        if not self.no_optim_plots:
            draw_search(study, directory, len(complete) >= MIN_TRIALS and complete["value"].nunique() > 1)
        best = complete.nlargest(SHOWN, "value").set_index("number")
        hyperparameters = best[f"user_attrs_{HYPERPARAMETERS}"]
        table = pd.DataFrame(
            [{"return": best["value"][number], **hyperparameters[number]} for number in best.index], best.index
        )
        shown = table.drop(columns="policy_kwargs", errors="ignore").T
        print(f"\nthe best trials\n{shown.where(shown.notna(), 'none').to_string(float_format='{:.4g}'.format)}\n")
        write_file(directory / "best.yml", yaml.safe_dump({self.env_name.gym_id: hyperparameters.iloc[0]}))
        print(f"the report is in {directory}; this trains with the hyperparameters of the best trial:")
        print(f"python -m sb3_ano.zoo train --algo {self.algo} --env {self.env_name.gym_id} -conf {directory / 'best.yml'}")


class SeededByTrial(BaseSampler):
    """Sample each trial with a fresh sampler and a seed of its own.

    One seed for a whole process would draw the same trials again in every process that is started with it, and in a search
    that is resumed.

    :param create: function from a trial's number to its sampler
    """

    def __init__(self, create: Callable[[int], BaseSampler]) -> None:
        self._create = create
        self._samplers: dict[int, BaseSampler] = {}

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._samplers[trial.number] = self._create(trial.number)
        self._samplers[trial.number].before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        return self._samplers[trial.number].infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return self._samplers[trial.number].sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        return self._samplers[trial.number].sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self._samplers.pop(trial.number).after_trial(study, trial, state, values)


def trial_seed(seed: int, number: int) -> int:
    """Return a 32-bit seed for a trial.

    :param seed: seed of the search
    :param number: number of the trial
    """
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def open_storage(storage: str) -> storages.BaseStorage:
    """Open one of Optuna's storages; in a database, trials of dead processes are run once more.

    :param storage: journal, ``FILE.log``, or URL of a database, such as ``sqlite:///FILE.db``
    :raises ValueError: if the database cannot be opened
    """
    if storage.endswith(".log"):
        # Absolute, because Optuna looks at the age of a lock through a symbolic link next to it: a relative target is not
        # found, and the lock of a process that was killed would be waited for without end.
        path = Path(storage).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        return storages.JournalStorage(JournalFileBackend(str(path)))
    # SQLite waits only 5 seconds for another process by default.
    engine_kwargs = {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else None
    try:
        with _no_experimental_warnings():
            retry = storages.RetryHeartbeatStaleTrialCallback(max_retry=1)
            heartbeat: dict[str, Any] = {"heartbeat_interval": HEARTBEAT_SECONDS, "heartbeat_stale_trial_callback": retry}
            return storages.RDBStorage(storage, engine_kwargs, **heartbeat)
    except Exception as error:  # each database's driver has errors of its own
        raise ValueError(f"--storage {storage} cannot be opened: {str(error).splitlines()[0]}") from error


def merge(unsearched: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """Put sampled hyperparameters into those of a file, and keep the rest of the file's ``policy_kwargs``.

    :param unsearched: hyperparameters of the file, in RL Zoo's format
    :param sampled: hyperparameters that take precedence
    :return: hyperparameters in RL Zoo's format, with ``policy_kwargs`` as text
    :raises ValueError: if a value cannot be written to a file
    """
    merged = {**unsearched, **sampled}
    given = [part["policy_kwargs"] for part in (unsearched, sampled) if part.get("policy_kwargs")]
    texts = [kwargs if isinstance(kwargs, str) else _as_text(kwargs) for kwargs in given]
    if texts:
        merged["policy_kwargs"] = texts[0] if len(texts) == 1 else f"dict({texts[0]}, **{texts[1]})"
    for value in merged.values():
        _as_text(value)
    return merged


def draw_search(study: optuna.Study, directory: Path, with_importances: bool) -> None:
    """Draw the returns over trials and the importances of the parameters, with Optuna's figures.

    :param study: study with a complete trial
    :param directory: directory for ``history.png`` and ``importances.png``
    :param with_importances: whether to draw the importances, too
    """
    from matplotlib import pyplot as plt
    from optuna.visualization.matplotlib import plot_optimization_history, plot_param_importances

    plots: dict[str, Callable[..., Any]] = {"history.png": plot_optimization_history}
    if with_importances:
        plots["importances.png"] = plot_param_importances
    with _no_experimental_warnings(), plt.rc_context():  # Optuna changes the style of all figures
        for name, plot in plots.items():
            plot(study, target_name="return")
            content = io.BytesIO()
            plt.savefig(content, dpi=150, bbox_inches="tight")
            plt.close()
            write_file(directory / name, content.getvalue())


def _as_text(value: Any) -> str:
    """Return Python code that RL Zoo evaluates to the value."""
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{name}={_as_text(item)}' for name, item in value.items())})"
    if isinstance(value, type) and value in vars(nn).values():
        return f"nn.{value.__name__}"
    if not isinstance(value, bool | int | float | str | list | tuple | None):
        raise ValueError(f"{value!r} cannot be stored with a trial; allowed are numbers, text, lists and mappings")
    return repr(value)


@contextlib.contextmanager
def _no_experimental_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
