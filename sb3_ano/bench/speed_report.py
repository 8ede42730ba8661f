"""From blocks of training to tables: medians, quartiles of the ratios of pairs, memory, shares of time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: A contender counts as not slower if a quarter of its pairs, at most, has a ratio below this.
NOT_SLOWER = 0.97
_REFERENCE = "sb3"


@dataclass(frozen=True)
class Row:
    """One contender of one case.

    :param name: of the contender
    :param status: ``"finished"``, ``"unfinished"``, ``"failed"`` or ``"skipped"``
    :param message: why it failed or was skipped
    :param threads: of the network, and of environments in C++
    :param steps_per_second: median, minimum and maximum over blocks
    :param run_seconds: median, minimum and maximum over whole runs, inside the process
    :param process_seconds: the same, of the whole process
    :param ratio: quartiles of the ratios of steps a second to the reference, pair by pair: lower, median, upper
    :param not_slower: whether the lower quartile is at least ``NOT_SLOWER``
    :param peak_bytes: most resident memory
    :param memory_ratio: of it to that of the reference
    :param shares: of the time: ``env``, ``forward``, ``update``, ``other``
    """

    name: str
    status: str
    message: str = ""
    threads: tuple[int, int] | None = None
    steps_per_second: tuple[float, float, float] | None = None
    run_seconds: tuple[float, float, float] | None = None
    process_seconds: tuple[float, float, float] | None = None
    ratio: tuple[float, float, float] | None = None
    not_slower: bool | None = None
    peak_bytes: float | None = None
    memory_ratio: float | None = None
    shares: Mapping[str, float] | None = None


def summarise(content: Mapping[str, Any]) -> list[Row]:
    """The rows of a case, the reference first.

    :param content: of the case's file
    """
    records = content["contenders"]
    reference = content["reference"] or {}
    pairs = [pair for record in records.values() for pair in record.get("pairs", []) if pair["reference"]]
    peak = reference.get("memory", {}).get("peak_bytes")
    whole = content["case"]["total_steps"] is not None
    rows = []
    if reference:
        blocks = [pair["reference"] for pair in pairs]
        status = "finished" if blocks else "unfinished"
        rows.append(_row(_REFERENCE, status, reference, blocks, [], peak, whole))
    for name, record in records.items():
        blocks = [pair["contender"] for pair in record.get("pairs", [])]
        rows.append(_row(name, record["status"], record, blocks, ratios(record.get("pairs", [])), peak, whole))
    return rows


def ratios(pairs: Iterable[Mapping[str, Any]]) -> list[float]:
    """Steps a second of the contender in those of the reference, pair by pair; above 1 is faster."""
    return [_speed(pair["contender"]) / _speed(pair["reference"]) for pair in pairs if pair["reference"]]


def _speed(block: Mapping[str, Any]) -> float:
    return block["steps"] / block["seconds"]


def _row(
    name: str,
    status: str,
    record: Mapping[str, Any],
    blocks: list[Mapping[str, Any]],
    ratio: list[float],
    reference_peak: float | None,
    whole: bool,
) -> Row:
    threads = record.get("threads")
    peak = record.get("memory", {}).get("peak_bytes")
    quartiles = _quartiles(ratio)
    return Row(
        name,
        status,
        message=record.get("message", ""),
        threads=None if threads is None else (threads["torch"], threads["envs"]),
        steps_per_second=_spread([_speed(block) for block in blocks]),
        run_seconds=_spread([block["seconds"] for block in blocks]) if whole else None,
        process_seconds=_spread([block["process_seconds"] for block in blocks]) if whole else None,
        ratio=quartiles,
        not_slower=None if quartiles is None else quartiles[0] >= NOT_SLOWER,
        peak_bytes=peak,
        memory_ratio=peak / reference_peak if peak and reference_peak else None,
        shares=shares(record["profile"]) if "profile" in record else None,
    )


def _spread(values: list[float]) -> tuple[float, float, float] | None:
    return (float(np.median(values)), min(values), max(values)) if values else None


def _quartiles(values: list[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    low, middle, high = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return low, middle, high


def shares(profile: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time of whole iterations; they sum to 1.

    :param profile: seconds, as a worker measures them
    """
    parts = {name: profile[name] / profile["seconds"] for name in ("env", "forward", "update")}
    return parts | {"other": 1.0 - sum(parts.values())}


def markdown(contents: Iterable[Mapping[str, Any]]) -> str:
    """Tables of all cases, as Markdown.

    :param contents: of the files of the cases
    """
    blocks = []
    for content in contents:
        blocks += [_case_heading(content), _case_table(content)]
        profile = _profile_table(content)
        if profile:
            blocks.append(profile)
    blocks.append(
        "Times SB3: quartiles of the ratios of steps a second, pair by pair (lower, **median**, upper). Threads: of the "
        "network + of the environments, where they differ. Memory: the most that the contender's process had resident."
    )
    return "\n\n".join(blocks) + "\n"


def _case_heading(content: Mapping[str, Any]) -> str:
    machine, settings = content["machine"], content["settings"]
    dates = sorted(record["date"][:10] for record in [content["reference"] or {}, *content["contenders"].values()] if record)
    how = f"{settings['pairs']} pairs" + (
        "" if content["case"]["total_steps"] else f" of {settings['block_seconds']:g} s blocks"
    )
    note = " **A quick run: these numbers mean nothing.**" if settings["quick"] else ""
    versions = _versions(content)
    lines = [f"### {content['case']['title']} (`{content['case']['name']}`)", ""]
    lines.append(
        f"{dates[-1] if dates else 'not measured'}; {machine['cpu']}, {machine['cores']} cores; {how}; {versions}.{note}"
    )
    return "\n".join(lines)


def _versions(content: Mapping[str, Any]) -> str:
    found: dict[str, str] = {}
    for record in [content["reference"] or {}, *content["contenders"].values()]:
        last = record["pairs"][-1]["contender"] if record.get("pairs") else {}
        found |= record.get("versions", {}) | last.get("versions", {})
    return ", ".join(f"{name} {number}" for name, number in found.items() if name != "numpy") or "versions unknown"


def _case_table(content: Mapping[str, Any]) -> str:
    whole = content["case"]["total_steps"] is not None
    measure = ["seconds (range)", "whole process"] if whole else ["steps/s (range)"]
    header = ["contender", "threads", *measure, "times SB3", "memory, MB"]
    lines = [_line(header), _line(["---"] + ["--:"] * (len(header) - 1))]
    for row in summarise(content):
        if row.steps_per_second is None:
            lines.append(_line([row.name, *[""] * (len(header) - 2), f"{row.status}: {row.message}".rstrip(": ")]))
            continue
        numbers = [_seconds(row.run_seconds), _seconds(row.process_seconds)] if whole else [_steps(row.steps_per_second)]
        unfinished = "" if row.status == "finished" else " (unfinished)"
        lines.append(_line([row.name + unfinished, _threads(row), *numbers, _ratio(row), _memory(row)]))
    return "\n".join(lines)


def _profile_table(content: Mapping[str, Any]) -> str:
    rows = [row for row in summarise(content) if row.shares is not None]
    if not rows:
        return ""
    lines = [_line(["share of time", "environment", "forward", "update", "other"]), _line(["---"] + ["--:"] * 4)]
    for row in rows:
        assert row.shares is not None
        # sbx's policy is called in a way that is not timed.
        shown = ["-" if name == "forward" and not share else f"{100 * share:.0f} %" for name, share in row.shares.items()]
        lines.append(_line([row.name, *shown]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _threads(row: Row) -> str:
    if row.threads is None:
        return ""
    network, envs = row.threads
    return str(network) if envs == network else f"{network} + {envs}"


def _steps(spread: tuple[float, float, float]) -> str:
    return "{:,.0f} ({:,.0f} to {:,.0f})".format(*spread)


def _seconds(spread: tuple[float, float, float] | None) -> str:
    return "" if spread is None else "{:.1f} ({:.1f} to {:.1f})".format(*spread)


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else "{:.2f}, **{:.2f}**, {:.2f}".format(*row.ratio)


def _memory(row: Row) -> str:
    if row.peak_bytes is None:
        return ""
    relative = "" if row.memory_ratio is None else f" ({row.memory_ratio:.2f} x SB3)"
    return f"{row.peak_bytes / 1e6:,.0f}" + (relative if row.name != _REFERENCE else "")
