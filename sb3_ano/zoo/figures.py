"""The zoo's plots as files, with or without a display."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sb3_ano.extras import missing_extra

try:
    import matplotlib
    from matplotlib import pyplot as plt
    from matplotlib.backend_bases import FigureCanvasBase
except ImportError as error:
    raise missing_extra("zoo", error.name or "matplotlib") from error


@contextlib.contextmanager
def figures(file: str | os.PathLike[str] | None, *, has_display: bool) -> Iterator[None]:
    """Where the figures of the block go that ``plt.show`` would show.

    :param file: picture to write when the block ends, instead of showing it; of several figures, the second goes to
        ``NAME-2``, and so on; None shows them
    :param has_display: whether they can be shown
    :raises ValueError: if matplotlib does not write files of this kind
    :raises FileNotFoundError: if the folder is not there
    """
    if file is not None:
        _require_writable(Path(file))
    if file is None and has_display:
        yield
        return
    matplotlib.use("agg")
    show = plt.show
    plt.show = lambda *args, **kwargs: None
    try:
        yield
        if file is None:
            print("There is no display to show the plots on: --figure FILE writes them")
        else:
            save_all(Path(file))
    finally:
        plt.show = show
        plt.close("all")


def _require_writable(file: Path) -> None:
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in kinds:
        raise ValueError(f"--figure={str(file)!r} is not allowed; allowed are files that end in .{', .'.join(kinds)}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"--figure={str(file)!r} is in no folder that exists")


def save_all(file: Path) -> list[Path]:
    """Write all figures of pyplot, and say what is where.

    :param file: of the first figure
    :raises ValueError: if nothing was drawn
    """
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    if not any(axes.has_data() for figure in drawn for axes in figure.axes):
        raise ValueError(f"no run fits the options, so that there is nothing to write to {file}")
    written = []
    for place, figure in enumerate(drawn, 1):
        path = file if place == 1 else file.with_stem(f"{file.stem}-{place}")
        partial = path.with_name(f".{path.name}")
        try:
            figure.savefig(partial, format=path.suffix[1:].lower())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        print(f"{figure.get_label() or 'Figure'}: {path}")
        written.append(path)
    return written
