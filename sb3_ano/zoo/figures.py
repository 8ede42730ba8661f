"""The zoo's plots as files, and the reason if a plot is empty."""

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import matplotlib
from matplotlib import pyplot as plt

from sb3_ano._io import write_file


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

    with mock.patch.object(plt, "show", show_drawn), contextlib.ExitStack() as stack:
        stack.callback(plt.close, "all")
        yield
        if file is not None:
            show_drawn()
            _save_all(Path(file))
        elif not has_display:
            print("There is no display to show the plots on: --figure FILE writes them")


def _why_empty(command: str, values: argparse.Namespace) -> str:
    if command == "plot_from_file":
        return f"{values.input} holds no results for these options"
    is_training = command == "plot_train"
    folders, algorithms = ([values.exp_folder], [values.algo]) if is_training else (values.exp_folders, values.algos)
    places = [Path(folder) / algorithm.lower() for folder in folders for algorithm in algorithms]
    reasons = []
    for env in values.env:
        runs = [run for place in places if place.is_dir() for run in place.iterdir() if env in run.name and run.is_dir()]
        if not runs:
            reasons.append(f"there is no run of {env} in {', '.join(map(str, places))}")
        elif is_training:
            # A monitor file has two lines before its episodes.
            files = [[len(file.read_text().splitlines()) - 2 for file in run.glob("*.monitor.csv")] for run in runs]
            longest = max(map(sum, files))
            window = f"has the {values.episode_window} episodes over which {values.y_axis} is averaged"
            reasons.append(f"no run of {env} {window}, the longest has {longest}; use -w {max(1, longest // 5)}")
        else:
            reasons.append(f"no run of {env} has two evaluations; train with a smaller --eval-freq")
    return "; ".join(reasons)


def _save_all(file: Path) -> None:
    for position, number in enumerate(plt.get_fignums(), 1):
        figure, content = plt.figure(number), io.BytesIO()
        figure.savefig(content, format=file.suffix[1:].lower())
        path = file if position == 1 else file.with_stem(f"{file.stem}-{position}")
        write_file(path, content.getvalue())
        print(f"{figure.get_label() or 'Figure'}: {path}")
