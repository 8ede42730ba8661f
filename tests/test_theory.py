"""The statements of docs/theory.md, checked exactly on small tabular MDPs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg, optimize

from sb3_ano.shaping import measure, surrogate

MDP_SEEDS = st.integers(0, 10_000)

#: Objectives with ``h(x) <= x``: the paper's, and published ones.
ENCLOSED = ["ano", "spo", "ppo", "identity", "leaky_ppo", "ppo_rb"]


class Problem:
    """A random MDP of four states and three actions, a policy, and another; transitions are (states, actions, states)."""

    def __init__(self, seed, discount=None):
        rng = np.random.default_rng(seed)
        self.discount = rng.uniform(0.02, 0.3) if discount is None else discount
        self.transitions = rng.dirichlet(np.full(4, 0.5), size=(4, 3))
        self.rewards, self.start = rng.normal(size=(4, 3)), rng.dirichlet(np.ones(4))
        self.old, self.new = (rng.dirichlet(np.full(3, 0.7), size=4) * 0.98 + 0.02 / 3 for _ in range(2))
        self.values, self.visits = self.solve(self.old)
        self.advantages = self.rewards + self.discount * self.transitions @ self.values - self.values[:, None]
        # Of Theorem 1 of Schulman et al. (2015), which Theorem 3.1 rests on.
        self.beta = 4 * self.discount * np.abs(self.advantages).max() / (1 - self.discount) ** 2

    def solve(self, policy):
        """Return the values of a policy, and its discounted state distribution, which sums to 1."""
        chain = np.eye(4) - self.discount * np.einsum("sa,sat->st", policy, self.transitions)
        values = np.linalg.solve(chain, (policy * self.rewards).sum(axis=1))
        return values, (1 - self.discount) * np.linalg.solve(chain.T, self.start)

    def improvement(self, policy):
        return self.start @ (self.solve(policy)[0] - self.values)

    def expected(self, elementwise):
        """Return the mean over the old policy's states and actions."""
        return (self.visits[:, None] * self.old * elementwise).sum()


def objective(log_ratio, advantages, shaping, low=1.0, high=1.0):
    return surrogate(torch.as_tensor(log_ratio), torch.from_numpy(advantages), shaping, eps_low=low, eps_high=high)


def penalty(beta, alpha, log_ratio):
    return beta * alpha / 2 * log_ratio.max() + beta * (1 - alpha) / 2 * (-log_ratio).max()


@settings(max_examples=200, deadline=None)
@given(MDP_SEEDS, st.floats(0.0, 1.0), st.floats(0.0, 0.95), st.floats(0.01, 1.0))
def test_theorem_3_1_the_penalized_surrogate_is_a_lower_bound(seed, alpha, discount, change):
    mdp = Problem(seed, discount)
    ratio = (1 - change) + change * mdp.new / mdp.old
    bound = mdp.expected(ratio * mdp.advantages) / (1 - discount) - penalty(mdp.beta, alpha, np.log(ratio))
    assert mdp.improvement(ratio * mdp.old) >= bound - 1e-9
    assert mdp.expected(mdp.advantages) == pytest.approx(0.0, abs=1e-12)  # equality if nothing changes


def test_theorem_3_1_needs_its_penalty():
    problems = [Problem(seed, 0.9) for seed in range(50)]
    above = [mdp.improvement(mdp.new) < mdp.expected(mdp.new / mdp.old * mdp.advantages) / 0.1 for mdp in problems]
    assert 10 <= sum(above) <= 40


@pytest.mark.parametrize("shaping", [*ENCLOSED, ("ano", "ppo")], ids=str)
@given(MDP_SEEDS)
def test_definition_3_2_the_objective_is_zero_at_first_and_a_lower_bound_of_the_linear_one(shaping, seed):  # Corollary 3.3
    mdp = Problem(seed, 0.9)
    log_ratios = np.zeros((4, 3)), np.log(mdp.new / mdp.old)
    at_first, later = (objective(log_ratio, mdp.advantages, shaping, 0.2, 0.3) for log_ratio in log_ratios)
    assert mdp.expected(at_first.numpy()) == pytest.approx(0.0, abs=1e-12)
    assert (later.numpy() <= mdp.new / mdp.old * mdp.advantages + 1e-12).all()


def safe_interval(mdp, alpha, shaping, lows, highs):
    """Return the interval of Theorem 3.4 from a grid, its maximizer, and the improvement that the bound guarantees."""
    found = []

    def loss(ratios):
        log_ratio = torch.tensor(np.log(ratios).reshape(4, 3), requires_grad=True)
        value = -(torch.from_numpy(mdp.old) * objective(log_ratio, mdp.advantages, shaping)).sum()
        value.backward()
        return value.item(), log_ratio.grad.numpy().flatten() / ratios

    for low, high in itertools.product(lows, highs):
        sums = optimize.LinearConstraint(linalg.block_diag(*mdp.old), 1, 1)
        options = {"bounds": [(low, high)] * 12, "constraints": sums, "options": {"ftol": 1e-12}}
        new = np.clip(optimize.minimize(loss, np.ones(12), jac=True, **options).x, low, high).reshape(4, 3) * mdp.old
        new /= new.sum(axis=1, keepdims=True)
        reached = mdp.expected(objective(np.log(new / mdp.old), mdp.advantages, shaping).numpy()) / (1 - mdp.discount)
        found.append((reached - penalty(mdp.beta, alpha, np.log([low, high])), low, high, new))
    return max(found, key=lambda entry: entry[0])


@pytest.mark.parametrize("shaping", ENCLOSED[:4])
def test_theorem_3_4_the_constrained_maximizer_improves(shaping):
    moved = 0
    for seed in range(8):
        mdp = Problem(seed)
        guaranteed, low, high, new = safe_interval(mdp, 0.2 + 0.08 * seed, shaping, [1, 0.8, 0.4], [1, 1.3, 1.8])
        assert guaranteed >= -1e-9  # the interval of one point, which keeps the policy, guarantees 0
        assert mdp.improvement(new) >= guaranteed - 1e-6
        moved += low < 1 or high > 1
    assert moved >= 1  # a theorem about intervals of one point would say nothing


def test_theorem_3_4_guarantees_nothing_at_usual_discounts():
    _, *interval, _ = safe_interval(Problem(0, 0.99), 0.5, "identity", [1, 0.999, 0.9, 0.5], [1, 1.001, 1.1, 2])
    assert interval == [1, 1]


def test_remark_3_5_symmetric_bounds():
    old, advantages, beta, alpha = np.array([0.2, 0.7, 0.1]), np.array([10.0, -2.0, -6.0]), 8.0, 0.96

    def penalized(policy):
        return policy @ advantages - penalty(beta, alpha, np.log(policy / old))

    new = np.array([0.2 * 1.6, 0.64, 0.1 * 0.4])
    # Stationary: no direction that keeps the sum, which the second action balances, changes the value.
    for direction in np.array([[1e-6, -1e-6, 0.0], [0.0, -1e-6, 1e-6]]):
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
    surrogate(log_ratio, advantages, shaping, eps_low=0.2, eps_high=0.2).sum().backward()
    slopes = (log_ratio.grad / math.exp(3.0)).tolist()
    assert slopes == pytest.approx([rewarded, punished], abs=0.05 if shaping == "spo" else 1e-8)
