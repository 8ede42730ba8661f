"""The report of the demo: the paper's Figure 5 for the small task."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb3_ano.extras import missing_extra
from sb3_ano.llm.demo import run_file
from sb3_ano.llm.files import read_json, write_whole

if TYPE_CHECKING:
    from sb3_ano.llm.demo import Plan

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise missing_extra("llm", "matplotlib") from error

_COLOURS = {"grpo": "#868e96", "gano": "#c2255c", "spo": "#1971c2", "clip": "#2f9e44"}
_PANELS = {
    "gold": "gold reward (rule; not trained on)",
    "proxy": "proxy reward (reward model)",
    "kl": "KL to the fine-tuned model, nats a token",
    "entropy": "entropy, nats a token",
}

Curves = dict[str, list[float]]


def write_report(out: Path, plan: "Plan", names: Sequence[str]) -> str:
    """Write ``report.json``, ``report.md`` and ``report.png`` of the trainings that are finished.

    :param out: folder of the demo
    :param plan: how much is trained
    :param names: the contenders
    :return: the table, as Markdown
    """
    runs = {name: _finished(out, name) for name in names}
    summary = {name: _summary(each) for name, each in runs.items() if each}
    table = _table(summary)
    write_whole(out / "report.json", {"plan": dataclasses.asdict(plan), "summary": summary, "runs": runs})
    write_whole(out / "report.md", table + "\n")
    _plot(runs, out / "report.png")
    return table


def _finished(out: Path, name: str) -> dict[str, Curves]:
    found = {}
    for path in sorted(run_file(out, name, "*").parent.glob(f"{name}_*.json")):
        found[path.stem.removeprefix(f"{name}_")] = read_json(path)
    return found


def _summary(runs: dict[str, Curves]) -> dict[str, Any]:
    """Mean and standard deviation over seeds: medians of the last tenth, the gold reward at the start and in its best tenth,
    and the fractions outside the region over the whole training."""
    summary: dict[str, Any] = {"seeds": len(runs)}
    for curve in ("gold", "proxy", "kl", "entropy", "length"):
        summary[curve] = _over_seeds([statistics.median(_tail(run[curve])) for run in runs.values()])
    for curve in ("outside_low", "outside_high"):
        summary[curve] = _over_seeds([statistics.fmean(run[curve]) for run in runs.values()])
    summary["first_gold"] = _over_seeds([run["gold"][0] for run in runs.values()])
    summary["best_gold"] = _over_seeds([max(_smooth(run["gold"])) for run in runs.values()])
    return summary


def _tail(curve: Sequence[float]) -> Sequence[float]:
    return curve[-max(1, len(curve) // 10) :]


def _smooth(curve: Sequence[float]) -> list[float]:
    """Medians over windows of a tenth of the training; a single token can make an estimate of the KL divergence huge."""
    width = max(1, len(curve) // 10)
    return [statistics.median(curve[start : start + width]) for start in range(len(curve) - width + 1)]


def _over_seeds(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def _table(summary: dict[str, Any]) -> str:
    columns = ("seeds", "first_gold", "best_gold", "gold", "proxy", "kl", "entropy", "length", "outside_low", "outside_high")
    titles = (
        "seeds",
        "gold, at first",
        "at best",
        "at last",
        "proxy",
        "KL a token",
        "entropy",
        "tokens",
        "r below, %",
        "r above, %",
    )
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, values in summary.items():
        cells = [str(values["seeds"])]
        for column in columns[1:]:
            mean, deviation = (100 * value if column.startswith("outside") else value for value in values[column])
            cells.append(f"{mean:.2f} ± {deviation:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plot(runs: dict[str, dict[str, Curves]], path: Path) -> None:
    figure = Figure(figsize=(10.0, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (curve, title) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for name, each in runs.items():
            smooth = [_smooth(run[curve]) for run in each.values()]
            if smooth:
                steps = next(iter(each.values()))["completions"][-len(smooth[0]) :]
                for one in smooth:
                    axes.plot(steps, one, color=_COLOURS[name], alpha=0.3, linewidth=0.8)
                mean = [statistics.fmean(values) for values in zip(*smooth, strict=True)]
                axes.plot(steps, mean, color=_COLOURS[name], linewidth=2.0, label=f"{name} ({len(smooth)} seeds)")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("completions")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.axes[0].legend(handles, labels, frameon=False)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=130, format="png")
    unfinished.replace(path)
