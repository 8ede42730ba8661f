"""Compare the shipped hyperparameters with PPO's of the RL Zoo from committed rows: ``python benchmarks/zoo_settings.py``.

It writes ``tables.md`` next to the rows of the suites ``zoo*.yml``, and a figure with the return of each run, named after
their directory.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml
from scipy import stats
from step_sizes import RETURN, table

from sb3_ano._io import write_figure, write_file
from sb3_ano.bench.looks import looks

ALGORITHMS = ["ppo", "ano", "spo", "papo"]
SUITES = sorted(Path(__file__).parent.glob("zoo*.yml"))
#: Tasks in the order of the suites.
TASKS = [task for suite in SUITES for task in yaml.safe_load(suite.read_text())["tasks"]]


def decimals(rows: pd.DataFrame) -> int:
    """Return the decimals that a task's returns are shown with: more for MiniGrid's, which are at most 1."""
    return 1 if rows[RETURN].abs().max() > 2 else 3


def returns(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the mean return of each algorithm on each task, with the standard deviation over seeds and their number."""
    for (env, steps), part in rows.groupby(["env", "steps"], sort=False):
        groups, n = {str(algorithm).upper(): of[RETURN] for algorithm, of in part.groupby("algorithm")}, decimals(part)
        spreads = {name: f" ± {of.std():.{n}f}" if len(of) > 1 else "" for name, of in groups.items()}
        cells = {name: f"{of.mean():.{n}f}{spreads[name]} ({len(of)})" for name, of in groups.items()}
        yield {"task": env, "steps": f"{steps:,}", **{name.upper(): cells.get(name.upper(), "") for name in ALGORITHMS}}


def differences(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield each algorithm's mean return minus PPO's, with the interval of Welch's t-test, and whether it excludes 0."""
    for env, part in rows.groupby("env", sort=False):
        groups = {str(algorithm): of[RETURN] for algorithm, of in part.groupby("algorithm") if len(of) > 1}
        row: dict[str, object] = {"task": env}
        n = decimals(part)
        for name in ALGORITHMS[1:]:
            if "ppo" in groups and name in groups:
                gap = groups[name].mean() - groups["ppo"].mean()
                if groups[name].std() + groups["ppo"].std() == 0:  # as where all seeds solve the task
                    row[name.upper()] = f"{gap:+.{n}f}"
                    continue
                interval = stats.ttest_ind(groups[name], groups["ppo"], equal_var=False).confidence_interval()
                verdict = ", **behind**" if interval.high < 0 else ", **ahead**" if interval.low > 0 else ""
                row[name.upper()] = f"{gap:+.{n}f} ({interval.low:.{n}f} to {interval.high:.{n}f}){verdict}"
        if len(row) > 1:
            yield row


def figure(rows: pd.DataFrame) -> plt.Figure:
    """Draw the return of each run as a dot and their means as lines, a panel per task."""
    tasks, styles = list(rows["env"].unique()), looks(ALGORITHMS)
    lines = math.ceil(len(tasks) / 4)
    drawn, panels = plt.subplots(lines, 4, figsize=(9.0, 1.9 * lines), layout="constrained", squeeze=False)
    for axes, task in zip(panels.flat, tasks, strict=False):
        for place, name in enumerate(ALGORITHMS):
            of = rows.loc[(rows["env"] == task) & (rows["algorithm"] == name), RETURN]
            color, _, marker = styles[name]
            axes.plot(np.full(len(of), place), of, color=color, marker=marker, linestyle="none", alpha=0.7)
            axes.hlines(of.mean(), place - 0.3, place + 0.3, color=color)
        axes.set_title(task, fontsize=8 if len(task) < 30 else 6)
        axes.set_xticks(range(len(ALGORITHMS)), [name.upper() for name in ALGORITHMS], fontsize=8)
        axes.set_xlim(-0.5, len(ALGORITHMS) - 0.5)
        axes.margins(y=0.15)
        axes.tick_params(axis="y", labelsize=8)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    drawn.supylabel("return, last three evaluations", fontsize=9)
    return drawn


def main() -> None:
    """Write the tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results/zoo"), help="directory of runs.csv")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="directory of the figure")
    options = parser.parse_args()
    if not (options.results / "runs.csv").is_file():
        parser.error(f"{options.results / 'runs.csv'} is missing; python -m sb3_ano.bench export writes it")
    rows = pd.read_csv(options.results / "runs.csv").sort_values("env", key=lambda envs: envs.map(TASKS.index), kind="stable")
    rows["algorithm"] = rows["algorithm"].str.replace("_lstm", "").replace("ano:shaping=ppo", "ppo")  # equal to rounding
    rows = rows.groupby("env", sort=False).filter(lambda part: "ppo" in set(part["algorithm"]))  # others are unfinished
    parts = {"Returns": returns, "Difference from PPO": differences}
    written = {title: pd.DataFrame(part(rows)) for title, part in parts.items()}
    tables = "\n\n".join(f"## {title}\n\n{table(frame)}" for title, frame in written.items() if len(frame))
    text = f"# Shipped settings: tables\n\nWritten by `benchmarks/zoo_settings.py`.\n\n{tables}\n"
    write_file(options.results / "tables.md", text)
    image = options.out / f"{options.results.name}.png"
    write_figure(image, figure(rows), dpi=110)
    print(options.results / "tables.md", image, sep="\n")


if __name__ == "__main__":
    main()
