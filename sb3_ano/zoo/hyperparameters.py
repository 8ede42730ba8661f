"""The zoo-format hyperparameter files that come with the package, and the check of hyperparameters."""

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano._io import constructor_arguments
from sb3_ano.algorithms.schedules import as_schedule
from sb3_ano.cli import hint

# Keys that the zoo reads itself. All other keys are arguments of the algorithm's constructor.
_ZOO_KEYS = {"backend", "callback", "env_kwargs", "env_wrapper", "frame_stack", "monitor_kwargs", "n_envs", "n_timesteps"}
_ZOO_KEYS |= {"normalize", "vec_env_wrapper"}
_NOISE_KEYS = {"noise_type", "noise_std"}
#: Arguments that may be schedules of the remaining progress.
SCHEDULES = ("learning_rate", "clip_range", "clip_range_high", "clip_range_vf", "desired_kl")
# Arguments that the zoo passes in addition to the hyperparameters.
_RESERVED = {"env", "seed", "verbose", "device", "tensorboard_log", "_init_setup_model"}


def hyperparameter_file(algo: str) -> Path:
    """Return the hyperparameter file of an algorithm: inside an installed package, next to it in a source tree.

    :param algo: ``"ano"``, ``"spo"`` or ``"papo"``
    """
    package = Path(__file__).resolve().parents[1]
    installed, source = (directory / "hyperparams" / f"{algo}.yml" for directory in (package, package.parent))
    return installed if installed.is_file() else source


def resolve_names(settings: Mapping[str, Any]) -> dict[str, Any]:
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

    buffer = settings.get("rollout_buffer_class")
    if isinstance(buffer, str):
        resolved["rollout_buffer_class"] = _imported("rollout_buffer_class", ":".join(buffer.rsplit(".", 1)))
    return resolved


def _imported(name: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}={path!r} cannot be imported: {error}; allowed is MODULE:NAME on Python's path") from error


def check_hyperparameters(
    settings: Mapping[str, Any], algorithm: type[BaseAlgorithm], source: str = "-params", required: Collection[str] = ()
) -> None:
    """Check names of hyperparameters, and the values that the zoo does not check.

    :param settings: hyperparameters of one environment
    :param algorithm: class of the algorithm
    :param source: where the hyperparameters come from, for the message
    :param required: names that may not be missing
    :raises ValueError: if neither the zoo nor the algorithm knows a name, a name is missing, or a value is invalid
    :raises TypeError: if a schedule is another text than ``lin_NUMBER``
    """
    arguments = constructor_arguments(algorithm)
    allowed = (arguments - _RESERVED) | _ZOO_KEYS | (_NOISE_KEYS if "action_noise" in arguments else set())
    if unknown := sorted(set(settings) - allowed):
        more = hint(unknown[0], sorted(allowed)) or f"; allowed are {', '.join(sorted(allowed))}"
        raise ValueError(f"{source}: unknown key {', '.join(map(repr, unknown))} for {algorithm.__name__}{more}")
    if missing := [name for name in required if name not in settings]:
        raise ValueError(f"{source}: the key {missing[0]!r} is missing; the zoo needs it for every environment")
    for name in ("clip_range", "clip_range_vf", "learning_rate"):
        if isinstance(value := settings.get(name), str):
            as_schedule(value, name)
    shaping, n_envs = settings.get("shaping", "ano"), settings.get("n_envs", 1)
    if not all(isinstance(name, str) for name in (shaping if isinstance(shaping, list | tuple) else [shaping])):
        raise ValueError(f"{source}: shaping={shaping!r} is not allowed; allowed are names, such as 'module:function'")
    if not isinstance(n_envs, int) or n_envs < 1:
        raise ValueError(f"{source}: n_envs={n_envs!r} is not allowed; allowed are positive integers")
