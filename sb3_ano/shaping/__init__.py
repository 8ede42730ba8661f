r"""Shaping functions: the one line of mathematics in which PPO, SPO and ANO differ.

Definition 3.2 of the paper maximizes ``min(f(r) A, g(r) A)`` for a probability ratio ``r`` and an advantage ``A``.
In its symmetric form, ``g(r) = 2 - f(2 - r)``, the objective depends only on the signed deviation of the ratio,
measured in trust-region radii::

    x         = sign(A) (r - 1) / eps        eps = eps_high where A >= 0, eps_low where A < 0
    objective = A + |A| eps h(x)             and f(r) = 1 + eps h((r - 1) / eps)

so a shape is an elementwise function ``h`` with ``h(0) = 0`` (anchoring) and ``h(x) <= x`` (enclosure). ``h``
does not depend on the radius, ``g`` follows from ``h``, and ``expm1`` keeps full precision near ``r = 1``. Two independent
functions ``f`` and ``g`` are a pair of shapes: ``h_f`` acts where ``A >= 0``, ``h_g`` where ``A < 0``. The ``h`` form
equals ``min(f A, g A)`` wherever enclosure holds. Elsewhere, ``f`` still acts on ``A >= 0`` and ``g`` on ``A < 0``,
whereas the minimum would be the other one.

Published objectives need a little more, which :class:`Shape` holds: constants that do not scale with the radius
(:func:`from_ratio`), a weight ``w`` of ``A grad log pi``, which is the shape with ``h'(x) = w(r) / r``
(:func:`from_weight`), and a radius that depends on the sample (:func:`with_radius`). :data:`OBJECTIVES` lists them.

This package imports only PyTorch, so that any trainer can use it.
"""

from sb3_ano.shaping._check import (
    PairProperties,
    ShapeProperties,
    check,
    measure,
    property_table,
    require_trainable,
)
from sb3_ano.shaping._forms import (
    MAX_LOG_RATIO,
    MIN_RADIUS,
    RadiusFunction,
    RatioFunction,
    Shape,
    Shaping,
    ShapingPair,
    from_ratio,
    from_weight,
)
from sb3_ano.shaping._objectives import OBJECTIVES, Objective
from sb3_ano.shaping._shapes import (
    SHAPINGS,
    ShapingLike,
    as_pair,
    fingerprint,
    is_importable,
    is_known,
    name_of,
    ratio_form,
    resolve,
    surrogate,
    with_radius,
)
from sb3_ano.shaping._surrogate import ano, identity, ppo, spo, surrogate_of_pair

__all__ = [
    "MAX_LOG_RATIO",
    "MIN_RADIUS",
    "OBJECTIVES",
    "SHAPINGS",
    "Objective",
    "PairProperties",
    "RadiusFunction",
    "RatioFunction",
    "Shape",
    "ShapeProperties",
    "Shaping",
    "ShapingLike",
    "ShapingPair",
    "ano",
    "as_pair",
    "check",
    "fingerprint",
    "from_ratio",
    "from_weight",
    "identity",
    "is_importable",
    "is_known",
    "measure",
    "name_of",
    "ppo",
    "property_table",
    "ratio_form",
    "require_trainable",
    "resolve",
    "spo",
    "surrogate",
    "surrogate_of_pair",
    "with_radius",
]
