"""The diagnostics of an update."""

import numpy as np
import pytest
import torch

from sb3_ano import ANO
from sb3_ano.algorithms.diagnostics import UpdateStatistics
from sb3_ano.algorithms.update import StepResult, ClipRange


def test_statistics_match_a_hand_worked_update():
    """Two epochs of one minibatch; eps_low = 0.2, eps_high = 0.3."""
    statistics = UpdateStatistics(ClipRange(torch.tensor(0.2), torch.tensor(0.3)))
    minibatches = [
        # ratio 1.5 (A > 0, clipped), 0.7 (A < 0, clipped), 1.4 (A < 0, not clipped), 1.0
        ([1.5, 0.7, 1.4, 1.0], [1.0, -1.0, -1.0, 1.0], [0.3, -0.1, 0.4, 0.2], 2.0),
        ([1.0, 1.0, 1.0, 1.1], [1.0, -1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 1.0], 4.0),
    ]
    for ratio, advantages, gradient, norm in minibatches:
        statistics.start_epoch()
        log_ratio = torch.tensor(ratio).log()
        scalars = torch.tensor([0.1, 0.2, 0.3, norm, norm])
        statistics.add(
            StepResult(
                scalars, log_ratio, torch.tensor(advantages), torch.tensor(gradient), torch.tensor(True), torch.tensor(False)
            )
        )
    summary = statistics.summary()

    first = np.mean([r - 1 - np.log(r) for r in (1.5, 0.7, 1.4, 1.0)])
    second = (1.1 - 1 - np.log(1.1)) / 4
    assert summary["kl_mean"] == pytest.approx((first + second) / 2, rel=1e-5)
    assert summary["kl_max"] == pytest.approx(first, rel=1e-5)
    assert summary["approx_kl"] == pytest.approx(second, rel=1e-4)
    assert statistics.epoch_kl() == pytest.approx(second, rel=1e-4)
    assert summary["ratio_mean"] == pytest.approx((1.15 + 1.025) / 2)
    assert summary["ratio_max"] == pytest.approx(1.5)
    assert summary["fraction_above"] == pytest.approx(2 / 8)
    assert summary["fraction_below"] == pytest.approx(1 / 8)
    assert summary["clip_fraction"] == pytest.approx(3 / 8)
    assert summary["ppo_discarded_gradient"] == pytest.approx((0.3 + 0.1) / (1.0 + 1.0))
    assert summary["grad_norm"] == pytest.approx(3.0)
    assert summary["loss"] == pytest.approx(4.0)


@pytest.mark.parametrize(("shaping", "discards"), [("ppo", False), ("ano", True)])
def test_ppos_clip_lets_no_gradient_through_where_ano_restores(shaping, discards):
    model = ANO("MlpPolicy", "CartPole-v1", n_steps=128, learning_rate=1e-2, seed=0, shaping=shaping).learn(256)
    assert model.logger.name_to_value["train/clip_fraction"] > 0
    assert (model.logger.name_to_value["train/ppo_discarded_gradient"] > 0) == discards
