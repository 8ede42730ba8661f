"""The sections of a report on one suite."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_ano.bench.report.data import DIAGNOSTICS, LENGTH, Chapter, title
from sb3_ano.bench.report.figures import Line, Style, draw_intervals, draw_lines, frame_of
from sb3_ano.bench.report.tables import Percent, Table
from sb3_ano.bench.report.variants import LEARNING_RATE, Block, Variant, blocks, families, on_task, select, variants, varied
from sb3_ano.bench.statistics import (
    METRICS,
    Estimate,
    aggregate,
    estimate,
    interaction,
    interquartile_mean,
    mean,
    performance_profile,
    probability_of_improvement,
    relative_change,
)
from sb3_ano.extras import missing_extra

try:
    import pandas as pd
    from matplotlib.figure import Figure
except ImportError as error:
    raise missing_extra("bench", error.name or "matplotlib") from error

_PAPER = {
    "mujoco": "The paper, with 10 million steps and 5 seeds: ANO has the highest mean and IQM. From a learning rate of 3e-4 to "
    "1e-3, PPO changes by -37.3 %, ANO by -7.1 %.",
    "atari": "The paper, with 5 seeds: mean 4.514 for ANO and 3.783 for SPO, IQM 0.706 and 0.721.",
}


@dataclass(frozen=True)
class Picture:
    """A figure of the report.

    :param name: name of its files
    :param caption: text below
    :param figure: the figure
    :param data: the numbers in it
    """

    name: str
    caption: str
    figure: Figure
    data: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """A part of the report.

    :param title: heading
    :param text: paragraphs
    :param pictures: figures
    :param tables: tables
    :param notes: what was left out, and why
    """

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


class View:
    """What is compared in a chapter.

    :param chapter: the runs
    """

    def __init__(self, chapter: Chapter) -> None:
        self.chapter = chapter
        self.everything = variants(chapter)
        self.chosen = select(chapter, self.everything)
        self.blocks, self.notes = blocks(chapter, self.chosen)
        self.style = Style(variant.algorithm for variant in self.everything)
        self.bootstrap = chapter.settings.bootstrap
        self.unit = chapter.unit
        longest = chapter.runs[LENGTH].max()
        self.steps_unit = 1e6 if longest >= 1e6 else 1e3
        self.steps_label = f"{'Million' if longest >= 1e6 else 'Thousand'} environment steps"

    def name(self, of: str) -> str:
        """Return the name of the files of a figure or table."""
        return "-".join("".join(letter if letter.isalnum() else " " for letter in f"{self.chapter.name} {of}".lower()).split())

    def lines(self, of: str, caption: str, panels: Mapping[str, Sequence[Line]], **options: Any) -> Picture:
        """Draw lines, see :func:`~sb3_ano.bench.report.figures.draw_lines`."""
        return Picture(self.name(of), caption, draw_lines(panels, self.style, **options), frame_of(panels))

    def row(self, block: Block, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of a table on the runs of a block."""
        return {"Algorithm": block.variant.label, "Seeds": len(block.seeds), **cells}


def aggregates(view: View) -> Section:
    """Compute IQM, mean, median and optimality gap (the paper's Figure 2), also for all other settings."""
    searched = [f"{variant.label} (best of {variant.alternatives})" for variant in view.chosen if variant.alternatives > 1]
    away = [variant.label for variant in view.chosen if LEARNING_RATE in variant.changed]
    text = ["Figures show each algorithm at the suite's learning rate."]
    if searched:
        text.append(f"Selected by IQM on the runs shown, as in the paper, which flatters: {', '.join(searched)}.")
    text += [f"Not run at the suite's learning rate, and shown at the lowest: {', '.join(away)}."] if away else []
    text += [said for name, said in _PAPER.items() if view.chapter.name.startswith(name)]
    if not view.blocks:
        return Section("Aggregate scores", text, notes=[*view.notes, "No algorithm has a seed with runs of all tasks."])
    found = {block.variant: aggregate(block.column(), view.bootstrap) for block in view.blocks}
    labels = {metric: view.unit + (", lower is better" if metric == "Optimality gap" else "") for metric in METRICS}
    panels = {
        metric: [(title(variant.algorithm), variant.algorithm, values[metric]) for variant, values in found.items()]
        for metric in METRICS
    }
    tables = [Table(view.name("aggregates"), "Aggregates", [view.row(block, found[block.variant]) for block in view.blocks])]
    caption = f"Aggregates of the {view.unit} over {view.blocks[0].rows.shape[1]} tasks, with 95 % intervals."
    picture = Picture(view.name("aggregates"), caption, draw_intervals(panels, view.style, labels), tables[0].data())
    notes = list(view.notes)
    if len(view.everything) > len(view.chosen):
        made, missing = blocks(view.chapter, view.everything)
        rows = [view.row(block, aggregate(block.column(), view.bootstrap)) for block in made]
        tables += [Table(view.name("all settings"), "All settings", rows)] if rows else []
        notes += [note for note in missing if note not in notes]
    return Section("Aggregate scores", text, (picture,), tables, notes)


def profiles(view: View) -> Section | None:
    """Compute the fraction of runs above each score."""
    if not view.blocks:
        return None
    scores = np.concatenate([block.column().ravel() for block in view.blocks])
    # A few Atari games in which the reference player is surpassed a hundredfold would take up most of the axis.
    highest = max(min(scores.max(), max(1.0, 4.0 * np.quantile(scores, 0.9))), 0.1)
    taus = np.linspace(min(0.0, scores.min()), highest, 101)
    panels = {"": [_line(block, taus, performance_profile(block.column(), taus, view.bootstrap)) for block in view.blocks]}
    caption = "Performance profiles: the fraction of runs that score above τ, with pointwise 95 % intervals (Wilson)."
    labels = {"xlabel": f"{view.unit} τ", "ylabel": "Fraction of runs above τ"}
    return Section("Performance profiles", (), (view.lines("profiles", caption, panels, steps=True, **labels),))


def _line(block: Block, x: np.ndarray, values: Estimate) -> Line:
    return Line(block.variant.algorithm, x, values)


def improvement(view: View) -> Section | None:
    """Compute the probability that one algorithm does better than another."""
    rows, bars = [], []
    for index, block in enumerate(view.blocks):
        for other in view.blocks[:index]:
            found = probability_of_improvement(block.column(), other.column(), view.bootstrap)
            names = title(block.variant.algorithm), title(other.variant.algorithm)
            bars.append((" > ".join(names), block.variant.algorithm, found))
            rows.append({"X": names[0], "Y": names[1], "P(X > Y)": found})
    if not rows:
        return None
    table = Table(view.name("improvement"), "Probability of improvement", rows)
    caption = (
        "Probability that a run of the first algorithm scores higher than a run of the second on the same task, averaged over "
        f"tasks, with 95 % intervals that are not corrected for the {len(rows)} comparisons."
    )
    figure = draw_intervals({"": bars}, view.style, {"": "Probability of improvement"}, mark=0.5)
    return Section(
        "Probability of improvement", (), (Picture(view.name("improvement"), caption, figure, table.data()),), (table,)
    )


def sample_efficiency(view: View) -> Section | None:
    """Compute the IQM during the training, and the area below it."""
    if not view.blocks:
        return None
    lines, rows = [], []
    for block in view.blocks:
        percents, scores = _common_curve(block)
        lines.append(_line(block, percents, estimate(interquartile_mean, scores, bootstrap=view.bootstrap)))
        areas = block.column("area_score")
        found = {name: estimate(METRICS[name], areas, bootstrap=view.bootstrap) for name in ("IQM", "Mean")}
        rows.append(view.row(block, found))
    caption = "IQM during the training, from the first measurement of all tasks to the last, with pointwise 95 % intervals."
    labels = {"xlabel": "Training, % of the environment steps", "ylabel": f"IQM, {view.unit}"}
    table = Table(view.name("area"), "Area under the learning curve: mean score between first and last measurement", rows)
    return Section("Sample efficiency", (), (view.lines("efficiency", caption, {"": lines}, **labels),), (table,))


def _common_curve(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Percents of the training and scores ``(points, seeds, tasks)``, interpolated between measurements only."""
    curves = [block.chapter.curves[row] for row in block.rows.flat]
    lengths = block.column(LENGTH).ravel()
    places = [100 * curve["timesteps"].to_numpy(float) / length for curve, length in zip(curves, lengths, strict=True)]
    first, last = max(place[0] for place in places), min(place[-1] for place in places)
    finest = max(places, key=len)
    grid = finest[(finest >= first) & (finest <= last)] if first <= last else finest[:0]
    grid = grid if len(grid) else np.array([first])
    values = [np.interp(grid, place, curve["score"]) for place, curve in zip(places, curves, strict=True)]
    return grid, np.stack(values, axis=-1).reshape(len(grid), *block.rows.shape)


def tasks(view: View) -> Section:
    """Draw a learning curve per task, and list final returns."""
    chapter, rows = view.chapter, []
    panels: dict[str, list[Line]] = {}
    for task in chapter.tasks:
        for variant in view.chosen:
            own = on_task(chapter, variant, task)
            if not own:
                continue
            steps, returns = _returns([chapter.curves[row].set_index("timesteps")["value"] for row in own])
            band = estimate(mean, returns, bootstrap=view.bootstrap)
            panels.setdefault(task, []).append(Line(variant.algorithm, steps / view.steps_unit, band))
            final, score = (chapter.runs[[name]].to_numpy(float)[own] for name in ("final", "score"))
            row = {"Task": task, "Algorithm": variant.label, "Seeds": len(own)}
            row |= {
                "Return": estimate(mean, final, bootstrap=view.bootstrap),
                "SD": float(chapter.runs["final"].iloc[own].std()),
            }
            scored = np.isfinite(score).all()
            rows.append(row | {view.unit: estimate(mean, score, bootstrap=view.bootstrap) if scored else np.nan})
    final = {
        "evaluation": f"Final returns are means of the last evaluations ({chapter.settings.last}).",
        "training": "Returns are those of training episodes, averaged over the last 100.",
    }[chapter.settings.returns]
    caption = "Mean returns over seeds at the steps where they were measured, with pointwise 95 % intervals."
    labels = {"xlabel": view.steps_label, "ylabel": "Return"}
    table = Table(view.name("tasks"), "Final returns: mean over seeds with its 95 % interval, standard deviation (SD)", rows)
    return Section("Tasks", (final,), (view.lines("tasks", caption, panels, columns=3, **labels),), (table,), chapter.notes)


def _returns(curves: Sequence[pd.Series]) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and returns ``(points, seeds, 1)`` of runs of one task. Seeds of imported runs differ in their steps."""
    frame = pd.concat(curves, axis=1).sort_index()
    frame = frame.interpolate(method="index", limit_area="inside").dropna() if frame.isna().any(axis=None) else frame
    return frame.index.to_numpy(float), frame.to_numpy(float)[:, :, None]


def settings(view: View) -> Section | None:
    """Compare scores at all values of each setting that was varied (the paper's Figure 3 for the learning rate)."""
    pictures, tables, notes = [], [], []
    for name in varied(view.everything):
        groups = families(view.everything, name)
        made, missing = blocks(view.chapter, [variant for group in groups for variant in group])
        notes += [note for note in missing if note not in notes]
        of = {block.variant: block for block in made}
        lines, rows, pairs = [], [], []
        for group in groups:
            own = [of[variant] for variant in group if variant in of]
            if not own:
                continue
            base = next((block for block in own if name not in block.variant.changed), own[0])
            values = np.array([block.variant.value(name) for block in own], float)
            band = estimate_all(own, view)
            rest = "".join(f" {key}={value}" for key, value in group[0].without(name)[1])
            lines.append(Line(base.variant.algorithm, values, band, title(base.variant.algorithm) + rest))
            rows += [view.row(block, _changes(view, base, block)) for block in own]
            pairs += [(base, block) for block in own if block is not base]
        if not lines:
            notes.append(f"No figure of {name}: its values are not numbers, or no task has runs at all of them.")
            continue
        caption = f"IQM against {name}, with 95 % intervals. Points of a line differ in nothing else."
        logarithmic = min(line.x.min() for line in lines) > 0
        options = {"xlabel": name, "ylabel": f"IQM, {view.unit}", "markers": True, "logarithmic_x": logarithmic}
        pictures.append(view.lines(name, caption, {"": lines}, **options))
        tables.append(Table(view.name(name), f"{name}: scores, and changes relative to the suite's value or the lowest", rows))
        if name == LEARNING_RATE and (rows := _interactions(view, pairs)):
            caption = "Interaction of algorithm and learning rate: by how much more the IQM of X changes than that of Y"
            tables.append(Table(view.name("interactions"), f"{caption}, in units of the score", rows))
    text = (
        ["The learning rate of TRPO is that of its critic alone."] if any("TRPO" in row for row in _algorithms(view)) else []
    )
    return Section("Sensitivity to settings", text, pictures, tables, notes) if pictures or notes else None


def _algorithms(view: View) -> list[str]:
    return [title(variant.algorithm) for variant in view.chosen]


def estimate_all(made: Sequence[Block], view: View) -> Estimate:
    """Return the IQM of several blocks as arrays."""
    found = [estimate(interquartile_mean, block.column(), bootstrap=view.bootstrap) for block in made]
    return Estimate(*(np.array([getattr(part, end) for part in found]) for end in ("value", "low", "high")))


def _changes(view: View, base: Block, block: Block) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for metric in ("IQM", "Mean"):
        cells[metric] = estimate(METRICS[metric], block.column(), bootstrap=view.bootstrap)
        paired = base.seeds == block.seeds
        change = relative_change(base.column(), block.column(), view.bootstrap, paired=paired, metric=METRICS[metric])
        cells[f"{metric}, change"] = "" if block is base else Percent(change)
    return cells


def _interactions(view: View, pairs: Sequence[tuple[Block, Block]]) -> list[dict[str, Any]]:
    rows = []
    for index, pair in enumerate(pairs):
        for other in pairs[:index]:
            rates = [[block.variant.value(LEARNING_RATE) for block in blocks_] for blocks_ in (pair, other)]
            if pair[0].variant.algorithm == other[0].variant.algorithm or rates[0] != rates[1]:
                continue
            paired = len({block.seeds for block in (*pair, *other)}) == 1
            found = interaction(*(block.column() for block in (*other, *pair)), bootstrap=view.bootstrap, paired=paired)
            names = {"X": other[1].variant.label, "Y": pair[1].variant.label}
            rows.append({**names, "From": f"{rates[0][0]:g}", "To": f"{rates[0][1]:g}", "Change of X - change of Y": found})
    return rows


def dynamics(view: View) -> Section | None:
    """Draw KL divergence, ratios and entropy during the training, at every learning rate."""
    chapter = view.chapter
    if not chapter.runs[list(DIAGNOSTICS)].notna().any(axis=None):
        return None
    shown: dict[float | None, list[Variant]] = {}
    for chosen in view.chosen:
        for variant in view.everything:
            if variant.without(LEARNING_RATE) == chosen.without(LEARNING_RATE):
                shown.setdefault(variant.value(LEARNING_RATE), []).append(variant)
    pictures = []
    for rate, group in shown.items():
        panels: dict[str, list[Line]] = {}
        for name in DIAGNOSTICS:
            for variant in group:
                steps, values = _median_curve([chapter.updates[row] for row in variant.rows], name)
                if len(steps):
                    panels.setdefault(name, []).append(
                        Line(variant.algorithm, steps / view.steps_unit, Estimate.exact(values))
                    )
        at = "" if rate is None else f" at learning rate {rate:g}"
        caption = (
            f"What an update does to the policy{at}: medians over the runs of all tasks. The KL divergence is the mean of "
            "r - 1 - log r over the rollout after its update; the fraction outside refers to each algorithm's own radius."
        )
        log = ("KL divergence", "Largest ratio")
        options = {"xlabel": view.steps_label, "ylabel": "", "logarithmic_y": log}
        pictures += [view.lines(f"dynamics{at}", caption, panels, **options)] if panels else []
    rows = []
    for variant in view.everything:
        means = chapter.runs.iloc[list(variant.rows)][list(DIAGNOSTICS)].median()
        rows.append({"Algorithm": variant.label, **{name: float(value) for name, value in means.items()}})
    table = Table(view.name("dynamics"), "Medians over all runs of means over the training", rows)
    return Section("Ratio and KL dynamics", (), pictures, (table,))


def _median_curve(updates: Sequence[pd.DataFrame], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Medians over runs in fiftieths of the training."""
    frame = pd.concat([update.assign(run=index) for index, update in enumerate(updates)])[["timesteps", name, "run"]].dropna()
    if frame.empty:
        return np.array([]), np.array([])
    fiftieth = np.ceil(50 * frame["timesteps"] / frame["timesteps"].max())
    medians = frame.groupby([fiftieth.to_numpy(), "run"]).mean().groupby(level=0).median()
    return medians["timesteps"].to_numpy(), medians[name].to_numpy()


def matched_kl(view: View) -> Section | None:
    """Plot the score against the measured KL divergence per update, which compares algorithms at equal step sizes."""
    made, _ = blocks(view.chapter, view.everything)
    steps = {block.variant: float(np.mean(block.column("KL divergence"))) for block in made}
    made = sorted((block for block in made if steps[block.variant] > 0), key=lambda block: steps[block.variant])
    if len(made) < 2:
        return None
    lines = []
    for algorithm in sorted({block.variant.algorithm for block in made}):
        own = [block for block in made if block.variant.algorithm == algorithm]
        lines.append(_line(own[0], np.array([steps[block.variant] for block in own]), estimate_all(own, view)))
    rows = [
        view.row(block, {"KL divergence per update": steps[block.variant], "IQM": estimate_all([block], view).at(0)})
        for block in made
    ]
    caption = (
        "Score against the measured KL divergence per update, of all settings, with 95 % intervals. Algorithms at the same "
        "radius take steps of different size: compare points that are above each other."
    )
    labels = {"xlabel": "Mean KL divergence per update", "ylabel": f"IQM, {view.unit}"}
    picture = view.lines("matched kl", caption, {"": lines}, markers=True, logarithmic_x=True, **labels)
    return Section("Scores at matched KL divergence", (), (picture,), (Table(view.name("matched kl"), "Step sizes", rows),))


def wall_clock(view: View) -> Section:
    """List steps per second, and the time to a score."""
    rows = []
    for variant in view.chosen:
        runs = view.chapter.runs.iloc[list(variant.rows)]
        speeds = runs["steps_per_second"].describe()
        row = {
            "Algorithm": variant.label,
            "Steps per second": speeds["50%"],
            "Slowest": speeds["min"],
            "Fastest": speeds["max"],
        }
        for task, seconds in runs.groupby("env_id")["seconds_to_threshold"]:
            if task in view.chapter.scored_tasks:
                row[f"Seconds to {view.chapter.settings.threshold:g} on {task}"] = float(seconds.median())
        rows.append(row)
    caption = (
        "Median training speed, and median time until a normalized score is reached; ∞ if half of the runs never reach it"
    )
    text = ("Times are those of training alone. Runs that share a machine slow each other down.",)
    return Section("Wall-clock time", text, (), (Table(view.name("speed"), caption, rows),))


def records(view: View) -> Section:
    """List all hyperparameters and all runs."""
    runs, rows = view.chapter.runs, []
    for name in sorted({name for hyperparameters in runs["hyperparameters"] for name in hyperparameters}):
        row = {"Hyperparameter": name}
        for variant in view.chosen:
            values = [runs["hyperparameters"].iloc[index].get(name, "default") for index in variant.rows]
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            row[title(variant.algorithm)] = ", ".join(dict.fromkeys(texts))
        rows.append(row)
    columns = ["name", "env_id", "algorithm", "seed", LENGTH, "final", "score", "area_score", "seconds", "finished", "commit"]
    listed = runs.reindex(columns=columns).astype(object).where(lambda cells: cells.notna(), "-").to_dict("records")
    tables = (
        Table(view.name("hyperparameters"), "Hyperparameters of the main figures", rows),
        Table(view.name("runs"), "All runs", [{str(key): value for key, value in row.items()} for row in listed]),
    )
    return Section("Runs", tables=tables)


#: The sections of a chapter, in their order. One that has nothing to show returns None.
SECTIONS = (
    aggregates,
    profiles,
    improvement,
    sample_efficiency,
    tasks,
    settings,
    dynamics,
    matched_kl,
    wall_clock,
    records,
)
