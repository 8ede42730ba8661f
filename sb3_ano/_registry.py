"""The algorithms of this package by their zoo names. An algorithm that is added here is known to every command."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stable_baselines3 import PPO

from sb3_ano.algorithms import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO, ShapedPolicyAlgorithm


@dataclass(frozen=True)
class Entry:
    """Describe one algorithm.

    :param algorithm: the class
    :param description: one line for lists and help texts
    :param search_space: values to search of the arguments that PPO does not have: the bounds of a log-uniform float, or a list
        of choices
    """

    algorithm: type[ShapedPolicyAlgorithm]
    description: str
    search_space: Mapping[str, tuple[float, float] | list[Any]] = field(default_factory=dict)

    @property
    def own_arguments(self) -> tuple[str, ...]:
        """Names of the constructor's arguments that SB3's PPO does not have."""
        return tuple(sorted(arguments(self.algorithm) - arguments(PPO)))


def arguments(algorithm: type) -> set[str]:
    """Return the names of a constructor's arguments.

    :param algorithm: class of the algorithm
    """
    return set(inspect.signature(algorithm.__init__).parameters) - {"self", "_init_setup_model"}  # type: ignore[misc]


_TARGETS: dict[str, list[Any]] = {"desired_kl": [None, 0.01, 0.02, 0.05]}
_ANO: dict[str, list[Any]] = {"shaping": ["ano", "spo", "ppo"], **_TARGETS}

#: Zoo name of each algorithm of this package, in the order of tables.
ALGORITHMS: dict[str, Entry] = {
    "spo": Entry(SPO, "Simple Policy Optimization: a quadratic penalty instead of PPO's clip", _TARGETS),
    "papo": Entry(
        PAPO,
        "Proximal Absolute Policy Optimization: a mean-and-variance surrogate",
        {"k": (1.0, 20.0), "omega1": (5e-4, 0.05), "omega2": (5e-4, 0.05), "max_epoch_kl": [0.02, 0.05, 0.1, None]},
    ),
    "ano": Entry(
        ANO,
        "Anchored Neighborhood Optimization: a smooth, redescending surrogate instead of PPO's clip",
        _ANO,
    ),
    "ano_lstm": Entry(RecurrentANO, "ANO with LSTM policies, of sb3-contrib", _ANO),
    "ano_mask": Entry(MaskableANO, "ANO with invalid action masking, of sb3-contrib", _ANO),
    "ano_lstm_mask": Entry(RecurrentMaskableANO, "ANO with LSTM policies and masks", _ANO),
}


def zoo_name(algorithm: str) -> str:
    """Return the zoo name of an algorithm, or what the zoo would make of an unknown one.

    :param algorithm: name of the class
    """
    names = {entry.algorithm.__name__: name for name, entry in ALGORITHMS.items()}
    return names.get(algorithm, algorithm.lower())
