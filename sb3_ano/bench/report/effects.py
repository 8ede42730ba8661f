"""The sections of a report on what settings do, what happens during training, and where the numbers are from."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.report.data import DIAGNOSTICS, LENGTH, title
from sb3_ano.bench.report.figures import Line
from sb3_ano.bench.report.sections import Section, View, line_of
from sb3_ano.bench.report.tables import Percent, Table
from sb3_ano.bench.report.variants import LEARNING_RATE, Block, Variant, blocks, families, varied
from sb3_ano.bench.statistics import METRICS, Estimate, estimate, interaction, interquartile_mean, relative_change


def _iqms(made: Sequence[Block], view: View) -> Estimate:
    """Return the IQM of several blocks as arrays."""
    found = [estimate(interquartile_mean, block.column(), bootstrap=view.bootstrap) for block in made]
    return Estimate(*(np.array([getattr(part, end) for part in found]) for end in ("value", "low", "high")))


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
            band = _iqms(own, view)
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
    trpo = any(variant.algorithm.startswith("trpo") for variant in view.chosen)
    text = ["The learning rate of TRPO is that of its critic alone."] if trpo else []
    return Section("Sensitivity to settings", text, pictures, tables, notes) if pictures or notes else None


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
            found = interaction(
                [block.column() for block in other], [block.column() for block in pair], view.bootstrap, paired
            )
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
        rows.append({"Algorithm": variant.label, **{str(name): float(value) for name, value in means.items()}})
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
    for algorithm in dict.fromkeys(variant.algorithm for variant in view.everything):
        own = [block for block in made if block.variant.algorithm == algorithm]
        if not own:
            continue
        lines.append(line_of(own[0], np.array([steps[block.variant] for block in own]), _iqms(own, view)))
    rows = [
        view.row(block, {"KL divergence per update": steps[block.variant], "IQM": _iqms([block], view).at(0)})
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
                row[f"Seconds to {view.chapter.settings.threshold:g} on {task!s}"] = float(seconds.median())
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
