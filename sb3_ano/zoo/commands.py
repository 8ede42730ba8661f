"""The zoo's commands: what is set up before the zoo's own code runs, and removed after it."""

import argparse
import functools
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import rl_zoo3.train
import rl_zoo3.utils
from huggingface_sb3 import EnvironmentName  # type: ignore[import-untyped]
from optuna.exceptions import ExperimentalWarning
from rl_zoo3.exp_manager import ExperimentManager

from sb3_ano._io import remove_leftovers
from sb3_ano._registry import ALGORITHMS
from sb3_ano.envs import explained_missing_packages, register_atari
from sb3_ano.zoo import fixes, settings
from sb3_ano.zoo.manager import Manager, OwnManager, make_manager, plan_training
from sb3_ano.zoo.packages import directory_name, import_packages, read_packages, require_registered, split_module
from sb3_ano.zoo.parsing import PLOTS, Options, added_options
from sb3_ano.zoo.returns import EpisodeCounter
from sb3_ano.zoo.settings import is_trusted

# Names of the videos of record_training and record_video.
_RECORDINGS = ("*-step-*-to-step-*.mp4", "training.mp4", "training.gif")
# These are run like scripts. The others are functions of the modules of their names.
_SCRIPTS = ("record_video", "record_training", "benchmark", "push_to_hub", "load_from_hub")
# These show an agent of a run, whose training has named the packages of its environment.
_SHOW_RUN = ("enjoy", "record_video", "record_training", "push_to_hub")

# Options of a search that a training with its result does not have, or has in the file of the best hyperparameters.
_SEARCH_ONLY = (
    *("optimize_hyperparameters", "n_trials", "max_total_trials", "n_jobs", "sampler", "pruner", "n_startup_trials"),
    *("n_evaluations", "storage", "study_name", "trial_id", "no_optim_plots", "optimization_log_path"),
    *("conf_file", "hyperparams", "n_timesteps", "resume", "checkpoint_freq"),
)


def run_command(name: str, arguments: Sequence[str], program: str) -> None:
    """Run a command of the zoo.

    :param name: name of the command
    :param arguments: command line without the command
    :param program: program and command as the user typed them
    :raises ValueError: if an option is invalid
    :raises SystemExit: after help, or if nothing remains to be done
    """
    module = f"rl_zoo3.plots.{name}" if name in PLOTS else f"rl_zoo3.{name}"
    with ExitStack() as stack:
        stack.enter_context(explained_missing_packages())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ExperimentalWarning)  # of Optuna
        if name not in _SCRIPTS:
            importlib.import_module(module)  # before names are replaced, so that it keeps no replacement
        if "--trust-remote-code" in arguments:
            stack.enter_context(mock.patch.dict(os.environ, TRUST_REMOTE_CODE="1"))  # which children inherit
        few = dict.fromkeys(PLOTS, ()) | {"train": (fixes.agents_without_masks,), "all_plots": (fixes.single_runs,)}
        fixes.apply_fixes(stack, few.get(name, fixes.FIXES))
        stack.enter_context(added_options(name, arguments, program, functools.partial(_prepare, stack)))
        if name in _SCRIPTS:
            # With fewer environments than in training, minibatches can have odd sizes, which does not matter for acting.
            warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
            # As a command, a module that has been imported runs a second time, as with "python -m".
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(module, run_name="__main__")
        else:
            # rl_zoo3.plots has functions of its modules' names, which hide the modules.
            getattr(sys.modules[module], name)()


def _own_manager(options: Options) -> Callable[..., Any]:
    """Return the manager of this package's algorithms, on a cluster if the user wants one."""
    address = options.take("cluster")
    taken = {name: options.take(name) for name in ("env_runners", "learners")}
    numbers = {name: number for name, number in taken.items() if number is not None}
    if (numbers and address is None) or min(numbers.values(), default=0) < 0:
        raise ValueError("--env-runners and --learners are integers from 0, and need --cluster")
    if address is None:
        return functools.partial(OwnManager, train_command=options.command_line(without=_SEARCH_ONLY))
    if options.values.algo != "ano" or options.values.optimize_hyperparameters:
        raise ValueError("--cluster trains ano only, and does not search hyperparameters")
    from sb3_ano.zoo.cluster import ClusterManager  # imports Ray

    return functools.partial(ClusterManager, cluster=address, **numbers)


def _run_of(values: argparse.Namespace) -> Path:
    """Return the directory that the zoo takes the agent from, whether it exists or not."""
    directory = Path(values.folder, values.algo)
    number = values.exp_id or rl_zoo3.utils.get_latest_run_id(str(directory), values.env)
    return directory / f"{values.env}_{number}" if number > 0 else directory


def _require_only_videos(values: argparse.Namespace) -> None:
    """Check the directory that ``record_training`` removes before it writes to it.

    :raises ValueError: if it holds other files than recordings
    """
    directory = Path(values.output_folder or _run_of(values) / "videos")
    for path in directory.iterdir() if directory.is_dir() else ():
        if not path.is_file() or not any(fnmatch(path.name, name) for name in _RECORDINGS):
            raise ValueError(f"{directory} holds {path.name!r}, which would be lost; -o names another directory")


def _prepare_environment(stack: ExitStack, options: Options, run: Path | None) -> list[str]:
    """Import what registers the environment, and check that it is registered.

    :param stack: stack of the command
    :param options: options of the command
    :param run: directory of the run that the command continues, or None
    :return: modules that the user has named; in a training, also those of the run
    :raises ValueError: if a module cannot be imported, or nothing registers the environment
    """
    command = options.command
    values = options.values
    packages = list(values.gym_packages)
    env = getattr(values, "env", None)
    if command in PLOTS:
        # Directories have names without a slash.
        if env is not None:
            values.env = [directory_name(name) for name in env]
        import_packages(packages)
        return packages

    if env is not None:
        gym_id = env.gym_id if isinstance(env, EnvironmentName) else env
        modules, gym_id = split_module(gym_id)
        packages += modules
        values.env = type(env)(gym_id)
        register_atari(gym_id)
    import_packages(packages)
    # What the user names may also have the wrappers and networks of a run.
    user_modules = {package.partition(".")[0] for package in packages}
    fixes.replace(stack, settings, "user_modules", settings.user_modules | user_modules)
    if env is None or (command == "load_from_hub" and is_trusted()):
        return packages

    if command in _SHOW_RUN:
        run = _run_of(values)
    if run is not None and gym_id not in gym.registry:
        found = read_packages(run, EnvironmentName(gym_id))
        import_packages(found, source=f"{run} was trained with --gym-packages")
        if command == "train":
            packages += found
    require_registered(gym_id, packages)
    return packages


def _prepare(stack: ExitStack, options: Options) -> argparse.Namespace:
    """Set up what a command needs according to its options, and return the zoo's; or do the command's work and exit."""
    command, values = options.command, options.values
    options.take("trust_remote_code")
    has_display = sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    is_own = getattr(values, "algo", None) in ALGORITHMS

    if command in ("enjoy", "record_video", "record_training"):
        # Agents are where train writes them. The zoo downloads others to another directory.
        has_run = is_own or any(Path("logs", values.algo).glob(f"{values.env}_*"))
        if has_run and "folder" not in options.given():
            values.folder = "logs"
    if getattr(values, "folder", None) and hasattr(values, "algo"):
        remove_leftovers(Path(values.folder) / values.algo)  # of a load_from_hub that was killed

    continued = None
    if command == "train":
        plan = plan_training(options)
        if plan.get("resumed") is not None:
            continued = plan["resumed"]
        elif values.trained_agent:
            continued = Path(values.trained_agent).parent
    values.gym_packages = _prepare_environment(stack, options, continued)
    if command in ("enjoy", "benchmark", "load_from_hub"):
        fixes.packages_of_strangers(stack, values.gym_packages)

    if command in ("record_video", "record_training", "push_to_hub"):
        from sb3_ano.hub.video import software_rendering  # only videos need it

        stack.enter_context(software_rendering())
        fixes.apply_fixes(stack, [fixes.missing_ffmpeg])

    if command == "train":
        if values.track:
            fixes.apply_fixes(stack, [fixes.secrets_in_wandb])
        manager = functools.partial(make_manager, own=_own_manager(options), others=Manager, **plan)
        fixes.replace(stack, rl_zoo3.train, "ExperimentManager", manager)
    elif command == "enjoy":
        if not (has_display or values.no_render):
            print("There is no display to show the agent on, so only its returns are printed; record_video makes a video")
            values.no_render = True
        _print_returns(stack, values)
    elif command == "record_training":
        _require_only_videos(values)
        fixes.child_processes(stack, values.gym_packages)
    elif command == "benchmark":
        from sb3_ano.zoo.benchmark import benchmark  # imports what only this command needs

        benchmark(values, options.program)
        raise SystemExit(0)
    elif command in PLOTS:
        from sb3_ano.zoo.figures import figures  # imports pyplot, which only plots need

        # Without a legend there are no curves, which is an error with its reason.
        warnings.filterwarnings("ignore", "No artists with labels found", UserWarning)
        stack.enter_context(figures(command, values, options.take("figure"), has_display=has_display))
    elif command == "push_to_hub" and is_own:
        from sb3_ano.zoo import hub_commands  # imports the safe format

        hub_commands.push(values)
        raise SystemExit(0)
    elif command == "load_from_hub":
        from sb3_ano.zoo import hub_commands

        (hub_commands.load if is_own and not is_trusted() else hub_commands.load_pickle)(values)
        raise SystemExit(0)
    return values


def _print_returns(stack: ExitStack, values: argparse.Namespace) -> None:
    """Let ``enjoy`` print the returns of all environments at its end, where the zoo prints those of a single one only."""
    enjoy: Any = sys.modules["rl_zoo3.enjoy"]  # rl_zoo3 may have a function of this name
    create = enjoy.create_test_env
    is_atari = ExperimentManager.is_atari(values.env.gym_id)

    def create_test_env(*args: Any, **kwargs: Any) -> EpisodeCounter:
        counter = EpisodeCounter(create(*args, **kwargs), only_monitored=is_atari)
        stack.push(functools.partial(print_summary, counter))
        return counter

    def print_summary(counter: EpisodeCounter, error: type[BaseException] | None, *_: Any) -> None:
        is_printed = values.n_envs == 1 and not is_atari and counter.returns
        if values.verbose > 0 and not is_printed and error is None:
            counter.print_summary(values.n_timesteps)

    fixes.replace(stack, enjoy, "create_test_env", create_test_env)
