"""The gradient step, and what happens to minibatches that are not finite."""

import copy

import numpy as np
import pytest
import torch

from sb3_ano import ANO
from sb3_ano.algorithms.update import LossTerms, TrustRegion, UpdateStatistics, approximate_kl, gradient_step


def snapshot(model) -> dict:
    return copy.deepcopy({"policy": model.policy.state_dict(), "optimizer": model.policy.optimizer.state_dict()})


def assert_equal_state(one, other) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_state(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


class Spoiled(ANO):
    """ANO whose policy loss is not a number in the minibatches of ``spoiled``, counted from 0."""

    spoiled: range = range(0)
    number = float("nan")
    seen = 0

    def policy_loss(self, log_ratio, advantages, region, samples):
        loss = super().policy_loss(log_ratio, advantages, region, samples)
        self.seen += 1
        return loss * self.number if self.seen - 1 in self.spoiled else loss


def spoiled_model(spoiled: range, number: float = float("nan")) -> Spoiled:
    model = Spoiled("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, n_epochs=2, seed=0)
    model.spoiled, model.number = spoiled, number
    return model


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_minibatch_that_is_not_finite_is_skipped_counted_and_reported_once(number):
    model = spoiled_model(range(2, 5), number)
    with pytest.warns(UserWarning, match="a minibatch was skipped.*policy_loss") as warned:
        model.learn(64)
    assert len(warned) == 1
    assert model.n_skipped_minibatches == 3
    assert model.logger.name_to_value["train/skipped_minibatches"] == 3
    assert all(np.isfinite(value) for name, value in model.logger.name_to_value.items() if name.startswith("train/"))
    steps = {state["step"].item() for state in model.policy.optimizer.state.values()}
    assert steps == {5.0}


def test_a_skipped_minibatch_leaves_parameters_and_optimizer_as_they_were():
    model = spoiled_model(range(0)).learn(64)
    before = snapshot(model)
    parameter = next(model.policy.parameters())
    zero = torch.zeros(())
    for loss in (parameter.sum() * float("nan"), (parameter.sum() * 0).sqrt(), parameter.sum() * 1e38 * 1e38):
        _, not_finite = gradient_step(model.policy, LossTerms(loss, loss, zero, zero, zero, zero), max_grad_norm=0.5)
        assert not_finite
        assert_equal_state(snapshot(model), before)


def test_what_was_not_finite_is_named():
    model = spoiled_model(range(0)).learn(64)
    parameter = model.policy.log_std if hasattr(model.policy, "log_std") else model.policy.action_net.bias
    zero = torch.zeros(())
    loss = (parameter * 0).sum().sqrt()  # 0, with a slope that is not a number
    _, not_finite = gradient_step(model.policy, LossTerms(loss, loss, zero, zero, zero, zero), max_grad_norm=0.5)
    assert not_finite == ["gradient of action_net.bias"]


def test_an_update_without_a_single_finite_minibatch_raises():
    model = spoiled_model(range(10**6))
    before = snapshot(model)
    with (
        pytest.warns(UserWarning, match="a minibatch was skipped"),
        pytest.raises(FloatingPointError, match="all 8 minibatches .* were skipped.*policy_loss"),
    ):
        model.learn(64)
    assert_equal_state(snapshot(model), before)


def test_approximate_kl_is_schulmans_estimate():
    log_ratio = torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
    r = log_ratio.exp()
    assert approximate_kl(log_ratio).item() == pytest.approx(((r - 1) - log_ratio).mean().item(), rel=1e-15)


def test_statistics_match_a_hand_worked_update():
    """Two epochs of one minibatch; eps_low = 0.2, eps_high = 0.3."""
    statistics = UpdateStatistics(TrustRegion(torch.tensor(0.2), torch.tensor(0.3)))
    minibatches = [
        # ratio 1.5 (A > 0, clipped), 0.7 (A < 0, clipped), 1.4 (A < 0, not clipped), 1.0
        ([1.5, 0.7, 1.4, 1.0], [1.0, -1.0, -1.0, 1.0], [0.3, -0.1, 0.4, 0.2], 2.0),
        ([1.0, 1.0, 1.0, 1.1], [1.0, -1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 1.0], 4.0),
    ]
    for ratio, advantages, gradient, norm in minibatches:
        statistics.start_epoch()
        log_ratio = torch.tensor(ratio).log()
        terms = LossTerms(*torch.tensor([norm, 0.1, 0.2, 0.3]), log_ratio, torch.tensor(advantages))
        probe = torch.zeros(4, requires_grad=True)
        probe.grad = torch.tensor(gradient)
        statistics.add(terms, approximate_kl(log_ratio), probe, torch.tensor(norm))
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
