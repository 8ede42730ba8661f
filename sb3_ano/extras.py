"""One line for a missing optional dependency, with the extra that brings it."""


class MissingExtraError(ImportError, ValueError):
    """An optional dependency is not installed; the message says which extra of sb3_ano installs it."""


def missing_extra(extra: str, package: str) -> MissingExtraError:
    """The error for ``package``, which ``pip install 'sb3-ano[extra]'`` would install.

    :param extra: name of the extra in pyproject.toml
    :param package: the distribution that could not be imported
    """
    return MissingExtraError(f"{package} is not installed; install it with: pip install 'sb3-ano[{extra}]'", name=package)
