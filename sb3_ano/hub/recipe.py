"""Describe a training so that a reader can repeat it: settings in the RL Zoo's keys, and parts that only the author has."""

import dataclasses
import keyword
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sb3_ano._registry import BY_CLASS_NAME
from sb3_ano.hub.codec import SCHEDULES, dotted_name, is_built_in, readable, stored_arguments
from sb3_ano.hub.documents import Document

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/[\w.@+~-]+(?:/[\w.@+~ -]*[\w.@+~-])*/?")


@dataclasses.dataclass(frozen=True)
class Part:
    """Describe a part of an agent that only its author's code defines.

    :param name: dotted name of the argument
    :param shown: name of the class or function, in words
    :param module: module to import it from, or None if it cannot be imported
    :param expression: Python for the part, in the card's code
    :param is_stand_in: whether the expression is a value that acts the same, so that nothing has to be brought
    """

    name: str
    shown: str
    module: str | None
    expression: str
    is_stand_in: bool = False


def import_path(value: object) -> tuple[str, str] | None:
    """Return module and name from which others can import a class or function, or None."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    # Lambdas, and what is defined in a function
    if not _DOTTED.fullmatch(module) or not name.isidentifier():
        return None
    # The module may have another object under the name by now.
    if getattr(sys.modules.get(module), name, None) is not value:
        return None
    return module, name


def custom_parts(document: Document, objects: Document) -> list[Part]:
    """List the parts of an agent that are not built in.

    A shape and a schedule have stand-ins, because they act in training only.

    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :param objects: the parts by dotted name, as ``describe`` collects them; a shape is not among them
    """
    parts: list[Part] = []
    if document["shaping"] and not is_built_in(document["shaping"]["name"]):
        shown = document["shaping"]["name"]
        # A pair of shapes has a pair of names.
        if not isinstance(shown, str):
            shown = ", ".join(shown)
        parts.append(Part("shaping", shown, None, "'ano'", is_stand_in=True))

    for name, value in objects.items():
        shown = dotted_name(value)
        path = import_path(value)
        if name in SCHEDULES:
            # Its first value is as good as any to act.
            number = float(value(1.0))
            if not math.isfinite(number):
                number = 0.0
            parts.append(Part(name, shown, None, repr(number), is_stand_in=True))
        elif path is not None:
            parts.append(Part(name, shown, path[0], ".".join(path)))
        else:
            parts.append(Part(name, shown, None, _variable(name, value)))
    return parts


def _variable(name: str, value: object) -> str:
    """Return a variable for a part of an agent in the card's code: its own name, or else that of its argument."""
    short = getattr(value, "__qualname__", "").rpartition(".")[2]
    if short.isidentifier() and not keyword.iskeyword(short):
        return short
    # A lambda, or an object
    return re.sub(r"\W", "_", name.rpartition(".")[2])


def literal(value: object) -> str:
    """Return Python for a plain value, or for what ``codec.encode`` returned, as the zoo's files have it.

    :param value: None, boolean, number, text, or a list, tuple or dictionary of those; or JSON
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"  # repr gives no Python
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        # Also of one element
        items = [f"{literal(item)}, " for item in value]
        return f"({''.join(items)})"
    if not isinstance(value, dict):
        return repr(value)

    # The tags of codec.encode
    if "$tuple" in value:
        return literal(tuple(value["$tuple"]))
    if "$float" in value:
        return literal(float(value["$float"]))
    if "$class" in value or "$custom" in value:
        return _class_text(value)

    items = [f"{key!r}: {literal(item)}" for key, item in value.items()]
    return f"{{{', '.join(items)}}}"


def _class_text(value: Mapping[str, str]) -> str:
    """Return the names that the zoo evaluates for a class of PyTorch's or of another library."""
    name = value.get("$class") or value["$custom"].replace(":", ".")
    aliases = {"torch.nn.": "nn.", "torch.optim.": "th.optim."}
    for library, alias in aliases.items():
        if name.startswith(library):
            return alias + name.removeprefix(library)
    return f"get_class_by_name({name!r})"


def is_plain(value: object) -> bool:
    """Return whether :func:`literal` can write a value."""
    if isinstance(value, dict):
        has_plain_keys = {str, int} >= set(map(type, value))
        return has_plain_keys and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    # Subclasses may print as something else.
    return value is None or type(value) in (bool, int, float, str)


def without_paths(value: Any, found: set[str]) -> Any:
    """Replace files and directories of this machine by their names in a plain value.

    :param value: plain value
    :param found: set that collects the names
    """
    if isinstance(value, dict):
        return {key: without_paths(item, found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_paths(item, found) for item in value)
    if not isinstance(value, str) or not _is_local_path(value):
        return value

    # The reader puts it into the current directory.
    name = Path(value).name
    found.add(name)
    return f"./{name}"


def _is_local_path(text: str) -> bool:
    home = str(Path.home())
    if not os.path.isabs(text) or text == os.sep:
        return False
    # A file that has been removed can still tell the user's name. The home of some accounts is the root.
    return os.path.exists(text) or (len(home) > 1 and text.startswith(home + os.sep))


def without_machine(text: str) -> str:
    """Remove addresses of objects, and directories of this machine, from a text."""

    def shortened(match: re.Match[str]) -> str:
        path = match[0]
        if _is_local_path(path):
            return Path(path).name
        return path

    return _ABSOLUTE_PATH.sub(shortened, _ADDRESS.sub("", text))


# Arguments of VecNormalize that the RL Zoo passes on. Whether the statistics change is up to the command.
_NORMALIZATION = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


def hyperparameters(document: Document, settings: Document, env_kwargs: Document) -> Document:
    """Return what a training needs in the keys of the zoo's hyperparameter files.

    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :param settings: settings of the environments in these keys
    :param env_kwargs: settings of the task
    :return: plain values
    """
    defaults = stored_arguments(BY_CLASS_NAME[document["algorithm"]])
    config: Document = {
        "policy": readable(document["policy"]).replace(":", "."),  # as the zoo names classes
        "n_envs": document["n_envs"],
        "n_timesteps": document["progress"]["num_timesteps"],
    }
    for name, encoded in document["arguments"].items():
        value = readable(encoded)
        # The zoo passes the seed itself, and takes no null for a schedule.
        if name == "seed" or (value is None and defaults[name] is None):
            continue

        # Python, which the zoo evaluates
        if name == "policy_kwargs":
            value = literal(encoded)
        if name == "rollout_buffer_class":
            value = value.replace(":", ".")
        config[name] = value

    if document["shaping"] is not None:
        config["shaping"] = document["shaping"]["name"]
    # The zoo would take its own default.
    config["normalize"] = _normalization(document["vec_normalize"])
    config |= settings

    all_kwargs = {**env_kwargs, **settings.get("env_kwargs", {})}
    if all_kwargs:
        config["env_kwargs"] = all_kwargs
    return config


def _normalization(stored: Document | None) -> Document | bool:
    if stored is None:
        return False

    arguments = {}
    for name in _NORMALIZATION:
        value = readable(stored[name])
        if value is not None:
            arguments[name] = value
    return arguments
