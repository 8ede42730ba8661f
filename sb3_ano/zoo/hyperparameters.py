"""The zoo-format hyperparameter files: reading them, those that come with the package, and the check of hyperparameters."""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Collection, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano._arguments import NOT_HYPERPARAMETERS, constructor_parameters
from sb3_ano.algorithms.schedules import as_schedule
from sb3_ano.cli import hint
from sb3_ano.envs.vec_env import envpool_family

#: Hyperparameters of one environment by name, in the zoo's format.
Hyperparameters = dict[str, Any]
# Algorithms with the hyperparameters of another one.
_SHARED_FILES = {"spo": "ano"}
# Keys that the zoo reads itself. All other keys are arguments of the algorithm's constructor.
_ZOO_KEYS = {
    "backend",
    "callback",
    "env_kwargs",
    "env_wrapper",
    "frame_stack",
    "monitor_kwargs",
    "n_envs",
    "n_timesteps",
    "normalize",
    "vec_env_wrapper",
}
# Keys of which the zoo makes ``action_noise``.
_NOISE_KEYS = {"noise_type", "noise_std"}
#: Arguments that may be schedules of the remaining progress.
SCHEDULES = ("learning_rate", "clip_range", "clip_range_high", "clip_range_vf", "desired_kl")
# Text of these is a schedule such as "lin_3e-4".
_SCHEDULES = ("learning_rate", "clip_range", "clip_range_vf", "delta_std")
_POSITIVE = ("n_envs", "n_timesteps", "frame_stack")
_CALLED = ("env_wrapper", "vec_env_wrapper", "callback")
# Text of these is Python, which the zoo evaluates.
_EXPRESSIONS = ("normalize", "policy_kwargs", "monitor_kwargs", "replay_buffer_class", "replay_buffer_kwargs")
_NORMALIZATION = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")
# Words in the annotation of an argument that takes integers only.
_INTEGER_WORDS = {"int", "None", "NoneType", "typing", "Optional", "Union", "class"}

# YAML 1.1, which PyYAML reads, wants a dot and a sign in numbers with an exponent. People write 1e3 and 3e-4.
_EXPONENT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+")
_NUMBER = re.compile(rf"[-+]?\d[\d_]*|[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)|{_EXPONENT.pattern}")
_TAG = "!number"


class _FileLoader(yaml.SafeLoader):
    """Load plain values, with numbers as people write them."""

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        return _as_number(str(node.value))


_FileLoader.add_implicit_resolver(_TAG, re.compile(f"^(?:{_EXPONENT.pattern})$"), list("-+.0123456789"))
_FileLoader.add_constructor(_TAG, _FileLoader.construct_number)


def _as_number(text: str) -> int | float:
    """Return the number in a text; ``1e3`` is an integer, so that it can be a number of steps, and ``1.0e3`` is a float."""
    number = float(text.replace("_", ""))
    if "." not in text and number.is_integer():
        return int(number)
    return number


def hyperparameter_file(algo: str) -> Path:
    """Return the hyperparameter file of an algorithm: inside an installed package, next to it in a source tree.

    :param algo: zoo name of an algorithm of this package
    """
    algo = _SHARED_FILES.get(algo, algo)
    package = Path(__file__).resolve().parents[1]
    # hatch_build.py puts it there.
    installed = package / "hyperparams" / f"{algo}.yml"
    if installed.is_file():
        return installed
    return package.parent / "hyperparams" / f"{algo}.yml"


def resolve_names(settings: Hyperparameters) -> Hyperparameters:
    """Return hyperparameters with objects for what only this package's files have words for.

    These are schedules other than the zoo's ``lin_x``, as ``MODULE:FUNCTION`` or the numbers of SB3's ``LinearSchedule``, and
    rollout buffers by the names of their classes.

    :param settings: hyperparameters of one environment
    :raises ValueError: if a name leads nowhere
    """
    resolved = dict(settings)
    for name in SCHEDULES:
        value = settings.get(name)
        if isinstance(value, Mapping):
            if set(value) != {"start", "end", "end_fraction"}:
                raise ValueError(f"{name}={dict(value)} is not allowed; its keys are start, end and end_fraction")
            resolved[name] = LinearSchedule(**value)
        elif isinstance(value, str) and ":" in value:
            resolved[name] = _imported(name, value)

    # config.yml of a pushed agent names it with a dot.
    buffer = settings.get("rollout_buffer_class")
    if isinstance(buffer, str):
        resolved["rollout_buffer_class"] = _imported("rollout_buffer_class", ":".join(buffer.rsplit(".", 1)))
    return resolved


def _imported(name: str, path: str) -> object:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}={path!r} cannot be imported: {error}; allowed is MODULE:NAME on Python's path") from error


def read_file(name: str) -> dict[str, object]:
    """Read hyperparameters of all environments.

    :param name: YAML file, or Python file or module with a dictionary ``hyperparams``
    :return: hyperparameters by environment
    :raises ValueError: if the file cannot be read, or has no hyperparameters
    """
    # What is no YAML is Python: a file, or the name of a module.
    read = _read_python
    if name.endswith((".yml", ".yaml")):
        read = _read_yaml
    content = read(name)

    if not content:
        raise ValueError(f"{name} is empty; allowed are entries ENVIRONMENT: {{KEY: VALUE, ...}}")
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds a {type(content).__name__}; allowed are entries ENVIRONMENT: {{KEY: VALUE, ...}}")
    return content


def _read_yaml(name: str) -> object:
    file = Path(name)
    try:
        return yaml.load(file.read_text(encoding="utf-8-sig"), Loader=_FileLoader)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        where = ""
        mark = error.problem_mark
        if mark is not None:  # it counts from 0
            where = f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{file}{where} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not YAML: {error}") from error


def _read_python(name: str) -> object:
    """Run a Python file, or import a module, and return its ``hyperparams``."""
    try:
        if name.endswith(".py"):
            # The user's own, as in the zoo
            variables: dict[str, object] = {}
            exec(compile(Path(name).read_bytes(), name, "exec"), variables)
        else:
            variables = vars(importlib.import_module(name))
    except FileNotFoundError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            kinds = "files .yml and .py, and modules that can be imported"
            raise ValueError(f"--conf-file {name} is neither a file nor a module; allowed are {kinds}") from error
        raise ValueError(f"{name} cannot be run: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise ValueError(f"{name} cannot be run: {type(error).__name__}: {error}") from error

    if "hyperparams" not in variables:
        raise ValueError(f"{name} has no variable 'hyperparams', a dictionary with an entry for each environment")
    return variables["hyperparams"]


def general_entry(content: Mapping[str, object], env_id: str, is_atari: bool) -> str:
    """Return the name of the entry for environments without one of their own."""
    # In the zoo, games have no other default.
    if is_atari:
        return "atari"

    family = envpool_family(env_id)
    if family is not None and family in content:
        return family
    return "default"


def find_entry(content: Mapping[str, object], env_id: str, is_atari: bool, source: str) -> tuple[str, Hyperparameters]:
    """Find the hyperparameters of an environment as the zoo does; a family of EnvPool's tasks may have an entry, too.

    :param content: hyperparameters by environment
    :param env_id: gymnasium's id
    :param is_atari: whether it is an Atari game, which the entry ``atari`` is for
    :param source: where the hyperparameters come from, for the message
    :return: name of the entry and its hyperparameters
    :raises ValueError: if there is no such entry, or it holds no hyperparameters
    """
    shared = general_entry(content, env_id, is_atari)
    name = shared
    if env_id in content:
        name = env_id
    if name not in content:
        near = hint(env_id, list(map(str, content)))
        raise ValueError(f"{source} has no entry {env_id!r}{near or ','} and no entry {shared!r} for environments without one")

    entry = content[name]
    if not isinstance(entry, Mapping):
        what = f"is of type {type(entry).__name__}"
        if entry is None:
            what = "is empty"
        raise ValueError(f"{source}: the entry {name!r} {what}; allowed are lines KEY: VALUE")
    return name, dict(entry)


def read_hyperparameters(
    settings: Hyperparameters, algorithm: type[BaseAlgorithm], source: str = "-params", required: Collection[str] = ()
) -> Hyperparameters:
    """Check names and values of hyperparameters, and read numbers that are written as text or as a whole float.

    :param settings: hyperparameters of one environment
    :param algorithm: class of the algorithm
    :param source: where the hyperparameters come from, for the message
    :param required: names that may not be missing
    :return: hyperparameters
    :raises ValueError: if neither the zoo nor the algorithm knows a name, a name is missing, or a value is invalid
    """
    arguments = constructor_parameters(algorithm)
    allowed = (set(arguments) - NOT_HYPERPARAMETERS) | _ZOO_KEYS
    if "action_noise" in arguments:
        allowed |= _NOISE_KEYS

    unknown = sorted(map(str, set(settings) - allowed))
    if unknown:
        more = hint(unknown[0], sorted(allowed)) or f"; allowed are {', '.join(sorted(allowed))}"
        raise ValueError(f"{source}: unknown key {', '.join(map(repr, unknown))} for {algorithm.__name__}{more}")

    for name in required:
        if name not in settings:
            raise ValueError(f"{source}: the key {name!r} is missing; the zoo needs it for every environment")

    values = {}
    for name, value in settings.items():
        try:
            values[name] = _read_value(name, value, arguments, algorithm)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {error}") from error
    return values


def name_classes(value: object) -> object:
    """Replace classes, as a Python file has them, by their names, which a file can store and the zoo reads.

    :param value: class, name, a dictionary from one of these to arguments, or a list of these
    :raises ValueError: if a class cannot be found by its name
    """
    if isinstance(value, list):
        return [name_classes(part) for part in value]
    if isinstance(value, dict):
        return {name_classes(called): arguments for called, arguments in value.items()}
    if not isinstance(value, type):
        return value

    # A class of another one, or of a function, cannot be found by its name.
    name = value.__qualname__
    if getattr(sys.modules.get(value.__module__), name, None) is not value:
        raise ValueError(f"the class {name} cannot be stored by its name; define it in a module that can be imported")
    return f"{value.__module__}.{name}"


def _read_value(name: str, value: Any, arguments: Mapping[str, inspect.Parameter], algorithm: type[BaseAlgorithm]) -> Any:
    """Return the value of a hyperparameter, or raise ValueError or TypeError with its name."""
    # First what the zoo reads itself.
    if name in _POSITIVE:
        if name == "frame_stack" and value is None:
            return None
        number = _read_number(value)
        if not _is_integer(number) or number < 1:
            raise ValueError(f"{name}={value!r} is not allowed; allowed are positive integers")
        return int(number)

    if name in _CALLED:
        _check_called(name, value)
        return value
    if name in _EXPRESSIONS:
        _check_expression(name, value)
        return value
    if name == "env_kwargs":
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"env_kwargs={value!r} is not allowed; allowed is a dictionary, such as {{gravity: 9.8}}")
        return value

    if name == "policy":
        _check_policy(value, algorithm)
        return name_classes(value)  # the zoo takes names only
    if name == "shaping":
        names = [value]
        if isinstance(value, list | tuple):
            names = list(value)
        # A run could not store a function.
        if {str} != set(map(type, names)):
            raise ValueError(f"shaping={value!r} is not allowed; allowed are names, such as 'module:function'")
        return value
    return _read_argument(name, value, arguments.get(name))


def _read_argument(name: str, value: Any, argument: inspect.Parameter | None) -> Any:
    """Return the value of an argument of the constructor, as its annotation wants it."""
    if argument is None or argument.annotation is argument.empty:
        return value

    # A type, or what is left of it as text.
    annotation = str(argument.annotation)
    if isinstance(argument.annotation, type):
        annotation = argument.annotation.__name__
    words = set(re.findall(r"\w+", annotation))
    may_be_none = argument.default is None or bool(words & {"None", "NoneType", "Optional"})

    # What the algorithm's constructor annotates is what it takes.
    if "int" in words and words <= _INTEGER_WORDS:
        number = _read_number(value)
        if _is_integer(number):
            return int(number)
        if value is not None or not may_be_none:
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; allowed are integers")
    elif name in SCHEDULES and (isinstance(value, Mapping) or (isinstance(value, str) and ":" in value)):
        resolve_names({name: value})
    elif "float" in words:
        number = _read_number(value)
        if callable(number) and name in _SCHEDULES:
            raise ValueError(
                f"{name} is a function, which a run cannot store; allowed are numbers and text such as 'lin_3e-4'"
            )
        if isinstance(number, str) and name in _SCHEDULES:
            as_schedule(number, name)
            # The zoo splits it at each underscore.
            return "lin_" + number.removeprefix("lin_").replace("_", "")

        # Text that is no number can be a mode, such as "auto".
        if isinstance(number, list | dict | bool) or (isinstance(number, str) and "str" not in words):
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; allowed are numbers")
        elif number is None and not may_be_none:
            # Such as a key without a value
            raise ValueError(f"{name} has no value; allowed are numbers")
        return number
    elif words == {"bool"} and not isinstance(value, bool | int):
        raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; allowed are true and false")
    return value


def _read_number(value: object) -> Any:
    """Return the number if a text is one, and any other value as it is."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return _as_number(value.strip())
    return value


def _is_integer(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return math.isfinite(value) and float(value).is_integer()


def _check_called(name: str, value: object) -> None:
    """Check wrappers and callbacks: a class or its name, with or without arguments, or a list of those."""
    parts: list[Any] = [value]
    if isinstance(value, list):
        parts = value
    for part in parts:
        called = part
        options: Any = {}
        if isinstance(part, dict):
            if len(part) != 1:
                what = "a class has one entry with its arguments below it; check the indentation"
                raise ValueError(f"{name}: {part!r} is not allowed; {what}")
            called, options = next(iter(part.items()))

        if not isinstance(options, dict):
            raise ValueError(f"{name}: the arguments {options!r} of {called} are not allowed; allowed is a dictionary")
        if isinstance(called, str):
            called = _import_class(name, called)
        if isinstance(called, type) and name == "env_wrapper":
            _check_wrapper(called, options)


def _check_wrapper(wrapper: type, options: Mapping[str, object]) -> None:
    """Reject a limit of the steps that the monitor below it cannot see, so that an evaluation would never end."""
    if issubclass(wrapper, gym.wrappers.TimeLimit):
        limit = options.get("max_episode_steps", "N")
        remedy = f"use env_kwargs: {{max_episode_steps: {limit}}} instead"
        raise ValueError(f"env_wrapper {wrapper.__name__} ends episodes outside of the monitor, so none is counted; {remedy}")


def _import_class(name: str, path: str) -> object:
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ValueError(f"{name}={path!r} is not allowed; allowed are names with their module, such as my_package.{path}")

    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module raises
        raise ValueError(f"{name}={path!r} cannot be imported: {error}") from error


def _check_expression(name: str, value: object) -> None:
    """Check a value that may be Python as text, which the zoo evaluates, and is a dictionary except for two of them."""
    if isinstance(value, str):
        import rl_zoo3.exp_manager  # in whose variables the zoo evaluates

        try:
            value = eval(value, dict(vars(rl_zoo3.exp_manager)))
        except Exception as error:
            advice = "allowed is Python such as dict(net_arch=[64, 64], activation_fn=nn.ReLU)"
            if isinstance(error, NameError):
                advice += "; for classes of your own, use a file in Python (--conf-file FILE.py)"
            raise ValueError(f"{name}={value!r} cannot be evaluated: {error}; {advice}") from error

    # None is the default of all of them.
    if name == "replay_buffer_class" or value is None:
        return
    if name == "normalize" and isinstance(value, bool):
        return

    if not isinstance(value, dict):
        allowed = "a dictionary"
        if name == "normalize":
            allowed = "true, false and a dictionary"
        raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; allowed is {allowed}")
    if name == "normalize":
        unknown = sorted(set(value) - set(_NORMALIZATION))
        if unknown:
            more = hint(unknown[0], _NORMALIZATION) or f"; allowed are {', '.join(_NORMALIZATION)}"
            raise ValueError(f"normalize has an unknown key {unknown[0]!r}{more}")


def _check_policy(value: object, algorithm: type[BaseAlgorithm]) -> None:
    """Check the policy: a class, the name of one with its module, or one of the algorithm's names."""
    if isinstance(value, type):
        return
    if not isinstance(value, str):
        raise ValueError(f"policy={value!r} is of type {type(value).__name__}; allowed are names such as 'MlpPolicy'")
    # A class of the user's own has its module's name.
    if "." in value:
        _import_class("policy", value)
    elif value not in algorithm.policy_aliases:
        names = sorted(algorithm.policy_aliases)
        more = hint(value, names) or f"; allowed are {', '.join(names)}, and my_package.MyPolicy"
        raise ValueError(f"policy={value!r} is unknown{more}")
