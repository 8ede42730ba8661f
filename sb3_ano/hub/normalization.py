"""VecNormalize as settings and a file of statistics."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ano.hub.documents import Check, SafeFormatError, boolean, fields, list_of, number, one_line, optional, shown, text
from sb3_ano.hub.tensors import TensorFile, specify
from sb3_ano.hub.values import CustomObjects, decode, encode

_SETTINGS: dict[str, Check] = {
    "training": boolean,
    "norm_obs": boolean,
    "norm_reward": boolean,
    "clip_obs": number(0.0, infinite=True),
    "clip_reward": number(0.0, infinite=True),
    "gamma": number(),
    "epsilon": number(0.0),
    "norm_obs_keys": optional(list_of(text, 1000)),
}


def encode_normalization(venv: VecNormalize) -> dict[str, Any]:
    """The settings as JSON."""
    return {name: encode(getattr(venv, name), f"vec_normalize.{name}", {}) for name in _SETTINGS}


def decode_normalization(document: Any) -> dict[str, Any]:
    """The arguments of VecNormalize that :func:`encode_normalization` described.

    :raises SafeFormatError: if a setting is missing, unknown, or not allowed
    """
    fields(document, "vec_normalize", _SETTINGS)
    settings = {}
    for key, check in _SETTINGS.items():
        name = f"vec_normalize.{key}"
        settings[key] = check(decode(document[key], name, CustomObjects(None)), name)
    return settings


def statistics_of(venv: VecNormalize) -> dict[str, torch.Tensor]:
    """Means, variances and counts, as float64."""
    return {
        f"{name}.{part}": torch.from_numpy(np.array(getattr(running, part), dtype=np.float64))
        for name, running in _running(venv).items()
        for part in ("mean", "var", "count")
    }


def _running(venv: VecNormalize) -> dict[str, RunningMeanStd]:
    found = {"ret_rms": venv.ret_rms}
    observations: Any = venv.obs_rms if venv.norm_obs else {}
    if isinstance(observations, dict):
        return found | {f"obs_rms[{key}]": running for key, running in observations.items()}
    return found | {"obs_rms": observations}


def restored_normalization(venv: VecEnv, settings: dict[str, Any], file: TensorFile) -> VecNormalize:
    """VecNormalize as it was stored, around other environments.

    :param settings: its arguments
    :param file: its statistics
    :raises SafeFormatError: if the statistics are damaged, or not those of such observations
    """
    keys = settings["norm_obs_keys"]
    space = venv.observation_space
    if keys is not None and not (isinstance(space, spaces.Dict) and set(keys) <= set(space.spaces)):
        raise SafeFormatError(f"vec_normalize.norm_obs_keys={shown(keys)} are not all among the observations of env")
    try:
        normalized = VecNormalize(venv, **settings)
    except ValueError as error:  # of observations that cannot be normalised
        raise SafeFormatError(f"the observations of env cannot be normalised as they were: {one_line(error)}") from error
    file.require(specify(statistics_of(normalized)), "the observations of env")
    tensors = file.read()
    for name, running in _running(normalized).items():
        running.mean = tensors[f"{name}.mean"].numpy().copy()
        running.var = tensors[f"{name}.var"].numpy().copy()
        running.count = float(tensors[f"{name}.count"])
    return normalized
