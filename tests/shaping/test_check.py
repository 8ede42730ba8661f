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
    with pytest.raises(ValueError, match="violates enclosure: h\\(-64\\) = -4, allowed is h"):
        check(lambda x: x.clamp(min=-4.0))


def test_the_worst_point_above_the_identity_is_printed_with_its_digits():  # review users U14
    with pytest.raises(ValueError, match="'torch:tanh' violates enclosure: h\\(-64\\) = -1, allowed"):
        check(torch.tanh)
    with pytest.raises(ValueError, match="violates enclosure: h\\(2\\) = 2.000001, allowed"):
        check(lambda x: x + 1e-6 * (x * (4 - x) / 4).clamp(min=0.0))
    # beyond the grid only
    with pytest.raises(ValueError, match="violates enclosure: h\\(1000000\\) = 1000000.01, allowed"):
        check(lambda x: x + 0.01 * (x > 5e5))


@pytest.mark.parametrize(
    ("shape", "point"),
    [
        (torch.log1p, "h\\(x\\) = -inf"),
        (lambda x: torch.where(x > 5.0, torch.full_like(x, math.nan), x), "x = 5.0009765625: h\\(x\\) = nan"),
        (lambda x: 1 - torch.exp(-x), "x = -1000: h\\(x\\) = -inf"),
        # Autograd multiplies the branch not taken, NaN, by 0.
        (lambda x: torch.where(x < 0, x, x.abs().sqrt() - x.abs().sqrt() + x), "x = 0: h\\(x\\) = 0 with slope nan"),
    ],
    ids=["log1p", "step to NaN", "overflow", "slope"],
)
def test_a_shape_that_is_not_finite_is_rejected_with_the_point(shape, point):  # review users U13
    with pytest.raises(ValueError, match=f"is not finite at .*{point}"):
        check(shape)


@pytest.mark.parametrize(
    ("shape", "slope"),
    [
        (lambda x: x.clamp(max=1.0).detach(), "0"),
        (lambda x: -x.abs(), "0"),
        (lambda x: -x - x.abs(), "-1"),
    ],
    ids=["detached", "-|x|", "descent"],
)
def test_a_shape_that_cannot_improve_the_policy_is_rejected_with_its_slope(shape, slope):  # review users U12
    with pytest.raises(ValueError, match=f"has the slope {slope} at x = 0, allowed are slopes above 0"):
        check(shape)
    assert measure(shape).slope_at_zero == float(slope)


class Learned(torch.nn.Module):
    """``x - softplus(w x)^2`` and what makes it 0 at 0, with float32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.layer(x.unsqueeze(-1)).squeeze(-1).square()


def test_a_module_with_float32_parameters_is_measured_in_float64():  # review core 12
    shape = Learned()
    expected = measure(lambda x: x - 0.25 * x.square())
    found = check(shape)
    assert found.argmax == expected.argmax == (2.0, 2.0)
    assert found.sup_slope == expected.sup_slope
    assert found.smooth
    assert shape.layer.weight.dtype == torch.float32


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
    assert len(rows) == 9
    assert "0 (redescending)" in table
    assert str(check("ano")).splitlines()[0].split() == ["Property", "ano"]
