"""Environments of other packages: the modules that register them, and one clear line for an id that nothing registers."""

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import gymnasium as gym
import yaml
from huggingface_sb3 import EnvironmentName  # type: ignore[import-untyped]

from sb3_ano._io import write_file
from sb3_ano.zoo.settings import SettingsLoader, check_settings, is_trusted

_VERSION = re.compile(r"-v(\d+)$")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def import_packages(names: Iterable[str], source: str = "--gym-packages") -> None:
    """Import modules that register environments.

    :param names: names of modules, as in an import statement
    :param source: where the names come from, for the message
    :raises ValueError: if a module cannot be imported
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            remedy = "install it, or add its directory to PYTHONPATH"
            # The module itself, and not one that it imports
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                remedy += "; a module is named as in an import statement, without a path and without .py"
            raise ValueError(f"{source} {name}: there is no module {error.name!r} here; {remedy}") from error
        except (Exception, SystemExit) as error:  # whatever a module of the user's raises
            raise ValueError(f"{source} {name} cannot be imported: {type(error).__name__}: {error}") from error


def read_packages(run: Path, name: str) -> list[str]:
    """Read which modules a run was trained with.

    The file of a run is a text that a stranger may have written. So it can only choose among the modules that are installed
    here, and neither a module of Python nor a script of the zoo, which would do something when they are imported.
    ``load_from_hub`` writes the user's own ``--gym-packages`` into the runs that it downloads.

    :param run: directory of the run
    :param name: directory name of the environment, see ``EnvironmentName``
    :raises ValueError: if the file is not as ``train`` writes it, or names another kind of module
    """
    file = run / name / "args.yml"
    check_settings(file)
    if not file.is_file():
        return []

    # As in the check, an author who is trusted may write what the zoo's own loader reads.
    loader: type = SettingsLoader
    if is_trusted():
        loader = yaml.UnsafeLoader
    settings = yaml.load(file.read_bytes(), Loader=loader)
    packages = settings.get("gym_packages") or []
    if not isinstance(packages, list):
        packages = [packages]

    for package in packages:
        is_name = isinstance(package, str) and _MODULE.fullmatch(package) is not None
        top = str(package).partition(".")[0]
        # Importing these would run something.
        if not is_name or top == "rl_zoo3" or top in sys.stdlib_module_names:
            raise ValueError(f"{file}: gym_packages={str(package)[:100]!r} is not a module that registers environments")
    return packages


def write_packages(run: Path, name: str, packages: Sequence[str]) -> None:
    """Write the user's packages into the settings of a downloaded run, instead of those that its author names.

    :param run: directory of the run
    :param name: directory name of the environment
    :param packages: names of modules
    :raises ValueError: if the settings are not as the zoo writes them
    """
    file = run / name / "args.yml"
    settings = yaml.unsafe_load(file.read_bytes())  # its author is trusted, or it was written here
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is not as the zoo writes it: it has no keys")
    settings["gym_packages"] = list(packages)
    write_file(file, yaml.dump(settings))


def split_module(env_id: str) -> tuple[list[str], str]:
    """Split gymnasium's form ``module:ID`` into the module, if there is one, and the id.

    :param env_id: id as it was typed
    """
    module, colon, name = env_id.rpartition(":")
    if colon:
        return [module], name
    return [], name


def require_registered(env_id: str, packages: Sequence[str]) -> None:
    """Check that an environment is registered.

    :param env_id: gymnasium's id
    :param packages: modules that were imported for it
    :raises ValueError: if it is not; the message suggests a registered id with a similar spelling
    """
    if env_id in gym.registry:
        return

    message = f"--env {env_id} is not registered"
    if packages:
        message += f", also not by --gym-packages {' '.join(packages)}"
    suggestion = _similar_id(env_id)
    if suggestion is not None:
        message += f", did you mean {suggestion!r}?"
    raise ValueError(f"{message} (the package of an environment is given as --gym-packages PACKAGE)")


def _similar_id(env_id: str) -> str | None:
    """Return the newest version of the registered environment whose name is spelled most similarly, or None."""
    newest: dict[str, tuple[int, str]] = {}
    for known in gym.registry:
        # Some ids have no version.
        number = 0
        version = _VERSION.search(known)
        if version is not None:
            number = int(version[1])
        name = _VERSION.sub("", known).lower()
        newest[name] = max(newest.get(name, (number, known)), (number, known))

    # Names differ in a letter or two; a lower limit would suggest environments that have little in common.
    near = difflib.get_close_matches(_VERSION.sub("", env_id).lower(), newest, n=1, cutoff=0.75)
    if not near:
        return None
    return newest[near[0]][1]


def directory_name(env_id: str) -> str:
    """Return the part of directory names that stands for an environment.

    :param env_id: gymnasium's id, or a part of it
    """
    return str(EnvironmentName(env_id))
