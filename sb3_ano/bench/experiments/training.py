"""One run: train, evaluate, write a folder."""

import contextlib
import importlib
import io
import json
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn

from sb3_ano.bench.experiments.algorithms import algorithm, is_linear, number
from sb3_ano.bench.experiments.plan import Run
from sb3_ano.bench.experiments.recording import Clock, EpisodeRecorder, UpdateRecorder
from sb3_ano.bench.experiments.tables import SCHEMAS, TableStream, table_file
from sb3_ano.bench.files import machine, now
from sb3_ano.bench.store import MODEL_FILE, RUN_FILE, checksum
from sb3_ano.bench.worker import versions
from sb3_ano.envs import make_vec_env

NORMALIZATION_FILE = "vecnormalize.pkl"
# Apart by more than a run has environments: SB3 would give environment 1 of seed 0 the seed of environment 0 of seed 1.
_SEEDS_APART, _EVALUATION_SEEDS = 10_000, 5_000
_MOST_EVALUATION_ENVS = 16
_ACTIVATIONS = ("ELU", "GELU", "LeakyReLU", "Mish", "ReLU", "SiLU", "Tanh")


def make_envs(run: Run, threads: int) -> tuple[VecEnv, VecEnv]:
    """Environments for training and evaluation, without normalisation.

    :param run: whose they are
    :param threads: that step them
    :raises ValueError: if they cannot be made
    """
    numbers = run.hyperparameters["n_envs"], min(run.evaluation.episodes, _MOST_EVALUATION_ENVS)
    num_threads = None if run.backend == "gymnasium" else threads
    train, evaluation = (
        make_vec_env(run.env_id, n_envs, backend=run.backend, num_threads=num_threads, env_kwargs=dict(run.env_kwargs))
        for n_envs in numbers
    )
    evaluation.seed(_SEEDS_APART * run.seed + _EVALUATION_SEEDS)
    return train, evaluation


def normalized(run: Run, train: VecEnv, evaluation: VecEnv) -> tuple[VecEnv, VecEnv]:
    """The same, with the running normalisation that the hyperparameters ask for; evaluation uses that of the training."""
    normalize = run.hyperparameters.get("normalize", False)
    if normalize is False:
        return train, evaluation
    options = {"gamma": run.hyperparameters.get("gamma", 0.99), **(normalize if isinstance(normalize, dict) else {})}
    normalized_train = VecNormalize(train, **options)
    normalized_evaluation = VecNormalize(evaluation, **{**options, "norm_reward": False}, training=False)
    normalized_evaluation.obs_rms = normalized_train.obs_rms
    return normalized_train, normalized_evaluation


def make_model(run: Run, env: VecEnv, device: str) -> OnPolicyAlgorithm:
    """The model of a run.

    :param run: whose it is
    :param env: its training environments
    :param device: SB3's ``device``
    :raises ValueError: for hyperparameters that are not allowed
    """
    of = algorithm(run.algorithm)
    arguments = {name: _scheduled(value) for name, value in of.arguments(run.hyperparameters).items()}
    if "policy_kwargs" in arguments:
        arguments["policy_kwargs"] = _policy_kwargs(arguments["policy_kwargs"])
    model = of.constructor(run.hyperparameters["policy"], env, seed=run.seed, device=device, **arguments)
    env.seed(_SEEDS_APART * run.seed)
    model.set_logger(Logger(None, []))
    return model


def _scheduled(value: Any) -> Any:
    start = number(value)
    return LinearSchedule(start, 0.0, 1.0) if is_linear(value) and start is not None else value


def _policy_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(given)
    name = arguments.get("activation_fn")
    if name is not None:
        classes = {one.lower(): getattr(nn, one) for one in _ACTIVATIONS}
        if str(name).lower() not in classes:
            raise ValueError(f"activation_fn={name!r} is not allowed; allowed are {', '.join(sorted(classes))}")
        arguments["activation_fn"] = classes[str(name).lower()]
    return arguments


def train(
    run: Run, folder: Path, threads: int = 1, device: str = "cpu", report: Callable[[int], None] = lambda done: None
) -> None:
    """Train and evaluate; leaves all files of the run in its folder.

    :param run: what to train
    :param folder: an empty one
    :param threads: of the environments; PyTorch's are set for the process
    :param device: SB3's ``device``
    :param report: gets the number of environment steps that are done, after each update
    :raises ValueError: if environments or model cannot be made, or the policy breaks down
    :raises OSError: if a file cannot be written
    """
    started, begin, made_with = now(), time.perf_counter(), commit()
    model, seconds = _learn(run, folder, threads, device, report)
    _save(model, folder)
    details = {
        "started": started,
        "finished": now(),
        "wall_seconds": seconds,
        "process_seconds": time.perf_counter() - begin,
        "timesteps": model.num_timesteps,
        "n_envs": run.hyperparameters["n_envs"],
        "threads": threads,
        "commit": made_with,
        "versions": {**versions(), "sb3-contrib": metadata.version("sb3-contrib")},
        "hardware": {**machine(), "device": str(model.device)},
    }
    _write_run(run, folder, details)


def _learn(
    run: Run, folder: Path, threads: int, device: str, report: Callable[[int], None]
) -> tuple[OnPolicyAlgorithm, float]:
    """The trained model and the seconds of its training; the tables are in the folder then."""
    for module in run.imports:
        importlib.import_module(module)
    clock, evaluation = Clock(), run.evaluation
    with contextlib.ExitStack() as stack:
        tables = {name: stack.enter_context(TableStream(folder, name)) for name in SCHEMAS}
        bare, evaluation_env = make_envs(run, threads)
        stack.callback(evaluation_env.close)
        stack.callback(bare.close)
        env, evaluation_env = normalized(run, EpisodeRecorder(bare, tables["episodes"], clock), evaluation_env)
        model = make_model(run, env, device)
        recorder = UpdateRecorder(
            model, evaluation_env, run.total_timesteps, evaluation.points, evaluation.episodes, tables, clock, report
        )
        with recorder.attached():
            clock.start()
            model.learn(run.total_timesteps, log_interval=None)  # type: ignore[arg-type]
        seconds = clock.seconds()
        for table in tables.values():
            table.finish()
    return model, seconds


def _save(model: OnPolicyAlgorithm, folder: Path) -> None:
    # PyTorch reports a full disk as an error of its own; a write from memory is an OSError.
    content = io.BytesIO()
    model.save(content)
    _write(folder / MODEL_FILE, content.getvalue())
    normalization = model.get_vec_normalize_env()
    if normalization is not None:
        _write(folder / NORMALIZATION_FILE, pickle.dumps(normalization))


def _write_run(run: Run, folder: Path, details: dict[str, Any]) -> None:
    """Write ``run.json``, the last file of a run."""
    files = [MODEL_FILE, NORMALIZATION_FILE, *(table_file(folder, name).name for name in SCHEMAS)]
    sums = {name: checksum(folder / name) for name in files if (folder / name).is_file()}
    content = {"run_id": run.run_id, "suite": run.suite, **run.specification(), **details, "checksum": sums}
    _write(folder / RUN_FILE, (json.dumps(content, indent=1) + "\n").encode())


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())


def commit() -> str | None:
    """The commit of this package's source tree, with ``-dirty`` where files differ from it; None if it is not in one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True)
        found = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], capture_output=True, text=True
        )
    except OSError:  # no git
        return None
    return found.stdout.strip() if tracked.returncode == found.returncode == 0 else None
