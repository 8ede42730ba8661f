"""The command line ``python -m sb3_ano.bench``."""

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
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
        options.command = hide(shlex.join([*program.split(), *rest]))
        try:
            return options.function(options) or 0
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package == "wandb":  # no extra brings it
                raise ValueError("wandb is not installed; install it with: pip install wandb") from error
            raise missing_extra({"ray": "ray", "tensorboard": "zoo"}.get(package, "bench"), package) from error

    _print_any_letter()
    return run(command, arguments, "interrupted; the same command resumes from here")


def _print_any_letter() -> None:
    """Make standard output take the letters of paths and tasks that the locale lacks."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    if sys.stdout.errors == "surrogateescape":
        # The locale is C, in which Python reads UTF-8 in paths as bytes, and writes the same bytes.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    elif sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser(program: str) -> Parser:
    parser = Parser(program, description="Experiments with the algorithms of this package.", epilog=_EPILOG)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int | None], help: str) -> Callable[..., argparse.Action]:
        kind = argparse.ArgumentDefaultsHelpFormatter
        added = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", formatter_class=kind)
        added.set_defaults(function=function)
        return added.add_argument

    add = command("run", _run, "train every algorithm on every task of a suite; a killed command resumes if it is run again")
    add("--suite", required=True, metavar="NAME", help="mujoco, mujoco-v5, atari, classic, or a YAML file")
    add("--envs", nargs="+", metavar="ID", help="tasks of the suite, such as Hopper-v4 or Hopper; all by default")
    names = ["ppo", "trpo", "spo", "papo", "ano"]
    add("--algos", nargs="+", metavar="NAME", default=names, help="algorithms, with options: ano:shaping=spo,desired_kl=0.01")
    add("--seeds", default="5", help="number of seeds, or seeds such as 3-5 or 0,3-5")
    add("--steps", type=_positive_integer, help="environment steps of each run; the suite's by default")
    add("--grid", nargs="+", metavar="NAME=VALUES", default=[], help=_GRID)
    add("--shard", default="1/1", metavar="I/N", help="the I-th of N parts of the plan, to share it between machines")
    add("--jobs", type=_positive_integer, help="runs at a time; processors divided by threads by default")
    add("--threads", type=_positive_integer, default=1, help="threads of each run")
    add("--device", default="cpu", help="SB3's device")
    add("--backend", choices=["local", "ray"], default="local", help="where the runs are made")
    add("--address", help="address of a Ray cluster, such as auto; by default, Ray is started on this machine")
    add("--no-models", action="store_true", help="do not keep the final models")
    add("--plan", action="store_true", help="check and show the plan, and stop")
    add("--out", type=Path, default=Path("experiments"), help="directory of the results")

    add = command("report", _report, "write tables and figures of the results, as one HTML page and as files")
    add("results", type=Path, help="directory of 'run --out'")
    add("--out", type=Path, help="directory of the report; 'report' in that of the results by default")
    add("--tables", nargs="+", metavar="TABLE", default=["td3", "mnih2015", "classic"], help=f"reference scores: {_SCORES}")
    add("--returns", choices=["evaluation", "training"], default="evaluation", help="which returns scores come from")
    add("--last", type=_positive_integer, default=1, help="number of last evaluations that a final return averages")
    add("--reps", type=_positive_integer, default=2000, help="resamples of the bootstrap")

    add = command("export", _export, "write results as CSV, TensorBoard or Weights & Biases logs")
    add("results", type=Path, nargs="+", help="directories of 'run --out'")
    add("--to", choices=["csv", "tensorboard", "wandb"], default="csv", help="format")
    add("--out", type=Path, required=True, help="directory to write; CSV rows that are there are kept")

    add = command("import", _import, "read Monitor files (SB3, RL Zoo) and TensorBoard logs of CleanRL as runs")
    add("logs", type=Path, nargs="+", help="directories with monitor.csv files, or with TensorBoard event files")
    add("--algo", required=True, metavar="NAME", help="name of the algorithm in reports")
    add("--env", metavar="ID", required=True, help="id of the task")
    add("--seed", type=int, default=0, help="seed of the first directory; the next ones follow")
    add("--suite", default="imported", metavar="NAME", help="suite that the runs belong to in reports")
    add("--out", type=Path, required=True, help="directory of the results; reports on it need --returns training")
    return parser


def _positive_integer(text: str) -> int:
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

    sys.path.append(os.getcwd())  # for the imports of a suite; only "python -m" looks in the current directory
    suite = load_suite(options.suite)
    tasks = suite.select(options.envs) if options.envs else suite
    seeds, shard, grid = plan.parse_seeds(options.seeds), plan.parse_shard(options.shard), plan.parse_grid(options.grid)
    runs = plan.make_plan(tasks, options.algos, seeds, grid, options.steps)[shard]
    use_ray = options.backend == "ray" or options.address is not None
    if not use_ray:
        check_device(options.device)
    runner.check_runs(runs)
    if options.plan:
        runner.show_plan(runs, Results(options.out).names() if (options.out / "runs").is_dir() else [])
        return 0
    with ResultsWriter(options.out) as results:
        finished = {run.path.name for run in results.runs({run.name for run in runs})}
        runner.show_plan(runs, finished)
        missing = [run for run in runs if run.name not in finished]
        if not missing:
            return 0
        if use_ray:
            from sb3_ano.bench.ray_backend import RayPool

            executor: Pool = RayPool(options.address, options.jobs, options.threads)
        else:
            executor = Pool(options.jobs or max(1, cores() // options.threads), options.threads, results.held)
        failures = runner.execute(missing, executor, results, {"device": options.device, "models": not options.no_models})
    for name, error in failures.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if failures:
        complain(f"{len(failures)} of {len(runs)} runs failed; the others are kept, and the same command tries these again")
    return 1 if failures else 0


def _report(options: argparse.Namespace) -> None:
    from sb3_ano.bench.report import Settings, write_report

    out = options.out or options.results / "report"
    settings = Settings(options.returns, options.last, options.reps, tuple(options.tables), options.command)
    for note in write_report(options.results, out, settings):
        print(printable(note))
    print(out / "index.html")


def _export(options: argparse.Namespace) -> None:
    from sb3_ano.bench.exchange import export

    for path in options.results:
        print(export(path, options.out, options.to))


def _import(options: argparse.Namespace) -> None:
    from sb3_ano.bench.exchange import import_logs

    for name in import_logs(options.logs, options.out, options.algo, options.env, options.seed, options.suite):
        print(options.out / "runs" / name)


if __name__ == "__main__":
    raise SystemExit(main())
