"""Draw the figures and write the tables of the study of SmolLM2-135M from its rows, texts and win rates.

python examples/llm/smollm_report.py docs/results/smollm
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import llm_report
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sb3_ano._io import write_figure, write_file

#: Colors and lines; those of the other example, and new variants.
STYLES = llm_report.STYLES | {
    "ano-0.5": ("#D55E00", (0, (2, 1))),
    "sapo": ("#009E73", (0, (6, 2))),
    "cispo": ("#56B4E9", (0, (1, 2))),
}
#: Panels of the paper's Figure 5: a curve, and what it is drawn against.
PANELS = {
    "KL to the start, nats per token": ("completions", "kl"),
    "entropy, nats per token": ("completions", "entropy"),
    "proxy reward (trained on)": ("completions", "proxy"),
    "gold reward against proxy reward": ("proxy", "gold"),
}
TITLES = {"equal": "Equal beta", "matched": "Matched KL divergence"}
INTRODUCTION = """\
# SmolLM2-135M against a reward that can be hacked

This shows how far the objectives move one small language model towards the errors of one reward, a lexicon that counts happy
words; it does not show which of them is better with a learned reward, with human preferences, or with a large model.

Mean ± standard deviation over seeds; without ±, there is one seed. KL and entropy are in nats per token, smoothed over a tenth
of the training, and at its end if nothing else is said. "r below" and "r above" are shares of ratios outside of the radius.
"""
#: Curves are means over windows of this share of the training.
WINDOW = 0.1
#: Prompts whose texts are shown side by side: the first ones of the test prompts.
SHOWN = 10


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per generation of a training, means over a tenth of the training."""
    # The first update of a generation sees completions that the policy has not been trained on; later ones overestimate.
    generations = rows.sort_values("update").groupby("completions", as_index=False).first()
    window = max(1, round(WINDOW * len(generations)))
    smooth = generations[["kl", "entropy", "proxy", "gold"]].rolling(window, min_periods=1).mean()
    return smooth.assign(completions=generations["completions"])


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Draw the four panels; lines are means over seeds, bands the range of the seeds.

    :param rows: rows of one setting
    :param path: file to write
    """
    figure = Figure(figsize=(10.0, 6.8), layout="constrained")
    for axes, (title, (x, y)) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, runs in rows.groupby("variant", sort=False):
            seeds = [curves(run) for _, run in runs.groupby("seed")]
            mean = pd.concat(seeds).groupby(level=0).mean()
            color, line = STYLES[str(name)]
            axes.plot(mean[x], mean[y], color=color, linestyle=line, linewidth=1.8, label=name)

            # In the last panel, both axes vary between seeds.
            if x == "completions":
                values = np.array([run[y] for run in seeds])
                axes.fill_between(mean[x], values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0.0)
            else:
                axes.plot(mean[x].iloc[-1], mean[y].iloc[-1], color=color, marker="o", markersize=5)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("completions" if x == "completions" else "proxy reward; the dot is the end")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)

    # One legend for all panels
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(handles[0]), frameon=False, handlelength=3.5)
    write_figure(path, figure, dpi=130)


def table(rows: pd.DataFrame) -> str:
    """Return a table with a row per variant: means and standard deviations over seeds.

    :param rows: rows of one setting
    """
    header = ["", "beta", "KL, nats a token", "entropy", "lowest entropy", "proxy", "gold, at first", "at best", "at last"]
    header += ["largest ratio", "r below, %", "r above, %"]
    lines = [f"| {' | '.join(header)} |", "|---" + "|--:" * (len(header) - 1) + "|"]
    for name, runs in rows.groupby("variant", sort=False):
        seeds = []
        for _, run in runs.groupby("seed"):
            curve = curves(run)
            last = curve.iloc[-1]
            numbers = [last["kl"], last["entropy"], curve["entropy"].min(), last["proxy"]]
            numbers += [curve["gold"].iloc[0], curve["gold"].max(), last["gold"], run["ratio_max"].max()]
            numbers += [100 * run["outside_low"].mean(), 100 * run["outside_high"].mean()]
            seeds.append(numbers)

        deviations = np.full(len(seeds[0]), math.nan)
        if len(seeds) > 1:
            deviations = np.std(seeds, axis=0, ddof=1)
        cells = []
        for mean, deviation in zip(np.mean(seeds, axis=0), deviations, strict=True):
            # One seed has no deviation.
            cells.append(f"{mean:z.2f}" if math.isnan(deviation) else f"{mean:z.2f} ± {deviation:.2f}")
        beta = runs["beta"].iloc[0]
        lines.append(f"| {name} | {beta:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file that has one per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def side_by_side(path: Path, setting: str) -> str:
    """Return the texts of all policies of seed 0 for the same prompts, which nobody has selected.

    :param path: file with the texts
    :param setting: setting of the policies
    """
    texts: dict[str, dict[str, str]] = {}
    for row in read_lines(path):
        is_start = row["policy"] == "start"
        if is_start or (row["setting"] == setting and row["seed"] == 0 and row["point"] == "end"):
            texts.setdefault(row["prompt"], {})[row["policy"]] = row["completion"]

    parts = []
    for prompt in list(texts)[:SHOWN]:
        lines = [f"**{prompt}** ...", "", "| policy | text |", "|---|---|"]
        for policy, text in texts[prompt].items():
            shown = " ".join(text.split()).replace("|", "\\|")
            lines.append(f"| {policy} | {shown} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write(directory: Path) -> None:
    """Write ``report.md``, ``curves_SETTING.png`` and ``matrix_SETTING.png``.

    :param directory: directory with ``rows.csv``, ``texts.jsonl`` and, if policies have been compared, ``win_rates.csv``
    """
    rows = pd.read_csv(directory / "rows.csv")
    rates = None
    if (directory / "win_rates.csv").exists():
        rates = pd.read_csv(directory / "win_rates.csv")

    report = [INTRODUCTION]
    for setting, part in rows.groupby("setting", sort=False):
        draw(part, directory / f"curves_{setting}.png")
        seeds = sorted(part["seed"].unique())
        report += [f"## {TITLES[str(setting)]}, seeds {', '.join(map(str, seeds))}", "", table(part)]

        if rates is not None and (rates["setting"] == setting).any():
            tables = [seed for _, seed in rates[rates["setting"] == setting].groupby("seed")]
            names = list(dict.fromkeys([*tables[0]["policy"], *tables[0]["opponent"]]))
            matrix = llm_report.win_rates(names, tables)
            means = matrix.mean(axis=0)
            halves = llm_report.interval(matrix)
            # With one seed, the interval is that over prompts.
            if len(tables) == 1:
                halves = prompt_interval(names, tables[0])
            llm_report.plot_matrix(names, means, halves, directory / f"matrix_{setting}.png")
            title = "Win rates by the gold reward, percent, of the row against the column"
            report += ["", f"{title} (± half of the 95 % {over(tables)}):"]
            report += ["", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            for i, name in enumerate(names):
                cells = []
                for j in range(len(names)):
                    cells.append("" if i == j else f"{means[i, j]:.0f} ± {halves[i, j]:.0f}")
                report.append(f"| {name} | {' | '.join(cells)} |")
        report += ["", "### Texts", "", side_by_side(directory / "texts.jsonl", str(setting)), ""]
    write_file(directory / "report.md", "\n".join(report) + "\n")
    print(f"{directory / 'report.md'} has the tables; curves_*.png and matrix_*.png are the figures")


def over(tables: list[pd.DataFrame]) -> str:
    """Return what an interval is taken over."""
    return "interval over prompts, Wilson's" if len(tables) == 1 else f"interval over {len(tables)} seeds, Student's t"


def prompt_interval(names: list[str], rates: pd.DataFrame) -> np.ndarray:
    """Return half the width of Wilson's intervals in percent, (policies, opponents); NaN on the diagonal."""
    halves = np.full((len(names), len(names)), np.nan)
    for row in rates.to_dict("records"):
        i = names.index(row["policy"])
        j = names.index(row["opponent"])
        halves[i, j] = halves[j, i] = 50.0 * (row["high"] - row["low"])
    return halves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory with rows.csv, texts.jsonl and win_rates.csv")
    write(parser.parse_args().directory)
