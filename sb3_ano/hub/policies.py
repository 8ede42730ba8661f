"""Policies and their tensors: described before memory is taken for them, and loaded."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sb3_ano._compat import unvalidated_distributions
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.hub.documents import translate_errors
from sb3_ano.hub.tensors import TensorFile, specify


def first_names(module: nn.Module) -> dict[str, str]:
    """Map each name in a module's state to the first name of the same tensor: shared layers are stored once."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}


def unique_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a module, shared tensors once."""
    state = module.state_dict(keep_vars=True)
    return {name: state[name] for name in dict.fromkeys(first_names(module).values())}


def describe_policy(model: ShapedPolicyAlgorithm) -> dict[str, str]:
    """Describe the tensors that a policy must have, found out on PyTorch's meta device, without memory for any of them.

    :param model: algorithm that is not set up
    :return: descriptions by name
    :raises SafeFormatError: if there is no such policy
    """
    policy: Any = model.policy_class
    # SB3 asks a policy without parameters for its device, and would get the CPU.
    on_meta = type(policy.__name__, (policy,), {"device": property(lambda policy: torch.device("meta"))})
    keywords = {"use_sde": model.use_sde, **model.policy_kwargs}
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
    model.policy.load_state_dict({name: tensors[first] for name, first in first_names(model.policy).items()})
    if model.use_sde:
        model.policy.reset_noise()  # on the right device, as SB3 does
