"""The state of a PyTorch optimizer as JSON and tensors."""

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from sb3_ano.hub.arguments import optimizer_setting
from sb3_ano.hub.documents import SafeFormatError, fields, list_of, number, one_line, refused
from sb3_ano.hub.tensors import TensorFile, specify
from sb3_ano.hub.values import CustomObjects, decode, encode


def encode_optimizer(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the ``state_dict`` of an optimizer.

    :return: settings and plain numbers as JSON; tensors, named by the index of the parameter and what they are
    :raises ValueError: if it holds anything else
    """
    custom: dict[str, Any] = {}
    groups = [
        {key: encode(value, f"optimizer.{key}", custom) for key, value in group.items() if key != "params"}
        for group in state["param_groups"]
    ]
    numbers, tensors = _split(state["state"])
    encoded = {name: encode(value, f"optimizer.{name}", custom) for name, value in numbers.items()}
    if custom:
        raise ValueError(f"{min(custom)} of this optimizer cannot be stored; allowed is include_optimizer=False")
    return {"param_groups": groups, "numbers": encoded}, tensors


def _split(state: dict[int, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Plain values and tensors of the parameters' states, by names such as ``3.exp_avg``."""
    flat = {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in flat.items() if name not in tensors}, tensors


def restore_optimizer(optimizer: Optimizer, document: Any, file: TensorFile) -> None:
    """Bring back what :func:`encode_optimizer` split.

    :param optimizer: a fresh one of the same parameters
    :raises SafeFormatError: if the state is damaged, or not that of such an optimizer
    """
    fields(document, "optimizer", ("param_groups", "numbers"))
    fresh = optimizer.state_dict()["param_groups"]
    groups = _decode_groups(document["param_groups"], fresh)
    numbers, tensors = _split(_state_after_a_step(optimizer, groups))
    # Parameters that were never trained have no state.
    stored = {name.partition(".")[0] for name in [*file.specs, *fields(document["numbers"], "optimizer.numbers", (), numbers)]}
    numbers = {name: value for name, value in numbers.items() if name.partition(".")[0] in stored}
    fields(document["numbers"], "optimizer.numbers", numbers)
    expected = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in stored}
    file.require(specify(expected), f"the state of {type(optimizer).__name__}")
    state: dict[int, dict[str, Any]] = {}
    found = {name: number()(value, f"optimizer.numbers.{name}") for name, value in document["numbers"].items()}
    for name, value in {**found, **file.read()}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _decode_groups(document: Any, fresh: list[dict[str, Any]]) -> list[dict[str, Any]]:
    name = "optimizer.param_groups"
    if len(list_of(lambda value, _: value, 1000)(document, name)) != len(fresh):
        raise refused(name, document, f"{len(fresh)} groups")
    groups = []
    for index, (stored, group) in enumerate(zip(document, fresh, strict=True)):
        settings = [key for key in group if key != "params"]
        fields(stored, f"{name}.{index}", settings)
        values = {key: decode(stored[key], f"{name}.{index}.{key}", CustomObjects(None)) for key in settings}
        checked = {key: optimizer_setting(value, f"{name}.{index}.{key}") for key, value in values.items()}
        groups.append({**checked, "params": group["params"]})
    return groups


def _state_after_a_step(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What such an optimizer keeps of each parameter, found out on a copy."""
    twin = copy.deepcopy(optimizer)
    try:
        twin.load_state_dict({"state": {}, "param_groups": groups})
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        twin.step()
    except Exception as error:  # settings that make no sense fail in any way
        raise SafeFormatError(f"optimizer.param_groups are not settings of this optimizer: {one_line(error)}") from error
    return twin.state_dict()["state"]
