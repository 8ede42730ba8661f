"""Statistics of VecNormalize and the state of an optimizer, as JSON and tensors."""

import copy
import inspect
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch.optim import Optimizer

from sb3_ano.envs import VecNormalize as FastVecNormalize
from sb3_ano.hub.codec import decode, encode
from sb3_ano.hub.documents import rejected, require_like, shown, translate_errors
from sb3_ano.hub.tensors import TensorFile, specify

# Arguments of VecNormalize and their defaults.
_SETTINGS = {name: each.default for name, each in inspect.signature(VecNormalize).parameters.items() if name != "venv"}


def encode_normalization(venv: VecNormalize) -> dict[str, Any]:
    """Convert the arguments of VecNormalize to JSON."""
    return {name: encode(getattr(venv, name), f"vec_normalize.{name}", {}) for name in _SETTINGS}


def statistics_of(venv: VecNormalize) -> dict[str, torch.Tensor]:
    """Return means, variances and counts as float64."""
    return {
        f"{name}.{part}": torch.from_numpy(np.array(getattr(running, part), dtype=np.float64))
        for name, running in _running(venv).items()
        for part in ("mean", "var", "count")
    }


def _running(venv: VecNormalize) -> dict[str, RunningMeanStd]:
    observations: Any = venv.obs_rms if venv.norm_obs else {}
    if not isinstance(observations, dict):
        return {"ret_rms": venv.ret_rms, "obs_rms": observations}
    return {"ret_rms": venv.ret_rms, **{f"obs_rms[{key}]": running for key, running in observations.items()}}


def take_statistics(venv: VecNormalize, stored: VecNormalize) -> None:
    """Give a VecNormalize that has not been stepped the statistics of an agent; its settings stay the caller's.

    :param venv: environments of the caller; those that have been stepped keep their statistics
    :param stored: the same environments, normalized as in the training
    """
    if venv.ret_rms.count < 1.0:  # it counts steps
        for name in ("obs_rms", "ret_rms"):
            if hasattr(venv, name) and hasattr(stored, name):
                setattr(venv, name, getattr(stored, name))


def restore_normalization(venv: VecEnv, document: Any, file: TensorFile) -> VecNormalize:
    """Wrap environments with VecNormalize as it was stored.

    :param venv: environments with the observations that the statistics are of
    :param document: JSON from :func:`encode_normalization`
    :param file: statistics
    :raises SafeFormatError: if a setting is missing, unknown, or not allowed, or the statistics are damaged, or not those of
        such observations
    """
    with translate_errors("vec_normalize cannot be read"):
        settings = decode(document, "vec_normalize", {})
    require_like(settings, _SETTINGS, "vec_normalize")
    for name in ("clip_obs", "clip_reward", "epsilon"):
        if settings[name] < 0.0:
            raise rejected(f"vec_normalize.{name}", settings[name], "numbers from 0")
    keys = shown(settings["norm_obs_keys"])
    with translate_errors(f"the observations of env cannot be normalized as they were, with norm_obs_keys={keys}"):
        normalized = FastVecNormalize(venv, **settings)
    file.require(specify(statistics_of(normalized)), "the observations of env")
    tensors = file.read()
    for name, running in _running(normalized).items():
        running.mean = tensors[f"{name}.mean"].numpy().copy()
        running.var = tensors[f"{name}.var"].numpy().copy()
        running.count = float(tensors[f"{name}.count"])
    return normalized


def encode_optimizer(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the ``state_dict`` of an optimizer.

    :param state: ``state_dict``
    :return: settings and plain numbers as JSON; tensors, named by the index of the parameter and their key, as ``3.exp_avg``
    :raises ValueError: if the state holds anything else
    """
    custom: dict[str, Any] = {}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    numbers, tensors = _split(state["state"])
    document = encode({"param_groups": groups, "numbers": numbers}, "optimizer", custom)
    if custom:
        raise ValueError(f"{min(custom)} of this optimizer cannot be stored; allowed is include_optimizer=False")
    return document, tensors


def _split(state: dict[int, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    flat = {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in flat.items() if name not in tensors}, tensors


def restore_optimizer(optimizer: Optimizer, document: Any, file: TensorFile) -> None:
    """Load the state that :func:`encode_optimizer` split.

    :param optimizer: new optimizer of the same parameters
    :param document: settings and plain numbers
    :param file: tensors
    :raises SafeFormatError: if the state is damaged, or not that of such an optimizer
    """
    fresh = optimizer.state_dict()["param_groups"]
    examples = [{key: value for key, value in group.items() if key != "params"} for group in fresh]
    with translate_errors("optimizer is not the state of this optimizer"):
        document = decode(document, "optimizer", {})
        require_like(document, {"param_groups": examples, "numbers": None}, "optimizer")
        groups = [{**stored, "params": group["params"]} for stored, group in zip(document["param_groups"], fresh, strict=True)]
        expected = _state_after_a_step(optimizer, groups)
        # Parameters that were never trained have no state.
        trained = {name.partition(".")[0] for name in (*file.specs, *document["numbers"])}
        numbers, tensors = _split({index: values for index, values in expected.items() if str(index) in trained})
        require_like(document["numbers"], numbers, "optimizer.numbers")
        file.require(specify(tensors), f"the state of {type(optimizer).__name__}")
        state: dict[int, dict[str, Any]] = {}
        for name, value in {**document["numbers"], **file.read()}.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _state_after_a_step(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what such an optimizer keeps of each parameter, found out on a copy."""
    twin = copy.deepcopy(optimizer)
    twin.load_state_dict({"state": {}, "param_groups": groups})
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    twin.step()
    return twin.state_dict()["state"]
