"""What other settings do to the scores."""

from collections.abc import Sequence

from sb3_ano.bench.report.contenders import (
    Block,
    Contender,
    rectangles,
    setting_text,
    short_label,
    varied_settings,
    with_other,
)
from sb3_ano.bench.report.content import Cell, Row, Section, Table, estimate, estimate_cell, number, percent, plural
from sb3_ano.bench.report.figures import Bar, draw_bars, draw_settings
from sb3_ano.bench.report.view import SuiteView
from sb3_ano.bench.statistics import METRICS, Estimate, relative_change

_LEARNING_RATE, _LENGTH = "learning_rate", "total_timesteps"
_METRICS = ("IQM", "mean")


def learning_rates(view: SuiteView) -> Section | None:
    """Scores at each learning rate, with the relative change from the lowest (the paper's Figure 3)."""
    families = _families(view, _LEARNING_RATE)
    involved = [one for family in families for one in family]
    blocks, tasks = rectangles(view.results, involved, view.results.scored_tasks)
    if not blocks:
        return None
    by_contender = {block.contender: block for block in blocks}
    groups: dict[str, list[Bar]] = {metric: [] for metric in _METRICS}
    rows: list[Row] = []
    for family in families:
        own = [by_contender[one] for one in family if one in by_contender]
        for block in own:
            _add(view, groups, rows, own[0], block)
    caption = (
        f"The {view.unit} at each learning rate, over {plural(len(tasks), 'task')}, with 95% intervals; in brackets the "
        "change relative to the lowest learning rate, other settings the same."
    )
    drawn = draw_bars(groups, view.style)
    alt = "; ".join(
        f"{metric}: " + ", ".join(f"{bar.label}: {bar.note or number(bar.estimate.value)}" for bar in bars)
        for metric, bars in groups.items()
    )
    picture = view.picture("learning-rates", drawn, caption, f"Robustness. {alt}.", view.of_blocks(blocks))
    columns = ("algorithm", "learning rate", *(name for metric in _METRICS for name in (metric, f"{metric}, change")))
    text = ["The paper, from 3e-4 to 1e-3: PPO -37.3 %, ANO -7.1 %."] if view.results.name.startswith("mujoco") else []
    return Section(
        "Robustness to the learning rate",
        tuple(text),
        (picture,),
        (Table("Scores and relative changes", columns, tuple(rows)),),
        (*view.left_out(blocks, tasks), *_without(view, families)),
    )


def _families(view: SuiteView, name: str) -> list[list[Contender]]:
    """For each algorithm, its settings that differ in one alone, if there are several."""
    found = [with_other(view.everyone, one, name) for one in view.chosen]
    return [family for family in found if len(family) > 1]


def _add(view: SuiteView, groups: dict[str, list[Bar]], rows: list[Row], base: Block, block: Block) -> None:
    rate, algorithm = block.contender.value(_LEARNING_RATE), block.contender.algorithm
    found = view.aggregates(block)
    cells = [Cell(block.contender.label), Cell(setting_text(rate), _order(rate))]
    for metric in _METRICS:
        note = ""
        change = Estimate(0.0)
        if block is not base:
            change = relative_change(view.scores(base), view.scores(block), view.settings.bootstrap, METRICS[metric])
            note = f"{number(found[metric].value)} ({percent(change.value)})"
        label = f"{short_label(algorithm)} {setting_text(rate)}"
        groups[metric].append(Bar(label, algorithm, found[metric], faint=block is not base, note=note))
        shown = "" if block is base else estimate(change, percent)
        cells += [estimate_cell(found[metric]), Cell(shown, change.value)]
    rows.append(Row(tuple(cells), view.of_blocks([block])))


def _order(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _without(view: SuiteView, families: Sequence[Sequence[Contender]]) -> list[str]:
    there = {family[0].algorithm for family in families}
    names = [one.algorithm for one in view.chosen if one.algorithm not in there]
    return [f"Only one learning rate was run: {', '.join(names)}."] if names else []


def sensitivity(view: SuiteView) -> Section | None:
    """Scores against the size of the trust region, and other settings that were varied."""
    groups: dict[str, dict[str, list[tuple[float, Estimate]]]] = {}
    rows: list[Row] = []
    run_ids: list[str] = []
    notes: list[str] = []
    for name in varied_settings(view.everyone):
        if name in (_LEARNING_RATE, _LENGTH):
            continue
        involved = [one for family in _families(view, name) for one in family if _order(one.value(name)) is not None]
        blocks, tasks = rectangles(view.results, involved, view.results.scored_tasks)
        for block in blocks:
            found = view.aggregates(block)
            value = float(block.contender.value(name))
            groups.setdefault(name, {}).setdefault(block.contender.algorithm, []).append((value, found["IQM"]))
            cells = (Cell(block.contender.label), Cell(name), Cell(setting_text(value), value))
            rows.append(Row((*cells, *(estimate_cell(found[metric]) for metric in _METRICS)), view.of_blocks([block])))
        run_ids += view.of_blocks(blocks)
        notes += [note for note in view.left_out(blocks, tasks) if note not in notes]
    if not groups:
        return None
    spoken = "; ".join(
        f"{name}, {short_label(algorithm)}: " + ", ".join(f"{number(of.value)} at {value:g}" for value, of in points)
        for name, algorithms in groups.items()
        for algorithm, points in algorithms.items()
    )
    caption = f"IQM of the {view.unit} against settings, at the lowest learning rate, with 95% intervals."
    picture = view.picture(
        "sensitivity", draw_settings(groups, view.style, ylabel="IQM"), caption, f"Sensitivity. {spoken}.", tuple(run_ids)
    )
    table = Table("Scores by setting", ("algorithm", "setting", "value", *_METRICS), tuple(rows))
    return Section("Sensitivity to the clip range and other settings", (), (picture,), (table,), tuple(notes))
