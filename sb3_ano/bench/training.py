"""One training: SB3's own files and ``run.json``. A killed training resumes from its checkpoint."""

import contextlib
import dataclasses
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from sb3_ano._io import strict, write_json
from sb3_ano._system import commit, machine, now, versions
from sb3_ano.bench.algorithms import ACCELERATE, CLASSES, parse_algorithm
from sb3_ano.bench.plan import Run
from sb3_ano.bench.recording import EpisodeRecorder, UpdateRecorder, make_evaluator
from sb3_ano.checkpoints import TrainingCheckpoints, newest_checkpoint
from sb3_ano.checkpoints.files import remove_checkpoints
from sb3_ano.envs import VecNormalize, make_vec_env
from sb3_ano.fast import accelerate

FORMAT = 2
RUN = "run.json"
MONITOR = "monitor.csv"
PROGRESS = "progress.csv"
EVALUATIONS = "evaluations.npz"
MODEL = "model.zip"
NORMALIZATION = "vecnormalize.pkl"
#: Files that a run may have next to ``run.json``.
FILES = (MONITOR, PROGRESS, EVALUATIONS, MODEL, NORMALIZATION)
CHECKPOINTS = "checkpoints"
# Apart by more than a run has environments: SB3 would give environment 1 of seed 0 the seed of environment 0 of seed 1.
_SEEDS_APART = 1_000_000
_EVALUATION_SEEDS = 500_000
_MOST_EVALUATION_ENVS = 16


def check_device(device: str) -> None:
    """Check that a device is available; SB3 would train on the CPU instead.

    :param device: SB3's ``device``
    :raises ValueError: if PyTorch knows no such device, or finds no CUDA device, and ``device`` asks for one
    """
    # PyTorch does not know SB3's "auto".
    if device == "auto":
        return
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not allowed; allowed are auto, cpu, cuda, cuda:0, ...") from error

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r} is not allowed; PyTorch finds no CUDA device here")


def make_env(run: Run, n_envs: int, threads: int = 1) -> VecEnv:
    """Make environments of a run, without normalization.

    :param run: run to make environments for
    :param n_envs: number of environments
    :param threads: threads that step the environments
    :raises ValueError: if the environments cannot be made
    """
    options: dict[str, Any] = {}
    # gymnasium's environments have no threads.
    if run.backend != "gymnasium":
        options["num_threads"] = threads
    if run.hyperparameters.get("env_wrapper"):
        # Imported here, because few tasks have a wrapper, and the RL Zoo is an extra.
        from rl_zoo3.utils import get_wrapper_class

        options["wrapper_class"] = get_wrapper_class(run.hyperparameters)

    return make_vec_env(
        run.env_id,
        n_envs,
        backend=run.backend,
        env_kwargs=dict(run.env_kwargs),
        **options,
    )


def wrapped(run: Run, env: VecEnv, training: bool = True) -> VecEnv:
    """Wrap environments of :func:`make_env` in VecNormalize and VecFrameStack, in the RL Zoo's order, if a run asks for it.

    :param run: run of the environments
    :param env: environments to wrap
    :param training: whether they are for training, and not for evaluation
    """
    normalize = run.hyperparameters.get("normalize")
    if normalize:
        options: dict[str, Any] = {"gamma": run.hyperparameters.get("gamma", 0.99)}
        if isinstance(normalize, Mapping):
            options |= normalize
        if not training:
            # Returns of evaluations are those of the task.
            options |= {"training": False, "norm_reward": False}
        env = VecNormalize(env, **options)

    n_stack = run.hyperparameters.get("frame_stack")
    if n_stack:
        env = VecFrameStack(env, n_stack)
    return env


def make_model(
    run: Run,
    env: VecEnv,
    device: str = "cpu",
) -> OnPolicyAlgorithm:
    """Make the model of a run, and seed its environments.

    :param run: run to make a model for
    :param env: environments for training
    :param device: SB3's ``device``
    :raises ValueError: for hyperparameters that are not allowed
    """
    # "no" in a grid would be a text, which is true.
    accelerated = run.hyperparameters.get(ACCELERATE, False)
    if not isinstance(accelerated, bool):
        raise ValueError(f"{ACCELERATE}={accelerated!r} is not allowed; allowed are True and False")

    algorithm = parse_algorithm(run.algorithm)
    arguments = algorithm.constructor_arguments(run.hyperparameters)
    model = CLASSES[algorithm.name](env=env, seed=run.seed, device=device, **arguments)

    if accelerated:
        model = accelerate(model)
    # The constructor has seeded them, too close to those of other runs.
    env.seed(_SEEDS_APART * run.seed)
    # Without outputs: the recorder reads what is logged.
    model.set_logger(Logger(None, []))
    return model


def train(
    run: Run,
    directory: Path,
    threads: int = 1,
    device: str = "cpu",
    models: bool = True,
    checkpoint_seconds: float = 60.0,
) -> None:
    """Train and evaluate, from the newest checkpoint in the directory if there is one.

    :param run: run to train
    :param directory: directory of the run's files
    :param threads: threads that step the environments; those of PyTorch are set per process
    :param device: SB3's ``device``
    :param models: whether to keep the final model
    :param checkpoint_seconds: time between two checkpoints
    :raises ValueError: if environments or model cannot be made, or if the training fails
    :raises OSError: if a file cannot be written
    """
    # Modules that register the task
    for module in run.imports:
        importlib.import_module(module)
    check_device(device)
    directory.mkdir(parents=True, exist_ok=True)
    # As they are now: the source may change during the training.
    details: dict[str, Any] = {
        "started": now(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }
    checkpoint = newest_checkpoint(directory / CHECKPOINTS)

    episodes = run.evaluation["episodes"]
    # More environments than episodes would do nothing.
    bare_evaluation_env = make_env(run, min(episodes, _MOST_EVALUATION_ENVS), threads)
    evaluation_env = wrapped(run, bare_evaluation_env, training=False)
    # Other episodes than those of the training
    seed = _SEEDS_APART * run.seed + _EVALUATION_SEEDS
    evaluate = make_evaluator(
        evaluation_env,
        episodes,
        run.evaluation["deterministic"],
        seed,
    )

    # The episodes are recorded below VecNormalize, with the task's own rewards.
    recorder = UpdateRecorder(directory, run, evaluate)
    bare = make_env(run, run.hyperparameters["n_envs"], threads)
    recorded = EpisodeRecorder(
        bare,
        directory / MONITOR,
        recorder.seconds,
        append=checkpoint is not None,
    )
    env = wrapped(run, recorded)

    with contextlib.closing(env), contextlib.closing(evaluation_env):
        model = make_model(run, env, device)
        checkpoints = TrainingCheckpoints(
            directory / CHECKPOINTS,
            seconds=checkpoint_seconds,
            keep=1,
            resume=True,
            verbose=0,
        )
        # The recorder comes first, so that a checkpoint has the row of the update before it.
        model.learn(
            run.total_timesteps,
            callback=[recorder, checkpoints],
            # SB3 takes None, with which it writes no rows of its own.
            log_interval=None,  # type: ignore[arg-type]
        )
        details["seconds"] = recorder.seconds()

    # From here on, the run only has to be written.
    recorder.write()
    if models:
        model.save(directory / MODEL)
        normalization = model.get_vec_normalize_env()
        if normalization is not None:
            normalization.save(str(directory / NORMALIZATION))

    resumed_at = None
    if checkpoint is not None:
        resumed_at = checkpoint.num_timesteps
    details |= {
        "finished": now(),
        "timesteps": model.num_timesteps,
        "resumed_at": resumed_at,
        "threads": threads,
        "device": str(model.device),
        "backend_used": getattr(bare.unwrapped, "backend", "gymnasium"),
    }
    # Now that the model is saved.
    remove_checkpoints(directory / CHECKPOINTS)
    write_run(run, directory, details)


def write_run(
    run: Run,
    directory: Path,
    details: Mapping[str, Any],
) -> None:
    """Write ``run.json``, the last file of a run, with the checksums of the others.

    :param run: the run
    :param directory: directory of its files
    :param details: circumstances of the training
    """
    # By which damage is noticed
    sha256 = {}
    for name in FILES:
        if (directory / name).is_file():
            sha256[name] = checksum(directory / name)

    document = {"format": FORMAT, "name": run.name, "identity": run.identity}
    document |= dataclasses.asdict(run)
    document |= details
    document["sha256"] = sha256
    write_json(directory / RUN, strict(document))


def checksum(file: Path) -> str:
    """Return the SHA-256 checksum of a file.

    :param file: file to read
    """
    return hashlib.sha256(file.read_bytes()).hexdigest()


def train_request(request: dict[str, Any]) -> None:
    """Train the run of a request from :mod:`sb3_ano.bench.pool`.

    :param request: ``run`` and ``directory``, and other arguments of :func:`train`
    """
    run = request.pop("run")
    # JSON has no tuples.
    run["imports"] = tuple(run["imports"])
    train(Run(**run), Path(request.pop("directory")), **request)
