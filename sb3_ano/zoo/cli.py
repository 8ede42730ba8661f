"""The RL Zoo's command line with this package's algorithms in it."""

import argparse
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
  train    train an agent with tuned hyperparameters; also what bare options mean
  enjoy    load a trained agent, run it and print its returns

examples:
  python zoo_runner.py train --algo ano --env CartPole-v1 -P
  python zoo_runner.py enjoy --algo ano --env CartPole-v1 -f logs --no-render
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
    sys.argv = [f"{os.path.basename(sys.argv[0])} {command}", *rest]
    try:
        with explained_missing_packages():
            register_atari(_env_of(rest))
            _COMMANDS[command]()
    except (ValueError, OSError, TypeError, AssertionError, ArithmeticError, GymnasiumError) as error:
        if os.environ.get("SB3_ANO_TRACEBACK"):
            raise
        # Of these, only ValueError and OSError are surely about the input.
        hint = "" if isinstance(error, ValueError | OSError) else " (SB3_ANO_TRACEBACK=1 shows where it comes from)"
        return _complain(f"{error or repr(error)}{hint}")
    return 0


def _env_of(arguments: Sequence[str]) -> str:
    """The environment that a command's arguments name, or an empty string."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--env", default="")
    try:
        return parser.parse_known_args(arguments)[0].env
    except argparse.ArgumentError:  # the command itself complains
        return ""


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


_COMMANDS: dict[str, Callable[[], None]] = {"train": _train, "enjoy": _enjoy}
