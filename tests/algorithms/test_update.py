"""The gradient step, the report of minibatches that are not finite, and the diagnostics of an update."""

import copy
import math

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_ano import ANO
from sb3_ano.algorithms.diagnostics import UpdateStatistics
from sb3_ano.algorithms.update import ClipRange, StepResult, Updater, approximate_kl
from tests.common import parameters

SETTINGS = {"n_steps": 64, "batch_size": 16, "n_epochs": 2, "seed": 0}
NAN = math.nan


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
    """ANO whose policy loss is multiplied by ``number`` in the minibatches of ``spoiled``, counted from 0."""

    spoiled: range = range(0)
    number = NAN
    seen = 0

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        loss = super().policy_loss(log_ratio, advantages, clip_range, samples)
        self.seen += 1
        return loss * self.number if self.seen - 1 in self.spoiled else loss


def steps_made(model) -> set[float]:
    return {state["step"].item() for state in model.policy.optimizer.state.values()}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("number", [NAN, math.inf])
def test_a_minibatch_that_is_not_finite_is_skipped_counted_and_reported_once(number, optimizer):
    model = Spoiled("MlpPolicy", "CartPole-v1", **SETTINGS, policy_kwargs={"optimizer_class": optimizer})
    model.spoiled, model.number = range(2, 5), number
    with pytest.warns(UserWarning, match="a minibatch was skipped .* because of NaN or Inf in policy_loss") as warned:
        model.learn(64)
    assert len(warned) == 1
    assert model.n_skipped_minibatches == model.logger.name_to_value["train/skipped_minibatches"] == 3
    assert all(np.isfinite(value) for name, value in model.logger.name_to_value.items() if name.startswith("train/"))
    assert steps_made(model) == {5.0}


def test_an_update_without_a_single_finite_minibatch_raises():
    model = Spoiled("MlpPolicy", "CartPole-v1", **SETTINGS)
    model.spoiled = range(10**6)
    before = snapshot(model)
    with pytest.raises(FloatingPointError, match="all 8 minibatches .* were skipped, because of NaN or Inf in policy_loss"):
        model.learn(64)
    assert_equal_state(snapshot(model), before)


class OwnLoss(ANO):
    """ANO with another policy loss, a function of the policy, that is turned on by ``loss``."""

    loss = None

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        regular = super().policy_loss(log_ratio, advantages, clip_range, samples)
        return regular if self.loss is None else 0.0 * regular + self.loss(self.policy)


def step_that_changes_nothing(loss, **coefficients) -> StepResult:
    model = OwnLoss("MlpPolicy", "CartPole-v1", **SETTINGS, ent_coef=0.0).learn(64)
    before = snapshot(model)
    model.loss = loss
    updater = Updater(model.policy, model._updater.settings)
    numbers = {name: float(value) for name, value in model._updater.coefficients._asdict().items()}
    updater.start_update((0.2, 0.2), numbers | coefficients)
    result = updater(model.rollout_buffer.tensors(), torch.arange(16))
    assert_equal_state(snapshot(model), before)
    return result


def bias(policy) -> torch.Tensor:
    return policy.action_net.bias


@pytest.mark.parametrize(
    ("loss", "coefficients", "term"),
    [
        (lambda policy: bias(policy).sum() * NAN, {}, "policy_loss"),
        (lambda policy: bias(policy).sum() * 0.0, {"vf_coef": NAN}, "the weighted sum of the losses (vf_coef, ent_coef)"),
        # A loss of 0 whose slope is not a number, and one whose squared slope overflows.
        (lambda policy: (bias(policy) * 0).sum().sqrt(), {}, "the gradient"),
        (lambda policy: (bias(policy) - bias(policy).detach()).sum() * 1e30, {}, "the gradient"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_term(loss, coefficients, term):
    result = step_that_changes_nothing(loss, **coefficients)
    statistics = UpdateStatistics(ClipRange(torch.tensor(0.2), torch.tensor(0.2)))
    statistics.add(result)
    assert not result.finite
    assert statistics.skipped() == [0]
    assert statistics.non_finite_term(0) == term
    assert statistics.summary() == {}


def test_a_kl_beyond_the_limit_changes_nothing_and_stops():
    result = step_that_changes_nothing(None, max_kl=-1.0)
    assert result.finite
    assert result.stop


def test_an_interrupted_update_leaves_an_optimizer_that_continues():
    class Interrupted(ANO):
        def policy_loss(self, log_ratio, advantages, clip_range, samples):
            if self._n_updates == 3:
                raise KeyboardInterrupt
            return super().policy_loss(log_ratio, advantages, clip_range, samples)

    model = Interrupted("MlpPolicy", "CartPole-v1", **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        model.learn(128)
    assert steps_made(model) == {12.0}


class Alternating(FlattenExtractor):
    """Uses its layer, which then has a gradient, in every other minibatch."""

    calls = 0

    def __init__(self, space) -> None:
        super().__init__(space)
        self.layer = torch.nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = super().forward(observations)
        self.calls += self.training
        return features + self.layer(features) if self.calls % 2 else features


def test_parameters_without_a_gradient_in_some_minibatches_are_trained_as_by_ppo():
    options = {**SETTINGS, "device": "cpu", "policy_kwargs": {"features_extractor_class": Alternating}}
    expected = parameters(PPO("MlpPolicy", "CartPole-v1", **options).learn(128))
    found = parameters(ANO("MlpPolicy", "CartPole-v1", **options, shaping="ppo", torch_compile=False).learn(128))
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_approximate_kl_is_schulmans_estimate():
    log_ratio = torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
    r = log_ratio.exp()
    assert approximate_kl(log_ratio).item() == pytest.approx(((r - 1) - log_ratio).mean().item(), rel=1e-15)


def test_statistics_match_a_hand_worked_update():
    """Two epochs of one minibatch; radii 0.2 and 0.3."""
    statistics = UpdateStatistics(ClipRange(torch.tensor(0.2), torch.tensor(0.3)))
    minibatches = [
        # ratio 1.5 (A > 0, clipped), 0.7 (A < 0, clipped), 1.4 (A < 0, not clipped), 1.0
        ([1.5, 0.7, 1.4, 1.0], [1.0, -1.0, -1.0, 1.0], [0.3, -0.1, 0.4, 0.2], 2.0),
        ([1.0, 1.0, 1.0, 1.1], [1.0, -1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 1.0], 4.0),
    ]
    for ratio, *rest, norm in minibatches:
        statistics.start_epoch()
        scalars = torch.tensor([0.1, 0.2, 0.3, norm, norm])
        tensors = [torch.tensor(ratio).log(), *map(torch.tensor, rest), torch.tensor(True), torch.tensor(False)]
        statistics.add(StepResult(scalars, *tensors))

    first = np.mean([r - 1 - np.log(r) for r in (1.5, 0.7, 1.4, 1.0)])
    second = (1.1 - 1 - np.log(1.1)) / 4
    expected = {
        "policy_gradient_loss": 0.1,
        "value_loss": 0.2,
        "entropy_loss": 0.3,
        "loss": 4.0,
        "approx_kl": second,
        "kl_mean": (first + second) / 2,
        "kl_max": first,
        "ratio_mean": (1.15 + 1.025) / 2,
        "ratio_max": 1.5,
        "clip_fraction": 3 / 8,
        "fraction_above": 2 / 8,
        "fraction_below": 1 / 8,
        "ppo_discarded_gradient": (0.3 + 0.1) / (1.0 + 1.0),
        "grad_norm": 3.0,
    }
    assert statistics.summary() == pytest.approx(expected, rel=1e-4)
    assert statistics.epoch_kl() == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize(("shaping", "discards"), [("ppo", False), ("ano", True)])
def test_ppos_clip_lets_no_gradient_through_where_ano_restores(shaping, discards):
    model = ANO("MlpPolicy", "CartPole-v1", n_steps=128, learning_rate=1e-2, seed=0, shaping=shaping).learn(256)
    assert model.logger.name_to_value["train/clip_fraction"] > 0
    assert (model.logger.name_to_value["train/ppo_discarded_gradient"] > 0) == discards
