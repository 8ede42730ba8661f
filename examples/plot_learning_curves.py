"""Draw the learning curves of the committed MuJoCo runs: ``python examples/plot_learning_curves.py OUT.png``."""

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

COLORS = {"ppo": "#7f8c9b", "spo": "#e08a3c", "ano": "#c2255c"}
ROWS = Path(__file__).resolve().parents[1] / "docs" / "results" / "mujoco" / "curves.csv"


def draw(output: str, learning_rate: float) -> None:
    """Draw the mean return of the evaluations, one panel per task, with the range of the seeds.

    :param output: figure to write, PNG or SVG by its ending
    :param learning_rate: learning rate of the runs to draw
    """
    rows = pd.read_csv(ROWS)
    rows = rows[rows["learning_rate"] == learning_rate]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (task, of_task) in zip(figure.subplots(1, 3), rows.groupby("env"), strict=True):
        for name, color in COLORS.items():
            returns = of_task[of_task["algorithm"] == name].groupby("timesteps")["evaluation_return"]
            steps = returns.mean().index / 1e3
            axes.plot(steps, returns.mean(), color=color, linewidth=2, label=name.upper())
            axes.fill_between(steps, returns.min(), returns.max(), color=color, alpha=0.15)
        axes.set(title=task, xlabel="environment steps (thousands)", xlim=(0, None))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("return, acting deterministically")
    figure.axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="figure to write")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="3e-4 or 1e-3 (default: %(default)s)")
    arguments = parser.parse_args()
    draw(arguments.output, arguments.learning_rate)
