"""The surrogate against the paper's equations, written without h."""

import math

import mpmath
import numpy as np
import pytest
import torch

from sb3_ano.shaping import ratio_form, surrogate

SAMPLES = 100_000


def phi(z):
    """Of tensors, and of numbers with many digits."""
    log1p = torch.log1p if isinstance(z, torch.Tensor) else mpmath.log1p
    return log1p(2.0 ** (-2.0 * z)) + 4.0 / (1.0 + 2.0 ** (-z))


PAPER_F = {
    "ppo": lambda r, eps: torch.minimum(r, 1 + eps),
    "spo": lambda r, eps: -((r - 1 - eps) ** 2) / (2 * eps) + eps / 2 + 1,
    "ano": lambda r, eps: 45 * eps / (32 * math.log(2)) * (phi(0.0 * r - 1.0) - phi((r - 1 - eps) / eps)) + 1,
    "identity": lambda r, eps: r,
}


def paper_objective(log_ratio, advantages, f, eps_low, eps_high):
    """``min(g(r) A, f(r) A)`` with ``g(r) = 2 - f(2 - r)``; f with the upper radius, g with the lower."""
    r = log_ratio.exp()
    return torch.minimum((2 - f(2 - r, eps_low)) * advantages, f(r, eps_high) * advantages)


def random_samples():
    random = np.random.default_rng(0)
    radii = [random.uniform(0.05, 0.5, SAMPLES) for _ in range(2)]
    log_ratio, *others = map(torch.from_numpy, [random.uniform(-2, 2, SAMPLES), 3 * random.normal(size=SAMPLES), *radii])
    return log_ratio.requires_grad_(), *others


def value_and_gradient(objective, log_ratio):
    (gradient,) = torch.autograd.grad(objective.sum(), log_ratio)
    return objective.detach(), gradient


@pytest.mark.parametrize("name", PAPER_F)
def test_surrogate_equals_the_papers_objective(name):
    log_ratio, advantages, eps_low, eps_high = random_samples()
    expected = value_and_gradient(paper_objective(log_ratio, advantages, PAPER_F[name], eps_low, eps_high), log_ratio)
    found = value_and_gradient(surrogate(log_ratio, advantages, name, eps_low=eps_low, eps_high=eps_high), log_ratio)
    # Near a zero of value or gradient, either side keeps only the digits of what it subtracts: A f and A r f'.
    scale = advantages.abs() * torch.maximum(log_ratio.detach().exp(), torch.ones(())) / torch.minimum(eps_low, eps_high)
    for ours, papers in zip(found, expected, strict=True):
        error = (ours - papers).abs()
        assert (error <= 1e-12 * torch.maximum(papers.abs(), scale)).all()
        assert (error <= 1e-12 * papers.abs()).double().mean() > 0.999
        assert error.max() > 0 or name == "identity", "equal to the last bit: compared with itself?"


def mp_objective(log_ratio: float, advantage: float, name: str, eps: float):
    """Value and d/d log r in 60 digits."""

    def objective(x):
        r, e, f = mpmath.exp(x), mpmath.mpf(eps), PAPER_F[name]
        return min((2 - f(2 - r, e)) * advantage, f(r, e) * advantage)

    with mpmath.workdps(60):
        return objective(mpmath.mpf(log_ratio)), mpmath.diff(objective, mpmath.mpf(log_ratio))


@pytest.mark.parametrize("name", ["ano", "spo"])
@pytest.mark.parametrize("advantage", [1.7, -0.6])
@pytest.mark.parametrize("log_ratio", [-19.0, -8.0, -3.0, -1e-7, 1e-9, 1e-4, 2.0, 2.5, 5.0, 12.0, 19.0])
def test_surrogate_equals_mpmath_far_outside_the_region_and_next_to_one(name, advantage, log_ratio):
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    objective = surrogate(x, torch.tensor([advantage], dtype=torch.float64), name, eps_low=0.2, eps_high=0.2)
    value, gradient = (part.item() for part in value_and_gradient(objective, x))
    expected_value, expected_gradient = mp_objective(log_ratio, advantage, name, 0.2)
    assert value == pytest.approx(float(expected_value), rel=1e-12)
    # A redescended gradient is the product of a vanishing slope and a huge ratio.
    assert gradient == pytest.approx(float(expected_gradient), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PAPER_F)
@pytest.mark.parametrize("eps", [0.0, -0.1, 1e-6, 0.2, 5.0])
def test_surrogate_is_finite_for_every_finite_log_ratio_and_the_same_under_autocast(dtype, name, eps):
    log_ratio = torch.tensor([-1e4, -100, -1, -1e-3, 0, 1e-3, 1, 19, 20.5, 100, 1e4], dtype=dtype, requires_grad=True)
    for advantage in (-50.0, -1.0, 0.0, 1.0, 50.0):
        arguments = log_ratio, torch.full_like(log_ratio, advantage), name
        value, gradient = value_and_gradient(surrogate(*arguments, eps_low=eps, eps_high=eps), log_ratio)
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert value.isfinite().all()
        assert torch.equal(surrogate(*arguments, eps_low=max(eps, 1e-6), eps_high=max(eps, 1e-6)), value)
        assert not gradient[log_ratio > 20].any()  # beyond saturation
        # A half-precision gradient holds 6e4 at most; what it is the gradient of is computed in float32.
        assert gradient.isfinite().all() or dtype == torch.float16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(surrogate(*arguments, eps_low=eps, eps_high=eps), value)


def test_a_pair_gives_each_sign_of_the_advantage_its_own_shape_in_value_and_gradient():
    log_ratio = torch.tensor([1.0, 0.1, -1.0, 0.02], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, -1.0, -2.0], dtype=torch.float64)

    def breaks_far_out(x):  # as it would for the first sample, whose deviation is 8.6
        return x - torch.sqrt(5.0 - x) + 5.0**0.5

    radii = {"eps_low": 0.2, "eps_high": 0.2}
    objective = surrogate(log_ratio, advantages, ("ano", breaks_far_out), **radii)
    by_ano, by_other = (surrogate(log_ratio, advantages, shape, **radii) for shape in ("ano", breaks_far_out))
    assert by_other.isnan().tolist() == [True, False, False, False]
    assert torch.equal(objective, torch.where(advantages >= 0, by_ano, by_other))
    assert torch.autograd.grad(objective.sum(), log_ratio)[0].isfinite().all()


@pytest.mark.parametrize("name", PAPER_F)
def test_ratio_form_is_the_papers_f_and_its_reflection(name):
    r = torch.linspace(0.01, 4.0, 500, dtype=torch.float64)
    f, g = ratio_form(name, eps_low=0.1, eps_high=0.3)
    low, high = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(f(r), PAPER_F[name](r, high), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(g(r), 2 - PAPER_F[name](2 - r, low), rtol=1e-12, atol=1e-12)


def test_invalid_radii_are_rejected():
    for eps in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"eps_low={eps} is not a radius"):
            surrogate(torch.zeros(1), torch.ones(1), "ano", eps_low=eps, eps_high=0.2)
    with pytest.raises(ValueError, match="eps_high=0.0 is not a radius"):
        ratio_form("ano", eps_low=0.2, eps_high=0.0)


@pytest.mark.parametrize("advantages", [(64,), (64, 64), (1, 64), (3, 1)], ids=str)
def test_shapes_that_would_broadcast_to_another_are_rejected(advantages):
    log_ratio = torch.zeros(64, 1)
    for other in ({}, {"eps_high": torch.full(advantages, 0.2)}):
        tensor, radii = torch.ones(64, 1) if other else torch.ones(advantages), {"eps_low": 0.2, "eps_high": 0.2, **other}
        with pytest.raises(ValueError, match=r"(advantages|eps_high) has the shape \(.*\) and log_ratio \(64, 1\); allowed"):
            surrogate(log_ratio, tensor, "ano", **radii)


@pytest.mark.parametrize("shape", [(), (1, 1), (4, 1), (1, 3), (4, 3)], ids=str)
def test_one_advantage_or_radius_may_stand_for_a_whole_row_or_batch(shape):
    log_ratio = torch.linspace(-1, 1, 12).reshape(4, 3)
    advantages, eps = torch.full(shape, -2.0), torch.full(shape, 0.3)
    found = surrogate(log_ratio, advantages, "ano", eps_low=eps, eps_high=0.2)
    expected = surrogate(log_ratio.flatten(), torch.full((12,), -2.0), "ano", eps_low=0.3, eps_high=0.2)
    assert torch.equal(found, expected.reshape(4, 3))
