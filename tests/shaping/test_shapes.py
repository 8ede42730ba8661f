"""The shapes, and the ways to name one."""

import functools
import math
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sb3_ano.shaping import ShapingPair, ano, from_ratio, identity, is_importable, name_of, ppo, resolve, spo
from tests.common import pseudo_huber

deviations = st.floats(-1e3, 1e3, allow_nan=False)


def h(shape, x: float) -> float:
    return shape(torch.tensor(x, dtype=torch.float64)).item()


def slope(shape, x: float) -> float:
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(shape(at), at)[0].item()


@given(x=deviations)
def test_slope_of_ano_has_the_factored_form_of_the_appendix(x):
    z = min(max(x - 1.0, -500.0), 500.0)
    q = 2.0**-z
    if z > -200:  # q^4 overflows beyond
        expected = 45 / 16 * (q**3 + q**2 + 2 * q) / ((1 + q**2) * (1 + q) ** 2) * math.expm1(-z * math.log(2.0))
    else:
        expected = 45 / 16
    assert slope(ano, z + 1.0) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_slope_of_ano_keeps_its_digits_where_it_redescends():
    assert slope(ano, 50.0) < 0.0
    z = 40.0  # the leading terms of the appendix: 45/32 (2 * 2^-2z - 4 * 2^-z)
    assert slope(ano, 1.0 + z) == pytest.approx(45 / 32 * (2 * 2 ** (-2 * z) - 4 * 2**-z), rel=1e-9)


@given(x=st.floats(60.0, 1e6))
def test_ano_has_the_asymptotes_of_the_appendix(x):
    scale, phi_at_minus_one = 45 / (32 * math.log(2)), math.log(5) + 4 / 3
    assert h(ano, x) == pytest.approx(scale * (phi_at_minus_one - 4), rel=1e-12)
    assert h(ano, -x) == pytest.approx(45 / 16 * (-x - 1) + scale * phi_at_minus_one, rel=1e-12)


@given(x=deviations)
def test_ppo_spo_and_identity_are_their_formulas(x):
    assert h(ppo, x) == min(x, 1.0)
    assert h(spo, x) == pytest.approx(x - x * x / 2, rel=1e-12, abs=1e-12)
    assert h(identity, x) == x


def test_resolve_takes_names_paths_callables_and_pairs():
    assert resolve("ano") is ano
    assert resolve("sb3_ano.shaping:spo") is spo
    assert resolve(("ano", spo)) == ShapingPair(ano, spo)
    assert resolve(["torch:tanh", "ppo"]) == ShapingPair(torch.tanh, ppo)
    assert resolve(pseudo_huber) is resolve("tests.common:pseudo_huber") is pseudo_huber


@pytest.mark.parametrize(
    ("shaping", "error", "message"),
    [
        ("anno", ValueError, "shaping='anno' is unknown.*'ano'.*did you mean 'ano'"),
        ("no_such_module:h", ValueError, "shaping='no_such_module:h' cannot be imported"),
        ("math:no_such_function", ValueError, "cannot be imported"),
        ("math:pi", ValueError, "is a float; allowed are a callable"),
        (":f", ValueError, "shaping=':f' is unknown"),
        (".module:f", ValueError, "shaping='.module:f' cannot be imported"),
        ("__main__:h", ValueError, "main script"),
        (0.2, TypeError, "shaping=0.2 is not a shape; allowed are"),
        (("ano", "spo", "ppo"), TypeError, "or a pair"),
        (("ano", ("spo", "ppo")), TypeError, "or a pair"),
        (None, TypeError, "shaping=None"),
    ],
)
def test_resolve_says_what_is_wrong(shaping, error, message):
    with pytest.raises(error, match=message):
        resolve(shaping)


def test_only_functions_at_the_top_level_of_a_module_can_be_found_again():
    assert is_importable("ano")
    assert is_importable(ano)
    assert is_importable((pseudo_huber, "spo"))
    assert not is_importable(lambda x: x)
    assert not is_importable(functools.partial(pseudo_huber))
    assert not is_importable(from_ratio(lambda r, eps: r))
    assert name_of(ano) == "ano"
    assert name_of(torch.tanh) == "torch:tanh"  # review users U14
    assert is_importable(torch.tanh)
    assert name_of([pseudo_huber, "spo"]) == ["tests.common:pseudo_huber", "spo"]


def f_spo(ratio, eps):
    return -((ratio - 1 - eps) ** 2) / (2 * eps) + eps / 2 + 1


def test_from_ratio_recovers_the_shapes_of_the_papers_f_and_g():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(from_ratio(f_spo)(x), spo(x))
    pair = from_ratio(f_spo, lambda ratio, eps: torch.maximum(ratio, torch.full_like(ratio, 1 - eps)))
    torch.testing.assert_close(pair.f(x), spo(x))
    torch.testing.assert_close(pair.g(x), ppo(x))


@pytest.mark.parametrize(
    ("functions", "error", "message"),
    [
        ([lambda ratio, eps: 1 + torch.tanh(ratio - 1)], ValueError, r"f\(ratio, eps\) is not of the form"),
        ([f_spo, lambda ratio, eps: ratio**3], ValueError, r"g\(ratio, eps\) is not of the form"),
        ([lambda ratio: ratio], TypeError, r"f cannot be called as f\(ratio, eps\)"),
        (
            [f_spo, lambda ratio, eps: torch.minimum(ratio, 1 + eps)],
            TypeError,
            r"g cannot be called as g\(ratio, eps\) with a",
        ),
    ],
)
def test_from_ratio_rejects_functions_of_another_form(functions, error, message):
    with pytest.raises(error, match=message):
        from_ratio(*functions)


def test_a_pair_can_be_named_too(monkeypatch):
    module = types.ModuleType("my_pairs")
    module.pair = from_ratio(f_spo, f_spo)
    monkeypatch.setitem(sys.modules, "my_pairs", module)
    assert resolve("my_pairs:pair") is module.pair
    assert is_importable("my_pairs:pair")
