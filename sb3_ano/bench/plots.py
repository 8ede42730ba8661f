"""The pictures of this folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sb3_ano.extras import missing_extra

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter
except ImportError as error:
    raise missing_extra("bench", "matplotlib") from error

_COLOURS = ("#868e96", "#c2255c", "#1971c2", "#2f9e44", "#e8590c", "#6741d9", "#0c8599", "#f08c00")
_INK = "#212529"
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


class Colours:
    """The same colour for the same name in all panels of a picture.

    :param first: names that come first, in this order
    """

    def __init__(self, first: Sequence[str] = ()) -> None:
        self._names = list(first)

    def of(self, name: str) -> str:
        """The colour of ``name``."""
        if name not in self._names:
            self._names.append(name)
        return _COLOURS[self._names.index(name) % len(_COLOURS)]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def plot_ratios(cases: Sequence[tuple[str, Mapping[str, tuple[float, float, float]]]], output: Path) -> Path:
    """Bars of the speed relative to SB3's PPO, a panel a case, with whiskers from quartile to quartile.

    :param cases: title, and for each contender lower quartile, median and upper quartile of the ratio
    :param output: picture to write
    :return: its path
    """
    bars = [max(1, len(ratios)) for _, ratios in cases]
    figure = _figure(8.0, 0.9 * len(cases) + 0.34 * sum(bars) + 0.4)
    panels = figure.subplots(len(cases), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [n + 0.8 for n in bars]})
    colours = Colours()
    widest = max([1.0, *(high for _, ratios in cases for _, _, high in ratios.values())])
    for axes, (title, ratios) in zip(panels[:, 0], cases, strict=True):
        for row, (name, (low, median, high)) in enumerate(ratios.items()):
            axes.barh(row, median, height=0.7, color=colours.of(name))
            axes.errorbar(median, row, xerr=[[median - low], [high - median]], color=_INK, capsize=3, linewidth=1)
            axes.text(high + 0.015 * widest, row, f"{median:.2f}", va="center", color=_INK, fontsize=9, bbox=_PAPER)
        axes.axvline(1.0, color=_INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(ratios)), list(ratios))
        axes.set_ylim(max(1, len(ratios)) - 0.4, -0.6)
        axes.set_title(title, fontsize=10, loc="left")
        _plain(axes)
        axes.grid(visible=False, axis="y")
    panels[-1, 0].set(
        xlabel="steps a second, times SB3's PPO (median of pairs; whiskers: quartiles)", xlim=(0.0, 1.12 * widest)
    )
    return _save(figure, output)


def plot_scaling(
    length: Mapping[str, tuple[np.ndarray, np.ndarray]],
    n_envs: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    output: Path,
) -> Path:
    """The cost of a step against the length of the run, and against the number of environments.

    :param length: for each contender, steps done and microseconds a step
    :param n_envs: for each contender, numbers of environments, microseconds a step of collection and of all
    :param output: picture to write
    :return: its path
    """
    figure = _figure(11.0, 4.2)
    left, right = figure.subplots(1, 2)
    colours = Colours(list(length))
    for name, (steps, cost) in length.items():
        left.plot(steps / 1e3, cost, color=colours.of(name), linewidth=1.5, label=name)
    for name, (numbers, collection, whole) in n_envs.items():
        right.plot(numbers, whole, color=colours.of(name), marker="o", label=f"{name}, whole")
        right.plot(numbers, collection, color=colours.of(name), marker="o", linestyle="--", label=f"{name}, collection")
    left.set(xlabel="environment steps done (thousands)", ylabel="microseconds a step", title="HalfCheetah-v5, SB3's defaults")
    left.set_ylim(bottom=0.0)
    right.set(xlabel="environments", ylabel="microseconds a step", title="HalfCheetah-v4, rollouts of 2048 samples")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    for formatter in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(2.0, 0.5)))
    ticks = sorted({int(number) for numbers, _, _ in n_envs.values() for number in numbers})
    right.set_xticks(ticks, [str(tick) for tick in ticks])
    for axes in (left, right):
        _plain(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    return _save(figure, output)


def plot_learning_curves(
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]], band: str, output: Path
) -> Path:
    """Learning curves with bands, a panel an environment.

    :param panels: for each environment and contender: steps, mean return, lower and upper end of the band
    :param band: what mean and band are, for the title
    :param output: picture to write
    :return: its path
    """
    figure = _figure(5.5 * max(1, len(panels)), 4.2)
    colours = Colours()
    for axes, (env_id, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, (steps, mean, low, high) in curves.items():
            axes.fill_between(steps / 1e3, low, high, color=colours.of(name), alpha=0.18, linewidth=0)
            axes.plot(steps / 1e3, mean, color=colours.of(name), linewidth=1.8, label=name)
        axes.set(title=env_id, xlabel="environment steps (thousands)", ylabel="return of training episodes")
        axes.legend(frameon=False, loc="upper left")
        _plain(axes)
    figure.suptitle(band, fontsize=10)
    return _save(figure, output)
