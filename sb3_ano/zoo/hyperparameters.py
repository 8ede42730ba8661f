"""The zoo-format hyperparameter files that come with the package."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_ano.envs import BACKENDS

# Keys that the zoo reads itself. All other keys are arguments of the algorithm's constructor.
_ZOO_KEYS = {"backend", "callback", "env_kwargs", "env_wrapper", "frame_stack", "monitor_kwargs", "n_envs", "n_timesteps"}
_ZOO_KEYS |= {"normalize", "vec_env_wrapper"}
_NOISE_KEYS = {"noise_type", "noise_std"}
# Arguments that the zoo passes in addition to the hyperparameters.
_RESERVED = {"self", "env", "seed", "verbose", "device", "tensorboard_log", "_init_setup_model"}


def hyperparameter_file(algo: str) -> Path:
    """Return the hyperparameter file of an algorithm: inside an installed package, next to it in a source tree.

    :param algo: ``"ano"``, ``"spo"`` or ``"papo"``
    :raises FileNotFoundError: if the installation is incomplete
    """
    package = Path(__file__).resolve().parents[1]
    for directory in (package, package.parent):
        file = directory / "hyperparams" / f"{algo}.yml"
        if file.is_file():
            return file
    raise FileNotFoundError(f"no hyperparams/{algo}.yml comes with this installation of sb3_ano in {package}")


def check_names(names: Collection[str], algorithm: type[BaseAlgorithm], source: str = "-params") -> None:
    """Check the names of hyperparameters.

    :param names: names
    :param algorithm: class of the algorithm
    :param source: where the names come from, for the message
    :raises ValueError: if neither the zoo nor the algorithm knows a name
    """
    arguments = inspect.signature(algorithm.__init__).parameters
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        return
    allowed = (set(arguments) - _RESERVED) | _ZOO_KEYS | (_NOISE_KEYS if "action_noise" in arguments else set())
    if unknown := sorted(set(names) - allowed):
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        hint = f", did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(sorted(allowed))}"
        raise ValueError(f"{source}: unknown key {', '.join(map(repr, unknown))} for {algorithm.__name__}{hint}")


def check_hyperparameters(
    settings: Mapping[str, Any], algorithm: type[BaseAlgorithm], file: str, typed: Collection[str] = ()
) -> None:
    """Check names of hyperparameters, and the values that the zoo does not check.

    :param settings: hyperparameters of one environment
    :param algorithm: class of the algorithm
    :param file: where the hyperparameters come from, for the message
    :param typed: names of hyperparameters that come from the command line instead
    :raises ValueError: if a name is unknown or missing, or a value is invalid
    """
    check_names([name for name in settings if name in typed], algorithm)
    check_names(settings, algorithm, file)
    for key in ("policy", "n_timesteps"):
        if key not in settings:
            raise ValueError(f"{file}: the key {key!r} is missing; the zoo needs it for every environment")
    shaping, n_envs = settings.get("shaping", "ano"), settings.get("n_envs", 1)
    backend = settings.get("backend", BACKENDS[0])
    names = shaping if isinstance(shaping, list | tuple) else [shaping]
    for key, value, is_allowed, allowed in (
        ("shaping", shaping, all(isinstance(name, str) for name in names), "names, such as 'spo' or 'module:function'"),
        ("n_envs", n_envs, isinstance(n_envs, int) and n_envs >= 1, "positive integers"),
        ("backend", backend, backend in BACKENDS, ", ".join(BACKENDS)),
    ):
        if not is_allowed:
            source = "-params" if key in typed else file
            raise ValueError(f"{source}: {key}={value!r} is not allowed; allowed are {allowed}")
