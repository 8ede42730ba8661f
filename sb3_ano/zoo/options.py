"""Options that this package adds to commands of the zoo, which knows nothing of them."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the command line.

    :param name: with its dashes, ``--figure``
    :param help: what it does, for ``COMMAND --help``
    :param kwargs: further arguments of ``argparse.ArgumentParser.add_argument``
    """

    name: str
    help: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FIGURE = Option(
    "--figure",
    "save the plot to FILE instead of showing it; its ending names the format: png, svg, pdf, ...",
    {"metavar": "FILE"},
)
TRUST = Option(
    "--trust-remote-code",
    "load what would run code that comes with the agent: Python objects in YAML files, pickles; same as TRUST_REMOTE_CODE=1",
    {"action": "store_true"},
)

# Modules with a function ``prepare(options, arguments)``, which train calls in this order before the zoo parses.
TRAIN_PREPARATIONS: list[str] = ["sb3_ano.zoo.resume"]
TRAIN_OPTIONS: list[Option] = [
    Option("--resume", "go on with the newest run of --algo and --env, from its last checkpoint", {"action": "store_true"}),
    Option(
        "--checkpoint-freq",
        "environment steps from one checkpoint to the next; negative for none; one a minute where it is not given",
        {"metavar": "STEPS", "type": int},
    ),
]

OPTIONS: dict[str, list[Option]] = {
    "train": TRAIN_OPTIONS,
    "enjoy": [TRUST],
    "record_video": [TRUST],
    "record_training": [TRUST],
    "benchmark": [TRUST],
    "plot_train": [FIGURE],
    "all_plots": [FIGURE],
    "plot_from_file": [FIGURE],
    "push_to_hub": [TRUST],
    "load_from_hub": [TRUST],
}


def take_options(command: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take this package's options out of a command's arguments.

    :return: their values, and the arguments that are left for the zoo, in their order
    :raises ValueError: if an option's value is missing or not allowed
    """
    parser = _parser(command)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error


def options_help(command: str) -> str:
    """The lines about this package's options that follow the zoo's own in ``COMMAND --help``; empty if there are none."""
    if not OPTIONS[command]:
        return ""
    return _parser(command).format_help().split("\n\n", 1)[1]


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    group = parser.add_argument_group("added by sb3_ano")
    for option in OPTIONS[command]:
        group.add_argument(option.name, help=option.help, **option.kwargs)
    return parser


class Done(Exception):  # noqa: N818  # no error
    """Raised by a preparation that has done the command's work, so that the zoo's own command is not run.

    :param status: exit status of the process
    """

    def __init__(self, status: int = 0) -> None:
        super().__init__(f"done, exit status {status}")
        self.status = status


def named_in(arguments: Sequence[str]) -> argparse.Namespace:
    """The zoo's options, and its defaults, that are looked at before the zoo parses all of them."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("-f", "--folder", "--log-folder")
    parser.add_argument("-o", "--output-folder")
    parser.add_argument("-optimize", "--optimize-hyperparameters", action="store_true")
    parser.add_argument("--no-render", action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError:  # the command itself complains
        return parser.parse_args([])
