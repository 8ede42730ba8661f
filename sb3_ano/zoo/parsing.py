"""The zoo's own parsers with this package's options in them, so that its options are written only once."""

import argparse
import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from sb3_ano.cli import Parser
from sb3_ano.zoo.fixes import missing_metadata, replaced

#: Commands that plot, in ``rl_zoo3.plots``.
PLOTS = ("plot_train", "all_plots", "plot_from_file")
# These are run like scripts. The others are functions of the modules of their names.
_SCRIPTS = ("record_video", "record_training", "benchmark", "push_to_hub", "load_from_hub")


class _ParserFound(BaseException):
    """Carry the parser of a command out of the zoo's code, which makes it and then asks it to parse."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


class Options:
    """The options of a command: those of the zoo's parser, and ours.

    :param command: name of the command
    :param program: program and command as the user typed them
    :param arguments: command line without the command
    :raises ValueError: if an option is invalid
    :raises SystemExit: after help
    """

    def __init__(self, command: str, program: str, arguments: Sequence[str]) -> None:
        self.command = command
        self.program = program
        self.arguments = list(arguments)
        self._parser = _zoo_parser(command)

        if " " in self._parser.prog:  # the zoo's plots have a sentence there
            self._parser.description = self._parser.prog
        self._parser.prog = program
        self._parser.error = functools.partial(Parser.error, self._parser)  # type: ignore[method-assign, arg-type]
        _add_options(self._parser, command)

        try:
            #: Values of all options.
            self.values = self.parse(self.arguments)
        except (NameError, SyntaxError) as error:  # the zoo evaluates the values of KEY:VALUE
            message = f"{error}: options KEY:VALUE take Python values, such as clip_range:0.3 or \"shaping:'spo'\""
            raise ValueError(message) from error
        self._names = list(vars(self.values))

    def parse(self, arguments: Sequence[str], values: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse another command line of this command.

        :param arguments: command line without the command
        :param values: values to keep for options that are not on the command line; None takes the defaults
        """
        return self._parser.parse_args(arguments, values)

    def given(self) -> dict[str, Any]:
        """Return the values of the options that are on the command line, by destination."""
        # argparse sets defaults only for attributes that a namespace lacks.
        missing = object()
        blank = argparse.Namespace(**dict.fromkeys(self._names, missing))
        values = vars(self.parse(self.arguments, blank))
        return {name: value for name, value in values.items() if value is not missing}

    def take(self, name: str) -> Any:
        """Remove one of our options, which the zoo would write into ``args.yml``, and return its value or None."""
        return vars(self.values).pop(name, None)


def run_zoo(command: str, values: argparse.Namespace) -> None:
    """Run the zoo's own code of a command.

    :param command: name of the command
    :param values: what its parser returns
    """
    _run(command, lambda parser: values)


def _zoo_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command; nothing of the command runs after the parser is made."""

    def stop(parser: argparse.ArgumentParser) -> argparse.Namespace:
        raise _ParserFound(parser)

    try:
        if command == "push_to_hub":
            with missing_metadata():
                _run(command, stop)
        else:
            _run(command, stop)
    except _ParserFound as found:
        return found.parser
    raise RuntimeError(f"the zoo's {command} parses no options")


def _run(command: str, parse: Callable[[argparse.ArgumentParser], argparse.Namespace]) -> None:
    """Run the zoo's code of a command with another ``parse_args``.

    The zoo makes its parsers inside of its functions and scripts, so that nothing else could be replaced.
    """
    module = f"rl_zoo3.{command}"
    if command in PLOTS:
        module = f"rl_zoo3.plots.{command}"
    if command not in _SCRIPTS:
        import_module(module)
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *_: Any) -> argparse.Namespace:
        # Parsers of other packages come later.
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        return parse(parser)

    with replaced(argparse.ArgumentParser, "parse_args", parse_args):
        # A script does nothing under another name.
        if command in _SCRIPTS:
            runpy.run_module(module, run_name="__main__")
        else:
            # rl_zoo3.plots has functions of its modules' names, which hide the modules.
            getattr(sys.modules[module], command)()


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    add = parser.add_argument_group("added by sb3_ano").add_argument
    # Some commands of the zoo have the option, and some show no defaults.
    has_packages = False
    for action in parser._actions:
        has_packages = has_packages or action.dest == "gym_packages"
        if action.dest in ("algo", "env") and isinstance(action.default, str):
            action.help = f"{action.help} (default: %(default)s)"

    if not has_packages:
        what = "import these modules first, which register environments"
        add("--gym-packages", metavar="MODULE", nargs="+", default=[], help=f"{what} (default: those of the run's training)")
    if command == "train":
        add("--accelerate", action="store_true", help="train PPO and RecurrentPPO in less time, with the same numbers")
        add("--resume", action="store_true", help="resume the newest run of --algo and --env from its last checkpoint")
        add("--checkpoint-freq", metavar="STEPS", type=int, help="steps between checkpoints, 0: none (default: one a minute)")
    elif command in PLOTS:
        add("--figure", metavar="FILE", help="save the plot to FILE instead of showing it: png, svg, pdf, ...")
    else:
        add("--trust-remote-code", action="store_true", help="load files that can run code of their author, such as pickles")
