"""What the commands of ``python -m sb3_ano.bench`` do with their options."""

import argparse
import sys
from pathlib import Path

import gymnasium as gym

from sb3_ano.bench import parity, plots, scaling, speed, speed_report
from sb3_ano.bench.cases import CASES, Case, all_contenders, select
from sb3_ano.bench.files import read_json, write_json, write_text
from sb3_ano.bench.processes import find_sbx
from sb3_ano.bench.progress import reporting


def run_speed(options: argparse.Namespace, command: str) -> int:
    """Measure speed.

    :param options: of the command line
    :param command: the command line, for the record
    :return: exit status, 1 if a contender failed
    :raises ValueError: for names that are not there, or results that were measured otherwise
    """
    settings = speed.Settings(
        pairs=min(2, options.pairs) if options.quick else options.pairs,
        block_seconds=min(0.5, options.block_seconds) if options.quick else options.block_seconds,
        threads=1 if options.quick and options.threads is None else options.threads,
        device=options.device,
        quick=options.quick,
    )
    # With --scaling alone, the cases are not asked for.
    wanted_cases = () if options.scaling and options.cases is None else select(CASES, options.cases or _names(CASES), "case")
    names = options.contenders or _names(all_contenders(CASES))
    select(all_contenders(CASES), names, "contender")
    interpreters = speed.Interpreters(find_sbx(options.sbx_python))
    failures = _measure_cases(wanted_cases, set(names), settings, interpreters, options, command)
    if options.scaling:
        failures += _measure_scaling(set(names), settings, interpreters, options)
    _write_speed_report(options.out)
    return _verdict(failures)


def _measure_cases(
    cases: tuple[Case, ...],
    names: set[str],
    settings: speed.Settings,
    interpreters: speed.Interpreters,
    options: argparse.Namespace,
    command: str,
) -> list[str]:
    plan = []
    for case in cases:
        contenders = [contender for contender in case.contenders if contender.name in names]
        redo = [contender.name for contender in contenders] if options.force else None
        plan.append((case, contenders, speed.CaseFile(options.out, case, settings, command, redo)))
    total = settings.pairs * sum(len([c for c in chosen if c.name != case.reference.name]) for case, chosen, _ in plan)
    failures: list[str] = []
    if plan:
        with reporting(total) as reporter:
            for case, contenders, file in plan:
                failures += speed.measure_case(case, contenders, settings, file, interpreters, reporter)
    return failures


def _measure_scaling(
    names: set[str], settings: speed.Settings, interpreters: speed.Interpreters, options: argparse.Namespace
) -> list[str]:
    contenders = tuple(contender for contender in scaling.CONTENDERS if contender.name in names)
    steps = min(options.scaling_steps, 20_000) if options.quick else options.scaling_steps
    file = scaling.ScalingFile(options.out / "scaling.json", settings, steps, options.force)
    with reporting(len(contenders) * (1 + len(scaling.NUMBERS_OF_ENVS))) as reporter:
        return scaling.measure_scaling(contenders, settings, file, interpreters, reporter)


def _write_speed_report(folder: Path) -> None:
    """Tables and pictures of everything that is in the folder."""
    contents = [content for case in CASES if (content := read_json(folder / f"{case.name}.json")) is not None]
    text = speed_report.markdown(contents) if contents else ""
    bars = []
    for content in contents:
        rows = speed_report.summarise(content)
        ratios = {row.name: row.ratio for row in rows if row.ratio is not None}
        if ratios:
            bars.append((content["case"]["title"], ratios))
    if bars:
        plots.plot_ratios(bars, folder / "speed.png")
    curves = read_json(folder / "scaling.json")
    if curves is not None:
        text += "\n" + scaling.markdown(curves)
        length = {name: scaling.length_curve(blocks) for name, blocks in curves["length"].items()}
        n_envs = {name: scaling.n_envs_curve(points) for name, points in curves["n_envs"].items()}
        plots.plot_scaling(length, n_envs, folder / "scaling.png")
    write_text(folder / "speed.md", text)
    print(text)


def run_parity(options: argparse.Namespace, command: str) -> int:
    """Compare learning.

    :param options: of the command line
    :param command: the command line, for the record
    :return: exit status, 1 if a run failed
    :raises ValueError: for names that are not there, or results that were made otherwise
    """
    contenders = select(parity.CONTENDERS, options.contenders or _names(parity.CONTENDERS), "contender")
    for env_id in options.envs:
        try:
            gym.spec(env_id)
        except gym.error.Error as error:
            raise ValueError(f"unknown environment {env_id!r}: {error}") from error
    settings = parity.Settings(steps=options.steps, eval_episodes=options.eval_episodes)
    runs = parity.all_runs(dict.fromkeys(options.envs), contenders, options.seeds, settings)
    if options.force:
        for run in runs:
            run.file(options.out).unlink(missing_ok=True)
    done = parity.finished(runs, options.out)
    missing = [run for run in runs if run not in done]
    failures: list[str] = []
    if missing:
        with reporting(len(missing) * settings.steps, remaining=True) as reporter:
            reporter.note(f"{len(done)} of {len(runs)} runs are there, {options.jobs} at a time for the others")
            failures = parity.RunPool(options.out, reporter).execute(missing, options.jobs)
    _write_parity_report(runs, options.out, command)
    return _verdict(failures)


def _write_parity_report(runs: list[parity.Run], folder: Path, command: str) -> None:
    results = parity.finished(runs, folder)
    summary = parity.summarise(results) | {"command": command}
    write_json(folder / "summary.json", summary)
    text = parity.markdown(summary)
    write_text(folder / "summary.md", text)
    if results:
        seeds = len({run.seed for run in results})
        band = f"mean of {seeds} seeds; band: 95% interval of the mean" if seeds > 1 else "one seed"
        plots.plot_learning_curves(parity.learning_curves(results), band, folder / "learning_curves.png")
    print(text)


def _names(items: tuple) -> list[str]:
    return [item.name for item in items]


def _verdict(failures: list[str]) -> int:
    if not failures:
        return 0
    print(f"error: {len(failures)} failed; the first: {failures[0]}", file=sys.stderr)
    return 1
