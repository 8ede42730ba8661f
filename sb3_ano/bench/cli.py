"""The command line ``python -m sb3_ano.bench``."""

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sb3_ano._secrets import hide
from sb3_ano._system import cores
from sb3_ano.cli import Parser, complain, run
from sb3_ano.extras import missing_extra, printable

_EPILOG = "'COMMAND --help' shows the options of a command. Set SB3_ANO_TRACEBACK=1 to see where an error comes from."
_SCORES = "td3, simbav2 (MuJoCo), mnih2015, wang2016 (Atari), classic; or CSV files: env, random, and expert or human"
_GRID = "hyperparameters to vary: clip_range=0.1,0.2, papo.omega=0.001,0.01; or paper, for the paper's search"


def main(arguments: Sequence[str] | None = None, program: str = "python -m sb3_ano.bench") -> int:
    """Run a command.

    :param arguments: command line, by default that of the process
    :param program: name of the program in help texts
    :return: exit status: 1 if runs failed, 2 after an error, 130 after an interrupt
    """

    def command(rest: list[str]) -> int:
        options = _parser(program).parse_args(rest or ["--help"])
        options.command_line = hide(shlex.join([*program.split(), *rest]))

        try:
            return _COMMANDS[options.command](options)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            # Ray is an extra of its own, because few experiments need it.
            extra = "bench"
            if package == "ray":
                extra = "ray"
            raise missing_extra(extra, package) from error

    _print_any_letter()
    return run(command, arguments, "interrupted; the same command resumes from here")


def _print_any_letter() -> None:
    """Make standard output take the letters of paths and tasks that the locale lacks."""
    # Such as a test's
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    if sys.stdout.errors == "surrogateescape":
        # The locale is C, in which Python reads UTF-8 in paths as bytes, and writes the same bytes.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    elif sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        description="Experiments with the algorithms of this package.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        description = f"{help[0].upper()}{help[1:]}."
        formatter = argparse.ArgumentDefaultsHelpFormatter
        return commands.add_parser(
            name,
            help=help,
            description=description,
            formatter_class=formatter,
        )

    add = command(
        "run", "train every algorithm on every task of a suite; a killed command resumes if it is run again"
    ).add_argument
    add("--suite", required=True, metavar="NAME", help="mujoco, mujoco-v5, atari, classic, or a YAML file")
    add("--envs", nargs="+", metavar="ID", help="tasks of the suite, such as Hopper-v4 or Hopper; all by default")
    names = ["ppo", "trpo", "spo", "papo", "ano"]
    add("--algos", nargs="+", metavar="NAME", default=names, help="algorithms, with options: ano:shaping=spo,desired_kl=0.01")
    add("--seeds", default="5", help="number of seeds, or seeds such as 3-5 or 0,3-5")
    add("--steps", type=_positive_integer, help="environment steps of each run; the suite's by default")
    add("--grid", nargs="+", metavar="NAME=VALUES", default=[], help=_GRID)
    add("--jobs", type=_positive_integer, help="runs at a time; processors divided by threads by default")
    add("--threads", type=_positive_integer, default=1, help="threads of each run")
    add("--device", default="cpu", help="SB3's device")
    add("--backend", choices=["local", "ray"], default="local", help="where the runs are made")
    add("--address", help="address of a Ray cluster, such as auto; by default, Ray is started on this machine")
    add("--no-models", action="store_true", help="do not keep the final models")
    add("--plan", action="store_true", help="check and show the plan, and stop")
    add("--out", type=Path, default=Path("experiments"), help="directory of the results")

    add = command("report", "write tables and figures of the results, as one HTML page and as files").add_argument
    add("results", type=Path, help="directory of 'run --out'")
    add("--out", type=Path, help="directory of the report; 'report' in that of the results by default")
    add("--tables", nargs="+", metavar="TABLE", default=["td3", "mnih2015", "classic"], help=f"reference scores: {_SCORES}")
    add("--returns", choices=["evaluation", "training"], default="evaluation", help="which returns scores come from")
    add("--last", type=_positive_integer, default=1, help="number of last evaluations that a final return averages")
    add("--reps", type=_positive_integer, default=2000, help="resamples of the bootstrap")

    add = command("export", "write results as rows of CSV files").add_argument
    add("results", type=Path, nargs="+", help="directories of 'run --out'")
    add("--out", type=Path, required=True, help="directory of runs.csv and curves.csv; rows that are there are kept")
    return parser


def _positive_integer(text: str) -> int:
    # int() would take signs and underscores, too.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed are positive integers")
    return int(text)


# PyTorch and matplotlib take seconds to import, which help and bad options need not wait for.


def _run(options: argparse.Namespace) -> int:
    from sb3_ano.bench import plan, runner
    from sb3_ano.bench.pool import Pool
    from sb3_ano.bench.results import Results, ResultsWriter
    from sb3_ano.bench.suites import load_suite
    from sb3_ano.bench.training import check_device

    # For the imports of a suite; only "python -m" looks in the current directory.
    sys.path.append(os.getcwd())
    suite = load_suite(options.suite)
    if options.envs:
        suite = suite.select(options.envs)
    grid = plan.parse_grid(options.grid)
    seeds = plan.parse_seeds(options.seeds)
    runs = plan.make_plan(suite, options.algos, seeds, grid, options.steps)

    # A cluster's devices are not those of this machine.
    use_ray = options.backend == "ray" or options.address is not None
    if not use_ray:
        check_device(options.device)
    runner.check_runs(runs)
    if options.plan:
        # Read only: a plan that is shown makes no directory.
        finished_names: list[str] = []
        if (options.out / "runs").is_dir():
            finished_names = Results(options.out).names()
        runner.show_plan(runs, finished_names)
        return 0

    with ResultsWriter(options.out) as results:
        names = {planned.name for planned in runs}
        finished = {done.path.name for done in results.runs(names)}
        runner.show_plan(runs, finished)

        # Results are kept, so that the same command resumes.
        missing = [planned for planned in runs if planned.name not in finished]
        if not missing:
            return 0

        if use_ray:
            from sb3_ano.bench.ray_backend import RayPool

            executor: Pool = RayPool(options.address, options.jobs, options.threads)
        else:
            jobs = options.jobs or max(1, cores() // options.threads)
            executor = Pool(jobs, options.threads, results.held)

        training = {"device": options.device, "models": not options.no_models}
        failures = runner.execute(missing, executor, results, training)

    if not failures:
        return 0
    for name, error in failures.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    complain(f"{len(failures)} of {len(runs)} runs failed; the others are kept, and the same command tries these again")
    return 1


def _report(options: argparse.Namespace) -> int:
    from sb3_ano.bench.report import Settings, write_report

    # Next to the runs, whose directory no other command reads.
    out = options.out or options.results / "report"
    settings = Settings(
        returns=options.returns,
        last=options.last,
        reps=options.reps,
        tables=tuple(options.tables),
        command=options.command_line,
    )
    # The same notes are in the report.
    for note in write_report(options.results, out, settings):
        print(printable(note))
    print(out / "index.html")
    return 0


def _export(options: argparse.Namespace) -> int:
    from sb3_ano.bench.export import export

    # Each replaces the rows of its own runs only.
    for path in options.results:
        print(export(path, options.out))
    return 0


_COMMANDS = {"run": _run, "report": _report, "export": _export}

if __name__ == "__main__":
    raise SystemExit(main())
