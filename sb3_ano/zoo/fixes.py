"""Names of other packages that are replaced while a command runs, where the zoo leaves no other way (rl-zoo3 2.9).

Each function is a context: at its end, everything is as it was.
"""

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common import callbacks

from sb3_ano._secrets import hide
from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.envs.evaluation import evaluate_policy


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute in the block.

    :param owner: module or class
    :param name: name of the attribute
    :param value: new value
    :raises AttributeError: if there is no such attribute
    """
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment in the block, which child processes inherit.

    :param name: name of the variable
    :param value: new value
    """
    original = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if original is None:
            del os.environ[name]
        else:
            os.environ[name] = original


@contextlib.contextmanager
def evaluations() -> Iterator[None]:
    """Evaluate agents with the masks of their environments, and to an end whatever ends the episodes."""

    def evaluate(model: Any, env: Any, *args: Any, **kwargs: Any) -> Any:
        return evaluate_policy(with_masks(model, env), env, *args, **kwargs)

    with replaced(callbacks, "evaluate_policy", evaluate):
        yield


@contextlib.contextmanager
def secrets_in_wandb() -> Iterator[None]:
    """Hide keys and passwords in what ``train --track`` sends to Weights & Biases: its options and the command line."""
    # Without wandb, the zoo says what to install.
    if importlib.util.find_spec("wandb") is None:
        yield
        return

    wandb = importlib.import_module("wandb")
    init = wandb.init

    def init_without_secrets(*, config: object = None, **options: Any) -> object:
        # wandb stores the command line, too.
        with replaced(sys, "argv", hide(sys.argv)):
            return init(config=hide(config), **options)

    with replaced(wandb, "init", init_without_secrets):
        yield


@contextlib.contextmanager
def missing_metadata() -> Iterator[None]:
    """Add ``generate_metadata``, which the zoo's ``push_to_hub`` imports; sb3-team-hf-integration 3.0 has renamed it."""
    importlib.import_module("huggingface_sb3")
    # The package has a function of the module's name, which hides the module.
    module: Any = sys.modules["huggingface_sb3.push_to_hub"]

    def generate_metadata(*args: object) -> object:
        return module._generate_metadata(*args).to_dict()

    module.generate_metadata = generate_metadata
    try:
        yield
    finally:
        del module.generate_metadata


def start_command(arguments: Sequence[str]) -> int:
    """Run a command of the zoo in a process with this process's interpreter and modules, and return its exit status.

    :param arguments: command line, beginning with the command
    """
    # The current directory is searched only if this process does so.
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    program = [sys.executable, "-P", "-m", "sb3_ano.zoo"]
    return subprocess.call([*program, *arguments], env={**os.environ, "PYTHONPATH": paths})


@contextlib.contextmanager
def child_processes(packages: Sequence[str]) -> Iterator[None]:
    """Start the children of ``record_training`` with our command line, which knows our algorithms.

    The zoo starts whatever is called ``python``.

    :param packages: modules that the user has named, which the zoo does not pass on
    """
    original = subprocess.call
    named = []
    if packages:
        named = ["--gym-packages", *packages]

    def call(command: Any, *args: Any, **kwargs: Any) -> int:
        match command:
            case ["python", "-m", "rl_zoo3.record_video", *arguments]:
                return start_command(["record_video", *arguments, *named])
        return original(command, *args, **kwargs)

    with replaced(subprocess, "call", call):
        yield


@contextlib.contextmanager
def ffmpeg_on_path() -> Iterator[None]:
    """Put the ffmpeg that comes with imageio on the path, if there is no other.

    :raises RuntimeError: if imageio has none for this platform
    """
    if shutil.which("ffmpeg") is not None:
        yield
        return

    import imageio_ffmpeg  # type: ignore[import-untyped]  # only videos need it

    with tempfile.TemporaryDirectory(prefix="ffmpeg-") as directory:
        # The name of imageio's file has a version in it. On Windows, links need special rights.
        name = "ffmpeg.exe" if os.name == "nt" else "ffmpeg"
        shutil.copy2(imageio_ffmpeg.get_ffmpeg_exe(), Path(directory, name))

        path = os.environ.get("PATH", os.defpath)
        with variable("PATH", f"{path}{os.pathsep}{directory}"):
            yield
