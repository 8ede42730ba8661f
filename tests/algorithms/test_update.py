"""The gradient step, and what happens to minibatches that are not finite."""

import copy

import numpy as np
import pytest
import torch

from sb3_ano import ANO
from sb3_ano.algorithms.update import LossTerms, approximate_kl, gradient_step


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


def not_finite(model, loss: torch.Tensor, **terms: float) -> list[str]:
    scalars = {"policy_loss": 0.0, "value_loss": 0.0, "entropy_loss": 0.0, **terms}
    values = {name: torch.tensor(value) for name, value in scalars.items()}
    return gradient_step(model.policy, LossTerms(loss, log_ratio=None, advantages=None, **values), max_grad_norm=0.5)[1]


def test_what_was_not_finite_is_named():
    model = spoiled_model(range(0)).learn(64)
    policy, bias = model.policy, model.policy.action_net.bias
    nan = float("nan")
    assert not_finite(model, bias.sum() * nan, value_loss=nan, entropy_loss=nan) == ["value_loss", "entropy_loss"]
    assert not_finite(model, bias.sum() * nan) == ["the weighted sum of the losses (vf_coef, ent_coef)"]
    # A loss of 0 whose slope is not a number, in one parameter and in all.
    assert not_finite(model, (bias * 0).sum().sqrt()) == ["gradient of action_net.bias"]
    everywhere = torch.stack([parameter.sum() for parameter in policy.parameters()]).sum()
    assert not_finite(model, (everywhere * 0).sqrt())[-1] == "9 more gradients"
    assert not_finite(model, bias.sum() * 1e30 * 1e-20 * 1e20) == ["norm of the gradient (overflow)"]


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
