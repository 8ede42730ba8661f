"""The shapes, and the ways to name one."""

import functools

import pytest
import torch

from sb3_ano.shaping import ShapingPair, ano, from_ratio, is_importable, name_of, ppo, resolve, spo
from tests.common import pseudo_huber


def test_resolve_takes_names_paths_callables_and_pairs(monkeypatch):
    assert resolve("ano") is ano
    assert resolve("sb3_ano.shaping:spo") is spo
    assert resolve(("ano", spo)) == ShapingPair(ano, spo)
    assert resolve(["torch:tanh", "ppo"]) == ShapingPair(torch.tanh, ppo)
    assert resolve(pseudo_huber) is resolve("tests.common:pseudo_huber") is pseudo_huber
    monkeypatch.setattr("tests.common.pair", ShapingPair(ano, spo), raising=False)
    assert resolve("tests.common:pair") == (ano, spo)
    assert is_importable("tests.common:pair")


@pytest.mark.parametrize(
    ("shaping", "error", "message"),
    [
        ("anno", ValueError, "shaping='anno' is unknown; allowed are .*'ano'"),
        ("no_such_module:h", ValueError, "shaping='no_such_module:h' cannot be imported"),
        ("math:no_such_function", ValueError, "cannot be imported"),
        ("math:pi", TypeError, "shaping='math:pi' is not a shape; allowed are"),
        ("__main__:h", ValueError, "belongs to a main script"),
        (0.2, TypeError, "shaping=0.2 is not a shape; allowed are"),
        (("ano", "spo", "ppo"), TypeError, "or a pair"),
        (("ano", ("spo", "ppo")), TypeError, "or a pair"),
    ],
)
def test_resolve_says_what_is_wrong(shaping, error, message):
    with pytest.raises(error, match=message):
        resolve(shaping)


def test_only_functions_at_the_top_level_of_a_module_can_be_found_again():
    assert all(map(is_importable, ["ano", ano, (pseudo_huber, "spo"), torch.tanh]))
    others = [lambda x: x, functools.partial(pseudo_huber), from_ratio(lambda r, eps: r), torch.nn.Tanh()]
    assert not any(map(is_importable, others))
    assert name_of(ano) == "ano"
    assert name_of(torch.tanh) == "torch:tanh"
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
        ([lambda ratio, eps: ratio / (ratio > 0)], ValueError, "at x = -4 different radii"),
        ([lambda ratio, eps: torch.minimum(ratio, 1 + eps)], TypeError, "must be Tensor"),
    ],
)
def test_from_ratio_rejects_functions_of_another_form(functions, error, message):
    with pytest.raises(error, match=message):
        from_ratio(*functions)
