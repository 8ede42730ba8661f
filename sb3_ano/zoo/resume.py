"""``train --resume``, which continues the newest run with the options that it was started with.

Every run records them in ``run.json`` next to its hyperparameters: ``arguments``, the command line; ``seed``, which the zoo
draws if none is given; ``checkpoint_freq``; and whether it has ``finished``.
"""

import argparse
import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rl_zoo3
from rl_zoo3.exp_manager import EnvironmentName, ExperimentManager
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ano._io import read_json
from sb3_ano.zoo.parsing import Options

# These say which run is meant, or how its progress is shown. All other options belong to the run.
_WHICH, _SHOWN = {"algo", "env", "log_folder", "resume", "checkpoint_freq"}, {"progress", "verbose"}


def record_of(run: Path) -> Path:
    """Return the file with the record of a run.

    :param run: directory of the run, such as ``logs/ano/CartPole-v1_1``
    """
    # The zoo names a run after the environment, a number and, with -uuid, a UUID.
    return run / re.sub(r"_\d+(_[0-9a-f-]{36})?$", "", run.name) / "run.json"


def plan_training(options: Options) -> dict[str, Any]:
    """Plan the checkpoints of a training, and with ``--resume`` give it the options of the newest run.

    :param options: options of ``train``
    :return: arguments of ``Manager``: ``arguments``, ``checkpoint_freq`` and ``resumed``
    :raises ValueError: if the newest run cannot be resumed with these options
    :raises SystemExit: if the newest run has finished
    """
    resume, freq = options.take("resume"), options.take("checkpoint_freq")
    if freq == 0:
        raise ValueError("--checkpoint-freq=0 is not allowed; allowed are steps between checkpoints, or -1 for no checkpoints")
    if resume and (freq or 1) < 0:
        raise ValueError(f"--checkpoint-freq={freq} is not allowed together with --resume")
    run = _newest_run(options.values) if resume else None
    if run is None:
        return {"arguments": options.arguments, "checkpoint_freq": freq}
    try:
        record = read_json(record_of(run))
        arguments, seed, recorded_freq = record["arguments"], record["seed"], record["checkpoint_freq"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{record_of(run)} is damaged: {error}") from error
    started = {**vars(options.parse(arguments)), "seed": seed}
    given = {name: value for name, value in options.given().items() if name not in _WHICH}
    for name, value in given.items():
        if name not in _SHOWN and value != started[name]:  # it would be another run
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is not what {run} was started with ({' '.join(arguments)}); a "
                "resumed run keeps its options, which need not be given again; to train a finished agent further, start a new "
                "run with -i"
            )
    if record.get("finished"):
        print(f"{run} has finished: there is nothing to resume")
        raise SystemExit(0)
    kept = {name: value for name, value in started.items() if name not in _WHICH}
    vars(options.values).update(kept, **{name: value for name, value in given.items() if name in _SHOWN})
    return {"arguments": arguments, "checkpoint_freq": freq or recorded_freq, "resumed": run}


def _newest_run(values: argparse.Namespace) -> Path | None:
    """Return the directory of the run that was started last, or print why there is none to resume."""
    if values.optimize_hyperparameters:
        raise ValueError("--resume continues a training; a search continues with its --storage and --study-name")
    if not issubclass(rl_zoo3.ALGOS[values.algo], OnPolicyAlgorithm):
        allowed = sorted(name for name, kind in rl_zoo3.ALGOS.items() if issubclass(kind, OnPolicyAlgorithm))
        raise ValueError(f"--resume is not possible with --algo {values.algo}; it is with {', '.join(allowed)}")
    directory, name = Path(values.log_folder) / values.algo, EnvironmentName(values.env)
    numbered = {path: re.fullmatch(rf"{re.escape(name)}_(\d+)(_.*)?", path.name) for path in directory.glob(f"{name}_*")}
    runs = [(int(match[1]), path.stat().st_mtime, path) for path, match in numbered.items() if match and path.is_dir()]
    newest = max(runs)[-1] if runs else None
    if newest is not None and record_of(newest).exists():
        return newest
    reason = "was interrupted before its training started, or trained without checkpoints"
    print(f"{f'{newest} {reason}' if newest else f'{directory} holds no run of {values.env} to resume'}: a new run starts")
    return None


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
