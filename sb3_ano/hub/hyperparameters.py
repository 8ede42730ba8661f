"""The hyperparameters of a model in plain values, for reading and for the RL Zoo's files."""

import inspect
from typing import Any

from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.hub.schedules import dotted_name

# Arguments that say how and where a model runs, not what it learns from.
_NOT_HYPERPARAMETERS = {"env", "stats_window_size", "tensorboard_log", "verbose", "seed", "device", "torch_compile"}


def hyperparameters(model: ShapedPolicyAlgorithm) -> dict[str, Any]:
    """Arguments of the algorithm, the number of environments, and how they were normalised.

    :param model: the agent
    :return: numbers, names and dictionaries of those; anything else as its text
    """
    found: dict[str, Any] = {"policy": _policy_name(model), "n_envs": model.n_envs, "n_timesteps": model.num_timesteps}
    for name in inspect.signature(type(model).__init__).parameters:
        if hasattr(model, name) and not name.startswith("_") and name not in _NOT_HYPERPARAMETERS | {"self", "policy"}:
            found[name] = plain(getattr(model, name))
    if "shaping" in found:
        found["shaping"] = plain(model.shaping_name)  # type: ignore[attr-defined]
    statistics = model.get_vec_normalize_env()
    found["normalize"] = False if statistics is None else normalization(statistics)
    return found


def normalization(statistics: VecNormalize) -> dict[str, Any]:
    """The arguments of VecNormalize, as the RL Zoo writes them."""
    names = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")
    return {name: plain(getattr(statistics, name)) for name in names}


def plain(value: Any) -> Any:
    """A value that JSON and safe YAML can hold: schedules become numbers or the zoo's text, classes their dotted names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, FloatSchedule):
        return plain(value.value_schedule)
    if isinstance(value, ConstantSchedule):
        return float(value.val)
    if isinstance(value, LinearSchedule):
        return f"lin_{value.start}" if (value.end, value.end_fraction) == (0.0, 1.0) else str(value)
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return value.item()
    if hasattr(value, "__qualname__") or type(value).__repr__ is object.__repr__:
        return dotted_name(value)
    return str(value)


def _policy_name(model: ShapedPolicyAlgorithm) -> str:
    names = {policy: name for name, policy in model.policy_aliases.items()}
    return names.get(model.policy_class, plain(model.policy_class))
