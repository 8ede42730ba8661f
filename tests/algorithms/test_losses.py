"""The losses of ANO, SPO and PAPO against tables worked outside the code, and what reaches them in a training."""

import types

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sb3_ano import ANO, PAPO, SPO
from tests.common import ALGORITHMS, SMALL
from tests.tiny_envs import BOX_OBSERVATIONS, tiny_vec_env

# Worked with a pocket calculator: three samples, eps = 0.2.
RATIO = [1.5, 0.9, 0.5]
ADVANTAGES = [1.0, -0.5, -1.0]
TD_ERRORS = [0.4, -0.2, 0.3]
VALUES = [2.0, 1.0, 3.0]


def doubles(values: float | list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_and_gradient(model, gamma: float = 0.99, low: float = 0.2, high: float = 0.2) -> tuple[float, np.ndarray]:
    """The loss of the three samples, and its gradient by each ratio."""
    model.gamma = gamma
    log_ratio = doubles(RATIO).log().requires_grad_()
    region = types.SimpleNamespace(low=doubles(low), high=doubles(high))
    samples = types.SimpleNamespace(
        td_errors=doubles(TD_ERRORS), old_values=doubles(VALUES), old_log_prob=torch.zeros(3, dtype=torch.float64)
    )
    loss = model.policy_loss(log_ratio, doubles(ADVANTAGES), region, samples)
    return loss.item(), torch.autograd.grad(loss, log_ratio)[0].numpy() / RATIO


def papo(**options) -> PAPO:
    return PAPO("MlpPolicy", "CartPole-v1", **SMALL, **options)


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
# d/dr: rD has slope D where the unclipped branch is the smaller one, which it is for sample 2 only (1 and 3 are clipped, at
# 1.2 and 0.8); (r - 1) d^2 + 2 w2 r d has slope d^2 + 2 w2 d there, which are samples 2 and 3.
D_MEAN = np.array([0.0, -0.5, 0.0]) / 3
D_MEAN_VARIANCE = 0.005 * np.array([0.0, 0.038, 0.093]) / 3


# gamma = 0: no bias, so J + mean V = 1.98 > 0 and the bracket J^2 + 2 V J counts, with d bracket/dJ = 2 J + 2 V.
# gamma = 0.7 and above: the bias 4 gamma KL max(D) / (1 - gamma)^2 with KL = mean(r - 1 - log r) = 0.0981 exceeds J + mean V.
@pytest.mark.parametrize(
    ("gamma", "counts", "value"), [(0.0, True, 0.50332639), (0.7, False, 0.0277833333), (0.99, False, 0.0169602917)]
)
def test_papo_equals_the_hand_worked_table(gamma, counts, value):
    bracket, slope = (J**2 + 2 * MEAN_VALUE * J, 2 * J + 2 * MEAN_VALUE) if counts else (0.0, 0.0)
    variance_mean = 0.005 * (1 - gamma**2) / 7 * SECOND_MOMENT - bracket
    loss, gradient = loss_and_gradient(papo(), gamma)
    assert loss == pytest.approx(-(J - 7 * (MEAN_VARIANCE + variance_mean)), rel=1e-12)
    assert loss == pytest.approx(value, rel=1e-6)
    assert gradient == pytest.approx(-(1 + 7 * slope) * D_MEAN + 7 * D_MEAN_VARIANCE, rel=1e-12, abs=1e-15)


def test_coefficients_and_radii_of_papo_enter_where_the_formula_has_them():
    # per sample with 2 w2 = 1 and 1 - 0.05, unclipped | clipped:
    #   0.08 + 0.6 | 0.032 + 0.48 -> 0.512   -0.004 - 0.18 | -0.002 - 0.19 -> -0.192   -0.045 + 0.15 | -0.0045 + 0.285 -> 0.105
    mean_variance = 0.01 * (0.512 - 0.192 + 0.105) / 3
    variance_mean = 0.01 * (1 - 0.99**2) / 3 * SECOND_MOMENT
    loss, _ = loss_and_gradient(papo(k=3.0, omega1=0.01, omega2=0.5), low=0.05)
    assert loss == pytest.approx(-((1.2 - 0.475 - 0.95) / 3 - 3 * (mean_variance + variance_mean)), rel=1e-12)
    # J = (1.3 - 0.45 - 0.9) / 3 with 1 + 0.3 and 1 - 0.1; MV: 0.3 * 0.16 + 0.01 * 1.3 * 0.4 = 0.0532, -0.0058, -0.0435
    loss, _ = loss_and_gradient(papo(), low=0.1, high=0.3)
    expected = -(-0.05 / 3 - 7 * (0.005 * (0.0532 - 0.0058 - 0.0435) / 3 + 0.005 * (1 - 0.99**2) / 7 * SECOND_MOMENT))
    assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("cls", "options"), [(SPO, {}), (ANO, {"shaping": "spo"})])
def test_spo_equals_the_hand_worked_table(cls, options):
    # r A - |A| (r - 1)^2 / (2 eps), with 0.25 above and 0.2 below:
    # 1.5 - 0.5 = 1; -0.45 - 0.0125 = -0.4625; -0.5 - 0.625 = -1.125
    loss, gradient = loss_and_gradient(cls("MlpPolicy", "CartPole-v1", **SMALL, **options), high=0.25)
    assert loss == pytest.approx(-(1.0 - 0.4625 - 1.125) / 3, rel=1e-12)
    # A - |A| (r - 1) / eps: 1 - 2; -0.5 + 0.25; -1 + 2.5
    assert gradient == pytest.approx(np.array([1.0, 0.25, -1.5]) / 3, rel=1e-12)


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 25.0, 1e4])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_papo_is_finite_for_every_finite_log_ratio(log_ratio, advantage):
    at = torch.tensor([log_ratio, 0.0], requires_grad=True)
    region = types.SimpleNamespace(low=torch.tensor(0.2), high=torch.tensor(0.2))
    minibatch = types.SimpleNamespace(td_errors=torch.tensor([0.3, -0.1]), old_values=torch.tensor([1.0, 2.0]))
    loss = papo().policy_loss(at, torch.tensor([advantage, 1.0]), region, minibatch)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, at)[0].isfinite().all()


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_a_loss_receives_the_radii_and_the_td_errors_of_the_rollout(cls):
    seen = []

    class Recording(cls):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            seen.append((clip_range.low.item(), clip_range.high.item(), samples))
            return super().policy_loss(log_ratio, advantages, clip_range, samples)

    env = tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(3), 3)  # episodes of 15 steps
    options = {**SMALL, "batch_size": 96, "n_epochs": 1, "normalize_advantage": False, "gamma": 0.9, "gae_lambda": 0.8}
    model = Recording("MlpPolicy", env, **options, clip_range=lambda progress: 0.1 + 0.1 * progress, clip_range_high=0.3)
    model.learn(192)
    assert [radius for low, high, _ in seen for radius in (low, high)] == pytest.approx([0.15, 0.3, 0.1, 0.3])
    assert model.logger.name_to_value["train/clip_range"] == pytest.approx(0.1)
    assert model.logger.name_to_value["train/clip_range_high"] == pytest.approx(0.3)

    buffer, samples = model.rollout_buffer, seen[-1][2]
    # As in SB3, most arrays are environment by environment after an update.
    values, advantages = (array.reshape(3, 32).T for array in (buffer.values, buffer.advantages))
    following, ended = (np.vstack([rows[1:], np.zeros((1, 3))]) for rows in (values, buffer.episode_starts))
    expected = buffer.rewards + 0.9 * np.where(ended, 0.0, following) - values
    expected[-1] = advantages[-1]  # of the last step, the advantage is the error
    rows = dict(zip(map(tuple, buffer.observations.tolist()), expected.T.reshape(96), strict=True))
    errors = [rows[tuple(observation)] for observation in samples.observations.tolist()]
    if cls is PAPO:
        assert samples.td_errors.tolist() == pytest.approx(errors, abs=1e-5)
    else:  # it does not read them
        assert samples.td_errors is None


def test_an_epoch_beyond_the_kl_limit_is_the_last_one():
    options = {**SMALL, "n_epochs": 30, "learning_rate": 1e-3}
    free, limited = (PAPO("MlpPolicy", "CartPole-v1", **options, max_epoch_kl=kl).learn(32) for kl in (None, 1e-3))
    assert free._n_updates == 30
    assert 1 < limited._n_updates < 30
    assert limited.logger.name_to_value["train/approx_kl"] > 1e-3
    assert papo().max_epoch_kl == 0.02
    shorter = {**options, "n_epochs": limited._n_updates - 1}
    before = PAPO("MlpPolicy", "CartPole-v1", **shorter, max_epoch_kl=None).learn(32)
    assert before.logger.name_to_value["train/approx_kl"] <= 1e-3
