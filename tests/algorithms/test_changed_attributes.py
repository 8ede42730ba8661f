"""Attributes that are changed after construction act as they do in SB3's PPO, or raise one clear line (review core 7)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule

from sb3_ano import ANO
from tests.common import ALGORITHMS, SMALL, parameters

# Several minibatches and a large learning rate, so that each change shows.
SETTINGS = {"n_steps": 64, "batch_size": 32, "n_epochs": 2, "learning_rate": 3e-3, "seed": 0, "device": "cpu"}


class At(BaseCallback):
    """Applies a change in the middle of the first rollout, or at an event of the callback."""

    def __init__(self, change: Callable[[BaseAlgorithm], Any], event: str = "step") -> None:
        super().__init__()
        self._change, self._event = change, event

    def _on_step(self) -> bool:
        if self._event == "step" and self.n_calls == 20:
            self._change(self.model)
        return True

    def _on_training_start(self) -> None:
        if self._event == "training start":
            self._change(self.model)

    def _on_rollout_end(self) -> None:
        if self._event == "rollout end":
            self._change(self.model)


def between_two_calls(model: BaseAlgorithm, change: Callable[[BaseAlgorithm], Any]) -> BaseAlgorithm:
    model.learn(64)
    change(model)
    return model.learn(128, reset_num_timesteps=False)


def from_a_callback(model: BaseAlgorithm, change: Callable[[BaseAlgorithm], Any]) -> BaseAlgorithm:
    return model.learn(192, callback=At(change))


WHEN = [between_two_calls, from_a_callback]


def assign(**attributes: Any) -> Callable[[BaseAlgorithm], None]:
    """A change that assigns attributes, ``rollout_buffer__gamma`` for ``rollout_buffer.gamma``."""

    def change(model: BaseAlgorithm) -> None:
        for path, value in attributes.items():
            *owners, name = path.split("__")
            target: Any = model
            for owner in owners:
                target = getattr(target, owner)
            setattr(target, name, value)

    return change


def sgd(model: BaseAlgorithm) -> None:
    model.policy.optimizer = torch.optim.SGD(model.policy.parameters(), lr=1e-2)


def frozen(model: BaseAlgorithm) -> None:
    model.policy.mlp_extractor.policy_net.requires_grad_(False)


def halved(model: BaseAlgorithm) -> dict[str, torch.Tensor]:
    return {name: 0.5 * value for name, value in model.policy.state_dict().items()}


CHANGES: dict[str, Callable[[BaseAlgorithm], None]] = {
    "batch_size": assign(batch_size=16),
    "n_epochs": assign(n_epochs=1),
    "ent_coef": assign(ent_coef=0.5),
    "vf_coef": assign(vf_coef=0.05),
    "max_grad_norm": assign(max_grad_norm=0.01),
    "target_kl": assign(target_kl=1e-5),
    "normalize_advantage": assign(normalize_advantage=False),
    "clip_range": assign(clip_range=FloatSchedule(0.02)),
    "clip_range_vf": assign(clip_range_vf=FloatSchedule(0.05)),
    "lr_schedule": assign(lr_schedule=LinearSchedule(1e-3, 0.0, 1.0)),
    "gamma of the buffer": assign(rollout_buffer__gamma=0.5),
    "gae_lambda of the buffer": assign(rollout_buffer__gae_lambda=0.5),
    "optimizer": sgd,
    "requires_grad": frozen,
    "parameters": lambda model: model.set_parameters({"policy": halved(model)}, exact_match=False),
}
#: SB3 reads these when a model is made, and, of CartPole, which is never truncated that early, not again.
IGNORED = {
    "gamma": assign(gamma=0.5),
    "gae_lambda": assign(gae_lambda=0.5),
    "learning_rate": assign(learning_rate=1e-5),
    "seed": assign(seed=7),
}


def distance(model: BaseAlgorithm, other: BaseAlgorithm) -> float:
    return ((parameters(model) - parameters(other)).norm() / parameters(other).norm()).item()


@pytest.fixture(scope="module")
def unchanged() -> dict[str, BaseAlgorithm]:
    return {run.__name__: run(PPO("MlpPolicy", "CartPole-v1", **SETTINGS), lambda model: None) for run in WHEN}


@pytest.mark.parametrize("run", WHEN)
@pytest.mark.parametrize("name", [*CHANGES, *IGNORED])
def test_a_changed_attribute_acts_as_in_ppo(name, run, unchanged):
    change = {**CHANGES, **IGNORED}[name]
    expected = run(PPO("MlpPolicy", "CartPole-v1", **SETTINGS), change)
    found = run(ANO("MlpPolicy", "CartPole-v1", **SETTINGS, shaping="ppo", torch_compile=False), change)
    assert distance(found, expected) <= 1e-6
    assert found._n_updates == expected._n_updates
    effect = distance(expected, unchanged[run.__name__])
    assert effect == 0.0 if name in IGNORED else effect > 1e-4


def shorter(model: BaseAlgorithm) -> None:
    model.n_steps = 32
    if isinstance(model, PPO):
        model.rollout_buffer.buffer_size = 32  # without it, SB3's buffer asserts that it is full


def longer(model: BaseAlgorithm) -> None:
    model.n_steps = 96
    if isinstance(model, PPO):
        model.rollout_buffer.buffer_size = 96


@pytest.mark.parametrize("cls", [None, *ALGORITHMS])
@pytest.mark.parametrize("change", [shorter, longer])
def test_a_changed_length_of_the_rollout_acts_from_the_next_rollout(change, cls):
    if cls is not None:
        model = between_two_calls(cls("MlpPolicy", "CartPole-v1", **SETTINGS), change)
        assert model.rollout_buffer.observations.shape[0] == model.n_steps
        assert model.num_timesteps == 64 + (128 if model.n_steps == 32 else 192)
        assert model.n_skipped_minibatches == 0
        return
    expected = between_two_calls(PPO("MlpPolicy", "CartPole-v1", **SETTINGS), change)
    for run in WHEN:
        found = run(ANO("MlpPolicy", "CartPole-v1", **SETTINGS, shaping="ppo", torch_compile=False), change)
        assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("n_steps", 0, ValueError, "n_steps=0 is not allowed; allowed are positive integers"),
        ("batch_size", 0, ValueError, "batch_size=0 is not allowed; allowed are positive integers"),
        ("n_epochs", 2.5, ValueError, "n_epochs=2.5 is not allowed"),
        ("gamma", "0.9", TypeError, "gamma='0.9' is of type str; allowed are numbers from 0 to 1"),
        ("ent_coef", "auto", TypeError, "ent_coef='auto' is of type str"),
        ("target_kl", -1.0, ValueError, "target_kl=-1.0 is not allowed"),
        ("max_grad_norm", None, TypeError, "max_grad_norm=None is of type NoneType"),
        ("clip_range", None, TypeError, "clip_range=None is of type NoneType"),
        ("clip_range_vf", -0.1, ValueError, "clip_range_vf=-0.1 is not allowed"),
        ("precision", "float16", ValueError, "precision='float16' is not allowed"),
    ],
)
def test_a_bad_value_raises_one_line_before_the_next_update(name, value, error, message):
    change = assign(**{name: value})
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    before = parameters(model)
    good = getattr(model, name)
    for event in ("training start", "step", "rollout end"):
        with pytest.raises(error, match=message) as caught:
            model.learn(64, callback=At(change, event))
        assert "\n" not in str(caught.value)
        setattr(model, name, good)
    change(model)
    with pytest.raises(error, match=message):
        model.learn(64)
    assert torch.equal(parameters(model), before)


@pytest.mark.parametrize("radius", [0.05, "lin_0.05", LinearSchedule(0.05, 0.0, 1.0)], ids=str)
def test_a_radius_is_assigned_as_it_is_given_to_the_constructor(radius):
    # SB3 takes nothing but schedules here.
    model = ANO("MlpPolicy", "CartPole-v1", **SETTINGS)
    model.clip_range = model.clip_range_high = model.clip_range_vf = radius
    expected = ANO("MlpPolicy", "CartPole-v1", **SETTINGS, clip_range=radius, clip_range_high=radius, clip_range_vf=radius)
    for each in (model, expected):
        each.set_random_seed(0)
        each.learn(128)
    assert torch.equal(parameters(model), parameters(expected))


def test_a_rollout_that_is_not_full_is_not_trained_on():
    model = ANO("MlpPolicy", "CartPole-v1", **SETTINGS).learn(64)
    model.rollout_buffer.reset()
    with pytest.raises(ValueError, match="the rollout buffer holds 0 of 64 steps; collect a whole rollout first"):
        model.train()
