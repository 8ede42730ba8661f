"""The zoo's plots as files, of runs with different numbers of evaluations, and the reason if a plot is empty."""

import argparse
import contextlib
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from sb3_ano._io import write_figure
from sb3_ano.zoo.fixes import replace


@contextlib.contextmanager
def figures(command: str, values: argparse.Namespace, file: str | None, *, has_display: bool) -> Iterator[None]:
    """Write the figures that a plot command in the block would show.

    :param command: plot command of the zoo
    :param values: options of the command
    :param file: file to write; further figures are written to ``NAME-2``, and so on; None shows them
    :param has_display: whether figures can be shown
    :raises ValueError: if nothing is plotted, or matplotlib does not write files of this format
    """
    show, is_shown = plt.show, file is None and has_display
    if not is_shown:
        matplotlib.use("agg")

    def show_drawn(*args: object, **kwargs: object) -> None:
        if not any(axes.has_data() for number in plt.get_fignums() for axes in plt.figure(number).axes):
            raise ValueError(_why_empty(command, values))
        if is_shown:
            show(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        replace(stack, plt, "show", show_drawn)
        if command == "plot_from_file":
            loader = types.SimpleNamespace(load=lambda file: make_comparable(_ResultsUnpickler(file).load(), values))
            # rl_zoo3.plots has functions of its modules' names, which hide the modules.
            replace(stack, sys.modules["rl_zoo3.plots.plot_from_file"], "pickle", loader)
        stack.callback(plt.close, "all")
        yield
        if file is not None:
            show_drawn()
            _save_all(Path(file))
        elif not has_display:
            print("There is no display to show the plots on: --figure FILE writes them")


class _ResultsUnpickler(pickle.Unpickler):
    """Read results of ``all_plots``, plain values and arrays, without running what else a stranger may have put in."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("ndarray", "dtype", "scalar", "_reconstruct", "_frombuffer"):
            return super().find_class(module, name)
        raise ValueError(f"the file holds {module}.{name}, which all_plots does not write")


def make_comparable(results: dict[str, Any], values: argparse.Namespace) -> dict[str, Any]:
    """Let ``plot_from_file`` read results of one run, and of tasks with different numbers of evaluations.

    :param results: content of a file of ``all_plots``, which is changed
    :param values: options of ``plot_from_file``
    :return: the results
    :raises ValueError: if ``--iqm`` is asked for and the numbers of evaluations differ
    """
    counts = {}
    for env in results.keys() - {"results_table", *values.skip_envs}:
        for result in results[env].values():
            counts[env] = len(result["timesteps"])
            if np.ndim(result["last_evals"]) == 0:  # rl_zoo3 itself keeps one number of one run
                result["last_evals"] = np.asarray(result["mean_per_eval"])[-1]
            if not values.iqm:
                result.pop("mean_per_eval", None)  # of which the zoo makes one matrix for all tasks, which only --iqm uses
    if values.iqm and len(set(counts.values())) > 1:
        raise ValueError(f"--iqm needs equal numbers of evaluations, but there are {counts}; --skip-envs leaves tasks out")
    return results


def _why_empty(command: str, values: argparse.Namespace) -> str:
    if command == "plot_from_file":
        return f"{values.input} holds no results for these options"
    if command == "plot_train":
        folders, algorithms = [values.exp_folder], [values.algo]
        lacking = f"{values.episode_window} episodes, over which {values.y_axis} is averaged; use a smaller -w"
    else:
        folders, algorithms = values.exp_folders, values.algos
        lacking = "two evaluations; train with a smaller --eval-freq"
    places = [Path(folder, algorithm.lower()) for folder in folders for algorithm in algorithms]
    where = f"of {', '.join(values.env)} in {', '.join(map(str, places))}"
    has_runs = any(env in run.name for place in places for run in place.glob("*") for env in values.env)
    return f"no run {where} has {lacking}" if has_runs else f"there is no run {where}"


def _save_all(file: Path) -> None:
    for position, number in enumerate(plt.get_fignums(), 1):
        figure = plt.figure(number)
        path = file if position == 1 else file.with_stem(f"{file.stem}-{position}")
        write_figure(path, figure)
        print(f"{figure.get_label() or 'Figure'}: {path}")
