"""Describe a training so that a reader can repeat it: settings in the RL Zoo's keys, and parts that only the author has."""

import dataclasses
import inspect
import keyword
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3.common import atari_wrappers
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper, VecFrameStack, VecNormalize

from sb3_ano._registry import BY_CLASS_NAME
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.hub.codec import SCHEDULES, dotted_name, is_built_in, readable, stored_arguments

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/[\w.@+~-]+(?:/[\w.@+~ -]*[\w.@+~-])*/?")
#: Wrappers that leave the task as it is, or that gymnasium, SB3 and the zoo add themselves. The limits of time are compared by
#: ``max_episode_steps``, and images that VecTransposeImage turns by the spaces.
NEUTRAL = {"Monitor", "OrderEnforcing", "PassiveEnvChecker", "PatchedTimeLimit", "RecordEpisodeStatistics", "RecordVideo"}
NEUTRAL |= {"TimeLimit", "VecCheckNan", "VecMonitor", "VecTransposeImage", "VecVideoRecorder", "_LearnersGame"}
ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
# What it consists of.
_ATARI = {"NoopResetEnv", "MaxAndSkipEnv", "EpisodicLifeEnv", "FireResetEnv", "WarpFrame", "ClipRewardEnv", "StickyActionEnv"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Describe a part of an agent that only its author's code defines.

    :param name: dotted name of the argument
    :param shown: name of the class or function, in words
    :param module: module to import it from, or None if it cannot be imported
    :param expression: Python for the part, in the card's code
    :param is_importable: whether others can import the part by that name, if they have its module
    :param is_stand_in: whether the expression is a value that acts the same, so that nothing has to be brought
    """

    name: str
    shown: str
    module: str | None
    expression: str
    is_importable: bool
    is_stand_in: bool = False


def import_path(value: Any) -> tuple[str, str] | None:
    """Return module and name from which others can import a class or function, or None."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    if not _DOTTED.fullmatch(module) or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not value:
        return None
    return module, name


def custom_parts(document: Mapping[str, Any], objects: Mapping[str, Any]) -> list[Part]:
    """List the parts of an agent that are not built in.

    A shape and a schedule have stand-ins, because they act in training only.

    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :param objects: the parts by dotted name, as ``describe`` collects them; a shape is not among them
    """
    parts: list[Part] = []
    if document["shaping"] and not is_built_in(document["shaping"]["name"]):
        names = document["shaping"]["name"]
        shown = names if isinstance(names, str) else ", ".join(names)
        is_importable = "__main__" not in shown and "<" not in shown
        parts.append(Part("shaping", shown, None, "'ano'", is_importable, is_stand_in=True))

    for name, value in objects.items():
        shown = dotted_name(value)
        path = import_path(value)
        if name in SCHEDULES:
            first = float(value(1.0))
            number = first if math.isfinite(first) else 0.0
            parts.append(Part(name, shown, None, repr(number), path is not None, is_stand_in=True))
        elif path is not None:
            parts.append(Part(name, shown, path[0], ".".join(path), is_importable=True))
        else:
            parts.append(Part(name, shown, None, _variable(name, value), is_importable=False))
    return parts


def _variable(name: str, value: Any) -> str:
    """Return a variable for a part of an agent in the card's code: its own name, or else that of its argument."""
    short = getattr(value, "__qualname__", "").rpartition(".")[2]
    if short.isidentifier() and not keyword.iskeyword(short):
        return short
    return re.sub(r"\W", "_", name.rpartition(".")[2])


def literal(value: Any, variables: Mapping[str, str] | None = None) -> str:
    """Return Python for a plain value, or for what ``codec.encode`` returned, as the zoo's files have it.

    :param value: None, boolean, number, text, or a list, tuple or dictionary of those; or JSON
    :param variables: for JSON, variables for the parts that cannot be imported, by the names that ``codec.encode`` gave them
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"  # repr gives no Python
    if isinstance(value, list):
        items = [literal(item, variables) for item in value]
        return f"[{', '.join(items)}]"
    if isinstance(value, tuple):
        items = [f"{literal(item, variables)}, " for item in value]
        return f"({''.join(items)})"
    if not isinstance(value, dict):
        return repr(value)

    if "$tuple" in value:
        return literal(tuple(value["$tuple"]), variables)
    if "$float" in value:
        return literal(float(value["$float"]), variables)
    if "$class" in value or "$custom" in value:
        return _class_text(value, variables or {})

    texts = {key: literal(item, variables) for key, item in value.items()}
    # As the zoo's files have it, without quotation marks, which YAML would have to escape.
    if variables is not None and all(key.isidentifier() and not keyword.iskeyword(key) for key in texts):
        return f"dict({', '.join(f'{key}={text}' for key, text in texts.items())})"
    return f"{{{', '.join(f'{key!r}: {text}' for key, text in texts.items())}}}"


def _class_text(value: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Return the names that the zoo evaluates for a class of PyTorch's or of another library."""
    if "$class" in value:
        name = value["$class"]
    elif value["$custom"] in variables:
        return variables[value["$custom"]]
    else:
        name = value["$custom"].replace(":", ".")

    aliases = {"torch.nn.": "nn.", "torch.optim.": "th.optim."}
    for library, alias in aliases.items():
        if name.startswith(library):
            return alias + name.removeprefix(library)
    return f"get_class_by_name({name!r})"


def is_plain(value: Any) -> bool:
    """Return whether :func:`literal` can write a value."""
    if isinstance(value, dict):
        return all(type(key) in (str, int) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def without_paths(value: Any, found: set[str]) -> Any:
    """Replace files and directories of this machine by their names in a plain value.

    :param value: plain value
    :param found: set that collects the names
    """
    if isinstance(value, dict):
        return {key: without_paths(item, found) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item, found) for item in value]
    if isinstance(value, tuple):
        return tuple(without_paths(item, found) for item in value)
    if not isinstance(value, str) or not _is_local_path(value):
        return value
    name = Path(value).name
    found.add(name)
    return f"./{name}"


def _is_local_path(text: str) -> bool:
    home = str(Path.home())
    if not os.path.isabs(text) or text == os.sep:
        return False
    return os.path.exists(text) or (len(home) > 1 and text.startswith(home + os.sep))


def without_machine(text: str) -> str:
    """Remove addresses of objects, and directories of this machine, from a text."""

    def shortened(match: re.Match[str]) -> str:
        path = match[0]
        return Path(path).name if _is_local_path(path) else path

    return _ABSOLUTE_PATH.sub(shortened, _ADDRESS.sub("", text))


# Backends of Python environments, which may have wrappers.
_PYTHON = ("gymnasium", "process")


def environment_settings(venv: VecEnv, example: VecEnv) -> tuple[dict[str, Any], list[str]]:
    """Describe how environments are built, in the keys of the zoo's hyperparameter files.

    :param venv: environments of a training
    :param example: environment that is built in the same way, for environments that are in other processes
    :return: settings, and what they leave out because the environments do not tell it
    """
    env_id, _ = getattr(venv.unwrapped, "made_from", (None, {}))
    backend = getattr(venv.unwrapped, "backend", "gymnasium")
    is_game = env_id is not None and atari_protocol(env_id) is not None
    settings: dict[str, Any] = {}
    missing: list[str] = []
    if is_game or backend != "gymnasium":
        settings["backend"] = backend if backend in _PYTHON else "auto"  # which also works without EnvPool

    layers = _layers(venv)
    if is_game and layers and isinstance(layers[-1], VecFrameStack):  # which the backend adds
        layers.pop()
    _describe_layers(layers, settings, missing)
    if not is_game and backend in _PYTHON:
        _describe_wrappers(example if isinstance(venv.unwrapped, SubprocVecEnv) else venv, settings, missing)
    return settings, missing


def _layers(venv: VecEnv) -> list[VecEnvWrapper]:
    """List the vectorized wrappers, outermost first, without those that the zoo adds."""
    layers: list[VecEnvWrapper] = []
    while isinstance(venv, VecEnvWrapper):
        if type(venv).__name__ not in NEUTRAL:
            layers.append(venv)
        venv = venv.venv
    return layers


def _describe_layers(layers: list[VecEnvWrapper], settings: dict[str, Any], missing: list[str]) -> None:
    """Describe vectorized wrappers: the zoo stacks frames around VecNormalize, and has ``vec_env_wrapper`` below it."""
    # The outermost VecNormalize is the agent's, and is described with it.
    outer: list[VecEnvWrapper] = []
    inner = list(layers)
    if any(isinstance(layer, VecNormalize) for layer in layers):
        while not isinstance(inner[0], VecNormalize):
            outer.append(inner.pop(0))
        inner.pop(0)
    elif inner and isinstance(inner[0], VecFrameStack):
        outer.append(inner.pop(0))

    if len(outer) == 1 and isinstance(outer[0], VecFrameStack):
        settings["frame_stack"] = outer[0].stacked_obs.n_stack
        missing += _other_order(outer[0])
    else:
        missing += [f"the wrapper {dotted_name(layer)}, around VecNormalize" for layer in outer]

    named: list[Any] = []
    for layer in reversed(inner):
        kind = type(layer)
        path = import_path(kind)
        if isinstance(layer, VecFrameStack):
            named.append({"stable_baselines3.common.vec_env.VecFrameStack": {"n_stack": layer.stacked_obs.n_stack}})
            missing += _other_order(layer)
        elif path is not None and not _other_parameters(kind):
            named.append(".".join(path))
        else:
            missing.append(f"the wrapper {dotted_name(layer)} and its arguments")
    if named:
        settings["vec_env_wrapper"] = named


def _other_order(stack: VecFrameStack) -> list[str]:
    usual = VecFrameStack(stack.venv, stack.stacked_obs.n_stack).observation_space
    return [] if usual == stack.observation_space else ["channels_order of VecFrameStack"]


def _other_parameters(kind: type) -> list[str]:
    """Return the names of a wrapper's arguments after the environment."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _describe_wrappers(venv: VecEnv, settings: dict[str, Any], missing: list[str]) -> None:
    """Describe gymnasium's wrappers and the limit of steps of the first environment."""
    environments = getattr(venv.unwrapped, "envs", None)
    if not environments:
        missing.append("the wrappers of the environments, which do not tell them")
        return

    env: gym.Env = environments[0]
    wrappers: list[gym.Wrapper] = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(env)
        env = env.env

    named: list[Any] = []
    atari: dict[str, Any] = {}
    for wrapper in reversed(wrappers):
        name = type(wrapper).__name__
        if name in NEUTRAL:
            continue
        if type(wrapper).__module__ != atari_wrappers.__name__:
            _describe_wrapper(wrapper, named, missing)
        elif name in _ATARI:
            atari[name] = wrapper
        else:  # AtariWrapper itself, around its parts
            named.append({ATARI_WRAPPER: _atari_arguments(atari)})
            atari = {}
    missing += [f"the wrapper {name} and its arguments" for name in atari]
    if named:
        settings["env_wrapper"] = named

    spec = environments[0].spec
    registered = None if spec is None else gym.registry.get(spec.id)
    if spec is not None and registered is not None and spec.max_episode_steps != registered.max_episode_steps:
        settings["env_kwargs"] = {"max_episode_steps": spec.max_episode_steps or -1}


def _atari_arguments(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which AtariWrapper consists of these wrappers."""
    arguments: dict[str, Any] = {
        "noop_max": 0,
        "frame_skip": 1,
        "screen_size": parts["WarpFrame"].width,
        "terminal_on_life_loss": "EpisodicLifeEnv" in parts,
        "clip_reward": "ClipRewardEnv" in parts,
    }
    if "NoopResetEnv" in parts:
        arguments["noop_max"] = parts["NoopResetEnv"].noop_max
    if "MaxAndSkipEnv" in parts:
        arguments["frame_skip"] = parts["MaxAndSkipEnv"]._skip
    if "StickyActionEnv" in parts:
        arguments["action_repeat_probability"] = parts["StickyActionEnv"].action_repeat_probability
    return arguments


def _describe_wrapper(wrapper: gym.Wrapper, named: list[Any], missing: list[str]) -> None:
    kind = type(wrapper)
    path = import_path(kind)
    recorded = getattr(wrapper, "_saved_kwargs", None)  # of gymnasium's RecordConstructorArgs
    if path is None:
        missing.append(f"the wrapper {dotted_name(wrapper)}")
    elif recorded and is_plain(recorded):
        named.append({".".join(path): dict(recorded)})
    elif recorded or (recorded is None and _other_parameters(kind)):
        missing.append(f"the arguments of the wrapper {dotted_name(wrapper)}")
        named.append(".".join(path))
    else:
        named.append(".".join(path))


#: Arguments of VecNormalize that the RL Zoo passes on. Whether the statistics change is up to the command.
_NORMALIZATION = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


def hyperparameters(
    document: Mapping[str, Any], settings: Mapping[str, Any], env_kwargs: Mapping[str, Any], parts: Sequence[Part] = ()
) -> dict[str, Any]:
    """Return what a training needs in the keys of the zoo's hyperparameter files.

    :param document: description from :func:`~sb3_ano.hub.safe_format.describe`
    :param settings: settings of the environments, from :func:`environment_settings`
    :param env_kwargs: settings of the task
    :param parts: parts of the agent that are not built in
    :return: plain values
    """
    defaults = stored_arguments(BY_CLASS_NAME[document["algorithm"]])
    variables = {part.shown: part.expression for part in parts if not part.is_importable}
    config: dict[str, Any] = {
        "policy": readable(document["policy"]).replace(":", "."),  # as the zoo names classes
        "n_envs": document["n_envs"],
        "n_timesteps": document["progress"]["num_timesteps"],
    }
    for name, encoded in document["arguments"].items():
        value = readable(encoded)
        # The zoo passes the seed itself, and takes no null for a schedule.
        if name == "seed" or (value is None and defaults[name] is None):
            continue
        if name == "policy_kwargs":
            value = literal(encoded, variables)
        if name == "rollout_buffer_class":
            value = value.replace(":", ".")
        config[name] = value

    if document["shaping"] is not None:
        config["shaping"] = document["shaping"]["name"]
    config["normalize"] = _normalization(document["vec_normalize"])
    config |= settings
    all_kwargs = {**env_kwargs, **settings.get("env_kwargs", {})}
    if all_kwargs:
        config["env_kwargs"] = all_kwargs
    return config


def _normalization(stored: Mapping[str, Any] | None) -> dict[str, Any] | bool:
    if stored is None:
        return False
    arguments = {}
    for name in _NORMALIZATION:
        value = readable(stored[name])
        if value is not None:
            arguments[name] = value
    return arguments
