"""Draw the curve and the weight of a sample of each published objective: ``python examples/plot_objectives.py OUT.png``."""

import argparse
import math

import matplotlib
import torch

from sb3_ano.bench.looks import looks
from sb3_ano.shaping import OBJECTIVES, surrogate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: Signs of the advantage, with two colors of the palette of all figures.
SIDES = {1.0: looks()["spo"][0], -1.0: looks()["ano"][0]}
RADIUS = 0.2
OLD_PROBABILITY = 0.3


def weight(name: str, ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    """Return the derivative of the objective by the log-ratio, in advantages."""
    log_ratio = ratio.log().requires_grad_()
    objective = surrogate(
        log_ratio,
        torch.full_like(log_ratio, advantage),
        name,
        eps_low=RADIUS,
        eps_high=RADIUS,
        old_log_prob=torch.full_like(log_ratio, math.log(OLD_PROBABILITY)),
    )
    (gradient,) = torch.autograd.grad(objective.sum(), log_ratio)
    return gradient / advantage


def curve(ratio: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the objective, in advantages: 1 at a ratio of 1, with these weights as its derivative by the log-ratio."""
    area = torch.cumulative_trapezoid(weights, ratio.log())
    area = torch.cat([area.new_zeros(1), area])
    start = (ratio - 1.0).abs().argmin()
    return 1.0 + area - area[start]


def draw(output: str) -> None:
    """Draw a panel per objective.

    :param output: figure to write, PNG or SVG by its ending
    """
    ratio = torch.linspace(0.01, 3.0, 1200, dtype=torch.float64)
    figure, grid = plt.subplots(5, 4, figsize=(8, 9.6), sharex=True, sharey=True, layout="constrained")
    for name, axes in zip(OBJECTIVES, grid.flat, strict=True):
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        for advantage, color in SIDES.items():
            # Curves that coincide stay visible, because the second is dashed.
            style = "-" if advantage > 0.0 else (0, (3, 2))
            weights = weight(name, ratio, advantage)
            axes.plot(ratio, curve(ratio, weights), color=color, linewidth=1.2, linestyle=style, alpha=0.55)
            axes.plot(ratio, weights, color=color, linewidth=2.8, linestyle=style)
        axes.set_title(name, fontsize=15)
        axes.set(xlim=(0.0, 3.0), ylim=(-2.0, 3.2), xticks=[0, 1, 2, 3], yticks=[0, 1, 2, 3])
        axes.tick_params(labelsize=13)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("probability ratio r", fontsize=16)
    figure.supylabel("weight (thick) and objective (thin):  A > 0 solid,  A < 0 dashed", fontsize=16)
    figure.savefig(output, dpi=150)
    print(f"{output}: {len(OBJECTIVES)} objectives")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="figure to write")
    draw(parser.parse_args().output)
