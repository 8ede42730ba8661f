"""The shapes, and the ways to name one."""

import functools

import pytest
import torch

from sb3_ano.shaping import (
    OBJECTIVES,
    ShapingPair,
    ano,
    as_pair,
    from_ratio,
    from_weight,
    is_importable,
    name_of,
    ppo,
    resolve,
    spo,
    surrogate,
    with_radius,
)
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
    pair = from_ratio(f_spo, lambda ratio, eps: torch.maximum(ratio, 1 - eps))
    torch.testing.assert_close(pair.f(x), spo(x))
    torch.testing.assert_close(pair.g(x), ppo(x))


def test_from_ratio_takes_constants_that_do_not_scale_with_the_radius():
    def f_soft(ratio, eps):
        return 1 + torch.tanh(ratio - 1) + 0 * eps

    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    for eps in (0.1, 0.3):
        torch.testing.assert_close(from_ratio(f_soft)(x, eps), torch.tanh(eps * x) / eps)
    # g is the reflection of f.
    log_ratio = torch.linspace(-3, 3, 61, dtype=torch.float64)
    found = surrogate(log_ratio, -torch.ones_like(log_ratio), from_ratio(f_soft), eps_low=0.1, eps_high=0.3)
    torch.testing.assert_close(found, -(2 - f_soft(2 - log_ratio.exp(), 0.1)))


def test_from_weight_is_the_shape_whose_slope_is_the_weight_over_the_ratio():
    def weight(ratio, eps):
        return ratio / (1 + eps * (ratio - 1).abs())

    log_ratio = torch.linspace(-9, 9, 181, dtype=torch.float64, requires_grad=True)
    for advantage in (1.5, -0.5):
        advantages = torch.full_like(log_ratio, advantage)
        objective = surrogate(log_ratio, advantages, from_weight(weight), eps_low=0.1, eps_high=0.3)
        (gradient,) = torch.autograd.grad(objective.sum(), log_ratio)
        eps = 0.3 if advantage > 0 else 0.1
        expected = weight(log_ratio.detach().exp(), eps)
        torch.testing.assert_close(gradient, advantage * expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(objective, advantage * (1 + expected * log_ratio), rtol=1e-12, atol=0)

    x = torch.linspace(-4, 4, 81, dtype=torch.float64, requires_grad=True)
    for shape, sign in zip(from_weight(weight), (1, -1), strict=True):
        (slope,) = torch.autograd.grad(shape(x, 0.2).sum(), x)
        ratio = 1 + sign * 0.2 * x.detach()
        torch.testing.assert_close(slope, weight(ratio, 0.2) / ratio, rtol=1e-12, atol=0)


def test_with_radius_gives_each_sample_a_radius_of_its_own():
    def radius(old_log_prob, advantages, eps_low, eps_high):
        return torch.where(advantages >= 0, 2 * eps_high, eps_low) * old_log_prob.exp()

    generator = torch.Generator().manual_seed(0)
    log_ratio, old_log_prob, advantages = torch.randn(3, 500, dtype=torch.float64, generator=generator)
    radii = torch.where(advantages >= 0, 0.6, 0.1) * old_log_prob.exp()
    for shape in ("ano", "sapo", "cispo", ("ppo", "spo")):
        found = surrogate(
            log_ratio, advantages, with_radius(shape, radius), eps_low=0.1, eps_high=0.3, old_log_prob=old_log_prob
        )
        plain = from_weight(OBJECTIVES["gppo"].shape.f.function) if shape == "cispo" else shape
        expected = surrogate(log_ratio, advantages, plain, eps_low=radii, eps_high=radii)
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"old_log_prob=None is not allowed with shaping='dppo', whose radius depends on it"):
        surrogate(log_ratio, advantages, "dppo", eps_low=0.1, eps_high=0.3)
    with pytest.raises(ValueError, match=r"old_log_prob has the shape \(500, 1\) and log_ratio \(500,\)"):
        surrogate(log_ratio, advantages, "dppo", eps_low=0.1, eps_high=0.3, old_log_prob=old_log_prob[:, None])


def test_of_a_name_that_stands_for_two_shapes_a_pair_takes_the_one_of_that_place():
    cispo, gppo = OBJECTIVES["cispo"].shape, OBJECTIVES["gppo"].shape
    assert as_pair(("cispo", "gppo")) == ShapingPair(cispo.f, gppo.g)
    assert name_of(as_pair(("cispo", "ano"))) == ["cispo", "ano"]
    assert is_importable(("cispo", "ano"))
    assert name_of(cispo) == "cispo"
    assert is_importable(cispo)
    assert name_of(from_weight(pseudo_huber)) == ["weight(tests.common:pseudo_huber)"] * 2
