"""Tensors of an agent: its policy and the statistics of VecNormalize, in files (safetensors) that are checked first."""

import hashlib
import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load, save
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn
from torch.overrides import TorchFunctionMode

from sb3_ano._io import read_file
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs import VecNormalize as FastVecNormalize
from sb3_ano.hub.codec import decode, encode
from sb3_ano.hub.documents import NO_LINKS, Document, SafeFormatError, rejected, require_like, shown, translate_errors

MAX_TENSOR_BYTES = 2**31
# safetensors takes up to 100 MB, with a minute and a gigabyte to read them.
_MAX_HEADER_BYTES = 2**24
# Arguments of VecNormalize and their defaults.
_SETTINGS = {name: parameter.default for name, parameter in inspect.signature(VecNormalize).parameters.items()}
del _SETTINGS["venv"]


def serialize(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Convert tensors to the content of a file."""
    copies = {}
    for name, tensor in tensors.items():
        # safetensors rejects tensors that share memory.
        copies[name] = tensor.detach().cpu().clone().contiguous()

    content: bytes = save(copies)
    return content


def fingerprint_of(content: bytes) -> Document:
    """Return size and SHA-256 of a file, by which damage is noticed."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def read_tensors(path: Path, files: Document) -> dict[str, torch.Tensor]:
    """Read a file of tensors, on the CPU.

    :param path: file of at most 2 GiB
    :param files: size and SHA-256 by name of the file, which the JSON states
    :raises SafeFormatError: if the file is missing, not a regular file, too large, or not what was written
    """
    with translate_errors(f"{path} cannot be read"):
        content = read_file(path, MAX_TENSOR_BYTES, NO_LINKS)
        if fingerprint_of(content) != files.get(path.name):
            raise SafeFormatError(f"{path} is damaged or cut off: the JSON states another size or SHA-256")

        # The file begins with the length of its header.
        header = int.from_bytes(content[:8], "little")
        if header > _MAX_HEADER_BYTES:
            raise SafeFormatError(f"{path} is damaged: its header claims {header} bytes")

        tensors: dict[str, torch.Tensor] = load(content)
    return tensors


def specify(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Describe types and shapes of tensors by name; they may be on PyTorch's ``meta`` device."""
    specs = {}
    for name, tensor in tensors.items():
        specs[name] = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    return specs


def require_specs(path: Path, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str], owner: str) -> None:
    """Compare names, types and shapes of tensors with those that are expected.

    :param path: file of the tensors, for messages
    :param tensors: tensors
    :param expected: descriptions of all tensors that there must be
    :param owner: owner of the tensors, for messages
    :raises SafeFormatError: if they differ
    """
    found = specify(tensors)
    # Extra tensors are as wrong as missing ones.
    for name in [*found, *expected]:
        spec = found.get(name, "missing")
        other = expected.get(name, "missing")
        if spec != other:
            raise SafeFormatError(f"{path}: {shown(name)} is {spec}, but that of {owner} is {other}")


def uncompiled(module: nn.Module) -> nn.Module:
    """Return a module without the wrapper of ``torch.compile``, which changes the names of its tensors."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def _first_names(module: nn.Module) -> dict[str, str]:
    """Map each name in a module's state to the first name of the same tensor: shared layers are stored once."""
    names = {}
    first: dict[int, str] = {}
    # With keep_vars, the same tensor is the same object.
    for name, tensor in module.state_dict(keep_vars=True).items():
        names[name] = first.setdefault(id(tensor), name)
    return names


def unique_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a module, shared tensors once."""
    state = module.state_dict(keep_vars=True)
    return {name: state[name] for name in _first_names(module).values()}


class WithoutValues(TorchFunctionMode):
    """Build a policy whose values do not matter, in this thread only.

    Initial weights are not made orthogonal in cubic time, but the same random numbers are drawn, so that a seeded training
    resumes as from SB3's file. gSDE samples when it is built, and PyTorch would validate the distribution on the meta device.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        # Orthogonal initialization needs tensors of these shapes.
        if func is torch.linalg.qr:
            matrix = args[0]
            return matrix, matrix[: matrix.shape[1]]

        # What a validation compares has no values on the meta device.
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def describe_policy(model: ShapedPolicyAlgorithm) -> dict[str, str]:
    """Describe the tensors that a policy must have, found out on PyTorch's meta device, without memory for any of them.

    :param model: algorithm that is not set up
    :return: descriptions by name
    :raises SafeFormatError: if there is no such policy
    """
    policy: Any = model.policy_class
    # SB3 asks a policy without parameters for its device, and would get the CPU.
    device = property(lambda policy: torch.device("meta"))
    on_meta = type(policy.__name__, (policy,), {"device": device})

    keywords = dict(model.policy_kwargs)
    if issubclass(policy, ActorCriticPolicy):  # sb3-contrib's maskable policies do not have the argument
        keywords.setdefault("use_sde", model.use_sde)
    with (
        translate_errors(f"there is no {policy.__name__} with these arguments and spaces"),
        torch.device("meta"),
        WithoutValues(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # they come again when the policy is built with memory
        # The learning rate does not matter.
        built = on_meta(model.observation_space, model.action_space, lambda _: 1e-3, **keywords)
        return specify(unique_tensors(built))


def require_finite(model: ShapedPolicyAlgorithm, tensors: Mapping[str, torch.Tensor], owner: str) -> None:
    """Check that a policy has no parameter with NaN or Inf, with which it does not act.

    :param model: algorithm with a policy, whose buffers may hold anything
    :param tensors: the policy's tensors, shared ones once
    :param owner: owner of the tensors, for messages
    :raises SafeFormatError: if it has
    """
    for name, _ in uncompiled(model.policy).named_parameters():
        # Shared parameters are there under their first names.
        if name in tensors and not tensors[name].isfinite().all():
            raise SafeFormatError(
                f"{owner}: the parameter {name} holds NaN or Inf, so that the policy cannot act; train again"
            )


def load_policy(model: ShapedPolicyAlgorithm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the parameters of a policy.

    :param model: algorithm that is set up
    :param tensors: the policy's tensors, shared ones once
    """
    named = {}
    for name, first in _first_names(model.policy).items():
        named[name] = tensors[first]
    model.policy.load_state_dict(named)
    if model.use_sde:
        model.policy.reset_noise()  # on the right device, as SB3 does


def encode_normalization(venv: VecNormalize) -> Document:
    """Convert the arguments of VecNormalize to JSON."""
    document = {}
    for name in _SETTINGS:
        document[name] = encode(getattr(venv, name), f"vec_normalize.{name}", {})
    return document


def statistics_of(venv: VecNormalize) -> dict[str, torch.Tensor]:
    """Return means, variances and counts as float64."""
    statistics = {}
    for name, running in _running(venv).items():
        parts = {"mean": running.mean, "var": running.var, "count": running.count}
        for part, value in parts.items():
            # A copy, because the running arrays change.
            statistics[f"{name}.{part}"] = torch.from_numpy(np.array(value, dtype=np.float64))
    return statistics


def _running(venv: VecNormalize) -> dict[str, RunningMeanStd]:
    running = {"ret_rms": venv.ret_rms}
    if not venv.norm_obs:
        return running

    # Observations that are dictionaries have statistics for each key.
    if isinstance(venv.obs_rms, dict):
        for key, statistics in venv.obs_rms.items():
            running[f"obs_rms[{key}]"] = statistics
    else:
        running["obs_rms"] = venv.obs_rms
    return running


def restore_normalization(venv: VecEnv, document: object, path: Path, tensors: Mapping[str, torch.Tensor]) -> VecNormalize:
    """Wrap environments with VecNormalize as it was stored.

    :param venv: environments with the observations that the statistics are of
    :param document: JSON from :func:`encode_normalization`
    :param path: file of the statistics, for messages
    :param tensors: statistics
    :raises SafeFormatError: if a setting is missing, unknown, or not allowed, or the statistics are not those of such
        observations
    """
    with translate_errors("vec_normalize cannot be read"):
        settings = decode(document, "vec_normalize", {})
    require_like(settings, _SETTINGS, "vec_normalize")

    keys = shown(settings["norm_obs_keys"])
    with translate_errors(f"the observations of env cannot be normalized as they were, with norm_obs_keys={keys}"):
        normalized = FastVecNormalize(venv, **settings)

    # Before anything is set
    require_specs(path, tensors, specify(statistics_of(normalized)), "the observations of env")
    _require_normalizing(path, tensors, settings)

    for name, running in _running(normalized).items():
        # Copies, to which nothing else refers.
        running.mean = tensors[f"{name}.mean"].numpy().copy()
        running.var = tensors[f"{name}.var"].numpy().copy()
        running.count = float(tensors[f"{name}.count"])
    return normalized


def _require_normalizing(path: Path, tensors: Mapping[str, torch.Tensor], settings: Document) -> None:
    """Check settings and statistics of VecNormalize for values with which it returns NaN, or always the same.

    :raises SafeFormatError: if there is one
    """
    for name in ("clip_obs", "clip_reward"):
        if settings[name] <= 0:
            raise rejected(f"vec_normalize.{name}", settings[name], "numbers above 0")
    if not 0 <= settings["gamma"] <= 1:
        raise rejected("vec_normalize.gamma", settings["gamma"], "numbers from 0 to 1")

    epsilon = torch.tensor(settings["epsilon"], dtype=torch.float64)
    for name, value in {"epsilon": epsilon, **tensors}.items():
        # Variances, counts and epsilon cannot be negative.
        is_mean = name.endswith(".mean")
        if not value.isfinite().all() or (not is_mean and (value < 0).any()):
            raise SafeFormatError(f"{path} is damaged: {name} cannot normalize; it is not finite, or below 0")

        # A division by 0 would be NaN.
        if name.endswith(".var") and (value + epsilon <= 0).any():
            raise SafeFormatError(f"{path} is damaged: {name} cannot normalize; it is 0, and so is epsilon")
