"""PAPO's and SPO's losses against tables worked outside the code."""

import types

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ano import PAPO, SPO
from sb3_ano.algorithms.papo import TDRolloutBuffer
from sb3_ano.algorithms.update import ClipRange
from tests.common import SMALL
from tests.tiny_envs import BOX_OBSERVATIONS

REGION = ClipRange(torch.tensor(0.2, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64))

# Worked with a pocket calculator: three samples, eps = 0.2.
RATIO = [1.5, 0.9, 0.5]
ADVANTAGES = [1.0, -0.5, -1.0]
TD_ERRORS = [0.4, -0.2, 0.3]
VALUES = [2.0, 1.0, 3.0]


def samples() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        td_errors=torch.tensor(TD_ERRORS, dtype=torch.float64), old_values=torch.tensor(VALUES, dtype=torch.float64)
    )


def loss_of(model, gamma: float = 0.99) -> torch.Tensor:
    model.gamma = gamma
    log_ratio = torch.tensor(RATIO, dtype=torch.float64).log()
    return model.policy_loss(log_ratio, torch.tensor(ADVANTAGES, dtype=torch.float64), REGION, samples())


# J        = mean(min(1.5, 1.2), min(-0.45, -0.45), min(-0.5, -0.8)) = (1.2 - 0.45 - 0.8) / 3 = -0.05 / 3
# with w1 = w2 = 0.005, per sample (r - 1) d^2 + 2 w2 r d, unclipped and clipped:
#   1: 0.5 * 0.16 + 0.01 * 1.5 * 0.4 = 0.086          0.2 * 0.16 + 0.01 * 1.2 * 0.4 = 0.0368        -> 0.0368
#   2: -0.1 * 0.04 + 0.01 * 0.9 * -0.2 = -0.0058      the same                                      -> -0.0058
#   3: -0.5 * 0.09 + 0.01 * 0.5 * 0.3 = -0.0435       -0.2 * 0.09 + 0.01 * 0.8 * 0.3 = -0.0156      -> -0.0435
# MV       = 0.005 * (0.0368 - 0.0058 - 0.0435) / 3 = 0.005 * -0.0125 / 3
# D^2 + 2 |D| V = 1 + 4 = 5, 0.25 + 1 = 1.25, 1 + 6 = 7; mean 13.25 / 3
J = -0.05 / 3
MEAN_VARIANCE = 0.005 * -0.0125 / 3
SECOND_MOMENT = 13.25 / 3
MEAN_VALUE = 2.0


def test_papo_equals_the_hand_worked_table_where_the_bracket_counts():
    # gamma = 0: no bias, so J + mean V = 1.98 > 0 and the bracket is J^2 + 4 J.
    bracket = J**2 + 2 * MEAN_VALUE * J
    variance_mean = 0.005 * (1 - 0.0) / 7 * SECOND_MOMENT - bracket
    expected = -(J - 7 * (MEAN_VARIANCE + variance_mean))
    assert loss_of(PAPO("MlpPolicy", "CartPole-v1", **SMALL), gamma=0.0).item() == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.50332639, rel=1e-6)


def test_papo_equals_the_hand_worked_table_where_the_bracket_is_zero():
    # gamma = 0.99: the bias 4 gamma KL max(D) / (1 - gamma)^2 with KL = mean(r - 1 - log r) = 0.0981 exceeds J + mean V.
    variance_mean = 0.005 * (1 - 0.99**2) / 7 * SECOND_MOMENT
    expected = -(J - 7 * (MEAN_VARIANCE + variance_mean))
    assert loss_of(PAPO("MlpPolicy", "CartPole-v1", **SMALL)).item() == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.0169602917, rel=1e-6)


def test_the_coefficients_of_papo_enter_where_the_formula_has_them():
    model = PAPO("MlpPolicy", "CartPole-v1", **SMALL, k=3.0, omega1=0.01, omega2=0.5)
    # per sample with 2 w2 = 1, unclipped | clipped:
    #   0.08 + 0.6 | 0.032 + 0.48 -> 0.512      -0.004 - 0.18 -> -0.184      -0.045 + 0.15 | -0.018 + 0.24 -> 0.105
    mean_variance = 0.01 * (0.512 - 0.184 + 0.105) / 3
    variance_mean = 0.01 * (1 - 0.99**2) / 3 * SECOND_MOMENT
    assert loss_of(model).item() == pytest.approx(-(J - 3 * (mean_variance + variance_mean)), rel=1e-12)


def gradient_of(model, gamma: float) -> list[float]:
    model.gamma = gamma
    log_ratio = torch.tensor(RATIO, dtype=torch.float64).log().requires_grad_()
    loss = model.policy_loss(log_ratio, torch.tensor(ADVANTAGES, dtype=torch.float64), REGION, samples())
    return torch.autograd.grad(loss, log_ratio)[0].tolist()


# d/dr of the terms above: rD has slope D where the unclipped branch is the smaller one, which it is for sample 2 only (1 and 3
# are clipped, at 1.2 and 0.8); (r - 1) d^2 + 2 w2 r d has slope d^2 + 2 w2 d there, which are samples 2 and 3.
#   dJ/dr  = [0, -0.5, 0] / 3
#   dMV/dr = 0.005 [0, 0.04 - 0.002, 0.09 + 0.003] / 3
# and d loss/d log r = r (-(1 + k bracket') dJ/dr + k dMV/dr), with bracket' = d bracket/dJ = 2 J + 2 V or 0.
@pytest.mark.parametrize(("gamma", "bracket_slope"), [(0.0, 2 * J + 2 * MEAN_VALUE), (0.99, 0.0)])
def test_the_gradient_of_papo_equals_the_hand_worked_table(gamma, bracket_slope):
    d_mean = np.array([0.0, -0.5, 0.0]) / 3
    d_mean_variance = 0.005 * np.array([0.0, 0.038, 0.093]) / 3
    expected = np.array(RATIO) * (-(1 + 7 * bracket_slope) * d_mean + 7 * d_mean_variance)
    found = gradient_of(PAPO("MlpPolicy", "CartPole-v1", **SMALL), gamma)
    assert found == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 25.0, 1e4])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_papo_is_finite_for_every_finite_log_ratio(log_ratio, advantage):
    model = PAPO("MlpPolicy", "CartPole-v1", **SMALL)
    region = ClipRange(torch.tensor(0.2), torch.tensor(0.2))
    at = torch.tensor([log_ratio, 0.0], requires_grad=True)
    minibatch = types.SimpleNamespace(td_errors=torch.tensor([0.3, -0.1]), old_values=torch.tensor([1.0, 2.0]))
    loss = model.policy_loss(at, torch.tensor([advantage, 1.0]), region, minibatch)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, at)[0].isfinite().all()


def test_spo_equals_the_hand_worked_table():
    # r A - |A| (r - 1)^2 / 0.4: 1.5 - 0.625 = 0.875; -0.45 - 0.0125 = -0.4625; -0.5 - 0.625 = -1.125
    expected = -(0.875 - 0.4625 - 1.125) / 3
    assert loss_of(SPO("MlpPolicy", "CartPole-v1", **SMALL)).item() == pytest.approx(expected, rel=1e-12)


def test_td_errors_are_the_one_step_errors_of_the_rollout():
    steps, n_envs, gamma = 20, 3, 0.9
    generator = np.random.default_rng(0)
    rewards = generator.normal(size=(steps, n_envs)).astype(np.float32)
    values = generator.normal(size=(steps, n_envs)).astype(np.float32)
    starts = (generator.random((steps, n_envs)) < 0.2).astype(np.float32)
    last_values, dones = generator.normal(size=n_envs).astype(np.float32), np.array([True, False, False])

    buffer = TDRolloutBuffer(steps, BOX_OBSERVATIONS, spaces.Discrete(2), "cpu", gae_lambda=0.8, gamma=gamma, n_envs=n_envs)
    plain = RolloutBuffer(steps, BOX_OBSERVATIONS, spaces.Discrete(2), "cpu", gae_lambda=0.8, gamma=gamma, n_envs=n_envs)
    for each in (buffer, plain):
        for t in range(steps):
            observation = np.full((n_envs, 4), t, np.float32)
            each.add(observation, np.zeros((n_envs, 1)), rewards[t], starts[t], torch.tensor(values[t]), torch.zeros(n_envs))
        each.compute_returns_and_advantage(torch.tensor(last_values), dones)

    following = np.vstack([values[1:], last_values])
    alive = 1.0 - np.vstack([starts[1:], dones.astype(np.float32)])
    expected = rewards + gamma * following * alive - values
    # Samples come in random order; observation and value say which they are.
    order = {
        (int(o), round(float(v), 5)): e
        for o, v, e in zip(np.repeat(range(steps), n_envs), values.ravel(), expected.ravel(), strict=True)
    }
    seen = 0
    for minibatch in buffer.get(16):
        for observation, value, error in zip(minibatch.observations, minibatch.old_values, minibatch.td_errors, strict=True):
            assert error.item() == pytest.approx(order[int(observation[0]), round(value.item(), 5)], abs=1e-5)
            seen += 1
    assert seen == steps * n_envs
    np.testing.assert_array_equal(buffer.advantages, plain.advantages)


def test_an_epoch_beyond_the_kl_limit_is_the_last_one():
    free = PAPO("MlpPolicy", "CartPole-v1", **{**SMALL, "n_epochs": 30}, learning_rate=0.01, max_epoch_kl=None).learn(32)
    limited = PAPO("MlpPolicy", "CartPole-v1", **{**SMALL, "n_epochs": 30}, learning_rate=0.01, max_epoch_kl=1e-3).learn(32)
    assert free._n_updates == 30
    assert 1 < limited._n_updates < 30
    assert limited.logger.name_to_value["train/approx_kl"] > 1e-3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "k=0 .*allowed are"),
        ({"omega1": -0.1}, ValueError, "omega1=-0.1 .*allowed are"),
        ({"omega2": "much"}, TypeError, "omega2='much' is of type str; allowed are"),
        ({"max_epoch_kl": 0.0}, ValueError, "max_epoch_kl=0.0 .*allowed are"),
    ],
)
def test_bad_coefficients_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        PAPO("MlpPolicy", "CartPole-v1", **SMALL, **arguments)
