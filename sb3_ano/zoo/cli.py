"""The RL Zoo's command line with this package's algorithms in it."""

import argparse
import ast
import builtins
import contextlib
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from gymnasium.error import Error as GymnasiumError

from sb3_ano.envs import explained_missing_packages, register_atari
from sb3_ano.zoo.commands import COMMANDS, show_help
from sb3_ano.zoo.options import Done, named_in, options_help, take_options

_USAGE = """\
usage: python zoo_runner.py COMMAND ...      (or: python -m sb3_ano.zoo COMMAND ...)

The RL Zoo with ANO, SPO and PAPO (--algo ano|spo|papo) beside its own algorithms.

commands:
{commands}

examples:
  python zoo_runner.py train --algo ano --env CartPole-v1 -P
  python zoo_runner.py enjoy --algo ano --env CartPole-v1 --no-render
  python zoo_runner.py --algo spo --env HalfCheetah-v5 -params clip_range:0.3

'COMMAND --help' shows the options of a command. Set SB3_ANO_TRACEBACK=1 to see where an error comes from."""
_ASSIGNMENTS = ("-params", "--hyperparams", "--env-kwargs", "--eval-env-kwargs")
# Of these, only the first two are surely about the input.
_ERRORS = (
    ValueError,
    OSError,
    TypeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    LookupError,
    RuntimeError,
    GymnasiumError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a zoo command.

    :param arguments: those of the command line; None takes the process's own
    :return: exit status, 2 after bad input
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print(_USAGE.format(commands="\n".join(f"  {name:<17}{command.summary}" for name, command in COMMANDS.items())))
        return 0
    command = "train" if rest[0].startswith("-") else rest.pop(0)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return _complain(f"unknown command {command!r}{hint} (commands are {', '.join(COMMANDS)})")
    program = os.path.basename(sys.argv[0])
    sys.argv = [f"{'python -m sb3_ano.zoo' if program == '__main__.py' else program} {command}", *rest]
    if {"-h", "--help"} & set(rest):
        return _help(command)
    try:
        _run(command, rest)
    except Done as done:
        return done.status
    except _ERRORS as error:
        if os.environ.get("SB3_ANO_TRACEBACK"):
            raise
        hint = "" if isinstance(error, ValueError | OSError) else " (SB3_ANO_TRACEBACK=1 shows where it comes from)"
        return _complain(f"{error or repr(error)}{hint}")
    return 0


def _run(command: str, arguments: list[str]) -> None:
    options, rest = take_options(command, arguments)
    _check_assignments(rest)
    if getattr(options, "trust_remote_code", False):
        os.environ["TRUST_REMOTE_CODE"] = "1"  # which children inherit
    sys.argv[1:] = rest
    with explained_missing_packages(), _usage_errors_of_one_line(command):
        register_atari(named_in(rest).env)
        COMMANDS[command].run(options, rest)


@contextlib.contextmanager
def _usage_errors_of_one_line(command: str) -> Iterator[None]:
    """The zoo's parsers print their usage, which fills a screen, before they say what is wrong.

    :raises ValueError: in place of the exit from the process
    """

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(f"{message} ('{command} --help' shows the options)")

    exit_with_usage = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = exit_with_usage  # type: ignore[method-assign]


def _help(command: str) -> int:
    """Print the zoo's help on a command, and this package's options below it."""
    try:
        try:
            show_help(command)
        except SystemExit as done:
            if done.code:
                raise
        added = options_help(command)
        print(f"\n{added}" if added else "", end="", flush=True)
    except ImportError as error:
        return _complain(str(error))
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _check_assignments(arguments: Sequence[str]) -> None:
    """Complain of KEY:VALUE arguments whose value the zoo could not evaluate, most often text without quotes.

    :raises ValueError: naming the argument
    """
    assigning = False
    for argument in arguments:
        if argument.startswith("-"):
            assigning = argument in _ASSIGNMENTS
        elif assigning:
            key, _, value = argument.partition(":")
            try:
                expression = ast.parse(value, mode="eval").body
            except SyntaxError as error:
                raise ValueError(
                    f"{argument} is not of the form KEY:VALUE with a Python value, such as clip_range:0.3"
                ) from error
            if isinstance(expression, ast.Name) and not hasattr(builtins, value):
                raise ValueError(f"{argument} names no Python value; text needs quotes of its own: \"{key}:'{value}'\"")


def _complain(message: str) -> int:
    # Terminals obey control characters, which may come from a stranger's file.
    line = "".join(character if character.isprintable() else "?" for character in " ".join(message.split()))
    print(f"error: {line}", file=sys.stderr)
    return 2
