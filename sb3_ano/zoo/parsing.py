"""The zoo's own parsers with this package's options in them, so that nothing parses the zoo's options a second time."""

import argparse
import contextlib
import functools
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

from sb3_ano.cli import Parser

#: Commands that plot, in ``rl_zoo3.plots``.
PLOTS = ("plot_train", "all_plots", "plot_from_file")


class Options:
    """The options of a command: those of the zoo's parser, and ours.

    :param command: name of the command
    :param program: program and command as the user typed them
    :param parse_args: ``parse_args`` of the zoo's parser, to which our options have been added
    :param arguments: command line
    """

    def __init__(
        self, command: str, program: str, parse_args: Callable[..., argparse.Namespace], arguments: Sequence[str]
    ) -> None:
        self.command = command
        self.program = program
        self.parse = parse_args
        self.arguments = list(arguments)
        #: Values of all options.
        self.values = self.parse(self.arguments)
        self._names = list(vars(self.values))

    def given(self) -> dict[str, Any]:
        """Return the values of the options that are on the command line, by destination."""
        # argparse sets defaults only for attributes that a namespace lacks.
        missing = object()
        blank = argparse.Namespace(**dict.fromkeys(self._names, missing))
        return {name: value for name, value in vars(self.parse(self.arguments, blank)).items() if value is not missing}

    def take(self, name: str) -> Any:
        """Remove one of our options, which the zoo would write into ``args.yml``, and return its value or None."""
        return vars(self.values).pop(name, None)

    def command_line(self, without: Collection[str]) -> str:
        """Return the command line with some options left out, quoted for a shell.

        :param without: destinations of the options to leave out
        """
        words = self.program.split()
        for name, value in self.given().items():
            if name in without:
                continue
            words.append(f"--{name.replace('_', '-')}")
            if isinstance(value, dict):  # KEY:VALUE, which the zoo evaluates
                words += [f"{key}:{setting!r}" for key, setting in value.items()]
            elif isinstance(value, list):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return shlex.join(words)


@contextlib.contextmanager
def added_options(
    command: str, arguments: Sequence[str], program: str, prepare: Callable[[Options], argparse.Namespace]
) -> Iterator[None]:
    """Let the zoo's parser of a command parse ``arguments``, with our options and messages.

    The zoo makes its parsers inside of its functions and scripts. So ``parse_args`` is replaced until its first call.

    :param command: name of the command
    :param arguments: command line without the command
    :param program: program and command as the user typed them
    :param prepare: called with the parsed options; returns what the zoo gets
    """
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *_: Any) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        if " " in parser.prog:  # the zoo's plots have a sentence there
            parser.description = parser.prog
        parser.prog = program
        parser.error = functools.partial(Parser.error, parser)  # type: ignore[method-assign, arg-type]
        _add_options(parser, command)
        for action in getattr(parser, "_actions", ()):
            if action.dest in ("algo", "env") and isinstance(action.default, str):
                action.help = f"{action.help} (default: %(default)s)"
        try:
            options = Options(command, program, functools.partial(original, parser), arguments)
        except (NameError, SyntaxError) as error:  # the zoo evaluates the values of KEY:VALUE
            message = f"{error}: options KEY:VALUE take Python values, such as clip_range:0.3 or \"shaping:'spo'\""
            raise ValueError(message) from error
        return prepare(options)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
        yield


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    add = parser.add_argument_group("added by sb3_ano").add_argument
    if all(action.dest != "gym_packages" for action in getattr(parser, "_actions", ())):
        what = "import these modules first, which register environments"
        add("--gym-packages", metavar="MODULE", nargs="+", default=[], help=f"{what} (default: those of the run's training)")
    if command == "train":
        add("--resume", action="store_true", help="resume the newest run of --algo and --env from its last checkpoint")
        add("--checkpoint-freq", metavar="STEPS", type=int, help="steps between checkpoints, 0: none (default: one a minute)")
        add("--cluster", metavar="ADDRESS", nargs="?", const="", help="train on this Ray cluster, the one here, or a new one")
        add("--env-runners", metavar="N", type=int, help="processes that step environments, with --cluster (default: 2)")
        add("--learners", metavar="N", type=int, help="processes that train, with --cluster (default: 0, the main process)")
    elif command in PLOTS:
        add("--figure", metavar="FILE", help="save the plot to FILE instead of showing it: png, svg, pdf, ...")
    else:
        add("--trust-remote-code", action="store_true", help="load files that can run code of their author, such as pickles")
