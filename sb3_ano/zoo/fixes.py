"""Fixes of faults in rl-zoo3 2.9, for the duration of a command.

A fix is a function that replaces names of the zoo until the command ends. A fix that does not find its names, because the zoo
has changed, is left out with a warning.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock  # which replaces names and puts them back, outside of tests too

import numpy as np
import rl_zoo3.utils
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, RemoteEntryNotFoundError
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common import callbacks

from sb3_ano._secrets import hide
from sb3_ano.algorithms import MaskableANO
from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.envs.evaluation import evaluate_policy
from sb3_ano.zoo.packages import write_packages
from sb3_ano.zoo.settings import check_settings, is_trusted


def apply_fixes(stack: ExitStack, fixes: Iterable[Callable[[ExitStack], None]]) -> None:
    """Apply fixes until a stack of contexts is closed.

    :param stack: stack of the command
    :param fixes: functions of this module
    :raises ValueError: if the guard against a stranger's code cannot be applied, and the author is not trusted
    """
    for fix in fixes:
        with ExitStack() as attempt:
            try:
                fix(attempt)
            except (AttributeError, ImportError, KeyError) as error:
                changed = f"rl-zoo3 {rl_zoo3.__version__} is not as sb3_ano knows it, so {fix.__name__} is not fixed: {error}"
                if fix is unsafe_settings and not is_trusted():  # without it, a stranger's code would run
                    raise ValueError(f"{changed}; --trust-remote-code goes ahead") from error
                warnings.warn(changed, stacklevel=2)
            else:
                stack.push(attempt.pop_all())


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until the stack is closed.

    :param stack: stack of the command
    :param owner: module or object
    :param name: name of the attribute
    :param value: new value
    :raises AttributeError: if there is no such attribute
    """
    stack.enter_context(mock.patch.object(owner, name, value))


def replace_everywhere(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace a name in all modules of the zoo that hold the same object under it.

    :param stack: stack of the command
    :param owner: module that defines the object
    :param name: name of the object
    :param value: new value
    :raises AttributeError: if there is no such object
    """
    original = getattr(owner, name)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "rl_zoo3" and vars(module).get(name) is original:
            replace(stack, module, name, value)


def secrets_in_wandb(stack: ExitStack) -> None:
    """Hide keys and passwords in what ``train --track`` sends to Weights & Biases: its options and the command line."""
    if importlib.util.find_spec("wandb") is None:  # the zoo says so
        return
    wandb = importlib.import_module("wandb")
    init = wandb.init

    def init_without_secrets(*, config: Any = None, **options: Any) -> Any:
        with mock.patch.object(sys, "argv", hide(sys.argv)):
            return init(config=hide(config), **options)

    replace(stack, wandb, "init", init_without_secrets)


def unsafe_settings(stack: ExitStack) -> None:
    """Check the settings next to an agent before the zoo reads them with YAML's unsafe loader and ``eval``."""
    read, list_models = rl_zoo3.utils.get_saved_hyperparams, rl_zoo3.utils.get_trained_models

    def get_saved_hyperparams(stats_path: str, *args: Any, **kwargs: Any) -> Any:
        for name in ("config.yml", "args.yml"):  # callers read the second one themselves
            check_settings(Path(stats_path) / name)
        return read(stats_path, *args, **kwargs)

    def get_trained_models(log_folder: str) -> Any:
        for file in Path(log_folder).glob("*/*/*/args.yml"):
            check_settings(file)
        return list_models(log_folder)

    replace_everywhere(stack, rl_zoo3.utils, "get_saved_hyperparams", get_saved_hyperparams)
    replace_everywhere(stack, rl_zoo3.utils, "get_trained_models", get_trained_models)


def newest_run_without_agent(stack: ExitStack) -> None:
    """Skip runs without an agent, which were stopped early or are still training, when the newest agent is looked for."""
    latest = rl_zoo3.utils.get_latest_run_id

    def get_latest_run_id(log_path: str, env_name: Any) -> int:
        newest = latest(log_path, env_name)
        runs = {number: Path(log_path, f"{env_name}_{number}") for number in range(newest, 0, -1)}
        finished = [number for number, run in runs.items() if (run / f"{env_name}.zip").exists()]
        return next(iter(finished or [number for number, run in runs.items() if any(run.glob("*.zip"))]), newest)

    # Only here: training numbers its directories after all that exist.
    replace(stack, rl_zoo3.utils, "get_latest_run_id", get_latest_run_id)


def missing_metadata(stack: ExitStack) -> None:
    """Add ``generate_metadata``, which ``push_to_hub`` imports; sb3-team-hf-integration 3.0 has renamed it."""
    # The package has a function of the module's name, which hides the module.
    module: Any = sys.modules["huggingface_sb3.push_to_hub"]
    generate = module._generate_metadata
    stack.enter_context(mock.patch.object(module, "generate_metadata", lambda *args: generate(*args).to_dict(), create=True))


def missing_optional_file(stack: ExitStack) -> None:
    """Let downloads continue if an agent, or offline the cache, has no ``vec_normalize.pkl``: the zoo waits for an error of
    requests. A lost connection is another error, because the agent would act without its normalization.

    The command ``load_from_hub`` imports the error when it starts; ``enjoy`` and ``benchmark`` use a module that has done so.
    """
    missing = EntryNotFoundError if is_offline_mode() else RemoteEntryNotFoundError
    for module in ("rl_zoo3.load_from_hub", "requests.exceptions"):
        replace(stack, importlib.import_module(module), "HTTPError", missing)


def agents_without_masks(stack: ExitStack) -> None:
    """Ask environments for the masks of agents that take masks, in evaluations and where an agent is shown."""
    create = rl_zoo3.utils.create_test_env
    predict: Any = MaskableANO.predict
    shown: list[Any] = []

    def create_test_env(*args: Any, **kwargs: Any) -> Any:
        shown[:] = [create(*args, **kwargs)]
        return shown[0]

    def predict_with_masks(model: MaskableANO, *args: Any, action_masks: Any = None, **kwargs: Any) -> Any:
        if action_masks is None and shown and is_masking_supported(shown[0]):
            action_masks = get_action_masks(shown[0])
        return predict(model, *args, action_masks=action_masks, **kwargs)

    replace_everywhere(stack, rl_zoo3.utils, "create_test_env", create_test_env)
    replace(stack, MaskableANO, "predict", predict_with_masks)

    def evaluate(model: Any, env: Any, *args: Any, **kwargs: Any) -> Any:
        return evaluate_policy(with_masks(model, env), env, *args, **kwargs)

    replace(stack, callbacks, "evaluate_policy", evaluate)


def start_command(arguments: Sequence[str]) -> int:
    """Run a command of the zoo in a process with this process's interpreter and modules, and return its exit status.

    :param arguments: command line, beginning with the command
    """
    # The current directory is searched only if this process does so.
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    program = [sys.executable, "-P", "-m", "sb3_ano.zoo"]
    return subprocess.call([*program, *arguments], env={**os.environ, "PYTHONPATH": paths})


def child_processes(stack: ExitStack, packages: Sequence[str] = ()) -> None:
    """Start the children of ``record_training`` with our command line, which knows our algorithms.

    The zoo starts whatever is called ``python``.

    :param stack: stack of the command
    :param packages: modules that the user has named, which the zoo does not pass on
    """
    original = subprocess.call
    given = ["--gym-packages", *packages] if packages else []

    def call(command: Any, *args: Any, **kwargs: Any) -> int:
        match command:
            case ["python", "-m", str(module), *arguments] if module.startswith("rl_zoo3."):
                return start_command([module.removeprefix("rl_zoo3."), *arguments, *given])
        return original(command, *args, **kwargs)

    replace(stack, subprocess, "call", call)


def packages_of_strangers(stack: ExitStack, packages: Sequence[str] = ()) -> None:
    """Let a downloaded run name the user's packages, and not those that its author names, which would be imported.

    :param stack: stack of the command
    :param packages: modules that the user has named
    """
    module: Any = importlib.import_module("rl_zoo3.load_from_hub")
    download = module.download_from_hub

    def download_from_hub(*, algo: str, env_name: str, exp_id: int, folder: str, **options: Any) -> None:
        directory = Path(folder, algo)
        number = exp_id or module.get_latest_run_id(str(directory), env_name) + 1
        download(algo=algo, env_name=env_name, exp_id=number, folder=folder, **options)
        run = directory / f"{env_name}_{number}" if number > 0 else directory
        write_packages(run, env_name, packages)

    replace_everywhere(stack, module, "download_from_hub", download_from_hub)


class _Unsqueezed(np.ndarray):
    def squeeze(self, axis: Any = None) -> np.ndarray:
        return np.asarray(self)


def single_runs(stack: ExitStack) -> None:
    """Let ``all_plots`` work for one run, and for one episode per evaluation.

    It squeezes the last evaluations, of shape (n_runs, n_episodes), before it averages over episodes.
    """

    def array(values: Any) -> np.ndarray:
        converted = np.array(values)
        return converted.view(_Unsqueezed) if converted.ndim == 2 else converted

    # The package has functions of the modules' names, which hide the modules.
    replace(stack, sys.modules["rl_zoo3.plots.all_plots"], "np", types.SimpleNamespace(**{**vars(np), "array": array}))


def missing_ffmpeg(stack: ExitStack) -> None:
    """Put the ffmpeg that comes with imageio on the path, if there is no other.

    :raises RuntimeError: if imageio has none for this platform
    """
    if shutil.which("ffmpeg") is None:
        import imageio_ffmpeg  # type: ignore[import-untyped]  # only videos need it

        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ffmpeg-"))
        # The name of imageio's file has a version in it. On Windows, links need special rights.
        shutil.copy2(imageio_ffmpeg.get_ffmpeg_exe(), Path(directory, "ffmpeg.exe" if os.name == "nt" else "ffmpeg"))
        path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{directory}"
        stack.enter_context(mock.patch.dict(os.environ, PATH=path))


#: The fixes for commands that load agents; the others are for the commands that name them.
FIXES = (
    unsafe_settings,
    newest_run_without_agent,
    missing_metadata,
    missing_optional_file,
    agents_without_masks,
)
