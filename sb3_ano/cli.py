"""The ``sb3-ano`` command, and the shell that all command lines of this package share."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from sb3_ano._secrets import hidden_output, hide, remember_arguments
from sb3_ano.extras import hint, printable

#: Commands of ``sb3-ano`` that are not RL Zoo's: summary by name. ``sb3_ano.NAME.cli`` has the ``main`` of each.
GROUPS = {
    "bench": "experiments such as the paper's: run, report, export",
    "llm": "alignment of language models on TRL",
}


class Parser(argparse.ArgumentParser):
    """Parse a command line; an error is a ValueError with one line instead of a screen of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ('{self.prog} --help' shows the options)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sb3-ano``: the commands of RL Zoo, ``bench`` and ``llm``.

    :param arguments: command line without the program's name; the process's own by default
    :return: exit status: 0 after success, 2 after an error, 130 after an interrupt
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    if rest == ["--version"]:
        print(f"sb3-ano {importlib.import_module('sb3_ano').__version__}")
        return 0

    group = "zoo"
    program = "sb3-ano"
    if rest and rest[0] in GROUPS:
        group = rest.pop(0)
        program = f"sb3-ano {group}"
    # Imported by name, so that the sub-packages can import the shell below without a cycle.
    return importlib.import_module(f"sb3_ano.{group}.cli").main(rest, program)


def run(command: Callable[[list[str]], int], arguments: Sequence[str] | None = None, interrupted: str = "interrupted") -> int:
    """Run a command and report an error in one line. Keys and passwords are hidden in everything that is printed.

    :param command: function from the command line to the exit status
    :param arguments: command line, by default that of the process
    :param interrupted: message after Ctrl-C
    :return: exit status: the command's, 2 after an error, 130 after an interrupt
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    remember_arguments(given)
    with hidden_output():
        return _run(command, given, interrupted)


def _run(command: Callable[[list[str]], int], arguments: list[str], interrupted: str) -> int:
    try:
        return command(arguments)
    except SystemExit as finished:  # argparse, after help
        if finished.code is None:
            return 0
        if isinstance(finished.code, int):
            return finished.code
        return complain(str(finished.code))
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("SB3_ANO_TRACEBACK"):
            traceback.print_exc()
            return 2
        message = str(error) or repr(error)
        # Only these two are surely about the input.
        if not isinstance(error, ValueError | OSError):
            message += " (SB3_ANO_TRACEBACK=1 shows where it comes from)"
        return complain(message)


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check names against those that are allowed.

    :param what: kind of name, for the message
    :param names: names to check
    :param known: allowed names
    :raises ValueError: for the first unknown name; the message suggests a known one with a similar spelling
    """
    allowed = sorted(known)
    for name in names:
        if name not in allowed:
            raise ValueError(f"unknown {what} {name!r}{hint(str(name), allowed)} (allowed are {', '.join(allowed)})")


def complain(message: str) -> int:
    """Print an error in one line.

    :param message: text of the error, which may come from a stranger's file
    :return: exit status 2
    """
    print(f"error: {printable(hide(message))}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
