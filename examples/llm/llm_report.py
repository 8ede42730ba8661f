"""Tables and figures of the example of reward hacking."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy.stats import t as student_t

from sb3_ano._io import write_figure

# Okabe and Ito's palette (2008), which color-blind readers can tell apart; in print, the line styles do.
STYLES: dict[str, tuple[str, Any]] = {
    "ppo": ("#000000", (0, (4, 1.5))),
    "spo": ("#0072B2", (0, (5, 1, 1, 1))),
    "ano": ("#D55E00", "-"),
    "grpo": ("#E69F00", (0, (1, 1))),
    "grpo-r": ("#009E73", (0, (8, 2))),
    "gano": ("#CC79A7", (0, (3, 1, 1, 1, 1, 1))),
}
PANELS = {
    "gold": "gold reward (rule; not trained on)",
    "proxy": "proxy reward (reward model)",
    "kl": "KL to the fine-tuned model, nats per token",
    "entropy": "entropy, nats per token",
}
QUICK_WARNING = "**Made with --quick: everything was tried out, and the numbers mean nothing.**\n\n"
REPORT = """\
# Reward hacking on a small summarization task

This shows how far variants of PPO and GRPO exploit the errors of one reward model, on one generated task with one small
language model; it does not show which of them is better on real texts, with human preferences, or with large models.

{warning}Settings and versions: {settings}.

Gold is the task's rule (1 is perfect, 0 an empty summary), proxy is the reward model that the policies are trained on; KL and
entropy are in nats. Mean ± standard deviation over seeds; at last is the median of the last tenth. "r below" and "r above" are
the fractions of ratios outside of the region from 0.8 to 1.2. Seconds are processor time of a training.

Win rates are in percent, of the row against the column, judged by the gold reward on held-out prompts at temperature 1. A tie
is half a win. They are means over seeds of the win rates of policies with the same seed, ± half of the 95 % interval (by
Student's t, over seeds).
"""
SECTION = """
## {title}

| | beta | gold, at first | at best | at last | proxy | KL per token | entropy | tokens | r below, % | r above, % | s |
|---|---|---|---|---|---|---|---|---|---|---|---|
{rows}

{matrix}
"""

#: Curves of a training by name, one value per generation, and its seconds.
Run = dict[str, Any]


def write_section(
    out: Path,
    setting: str,
    title: str,
    betas: dict[str, float],
    runs: dict[str, list[Run]],
    tables: Sequence[pd.DataFrame],
) -> tuple[str, dict[str, Any]]:
    """Draw ``curves_SETTING.png`` and ``matrix_SETTING.png``, and write the section of the report.

    :param out: directory of the figures
    :param setting: name of the setting
    :param title: heading of the section
    :param betas: beta of each variant
    :param runs: trainings of each variant, one per seed
    :param tables: win rates, one table per seed
    :return: section as Markdown, and its numbers
    """
    names = [*betas, "sft"]
    rates = win_rates(names, tables)
    means = rates.mean(axis=0)
    halves = interval(rates)
    plot_curves(runs, out / f"curves_{setting}.png")
    plot_matrix(names, means, halves, out / f"matrix_{setting}.png")

    # A row per variant
    summary = {name: summarize(seeds) for name, seeds in runs.items()}
    rows = []
    for name, columns in summary.items():
        cells = map(_cell, columns.values())
        rows.append(f"| {name} | {betas[name]:g} | {' | '.join(cells)} |")

    # A row per policy, and a column per opponent
    matrix = [f"| wins of, against | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for i, name in enumerate(names):
        row = []
        for j in range(len(names)):
            row.append("" if i == j else _cell((means[i, j], halves[i, j]), digits=0))
        matrix.append(f"| {name} | {' | '.join(row)} |")
    section = SECTION.format(title=title, rows="\n".join(rows), matrix="\n".join(matrix))

    # JSON has no NaN.
    rounded = np.round(rates, 2).astype(object)
    rounded[np.isnan(rates)] = None
    numbers = {
        "betas": betas,
        "summary": summary,
        "win_rates": {"policies": names, "seeds": rounded.tolist()},
        "runs": runs,
    }
    return section, numbers


def summarize(runs: list[Run]) -> dict[str, list[float]]:
    """Return mean and standard deviation over seeds of each column of the table; one seed has no deviation."""
    rows = []
    for run in runs:
        row = {"first_gold": run["gold"][0], "best_gold": max(smooth(run["gold"]))}
        for name in ("gold", "proxy", "kl", "entropy", "length"):
            row[name] = last(run[name])
        for name in ("outside_low", "outside_high"):
            row[f"{name}, %"] = 100 * statistics.fmean(run[name])
        row["seconds"] = run["seconds"]
        rows.append(row)

    summary = {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        summary[name] = [statistics.fmean(column)]
        if len(runs) > 1:
            summary[name].append(statistics.stdev(column))
    return summary


def smooth(curve: list[float]) -> list[float]:
    """Return medians over windows of a tenth of the training; a single token can make an estimate of the KL huge."""
    width = max(1, len(curve) // 10)
    medians = []
    for start in range(len(curve) - width + 1):
        medians.append(statistics.median(curve[start : start + width]))
    return medians


def last(curve: list[float]) -> float:
    """Return the median of the last tenth."""
    return smooth(curve)[-1]


def win_rates(names: Sequence[str], tables: Sequence[pd.DataFrame]) -> np.ndarray:
    """Return win rates of policies against each other in percent, (seeds, policies, opponents); NaN on the diagonal."""
    rates = np.full((len(tables), len(names), len(names)), np.nan)
    for matrix, table in zip(rates, tables, strict=True):
        for row in table.to_dict("records"):
            i = names.index(row["policy"])
            j = names.index(row["opponent"])
            matrix[i, j] = 100.0 * row["win_rate"]
            # Each pair is in the table once.
            matrix[j, i] = 100.0 - matrix[i, j]
    return rates


def interval(rates: np.ndarray) -> np.ndarray:
    """Return half of the 95 % interval of the mean over the first axis, by Student's t; NaN with one seed."""
    seeds = len(rates)
    if seeds == 1:
        return np.full(rates.shape[1:], np.nan)
    error = rates.std(axis=0, ddof=1) / math.sqrt(seeds)
    return student_t.ppf(0.975, seeds - 1) * error


def _cell(value: Sequence[float], digits: int = 2) -> str:
    # One seed has no deviation.
    deviation = "\N{EN DASH}"
    if len(value) > 1 and not math.isnan(value[1]):
        deviation = f"{value[1]:.{digits}f}"
    return f"{value[0]:z.{digits}f} ± {deviation}"


def plot_curves(runs: dict[str, list[Run]], path: Path) -> None:
    """Draw means over seeds as lines, and the range of the seeds as bands."""
    figure = Figure(figsize=(10.0, 6.8), layout="constrained")
    for axes, (curve, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, seeds in runs.items():
            values = np.array([smooth(run[curve]) for run in seeds])
            steps = seeds[0]["completions"][-values.shape[1] :]
            color, line = STYLES[name]
            lowest = values.min(axis=0)
            highest = values.max(axis=0)
            axes.fill_between(steps, lowest, highest, color=color, alpha=0.12, linewidth=0.0)
            axes.plot(steps, values.mean(axis=0), color=color, linestyle=line, linewidth=1.8, label=name)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("completions")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)

    # One legend for all panels
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(runs), frameon=False, handlelength=3.5)
    write_figure(path, figure, dpi=130)


def plot_matrix(names: Sequence[str], means: np.ndarray, halves: np.ndarray, path: Path) -> None:
    """Draw a matrix of win rates in percent, with half of their 95 % intervals."""
    width = 0.85 * len(names) + 1.4
    height = 0.7 * len(names) + 1.2
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()

    # In print: the darker, the more wins
    colors = LinearSegmentedColormap.from_list("", ["white", "#0072B2"])
    axes.imshow(means, cmap=colors, vmin=0, vmax=100, aspect="auto")
    for i, j in np.argwhere(~np.isnan(means)):
        text = f"{means[i, j]:.0f}"
        if not math.isnan(halves[i, j]):
            text += f"\n± {halves[i, j]:.0f}"
        color = "white" if means[i, j] > 75 else "black"
        axes.text(j, i, text, ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set(title="Win rate in percent, by the gold reward", xlabel="Opponent", ylabel="Policy")
    write_figure(path, figure, dpi=130)
