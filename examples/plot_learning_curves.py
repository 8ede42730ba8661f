"""Draw the learning curves of the committed MuJoCo runs: ``python examples/plot_learning_curves.py OUT.png``.

Those of ten million steps: ``--studies long``.
"""

import argparse
import math
from pathlib import Path

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from sb3_ano.bench.looks import looks

LOOKS = looks()
#: Name, color and line style of each setting: the color is that of the algorithm, the line style that of its step.
SETTINGS = {
    "ppo": ("PPO, radius 0.2", LOOKS["ppo"][0], "-"),
    "ano:shaping=ppo": ("PPO, radius 0.2", LOOKS["ppo"][0], "-"),  # the same objective; the long study has it at 3e-4
    "ano:desired_kl=0.01,shaping=ppo": ("PPO, KL 0.01", LOOKS["ppo"][0], "--"),
    "ano:desired_kl=0.02,shaping=ppo": ("PPO, KL 0.02", LOOKS["ppo"][0], "-."),
    "ano:desired_kl=0.05,shaping=ppo": ("PPO, KL 0.05", LOOKS["ppo"][0], ":"),
    "spo": ("SPO, radius 0.2", LOOKS["spo"][0], "-"),
    "ano": ("ANO, radius 0.2", LOOKS["ano"][0], "-"),
    "ano:desired_kl=0.01": ("ANO, KL 0.01", LOOKS["ano"][0], "--"),
    "ano:desired_kl=0.02": ("ANO, KL 0.02", LOOKS["ano"][0], "-."),
    "ano:desired_kl=0.05": ("ANO, KL 0.05", LOOKS["ano"][0], ":"),
}
#: A setting that was run with few seeds and on one task, and is in tables only.
LEFT_OUT = {"spo:desired_kl=0.01"}
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
#: Tasks on which the settings were chosen, and tasks that were run afterwards; a row of panels each.
STUDIES = ["step_size", "held_out"]


def draw(output: str, learning_rate: float, studies: list[str]) -> None:
    """Draw the mean return of the evaluations and its standard error, or with few seeds each seed, one panel per task.

    :param output: figure to write, PNG or SVG by its ending
    :param learning_rate: learning rate of the runs to draw
    :param studies: directories of docs/results
    :raises ValueError: if the rows have an algorithm without a look
    """
    rows = pd.concat([pd.read_csv(RESULTS / study / "curves.csv") for study in studies])
    rows = rows[rows["learning_rate"] == learning_rate]
    if unknown := set(rows["algorithm"]) - SETTINGS.keys() - LEFT_OUT:
        raise ValueError(f"algorithm={min(unknown)!r} has no look; allowed are {', '.join([*SETTINGS, *sorted(LEFT_OUT)])}")
    tasks = dict(list(rows.groupby("env", sort=False)))
    columns = min(len(tasks), 3)
    lines = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(2.0 + 3.0 * columns, 1.0 + 2.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    for axes, (task, of_task) in zip(panels.flat, tasks.items(), strict=False):
        for algorithm, (name, color, style) in SETTINGS.items():
            of_setting = of_task[of_task["algorithm"] == algorithm]
            returns = of_setting.groupby("timesteps")["evaluation_return"]
            mean, error = returns.mean(), returns.sem()
            if mean.empty:
                continue
            axes.plot(mean.index / 1e6, mean, color=color, linestyle=style, linewidth=2, label=name)
            seeds = of_setting.pivot(index="timesteps", columns="seed", values="evaluation_return")
            if len(seeds.columns) < 5:  # a band would hide that seeds end at one of two levels
                axes.plot(seeds.index / 1e6, seeds, color=color, linestyle=style, linewidth=0.7, alpha=0.6)
            else:
                axes.fill_between(mean.index / 1e6, mean - error, mean + error, color=color, alpha=0.15)
        axes.set(title=task, xlim=(0, None))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    for axes in panels[:, 0]:
        axes.set_ylabel("return, deterministic")
    for axes in panels[-1]:
        axes.set_xlabel("environment steps (millions)")
    # Some settings were run on some tasks only.
    handles: dict[str, Artist] = {}
    for axes in panels.flat[: len(tasks)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    names = [name for name in dict.fromkeys(name for name, *_ in SETTINGS.values()) if name in handles]
    columns = min(len(tasks) + 1, 4)
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="figure to write")
    parser.add_argument("--learning-rate", type=float, default=1e-3, choices=[3e-4, 1e-3], help="default: %(default)s")
    parser.add_argument("--studies", nargs="+", default=STUDIES, choices=[*STUDIES, "long"], help="default: %(default)s")
    arguments = parser.parse_args()
    draw(arguments.output, arguments.learning_rate, arguments.studies)
