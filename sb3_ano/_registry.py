"""The algorithms of this package by their zoo names. An algorithm that is added here is known to every command."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sb3_ano.algorithms import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO, ShapedPolicyAlgorithm

#: Values to search of an argument: the bounds of a log-uniform float, or a list of choices.
Range: TypeAlias = tuple[float, float] | list[Any]


@dataclass(frozen=True)
class Entry:
    """Describe one algorithm.

    :param algorithm: the class
    :param search_space: values to search of the arguments that PPO does not have
    """

    algorithm: type[ShapedPolicyAlgorithm]
    search_space: Mapping[str, Range] = field(default_factory=dict)


# None is a constant radius.
_TARGETS: dict[str, Range] = {"desired_kl": [None, 0.01, 0.02, 0.05]}
_ANO: dict[str, Range] = {"shaping": ["ano", "spo", "ppo"], **_TARGETS}
_PAPO: dict[str, Range] = {
    "k": (1.0, 20.0),
    "omega1": (5e-4, 0.05),
    "omega2": (5e-4, 0.05),
    "max_epoch_kl": [0.02, 0.05, 0.1, None],
}

#: Zoo name of each algorithm of this package, in the order of tables.
ALGORITHMS: dict[str, Entry] = {
    "spo": Entry(SPO, _TARGETS),
    "papo": Entry(PAPO, _PAPO),
    "ano": Entry(ANO, _ANO),
    "ano_lstm": Entry(RecurrentANO, _ANO),
    "ano_mask": Entry(MaskableANO, _ANO),
    "ano_lstm_mask": Entry(RecurrentMaskableANO, _ANO),
}
#: Each class by its name, as saved agents name it.
BY_CLASS_NAME = {entry.algorithm.__name__: entry.algorithm for entry in ALGORITHMS.values()}


def zoo_name(algorithm: str) -> str:
    """Return the zoo name of an algorithm, or what the zoo would make of an unknown one.

    :param algorithm: name of the class
    """
    for name, entry in ALGORITHMS.items():
        if entry.algorithm.__name__ == algorithm:
            return name
    return algorithm.lower()
