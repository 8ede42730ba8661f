"""Draw the shaping functions and their slopes (the paper's Figure 1): ``python examples/plot_shapings.py OUT.png``."""

import argparse

import matplotlib
import torch

from sb3_ano.shaping import as_pair, ratio_form

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"ppo": "#7f8c9b", "spo": "#e08a3c", "ano": "#c2255c"}


def draw(output: str, eps: float) -> None:
    """Draw f and its slope for PPO, SPO and ANO.

    :param output: picture to write, PNG or SVG by its ending
    :param eps: radius of the trust region
    """
    ratio = torch.linspace(0.0, 1.0 + 8.0 * eps, 1001, dtype=torch.float64)
    figure, (values, slopes) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, colour in COLOURS.items():
        f, _ = ratio_form(name, eps_low=eps, eps_high=eps)
        at = ratio.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(at).sum(), at)
        values.plot(ratio, f(ratio), color=colour, linewidth=2, label=name.upper())
        slopes.plot(ratio, slope, color=colour, linewidth=2, label=name.upper())
    values.plot(ratio, ratio, color="black", linewidth=0.8, linestyle=":", label="f(r) = r")
    for axes, title in ((values, "Shaping function f(r)"), (slopes, "Its slope f'(r), the weight of a sample")):
        axes.axvline(1.0 + eps, color="black", linewidth=0.8, linestyle="--")
        axes.text(1.0 + eps, 0.03, " 1 + ε", transform=axes.get_xaxis_transform(), fontsize=9)
        axes.set(title=title, xlabel=f"probability ratio r (ε = {eps:g})", xlim=(0.0, ratio[-1].item()))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    values.set_ylim(-0.2, 1.6)
    slopes.set_ylim(-3.2, 3.2)
    values.legend(frameon=False, loc="upper left")
    figure.savefig(output, dpi=150)
    print(f"{output}: f'(1) = " + ", ".join(f"{name} {_slope_at_one(name):.3f}" for name in COLOURS))


def _slope_at_one(name: str) -> float:
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(as_pair(name).f(x).sum(), x)[0].item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="picture to write")
    parser.add_argument("--eps", type=float, default=0.2, help="radius of the trust region (default: %(default)s)")
    arguments = parser.parse_args()
    draw(arguments.output, arguments.eps)
