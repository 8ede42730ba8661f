"""Records of the zoo's trainings, and ``train --resume``, which continues the newest one."""

import argparse
import contextlib
import dataclasses
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rl_zoo3
from rl_zoo3.exp_manager import EnvironmentName, ExperimentManager
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ano._io import read_json, write_json
from sb3_ano.checkpoints import newest_checkpoint
from sb3_ano.zoo.parsing import Options

# These say which run is meant, or how its progress is shown. All other options belong to the run.
_WHICH, _SHOWN = {"algo", "env", "log_folder", "resume", "checkpoint_freq"}, {"progress", "verbose"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training as it was started, recorded next to its hyperparameters.

    :param directory: directory of the run, such as ``logs/ano/CartPole-v1_1``
    :param arguments: command line of ``train``
    :param seed: seed, which the zoo draws if none is given
    :param checkpoint_freq: environment steps between checkpoints; None for a checkpoint per minute
    :param finished: whether the final model has been written
    """

    directory: Path
    arguments: list[str]
    seed: int
    checkpoint_freq: int | None
    finished: bool = False

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"

    @property
    def record(self) -> Path:
        """File with the record."""
        # The zoo names a run after the environment, a number and, with -uuid, a UUID.
        return self.directory / re.sub(r"_\d+(_[0-9a-f-]{36})?$", "", self.directory.name) / "run.json"

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from; without one the run restarts, and so do its files."""
        return newest_checkpoint(self.checkpoints, lambda line: None) is not None

    def write(self) -> None:
        """Write the record."""
        write_json(self.record, {name: value for name, value in vars(self).items() if name != "directory"})

    def finish(self) -> None:
        """Record that the run has finished, and remove its checkpoints."""
        dataclasses.replace(self, finished=True).write()
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    @classmethod
    def read(cls, directory: Path) -> "Run | None":
        """Read the record of a run.

        :param directory: directory of the run
        :return: the run, or None if it was interrupted before its training started
        :raises ValueError: if the record is damaged
        """
        record = cls(directory, [], 0, None).record
        try:
            return cls(directory, **read_json(record))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{record} is damaged: {error}") from error


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training does about checkpoints.

    :param arguments: command line of ``train``
    :param checkpoint_freq: environment steps between checkpoints; negative for none, None for a checkpoint per minute
    :param run: run to resume, or None
    """

    arguments: list[str]
    checkpoint_freq: int | None
    run: Run | None = None


def plan_training(options: Options) -> Plan | None:
    """Plan the checkpoints of a training, and with ``--resume`` give it the options of the newest run.

    :param options: options of ``train``
    :return: the plan, or None for a search
    :raises ValueError: if the newest run cannot be resumed with these options
    :raises SystemExit: if the newest run has finished
    """
    resume, freq = options.take("resume"), options.take("checkpoint_freq")
    values = options.values
    if freq == 0:
        raise ValueError("--checkpoint-freq=0 is not allowed; allowed are steps between checkpoints, or -1 for no checkpoints")
    if resume and (freq or 1) < 0:
        raise ValueError(f"--checkpoint-freq={freq} is not allowed together with --resume")
    run = _newest_run(values) if resume else None
    if run is not None:
        given = {name: value for name, value in options.given().items() if name not in _WHICH}
        started = options.parse(run.arguments)
        _require_same_options(run, given, started)
        if run.finished:
            print(f"{run.directory} has finished: there is nothing to resume")
            raise SystemExit(0)
        shown = {name: value for name, value in given.items() if name in _SHOWN}
        vars(values).update(
            {name: vars(started)[name] for name in vars(values) if name != "log_folder"}, seed=run.seed, **shown
        )
    if values.optimize_hyperparameters:
        return None
    return Plan(options.arguments, freq or (run.checkpoint_freq if run else None), run)


def _newest_run(values: argparse.Namespace) -> Run | None:
    """Return the run that was started last, or print why there is none to resume."""
    if values.optimize_hyperparameters:
        raise ValueError("--resume continues a training; a search continues with its --storage and --study-name")
    if not issubclass(rl_zoo3.ALGOS[values.algo], OnPolicyAlgorithm):
        allowed = sorted(name for name, kind in rl_zoo3.ALGOS.items() if issubclass(kind, OnPolicyAlgorithm))
        raise ValueError(f"--resume is not possible with --algo {values.algo}; it is with {', '.join(allowed)}")
    directory, name = Path(values.log_folder) / values.algo, EnvironmentName(values.env)
    numbered = {path: re.fullmatch(rf"{re.escape(name)}_(\d+)(_.*)?", path.name) for path in directory.glob(f"{name}_*")}
    runs = [(int(match[1]), path.stat().st_mtime, path) for path, match in numbered.items() if match and path.is_dir()]
    if not runs:
        print(f"{directory} holds no run of {values.env} to resume: a new run starts")
        return None
    newest = max(runs)[-1]
    run = Run.read(newest)
    if run is None:
        print(f"{newest} was interrupted before its training started, or trained without checkpoints: a new run starts")
    return run


def _require_same_options(run: Run, given: dict[str, Any], started: argparse.Namespace) -> None:
    """Raise ValueError for the first option that the run was not started with: with another option it is another run."""
    same = {**vars(started), "seed": run.seed}
    for name, value in given.items():
        if name not in _SHOWN and value != same[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is not what {run.directory} was started with "
                f"({' '.join(run.arguments)}); a resumed run keeps its options, which need not be given again; to train a "
                "finished agent further, start a new run with -i"
            )


@contextlib.contextmanager
def kept_monitor_files(experiment: ExperimentManager) -> Iterator[None]:
    """Let new environments continue their monitor files instead of overwriting them.

    :param experiment: experiment that makes its environments in the block
    """
    if experiment.vec_env_class is SubprocVecEnv:  # in other processes
        experiment.monitor_kwargs = {**experiment.monitor_kwargs, "override_existing": False}
    original = ResultsWriter.__init__

    @functools.wraps(original)
    def append(self: ResultsWriter, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "override_existing": False})

    ResultsWriter.__init__ = append  # type: ignore[method-assign]
    try:
        yield
    finally:
        ResultsWriter.__init__ = original  # type: ignore[method-assign]
