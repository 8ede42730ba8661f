"""Record and draw learning curves, for the other examples."""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from stable_baselines3.common.callbacks import BaseCallback

COLORS = ("#c2255c", "#7f8c9b", "#e08a3c", "#1c7ed6")
torch.set_num_threads(1)


class Returns(BaseCallback):
    """Record the mean return of the last episodes after each rollout, as ``points`` of steps and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        episodes = self.model.ep_info_buffer
        if episodes:
            self.points.append((self.num_timesteps, float(np.mean([episode["r"] for episode in episodes]))))


def plot(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    ylabel: str,
    xlabel: str = "environment steps",
    widths: Sequence[float] = (2, 2, 2, 2),
) -> None:
    """Draw curves, and write the figure to the path in the first argument of the script."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel)
    for (label, points), color, width in zip(curves.items(), COLORS, widths, strict=False):
        axes.plot(*np.transpose(points), color=color, linewidth=width, label=label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure)


def save(figure: Figure) -> None:
    """Write a figure to the path in the first argument of the script."""
    figure.savefig(sys.argv[1], dpi=110)
    print(f"Figure: {sys.argv[1]}")
