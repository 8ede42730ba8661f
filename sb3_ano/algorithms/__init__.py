"""ANO, SPO and PAPO as Stable-Baselines3 algorithms, and ANO for sb3-contrib's policies.

``base.py`` has what they share: the constructor, and ``train``, which reads like that of SB3's PPO.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sb3_ano.algorithms.ano import ANO
from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.papo import PAPO
from sb3_ano.algorithms.spo import SPO

if TYPE_CHECKING:
    from sb3_ano.algorithms.contrib import MaskableANO, RecurrentANO, RecurrentMaskableANO

__all__ = [
    "ANO",
    "PAPO",
    "SPO",
    "MaskableANO",
    "RecurrentANO",
    "RecurrentMaskableANO",
    "ShapedPolicyAlgorithm",
]


def __getattr__(name: str) -> Any:
    # On demand, because sb3-contrib takes time to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("sb3_ano.algorithms.contrib"), name)
