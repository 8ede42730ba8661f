"""Speed of contenders against SB3's PPO: blocks of training in alternation, each contender in a process of its own."""

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeAlias

from sb3_ano.bench.cases import Case, Contender
from sb3_ano.bench.files import cores, machine, now, read_json, write_json
from sb3_ano.bench.processes import (
    SkippedError,
    Threads,
    Worker,
    WorkerError,
    describe_case,
    describe_contender,
    specification,
)
from sb3_ano.bench.progress import Reporter
from sb3_ano.bench.speed_report import summarise

#: Iterations before the first timed one; the first of them compiles and fills caches. Peaks of memory are read after them.
WARM_UP_ITERATIONS = 2
_QUICK_STEPS = 4096
#: Measures one contender and stores what it found.
Contest: TypeAlias = Callable[[Contender], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    :param pairs: pairs of blocks, one of the reference and one of the contender
    :param block_seconds: length of a block, which is rounded to whole iterations, in seconds
    :param threads: of every contender; None tries one and all processors, and takes what is fastest for each
    :param device: SB3's ``device``
    :param quick: whole runs are cut short, so that everything can be tried out; such numbers mean nothing
    """

    pairs: int = 5
    block_seconds: float = 4.0
    threads: int | None = None
    device: str = "auto"
    quick: bool = False


@dataclass
class Interpreters:
    """Which Python runs which library.

    :param sbx: the one that has sbx, or None
    """

    sbx: str | None = None

    def of(self, contender: Contender) -> str:
        """The interpreter of a contender.

        :raises SkippedError: if there is none
        """
        if contender.library != "sbx":
            return sys.executable
        if self.sbx is None:
            raise SkippedError("sbx is not installed here; --sbx-python names an interpreter that has it")
        return self.sbx


class Ready:
    """A contender that is warm: built, compiled, at its best number of threads.

    :param worker: its process, which is closed with this
    :param contender: for its name
    :param threads: that it was given
    :param settings: for the length of a block
    """

    def __init__(self, worker: Worker, contender: Contender, threads: Threads, settings: Settings) -> None:
        self.name = contender.name
        self.threads = threads
        self._worker = worker
        self._built = worker.ask("build")
        for _ in range(WARM_UP_ITERATIONS):
            last = worker.ask("run", iterations=1)
        self._memory = {
            "after_imports_bytes": worker.description["rss_bytes"],
            "peak_bytes": last["rss_bytes"],
            "largest_child_bytes": last["children_rss_bytes"],
            "iterations": WARM_UP_ITERATIONS,
        }
        self._iterations = max(1, round(settings.block_seconds / last["seconds"]))

    def block(self, share: float = 1.0) -> dict[str, Any]:
        """Train for a block, or a share of it."""
        return self._worker.ask("run", iterations=max(1, round(share * self._iterations)))

    def profile(self, parts: bool = True) -> dict[str, Any]:
        """Train for a block with stopwatches inside."""
        return self._worker.ask("profile", iterations=self._iterations, parts=parts)

    def describe(self) -> dict[str, Any]:
        """Everything about this process that belongs to its numbers."""
        return {
            "threads": dataclasses.asdict(self.threads),
            "iterations_per_block": self._iterations,
            "memory": self._memory,
            "versions": self._worker.description["versions"],
            "device": self._built["device"],
            "steps_per_iteration": self._built["steps_per_iteration"],
        }

    def close(self) -> None:
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class CaseFile:
    """The results of one case, on disk after every change.

    :param folder: of the results
    :param case: what is measured
    :param settings: how
    :param command: the command line, for the record
    :param redo: names of contenders whose results are thrown away; None keeps all
    :raises ValueError: if the file there was measured otherwise, and nothing is to be thrown away
    """

    def __init__(
        self, folder: Path, case: Case, settings: Settings, command: str, redo: Collection[str] | None = None
    ) -> None:
        self.path = folder / f"{case.name}.json"
        measured = {"case": describe_case(case), "settings": dataclasses.asdict(settings)}
        self.content: dict[str, Any] = {**measured, "commands": [], "reference": None, "contenders": {}}
        found = read_json(self.path)
        if found is not None:
            if all(found.get(key) == value for key, value in measured.items()):
                self.content = found
            elif redo is None:
                raise ValueError(f"{self.path} was measured with other settings; --force measures again, --out goes elsewhere")
        for name in redo or ():
            self.content["contenders"].pop(name, None)
        self.content["machine"] = machine()
        if command not in self.content["commands"]:
            self.content["commands"].append(command)

    def is_finished(self, contender: Contender) -> bool:
        """Whether this contender, as it is now, has been measured."""
        record = self.content["contenders"].get(contender.name, {})
        return record.get("status") == "finished" and record["contender"] == describe_contender(contender)

    def put(self, contender: Contender, status: str, **record: Any) -> None:
        """Store what is known of a contender."""
        described = {"contender": describe_contender(contender), "status": status, "date": now()}
        self.content["contenders"][contender.name] = described | record
        self.save()

    def save(self) -> None:
        """Write the file."""
        self.content["summary"] = [dataclasses.asdict(row) for row in summarise(self.content)]
        write_json(self.path, self.content)


def measure_case(
    case: Case,
    contenders: Collection[Contender],
    settings: Settings,
    file: CaseFile,
    interpreters: Interpreters,
    reporter: Reporter,
) -> list[str]:
    """Measure what is missing in ``file``.

    :param case: what to measure
    :param contenders: those of the case that are wanted, with or without the reference
    :param settings: how
    :param file: where results go
    :param interpreters: by library
    :param reporter: progress, one unit for each pair
    :return: a line for each contender that failed
    """
    missing = []
    for contender in contenders:
        if contender.name != case.reference.name and file.is_finished(contender):
            reporter.advance(settings.pairs)
        elif contender.name != case.reference.name:
            missing.append(contender)
    failures: list[str] = []
    if not missing and file.content["reference"] is not None:
        return failures
    measure = _steady if case.total_steps is None else _whole
    try:
        with measure(case, settings, file, interpreters, reporter) as contest:
            for contender in missing:
                line = _attempt(contest, contender, file)
                if line is not None:
                    failures.append(f"{case.name}: {contender.name}: {line}")
                    reporter.note(failures[-1])
    except WorkerError as error:
        failures.append(f"{case.name}: {case.reference.name}: {error}")
    return failures


def _attempt(contest: Contest, contender: Contender, file: CaseFile) -> str | None:
    """Measure one contender; a line if it failed."""
    try:
        contest(contender)
    except SkippedError as error:
        file.put(contender, "skipped", message=str(error))
    except WorkerError as error:
        file.put(contender, "failed", message=str(error))
        return str(error)
    return None


@contextlib.contextmanager
def _steady(
    case: Case, settings: Settings, file: CaseFile, interpreters: Interpreters, reporter: Reporter
) -> Iterator[Contest]:
    """Measures contenders against a reference that stays warm."""
    reporter.describe(f"{case.name}: {case.reference.name}: warming up")
    reference, calibration = calibrated(case, case.reference, settings, interpreters)
    with reference:
        shares = reference.profile()
        file.content["reference"] = {"date": now(), **reference.describe(), "calibration": calibration, "profile": shares}
        file.save()

        def contest(contender: Contender) -> None:
            reporter.describe(f"{case.name}: {contender.name}: warming up")
            ready, calibration = calibrated(case, contender, settings, interpreters)
            with ready:
                record: dict[str, Any] = {**ready.describe(), "calibration": calibration, "pairs": []}
                for pair in range(settings.pairs):
                    reporter.describe(f"{case.name}: {contender.name}: pair {pair + 1} of {settings.pairs}")
                    record["pairs"].append(_pair(None if contender.env_only else reference, ready, pair))
                    file.put(contender, "unfinished", **record)
                    reporter.advance()
                if not contender.env_only:
                    record["profile"] = ready.profile()
                file.put(contender, "finished", **record)

        yield contest


def _pair(reference: Ready | None, contender: Ready, number: int) -> dict[str, Any]:
    """A block of each; who begins changes from pair to pair."""
    if reference is None:
        return {"first": "contender", "reference": None, "contender": contender.block()}
    ready = {"reference": reference, "contender": contender}
    order = ["reference", "contender"] if number % 2 == 0 else ["contender", "reference"]
    return {"first": order[0], **{role: ready[role].block() for role in order}}


def calibrated(
    case: Case, contender: Contender, settings: Settings, interpreters: Interpreters
) -> tuple[Ready, list[dict[str, Any]]]:
    """Start a contender at its best number of threads.

    :param case: what to train on
    :param contender: how
    :param settings: whether to try, and the length of a block
    :param interpreters: by library
    :return: the warm contender, and the steps a second of all that was tried
    """
    candidates = thread_candidates(case, contender, settings.threads)
    tried: list[dict[str, Any]] = []
    best: Ready | None = None
    best_speed = 0.0
    with contextlib.ExitStack() as losers:
        for threads in candidates:
            spec = specification(case, contender, threads, settings.device)
            worker = Worker(spec, interpreters.of(contender))
            losers.callback(worker.close)
            ready = Ready(worker, contender, threads, settings)
            if len(candidates) == 1:
                best = ready
                break
            speed = max(_steps_per_second(ready.block(0.5)) for _ in range(2))
            tried.append({"threads": dataclasses.asdict(threads), "steps_per_second": speed})
            worse = ready
            if best is None or speed > best_speed:
                worse, best, best_speed = best or ready, ready, speed
            if worse is not best:
                worse.close()
        assert best is not None
        losers.pop_all()
    return best, tried


def thread_candidates(case: Case, contender: Contender, threads: int | None) -> list[Threads]:
    """Numbers of threads to try: one and all processors, for the network and, where it has threads, for the environment.

    :param case: what to train on
    :param contender: how
    :param threads: the only number to try, or None
    """
    if threads is not None:
        return [Threads(threads, threads)]
    numbers = sorted({1, cores()})
    if case.n_envs is not None and contender.envs == "ano":
        networks = [1] if contender.env_only else numbers
        return [Threads(network, envs) for network, envs in product(networks, numbers)]
    return [Threads(network, 1) for network in ([1] if contender.env_only else numbers)]


def _steps_per_second(block: dict[str, Any]) -> float:
    return block["steps"] / block["seconds"]


@contextlib.contextmanager
def _whole(
    case: Case, settings: Settings, file: CaseFile, interpreters: Interpreters, reporter: Reporter
) -> Iterator[Contest]:
    """Measures whole runs, each in a fresh process."""
    assert case.total_steps is not None
    steps = min(case.total_steps, _QUICK_STEPS) if settings.quick else case.total_steps

    def best_threads(contender: Contender) -> tuple[Threads, list[dict[str, Any]]]:
        candidates = thread_candidates(case, contender, settings.threads)
        if len(candidates) == 1:
            return candidates[0], []
        reporter.describe(f"{case.name}: {contender.name}: looking for the best number of threads")
        ready, calibration = calibrated(case, contender, settings, interpreters)
        ready.close()
        return ready.threads, calibration

    reference_threads, reference_calibration = best_threads(case.reference)
    file.content["reference"] = {
        "date": now(),
        "threads": dataclasses.asdict(reference_threads),
        "calibration": reference_calibration,
    }
    file.save()
    with tempfile.TemporaryDirectory(prefix="sb3-ano-warm-") as warm:

        def run(contender: Contender, threads: Threads) -> dict[str, Any]:
            with _compile_cache(contender, warm) as environment:
                start = time.perf_counter()
                spec = specification(case, contender, threads, settings.device)
                with Worker(spec, interpreters.of(contender), environment) as worker:
                    reply = worker.ask("whole", steps=steps)
                return reply | {"process_seconds": time.perf_counter() - start, "versions": worker.description["versions"]}

        def contest(contender: Contender) -> None:
            threads, calibration = best_threads(contender)
            if contender.compile_cache == "warm":
                reporter.describe(f"{case.name}: {contender.name}: filling the cache")
                run(contender, threads)
            record: dict[str, Any] = {"threads": dataclasses.asdict(threads), "calibration": calibration, "pairs": []}
            runs = {"reference": (case.reference, reference_threads), "contender": (contender, threads)}
            for pair in range(settings.pairs):
                reporter.describe(f"{case.name}: {contender.name}: pair {pair + 1} of {settings.pairs}")
                order = ["reference", "contender"] if pair % 2 == 0 else ["contender", "reference"]
                record["pairs"].append({"first": order[0], **{role: run(*runs[role]) for role in order}})
                file.put(contender, "unfinished", **record)
                reporter.advance()
            record["memory"] = _peak_of_runs(record["pairs"], "contender")
            file.content["reference"]["memory"] = _peak_of_runs(record["pairs"], "reference")
            file.put(contender, "finished", **record)

        yield contest


def _peak_of_runs(pairs: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Memory of whole runs, the median of their peaks."""
    return {"peak_bytes": statistics.median(pair[role]["rss_bytes"] for pair in pairs)}


@contextlib.contextmanager
def _compile_cache(contender: Contender, warm: str) -> Iterator[dict[str, str]]:
    """The environment variable for the folder of compiled code."""
    if contender.compile_cache == "cold":
        with tempfile.TemporaryDirectory(prefix="sb3-ano-cold-", ignore_cleanup_errors=True) as cold:
            yield {"TORCHINDUCTOR_CACHE_DIR": cold}
    else:
        yield {"TORCHINDUCTOR_CACHE_DIR": warm} if contender.compile_cache == "warm" else {}
