"""The statements of docs/theory.md, checked exactly on small tabular MDPs."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from sb3_ano.shaping import SHAPINGS, measure, surrogate

EPS = 0.2
MDP_SEEDS = st.integers(0, 10_000)


class MDP(NamedTuple):
    """A random MDP with a policy; ``transitions`` has the shape (states, actions, states)."""

    transitions: np.ndarray
    rewards: np.ndarray
    start: np.ndarray
    discount: float

    def _chain(self, policy):
        return np.eye(len(self.start)) - self.discount * np.einsum("sa,sat->st", policy, self.transitions)

    def values(self, policy):
        return np.linalg.solve(self._chain(policy), (policy * self.rewards).sum(axis=1))

    def performance(self, policy):
        return self.start @ self.values(policy)

    def advantages(self, policy):
        values = self.values(policy)
        return self.rewards + self.discount * self.transitions @ values - values[:, None]

    def visits(self, policy):
        """Discounted state distribution, which sums to 1."""
        return (1 - self.discount) * np.linalg.solve(self._chain(policy).T, self.start)


def random_problem(seed, discount=None):
    """Return an MDP of four states and three actions, and two policies."""
    rng = np.random.default_rng(seed)
    discount = rng.uniform(0.02, 0.3) if discount is None else discount
    transitions = rng.dirichlet(np.full(4, 0.5), size=(4, 3))
    mdp = MDP(transitions, rng.normal(size=(4, 3)), rng.dirichlet(np.ones(4)), discount)
    return mdp, *(rng.dirichlet(np.full(3, 0.7), size=4) * 0.98 + 0.02 / 3 for _ in range(2))


def objective(ratio, advantages, shaping, low, high):
    return surrogate(torch.log(ratio), advantages, shaping, eps_low=low, eps_high=high)


def penalty_coefficient(mdp, policy):
    """Return beta of Theorem 1 of Schulman et al. (2015), which Theorem 3.1 rests on."""
    return 4 * mdp.discount * np.abs(mdp.advantages(policy)).max() / (1 - mdp.discount) ** 2


def expected(mdp, policy, elementwise):
    """Return the mean over the policy's states and actions."""
    return (mdp.visits(policy)[:, None] * policy * elementwise).sum()


def penalty(beta, alpha, log_ratio):
    return beta * alpha / 2 * log_ratio.max() + beta * (1 - alpha) / 2 * (-log_ratio).max()


@settings(max_examples=200, deadline=None)
@given(MDP_SEEDS, st.floats(0.0, 1.0), st.floats(0.0, 0.95), st.floats(0.01, 1.0))
def test_theorem_3_1_the_penalized_surrogate_is_a_lower_bound(seed, alpha, discount, change):
    mdp, old, new = random_problem(seed, discount)
    new = (1 - change) * old + change * new
    surrogate_value = mdp.performance(old) + expected(mdp, old, new / old * mdp.advantages(old)) / (1 - discount)
    bound = surrogate_value - penalty(penalty_coefficient(mdp, old), alpha, np.log(new / old))
    assert mdp.performance(new) >= bound - 1e-9
    assert expected(mdp, old, mdp.advantages(old)) == pytest.approx(0.0, abs=1e-12)  # equality if nothing changes


def test_theorem_3_1_needs_its_penalty():
    above = 0
    for seed in range(50):
        mdp, old, new = random_problem(seed, 0.9)
        above += mdp.performance(new) < mdp.performance(old) + expected(mdp, old, new / old * mdp.advantages(old)) / 0.1
    assert 10 <= above <= 40


@pytest.mark.parametrize("shaping", [*SHAPINGS, ("ano", "ppo")], ids=str)
@given(MDP_SEEDS)
def test_definition_3_2_the_objective_is_zero_at_first_and_a_lower_bound_of_the_linear_one(shaping, seed):  # Corollary 3.3
    mdp, old, new = random_problem(seed, 0.9)
    advantages, ratio = torch.from_numpy(mdp.advantages(old)), torch.from_numpy(new / old)
    at_first = objective(torch.ones_like(ratio), advantages, shaping, EPS, 0.3)
    assert expected(mdp, old, at_first.numpy()) == pytest.approx(0.0, abs=1e-12)
    assert (objective(ratio, advantages, shaping, EPS, 0.3) <= ratio * advantages + 1e-12).all()


def best_policy(mdp, old, low, high, shaping):
    """Maximize the objective of Definition 3.2 over all policies whose ratios are in [low, high], state by state."""
    best = np.empty_like(old)
    for state, (weights, advantages) in enumerate(zip(old, torch.from_numpy(mdp.advantages(old)), strict=True)):

        def loss(ratios, weights=weights, advantages=advantages):
            ratios = torch.tensor(ratios, requires_grad=True)
            value = -(torch.from_numpy(weights) * objective(ratios, advantages, shaping, 1.0, 1.0)).sum()
            value.backward()
            return value.item(), ratios.grad.numpy()

        constraint = {"type": "eq", "fun": lambda ratios, w=weights: w @ ratios - 1, "jac": lambda _, w=weights: w}
        start, bounds = np.ones(len(weights)), [(low, high)] * len(weights)
        solved = optimize.minimize(loss, start, jac=True, bounds=bounds, constraints=constraint, options={"ftol": 1e-12})
        best[state] = np.clip(solved.x, low, high) * weights
    return best / best.sum(axis=1, keepdims=True)


def safe_interval(mdp, old, alpha, shaping, lows, highs):
    """Return the interval of Theorem 3.4 from a grid, its maximizer, and the improvement that the bound guarantees."""
    beta, found = penalty_coefficient(mdp, old), []
    for low in lows:
        for high in highs:
            new = best_policy(mdp, old, low, high, shaping)
            advantages = torch.from_numpy(mdp.advantages(old))
            reached = objective(torch.from_numpy(new / old), advantages, shaping, 1.0, 1.0).numpy()
            guaranteed = expected(mdp, old, reached) / (1 - mdp.discount)
            guaranteed -= beta * alpha / 2 * math.log(high) - beta * (1 - alpha) / 2 * math.log(low)
            found.append((guaranteed, low, high, new))
    return max(found, key=lambda entry: entry[0])


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_theorem_3_4_the_constrained_maximizer_improves(shaping):
    moved = 0
    for seed in range(8):
        mdp, old, _ = random_problem(seed)
        guaranteed, low, high, new = safe_interval(mdp, old, 0.2 + 0.08 * seed, shaping, [1, 0.8, 0.4], [1, 1.3, 1.8])
        assert guaranteed >= -1e-9  # the interval of one point, which keeps the policy, guarantees 0
        assert mdp.performance(new) - mdp.performance(old) >= guaranteed - 1e-6
        moved += low < 1 or high > 1
    assert moved >= 1  # a theorem about intervals of one point would say nothing


def test_theorem_3_4_guarantees_nothing_at_usual_discounts():
    mdp, old, _ = random_problem(0, 0.99)
    _, low, high, _ = safe_interval(mdp, old, 0.5, "identity", [1, 0.999, 0.9, 0.5], [1, 1.001, 1.1, 2])
    assert (low, high) == (1, 1)


def test_remark_3_5_symmetric_bounds():
    old, advantages, beta, alpha = np.array([0.2, 0.7, 0.1]), np.array([10.0, -2.0, -6.0]), 8.0, 0.96

    def penalized(policy):
        return policy @ advantages - penalty(beta, alpha, np.log(policy / old))

    new = np.array([0.2 * 1.6, 1 - 0.2 * 1.6 - 0.1 * 0.4, 0.1 * 0.4])
    # Stationary: no direction that keeps the sum, which the second action balances, changes the value.
    for action in (0, 2):
        direction = np.zeros(3)
        direction[[action, 1]] = 1e-6, -1e-6
        assert abs(penalized(new + direction) - penalized(new - direction)) / 2e-6 < 1e-6
    # It is no maximum, though: it is a minimum along the first action, and lies below the present policy.
    for step in (-0.05, 0.05):
        assert penalized(new + np.array([step, -step, 0.0])) > penalized(new)
    assert penalized(new) == pytest.approx(1.68 - 3.84 * math.log(1.6) - 0.16 * math.log(2.5))
    assert penalized(new) < penalized(old) == pytest.approx(0.0)
    assert penalized(np.array([0.98, 0.01, 0.01])) > 2.5


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.floats(0.2, 3.0), st.floats(0.1, 2.0)), min_size=1, max_size=3))
def test_proposition_4_1_vanishing_slopes_beyond_a_peak_need_an_inflection(bumps):
    # Slopes 1 - x times a positive, decaying factor: one peak at x = 1, and a slope that returns to 0.
    def shape(x):
        return sum(height / 2 * torch.expm1(-width * (x - 1).square()) / width for height, width in bumps)

    properties = measure(shape)
    assert properties.argmax == pytest.approx((1.0, 1.0), abs=1e-3)
    assert properties.slope_right == pytest.approx(0.0, abs=1e-6)
    assert properties.inflections >= 1


@pytest.mark.parametrize(
    ("shaping", "rewarded", "punished"), [("ppo", 0.0, -1.0), ("ano", 0.0, -45 / 16), ("spo", -94.4, -96.4)]
)
def test_negative_advantages_pull_outliers_back_and_never_let_go(shaping, rewarded, punished):
    # The derivative by the log-ratio in units of PPO's weight, which is the ratio: sign(A) h'(x).
    log_ratio = torch.tensor([3.0, 3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    surrogate(log_ratio, advantages, shaping, eps_low=EPS, eps_high=EPS).sum().backward()
    slopes = (log_ratio.grad / math.exp(3.0)).tolist()
    assert slopes == pytest.approx([rewarded, punished], abs=0.05 if shaping == "spo" else 1e-8)
