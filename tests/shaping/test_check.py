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
    assert properties.at_zero == pytest.approx(0.0, abs=1e-14)
    assert properties.slope_at_zero == pytest.approx(1.0, rel=1e-14)
    assert properties.smooth == (name != "ppo")
    assert properties.bounded_argmax == (name in ("spo", "ano"))  # a supremum that is only approached is not bounded
    assert properties.bounded_slope == (name != "spo")
    assert properties.redescending == (name == "ano")
    with torch.no_grad():
        assert check(name) == properties


def staircase(x):
    return torch.where(x > 2.0, torch.full_like(x, -1.0), x.clamp(max=1.25))


@pytest.mark.parametrize(
    ("shape", "kinks"),
    [
        (staircase, (1.25, 2.0)),
        (lambda x: torch.minimum(x, torch.ones_like(x)), (1.0,)),  # at a tie, minimum returns half a slope
        (lambda x: x - x**4 - 0.5 * x.abs(), (0.0,)),  # steep elsewhere: the change at the kink is not the largest
        (lambda x: 1 - torch.exp(-x), ()),
        (lambda x: x - x**6, ()),
        (lambda x: x - 10 * x.square(), ()),
    ],
)
def test_kinks_and_steps_are_found_where_they_are(shape, kinks):
    assert measure(shape).kinks == kinks


def test_inflections_are_counted():
    # Inflections of x - x^2 / (1 + x^2): those of Cauchy's kernel, at +-1/sqrt(3).
    assert measure(lambda x: x - x.square() / (1 + x.square())).inflections == 2


REJECTED = {
    "anchoring": (lambda x: x + 0.5, r"violates anchoring: h\(0\) = 0.5.*from_ratio"),
    # The worst point is named (review users U14).
    "clamp": (lambda x: x.clamp(min=-4.0), r"violates enclosure: h\(-64\) = -4, allowed is h"),
    "tanh": (torch.tanh, r"violates enclosure: h\(-64\) = -1, allowed"),
    "digits": (lambda x: x + 1e-6 * (x * (4 - x) / 4).clamp(min=0.0), r"violates enclosure: h\(2\) = 2.000001, allowed"),
    # Beyond the grid only.
    "tail": (lambda x: x + 0.01 * (x > 5e5), r"violates enclosure: h\(1000000\) = 1000000.01, allowed"),
    # The point is named (review users U13).
    "log1p": (torch.log1p, r"is not finite at .*h\(x\) = -inf"),
    "step to NaN": (
        lambda x: torch.where(x > 5.0, torch.full_like(x, math.nan), x),
        r"is not finite at x = 5.0009765625: h\(x\) = nan",
    ),
    "overflow": (lambda x: 1 - torch.exp(-x), r"is not finite at x = -1000: h\(x\) = -inf"),
    # Autograd multiplies the branch not taken, NaN, by 0.
    "slope of NaN": (
        lambda x: torch.where(x < 0, x, x.abs().sqrt() - x.abs().sqrt() + x),
        r"is not finite at x = 0: h\(x\) = 0 with slope nan",
    ),
    # It cannot improve the policy (review users U12).
    "detached": (lambda x: x.clamp(max=1.0).detach(), "has the slope 0 at x = 0, allowed are slopes above 0"),
    "-|x|": (lambda x: -x.abs(), "has the slope 0 at x = 0"),
    "descent": (lambda x: -x - x.abs(), "has the slope -1 at x = 0"),
    "reduction": (lambda x: x.sum(), "not elementwise"),
    "python": (lambda x: x if x < 1 else 1, r"cannot be called as h\(x\) with a tensor"),
    "numpy": (np.tanh, r"cannot be called as h\(x\) with a tensor"),
    "f(ratio, eps)": (lambda ratio, eps: torch.minimum(ratio, 1 + eps), r"cannot be called as h\(x\).*from_ratio"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_shape_that_violates_definition_3_2_or_cannot_train_is_rejected_with_the_point(name):
    shape, message = REJECTED[name]
    with pytest.raises(TypeError if "cannot be called" in message else ValueError, match=message):
        check(shape)


class Learned(torch.nn.Module):
    """``x - w^2 x^2``, with a float32 parameter."""

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
    assert check(from_ratio(lambda ratio, eps: torch.minimum(ratio, torch.full_like(ratio, 1 + eps)))).argmax == (1.0, INF)


def test_the_table_has_a_column_for_each_shape():
    table = property_table([check(name) for name in ("ppo", "spo", "ano")])
    header, _, *rows = table.splitlines()
    assert header.split() == ["Property", "ppo", "spo", "ano"]
    assert len(rows) == 9
    assert "0 (redescending)" in table
    assert str(check("ano")).splitlines()[0].split() == ["Property", "ano"]
    pair = check(("ano", "spo"))
    assert str(pair).splitlines()[0].split() == ["Property", "ano", "spo"]
    assert (pair.f.inflections, pair.g.inflections) == (1, 0)
