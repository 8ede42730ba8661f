"""The constructor arguments of ANO, SPO and PAPO as JSON, and back as attributes of a model."""

from typing import Any

import numpy as np
from stable_baselines3.common.policies import BasePolicy

from sb3_ano.algorithms import ANO, PAPO, SPO, ShapedPolicyAlgorithm
from sb3_ano.hub.documents import Check, boolean, fields, list_of, number, one_of, optional, refused, whole
from sb3_ano.hub.schedules import dotted_name
from sb3_ano.hub.values import CLASSES, CustomObjects, decode, encode

ALGORITHMS: dict[str, type[ShapedPolicyAlgorithm]] = {"ANO": ANO, "SPO": SPO, "PAPO": PAPO}

_MAX_LAYERS = 256
_size = whole(1)


def _schedule(value: Any, name: str) -> Any:
    return value if callable(value) else number(0.0)(value, name)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(name, value, "objects")
    return value


def _class(value: Any, name: str) -> Any:
    if not callable(value):
        raise refused(name, value, ", ".join(CLASSES[name.rpartition(".")[2]]))
    return value


def _net_arch(value: Any, name: str) -> Any:
    layers = list_of(_size, _MAX_LAYERS)
    if isinstance(value, dict):
        fields(value, name, (), ("pi", "vf"))
        return {key: layers(sizes, f"{name}.{key}") for key, sizes in value.items()}
    return layers(value, name)


def _extractor_kwargs(value: Any, name: str) -> dict[str, Any]:
    checks = {"features_dim": _size, "cnn_output_dim": _size, "normalized_image": boolean}
    return _checked(fields(value, name, (), checks), name, checks)


def _optimizer_kwargs(value: Any, name: str) -> dict[str, Any]:
    return {key: optimizer_setting(each, f"{name}.{key}") for key, each in _mapping(value, name).items()}


def optimizer_setting(value: Any, name: str) -> Any:
    """What PyTorch's optimizers are set by: None, a bool, a number, or a few numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, tuple | list) and len(value) <= 4:
        return type(value)(number()(each, name) for each in value)
    return number()(value, name)


_COMMON: dict[str, Check] = {
    "learning_rate": _schedule,
    "n_steps": _size,
    "batch_size": _size,
    "n_epochs": _size,
    "gamma": number(),
    "gae_lambda": number(),
    "clip_range": _schedule,
    "clip_range_vf": optional(_schedule),
    "normalize_advantage": boolean,
    "ent_coef": number(),
    "vf_coef": number(),
    "max_grad_norm": number(0.0, infinite=True),
    "use_sde": boolean,
    "sde_sample_freq": whole(-1),
    "rollout_buffer_class": _class,
    "rollout_buffer_kwargs": _mapping,
    "target_kl": optional(number(0.0)),
    "stats_window_size": _size,
    "policy_kwargs": _mapping,
    "verbose": lambda value, name: value if isinstance(value, bool) else whole(0)(value, name),
    "seed": optional(whole(0, 2**32 - 1)),
    "clip_range_high": optional(_schedule),
    "torch_compile": one_of("auto", False, True),
    "precision": one_of("float32", "bfloat16"),
    "check_finite": boolean,
}
#: Defaults of arguments that agents stored by earlier versions lack.
_LATER = {"check_finite": True, "desired_kl": None}
_ADAPTIVE: dict[str, Check] = {"desired_kl": optional(_schedule)}
_PAPO: dict[str, Check] = {
    "k": number(0.0),
    "omega1": number(0.0),
    "omega2": number(0.0),
    "max_epoch_kl": optional(number(0.0)),
}
_POLICY: dict[str, Check] = {
    "net_arch": optional(_net_arch),
    "activation_fn": _class,
    "ortho_init": boolean,
    "log_std_init": number(),
    "full_std": boolean,
    "use_expln": boolean,
    "squash_output": boolean,
    "features_extractor_class": _class,
    "features_extractor_kwargs": optional(_extractor_kwargs),
    "share_features_extractor": boolean,
    "normalize_images": boolean,
    "optimizer_class": _class,
    "optimizer_kwargs": optional(_optimizer_kwargs),
}
#: How far training has come, by attribute.
_PROGRESS: dict[str, Check] = {
    "num_timesteps": whole(0),
    "_total_timesteps": whole(0),
    "_num_timesteps_at_start": whole(0),
    "_n_updates": whole(0),
    "_episode_num": whole(0),
    "_current_progress_remaining": number(0.0),
    "n_skipped_minibatches": whole(0),
    "radius_factor": number(0.0),
}
_ATTRIBUTES = {"stats_window_size": "_stats_window_size"}


def argument_checks(algorithm: type[ShapedPolicyAlgorithm]) -> dict[str, Check]:
    """The stored arguments of an algorithm and what is allowed for each.

    ``tensorboard_log`` is not among them: it is a path on another machine, to which training would write.
    """
    return _COMMON | (_PAPO if algorithm is PAPO else _ADAPTIVE)


def encode_arguments(model: ShapedPolicyAlgorithm, custom: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments as JSON.

    :param custom: takes up, by dotted name, what only the caller of ``load_safe`` will be able to supply
    """
    arguments = {}
    for name in argument_checks(type(model)):
        value = getattr(model, _ATTRIBUTES.get(name, name))
        if name == "policy_kwargs":
            value = _current_style(value)
        arguments[name] = encode(value, name, custom)
    return arguments


def _current_style(policy_kwargs: dict[str, Any]) -> dict[str, Any]:
    # As SB3 does when it loads a model: up to its version 1.7, the dict of layers came in a list.
    net_arch = policy_kwargs.get("net_arch")
    if isinstance(net_arch, list) and net_arch and isinstance(net_arch[0], dict):
        return {**policy_kwargs, "net_arch": net_arch[0]}
    return policy_kwargs


def decode_arguments(
    document: Any, algorithm: type[ShapedPolicyAlgorithm], policy: type[BasePolicy], custom: CustomObjects
) -> dict[str, Any]:
    """The attributes of a model that :func:`encode_arguments` described; what the caller supplies is taken as it is.

    :raises SafeFormatError: if an argument is missing, unknown, not allowed, or has to be supplied by the caller
    """
    checks = argument_checks(algorithm)
    later = {name: default for name, default in _LATER.items() if name in checks}
    document = later | fields(document, "arguments", [name for name in checks if name not in later], checks)
    attributes = {}
    for name, check in checks.items():
        given = name in custom
        value = decode(document[name], name, custom)
        if not given:
            value = check(value, name)
        if name == "policy_kwargs" and not given and policy in algorithm.policy_aliases.values():
            value = _checked_policy_kwargs(value, name)
        attributes[_ATTRIBUTES.get(name, name)] = value
    if "tensorboard_log" in custom:
        attributes["tensorboard_log"] = custom.take("tensorboard_log")
    return attributes


def _checked_policy_kwargs(value: dict[str, Any], name: str) -> dict[str, Any]:
    checks = dict(_POLICY)
    for kind in ("features_extractor", "optimizer"):
        if value.get(f"{kind}_class") not in (None, *CLASSES[f"{kind}_class"].values()):
            checks[f"{kind}_kwargs"] = _mapping  # those of the caller's own class
    return _checked(fields(value, name, (), checks), name, checks)


def _checked(values: dict[str, Any], name: str, checks: dict[str, Check]) -> dict[str, Any]:
    return {key: checks[key](value, f"{name}.{key}") for key, value in values.items()}


def encode_policy(model: ShapedPolicyAlgorithm, custom: dict[str, Any]) -> Any:
    """The policy class as one of SB3's names, or else by name for information."""
    for alias, policy in model.policy_aliases.items():
        if model.policy_class is policy:
            return alias
    custom["policy"] = model.policy_class
    return {"$custom": dotted_name(model.policy_class)}


def decode_policy(document: Any, algorithm: type[ShapedPolicyAlgorithm], custom: CustomObjects) -> type[BasePolicy]:
    """The policy class that :func:`encode_policy` described.

    :raises SafeFormatError: if the name is not SB3's, or the caller has to supply the class
    :raises TypeError: if the caller supplies something else
    """
    policy = decode(document, "policy", custom)
    if isinstance(policy, type) and issubclass(policy, BasePolicy):
        return policy
    one_of(*algorithm.policy_aliases)(policy, "policy")
    return algorithm.policy_aliases[policy]


def encode_progress(model: ShapedPolicyAlgorithm) -> dict[str, Any]:
    """How far training has come, as JSON."""
    values = {name: getattr(model, name) for name in _PROGRESS}
    return {name.lstrip("_"): value.item() if isinstance(value, np.generic) else value for name, value in values.items()}


def decode_progress(document: Any) -> dict[str, Any]:
    """The attributes that :func:`encode_progress` described.

    :raises SafeFormatError: if one is missing, unknown, or not allowed
    """
    required = [name.lstrip("_") for name in _PROGRESS if name != "radius_factor"]
    stored = {"radius_factor": 1.0} | fields(document, "progress", required, ("radius_factor",))
    return {name: check(stored[name.lstrip("_")], f"progress.{name.lstrip('_')}") for name, check in _PROGRESS.items()}
