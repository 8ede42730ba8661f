"""How well algorithms do, over all tasks of a suite."""

import numpy as np

from sb3_ano.bench.report.contenders import Block, rectangles, short_label
from sb3_ano.bench.report.content import Cell, Row, Section, Table, estimate, estimate_cell, joined, number, plural
from sb3_ano.bench.report.figures import Bar, Line, draw_bars, draw_lines
from sb3_ano.bench.report.view import SuiteView
from sb3_ano.bench.statistics import (
    METRICS,
    Estimate,
    aggregate,
    iqm_curve,
    performance_profile,
    probability_of_improvement,
)

# Points of a profile, and the highest score that it shows.
_THRESHOLDS, _MOST = 101, 8.0
# What the paper's Figure 2 and Section 5.1 say, beside what was measured here.
_PAPER = {
    "mujoco": "The paper, with 10M steps and 5 seeds: ANO has the highest mean and IQM.",
    "atari": "The paper, with 5 seeds: mean 4.514 for ANO and 3.783 for SPO, IQM 0.706 and 0.721.",
}


def aggregates(view: SuiteView) -> Section:
    """Mean, median, IQM and optimality gap (the paper's Figure 2), also of all other settings."""
    title = "Aggregate scores"
    if not view.blocks:
        return Section(title, notes=(_nothing(view), *view.left_out([], view.tasks)))
    estimates = {block.contender.label: view.aggregates(block) for block in view.blocks}
    groups = {
        metric: [
            Bar(_name(block), block.contender.algorithm, estimates[block.contender.label][metric]) for block in view.blocks
        ]
        for metric in METRICS
    }
    caption = (
        f"The {view.unit}, over {plural(len(view.tasks), 'task')}. Ticks are the aggregates, bars their intervals of "
        f"{view.settings.bootstrap.confidence:.0%} (stratified bootstrap, {view.settings.bootstrap.reps:,} resamples). "
        "A smaller optimality gap is better."
    )
    alt = "; ".join(f"{metric}: " + _spoken(bars) for metric, bars in groups.items())
    picture = view.picture("aggregates", draw_bars(groups, view.style, columns=2), caption, alt, view.of_blocks(view.blocks))
    tables = [_aggregate_table(view, "The algorithms of the figure", view.blocks)]
    others, tasks = rectangles(view.results, view.everyone, view.results.scored_tasks)
    if len(others) > len(view.blocks):
        tables.append(_aggregate_table(view, f"All settings, over {plural(len(tasks), 'task')}", others))
    text = (_selection(view), *(said for name, said in _PAPER.items() if view.results.name.startswith(name)))
    return Section(title, text, (picture,), tuple(tables), (*view.left_out(view.blocks, view.tasks), *_single_seeds(view)))


def _nothing(view: SuiteView) -> str:
    if not view.results.scored_tasks:
        return "No task of this suite has reference scores, so that returns of different tasks cannot be put together."
    if not view.tasks:
        return "There is no task yet that all algorithms have runs of."
    return "No algorithm has a seed with runs of all tasks yet."


def _name(block: Block) -> str:
    return short_label(block.contender.algorithm)


def _spoken(bars: list[Bar]) -> str:
    return ", ".join(f"{bar.label} {estimate(bar.estimate)}" for bar in bars)


def _aggregate_table(view: SuiteView, caption: str, blocks: list[Block] | tuple[Block, ...]) -> Table:
    rows = []
    for block in blocks:
        found = view.aggregates(block)
        seeds = Cell(str(len(block.seeds)), len(block.seeds))
        cells = (Cell(block.contender.label), seeds, *(estimate_cell(one) for one in found.values()))
        rows.append(Row(cells, view.of_blocks([block])))
    return Table(caption, ("algorithm", "seeds", *METRICS), tuple(rows))


def _selection(view: SuiteView) -> str:
    searched = [one for one in view.chosen if one.alternatives > 1]
    if not searched:
        return "Each algorithm has the settings of the suite."
    words = [f"{one.label} (best of {one.alternatives})" for one in searched]
    return (
        f"Settings were chosen by IQM on the very runs that are shown here, as in the paper, which flatters: {joined(words)}."
    )


def _single_seeds(view: SuiteView) -> list[str]:
    names = [block.contender.label for block in view.blocks if len(block.seeds) < 2]
    return [f"One seed only, and so no interval: {', '.join(names)}."] if names else []


def profiles(view: SuiteView) -> Section | None:
    """The share of runs above each score."""
    if not view.blocks:
        return None
    scores = [view.scores(block) for block in view.blocks]
    low = min(0.0, *(float(one.min()) for one in scores))
    # A few Atari games in which the reference player is surpassed a hundredfold would push all others to the edge.
    high = min(_MOST, max(1.0, *(float(np.quantile(one, 0.95)) for one in scores)))
    thresholds = np.linspace(low, high, _THRESHOLDS)
    lines = [
        Line(
            _name(block), block.contender.algorithm, thresholds, performance_profile(one, thresholds, view.settings.bootstrap)
        )
        for block, one in zip(view.blocks, scores, strict=True)
    ]
    drawn = draw_lines(lines, view.style, xlabel=f"{view.unit} τ", ylabel="share of runs above τ", steps=True)
    halves = ", ".join(f"{line.label} {np.mean(one > 0.5):.0%}" for line, one in zip(lines, scores, strict=True))
    caption = "Performance profiles: the share of runs that score above τ, with pointwise 95% intervals. Higher is better."
    picture = view.picture(
        "profiles", drawn, caption, f"Performance profiles. Share of runs above 0.5: {halves}.", view.of_blocks(view.blocks)
    )
    return Section("Performance profiles", pictures=(picture,))


def improvement(view: SuiteView) -> Section | None:
    """The probability that one algorithm does better than another."""
    pairs = [(later, earlier) for index, later in enumerate(view.blocks) for earlier in view.blocks[:index]]
    if not pairs:
        return None
    bars, rows = [], []
    for block, other in pairs:
        found = probability_of_improvement(view.scores(block), view.scores(other), view.settings.bootstrap)
        bars.append(Bar(f"{_name(block)} > {_name(other)}", block.contender.algorithm, found))
        cells = (Cell(_name(block)), Cell(_name(other)), estimate_cell(found), Cell(_verdict(found)))
        rows.append(Row(cells, view.of_blocks([block, other])))
    caption = (
        "The probability that a run of the first algorithm scores higher than a run of the second on the same task, a tie "
        "counting half, averaged over tasks, with 95% intervals."
    )
    drawn = draw_bars({"P(X > Y)": bars}, view.style, mark=0.5, xlabel="probability of improvement")
    picture = view.picture(
        "improvement", drawn, caption, f"Probability of improvement: {_spoken(bars)}.", view.of_blocks(view.blocks)
    )
    table = Table("Probability of improvement", ("X", "Y", "P(X > Y)", "interval"), tuple(rows))
    return Section("Probability of improvement", pictures=(picture,), tables=(table,))


def _verdict(found: Estimate) -> str:
    if not np.isfinite(found.low):
        return "one seed"
    return "above 0.5" if found.low > 0.5 else "below 0.5" if found.high < 0.5 else "includes 0.5"


def sample_efficiency(view: SuiteView) -> Section | None:
    """IQM during the training, and the area below it."""
    if not view.blocks:
        return None
    lines, rows = [], []
    for block in view.blocks:
        band = iqm_curve(view.results.scores[block.rows], view.settings.bootstrap)
        lines.append(Line(_name(block), block.contender.algorithm, 100 * view.results.fractions, band))
        area = view.results.runs["area_score"].to_numpy()[block.rows]
        found = aggregate(area, view.settings.bootstrap)
        cells = (Cell(block.contender.label), *(estimate_cell(found[metric]) for metric in ("IQM", "mean")))
        rows.append(Row(cells, view.of_blocks([block])))
    drawn = draw_lines(lines, view.style, xlabel=f"training, % of {_lengths(view)} steps", ylabel="IQM")
    halfway = len(view.results.fractions) // 2 - 1
    spoken = ", ".join(f"{line.label} {number(line.band.values[halfway])}" for line in lines)
    caption = f"IQM of the {view.unit} during the training, with pointwise 95% intervals."
    picture = view.picture(
        "efficiency", drawn, caption, f"Sample efficiency. IQM at half of the training: {spoken}.", view.of_blocks(view.blocks)
    )
    table = Table("Area under the learning curve: the mean score over the training", ("algorithm", "IQM", "mean"), tuple(rows))
    return Section("Sample efficiency", pictures=(picture,), tables=(table,))


def _lengths(view: SuiteView) -> str:
    lengths = sorted(set(view.results.runs["total_timesteps"]))
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
