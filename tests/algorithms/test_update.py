"""The gradient step, and what happens to minibatches that are not finite."""

import copy

import numpy as np
import pytest
import torch

from sb3_ano import ANO
from sb3_ano.algorithms.update import MinibatchStep, StepResult, approximate_kl


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

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
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


class OwnLoss(ANO):
    """ANO with another policy loss, a function of the policy, that is turned on by ``loss``."""

    loss = None

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        regular = super().policy_loss(log_ratio, advantages, clip_range, samples)
        return regular if self.loss is None else 0.0 * regular + self.loss(self.policy)


def skipped_step(loss, **settings) -> tuple[OwnLoss, StepResult, list[str]]:
    """A model after an update, the result of one more step with ``loss``, and what it names; nothing may have changed."""
    model = OwnLoss("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, n_epochs=2, seed=0, ent_coef=0.0)
    model.learn(64)
    before = snapshot(model)
    model.loss = loss
    rollout, indices = model.rollout_buffer.tensors(), torch.arange(16)
    step = MinibatchStep(model.policy, model.policy_loss, model._updater.settings)
    coefficients = {name: float(value) for name, value in model._updater.coefficients._asdict().items()}
    step.begin((0.2, 0.2), coefficients | settings)
    result = step(rollout, indices)
    step.end()
    assert_equal_state(snapshot(model), before)
    return model, result, step.not_finite(result, rollout, indices)


def bias(policy) -> torch.Tensor:
    return policy.action_net.bias


NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "settings", "names"),
    [
        (lambda policy: bias(policy).sum() * NAN, {}, ["policy_loss"]),
        (lambda policy: bias(policy).sum() * 0.0, {"vf_coef": NAN}, ["the weighted sum of the losses (vf_coef, ent_coef)"]),
        # A loss of 0 whose slope is not a number, in one parameter and in all.
        (lambda policy: (bias(policy) * 0).sum().sqrt(), {}, ["gradient of action_net.bias"]),
        (
            lambda policy: (torch.stack([parameter.sum() for parameter in policy.parameters()]).sum() * 0).sqrt(),
            {},
            [
                "gradient of mlp_extractor.policy_net.0.weight",
                "gradient of mlp_extractor.policy_net.0.bias",
                "gradient of mlp_extractor.policy_net.2.weight",
                "9 more gradients",
            ],
        ),
        (lambda policy: (bias(policy) - bias(policy).detach()).sum() * 1e30, {}, ["norm of the gradient (overflow)"]),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_says_what_was_not(loss, settings, names):
    _, result, named = skipped_step(loss, **settings)
    assert not result.finite
    assert named == names


def test_a_kl_beyond_the_limit_changes_nothing_and_stops():
    _, result, _ = skipped_step(None, max_kl=-1.0)
    assert result.finite
    assert result.stop


def test_an_interrupted_update_leaves_an_optimizer_that_goes_on():
    class Interrupted(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            if self._n_updates == 3:
                raise KeyboardInterrupt
            return super().policy_loss(log_ratio, advantages, clip_range, samples)

    model = Interrupted("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, n_epochs=2, seed=0)
    with pytest.raises(KeyboardInterrupt):
        model.learn(128)
    assert {state["step"].item() for state in model.policy.optimizer.state.values()} == {12.0}


def test_an_update_without_a_single_finite_minibatch_raises():
    model = spoiled_model(range(10**6))
    before = snapshot(model)
    with pytest.raises(FloatingPointError, match="all 8 minibatches .* were skipped.*policy_loss"):
        model.learn(64)
    assert_equal_state(snapshot(model), before)


def test_approximate_kl_is_schulmans_estimate():
    log_ratio = torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
    r = log_ratio.exp()
    assert approximate_kl(log_ratio).item() == pytest.approx(((r - 1) - log_ratio).mean().item(), rel=1e-15)
