"""The numerical Table 1, against the paper's and against shapes whose properties are known."""

import math

import numpy as np
import pytest
import torch

from sb3_ano.shaping import check, from_ratio, measure, property_table

INF = math.inf
ONE = pytest.approx((1.0, 1.0), abs=1e-4)
STEEPEST = pytest.approx(45 / 16, rel=1e-12)
SLOPES = ("sup_slope", "slope_left", "slope_right")
TABLE_1 = {
    "ppo": {"kinks": (1.0,), "argmax": (1.0, INF), "redescending": False, **dict(zip(SLOPES, (1.0, 1.0, 0.0), strict=True))},
    "spo": {"kinks": (), "argmax": ONE, "inflections": 0, **dict(zip(SLOPES, (INF, INF, -INF), strict=True))},
    "ano": {"kinks": (), "argmax": ONE, "inflections": 1, **dict(zip(SLOPES, (STEEPEST, STEEPEST, 0.0), strict=True))},
    "identity": {"kinks": (), "argmax": (INF, INF), **dict(zip(SLOPES, (1.0, 1.0, 1.0), strict=True))},
    "tests.common:pseudo_huber": {"kinks": (), "sup_slope": pytest.approx(2.0), "redescending": False},
}


@pytest.mark.parametrize("name", TABLE_1)
def test_shapes_have_the_properties_of_table_1(name):
    properties = check(name)
    assert {key: getattr(properties, key) for key in TABLE_1[name]} == TABLE_1[name]
    assert properties.smooth == (name != "ppo")
    assert properties.bounded_argmax == (name in ("spo", "ano"))  # a supremum that is only approached is not bounded
    assert properties.bounded_slope == (name != "spo")
    assert properties.redescending == (name == "ano")


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


def test_a_shape_that_is_not_anchored_is_rejected_with_its_value():
    with pytest.raises(ValueError, match=r"violates anchoring: h\(0\) = 0.5.*from_ratio"):
        check(lambda x: x + 0.5)


@pytest.mark.parametrize(
    ("shape", "point"),
    [
        (lambda x: x.clamp(min=-4.0), r"h\(-64\) = -4"),
        (torch.tanh, r"h\(-64\) = -1"),
        (lambda x: x + 1e-6 * (x * (4 - x) / 4).clamp(min=0.0), r"h\(2\) = 2.000001"),
        (lambda x: x + 0.01 * (x > 5e5), r"h\(1000000\) = 1000000.01"),  # beyond the grid only
    ],
    ids=["clamp", "tanh", "digits", "tail"],
)
def test_a_shape_above_the_identity_is_rejected_with_the_worst_point(shape, point):  # review users U14
    with pytest.raises(ValueError, match=f"violates enclosure: {point}, allowed is h"):
        check(shape)


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


def test_a_function_of_ratio_and_radius_is_wrapped():
    def f_ppo(ratio, eps):
        return torch.minimum(ratio, torch.full_like(ratio, 1 + eps))

    with pytest.raises(TypeError, match=r"cannot be called as h\(x\).*from_ratio"):
        check(f_ppo)
    assert check(from_ratio(f_ppo)).argmax == (1.0, math.inf)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (lambda x: x.sum(), ValueError, "not elementwise"),
        (lambda x: x if x < 1 else 1, TypeError, r"cannot be called as h\(x\) with a tensor"),
        (np.tanh, TypeError, r"cannot be called as h\(x\) with a tensor"),
    ],
    ids=["reduction", "python", "numpy"],
)
def test_a_function_that_is_not_elementwise_on_tensors_is_rejected(shape, error, message):
    with pytest.raises(error, match=message):
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
