"""The shaping functions and their gradients (the paper's Figure 1)."""

from collections.abc import Iterable

import torch

from sb3_ano.bench.report.content import Cell, Picture, Row, Section, Table, number_cell
from sb3_ano.bench.report.drawing import INK, WIDE, Style, new_figure, panels, render, styled
from sb3_ano.shaping import SHAPINGS, ratio_form

_RADIUS = 0.2
_BUILT_IN = ("ppo", "spo", "ano")
_SHAPING = "ano:shaping="


def geometry(algorithms: Iterable[str]) -> Section:
    """``f`` and ``g`` of PPO, SPO and ANO, and of other shapes of this package that were run.

    :param algorithms: labels of those that were run
    """
    others = dict.fromkeys(label.removeprefix(_SHAPING) for label in algorithms if label.startswith(_SHAPING))
    names = list(dict.fromkeys([*_BUILT_IN, *(name for name in others if name in SHAPINGS)]))
    # "module:function" would run code that the results name; they may be somebody else's.
    unknown = [f"Not drawn, because it is no shape of this package: {name}." for name in others if name not in SHAPINGS]
    picture = _picture(names)
    rows = [Row((Cell(name), *(number_cell(_slope(name, ratio)) for ratio in (0.5, 1.0, 1.2, 1.4, 3.0)))) for name in names]
    columns = ("shape", "f'(0.5)", "f'(1)", "f'(1.2)", "f'(1.4)", "f'(3)")
    table = Table("Slopes for a positive advantage, with a radius of 0.2", columns, tuple(rows))
    text = (
        "The weight of a sample in the gradient is the slope of the shaping function at its ratio: of f where the advantage "
        "is positive, of g(r) = 2 - f(2 - r) where it is negative.",
    )
    return Section("Geometry of the shaping functions", text, (picture,), (table,), tuple(unknown))


@styled
def _picture(names: list[str]) -> Picture:
    ratio = torch.linspace(0.0, 2.4, 961, dtype=torch.float64)
    figure = new_figure(WIDE, 4.6)
    axes = panels(figure, 2, 2, sharex=True)
    style = Style([f"{_SHAPING}{name}" for name in names])
    for name in names:
        line = style.line(name if name in _BUILT_IN or name == "identity" else f"{_SHAPING}{name}")
        for column, shape in enumerate(ratio_form(name, eps_low=_RADIUS, eps_high=_RADIUS)):
            at = ratio.clone().requires_grad_()
            value = shape(at)
            (slope,) = torch.autograd.grad(value.sum(), at)
            axes[column].plot(ratio, value.detach(), label=name, **line)
            axes[2 + column].plot(ratio, slope, **line)
    titles = ("f(r), advantage > 0", "g(r), advantage < 0", "slope f'(r)", "slope g'(r)")
    for index, (one, title) in enumerate(zip(axes, titles, strict=True)):
        if index < 2:
            one.plot(ratio, ratio, color=INK, linewidth=0.7, linestyle=":", label="r" if index == 0 else None)
            one.set_ylim(-0.4, 2.4)
        else:
            one.set_ylim(-3.2, 3.2)
            one.set_xlabel(f"probability ratio r (radius {_RADIUS:g})")
        one.axvline(1.0 + (_RADIUS if index % 2 == 0 else -_RADIUS), color=INK, linewidth=0.7, linestyle="--")
        one.set(title=title, xlim=(0.0, 2.4))
    axes[0].legend(fontsize=8)
    caption = "Shaping functions and their slopes. Dashed: the edge of the trust region, where ANO and SPO turn back."
    alt = (
        "Shaping functions f and g of "
        + ", ".join(names)
        + " with their slopes. PPO's slope is 0 beyond the edge, SPO's falls "
        "without bound, ANO's is negative just beyond the edge and returns to 0."
    )
    return Picture("geometry", caption, alt, *render(figure))


def _slope(name: str, ratio: float) -> float:
    at = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    f, _ = ratio_form(name, eps_low=_RADIUS, eps_high=_RADIUS)
    return float(torch.autograd.grad(f(at), at)[0])
