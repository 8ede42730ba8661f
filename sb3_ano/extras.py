"""Parts of error messages: the extra that brings a missing package, and the name that a misspelled one may mean."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

# Names of hyperparameters in other libraries, which no similarity of spelling leads to ours.
_FREQUENT_MISNOMERS = {"lr": "learning_rate", "epsilon": "clip_range", "eps": "clip_range"}


class MissingExtraError(ImportError, ValueError):
    """An optional dependency is not installed; the message says which extra of sb3_ano installs it."""


def printable(message: str) -> str:
    """Put a text, which may come from a stranger's file, on one line without control characters, which terminals obey."""
    line = " ".join(message.split())
    shown = ""
    for character in line:
        shown += character if character.isprintable() else "?"
    return shown


def missing_extra(extra: str, package: str) -> MissingExtraError:
    """The error for ``package``, which ``pip install 'sb3-ano[extra]'`` would install.

    :param extra: name of the extra in pyproject.toml
    :param package: the distribution that could not be imported
    """
    return MissingExtraError(f"{package} is not installed; install it with: pip install 'sb3-ano[{extra}]'", name=package)


@contextlib.contextmanager
def needs_extra(extra: str, package: str = "") -> Iterator[None]:
    """Turn the error of a missing package in the block into one that names the extra to install.

    :param extra: name of the extra in pyproject.toml
    :param package: the distribution; by default the package that could not be imported
    :raises MissingExtraError: instead of ModuleNotFoundError
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(extra, package or str(error.name).partition(".")[0]) from error


def hint(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean ...?"`` for a misspelled name, or an empty string.

    :param name: unknown name
    :param known: known names
    """
    names = list(known)
    meant = _FREQUENT_MISNOMERS.get(name)
    if meant in names:
        return f", did you mean {meant!r}?"
    for similar in difflib.get_close_matches(name, names, n=1):
        return f", did you mean {similar!r}?"
    return ""
