"""The zoo's commands, each with what has to be in place before it runs."""

import argparse
import contextlib
import dataclasses
import importlib
import os
import runpy
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from sb3_ano.zoo import register
from sb3_ano.zoo.options import TRAIN_PREPARATIONS, named_in

OWN = ("ano", "spo", "papo")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the zoo.

    :param summary: what it does, in a few words
    :param run: called with this package's options and the arguments that are left for the zoo
    """

    summary: str
    run: Callable[[Namespace, list[str]], None]


def show_help(command: str) -> None:
    """Have the zoo print its help on a command, with the default algorithm and environment, which ends with SystemExit."""
    register()
    original = argparse.HelpFormatter._get_help_string

    def with_default(formatter: argparse.HelpFormatter, action: argparse.Action) -> str | None:
        text = original(formatter, action)
        named = action.dest in ("algo", "env") and isinstance(action.default, str)
        return f"{text} (default: %(default)s)" if named else text

    argparse.HelpFormatter._get_help_string = with_default  # type: ignore[method-assign, assignment]
    try:
        _run_zoo(command)
    finally:
        argparse.HelpFormatter._get_help_string = original  # type: ignore[method-assign]


# rl_zoo3 takes seconds to import, which help and typing errors need not wait for: it is imported when a command runs.


def _run_zoo(command: str) -> None:
    """Run the zoo's own code, with ``sys.argv`` as it is, and with what is broken in it repaired."""
    from sb3_ano.zoo import repairs

    repairs.apply_needed(repairs.COMMANDS.get(command, ()))
    if command in ("train", "enjoy", *_PLOTS):
        package = "rl_zoo3.plots" if command in _PLOTS else "rl_zoo3"
        getattr(importlib.import_module(f"{package}.{command}"), command)()
        return
    with warnings.catch_warnings():
        # Minibatches of odd sizes, because there are fewer environments than in training, do not matter for acting.
        warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
        # A repair may have imported the module; as a command it runs anew, as "python -m" would.
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning, module="runpy")
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning, module="<frozen runpy>")
        runpy.run_module(f"rl_zoo3.{command}", run_name="__main__")


def _give(arguments: Sequence[str]) -> None:
    """Make these the arguments that the zoo parses."""
    sys.argv[1:] = arguments


def _train(options: Namespace, arguments: list[str]) -> None:
    register()
    for name in TRAIN_PREPARATIONS:
        arguments = importlib.import_module(name).prepare(options, arguments)
    _give(arguments)
    _run_zoo("train")


def _enjoy(options: Namespace, arguments: list[str]) -> None:
    register()
    arguments = _from_logs(arguments)
    if not (_has_display() or named_in(arguments).no_render):
        print("There is no display to show the agent on, so that only its returns are printed; record_video makes a video")
        arguments = [*arguments, "--no-render"]
    _give(arguments)
    with _guarded_downloads():
        _run_zoo("enjoy")


def _record(command: str) -> Callable[[Namespace, list[str]], None]:
    def run(options: Namespace, arguments: list[str]) -> None:
        register()
        _give(_from_logs(arguments))
        with _software_rendering():
            _run_zoo(command)

    return run


def _benchmark(options: Namespace, arguments: list[str]) -> None:
    register()
    with _guarded_downloads():
        _run_zoo("benchmark")


def _plot(command: str) -> Callable[[Namespace, list[str]], None]:
    def run(options: Namespace, arguments: list[str]) -> None:
        register()
        from sb3_ano.zoo.figures import figures

        with figures(options.figure, has_display=_has_display()):
            _run_zoo(command)

    return run


def _push_to_hub(options: Namespace, arguments: list[str]) -> None:
    register()
    from sb3_ano.zoo.hub_commands import explained, push

    with _software_rendering(), explained("push to the Hub"):
        if named_in(arguments).algo in OWN:
            push(arguments)
        else:
            _run_zoo("push_to_hub")


def _load_from_hub(options: Namespace, arguments: list[str]) -> None:
    register()
    from sb3_ano.zoo.downloads import require_trust
    from sb3_ano.zoo.hub_commands import explained, load

    if named_in(arguments).algo in OWN and not options.trust_remote_code:
        load(arguments)
        return
    require_trust()
    with explained("load from the Hub"):
        _run_zoo("load_from_hub")


def _from_logs(arguments: list[str]) -> list[str]:
    """Take agents from where ``train`` writes them; the zoo's default, a folder of agents to download, is left for others."""
    named = named_in(arguments)
    if named.folder is not None:
        return arguments
    trained = any(Path("logs", named.algo).glob(f"{named.env.replace('/', '-')}_*"))
    return [*arguments, "-f", "logs"] if named.algo in OWN or trained else arguments


def _guarded_downloads() -> contextlib.AbstractContextManager[None]:
    """The zoo downloads agents that it does not find, which are pickles, and loads them."""
    from sb3_ano.zoo.downloads import guarded_downloads

    return guarded_downloads()


def _has_display() -> bool:
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _software_rendering() -> contextlib.AbstractContextManager[None]:
    from sb3_ano.hub.video import software_rendering

    return software_rendering()


_PLOTS = ("plot_train", "all_plots", "plot_from_file")
COMMANDS: dict[str, Command] = {
    "train": Command("train an agent with the hyperparameters that come with it; also what bare options mean", _train),
    "enjoy": Command("load a trained agent from the folder logs, run it and print its returns", _enjoy),
    "record_video": Command("record a trained agent", _record("record_video")),
    "record_training": Command(
        "record an agent's best and final states and its checkpoints, in one video", _record("record_training")
    ),
    "benchmark": Command("evaluate all agents in a folder, and tabulate their returns", _benchmark),
    "plot_train": Command("plot the returns of training episodes", _plot("plot_train")),
    "all_plots": Command("plot and tabulate evaluations of several algorithms, and keep them in a file", _plot("all_plots")),
    "plot_from_file": Command("plot what all_plots has kept", _plot("plot_from_file")),
    "push_to_hub": Command("evaluate and record an agent, and put it on the Hugging Face Hub", _push_to_hub),
    "load_from_hub": Command("download an agent into the folder that train would have left", _load_from_hub),
}
