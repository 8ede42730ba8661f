"""Parts of error messages: the extra that brings a missing package, and the name that a misspelled one may mean."""

import difflib
from collections.abc import Iterable

# Names of hyperparameters in other libraries, which no similarity of spelling leads to ours.
_FREQUENT_MISNOMERS = {"lr": "learning_rate", "epsilon": "clip_range", "eps": "clip_range"}


class MissingExtraError(ImportError, ValueError):
    """An optional dependency is not installed; the message says which extra of sb3_ano installs it."""


def printable(message: str) -> str:
    """Put a text, which may come from a stranger's file, on one line without control characters, which terminals obey."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(message.split()))


def missing_extra(extra: str, package: str) -> MissingExtraError:
    """The error for ``package``, which ``pip install 'sb3-ano[extra]'`` would install.

    :param extra: name of the extra in pyproject.toml
    :param package: the distribution that could not be imported
    """
    return MissingExtraError(f"{package} is not installed; install it with: pip install 'sb3-ano[{extra}]'", name=package)


def hint(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean ...?"`` for a misspelled name, or an empty string.

    :param name: unknown name
    :param known: known names
    """
    names, meant = list(known), _FREQUENT_MISNOMERS.get(name)
    near = [meant] if meant in names else difflib.get_close_matches(name, names, n=1)
    return f", did you mean {near[0]!r}?" if near else ""
