"""Draw the shaping functions and their slopes (the paper's Figure 1): ``python examples/plot_shapings.py OUT.png``."""

import argparse

import matplotlib
import torch

from sb3_ano.bench.looks import looks
from sb3_ano.shaping import as_pair, ratio_form

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLORS = {name: looks()[name][0] for name in ("ppo", "spo", "ano")}


def draw(output: str, eps: float) -> None:
    """Draw f, and the weights of samples with a positive and with a negative advantage, for PPO, SPO and ANO.

    :param output: figure to write, PNG or SVG by its ending
    :param eps: radius of the trust region
    """
    ratio = torch.linspace(0.0, 1.0 + 8.0 * eps, 1001, dtype=torch.float64)
    figure, (values, positive, negative) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for name, color in COLORS.items():
        f, g = ratio_form(name, eps_low=eps, eps_high=eps)
        values.plot(ratio, f(ratio), color=color, linewidth=2, label=name.upper())
        for axes, function in ((positive, f), (negative, g)):
            at = ratio.clone().requires_grad_()
            axes.plot(ratio, torch.autograd.grad(function(at).sum(), at)[0], color=color, linewidth=2)
    values.plot(ratio, ratio, color="black", linewidth=0.8, linestyle=":", label="f(r) = r")
    titles = {values: "shaping function f(r)", positive: "weight of a sample, A > 0: f'(r)", negative: "A < 0: g'(r)"}
    for axes, title in titles.items():
        edge, label = (1.0 - eps, "1 - ε ") if axes is negative else (1.0 + eps, " 1 + ε")
        axes.axvline(edge, color="black", linewidth=0.8, linestyle="--")
        side = "right" if axes is negative else "left"
        axes.text(edge, 0.03, label, transform=axes.get_xaxis_transform(), fontsize=10, horizontalalignment=side)
        axes.set(title=title, xlabel=f"probability ratio r (ε = {eps:g})", xlim=(0.0, ratio[-1].item()))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    values.set_ylim(-0.2, 1.6)
    for axes in (positive, negative):
        axes.set_ylim(-3.2, 3.2)
    values.legend(frameon=False, loc="upper left")
    figure.savefig(output, dpi=150)
    print(f"{output}: f'(1) = " + ", ".join(f"{name} {_slope_at_one(name):.3f}" for name in COLORS))


def _slope_at_one(name: str) -> float:
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(as_pair(name).f(x).sum(), x)[0].item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="figure to write")
    parser.add_argument("--eps", type=float, default=0.2, help="radius of the trust region (default: %(default)s)")
    arguments = parser.parse_args()
    draw(arguments.output, arguments.eps)
