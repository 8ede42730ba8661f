"""How the cost of a step changes with the length of a run, and with the number of environments."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from sb3_ano.bench.cases import ANO_COMPILED, CASES, SB3, Case, Contender, select
from sb3_ano.bench.files import cores, machine, now, read_json, write_json
from sb3_ano.bench.processes import Threads, Worker, WorkerError, specification
from sb3_ano.bench.progress import Reporter
from sb3_ano.bench.speed import Interpreters, Ready, Settings

CONTENDERS: tuple[Contender, ...] = (SB3, ANO_COMPILED)
NUMBERS_OF_ENVS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROLLOUT = 2048


class ScalingFile:
    """The points measured so far, on disk after every one.

    :param path: the file
    :param settings: how points are measured
    :param steps: length of the run whose steps are timed
    :param force: throw away what is there
    :raises ValueError: if the file there was measured otherwise
    """

    def __init__(self, path: Path, settings: Settings, steps: int, force: bool) -> None:
        self.path = path
        measured = {"settings": dataclasses.asdict(settings), "steps": steps}
        self.content: dict[str, Any] = {**measured, "machine": machine(), "length": {}, "n_envs": {}}
        found = None if force else read_json(path)
        if found is not None:
            if any(found.get(key) != value for key, value in measured.items()):
                raise ValueError(f"{path} was measured with other settings; --force measures again, --out goes elsewhere")
            self.content = found

    def save(self) -> None:
        """Write the file."""
        write_json(self.path, {**self.content, "date": now()})


def measure_scaling(
    contenders: tuple[Contender, ...], settings: Settings, file: ScalingFile, interpreters: Interpreters, reporter: Reporter
) -> list[str]:
    """Measure the points that are missing in ``file``.

    :param contenders: whose curves
    :param settings: length of a point; threads, one for the network unless given, all processors for environments in C++
    :param file: where they go
    :param interpreters: by library
    :param reporter: progress, one unit for each curve over the length of a run and each number of environments
    :return: a line for each contender that failed
    """
    failures = []
    for contender in contenders:
        try:
            _measure_length(contender, settings, file, interpreters, reporter)
            for n_envs in NUMBERS_OF_ENVS:
                _measure_n_envs(contender, n_envs, settings, file, interpreters, reporter)
        except WorkerError as error:
            failures.append(f"scaling: {contender.name}: {error}")
            reporter.note(failures[-1])
    return failures


def _measure_length(
    contender: Contender, settings: Settings, file: ScalingFile, interpreters: Interpreters, reporter: Reporter
) -> None:
    """Block after block of one long run."""
    (case,) = select(CASES, ["defaults"], "case")
    if contender.name not in file.content["length"]:
        blocks: list[dict[str, Any]] = []
        done = 0
        with _ready(case, contender, settings, interpreters) as ready:
            while done < file.content["steps"]:
                reporter.describe(f"length of the run: {contender.name}: {done:,} of {file.content['steps']:,} steps")
                block = ready.block()
                done += block["steps"]
                blocks.append({"steps_done": done, **block})
        file.content["length"][contender.name] = blocks
        file.save()
    reporter.advance()


def _measure_n_envs(
    contender: Contender,
    n_envs: int,
    settings: Settings,
    file: ScalingFile,
    interpreters: Interpreters,
    reporter: Reporter,
) -> None:
    """One number of environments, with rollouts of one size."""
    points = file.content["n_envs"].setdefault(contender.name, {})
    if str(n_envs) not in points:
        reporter.describe(f"number of environments: {contender.name}: {n_envs}")
        with _ready(case_of(n_envs), contender, settings, interpreters) as ready:
            points[str(n_envs)] = {"threads": dataclasses.asdict(ready.threads), **ready.profile(parts=False)}
        file.save()
    reporter.advance()


def case_of(n_envs: int) -> Case:
    """HalfCheetah-v4 with so many environments; the rollout stays at 2048 samples, so that the update costs the same.

    :param n_envs: a divisor of 2048
    """
    (case,) = select(CASES, ["vec8"], "case")
    return dataclasses.replace(
        case, name=f"vec{n_envs}", n_envs=n_envs, settings={**case.settings, "n_steps": _ROLLOUT // n_envs}
    )


def _ready(case: Case, contender: Contender, settings: Settings, interpreters: Interpreters) -> Ready:
    threads = Threads(settings.threads or 1, settings.threads or cores())
    worker = Worker(specification(case, contender, threads, settings.device), interpreters.of(contender))
    try:
        return Ready(worker, contender, threads, settings)
    except BaseException:
        worker.close()
        raise


def length_curve(blocks: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps done at the end of each block, and microseconds a step in it."""
    return (
        np.array([block["steps_done"] for block in blocks]),
        np.array([1e6 * block["seconds"] / block["steps"] for block in blocks]),
    )


def drift(blocks: list[dict[str, Any]]) -> float:
    """The median cost of a step in the last quarter of a run, in that of the first: 1 is flat."""
    cost = length_curve(blocks)[1]
    quarter = max(1, len(cost) // 4)
    return float(np.median(cost[-quarter:]) / np.median(cost[:quarter]))


def n_envs_curve(points: dict[str, dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of environments, and microseconds a step of collection and of all."""
    ordered = sorted((int(number), point) for number, point in points.items())
    return (
        np.array([number for number, _ in ordered]),
        np.array([1e6 * point["collect"] / point["steps"] for _, point in ordered]),
        np.array([1e6 * point["seconds"] / point["steps"] for _, point in ordered]),
    )


def markdown(content: dict[str, Any]) -> str:
    """Both curves as tables, as Markdown.

    :param content: of the file of :class:`ScalingFile`
    """
    lines = ["### Length of the run and number of environments", ""]
    for name, blocks in content["length"].items():
        cost = length_curve(blocks)[1]
        lines.append(
            f"- `{name}`: {np.median(cost):.0f} us a step over {blocks[-1]['steps_done']:,} steps; the last quarter costs "
            f"{drift(blocks):.2f} times the first"
        )
    lines += ["", "| microseconds a step | environments | collection | whole |", "|---|--:|--:|--:|"]
    for name, points in content["n_envs"].items():
        for number, collection, whole in zip(*n_envs_curve(points), strict=True):
            lines.append(f"| {name} | {number} | {collection:.1f} | {whole:.1f} |")
    return "\n".join(lines) + "\n"
