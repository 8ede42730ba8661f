"""Tensors of an agent: policy, statistics of VecNormalize, optimizer; files (safetensors) are checked before they are read."""

import contextlib
import copy
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from torch import nn
from torch.optim import Optimizer

from sb3_ano._compat import unvalidated_distributions
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs import VecNormalize as FastVecNormalize
from sb3_ano.hub.codec import decode, encode
from sb3_ano.hub.documents import SafeFormatError, rejected, require_like, shown, size_of, translate_errors

MAX_TENSOR_BYTES = 2**31
_MAX_HEADER_BYTES = 2**24
# Names of the types in a file.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
# Arguments of VecNormalize and their defaults.
_SETTINGS = {name: each.default for name, each in inspect.signature(VecNormalize).parameters.items() if name != "venv"}


def specify(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Describe types and shapes of tensors by name; they may be on PyTorch's ``meta`` device.

    :raises ValueError: if the type of a tensor is unknown to the format, or a value is not a tensor
    """
    for name, tensor in tensors.items():
        dtype = getattr(tensor, "dtype", type(tensor))
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} is of type {dtype}; allowed are {', '.join(map(str, _DTYPES))}")
    return {name: f"{_DTYPES[tensor.dtype]} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}


def serialize(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Convert tensors to the content of a file.

    :raises ValueError: if the type of a tensor is unknown to the format
    """
    specify(tensors)
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def fingerprint_of(content: bytes) -> dict[str, Any]:
    """Return size and SHA-256 of a file, by which damage is noticed."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class TensorFile:
    """Open a file of tensors and read its header.

    :param path: file of at most 2 GiB
    :param fingerprint: size and SHA-256 that the JSON states
    :raises SafeFormatError: if the file is missing, not a regular file, too large, or not of the stated size, or its header
        is damaged
    """

    def __init__(self, path: Path, fingerprint: Any) -> None:
        self.path, self.fingerprint = path, fingerprint
        require_like(fingerprint, {"size": 0, "sha256": ""}, f"files.{path.name}")
        size, stated = size_of(path), fingerprint["size"]
        if size != stated:
            raise SafeFormatError(f"{path} is {size} bytes long, but was written with {shown(stated)}: damaged or cut off")
        if size > MAX_TENSOR_BYTES:
            raise SafeFormatError(f"{path} is {size} bytes long; allowed are up to {MAX_TENSOR_BYTES}")
        with translate_errors(f"{path} is damaged"):
            with path.open("rb") as file:
                header = int.from_bytes(file.read(8), "little")
            if header > _MAX_HEADER_BYTES:  # safetensors takes up to 100 MB, with a minute and a gigabyte to read them
                raise SafeFormatError(f"{path} is damaged: its header claims {header} bytes")
            with safe_open(path, framework="pt") as tensors:
                parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # it is not a dict
                self.specs = {name: f"{part.get_dtype()} of shape {tuple(part.get_shape())}" for name, part in parts.items()}

    def require(self, expected: Mapping[str, str], owner: str) -> None:
        """Compare names, types and shapes with those that are expected.

        :param expected: descriptions of all tensors that the file must hold
        :param owner: owner of the tensors, for messages
        :raises SafeFormatError: if they differ
        """
        differing = sorted(expected.keys() ^ self.specs.keys())
        if differing:
            verb = "has" if differing[0] in self.specs else "lacks"
            raise SafeFormatError(f"{self.path} {verb} {shown(differing[0])}, unlike {owner}")
        for name, spec in self.specs.items():
            if spec != expected[name]:
                raise SafeFormatError(f"{self.path}: {shown(name)} is {spec}, but that of {owner} is {expected[name]}")

    def read(self) -> dict[str, torch.Tensor]:
        """Return the tensors, on the CPU. NaN and Inf are warned about.

        :raises SafeFormatError: if the content is not what was written
        """
        with translate_errors(f"{self.path} cannot be read"):
            content = self.path.read_bytes()
            if fingerprint_of(content) != self.fingerprint:
                stated = shown(self.fingerprint["sha256"])
                raise SafeFormatError(f"{self.path} is damaged: its SHA-256 is not {stated}, which it was written with")
            tensors = load(content)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                warnings.warn(f"{self.path}: {shown(name)} has NaN or Inf", stacklevel=4)
        return tensors


def _first_names(module: nn.Module) -> dict[str, str]:
    """Map each name in a module's state to the first name of the same tensor: shared layers are stored once."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}


def unique_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a module, shared tensors once."""
    state = module.state_dict(keep_vars=True)
    return {name: state[name] for name in dict.fromkeys(_first_names(module).values())}


def describe_policy(model: ShapedPolicyAlgorithm) -> dict[str, str]:
    """Describe the tensors that a policy must have, found out on PyTorch's meta device, without memory for any of them.

    :param model: algorithm that is not set up
    :return: descriptions by name
    :raises SafeFormatError: if there is no such policy
    """
    policy: Any = model.policy_class
    # SB3 asks a policy without parameters for its device, and would get the CPU.
    on_meta = type(policy.__name__, (policy,), {"device": property(lambda policy: torch.device("meta"))})
    # sb3-contrib's maskable policies do not have the argument.
    sde = {"use_sde": model.use_sde} if issubclass(model.policy_base, ActorCriticPolicy) else {}
    keywords = {**sde, **model.policy_kwargs}
    with (
        translate_errors(f"there is no {policy.__name__} with these arguments and spaces"),
        torch.device("meta"),
        unvalidated_distributions(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # they come again when the policy is built with memory
        return specify(unique_tensors(on_meta(model.observation_space, model.action_space, lambda _: 1e-3, **keywords)))


@contextlib.contextmanager
def cheap_initialization() -> Iterator[None]:
    """Draw the initial weights, which the stored ones replace, without making them orthogonal in cubic time.

    The same random numbers are drawn, so that a seeded training resumes as from SB3's file.
    """
    orthogonal = torch.nn.init.orthogonal_
    torch.nn.init.orthogonal_ = lambda tensor, gain=1, generator=None: torch.nn.init.normal_(tensor)
    try:
        yield
    finally:
        torch.nn.init.orthogonal_ = orthogonal


def load_policy(model: ShapedPolicyAlgorithm, weights: TensorFile) -> None:
    """Load the parameters of a policy.

    :param model: algorithm that is set up
    :param weights: file with the tensors that its policy must have
    :raises SafeFormatError: if the tensors are others, or the file is damaged
    """
    # Again, because a custom policy may be known only now.
    weights.require(specify(unique_tensors(model.policy)), "the policy that the JSON describes")
    tensors = weights.read()
    model.policy.load_state_dict({name: tensors[first] for name, first in _first_names(model.policy).items()})
    if model.use_sde:
        model.policy.reset_noise()  # on the right device, as SB3 does


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
        running.mean, running.var = (tensors[f"{name}.{part}"].numpy().copy() for part in ("mean", "var"))
        running.count = float(tensors[f"{name}.count"])
    return normalized


def with_statistics(env: VecEnv, restore: Callable[[VecEnv], VecNormalize]) -> VecEnv:
    """Normalize environments with the statistics of an agent, which stay as they are; rewards are not normalized.

    :param env: environments of the caller. A VecNormalize among them keeps its settings, and its statistics, too, if it has
        been stepped
    :param restore: function that wraps environments with VecNormalize as in the training
    """
    given = unwrap_vec_normalize(env)
    stored = restore(env if given is None else given.venv)
    stored.training = stored.norm_reward = False
    if given is None:
        return stored
    if given.ret_rms.count < 1.0:  # it counts steps
        for name in ("obs_rms", "ret_rms"):
            if hasattr(given, name) and hasattr(stored, name):
                setattr(given, name, getattr(stored, name))
    return env


def encode_optimizer(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the ``state_dict`` of an optimizer.

    :param state: ``state_dict``
    :return: settings and plain numbers as JSON; tensors, named by the index of the parameter and their key, as ``3.exp_avg``
    :raises ValueError: if the state holds anything else
    """
    custom: dict[str, Any] = {}
    numbers, tensors = _split(state["state"])
    document = encode({"param_groups": _groups(state), "numbers": numbers}, "optimizer", custom)
    if custom:
        raise ValueError(f"{min(custom)} of this optimizer cannot be stored; allowed is include_optimizer=False")
    return document, tensors


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]


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
    with translate_errors("optimizer is not the state of this optimizer"):
        document, fresh = decode(document, "optimizer", {}), optimizer.state_dict()
        require_like(document, {"param_groups": _groups(fresh), "numbers": None}, "optimizer")
        groups = [new | stored for new, stored in zip(fresh["param_groups"], document["param_groups"], strict=True)]
        # None means that PyTorch chooses, so that the default does not show the type.
        for name in ("foreach", "fused"):
            if not all(isinstance(group.get(name), bool | None) for group in groups):
                raise SafeFormatError(f"optimizer.param_groups: {name} is neither true, false nor null")
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
