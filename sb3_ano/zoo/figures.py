"""The zoo's plots as files, of runs with different numbers of evaluations, and the reason if a plot is empty."""

import argparse
import contextlib
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from sb3_ano._io import write_figure
from sb3_ano.zoo.fixes import replaced

# What arrays in a pickle are made of.
_OF_NUMPY = ("ndarray", "dtype", "scalar", "_reconstruct", "_frombuffer")


@contextlib.contextmanager
def figures(command: str, values: argparse.Namespace, file: str | None, *, has_display: bool) -> Iterator[None]:
    """Write the figures that a plot command in the block would show.

    :param command: plot command of the zoo
    :param values: options of the command
    :param file: file to write; further figures are written to ``NAME-2``, and so on; None shows them
    :param has_display: whether figures can be shown
    :raises ValueError: if nothing is plotted, or matplotlib does not write files of this format
    """
    show = plt.show
    # Without a display, pyplot would fail, or write nothing.
    is_shown = file is None and has_display
    if not is_shown:
        matplotlib.use("agg")

    def show_drawn(*args: object, **kwargs: object) -> None:
        # An empty window would not say why it is empty.
        for number in plt.get_fignums():
            if any(axes.has_data() for axes in plt.figure(number).axes):
                break
        else:
            raise ValueError(_why_empty(command, values))
        if is_shown:
            show(*args, **kwargs)

    try:
        # The zoo's functions show their figures at their ends.
        with replaced(plt, "show", show_drawn):
            yield
        if file is not None:
            show_drawn()
            _save_all(Path(file))
        elif not has_display:
            print("There is no display to show the plots on: --figure FILE writes them")
    finally:
        plt.close("all")


@contextlib.contextmanager
def checked_results(values: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Give ``plot_from_file`` files without code in them, of which it can compare all results.

    :param values: options of ``plot_from_file``
    :return: the options with the files to read
    :raises ValueError: if a file holds anything but plain values and arrays, or the results cannot be compared
    """
    names = [values.input, *values.merge]
    if not names[0].endswith(".pkl"):
        names[0] += ".pkl"

    # The zoo unpickles whatever is in a file, so that it gets copies of our own making.
    with tempfile.TemporaryDirectory() as directory:
        copies = []
        for number, name in enumerate(names):
            with Path(name).open("rb") as file:
                results = make_comparable(_ResultsUnpickler(file).load(), values)
            copy = Path(directory, f"{number}.pkl")
            copy.write_bytes(pickle.dumps(results))
            copies.append(str(copy))
        yield argparse.Namespace(**{**vars(values), "input": copies[0], "merge": copies[1:]})


class _ResultsUnpickler(pickle.Unpickler):
    """Read results of ``all_plots``, plain values and arrays, without running what else a stranger may have put in."""

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "numpy" and name in _OF_NUMPY:
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

            if np.ndim(result["last_evals"]) == 0:  # of one run, the zoo keeps a number
                result["last_evals"] = np.asarray(result["mean_per_eval"])[-1]
            if not values.iqm:
                # The zoo makes one matrix of these for all tasks, which only --iqm uses.
                result.pop("mean_per_eval", None)

    if values.iqm and len(set(counts.values())) > 1:
        raise ValueError(f"--iqm needs equal numbers of evaluations, but there are {counts}; --skip-envs leaves tasks out")
    return results


def _why_empty(command: str, values: argparse.Namespace) -> str:
    if command == "plot_from_file":
        return f"{values.input} holds no results for these options"
    if command == "plot_train":
        folders = [values.exp_folder]
        algorithms = [values.algo]
        lacking = f"{values.episode_window} episodes, over which {values.y_axis} is averaged; use a smaller -w"
    else:
        folders = values.exp_folders
        algorithms = values.algos
        lacking = "two evaluations; train with a smaller --eval-freq"

    # Are there runs at all?
    places = []
    has_runs = False
    for folder in folders:
        for algorithm in algorithms:
            place = Path(folder, algorithm.lower())
            places.append(str(place))
            for env in values.env:
                has_runs = has_runs or any(place.glob(f"*{env}*"))

    where = f"of {', '.join(values.env)} in {', '.join(places)}"
    if not has_runs:
        return f"there is no run {where}"
    return f"no run {where} has {lacking}"


def _save_all(file: Path) -> None:
    for position, number in enumerate(plt.get_fignums(), start=1):
        figure = plt.figure(number)
        # --figure names one file.
        path = file
        if position > 1:
            path = file.with_stem(f"{file.stem}-{position}")
        write_figure(path, figure)
        print(f"{figure.get_label() or 'Figure'}: {path}")
