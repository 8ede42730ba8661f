"""Agents as safetensors and JSON: a directory that a stranger loads without running anything of its author's."""

import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, VecTransposeImage, unwrap_vec_normalize

from sb3_ano._io import read_json, restore, write_file
from sb3_ano._registry import BY_CLASS_NAME
from sb3_ano._secrets import hide
from sb3_ano._system import versions
from sb3_ano.algorithms import ANO, MaskableANO, RecurrentANO, ShapedPolicyAlgorithm
from sb3_ano.hub import codec, documents, state
from sb3_ano.hub.documents import Document, SafeFormatError, rejected, require_like, translate_errors, untrusted
from sb3_ano.hub.spaces import Space, decode_space, encode_space
from sb3_ano.shaping import ShapingLike, fingerprint, name_of

FORMAT = "sb3_ano agent"
FORMAT_VERSION = 1
DOCUMENT = "sb3_ano.json"
POLICY = "policy.safetensors"
NORMALIZATION = "vec_normalize.safetensors"
#: All files of the format.
SAFE_FILES = (DOCUMENT, POLICY, NORMALIZATION)
#: Size of the rollout buffer that an agent may ask for, in bytes. Its memory is taken only when training fills it.
MAX_ROLLOUT_BYTES = 2**31
_MAX_ENVS = 2**20
_KEYS = (
    "format", "format_version", "algorithm", "policy", "arguments", "progress", "observation_space", "action_space", "n_envs",
    "shaping", "vec_normalize", "files", "versions",
)  # fmt: skip
# Attributes that say how far training has come.
_PROGRESS = (
    "num_timesteps", "_total_timesteps", "_num_timesteps_at_start", "_n_updates", "_episode_num",
    "_current_progress_remaining", "n_skipped_minibatches", "radius_factor", "_adapted_from",
)  # fmt: skip
# Ranges of those that are no counts, as messages show them.
_RANGES = {"current_progress_remaining": ("0", "1"), "radius_factor": ("1e-9", "1e9"), "adapted_from": ("0", "1e9")}
#: Packages on whose versions agents depend.
PACKAGES = ("sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy")


def save_safe(model: ShapedPolicyAlgorithm, path: str | os.PathLike[str]) -> Path:
    """Write an agent as a directory of JSON and safetensors, without pickles.

    What the format has no name for, such as a custom policy class, is warned about and stored by name; whoever loads the
    agent passes it to :func:`load_safe`. ``tensorboard_log`` and the state of the optimizer are not stored.

    :param model: algorithm of this package; statistics of a VecNormalize around its environments are stored with it
    :param path: directory, which appears whole or not at all. An empty one is replaced, and so is one with an agent in this
        format, but not one that holds other files
    :return: the directory
    :raises TypeError: if ``model`` is of another class, or a space is of a kind that SB3 does not support
    :raises ValueError: if a part of the model cannot be stored
    :raises FileExistsError: if ``path`` is a directory with other files
    """
    require_algorithm(model)
    custom: Document = {}
    # Before the checksum, which the file must match.
    document = hide(describe(model, custom))

    tensors = {POLICY: state.unique_tensors(state.uncompiled(model.policy))}
    state.require_finite(model, tensors[POLICY], "model.policy")
    venv = model.get_vec_normalize_env()
    if venv is not None:
        tensors[NORMALIZATION] = state.statistics_of(venv)

    with documents.new_folder(path, SAFE_FILES) as folder:
        for name, content in tensors.items():
            serial = state.serialize(content)
            write_file(folder / name, serial)
            document["files"][name] = state.fingerprint_of(serial)
        document["checksum"] = _checksum(document)
        text = json.dumps(document, indent=1) + "\n"
        write_file(folder / DOCUMENT, text.encode())
        _read_model(folder, dict(custom), "cpu")  # what cannot be loaded again raises now, while the model is still there

    if isinstance(model, ANO) and not codec.is_built_in(name_of(model.shaping)):
        custom["shaping"] = model.shaping
    if custom:
        warnings.warn(
            f"stored by name only, because not built in: {', '.join(sorted(custom))}; whoever loads this agent passes them to "
            "load_safe, a shape as shaping= and others as custom_objects=",
            stacklevel=2,
        )
    return Path(path)


def require_algorithm(model: object) -> None:
    """Check that the format knows the class of a model.

    :raises TypeError: if ``model`` is not an algorithm of this package
    """
    if type(model) not in BY_CLASS_NAME.values():
        allowed = ", ".join(BY_CLASS_NAME)
        raise TypeError(f"model is of class {type(model).__name__}; allowed are {allowed}; others have model.save")


def describe(model: ShapedPolicyAlgorithm, custom: Document) -> Document:
    """Describe an agent as JSON, without its tensors.

    :param model: algorithm of this package
    :param custom: dictionary that collects, by dotted name, what only the caller of :func:`load_safe` can supply
    :raises TypeError: if a space is of a kind that SB3 does not support
    """
    policy = codec.encode(model.policy_class, "policy", custom)
    progress = {}
    for name in _PROGRESS:
        progress[name.lstrip("_")] = codec.encode(getattr(model, name), name, {})

    # A name says little about a function, hence some of its values.
    shaping = None
    if isinstance(model, ANO):
        values = codec.encode(fingerprint(model.shaping), "shaping.fingerprint", {})
        shaping = {"name": name_of(model.shaping), "fingerprint": values}

    normalization = None
    venv = model.get_vec_normalize_env()
    if venv is not None:
        normalization = state.encode_normalization(venv)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "algorithm": type(model).__name__,
        "policy": policy.get("$class", policy),
        "arguments": codec.encode_arguments(model, custom),
        "progress": progress,
        "observation_space": encode_space(model.observation_space),
        "action_space": encode_space(model.action_space),
        "n_envs": int(model.n_envs),
        "shaping": shaping,
        "vec_normalize": normalization,
        "files": {},
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
    }


def _checksum(document: Document) -> str:
    """Return a SHA-256 of a document; NaN and Inf, which other readers of JSON do not know, raise ValueError."""
    return hashlib.sha256(json.dumps(document, allow_nan=False).encode()).hexdigest()


def load_safe(
    path: str | os.PathLike[str],
    env: GymEnv | str | None = None,
    *,
    device: torch.device | str = "auto",
    shaping: ShapingLike | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> ShapedPolicyAlgorithm:
    """Load an agent that :func:`save_safe` wrote. Nothing is unpickled, and nothing is imported by a name in a file.

    No environment is made unless ``env`` asks for one, and no module is imported from the directory. The rollout buffer that
    the agent asks for is limited to 2 GiB, unless ``custom_objects`` sets ``n_steps`` and ``env`` is given.

    :param path: directory
    :param env: environments for the model, the id of one, or None. If statistics of VecNormalize are stored and these
        environments are not normalized yet, they are wrapped with the statistics, which stay as they are; rewards are
        not normalized
    :param device: device of the model
    :param shaping: shape of the surrogate, if it is not a built-in one; another one than in training is warned about
    :param custom_objects: objects that are not built in, or that replace what is stored: constructor arguments by name, and
        parts of them by dotted name, such as ``"policy_kwargs.features_extractor_class"``
    :return: the agent, of the class that was saved
    :raises SafeFormatError: if the directory holds no agent, is damaged, asks for what is not allowed, or for something that
        only the caller can supply
    :raises ValueError: if ``shaping`` is no shape, or ``env`` has other spaces
    :raises TypeError: if ``custom_objects`` names something that the agent does not have
    """
    folder = Path(path)
    supplied = dict(custom_objects or {})
    # What is used is removed.
    unused = dict(supplied)
    with untrusted(folder):
        document, model, weights = _read_model(folder, unused, device)
        if unused:
            allowed = ["policy", *codec.stored_arguments(type(model))]
            raise TypeError(f"custom_objects has {min(unused)!r}, which the agent does not have; allowed are {allowed}")

        _set_shaping(model, folder, document["shaping"], shaping)
        if env is not None:
            is_normalized = document["vec_normalize"] is not None
            _set_env(model, folder if is_normalized else None, env)
        if env is None or "n_steps" not in supplied:  # the number of environments is the caller's, too
            _require_affordable(model, folder)

        with (
            translate_errors(f"the agent in {folder} cannot be set up"),
            state.WithoutValues(),  # the stored weights replace the initial ones
            warnings.catch_warnings(),
        ):
            # An agent with fewer environments than in training only acts.
            warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
            model._setup_model()

        # Again, because a custom policy may be known only now.
        state.require_specs(folder / POLICY, weights, state.specify(state.unique_tensors(model.policy)), "the built policy")
        state.require_finite(model, weights, str(folder / POLICY))
        state.load_policy(model, weights)
    return model


def load_normalization(path: str | os.PathLike[str], venv: VecEnv) -> VecNormalize:
    """Wrap environments with the VecNormalize that was stored with an agent, as it was.

    It continues to learn its statistics and to normalize rewards if it did so when it was saved; for an evaluation, set
    ``training`` and ``norm_reward`` to False.

    :param path: directory that :func:`save_safe` wrote
    :param venv: environments
    :raises SafeFormatError: if no statistics are stored, they are damaged, or those of other observations
    """
    folder = Path(path)
    with untrusted(folder):
        document = open_document(folder)
        if document["vec_normalize"] is None:
            raise SafeFormatError(f"{folder} holds no statistics of VecNormalize; the agent was trained without it")
        file = folder / NORMALIZATION
        return state.restore_normalization(venv, document["vec_normalize"], file, state.read_tensors(file, document["files"]))


def open_document(folder: Path) -> Document:
    """Read the JSON of an agent, and check its format, checksum and keys.

    :raises SafeFormatError: if there is none, it is of a newer format, or it is damaged
    """
    path = folder / DOCUMENT
    with translate_errors(f"{path} cannot be read"):
        # A directory that a killed process was replacing
        restore(folder)
        document: Document = read_json(path, documents.NO_LINKS)

    version = document.get("format_version")
    if type(version) is not int or version < 1 or document.get("format") != FORMAT:
        raise SafeFormatError(f"{path} is not of an agent in the safe format")
    if version > FORMAT_VERSION:
        raise SafeFormatError(f"{path} has format version {version}; install a newer sb3_ano: this one reads {FORMAT_VERSION}")

    # Users may edit the file, and remove the checksum.
    stated = document.pop("checksum", None)
    with translate_errors(f"{path} is not valid"):  # nested too deeply, NaN or Inf
        checksum = _checksum(document)
    if stated not in (None, checksum):
        raise SafeFormatError(
            f"{path} does not match its checksum: it is damaged; if you edited it, remove the key 'checksum'"
        )
    require_like(document, dict.fromkeys(_KEYS), DOCUMENT)
    return document


def _read_model(
    folder: Path, custom: Document, device: torch.device | str
) -> tuple[Document, ShapedPolicyAlgorithm, dict[str, torch.Tensor]]:
    """Read what a directory says of an agent, and check all that can be checked before memory is taken for it.

    :param custom: what the caller supplies by dotted name; what is used is removed
    :return: JSON; model that is not set up; parameters of its policy
    :raises SafeFormatError: if something is missing, damaged, not allowed, or has to be supplied by the caller
    """
    document = open_document(folder)
    name = document["algorithm"]
    if not isinstance(name, str) or name not in BY_CLASS_NAME:
        raise rejected("algorithm", name, ", ".join(BY_CLASS_NAME))
    algorithm = BY_CLASS_NAME[name]
    policy = next(iter(algorithm.policy_aliases))
    is_custom = any(name.partition(".")[0] in ("policy", "policy_kwargs") for name in custom)

    # SB3's load passes None for the environment, too.
    model = algorithm(policy, None, device=device, _init_setup_model=False)  # type: ignore[arg-type]
    with translate_errors(f"{folder / DOCUMENT} does not describe an agent"):
        model.policy_class = codec.decode_policy(document["policy"], custom)
        # The names are those of the constructor's arguments.
        vars(model).update(codec.decode_arguments(document["arguments"], type(model), custom))
        _set_progress(model, document["progress"])
        model.observation_space = decode_space(document["observation_space"], "observation_space")
        model.action_space = decode_space(document["action_space"], "action_space")
        model.n_envs = document["n_envs"]
        if type(model.n_envs) is not int or not 1 <= model.n_envs <= _MAX_ENVS:
            raise rejected("n_envs", model.n_envs, f"integers from 1 to {_MAX_ENVS}")

        # Classes of the caller may take anything.
        if not is_custom:
            kwargs = model.policy_kwargs
            # A class may pass arguments on to its bases.
            for kind in model.policy_class.__mro__:
                if issubclass(kind, BasePolicy):
                    codec.require_numbers(kwargs, kind, "policy_kwargs")
            optimizer = kwargs.get("optimizer_class", torch.optim.Adam)
            codec.require_numbers(kwargs.get("optimizer_kwargs"), optimizer, "policy_kwargs.optimizer_kwargs")

    weights = state.read_tensors(folder / POLICY, document["files"])
    try:
        expected = state.describe_policy(model)
    except SafeFormatError:
        if not is_custom:
            raise
        expected = state.specify(weights)  # a custom policy that cannot be built without memory is compared when it is built
    state.require_specs(folder / POLICY, weights, expected, "the policy that the JSON describes")
    return document, model, weights


def _set_progress(model: ShapedPolicyAlgorithm, document: Document) -> None:
    initial = {name.lstrip("_"): getattr(model, name) for name in _PROGRESS}
    stored = initial | document  # what the algorithm has got later is missing
    require_like(stored, dict.fromkeys(initial, 0), "progress")

    for attribute in _PROGRESS:
        name = attribute.lstrip("_")
        value = stored[name]
        if name in _RANGES:
            low, high = _RANGES[name]
            if not float(low) <= value <= float(high):
                raise rejected(f"progress.{name}", value, f"numbers from {low} to {high}")
        elif type(value) is not int or value < 0:
            raise rejected(f"progress.{name}", value, "integers from 0")
        setattr(model, attribute, value)


def _set_shaping(model: ShapedPolicyAlgorithm, folder: Path, document: object, shaping: ShapingLike | None) -> None:
    """Set the constructor's argument ``shaping``, verified as ``ANO.load`` does."""
    if not isinstance(model, ANO):
        name = type(model).__name__
        if document is not None:
            raise rejected("shaping", document, f"null, because {name} takes none")
        if shaping is not None:
            raise TypeError(f"shaping={shaping!r} is given, but {folder} holds an agent of {name}, which takes none")
        return

    with translate_errors("shaping cannot be read"):
        decoded = codec.decode(document, "shaping", {})
        require_like(decoded, {"name": None, "fingerprint": None}, "shaping")
        name = decoded["name"]
        if shaping is None and not codec.is_built_in(name):
            trained = f"{folder} was trained with shaping={name!r}"
            raise SafeFormatError(f"{trained}, which is not built in and is never imported by its name; pass it as shaping=")
        given = name
        if shaping is not None:
            given = shaping
        # The function of a name may be another one in this version.
        is_same = np.allclose(fingerprint(given), decoded["fingerprint"], rtol=1e-6, atol=1e-9)
    if not is_same and shaping is None:
        raise SafeFormatError(
            f"{folder} was trained with shaping={name!r}, but the function of that name is another one now; pass the one to "
            "continue with as shaping="
        )

    if not is_same:
        was = documents.shortened(str(name), 150)
        warnings.warn(f"{folder} was trained with shaping={was!r}; the given shaping= is another function", stacklevel=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when the agent is set up
        model.shaping = given


def _require_affordable(model: ShapedPolicyAlgorithm, folder: Path) -> None:
    parts: list[Space] = [model.action_space]
    if isinstance(model.observation_space, spaces.Dict):
        parts += model.observation_space.spaces.values()
    else:
        parts.append(model.observation_space)

    size = 7 * 4  # columns of float32, from rewards to TD errors
    for part in parts:
        size += math.prod(part.shape or ()) * np.dtype(part.dtype).itemsize

    # What some algorithms store in addition
    if isinstance(model, MaskableANO):
        size += 8 * spaces.flatdim(model.action_space)  # float32 in the buffers of sb3-contrib, two per binary action
    if isinstance(model, RecurrentANO):
        width = model.policy_kwargs.get("lstm_hidden_size", 256)
        n_layers = model.policy_kwargs.get("n_lstm_layers", 1)
        size += 16 * width * n_layers  # hidden and cell states of actor and critic

    if model.n_steps * model.n_envs * size > MAX_ROLLOUT_BYTES:
        rollout = f"n_steps={model.n_steps} x {model.n_envs} environments x {size} bytes"
        allowed = f"{MAX_ROLLOUT_BYTES} bytes, or custom_objects={{'n_steps': ...}} together with env="
        raise SafeFormatError(f"{folder} asks for rollouts of {rollout}; allowed are {allowed}")


def _set_env(model: ShapedPolicyAlgorithm, statistics: Path | None, env: GymEnv | str) -> None:
    """Give the model its environments, normalized with the statistics in a directory, which stay as they are.

    A VecNormalize among the environments keeps its settings, and its statistics, too, if it has been stepped.
    """
    if not isinstance(env, VecEnv):
        env = model._wrap_env(env)
        if isinstance(env, VecTransposeImage):
            env = env.venv  # SB3 normalizes images before it transposes them

    given = unwrap_vec_normalize(env)
    if statistics is not None:
        inner = env
        if given is not None:
            inner = given.venv
        stored = load_normalization(statistics, inner)
        if given is None:
            # Of an agent that only acts, statistics must not drift.
            stored.training = False
            stored.norm_reward = False
            env = stored
        elif given.ret_rms.count < 1.0:  # it counts steps
            given.ret_rms = stored.ret_rms
            if stored.norm_obs:
                given.obs_rms = stored.obs_rms

    model.n_envs = env.num_envs
    model.set_env(env)
