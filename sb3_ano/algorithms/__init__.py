"""ANO, SPO and PAPO as Stable-Baselines3 algorithms."""

from sb3_ano.algorithms.ano import ANO
from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.papo import PAPO
from sb3_ano.algorithms.spo import SPO

__all__ = ["ANO", "PAPO", "SPO", "ShapedPolicyAlgorithm"]
