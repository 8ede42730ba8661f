"""The loop of a search: trials until the budget is spent, shared with other processes and resumable."""

import copy
import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.tuning.report import write_report
from sb3_ano.zoo.tuning.seeding import SeededByTrial
from sb3_ano.zoo.tuning.studies import open_study
from sb3_ano.zoo.tuning.workers import SURPLUS, Worker

try:
    import optuna
    from optuna.trial import TrialState
    from rl_zoo3.exp_manager import ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

#: Trials that ``--max-total-trials`` counts.
_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)

Objective = Callable[[optuna.Trial], float]


class Search:
    """Trials of one process in a study.

    :param study: the study, which other processes may work on too
    :param objective: trains and returns what is to be maximised
    :param n_trials: trials of this process, unless ``max_total_trials`` is given
    :param max_total_trials: trials of all processes, past ones included: complete, pruned or running
    :param report_progress: whether to print a line for each trial
    """

    def __init__(
        self,
        study: optuna.Study,
        objective: Objective,
        n_trials: int,
        max_total_trials: int | None = None,
        report_progress: bool = True,
    ) -> None:
        self._study = study
        self._objective = objective
        self._n_trials = n_trials
        self._max_total_trials = max_total_trials
        self._report_progress = report_progress
        self._worker = Worker(study)
        self._lock = threading.Lock()
        self._begun = 0
        self._ended = 0
        self._stopped = False

    @property
    def left(self) -> int:
        """Trials of this process's own budget that have not ended."""
        return self._n_trials - self._ended

    def run(self, n_jobs: int = 1) -> None:
        """Run trials until the budget is spent.

        :param n_jobs: trials at a time, each in a thread
        :raises Exception: what the objective raises; the trial counts as failed
        """
        with self._worker:
            if n_jobs == 1:
                self._run_trials()
                return
            with ThreadPoolExecutor(n_jobs) as executor:
                jobs = [executor.submit(self._run_trials) for _ in range(n_jobs)]
                try:
                    for job in jobs:
                        job.result()
                finally:
                    self._stopped = True

    def _run_trials(self) -> None:
        while self._take_one():
            trial = self._study.ask()
            self._worker.sign(trial)
            if self._is_surplus(trial.number):
                trial.set_user_attr(SURPLUS, True)
                self._study.tell(trial, state=TrialState.FAIL)
                return
            started = time.monotonic()
            self._run_trial(trial)
            self._ended += 1
            if self._report_progress:
                self._print_progress(trial.number, time.monotonic() - started)
            # The model and its environments refer to each other.
            gc.collect()

    def _run_trial(self, trial: optuna.Trial) -> None:
        value, state = None, TrialState.FAIL
        try:
            value, state = self._objective(trial), TrialState.COMPLETE
        except optuna.TrialPruned:
            state = TrialState.PRUNED
        except optuna.exceptions.UpdateFinishedTrialError:
            pass  # another process gave the trial up, because this one was silent for too long
        finally:
            self._study.tell(trial, value, state, skip_if_finished=True)

    def _take_one(self) -> bool:
        """Whether there is a trial to begin."""
        given_up = self._worker.give_up_dead_trials()
        if given_up:
            print(f"given up, because their processes died: trial {', '.join(map(str, given_up))}")
        with self._lock:
            if self._stopped or (self._max_total_trials is None and self._begun >= self._n_trials):
                return False
            self._begun += 1
        return self._max_total_trials is None or self._counted() < self._max_total_trials

    def _is_surplus(self, number: int) -> bool:
        """Whether enough trials were begun before this one, while this process was asking for it."""
        return self._max_total_trials is not None and self._counted(below=number) >= self._max_total_trials

    def _counted(self, below: int | None = None) -> int:
        trials = self._study.get_trials(deepcopy=False, states=_COUNTED)
        return sum(below is None or trial.number < below for trial in trials)

    def _print_progress(self, number: int, seconds: float) -> None:
        trials = self._study.get_trials(deepcopy=False)
        trial = trials[number]
        if trial.state == TrialState.COMPLETE:
            outcome = f"return {trial.value:.2f}"
        elif trial.value is not None:
            outcome = f"pruned at {trial.value:.2f} in evaluation {len(trial.intermediate_values)}"
        else:
            outcome = "pruned before it was evaluated" if trial.state == TrialState.PRUNED else "failed"
        done = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
        count = (
            f"{self._ended} of {self._n_trials}" if self._max_total_trials is None else f"{done} of {self._max_total_trials}"
        )
        complete = any(trial.state == TrialState.COMPLETE for trial in trials)
        record = f"; best {self._study.best_value:.2f}, trial {self._study.best_trial.number}" if complete else ""
        print(f"trial {number} ({count}): {outcome}, {seconds:.0f} s{record}", flush=True)


def run_search(manager: ExperimentManager, objective: Objective, base: Mapping[str, Any]) -> None:
    """Search for hyperparameters, and write what came out.

    :param manager: a manager that was set up for a search
    :param objective: runs a trial
    :param base: the hyperparameters in which a trial puts its own
    :raises ValueError: if the storage is not one, or holds a study of that name for another purpose
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = open_study(
            manager.storage,
            manager.study_name,
            _purpose(manager),
            sampler=_sampler(manager),
            pruner=manager._create_pruner(manager.pruner),
        )
        study.set_user_attr("command", " ".join(sys.orig_argv))
        if manager.verbose > 0:
            place = "memory" if manager.storage is None else manager.storage
            print(f"Study {study.study_name} in {place}; sampler: {manager.sampler}, pruner: {manager.pruner}")
        search = Search(study, objective, manager.n_trials, manager.max_total_trials, manager.verbose > 0)
        try:
            search.run(manager.n_jobs)
        except KeyboardInterrupt:
            print("interrupted")
            _say_how_to_go_on(manager, study, search)
        write_report(study, manager, base)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _purpose(manager: ExperimentManager) -> dict[str, Any]:
    return {
        "algo": manager.algo,
        "env": manager.env_name.gym_id,
        "n_timesteps": manager.n_timesteps,
        "n_evaluations": manager.n_evaluations,
    }


def _sampler(manager: ExperimentManager) -> optuna.samplers.BaseSampler:
    def create(seed: int) -> optuna.samplers.BaseSampler:
        seeded = copy.copy(manager)
        seeded.seed = seed
        return seeded._create_sampler(manager.sampler)

    # The third, "auto", is a download; it is asked for once.
    return SeededByTrial(create, manager.seed) if manager.sampler in ("tpe", "random") else create(manager.seed)


def _say_how_to_go_on(manager: ExperimentManager, study: optuna.Study, search: Search) -> None:
    if manager.storage is None:
        return
    budget = (
        f"--n-trials {search.left}" if manager.max_total_trials is None else f"--max-total-trials {manager.max_total_trials}"
    )
    print(f"the same command with --storage {manager.storage} --study-name {study.study_name} {budget} goes on")
