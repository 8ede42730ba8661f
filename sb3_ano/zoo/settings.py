"""Safe reading of the settings next to an agent, and the question whether their author is trusted.

The zoo reads ``config.yml`` and ``args.yml`` with YAML's unsafe loader and ``eval``, and imports and calls the wrappers that
they name. So a downloaded text file can run code. The agent itself is a pickle: this check is about files that look harmless.
"""

import ast
import importlib
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import gymnasium as gym
import rl_zoo3.wrappers  # noqa: F401
import sb3_contrib.common.wrappers  # noqa: F401  # so that its wrappers are found
import yaml
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnvWrapper, VecMonitor, VecVideoRecorder

_TAG = "tag:yaml.org,2002:python/"
_LIBRARIES = (
    "torch.nn.",
    "torch.optim.",
    "stable_baselines3.",
    "sb3_contrib.",
    "sb3_ano.",
    "rl_zoo3.",
    "gymnasium.wrappers.",
    "minigrid.wrappers.",
)
#: Top-level modules that the user has named on the command line, whose classes are known, too.
user_modules: frozenset[str] = frozenset()
# Keys whose values the zoo imports by name and calls, and what they must be subclasses of.
_CALLED = {"env_wrapper": gym.Wrapper, "vec_env_wrapper": VecEnvWrapper, "callback": BaseCallback}
# The arguments of these name files to write.
_WRITERS = (Monitor, VecMonitor, VecVideoRecorder, gym.wrappers.RecordVideo)
# The zoo's own files have about 2,000 bytes. Aliases expand a short file to a long one.
_MAX_BYTES = 100_000
_MAX_ALIASES = 10


def is_trusted() -> bool:
    """Tell whether TRUST_REMOTE_CODE is set, which ``--trust-remote-code`` does for a command and its children."""
    return os.environ.get("TRUST_REMOTE_CODE", "").lower() in ("y", "yes", "t", "true", "on", "1")


class SettingsLoader(yaml.SafeLoader):
    """Load what the zoo writes: plain values, ordered dictionaries, tuples, and classes of known libraries."""

    n_aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Aliases of aliases grow without bounds.
        self.n_aliases += self.check_event(yaml.AliasEvent)
        if self.n_aliases > _MAX_ALIASES:
            raise yaml.YAMLError(f"more than {_MAX_ALIASES} aliases")
        return super().compose_node(parent, index)

    def reject(self, node: yaml.Node) -> object:
        raise yaml.YAMLError(f"{node.tag.replace(_TAG, '!!python/')} runs code when it is read")

    def construct_class(self, name: str, node: yaml.Node) -> type:
        found = _library_class(name)
        if found is None:
            raise yaml.YAMLError(f"the Python object {name} is not of a known library{_own_module(name)}")
        return found

    def construct_python_tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        return tuple(self.construct_sequence(node, deep=True))

    def construct_ordered(self, node: yaml.SequenceNode) -> "OrderedDict[str, Any]":
        return OrderedDict(*self.construct_sequence(node, deep=True))


SettingsLoader.add_constructor(f"{_TAG}tuple", SettingsLoader.construct_python_tuple)
SettingsLoader.add_constructor(f"{_TAG}object/apply:collections.OrderedDict", SettingsLoader.construct_ordered)
SettingsLoader.add_multi_constructor(f"{_TAG}name:", SettingsLoader.construct_class)
SettingsLoader.add_constructor(None, SettingsLoader.reject)


def _library_class(name: str) -> type | None:
    """Return a class of the known libraries, or of a module that the user has named, or None."""
    module, _, attribute = name.rpartition(".")
    # The user's own may be imported, because the user has asked for it.
    if module.partition(".")[0] in user_modules:
        try:
            importlib.import_module(module)
        except ImportError:
            return None
    elif not name.startswith(_LIBRARIES) or module not in sys.modules:  # importing some of the zoo's modules runs them
        return None

    # Not what a module would compute for the name.
    found = vars(sys.modules[module]).get(attribute)
    if isinstance(found, type):
        return found
    return None


def check_settings(file: Path) -> None:
    """Check that reading a file of settings as the zoo does runs no code; with TRUST_REMOTE_CODE every file passes.

    :param file: ``config.yml`` or ``args.yml``; it need not exist
    :raises ValueError: if it would run code, or the zoo does not write such files
    """
    if is_trusted() or not file.exists():
        return

    try:
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is not a file of up to {_MAX_BYTES:,} bytes")
        # The zoo writes ASCII, and reads other characters in the locale's encoding, in which the text may be another one.
        settings = yaml.load(file.read_text(encoding="ascii"), Loader=SettingsLoader)
        if not isinstance(settings, dict):
            raise ValueError("it has no keys")

        for key, kind in _CALLED.items():
            for name in _names(settings.get(key)):
                _check_called(key, name, kind)
        normalize = settings.get("normalize")
        if isinstance(normalize, str) and not _is_plain(normalize):
            raise ValueError(f"normalize={normalize!r} is evaluated and more than a dictionary of plain values")
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        message = f"{file} is not YAML as the zoo writes it: {error}; if you trust its author, use --trust-remote-code"
        raise ValueError(message) from error


def _check_called(key: str, called: object, kind: type) -> None:
    """Check that a class, or the name of one, is a known one of a kind, and writes no files."""
    found: Any = called
    if not isinstance(called, type):
        found = _library_class(str(called))
    # Those that write files would write where a stranger wants.
    if found is None or not issubclass(found, kind) or issubclass(found, _WRITERS):
        reason = f"is called and is no {kind.__name__} of a known library"
        raise ValueError(f"{key}={str(called)[:100]!r} {reason}{_own_module(str(called))}")


def _own_module(name: str) -> str:
    """Return what to do if a class is the user's own."""
    module = name.partition(".")[0]
    is_known = module in sys.stdlib_module_names or any(library.startswith(f"{module}.") for library in _LIBRARIES)
    if is_known or not module.isidentifier():
        return ""
    # Then its classes are known, too.
    return f" (if {module} is a module of yours, use --gym-packages {module})"


def _names(called: object) -> list[object]:
    """Return the names in a setting: None, a name, a name with arguments, or a list of those."""
    if called is None:
        return []
    parts: list[object] = [called]
    if isinstance(called, list):
        parts = called

    names: list[object] = []
    for part in parts:
        # From a class to its arguments
        if isinstance(part, dict):
            names.extend(part)
        else:
            names.append(part)
    return names


def _is_plain(expression: str) -> bool:
    """Tell whether evaluating the text gives plain values and calls nothing but ``dict`` with keywords."""
    try:
        body = ast.parse(expression, mode="eval").body
        values = [body]
        # As the zoo's files have it
        if isinstance(body, ast.Call) and ast.unparse(body.func) == "dict" and not body.args:
            values = [keyword.value for keyword in body.keywords]
        for value in values:
            ast.literal_eval(value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
