"""The command line of the benchmarks."""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from sb3_ano.bench.cases import CASES, all_contenders
from sb3_ano.bench.files import cores

_EPILOG = "'COMMAND --help' shows the options of a command. Set SB3_ANO_TRACEBACK=1 to see where an error comes from."


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_complain(message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark.

    :param arguments: those of the command line; None takes the process's own
    :return: exit status: 1 if something could not be measured, 2 after bad input, 130 after an interrupt
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    if not rest:
        parser.print_help()
        return 0
    if not rest[0].startswith("-") and rest[0] not in commands:
        near = difflib.get_close_matches(rest[0], commands, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return _complain(f"unknown command {rest[0]!r}{hint} (commands are {', '.join(commands)})")
    try:
        options = parser.parse_args(rest)
    except SystemExit as finished:  # after help, or a complaint
        return int(finished.code or 0)
    try:
        return options.run(options, shlex.join(["python", "-m", "sb3_ano.bench", *rest]))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("SB3_ANO_TRACEBACK"):
            raise
        return _complain(str(error) or repr(error))


def _complain(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parsers() -> tuple[_Parser, list[str]]:
    parser = _Parser("python -m sb3_ano.bench", description="Measurements of this package.", epilog=_EPILOG)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_speed(commands)
    _add_parity(commands)
    _add_run(commands)
    _add_report(commands)
    return parser, list(commands.choices)


def _add_speed(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "speed",
        help="steps a second, memory and profile against SB3's PPO",
        description="Training speed against SB3's PPO. Blocks of the two alternate, each in a process of its own at its best "
        "number of threads. Leave the machine alone meanwhile. What is finished is kept; the same command goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    names = [contender.name for contender in all_contenders(CASES)]
    add("--cases", nargs="+", metavar="CASE", help=f"of {', '.join(case.name for case in CASES)}; all without this option")
    add("--contenders", nargs="+", metavar="NAME", help=f"of {', '.join(names)}; all without this option")
    add("--pairs", type=_whole_number, default=5, help="pairs of blocks")
    add("--block-seconds", type=_positive, default=4.0, help="length of a block, seconds")
    add("--threads", type=_whole_number, help="of all contenders; tried out without this option")
    add("--device", default="auto", help="SB3's device")
    add("--sbx-python", metavar="PATH", help="the interpreter that has sbx; without this option, this one if it has it")
    add("--scaling", action="store_true", help="curves over the length of a run and the number of environments")
    add("--scaling-steps", type=_whole_number, default=1_000_000, help="length of that run, steps")
    add("--quick", action="store_true", help="try everything out; the numbers mean nothing")
    _add_common(parser, "speed", _speed)


def _add_parity(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "parity",
        help="does the fast path learn as well as SB3's PPO?",
        description="Trains SB3's PPO and the fast path, with PPO's shape, on the same tasks and seeds, and compares returns "
        "pair by pair. What is finished is kept; the same command goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--envs", nargs="+", metavar="ID", default=["HalfCheetah-v4", "Hopper-v4"], help="tasks")
    add("--contenders", nargs="+", metavar="NAME", help="of sb3, fast-float32, fast-bfloat16; all without this option")
    add("--seeds", type=_whole_number, default=8, help="number of seeds, from 0")
    add("--steps", type=_whole_number, default=300_000, help="environment steps of a training")
    add("--eval-episodes", type=_whole_number, default=20, help="deterministic episodes after it")
    add("--jobs", type=_whole_number, default=cores(), help="trainings at a time, each with one thread")
    _add_common(parser, "parity", _parity)


def _add_run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "run",
        help="the paper's experiments: suite x algorithms x seeds x grid",
        description="Trains and evaluates every algorithm on every task of a suite. Shows the plan and the time it will take, "
        "and runs what is not there yet. Killed at any moment, the same command goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", required=True, metavar="NAME", help="mujoco, mujoco-v5, atari, classic, or a YAML file")
    add("--version", metavar="vN", help="of the tasks, such as v5; without this option, the suite's")
    add("--envs", nargs="+", metavar="ID", help="tasks of the suite, such as Hopper-v4 or Hopper; all without this option")
    add(
        "--algos",
        nargs="+",
        metavar="NAME",
        help="of ppo, trpo, spo, papo, ano, ano:shaping=NAME; the first five without this",
    )
    add("--seeds", type=_whole_number, default=5, help="number of seeds, from 0")
    add("--steps", type=_whole_number, help="environment steps of each run; the suite's without this option")
    add(
        "--grid",
        nargs="+",
        metavar="NAME=VALUES",
        help="hyperparameters to vary, such as clip_range=0.1,0.2,0.3 or papo.omega=0.001,0.01; clip_range, learning_rate, "
        "delta and omega alone take the paper's values, and 'paper' the paper's search",
    )
    add("--jobs", type=_whole_number, help="runs at a time; without this option, cores divided by threads")
    add("--threads", type=_whole_number, default=1, help="of each run")
    add("--device", default="cpu", help="SB3's device")
    add("--backend", choices=["local", "ray"], default="local", help="where the runs are made")
    add("--address", help="of the Ray cluster, such as auto; without this option, one is started on this machine")
    add("--plan", action="store_true", help="show the plan only")
    add("--out", type=Path, default=Path("experiments"), help="folder of the results")
    parser.set_defaults(run=_run)


def _add_report(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "report",
        help="tables and figures of what 'run' has done",
        description="Writes one HTML page that needs nothing else, its figures as PNG and SVG, a Markdown summary, and a CSV "
        "table of the runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("results", type=Path, help="folder of 'run --out'")
    add("--out", type=Path, help="folder of the report; without this option, 'report' in that of the results")
    add(
        "--tables",
        nargs="+",
        metavar="TABLE",
        default=["td3", "mnih2015", "classic"],
        help="reference scores: of td3, simbav2 (MuJoCo), mnih2015, wang2016 (Atari), classic, or a CSV file with the columns "
        "env, random, and expert or human",
    )
    add("--returns", choices=["evaluation", "training"], default="evaluation", help="which episodes scores are from")
    add("--threshold", type=float, default=0.5, help="normalised score whose time is measured")
    add("--reps", type=_whole_number, default=2000, help="resamples of the bootstrap")
    add("--seed", type=int, default=0, help="of the bootstrap")
    parser.set_defaults(run=_report)


def _add_common(parser: argparse.ArgumentParser, out: str, run: Callable[[argparse.Namespace, str], int]) -> None:
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the results")
    parser.add_argument("--force", action="store_true", help="measure again what is finished")
    parser.set_defaults(run=run)


def _whole_number(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed are whole numbers from 1")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed are numbers above 0")
    return value


# PyTorch and matplotlib take seconds to import, which help and typing errors need not wait for.


def _speed(options: argparse.Namespace, command: str) -> int:
    from sb3_ano.bench.commands import run_speed

    return run_speed(options, command)


def _parity(options: argparse.Namespace, command: str) -> int:
    from sb3_ano.bench.commands import run_parity

    return run_parity(options, command)


def _run(options: argparse.Namespace, command: str) -> int:
    from sb3_ano.bench.experiments.command import run_experiments

    return run_experiments(options)


def _report(options: argparse.Namespace, command: str) -> int:
    from sb3_ano.bench.report.command import run_report

    return run_report(options, command)
