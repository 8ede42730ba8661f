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
from pathlib import Path

import rl_zoo3.train

from sb3_ano._registry import ALGORITHMS
from sb3_ano.envs import explained_missing_packages, register_atari
from sb3_ano.zoo import fixes
from sb3_ano.zoo.manager import Manager, no_empty_directories
from sb3_ano.zoo.parsing import Options, added_options
from sb3_ano.zoo.resume import plan_training
from sb3_ano.zoo.settings import is_trusted, require_trust


def run_command(name: str, arguments: Sequence[str], program: str) -> None:
    """Run a command of the zoo.

    :param name: name of the command
    :param arguments: command line without the command
    :param program: program and command as the user typed them
    :raises ValueError: if an option is invalid
    :raises SystemExit: after help, or if nothing remains to be done
    """
    prepare, needed = _COMMANDS[name]
    with ExitStack() as stack:
        stack.enter_context(explained_missing_packages())
        stack.enter_context(warnings.catch_warnings())
        # Imported before names are replaced, so that no module of the zoo keeps a replacement.
        package = "rl_zoo3.plots" if prepare is _plot else "rl_zoo3"
        if name not in _SCRIPTS:
            importlib.import_module(f"{package}.{name}")
        if "--trust-remote-code" in arguments:
            fixes.set_variable(stack, "TRUST_REMOTE_CODE", "1")  # which children inherit
        fixes.apply_fixes(stack, needed)

        def prepared(options: Options) -> argparse.Namespace:
            options.take("trust_remote_code")
            if isinstance(env := getattr(options.values, "env", None), str):
                register_atari(env)
            prepare(options, stack)
            return options.values

        stack.enter_context(added_options(name, arguments, program, prepared))
        if name in _SCRIPTS:
            # With fewer environments than in training, minibatches can have odd sizes, which does not matter for acting.
            warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
            # As a command, a module that has been imported runs a second time, as with "python -m".
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(f"rl_zoo3.{name}", run_name="__main__")
        else:
            # rl_zoo3.plots has functions of its modules' names, which hide the modules.
            getattr(sys.modules[f"{package}.{name}"], name)()


def _train(options: Options, stack: ExitStack) -> None:
    values = options.values
    if values.optimize_hyperparameters:
        # A search that cannot start leaves no directory.
        directory = Path(values.log_folder, values.algo, "searches")
        stack.enter_context(no_empty_directories(directory, directory.parent, directory.parent.parent))
    manager = functools.partial(Manager, **plan_training(options))
    fixes.replace(stack, rl_zoo3.train, "ExperimentManager", manager)


def _enjoy(options: Options, stack: ExitStack) -> None:
    _take_from_logs(options)
    if not (_has_display() or options.values.no_render):
        print("There is no display to show the agent on, so only its returns are printed; record_video makes a video")
        options.values.no_render = True


def _record(options: Options, stack: ExitStack) -> None:
    _take_from_logs(options)
    _render_without_display(stack)


def _benchmark(options: Options, stack: ExitStack) -> None:
    """Prepare nothing."""


def _plot(options: Options, stack: ExitStack) -> None:
    from sb3_ano.zoo.figures import figures  # imports pyplot, which only plots need

    if options.command == "plot_from_file":
        fixes.apply_fixes(stack, [fixes.comparable_results(options.values)])
    # Without a legend there are no curves, which is an error with its reason.
    warnings.filterwarnings("ignore", "No artists with labels found", UserWarning)
    file = options.take("figure")
    stack.enter_context(figures(options.command, options.values, file, has_display=_has_display()))


def _push_to_hub(options: Options, stack: ExitStack) -> None:
    from sb3_ano.zoo.hub_commands import push

    _render_without_display(stack)
    if options.values.algo in ALGORITHMS:
        push(options.values)
        raise SystemExit(0)


def _load_from_hub(options: Options, stack: ExitStack) -> None:
    from sb3_ano.zoo.hub_commands import load

    if options.values.algo in ALGORITHMS and not is_trusted():
        load(options.values)
        raise SystemExit(0)
    require_trust()


def _take_from_logs(options: Options) -> None:
    """Take agents from where ``train`` writes them, if ``-f`` is not given; the zoo downloads others to another directory."""
    values = options.values
    trained = any(Path("logs", values.algo).glob(f"{values.env}_*"))
    if (values.algo in ALGORITHMS or trained) and "folder" not in options.given():
        values.folder = "logs"


def _render_without_display(stack: ExitStack) -> None:
    from sb3_ano.hub.video import software_rendering  # only videos need it

    stack.enter_context(software_rendering())


def _has_display() -> bool:
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


_SCRIPTS = ("record_video", "record_training", "benchmark", "push_to_hub", "load_from_hub")
_AGENTS = (fixes.unsafe_settings, fixes.newest_run_without_agent)
_DOWNLOADS = (*_AGENTS, fixes.untrusted_downloads, fixes.missing_optional_file)
_COMMANDS: dict[str, tuple[Callable[[Options, ExitStack], None], tuple[fixes.Fix, ...]]] = {
    "train": (_train, ()),
    "enjoy": (_enjoy, _DOWNLOADS),
    "record_video": (_record, _AGENTS),
    "record_training": (_record, (*_AGENTS, fixes.child_processes, fixes.missing_ffmpeg)),
    "benchmark": (_benchmark, (*_DOWNLOADS, fixes.child_processes)),
    "plot_train": (_plot, ()),
    "all_plots": (_plot, (fixes.single_runs,)),
    "plot_from_file": (_plot, ()),
    "push_to_hub": (_push_to_hub, (*_AGENTS, fixes.missing_metadata, fixes.missing_ffmpeg)),
    "load_from_hub": (_load_from_hub, (fixes.missing_optional_file,)),
}
