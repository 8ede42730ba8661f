"""The objective of single tokens, against the paper's formulas and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from sb3_ano.llm.objective import RatioSums, shaped_objective

EPS = 0.2


def f_of_the_paper(ratio: np.ndarray) -> np.ndarray:
    """Eq. f_ANO in powers of two, float64."""

    def phi(z):
        return np.log1p(4.0**-z) + 4.0 / (1.0 + 2.0**-z)

    x = (ratio - 1.0) / EPS
    return 1.0 + EPS * 45.0 / (32.0 * math.log(2.0)) * (phi(-1.0) - phi(x - 1.0))


def objective_and_slope(ratio, advantage, **options):
    log_ratio = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    objective = shaped_objective(log_ratio, torch.tensor(advantage), "ano", eps_low=EPS, eps_high=EPS, **options)
    objective.sum().backward()
    return objective.detach(), log_ratio.grad / torch.tensor(ratio)


def test_f_and_g_are_the_papers():
    ratio = np.linspace(0.05, 3.0, 60)
    for_gains, _ = objective_and_slope(ratio, 1.0)
    for_losses, _ = objective_and_slope(ratio, -1.0)
    np.testing.assert_allclose(for_gains, f_of_the_paper(ratio), rtol=1e-9)
    np.testing.assert_allclose(for_losses, -(2.0 - f_of_the_paper(2.0 - ratio)), rtol=1e-9)


def test_what_should_become_rarer_becomes_rarer_beyond_the_radius_and_in_the_official_code_does_not():
    _, papers = objective_and_slope([1.25, 1.5, 2.0], -1.0)
    _, official = objective_and_slope([1.25, 1.5, 2.0], -1.0, dual="official_rlhf")
    assert (papers < 0).all()
    assert (official > 0).all()


def test_slopes_below_the_radius():
    """At r = 0.6 the official code has f'(0.6) = 2.21 in the place of g'(0.6) = f'(1.4) = -0.69."""
    _, papers = objective_and_slope([0.6], -1.0)
    _, official = objective_and_slope([0.6], -1.0, dual="official_rlhf")
    assert papers.item() == pytest.approx(0.69, abs=0.005)
    assert official.item() == pytest.approx(-2.21, abs=0.005)


def test_the_official_dual_is_f_for_both_signs():
    ratio = np.linspace(0.05, 3.0, 60)
    for advantage in (1.0, -1.0):
        objective, _ = objective_and_slope(ratio, advantage, dual="official_rlhf")
        np.testing.assert_allclose(objective, advantage * f_of_the_paper(ratio), rtol=1e-9)


def test_each_sign_has_its_own_radius():
    log_ratio = torch.tensor([0.1, 0.1], dtype=torch.float64)
    for dual in ("paper", "official_rlhf"):
        low, high = shaped_objective(log_ratio, torch.tensor([-1.0, 1.0]), "spo", eps_low=0.1, eps_high=0.4, dual=dual)
        deviation = math.expm1(0.1)
        assert high.item() == pytest.approx(1.0 + deviation - deviation**2 / (2 * 0.4))
        bent = deviation**2 / (2 * 0.1) * (1.0 if dual == "paper" else -1.0)
        assert low.item() == pytest.approx(-(1.0 + deviation + bent))


def test_ratios_are_counted_where_the_mask_says():
    ratio = torch.tensor([[1.0, 1.3, 0.5], [1.1, 9.0, 0.7]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    metrics = RatioSums.of(ratio.log(), mask, eps_low=0.25, eps_high=0.2).metrics()
    seen = [1.0, 1.3, 0.5, 1.1, 0.7]
    assert metrics == {
        "ratio/mean": pytest.approx(4.6 / 5),
        "ratio/max": pytest.approx(1.3),
        "ratio/outside_low": pytest.approx(2 / 5),
        "ratio/outside_high": pytest.approx(1 / 5),
        "approx_kl": pytest.approx(sum(r - 1 - math.log(r) for r in seen) / 5, rel=1e-5),
    }


def test_counts_of_parts_add_up():
    log_ratio, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.3
    whole, *parts = (
        RatioSums.of(log_ratio[rows], mask[rows], eps_low=0.2, eps_high=0.3) for rows in (slice(6), slice(2), slice(2, 6))
    )
    together = RatioSums(parts[0].sums + parts[1].sums, torch.cat([part.maximum for part in parts]))
    assert together.metrics() == pytest.approx(whole.metrics(), rel=1e-5)


def test_nothing_but_padding_has_no_ratios():
    assert set(RatioSums.of(torch.ones(2, 3), torch.zeros(2, 3), eps_low=0.2, eps_high=0.2).metrics().values()) == {0.0}
