"""``train -optimize`` for this package's algorithms: studies on disk, a seed for each trial, and a report."""

import contextlib
import copy
import functools
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
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
from rl_zoo3.hyperparams_opt import HYPERPARAMS_SAMPLER
from rl_zoo3.utils import ALGOS, get_callback_list

from sb3_ano._io import DirectoryLock, write_figure, write_file
from sb3_ano._secrets import hide
from sb3_ano.zoo.hyperparameters import Hyperparameters, name_classes

#: Attribute of a trial: all hyperparameters that it was trained with, in RL Zoo's format.
HYPERPARAMETERS = "hyperparameters"
#: Seconds between two heartbeats of a running trial, and seconds without one after which its process counts as dead. A process
#: that sleeps for longer, in a suspended laptop or job, loses its trial and ends.
HEARTBEAT_SECONDS = 30
GRACE_SECONDS = 300
# Trials in the report.
_SHOWN_TRIALS = 5


@contextlib.contextmanager
def no_empty_directories(directory: Path) -> Iterator[None]:
    """Remove a directory that a failed block made, and the parents that it made, if they are empty.

    :param directory: directory that the block may make
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            with contextlib.suppress(OSError):  # not empty, or never made
                path.rmdir()
        raise


class Search(ExperimentManager):
    """Search the hyperparameters of this package's algorithms, and of accelerated ones in the zoo's search spaces.

    :param args: arguments of the zoo's manager
    :param train_command: command that trains with the options of this search, to which the best hyperparameters are added
    :param kwargs: keyword arguments of the zoo's manager
    """

    study_name: str | None
    storage: str | None

    def __init__(self, *args: Any, train_command: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Upstream keeps a study in memory unless both are given.
        if self.optimize_hyperparameters or self.study_name or self.storage or self.trial_id is not None:
            self.study_name = self.study_name or str(self.env_name)
            self.storage = self.storage or f"sqlite:///{self._search_directory}/study.db"
        self._train_command = train_command

    @property
    def _search_directory(self) -> Path:
        return Path(self.log_folder, self.algo, "searches", str(self.study_name).replace(os.sep, "-"))

    def setup_experiment(self) -> Any:
        """Set up a training, or read what a search starts from.

        A search makes no directory for an agent, as upstream's does: ``enjoy`` would look for the agent.
        """
        if not self.optimize_hyperparameters:
            return super().setup_experiment()
        if self.n_evaluations is not None and self.n_evaluations < 1:
            raise ValueError(f"--n-evaluations {self.n_evaluations} is not allowed; allowed are positive integers")

        hyperparameters, saved = self.read_hyperparameters()
        # Hyperparameters of the file and of -params, into which a trial puts what it samples.
        self._unsearched: Hyperparameters = copy.deepcopy(dict(saved))
        for name in ("env_wrapper", "vec_env_wrapper", "callback"):
            if name in self._unsearched:
                self._unsearched[name] = name_classes(self._unsearched[name])

        self._preprocess_hyperparams(hyperparameters)  # sets the budget and the number of environments
        if self.env_kwargs:
            self._unsearched["env_kwargs"] = copy.deepcopy(self.env_kwargs)
        return None

    def load_trial(self, storage: str, study_name: str, trial_id: int | None = None, convert: bool = True) -> Hyperparameters:
        """Return all hyperparameters that a trial was trained with, whatever the file says now.

        :param storage: journal or database of the study
        :param study_name: name of the study
        :param trial_id: number of the trial; None takes the best one
        :param convert: not used: the stored hyperparameters are in RL Zoo's format
        :raises KeyError: if there is no such study or trial
        :raises ValueError: if no trial is complete, or the trial does not have all hyperparameters
        """
        study = optuna.load_study(study_name=study_name, storage=open_storage(storage))
        if trial_id is None:
            if not study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
                raise ValueError(
                    f"--study-name {study_name} in {hide(storage)} has no complete trial; --trial-id takes another one"
                )
            trial_id = study.best_trial.number
            print(f"Trial {trial_id} is the best one of study {study_name}; --trial-id takes another one")

        trials = {trial.number: trial for trial in study.trials}
        attributes = trials[trial_id].user_attrs
        if HYPERPARAMETERS not in attributes:
            raise ValueError(
                f"--trial-id {trial_id} of --study-name {study_name} has no hyperparameters: it was not trained here"
            )
        return dict(attributes[HYPERPARAMETERS])

    def hyperparameters_optimization(self) -> None:
        """Run trials of a study until the budget is spent, and write the report.

        :raises ValueError: if the storage cannot be opened, or the study's trials are not comparable with this search's
        """
        # A search that cannot start leaves nothing.
        with no_empty_directories(self._search_directory):
            self._search_directory.mkdir(parents=True, exist_ok=True)
            # Of processes that start together, one creates the tables of a new database, and Optuna fails in the others.
            with DirectoryLock(self._search_directory, patience=60):
                try:
                    storage = open_storage(str(self.storage))
                finally:
                    # Those who wait for it, or come later, find the tables.
                    (self._search_directory / ".lock").unlink(missing_ok=True)
            study = optuna.create_study(
                storage=storage,
                sampler=self._create_sampler(self.sampler),
                pruner=self._create_pruner(self.pruner),
                study_name=self.study_name,
                direction="maximize",
                load_if_exists=True,
            )
            self._check_comparable(study)

        try:
            self._optimize(study, has_heartbeat=isinstance(storage, storages.RDBStorage))
        except KeyboardInterrupt:
            print(f"interrupted; the same command resumes study {self.study_name} in {self.storage}")
        self._report(study)

    def _check_comparable(self, study: optuna.Study) -> None:
        budget = f"{self.n_timesteps} steps and {self.n_evaluations} evaluations per trial"
        search = f"{self.algo} on {self.env_name.gym_id} with {budget}"

        # Optuna would mix the trials of any two searches under one name.
        stored = study.user_attrs.get("search")
        if stored is None and not study.trials:
            study.set_user_attr("search", search)
        elif stored != search:
            raise ValueError(
                f"study {self.study_name} is about {stored}, which cannot be compared with {search}; give another --study-name"
            )

    def _optimize(self, study: optuna.Study, has_heartbeat: bool) -> None:
        n_trials: int | None = self.n_trials
        callbacks = []
        if self.max_total_trials is not None:
            counted: tuple[TrialState, ...] = (TrialState.COMPLETE, TrialState.PRUNED)
            if has_heartbeat:
                # Other processes finish their running trials. Without a heartbeat, as in a journal, the running trials of
                # killed processes would count for ever.
                counted += (TrialState.RUNNING,)
            storages.fail_stale_trials(study)

            n_trials = None  # until the callback stops the search
            if len(study.get_trials(deepcopy=False, states=counted)) >= self.max_total_trials:
                n_trials = 0
            callbacks.append(MaxTrialsCallback(self.max_total_trials, counted))
        study.optimize(self.objective, n_trials=n_trials, n_jobs=self.n_jobs, callbacks=callbacks, gc_after_trial=True)

    def _create_sampler(self, sampler_method: str) -> BaseSampler:
        if sampler_method == "auto":  # a download, which is made once
            return super()._create_sampler(sampler_method)

        def create(number: int) -> BaseSampler:
            seeded = copy.copy(self)
            seeded.seed = trial_seed(self.seed, number)
            return super(Search, seeded)._create_sampler(sampler_method)

        return SeededByTrial(create)

    def objective(self, trial: optuna.Trial) -> float:
        """Train an agent as ``train`` would with the sampled hyperparameters, and evaluate it along the way.

        Upstream's objective is not called, because it keeps what was made of the file: rewards would be normalized with the
        file's discount factor, and ``policy_kwargs`` of the file would be lost.

        :param trial: trial, which stores all of its hyperparameters
        :return: mean return of the last evaluation
        :raises optuna.TrialPruned: if the pruner stops the trial, or the training diverges
        """
        run = copy.copy(self)  # trials run in threads
        if run.verbose < 2:
            run.verbose = 0

        # Stored before the training, so that a trial of a killed process has them, too.
        hyperparameters = self._sample(trial)
        trial.set_user_attr(HYPERPARAMETERS, hyperparameters)

        run.normalize_kwargs = {}  # is filled with the trial's discount factor
        arguments, run.env_wrapper, _, run.vec_env_wrapper = run._preprocess_hyperparams(copy.deepcopy(hyperparameters))
        path = None
        if self.optimization_log_path:
            path = os.path.join(self.optimization_log_path, f"trial_{trial.number}")

        env = run.create_envs(run.n_envs, no_log=True)
        eval_env = run.create_envs(run.n_eval_envs, eval_env=True)
        try:
            seed = trial_seed(run.seed, trial.number)
            model = ALGOS[run.algo](env=env, seed=seed, verbose=run.verbose, device=run.device, **arguments)
            model = run.accelerate(model)
            evaluation = TrialEvalCallback(
                eval_env,
                trial,
                n_eval_episodes=run.n_eval_episodes,
                eval_freq=max(run.n_timesteps // run.n_evaluations // run.n_envs, 1),
                deterministic=run.deterministic_eval,
                best_model_save_path=path,
                log_path=path,
            )
            callbacks = get_callback_list({"callback": run.specified_callbacks})
            model.learn(run.n_timesteps, callback=[*callbacks, evaluation])
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

    def _sample(self, trial: optuna.Trial) -> Hyperparameters:
        fixed = dict(self.custom_hyperparams or {})
        if self._unsearched.get("policy") in ("CnnPolicy", "CnnLstmPolicy"):
            fixed["policy_kwargs"] = None  # its convolutions are most of the network
        arguments = {"fixed": fixed, "n_timesteps": self.n_timesteps}
        sampled = HYPERPARAMS_SAMPLER[self.algo](trial, self.n_actions, self.n_envs, arguments)
        for name in fixed:
            sampled.pop(name, None)  # of the zoo's own samplers, which know nothing of what is fixed
        return merge(self._unsearched, sampled)

    def _report(self, study: optuna.Study) -> None:
        """Write trials, figures and the best hyperparameters, and print the best trials and how to train with them."""
        # Start-up does not wait for what only a finished search needs.
        import pandas as pd
        from matplotlib import pyplot as plt
        from optuna.visualization.matplotlib import plot_optimization_history, plot_param_importances

        directory = self._search_directory
        write_file(directory / "trials.csv", study.trials_dataframe().to_csv(index=False))
        complete = study.get_trials(states=[TrialState.COMPLETE])
        print(f"study {self.study_name} in {self.storage}: {len(complete)} of {len(study.trials)} trials are complete")
        if not complete and study.get_trials(deepcopy=False, states=[TrialState.PRUNED]):
            raise ValueError("all trials that have ended are pruned; the lines above name the reasons")
        if not complete:
            return

        if not self.no_optim_plots:
            for name, plot in (("history", plot_optimization_history), ("importances", plot_param_importances)):
                plot(study, target_name="return")
                write_figure(directory / f"{name}.png", plt.gcf(), dpi=150, bbox_inches="tight")
                plt.close()

        best = sorted(complete, key=lambda trial: trial.value or 0.0, reverse=True)[:_SHOWN_TRIALS]
        columns = {}
        for trial in best:
            columns[trial.number] = {"return": trial.value, **trial.user_attrs[HYPERPARAMETERS]}
        table = pd.DataFrame(columns).drop(index="policy_kwargs", errors="ignore")
        print(f"\nthe best trials\n{table.where(table.notna(), 'none').to_string(float_format='{:.4g}'.format)}\n")

        gym_id = self.env_name.gym_id
        file = directory / "best.yml"
        write_file(file, yaml.safe_dump({gym_id: best[0].user_attrs[HYPERPARAMETERS]}))
        print(f"the report is in {directory}; this trains with the hyperparameters of the best trial:")
        command = self._train_command or f"python -m sb3_ano.zoo train --algo {self.algo} --env {gym_id}"
        print(f"{command} {shlex.join(['--conf-file', str(file)])}")


class SeededByTrial(BaseSampler):
    """Sample each trial with a fresh sampler and a seed of its own.

    One seed for a whole process would draw the same trials again in every process that is started with it, and in a search
    that is resumed.

    :param create: function from a trial's number to its sampler, which needs no call before or after a trial
    """

    def __init__(self, create: Callable[[int], BaseSampler]) -> None:
        self._sampler = functools.cache(create)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        return self._sampler(trial.number).infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return self._sampler(trial.number).sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        return self._sampler(trial.number).sample_independent(study, trial, param_name, param_distribution)


def trial_seed(seed: int, number: int) -> int:
    """Return a 32-bit seed for a trial.

    :param seed: seed of the search
    :param number: number of the trial
    """
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def open_storage(storage: str) -> storages.BaseStorage:
    """Open one of Optuna's storages; in a database, trials of dead processes are run once more.

    :param storage: journal, ``FILE.log``, or URL of a database, such as ``sqlite:///FILE.db``
    :raises ValueError: if it cannot be opened
    """
    try:
        if storage.endswith(".log"):
            # Absolute, because Optuna looks at the age of a lock through a symbolic link next to it: a relative target is not
            # found, and the lock of a process that was killed would be waited for without end.
            path = Path(storage).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            return storages.JournalStorage(JournalFileBackend(str(path)))

        return storages.RDBStorage(
            storage,
            # SQLite waits only 5 seconds for another process by default.
            engine_kwargs={"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else None,
            heartbeat_interval=HEARTBEAT_SECONDS,
            grace_period=GRACE_SECONDS,
            heartbeat_stale_trial_callback=storages.RetryHeartbeatStaleTrialCallback(max_retry=1),
        )
    except Exception as error:  # each database's driver has errors of its own
        allowed = "allowed are URLs such as sqlite:///study.db, and journals such as study.log"
        reason = hide(str(error).partition("\n")[0]) or type(error).__name__
        raise ValueError(f"--storage {hide(storage)} cannot be opened: {reason}; {allowed}") from None


def require_storage(storage: str) -> None:
    """Check that a file to load a trial from exists: Optuna would create an empty one.

    :param storage: as for :func:`open_storage`
    :raises ValueError: if there is no such file
    """
    file = ""
    if storage.endswith(".log"):
        file = storage
    elif storage.startswith("sqlite:///"):
        file = storage.removeprefix("sqlite:///").partition("?")[0]
    if file not in ("", ":memory:") and not Path(file).is_file():
        raise ValueError(f"--storage {hide(storage)}: there is no file {file}; -optimize makes one")


def merge(unsearched: Hyperparameters, sampled: Hyperparameters) -> Hyperparameters:
    """Put sampled hyperparameters into those of a file, and keep the rest of the file's ``policy_kwargs``.

    :param unsearched: hyperparameters of the file, in RL Zoo's format
    :param sampled: hyperparameters that take precedence
    :return: hyperparameters in RL Zoo's format, with ``policy_kwargs`` as text
    """
    merged = {**unsearched, **sampled}
    given = []
    for part in (unsearched, sampled):
        if part.get("policy_kwargs"):
            given.append(str(part["policy_kwargs"]))
    if not given:
        return merged

    # The zoo evaluates the text, and knows torch.nn as nn.
    text = re.sub(r"<class 'torch\.nn\.[\w.]+\.(\w+)'>", r"nn.\1", " | ".join(given))
    if "<class" in text:
        raise ValueError(f"policy_kwargs={text} holds classes that -optimize cannot write; allowed are those of torch.nn")
    merged["policy_kwargs"] = text
    return merged
