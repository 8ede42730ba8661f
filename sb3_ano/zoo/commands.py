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

import rl_zoo3.train
import rl_zoo3.utils
from optuna.exceptions import ExperimentalWarning

from sb3_ano._io import remove_leftovers
from sb3_ano._registry import ALGORITHMS
from sb3_ano.envs import explained_missing_packages, register_atari
from sb3_ano.zoo import fixes
from sb3_ano.zoo.manager import Manager, OwnManager, make_manager, plan_training
from sb3_ano.zoo.parsing import PLOTS, Options, added_options
from sb3_ano.zoo.settings import is_trusted

# Names of the videos of record_training and record_video.
_RECORDINGS = ("*-step-*-to-step-*.mp4", "training.mp4", "training.gif")
# These are run like scripts. The others are functions of the modules of their names.
_SCRIPTS = ("record_video", "record_training", "benchmark", "push_to_hub", "load_from_hub")


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
        return OwnManager
    if options.values.algo != "ano" or options.values.optimize_hyperparameters:
        raise ValueError("--cluster trains ano only, and does not search hyperparameters")
    from sb3_ano.zoo.cluster import ClusterManager  # imports Ray

    return functools.partial(ClusterManager, cluster=address, **numbers)


def _require_only_videos(values: argparse.Namespace) -> None:
    """Check the directory that ``record_training`` removes before it writes to it.

    :raises ValueError: if it holds other files than recordings
    """
    runs = Path(values.folder) / values.algo
    number = values.exp_id or rl_zoo3.utils.get_latest_run_id(str(runs), values.env)
    run = runs / f"{values.env}_{number}" if number > 0 else runs
    directory = Path(values.output_folder or run / "videos")
    for path in directory.iterdir() if directory.is_dir() else ():
        if not path.is_file() or not any(fnmatch(path.name, name) for name in _RECORDINGS):
            raise ValueError(f"{directory} holds {path.name!r}, which would be lost; -o names another directory")


def _prepare(stack: ExitStack, options: Options) -> argparse.Namespace:
    """Set up what a command needs according to its options, and return the zoo's; or do the command's work and exit."""
    command, values = options.command, options.values
    options.take("trust_remote_code")
    if isinstance(env := getattr(values, "env", None), str):
        register_atari(env)
    has_display = sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    is_own = getattr(values, "algo", None) in ALGORITHMS
    if command in ("record_video", "record_training", "push_to_hub"):
        from sb3_ano.hub.video import software_rendering  # only videos need it

        stack.enter_context(software_rendering())
        fixes.apply_fixes(stack, [fixes.missing_ffmpeg])
    if command in ("enjoy", "record_video", "record_training"):
        # Agents are where train writes them. The zoo downloads others to another directory.
        has_run = is_own or any(Path("logs", values.algo).glob(f"{values.env}_*"))
        if has_run and "folder" not in options.given():
            values.folder = "logs"
    if getattr(values, "folder", None) and hasattr(values, "algo"):
        remove_leftovers(Path(values.folder) / values.algo)  # of a load_from_hub that was killed
    if command == "enjoy" and not (has_display or values.no_render):
        print("There is no display to show the agent on, so only its returns are printed; record_video makes a video")
        values.no_render = True
    elif command == "train":
        if values.track:
            fixes.apply_fixes(stack, [fixes.secrets_in_wandb])
        plan = plan_training(options)
        manager = functools.partial(make_manager, own=_own_manager(options), others=Manager, **plan)
        fixes.replace(stack, rl_zoo3.train, "ExperimentManager", manager)
    elif command in PLOTS:
        from sb3_ano.zoo.figures import figures  # imports pyplot, which only plots need

        # Without a legend there are no curves, which is an error with its reason.
        warnings.filterwarnings("ignore", "No artists with labels found", UserWarning)
        stack.enter_context(figures(command, values, options.take("figure"), has_display=has_display))
    elif is_own and (command == "push_to_hub" or (command == "load_from_hub" and not is_trusted())):
        from sb3_ano.zoo import hub_commands  # imports the safe format

        (hub_commands.push if command == "push_to_hub" else hub_commands.load)(values)
        raise SystemExit(0)
    elif command == "load_from_hub":
        from sb3_ano.zoo.hub_commands import keep_replaced_run

        keep_replaced_run(stack, values)
    if command == "record_training":
        _require_only_videos(values)
    return values
