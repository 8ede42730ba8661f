"""Checkpoints of the zoo's trainings, and ``train --resume``, which goes on with the newest run."""

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ano._io import write_json
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.extras import missing_extra
from sb3_ano.zoo.options import Done, named_in

try:
    import rl_zoo3
    import yaml
    from rl_zoo3.exp_manager import EnvironmentName, ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

_LOGS = "logs"  # the zoo's default
_LONG = {
    "-P": "--progress",
    "-conf": "--conf-file",
    "-f": "--log-folder",
    "-i": "--trained-agent",
    "-n": "--n-timesteps",
    "-params": "--hyperparams",
    "-tags": "--wandb-tags",
    "-tb": "--tensorboard-log",
    "-uuid": "--uuid",
}
# They say which run, or how to show it; all others make the run.
_WHICH, _SHOWN = {"--algo", "--env", "--log-folder"}, {"--progress", "--verbose"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training as it was started, on the disk beside its hyperparameters.

    :param folder: of the run, ``logs/ano/CartPole-v1_1``
    :param arguments: for the zoo's ``train``
    :param seed: drawn by the zoo, if none was given
    :param checkpoint_freq: see :func:`prepare`
    :param finished: whether its final model has been written
    """

    folder: Path
    arguments: list[str]
    seed: int
    checkpoint_freq: int | None
    finished: bool = False

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def write(self) -> None:
        """Write it down, or anew."""
        write_json(_record(self.folder), {key: value for key, value in vars(self).items() if key != "folder"})

    @classmethod
    def read(cls, folder: Path) -> "Run | None":
        """The run in a folder; None if it was interrupted before it began.

        :raises ValueError: if its record is damaged
        """
        try:
            return cls(folder, **json.loads(_record(folder).read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{_record(folder)} is damaged: {error}") from error


def _record(folder: Path) -> Path:
    # The zoo calls a run by its environment, its number and, with -uuid, a UUID.
    return folder / re.sub(r"_\d+(_[0-9a-f-]{36})?$", "", folder.name) / "run.json"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the next experiment of the zoo is to do about checkpoints."""

    arguments: list[str]
    checkpoint_freq: int | None
    run: Run | None


_next: ContextVar[_Plan | None] = ContextVar("_next", default=None)


def prepare(options: argparse.Namespace, arguments: list[str]) -> list[str]:
    """Have the zoo's next training write checkpoints, and with ``--resume`` go on with the newest run.

    :param options: ``resume``, and ``checkpoint_freq``: environment steps between checkpoints, negative for none, None for one
        a minute
    :param arguments: for the zoo's ``train``
    :return: those that the run was started with, if one goes on
    :raises ValueError: if a run cannot go on with these options
    :raises Done: if the newest run has finished
    """
    if options.checkpoint_freq == 0:
        raise ValueError("--checkpoint-freq=0 is not allowed; allowed are steps between checkpoints, or -1 for no checkpoints")
    if options.resume and (options.checkpoint_freq or 1) < 0:
        raise ValueError(f"--checkpoint-freq={options.checkpoint_freq} is not allowed together with --resume")
    named = named_in(arguments)
    run = None
    if options.resume:
        _require_resumable(named)
        run = _newest_run(Path(named.folder or _LOGS) / named.algo, named.env)
    if run is not None:
        _require_same_options(run, arguments)
        if run.finished:
            print(f"{run.folder} has finished: there is nothing to go on with")
            raise Done(0)
        shown = [token for name, tokens in _options(arguments).items() if name in _SHOWN for token in (name, *tokens)]
        arguments = [*run.arguments, "--seed", str(run.seed), "--log-folder", named.folder or _LOGS, *shown]
    if not named.optimize_hyperparameters:
        freq = options.checkpoint_freq or (run.checkpoint_freq if run else None)
        _next.set(_Plan(arguments, freq, run))
        _wrap_experiments()
    return arguments


def _require_resumable(named: argparse.Namespace) -> None:
    algorithm = rl_zoo3.ALGOS.get(named.algo)
    if named.optimize_hyperparameters:
        raise ValueError("--resume goes on with a training; a study goes on by its --storage and --study-name")
    if algorithm is not None and not issubclass(algorithm, OnPolicyAlgorithm):
        allowed = sorted(name for name, kind in rl_zoo3.ALGOS.items() if issubclass(kind, OnPolicyAlgorithm))
        raise ValueError(f"--resume is not possible with --algo {named.algo}; it is with {', '.join(allowed)}")


def _newest_run(folder: Path, env_id: str) -> Run | None:
    """The run that was started last, or None, in a line that says why, if there is nothing to go on with."""
    name = EnvironmentName(env_id)
    numbered = {path: re.fullmatch(rf"{re.escape(name)}_(\d+)(_.*)?", path.name) for path in folder.glob(f"{name}_*")}
    runs = [(int(match[1]), path.stat().st_mtime, path) for path, match in numbered.items() if match and path.is_dir()]
    if not runs:
        print(f"{folder} holds no run of {env_id} to go on with: a new one begins")
        return None
    newest = max(runs)[-1]
    run = Run.read(newest)
    if run is None:
        print(f"{newest} was interrupted before its training began, or trained without checkpoints: a new run begins")
    return run


def _options(arguments: list[str]) -> dict[str, list[str]]:
    """The options of a command line with their values, by their long names."""
    found: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):
            name, equals, value = argument.partition("=")
            name = _LONG.get(name, name)
            found[name] = [value] if equals else []
        else:
            found.setdefault(name, []).append(argument)
    return found


def _require_same_options(run: Run, arguments: list[str]) -> None:
    """Complain of options that the run was not started with: it would not be the same run any more.

    :raises ValueError: naming the first
    """
    started = _options(run.arguments)
    for name, values in _options(arguments).items():
        drawn = name == "--seed" and values == [str(run.seed)]
        if name not in _WHICH | _SHOWN and started.get(name) != values and not drawn:
            raise ValueError(
                f"{' '.join([name, *values])} is not what {run.folder} was started with ({' '.join(run.arguments)}); a "
                "resumed run keeps its options, which need not be given again; to train a finished agent further, start a new "
                "run with -i"
            )


def _wrap_experiments() -> None:
    """Wrap the methods of the zoo's experiments; calling it again changes nothing."""
    if hasattr(ExperimentManager, "_sb3_ano_run"):
        return
    ExperimentManager._sb3_ano_run = None
    ExperimentManager.setup_experiment = _with_checkpoints(ExperimentManager.setup_experiment)
    ExperimentManager.save_trained_model = _finishing(ExperimentManager.save_trained_model)


def _with_checkpoints(setup: Any) -> Callable[[ExperimentManager], Any]:
    @functools.wraps(setup)
    def setup_experiment(self: ExperimentManager) -> Any:
        plan = _next.get()
        _next.set(None)
        if plan is None:
            return setup(self)
        if plan.run is not None:
            _take_over(self, plan.run)
        # Without a checkpoint the run begins anew, and so do its files.
        goes_on = plan.run is not None and newest_checkpoint(plan.run.checkpoints, lambda line: None) is not None
        with _kept_monitor_files(self) if goes_on else contextlib.nullcontext():
            result = setup(self)
        if result is not None and isinstance(result[0], OnPolicyAlgorithm) and (plan.checkpoint_freq or 1) > 0:
            run = plan.run or Run(Path(self.save_path), plan.arguments, self.seed, plan.checkpoint_freq)
            run.write()
            self._sb3_ano_run = run
            self.callbacks.append(
                TrainingCheckpoints(run.checkpoints, plan.checkpoint_freq, resume=plan.run is not None, verbose=self.verbose)
            )
        return result

    return setup_experiment


def _finishing(save: Any) -> Callable[[ExperimentManager, BaseAlgorithm], None]:
    @functools.wraps(save)
    def save_trained_model(self: ExperimentManager, model: BaseAlgorithm) -> None:
        save(self, model)
        run = self._sb3_ano_run
        if run is None:
            return
        if model.num_timesteps < self.n_timesteps:
            print(f"The training ended after {model.num_timesteps} of {self.n_timesteps} steps; --resume goes on with it")
            return
        dataclasses.replace(run, finished=True).write()
        shutil.rmtree(run.checkpoints, ignore_errors=True)

    return save_trained_model


def _take_over(experiment: ExperimentManager, run: Run) -> None:
    """Have an experiment be the one of a run: its folder, and the hyperparameters that were written down there."""
    experiment.save_path = str(run.folder)
    experiment.params_path = str(_record(run.folder).parent)
    # What a run's own folder says may hold Python objects, as the zoo writes them.
    hyperparameters = dict(yaml.unsafe_load(Path(experiment.params_path, "config.yml").read_text()))
    print(f"Going on with {run.folder}")

    def read_hyperparameters() -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy(hyperparameters), hyperparameters

    experiment.read_hyperparameters = read_hyperparameters
    experiment._save_config = lambda saved: None  # it is there, with the command that the run was started with


@contextlib.contextmanager
def _kept_monitor_files(experiment: ExperimentManager) -> Iterator[None]:
    """Have environments go on with their monitor files, which they would begin anew."""
    if experiment.vec_env_class is SubprocVecEnv:  # in other processes
        experiment.monitor_kwargs = {**experiment.monitor_kwargs, "override_existing": False}
    begin = ResultsWriter.__init__

    @functools.wraps(begin)
    def go_on(self: ResultsWriter, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{**kwargs, "override_existing": False})

    ResultsWriter.__init__ = go_on  # type: ignore[method-assign]
    try:
        yield
    finally:
        ResultsWriter.__init__ = begin  # type: ignore[method-assign]
