"""Agents as safetensors and JSON: a folder that a stranger loads without running anything of its author's."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.envs import DirectVecEnv, make_env
from sb3_ano.hub.arguments import ALGORITHMS, argument_checks, encode_arguments, encode_policy, encode_progress
from sb3_ano.hub.documents import SafeFormatError, checksum, one_line
from sb3_ano.hub.folders import new_folder, no_imports_from, write_bytes
from sb3_ano.hub.normalization import decode_normalization, encode_normalization, restored_normalization, statistics_of
from sb3_ano.hub.optimizer_state import encode_optimizer, restore_optimizer
from sb3_ano.hub.shapes import encode_shaping, is_built_in, restored_shaping
from sb3_ano.hub.spaces import encode_space
from sb3_ano.hub.stored_agent import (
    DOCUMENT,
    FORMAT,
    FORMAT_VERSION,
    NORMALIZATION,
    OPTIMIZER,
    POLICY,
    StoredAgent,
    first_names,
    open_document,
    open_tensors,
    read_agent,
    unique_tensors,
)
from sb3_ano.hub.tensors import TensorFile, fingerprint_of, serialized, specify
from sb3_ano.hub.values import CustomObjects
from sb3_ano.shaping import ShapingLike

#: All files of the format.
SAFE_FILES = (DOCUMENT, POLICY, OPTIMIZER, NORMALIZATION)
#: Size of the rollout buffer that an agent may ask for. Its memory is taken only when training fills it.
MAX_ROLLOUT_BYTES = 2**31
_DISTRIBUTIONS = ("sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy", "safetensors")


def save_safe(model: ShapedPolicyAlgorithm, path: str | os.PathLike[str], *, include_optimizer: bool = False) -> Path:
    """Write an agent as a folder of JSON and safetensors, without pickles.

    What the format has no name for, such as a policy class of your own, is warned about and stored by name; whoever loads
    the agent passes it to :func:`load_safe`. ``tensorboard_log`` is not stored.

    :param model: an ANO, SPO or PAPO; statistics of a VecNormalize around its environments are stored with it
    :param path: the folder; appears whole or not at all. An empty folder is replaced, and one with an agent in this format,
        but none that holds other files
    :param include_optimizer: whether to store the optimizer's state, so that training goes on as it would have
    :return: the folder
    :raises TypeError: if ``model`` is of another class, or a space is of a kind that SB3 does not support
    :raises ValueError: if a part of the model cannot be stored
    :raises FileExistsError: if ``path`` is a file, or a folder with other files
    """
    require_algorithm(model)
    custom: dict[str, Any] = {}
    document, tensors = _encode(model, custom)
    if include_optimizer:
        document["optimizer"], tensors[OPTIMIZER] = encode_optimizer(model.get_parameters()["policy.optimizer"])
    with new_folder(path, SAFE_FILES) as folder:
        for name, content in tensors.items():
            serial = serialized(content)
            write_bytes(folder / name, serial)
            document["files"][name] = fingerprint_of(serial)
        document["checksum"] = checksum(document)
        write_bytes(folder / DOCUMENT, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
        _require_readable(folder, custom)
    _warn_of_custom(model, custom)
    return Path(path)


def require_algorithm(model: Any) -> None:
    """Complain of a model that the format does not know.

    :raises TypeError: if ``model`` is not an ANO, SPO or PAPO
    """
    if type(model) not in ALGORITHMS.values():
        raise TypeError(
            f"model is of class {type(model).__name__}; allowed are {', '.join(ALGORITHMS)}; others have model.save"
        )


def _encode(model: ShapedPolicyAlgorithm, custom: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """The JSON, and the tensors of each file."""
    venv = model.get_vec_normalize_env()
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "algorithm": type(model).__name__,
        "policy": encode_policy(model, custom),
        "arguments": encode_arguments(model, custom),
        "progress": encode_progress(model),
        "observation_space": encode_space(model.observation_space),
        "action_space": encode_space(model.action_space),
        "n_envs": int(model.n_envs),
        "shaping": encode_shaping(model),
        "vec_normalize": None if venv is None else encode_normalization(venv),
        "optimizer": None,
        "files": {},
        "versions": _versions(),
    }
    tensors = {POLICY: unique_tensors(getattr(model.policy, "_orig_mod", model.policy))}
    if venv is not None:
        tensors[NORMALIZATION] = statistics_of(venv)
    return document, tensors


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a source tree on the path
            versions[name] = "unknown"
    return versions


def _require_readable(folder: Path, custom: dict[str, Any]) -> None:
    """What cannot be loaded again is complained of now, while the model is still there."""
    agent = read_agent(folder, CustomObjects(custom))
    policy = agent.policy_specs()
    if policy is not None:
        agent.tensors(POLICY).require(policy, "the policy")


def _warn_of_custom(model: ShapedPolicyAlgorithm, custom: dict[str, Any]) -> None:
    if custom:
        warnings.warn(
            f"stored by name only, because they are not built in: {', '.join(sorted(custom))}; whoever loads this agent "
            "passes them to load_safe as custom_objects=",
            stacklevel=3,
        )
    name = getattr(model, "shaping_name", "ano")
    if not is_built_in(name):
        warnings.warn(
            f"shaping={name!r} is stored by name only, because it is not built in; whoever loads this agent passes the "
            "function to load_safe as shaping=",
            stacklevel=3,
        )


def load_safe(
    path: str | os.PathLike[str],
    env: GymEnv | str | None = None,
    *,
    device: torch.device | str = "auto",
    shaping: ShapingLike | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> ShapedPolicyAlgorithm:
    """Load an agent that :func:`save_safe` wrote. Nothing is unpickled, and nothing is imported by a name in a file.

    No environment is made unless ``env`` asks for one, and no module is imported from the folder. The rollout buffer that
    the agent asks for is limited to 2 GiB, unless ``custom_objects`` sets ``n_steps``.

    :param path: the folder
    :param env: environments for the model, or the id of one, or None. If statistics of VecNormalize are stored and these
        environments are not normalised yet, they are wrapped with the statistics, which stay as they are; rewards are
        not normalised
    :param device: of the model
    :param shaping: the shape, where it is not a built-in one
    :param custom_objects: what else is not built in, or is to replace what is stored: constructor arguments by name, and
        parts of them by dotted name, such as ``"policy_kwargs.features_extractor_class"``
    :return: an ANO, SPO or PAPO
    :raises SafeFormatError: if the folder holds no agent, is damaged, asks for what is not allowed, or for something that
        only the caller can supply
    :raises ValueError: if the shape is another than the agent was trained with, or ``env`` has other spaces
    :raises TypeError: if ``custom_objects`` names something that the agent does not have
    """
    try:
        with no_imports_from(path):
            return _load_safe(Path(path), env, device, shaping, CustomObjects(custom_objects))
    except MemoryError as error:
        raise SafeFormatError(f"{path} needs more memory than is available") from error


def _load_safe(
    folder: Path,
    env: GymEnv | str | None,
    device: torch.device | str,
    shaping: ShapingLike | None,
    custom: CustomObjects,
) -> ShapedPolicyAlgorithm:
    agent = read_agent(folder, custom)
    custom.require_used(["policy", *argument_checks(agent.algorithm), "tensorboard_log"])
    restored = restored_shaping(agent.algorithm, agent.folder, agent.shaping, shaping)
    weights = agent.tensors(POLICY)
    moments = None if agent.optimizer is None else agent.tensors(OPTIMIZER)
    specs = agent.policy_specs()
    if specs is not None:
        weights.require(specs, "the policy that the JSON describes")
    prepared = None if env is None else _prepared_env(agent, env)
    if "n_steps" not in custom:
        _require_affordable(agent, agent.n_envs if prepared is None else prepared.num_envs)
    model = _build(agent, prepared, device, restored)
    _load_policy(model, weights)
    if moments is not None:
        restore_optimizer(model.policy.optimizer, agent.optimizer, moments)
    return model


def load_normalization(path: str | os.PathLike[str], venv: VecEnv) -> VecNormalize:
    """Wrap environments with the VecNormalize that was stored with an agent, as it was.

    It goes on learning its statistics and normalising rewards if it did so when it was saved; for an evaluation, set
    ``training`` and ``norm_reward`` to False.

    :param path: a folder that :func:`save_safe` wrote
    :param venv: the environments
    :raises SafeFormatError: if no statistics are stored, they are damaged, or those of other observations
    """
    folder = Path(path)
    document = open_document(folder)
    if document["vec_normalize"] is None:
        raise SafeFormatError(f"{folder} holds no statistics of VecNormalize; the agent was trained without it")
    settings = decode_normalization(document["vec_normalize"])
    return restored_normalization(venv, settings, open_tensors(folder, document["files"], NORMALIZATION))


def _require_affordable(agent: StoredAgent, n_envs: int) -> None:
    # Observations, actions and seven columns of float32, from rewards to TD errors.
    size = sum(_itemsize(space) for space in agent.spaces.values()) + 7 * 4
    n_steps = agent.attributes["n_steps"]
    if n_steps * n_envs * size > MAX_ROLLOUT_BYTES:
        raise SafeFormatError(
            f"{agent.folder} asks for rollouts of n_steps={n_steps} x {n_envs} environments x {size} bytes; allowed are "
            f"{MAX_ROLLOUT_BYTES} bytes, or custom_objects={{'n_steps': ...}}"
        )


def _itemsize(space: spaces.Space) -> int:
    if isinstance(space, spaces.Dict):
        return sum(map(_itemsize, space.spaces.values()))
    return math.prod(space.shape or ()) * (8 if space.dtype is None else space.dtype.itemsize)


def _prepared_env(agent: StoredAgent, env: GymEnv | str) -> VecEnv:
    """The environments as the model takes them, normalised if the agent was trained that way."""
    if isinstance(env, str):
        env = make_env(env)
    if not isinstance(env, VecEnv):
        single = env if is_wrapped(env, Monitor) else Monitor(env)
        env = DirectVecEnv([lambda: single])
    if agent.normalization is not None and unwrap_vec_normalize(env) is None:
        env = restored_normalization(env, agent.normalization, agent.tensors(NORMALIZATION))
        env.training = False
        env.norm_reward = False
    wrapped = agent.algorithm._wrap_env(env)
    try:
        check_for_correct_spaces(wrapped, *agent.spaces.values())
    except ValueError as error:
        raise ValueError(f"env does not fit the agent in {agent.folder}: {one_line(error)}") from error
    return wrapped


def _build(
    agent: StoredAgent, env: VecEnv | None, device: torch.device | str, restored: dict[str, Any]
) -> ShapedPolicyAlgorithm:
    model = agent.algorithm(agent.policy, env, device=device, _init_setup_model=False)
    vars(model).update(agent.attributes | restored | agent.spaces)
    if env is None:
        model.n_envs = agent.n_envs
    # A class of the caller's may keep what it draws.
    cheap = contextlib.nullcontext() if agent.is_custom else _cheap_initialization()
    try:
        with cheap:
            model._setup_model()
    except MemoryError:
        raise
    except Exception as error:  # of arguments that make no sense together
        raise SafeFormatError(f"the agent in {agent.folder} cannot be set up: {one_line(error)}") from error
    return model


@contextlib.contextmanager
def _cheap_initialization() -> Iterator[None]:
    """Draw the initial weights, which the stored ones replace, without making them orthogonal in cubic time.

    The same random numbers are drawn, so that a seeded training resumes as from SB3's file.
    """
    orthogonal = torch.nn.init.orthogonal_
    torch.nn.init.orthogonal_ = lambda tensor, gain=1, generator=None: torch.nn.init.normal_(tensor)
    try:
        yield
    finally:
        torch.nn.init.orthogonal_ = orthogonal


def _load_policy(model: ShapedPolicyAlgorithm, weights: TensorFile) -> None:
    # Again, because only now the policy of a caller's own class is known.
    weights.require(specify(unique_tensors(model.policy)), "the policy that the JSON describes")
    tensors = weights.read()
    model.policy.load_state_dict({name: tensors[first] for name, first in first_names(model.policy).items()})
    if model.use_sde:
        model.policy.reset_noise()  # on the right device, as SB3 does
