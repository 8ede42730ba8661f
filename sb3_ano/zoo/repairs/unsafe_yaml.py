"""The settings beside an agent are read with YAML's unsafe loader and ``eval``, and name wrappers that the zoo imports and
calls, so that a downloaded text file runs code.

The agent itself stays a pickle: this closes the files that look harmless, not the one that is known not to be.
"""

import ast
import functools
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.repairs._source import replace_everywhere
from sb3_ano.zoo.trust import is_trusted

try:
    import gymnasium as gym
    import rl_zoo3.utils
    import rl_zoo3.wrappers
    import sb3_contrib.common.wrappers  # noqa: F401  # so that its wrappers are found
    import yaml
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnvWrapper, VecMonitor, VecVideoRecorder
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

_TAG = "tag:yaml.org,2002:python/"
_LIBRARIES = ("torch.nn.", "torch.optim.", "stable_baselines3.", "sb3_contrib.", "sb3_ano.", "rl_zoo3.", "gymnasium.wrappers.")
# What the zoo imports by name and calls, and what that must be a class of.
_CALLED = {
    "env_wrapper": gym.Wrapper,
    "vec_env_wrapper": VecEnvWrapper,
    "callback": BaseCallback,
}
# Their arguments name files to write.
_WRITERS = (Monitor, VecMonitor, VecVideoRecorder, gym.wrappers.RecordVideo)
# The zoo's own files have about 2,000 bytes. Aliases make short files of long ones.
_MAX_BYTES, _MAX_ALIASES = 100_000, 10


class _RefusedTagError(yaml.YAMLError):
    """A tag that the safe loader does not read."""


class _SettingsLoader(yaml.SafeLoader):
    """What the zoo writes: plain values, ordered dictionaries, tuples, and classes of the libraries it works with."""

    n_aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.n_aliases += self.check_event(yaml.AliasEvent)
        if self.n_aliases > _MAX_ALIASES:
            raise yaml.YAMLError(f"more than {_MAX_ALIASES} aliases")
        return super().compose_node(parent, index)


def _library_class(name: str) -> type | None:
    """A class of the libraries that the zoo works with, whose module is imported already: some of the zoo's are scripts."""
    module, _, attribute = name.rpartition(".")
    found = vars(sys.modules[module]).get(attribute) if name.startswith(_LIBRARIES) and module in sys.modules else None
    return found if isinstance(found, type) else None


def _construct_name(loader: _SettingsLoader, name: str, node: yaml.Node) -> type:
    found = _library_class(name)
    if found is None:
        raise _RefusedTagError(f"the Python object {name}")
    return found


def _construct_tuple(loader: _SettingsLoader, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


def _construct_ordered(loader: _SettingsLoader, node: yaml.SequenceNode) -> "OrderedDict[str, Any]":
    return OrderedDict(*loader.construct_sequence(node, deep=True))


def _refuse(loader: _SettingsLoader, node: yaml.Node) -> Any:
    raise _RefusedTagError(node.tag.replace(_TAG, "!!python/"))


_SettingsLoader.add_constructor(f"{_TAG}tuple", _construct_tuple)
_SettingsLoader.add_constructor(f"{_TAG}object/apply:collections.OrderedDict", _construct_ordered)
_SettingsLoader.add_multi_constructor(f"{_TAG}name:", _construct_name)
_SettingsLoader.add_constructor(None, _refuse)


def is_needed() -> bool:
    """Whether reading settings calls a function that they name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yml").write_text("probe: !!python/object/apply:builtins.complex [1.0, 2.0]\n")
        try:
            settings, _ = rl_zoo3.utils.get_saved_hyperparams(folder)
        except (yaml.YAMLError, ValueError):
            return False
    return settings.get("probe") == complex(1, 2)


def apply() -> None:
    """Read the files with a safe loader before the zoo reads them, and refuse what that one refuses."""

    def checked_settings(get: Any) -> Any:
        @functools.wraps(get)
        def get_saved_hyperparams(stats_path: str, *args: Any, **kwargs: Any) -> Any:
            check_settings(Path(stats_path) / "config.yml")
            check_settings(Path(stats_path) / "args.yml")  # which the callers read next
            return get(stats_path, *args, **kwargs)

        return get_saved_hyperparams

    def checked_models(get: Any) -> Any:
        @functools.wraps(get)
        def get_trained_models(log_folder: str) -> Any:
            for file in Path(log_folder).glob("*/*/*/args.yml"):
                check_settings(file)
            return get(log_folder)

        return get_trained_models

    replace_everywhere("get_saved_hyperparams", rl_zoo3.utils.get_saved_hyperparams, checked_settings)
    replace_everywhere("get_trained_models", rl_zoo3.utils.get_trained_models, checked_models)


def check_settings(file: Path) -> None:
    """Complain of settings that would run code when the zoo reads them, unless TRUST_REMOTE_CODE is set.

    :param file: ``config.yml`` or ``args.yml``; a missing one is fine
    :raises ValueError: naming the file and what it asks for
    """
    if is_trusted() or not file.exists():
        return
    if not file.is_file() or file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{file} is not a file of up to {_MAX_BYTES:,} bytes, as the zoo writes it")
    try:
        settings = yaml.load(file.read_text(encoding="utf-8"), Loader=_SettingsLoader)
    except _RefusedTagError as error:
        raise ValueError(
            f"{file} asks for {error}, which runs code when it is read; if you trust its source, use --trust-remote-code"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not YAML as the zoo writes it: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is not YAML as the zoo writes it: it has no keys")
    for key, kind in _CALLED.items():
        for name in _names(settings.get(key)):
            found = name if isinstance(name, type) else _library_class(str(name))
            if found is None or not issubclass(found, kind) or issubclass(found, _WRITERS):
                raise ValueError(
                    f"{file}: {key}={str(name)[:100]!r} would be imported and called, and is not a {kind.__name__} of the "
                    "libraries that the zoo works with; if you trust where it comes from, use --trust-remote-code"
                )
    normalize = settings.get("normalize")
    if isinstance(normalize, str) and not _is_plain(normalize):
        raise ValueError(
            f"{file}: normalize={normalize!r} would be evaluated and is more than a dictionary of plain values; "
            "if you trust where it comes from, use --trust-remote-code"
        )


def _names(called: Any) -> list[Any]:
    """List the names in a setting as the zoo reads it: None, a name, a name with arguments, or a list of those."""
    parts = called if isinstance(called, list) else [] if called is None else [called]
    return [name for part in parts for name in (part if isinstance(part, dict) else [part])]


def _is_plain(expression: str) -> bool:
    """Whether evaluating the text gives plain values and calls nothing but ``dict`` with keywords."""
    try:
        body = ast.parse(expression, mode="eval").body
        if isinstance(body, ast.Call) and isinstance(body.func, ast.Name) and body.func.id == "dict" and not body.args:
            for keyword in body.keywords:
                ast.literal_eval(keyword.value)
        else:
            ast.literal_eval(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
