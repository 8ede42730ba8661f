"""The numerical Table 1, against the paper's and against shapes whose properties are known."""

import math

import numpy as np
import pytest
import torch

from sb3_ano.shaping import check, from_ratio, measure, property_table
from tests.common import pseudo_huber


def test_ppo_has_the_properties_of_table_1():
    properties = check("ppo")
    assert not properties.smooth
    assert properties.kinks == (1.0,)
    assert properties.argmax == (1.0, math.inf)
    assert not properties.bounded_argmax
    assert properties.sup_slope == 1.0
    assert (properties.slope_left, properties.slope_right) == (1.0, 0.0)
    assert not properties.redescending


def test_spo_has_the_properties_of_table_1():
    properties = check("spo")
    assert properties.smooth
    assert properties.argmax == pytest.approx((1.0, 1.0))
    assert not properties.bounded_slope
    assert (properties.slope_left, properties.slope_right) == (math.inf, -math.inf)
    assert properties.inflections == 0


def test_ano_has_the_properties_of_table_1():
    properties = check("ano")
    assert properties.smooth
    assert properties.argmax == pytest.approx((1.0, 1.0), abs=1e-4)
    assert properties.bounded_argmax
    assert properties.sup_slope == pytest.approx(45 / 16, rel=1e-12)
    assert properties.slope_left == pytest.approx(45 / 16, rel=1e-12)
    assert properties.slope_right == 0.0
    assert properties.redescending
    assert properties.inflections == 1


def test_identity_rises_for_ever():
    properties = check("identity")
    assert properties.argmax == (math.inf, math.inf)
    assert properties.slope_right == 1.0


def test_a_supremum_that_is_only_approached_is_not_bounded():
    properties = check(pseudo_huber)
    assert properties.smooth
    assert not properties.bounded_argmax
    assert properties.sup_slope == pytest.approx(2.0)
    assert not properties.redescending


def test_kinks_and_steps_are_found_where_they_are():
    def staircase(x):
        return torch.where(x > 2.0, torch.full_like(x, -1.0), x.clamp(max=1.25))

    assert measure(staircase).kinks == (1.25, 2.0)
    # At a tie, minimum returns half a slope.
    assert measure(lambda x: torch.minimum(x, torch.ones_like(x))).kinks == (1.0,)
    # Steep elsewhere, so that the change at the kink is not the largest.
    assert measure(lambda x: x - x**4 - 0.5 * x.abs()).kinks == (0.0,)


@pytest.mark.parametrize("shape", [lambda x: 1 - torch.exp(-x), lambda x: x - x**6, lambda x: x - 10 * x.square()])
def test_steepness_is_not_taken_for_a_kink(shape):
    assert measure(shape).smooth


def test_properties_do_not_depend_on_whether_gradients_are_enabled():
    with torch.no_grad():
        assert check("ano") == check("ano")
        assert check("ano").sup_slope == pytest.approx(45 / 16)


def test_inflections_are_counted():
    # Inflections of x - x^2 / (1 + x^2): those of Cauchy's kernel, at +-1/sqrt(3).
    assert measure(lambda x: x - x.square() / (1 + x.square())).inflections == 2


def test_a_shape_that_is_not_anchored_is_refused_with_its_value():
    with pytest.raises(ValueError, match="violates anchoring: h\\(0\\) = 0.5.*from_ratio"):
        check(lambda x: x + 0.5)


def test_a_shape_above_the_identity_is_refused_with_the_point():
    with pytest.raises(ValueError, match="violates enclosure: h\\(-4.00098\\) = -4"):
        check(lambda x: x.clamp(min=-4.0))


def test_a_shape_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="violates enclosure"):
        check(lambda x: torch.where(x > 5.0, torch.full_like(x, math.nan), x))


def test_a_function_of_ratio_and_radius_is_told_of_from_ratio():
    with pytest.raises(TypeError, match="cannot be called as h\\(x\\).*from_ratio"):
        check(lambda ratio, eps: torch.minimum(ratio, 1 + eps))
    wrapped = from_ratio(lambda ratio, eps: torch.minimum(ratio, torch.full_like(ratio, 1 + eps)))
    assert check(wrapped).argmax == (1.0, math.inf)


def test_a_reduction_is_not_elementwise():
    with pytest.raises(ValueError, match="not elementwise"):
        check(lambda x: x.sum())


@pytest.mark.parametrize("shape", [lambda x: x if x < 1 else 1, np.tanh], ids=["python", "numpy"])
def test_a_function_that_is_not_for_tensors_is_refused(shape):
    with pytest.raises(TypeError, match="cannot be called as h\\(x\\) with a tensor"):
        check(shape)


def test_a_pair_is_checked_one_by_one():
    pair = check(("ano", "spo"))
    assert str(pair).splitlines()[0].split() == ["Property", "ano", "spo"]
    assert (pair.f.inflections, pair.g.inflections) == (1, 0)


def test_the_table_has_a_column_for_each_shape():
    table = property_table([check(name) for name in ("ppo", "spo", "ano")])
    header, _, *rows = table.splitlines()
    assert header.split() == ["Property", "ppo", "spo", "ano"]
    assert len(rows) == 8
    assert "0 (redescending)" in table
    assert str(check("ano")).splitlines()[0].split() == ["Property", "ano"]
