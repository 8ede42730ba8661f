"""Draw the figures of docs/performance.md from committed rows: ``python benchmarks/figures.py``.

``speed.png`` has one dot per pair of blocks, ``scaling.png`` the time per environment step against the number of
environments, and ``parity.png`` the differences to SB3's PPO with their 95 % intervals.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from sb3_ano._io import write_figure
from sb3_ano.bench.looks import looks

_PROGRAMS = looks(["sbx", "other"])
#: Color, line style and marker of PPO and of our algorithms, as in reports, and of other programs.
STYLES = {"sb3": _PROGRAMS["ppo"], "sbx": _PROGRAMS["sbx"], "other": _PROGRAMS["other"]}
STYLES |= dict.fromkeys(("ano", "maskable", "recurrent"), _PROGRAMS["ano"])


def style(variant: str) -> dict[str, str]:
    """Return color and marker of a library."""
    color, _, marker = STYLES.get(variant.partition("-")[0], STYLES["other"])
    return {"color": color, "marker": marker}


def speed(blocks: pd.DataFrame) -> plt.Figure:
    """Draw the speed of every variant as a multiple of the algorithm that its blocks alternate with, one row each.

    :param blocks: rows of ``blocks.csv``
    """
    blocks = blocks[~blocks["case"].str.startswith(("scale", "long"))]
    rows = []
    for (case, variant), part in blocks.groupby(["case", "of"]):
        speeds = part.pivot(index="pair", columns="variant", values="steps_per_second")
        reference = speeds.drop(columns=variant).squeeze(axis=1)
        rows.append((case, variant, (speeds[variant] / reference).to_numpy()))
    figure, axes = plt.subplots(figsize=(6.6, 0.3 * len(rows) + 0.9), layout="constrained")
    for height, (_, variant, ratios) in enumerate(rows):
        axes.plot(ratios, np.full(len(ratios), height), linestyle="", alpha=0.5, markersize=4, **style(variant))
        axes.plot(np.median(ratios), height, markersize=8, **style(variant))
        axes.annotate(f"{np.median(ratios):.2f}", (ratios.max(), height), (6, -3), textcoords="offset points", fontsize=8)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{case}: {variant}" for case, variant, _ in rows])
    axes.set(
        xscale="log",
        xlabel="Speed as a multiple of PPO's (large: median of the pairs)",
        ylim=(len(rows) - 0.5, -0.5),
    )
    axes.margins(x=0.12)
    axes.set_xticks([1, 1.5, 2, 3, 4, 6, 8], minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    return figure


def scaling(blocks: pd.DataFrame) -> plt.Figure:
    """Draw the median time per environment step against the number of environments.

    :param blocks: rows of ``blocks.csv``
    """
    scale = blocks[blocks["case"].str.startswith("scale-")]
    scale = scale.assign(environments=scale["case"].str.removeprefix("scale-").astype(int), us=1e6 / scale["steps_per_second"])
    figure, axes = plt.subplots(figsize=(5.0, 3.0), layout="constrained")
    for variant, part in scale.groupby("variant", sort=False):
        times = part.groupby("environments")["us"].quantile([0.25, 0.5, 0.75]).unstack()
        lines = axes.plot(
            times.index, times[0.5], linestyle="--" if variant == "sb3" else "-", label=variant, **style(variant)
        )
        axes.fill_between(times.index, times[0.25], times[0.75], color=lines[0].get_color(), alpha=0.15)
    axes.set(xscale="log", ylim=(0, None), xlabel="Environments", ylabel="Microseconds per step")
    axes.set_xticks(sorted(scale["environments"].unique()), minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend()
    return figure


def parity(table: pd.DataFrame) -> plt.Figure:
    """Draw differences to SB3's PPO with their intervals.

    :param table: rows of ``parity.csv``
    """
    rows = table.dropna(subset=["percent"]).reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(6.6, 0.3 * len(rows) + 0.9), layout="constrained")
    for height, row in rows.iterrows():
        look = style("ano" if "bfloat16" in row["algorithm"] else "other")
        axes.plot([row["percent low"], row["percent high"]], [height, height], color=look["color"])
        axes.plot(row["percent"], height, markersize=7, **look)
    precision = ["bfloat16" if "bfloat16" in name else "float32" for name in rows["algorithm"]]
    labels = [f"{env}, {what}, {bits}" for env, what, bits in zip(rows["env"], rows["measure"], precision, strict=True)]
    axes.set_yticks(range(len(rows)), labels)
    axes.axvline(0.0, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="Difference to SB3's PPO, % (95 % interval)", ylim=(len(rows) - 0.5, -0.5))
    return figure


def main() -> None:
    """Draw the figures whose rows are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="directory of the rows")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="directory to write")
    options = parser.parse_args()
    for name, draw, file in (
        ("speed", speed, "speed/blocks.csv"),
        ("scaling", scaling, "speed/blocks.csv"),
        ("parity", parity, "parity/parity.csv"),
    ):
        if not (options.results / file).is_file():
            print(f"{options.results / file} is missing: no {name}.png")
            continue
        rows = pd.read_csv(options.results / file)
        if name == "scaling" and not rows["case"].str.startswith("scale-").any():
            print(f"{options.results / file} has no scaling cases: no {name}.png")
            continue
        write_figure(options.out / f"{name}.png", draw(rows), dpi=110)
        print(options.out / f"{name}.png")


if __name__ == "__main__":
    main()
