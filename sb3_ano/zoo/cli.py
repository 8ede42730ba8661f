"""The RL Zoo's command line with this package's algorithms in it."""

import argparse
import ast
import builtins
import difflib
import os
import sys
from collections.abc import Callable, Sequence

from gymnasium.error import Error as GymnasiumError

from sb3_ano.envs import explained_missing_packages, register_atari
from sb3_ano.zoo import register

_USAGE = """\
usage: python zoo_runner.py COMMAND ...      (or: python -m sb3_ano.zoo COMMAND ...)

The RL Zoo with ANO, SPO and PAPO (--algo ano|spo|papo) beside its own algorithms.

commands:
  train    train an agent with the hyperparameters that come with it; also what bare options mean
  enjoy    load a trained agent from the folder logs, run it and print its returns

examples:
  python zoo_runner.py train --algo ano --env CartPole-v1 -P
  python zoo_runner.py enjoy --algo ano --env CartPole-v1 --no-render
  python zoo_runner.py --algo spo --env HalfCheetah-v5 -params clip_range:0.3

'COMMAND --help' shows the options of a command. Set SB3_ANO_TRACEBACK=1 to see where an error comes from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a zoo command.

    :param arguments: those of the command line; None takes the process's own
    :return: exit status, 2 after bad input
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    command = "train" if rest[0].startswith("-") else rest.pop(0)
    if command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return _complain(f"unknown command {command!r}{hint} (commands are {', '.join(_COMMANDS)})")
    named = _named_in(rest)
    if command == "enjoy" and named.algo in _OWN and named.folder is None:
        rest += ["-f", "logs"]  # where train writes; the zoo's own default is a folder of agents to download
    sys.argv = [f"{os.path.basename(sys.argv[0])} {command}", *rest]
    try:
        if named.optimize_hyperparameters and named.algo in _OWN:
            raise ValueError(f"--optimize-hyperparameters knows no search space for {named.algo} yet")
        _check_assignments(rest)
        with explained_missing_packages():
            register_atari(named.env)
            _COMMANDS[command]()
    except (ValueError, OSError, TypeError, AssertionError, ArithmeticError, ImportError, GymnasiumError) as error:
        if os.environ.get("SB3_ANO_TRACEBACK"):
            raise
        # Of these, only ValueError and OSError are surely about the input.
        hint = "" if isinstance(error, ValueError | OSError) else " (SB3_ANO_TRACEBACK=1 shows where it comes from)"
        return _complain(f"{error or repr(error)}{hint}")
    return 0


def _named_in(arguments: Sequence[str]) -> argparse.Namespace:
    """The options that are looked at before the zoo parses all of them."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--env", default="")
    parser.add_argument("--algo", default="")
    parser.add_argument("-f", "--folder", "--log-folder")
    parser.add_argument("-optimize", "--optimize-hyperparameters", action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError:  # the command itself complains
        return parser.parse_args([])


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
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


# rl_zoo3 takes seconds to import, which help and typing errors need not wait for.


def _train() -> None:
    register()
    from rl_zoo3.train import train

    train()


def _enjoy() -> None:
    register()
    from rl_zoo3.enjoy import enjoy

    enjoy()


_OWN = ("ano", "spo", "papo")
_ASSIGNMENTS = ("-params", "--hyperparams", "--env-kwargs", "--eval-env-kwargs")
_COMMANDS: dict[str, Callable[[], None]] = {"train": _train, "enjoy": _enjoy}
