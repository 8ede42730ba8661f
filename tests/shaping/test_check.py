"""The numerical Table 1, against the paper's and against shapes whose properties are known."""

import math

import numpy as np
import pytest
import torch

from sb3_ano.shaping import check, measure, property_table, require_trainable

INF = math.inf
ONE = pytest.approx((1.0, 1.0), abs=1e-4)
STEEPEST, TWO = pytest.approx(45 / 16, rel=1e-12), pytest.approx(2.0)
# Kinks, argmax, sup |h'|, the slopes to the left and to the right, inflections.
TABLE_1 = {
    "ppo": ((1.0,), (1.0, INF), 1.0, 1.0, 0.0, 0),
    "spo": ((), ONE, INF, INF, -INF, 0),
    "ano": ((), ONE, STEEPEST, STEEPEST, 0.0, 1),
    "identity": ((), (INF, INF), 1.0, 1.0, 1.0, 0),
    "tests.common:pseudo_huber": ((), (INF, INF), TWO, TWO, 0.0, 0),  # approaches its supremum
}


@pytest.mark.parametrize("name", TABLE_1)
def test_shapes_have_the_properties_of_table_1(name):
    properties = check(name)
    tails = (properties.sup_slope, properties.slope_left, properties.slope_right)
    assert (properties.kinks, properties.argmax, *tails, properties.inflections) == TABLE_1[name]
    assert properties.at_zero == pytest.approx(0.0, abs=1e-14)
    assert properties.slope_at_zero == pytest.approx(1.0, rel=1e-14)
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
    ],
)
def test_kinks_and_steps_are_found_where_they_are(shape, kinks):
    assert measure(shape).kinks == kinks


def test_inflections_are_counted():
    # Inflections of x - x^2 / (1 + x^2): those of Cauchy's kernel, at +-1/sqrt(3).
    assert measure(lambda x: x - x.square() / (1 + x.square())).inflections == 2


#: Shapes that violate enclosure, and the worst point.
NOT_ENCLOSED = {
    "clamp": (lambda x: x.clamp(min=-4.0), (-64, -4)),
    "digits": (lambda x: x + 1e-6 * (x * (4 - x) / 4).clamp(min=0.0), (2, 2.000001)),
    # Beyond the grid only.
    "tail": (lambda x: x + 0.01 * (x > 5e5), (1e6, 1e6 + 0.01)),
}


@pytest.mark.parametrize("name", NOT_ENCLOSED)
def test_a_shape_that_is_no_lower_bound_is_reported_with_the_worst_point(name):
    shape, (x, value) = NOT_ENCLOSED[name]
    properties = check(shape)
    assert properties.violation == pytest.approx((x, value), rel=1e-12)
    assert not properties.verdicts["enclosed"]
    assert f"no, at x = {x:+.4g}" in str(properties)
    (lost,) = require_trainable(shape)
    point = f"h({x:.12g}) = {value:.12g}"
    assert f"violates enclosure: {point}, Definition 3.2 has h(x) <= x: the objective is not a lower bound" in lost


def test_a_shape_that_is_not_anchored_is_reported_and_trainers_reject_it():
    properties = check(lambda x: 0.5 + 0.5 * x)
    assert properties.at_zero == 0.5
    assert not properties.verdicts["anchored"]
    assert "Anchoring, h(0) = 0                no" in str(properties)
    with pytest.raises(ValueError, match=r"violates anchoring: h\(0\) = 0.5.*from_ratio"):
        require_trainable(lambda x: 0.5 + 0.5 * x)


REJECTED = {
    # The point is named.
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
    # It cannot improve the policy.
    "detached": (lambda x: x.clamp(max=1.0).detach(), "has the slope 0 at x = 0, allowed are slopes above 0"),
    "descent": (lambda x: -x - x.abs(), "has the slope -1 at x = 0"),
    "reduction": (lambda x: x.sum(), "not elementwise"),
    "numpy": (np.tanh, r"cannot be called as h\(x\) with a tensor"),
    "f(ratio, eps)": (lambda ratio, eps: torch.minimum(ratio, 1 + eps), r"cannot be called as h\(x\).*from_ratio"),
}


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.parametrize("function", [check, require_trainable])
def test_a_shape_that_cannot_train_is_rejected_with_the_point(name, function):
    shape, message = REJECTED[name]
    if function is require_trainable:
        message = message.replace("5.0009765625", "5.125")
    with pytest.raises(TypeError if "cannot be called" in message else ValueError, match=message):
        function(shape)


def test_a_module_with_float32_parameters_is_measured_in_float64():
    shape = torch.nn.PReLU(init=1.5)
    found = check(shape)
    assert (found.kinks, found.slope_left, found.slope_right, found.slope_at_zero) == ((0.0,), 1.5, 1.0, 1.5)
    assert shape.weight.dtype == torch.float32


def test_the_table_has_a_column_for_each_shape():
    table = property_table([check(name) for name in ("ppo", "spo", "ano")])
    header, _, *rows = table.splitlines()
    assert header.split() == ["Property", "ppo", "spo", "ano"]
    of_ppo = ["yes", "+1", "yes", "kinks at +1", "+1 to +inf (unbounded)", "1", "+1", "0 (vanishing)", "0"]
    assert [row[35:].split("  ")[0] for row in rows] == of_ppo
    assert all(text in table for text in ("x = +1 (bounded)", "0 (redescending)", "smooth", "2.812", "-inf"))
    assert str(check("ano")).splitlines()[0].split() == ["Property", "ano"]
    pair = check(("ano", "spo"))
    assert [properties.name for properties in pair] == ["ano, A >= 0", "spo, A < 0"]
    assert str(pair) == property_table(pair)
