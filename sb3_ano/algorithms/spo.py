"""Simple Policy Optimization."""

from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.shaping import as_pair, spo


class SPO(ShapedPolicyAlgorithm):
    """Simple Policy Optimization (Xie et al. 2025): PPO with a quadratic penalty instead of the clip.

    Eq. f_SPO of the ANO paper; the same as ``ANO(shaping="spo")``. The arguments are those of
    :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, that is, of SB3's PPO.
    """

    _shape = as_pair(spo)
