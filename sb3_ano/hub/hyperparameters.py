"""Hyperparameters of a model in plain values, for model cards and the RL Zoo's files."""

from typing import Any

from stable_baselines3.common.utils import LinearSchedule

from sb3_ano.algorithms import ANO, ShapedPolicyAlgorithm
from sb3_ano.hub.codec import encode, encode_arguments, encode_policy
from sb3_ano.hub.training_state import encode_normalization

# Arguments that say how and where a model runs, not what it learns from.
_NOT_HYPERPARAMETERS = ("stats_window_size", "verbose", "seed", "torch_compile")
# Arguments of VecNormalize that the RL Zoo writes.
_NORMALIZATION = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


def hyperparameters(model: ShapedPolicyAlgorithm) -> dict[str, Any]:
    """Return the arguments of the algorithm, the number of environments, and how they were normalized.

    :param model: agent
    :return: numbers, names, and lists and dictionaries of those
    """
    policy = _readable(encode_policy(model, {}))
    settings: dict[str, Any] = {"policy": policy, "n_envs": model.n_envs, "n_timesteps": model.num_timesteps}
    arguments = encode_arguments(model, {})
    settings |= {name: _readable(value) for name, value in arguments.items() if name not in _NOT_HYPERPARAMETERS}
    if isinstance(model, ANO):
        settings["shaping"] = model.shaping_name
    statistics = model.get_vec_normalize_env()
    stored = {} if statistics is None else encode_normalization(statistics)
    settings["normalize"] = {name: _readable(stored[name]) for name in _NORMALIZATION} if stored else False
    return settings


def plain(value: Any) -> Any:
    """Return a value that JSON and safe YAML can hold, with names instead of functions, classes and other objects."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    return _readable(encode(value.tolist() if hasattr(value, "tolist") else value, "", {}))


def _readable(encoded: Any) -> Any:
    """Replace the codec's tags: schedules become the zoo's text, and classes their names."""
    if isinstance(encoded, list):
        return [_readable(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$float" in encoded:
        return float(encoded["$float"])
    if "$schedule" in encoded:
        schedule = LinearSchedule(encoded["start"], encoded["end"], encoded["end_fraction"])
        return f"lin_{schedule.start}" if (schedule.end, schedule.end_fraction) == (0.0, 1.0) else str(schedule)
    tag = next((key for key in encoded if key.startswith("$")), None)
    return {key: _readable(item) for key, item in encoded.items()} if tag is None else _readable(encoded[tag])
