"""What a folder says of an agent, read and checked, before anything of the agent is built."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy

from sb3_ano._compat import unvalidated_distributions
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.hub.arguments import ALGORITHMS, decode_arguments, decode_policy, decode_progress
from sb3_ano.hub.documents import SafeFormatError, checksum, fields, one_line, one_of, read_document, whole
from sb3_ano.hub.normalization import decode_normalization
from sb3_ano.hub.shapes import decode_shaping
from sb3_ano.hub.spaces import decode_space
from sb3_ano.hub.tensors import TensorFile, TensorSpec, specify
from sb3_ano.hub.values import CustomObjects

FORMAT = "sb3_ano agent"
FORMAT_VERSION = 1
DOCUMENT, POLICY, OPTIMIZER, NORMALIZATION = (
    "sb3_ano.json",
    "policy.safetensors",
    "optimizer.safetensors",
    "vec_normalize.safetensors",
)
_KEYS = (
    "format",
    "format_version",
    "algorithm",
    "policy",
    "arguments",
    "progress",
    "observation_space",
    "action_space",
    "n_envs",
    "shaping",
    "vec_normalize",
    "optimizer",
    "files",
    "versions",
)
_MAX_ENVS = 2**20


@dataclass(frozen=True)
class StoredAgent:
    """An agent in a folder.

    :param folder: where it lies
    :param algorithm: ANO, SPO or PAPO
    :param policy: class of the policy
    :param attributes: of the model: constructor arguments, and how far training has come
    :param spaces: of observations and actions, by attribute of the model
    :param n_envs: environments that it was trained with
    :param shaping: attributes ``shaping_name`` and ``shaping_fingerprint``, or None
    :param normalization: arguments of VecNormalize, or None
    :param optimizer: what the JSON says of the optimizer's state, or None
    :param files: size and SHA-256 of the files of tensors, by name
    :param is_custom: whether the caller supplied a part of the policy
    """

    folder: Path
    algorithm: type[ShapedPolicyAlgorithm]
    policy: type[BasePolicy]
    attributes: dict[str, Any]
    spaces: dict[str, spaces.Space]
    n_envs: int
    shaping: dict[str, Any] | None
    normalization: dict[str, Any] | None
    optimizer: Any
    files: dict[str, Any]
    is_custom: bool

    def tensors(self, name: str) -> TensorFile:
        """One of the files of tensors, its header checked."""
        return open_tensors(self.folder, self.files, name)

    def policy_specs(self) -> dict[str, TensorSpec] | None:
        """The tensors that the policy must have, found out without memory for any of them.

        :return: by name; None if the policy is the caller's own and cannot be built that way
        :raises SafeFormatError: if there is no such policy
        """
        # SB3 asks a policy without parameters for its device, and would get the CPU.
        on_meta = type(self.policy.__name__, (self.policy,), {"device": property(lambda policy: torch.device("meta"))})
        keywords = {"use_sde": self.attributes["use_sde"], **self.attributes["policy_kwargs"]}
        try:
            with torch.device("meta"), unvalidated_distributions(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come when the policy is built for good
                policy = on_meta(*self.spaces.values(), lambda _: 1e-3, **keywords)
        except MemoryError:
            raise
        except Exception as error:  # arguments that make no sense fail in any way
            if self.is_custom:
                return None
            raise SafeFormatError(
                f"{self.folder}: there is no {self.policy.__name__} with these arguments and spaces: {one_line(error)}"
            ) from error
        return specify(unique_tensors(policy))


def first_names(module: torch.nn.Module) -> dict[str, str]:
    """For each name in the module's state, the first name of the same tensor: shared layers are stored once."""
    state = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def unique_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's state, shared tensors once.

    :raises ValueError: if it holds anything but tensors
    """
    state = module.state_dict(keep_vars=True)
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"{others[0]!r} of {type(module).__name__} is no tensor; the safe format holds nothing else")
    return {name: state[name] for name in dict.fromkeys(first_names(module).values())}


def open_document(folder: Path) -> dict[str, Any]:
    """The JSON of an agent, its format and its keys checked.

    :raises SafeFormatError: if there is none, it is of a newer format, or it is damaged
    """
    document = read_document(folder / DOCUMENT)
    if document.get("format") != FORMAT:
        raise SafeFormatError(f"{folder / DOCUMENT} is not of an agent in the safe format")
    version = whole(1)(document.get("format_version"), "format_version")
    if version > FORMAT_VERSION:
        raise SafeFormatError(
            f"{folder / DOCUMENT} is of format version {version}; this sb3_ano reads up to {FORMAT_VERSION}, so install a "
            "newer one"
        )
    # Agents that were saved before the checksum was introduced have none.
    if document.get("checksum", checksum(document)) != checksum(document):
        raise SafeFormatError(
            f"{folder / DOCUMENT} is damaged: its content does not match its checksum; if you edited it, remove the key "
            "'checksum'"
        )
    fields(document, DOCUMENT, _KEYS, ("checksum",))
    fields(document["files"], "files", (POLICY,), (OPTIMIZER, NORMALIZATION))
    return document


def open_tensors(folder: Path, files: dict[str, Any], name: str) -> TensorFile:
    """One of the files that the JSON lists.

    :raises SafeFormatError: if it does not list it, or the file is missing or damaged
    """
    if name not in files:
        raise SafeFormatError(f"{folder / DOCUMENT} lists no {name} among its files")
    return TensorFile(folder / name, files[name])


def read_agent(folder: Path, custom: CustomObjects) -> StoredAgent:
    """Read what a folder says of an agent.

    :param folder: written by ``save_safe``
    :param custom: what the caller supplies
    :raises SafeFormatError: if something is missing, damaged, not allowed, or has to be supplied by the caller
    """
    document = open_document(folder)
    algorithm = ALGORITHMS[one_of(*ALGORITHMS)(document["algorithm"], "algorithm")]
    policy = decode_policy(document["policy"], algorithm, custom)
    arguments = decode_arguments(document["arguments"], algorithm, policy, custom)
    normalization = document["vec_normalize"]
    return StoredAgent(
        folder=folder,
        algorithm=algorithm,
        policy=policy,
        attributes=arguments | decode_progress(document["progress"]),
        spaces={name: decode_space(document[name], name) for name in ("observation_space", "action_space")},
        n_envs=whole(1, _MAX_ENVS)(document["n_envs"], "n_envs"),
        shaping=decode_shaping(document["shaping"], algorithm),
        normalization=None if normalization is None else decode_normalization(normalization),
        optimizer=document["optimizer"],
        files=document["files"],
        is_custom=custom.touches("policy", "policy_kwargs"),
    )
