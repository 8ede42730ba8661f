"""Dropout, which makes log-probabilities of the same tokens differ between generation and loss."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Parts of names of probabilities and scales, such as attn_pdrop, layerdrop and router_jitter_noise.
_NAMES = ("drop", "jitter")


def random_parts(model: Any) -> list[tuple[Any, str, float]]:
    """Return what draws random numbers in the forward passes of a training: owners, names of attributes, and their values.

    Besides modules of PyTorch, models have probabilities as attributes (OPT, Bloom, LLaMA), or read them in their
    configuration (GPT-J, Persimmon).

    :param model: model of transformers or PEFT
    """
    parts = []
    seen: set[int] = set()
    for owner in _owners(model):
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in vars(owner).items():
            is_named = (name == "p" and isinstance(owner, _DROPOUTS)) or any(part in name for part in _NAMES)
            if is_named and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                parts.append((owner, name, value))
    return parts


_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)


def _owners(model: Any) -> Iterator[Any]:
    for module in model.modules():
        yield module
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            yield config


def disable_dropout(model: Any) -> list[tuple[Any, str, float]]:
    """Turn dropout off, and return what it was in configurations, which are saved with the model.

    :param model: model of transformers or PEFT
    """
    parts = random_parts(model)
    for owner, name, _ in parts:
        setattr(owner, name, 0.0)
    return [part for part in parts if not isinstance(part[0], torch.nn.Module)]


@contextlib.contextmanager
def restored(parts: list[tuple[Any, str, float]]) -> Iterator[None]:
    """Put dropout back while a model is saved, so that its configuration is that of the model it was made from.

    :param parts: what :func:`disable_dropout` returned
    """
    for owner, name, value in parts:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, _ in parts:
            setattr(owner, name, 0.0)
