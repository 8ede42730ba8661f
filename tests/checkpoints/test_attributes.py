"""Attributes that callbacks or environments change are restored, or named in a warning."""

import operator
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import make_vec_env
from tests.checkpoints.programs import (
    PPO_SHORT,
    Program,
    assert_same,
    cart_pole,
    interrupt,
    resume,
)

# Optimizers and policies of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")


class Event(BaseCallback):
    """Change something once, at the end of the rollout at step 128, which the resumed program does not repeat."""

    def __init__(self, change: Callable[["Event"], None], **attributes: object) -> None:
        super().__init__()
        self.change, self.phase = change, "explore"
        vars(self).update(attributes)

    def _on_training_start(self) -> None:
        self.optimizer, self.bias = self.model.policy.optimizer, self.model.policy.action_net.bias

    def _on_rollout_end(self) -> None:
        if self.num_timesteps == 128:
            self.change(self)
        if self.num_timesteps == 256:  # after the resumption
            with torch.no_grad():
                self.bias.fill_(0.5)
        self.model.ent_coef = 0.1 if "exploit" in self.phase else 0.0

    def _on_step(self) -> bool:
        return True


class Switching(gym.Wrapper):
    """Replace the function that computes the reward after 100 steps."""

    def __init__(self, env: gym.Env, other: Callable[["Switching"], Callable]) -> None:
        super().__init__(env)
        self.clock, self.other, self.reward = 0, other, self.same  # clock: in gymnasium's environments, a window's
        self.same = self.negative  # so that the name of the method in self.reward leads to another one

    def same(self, reward: float) -> float:
        return reward

    def negative(self, reward: float) -> float:
        return -reward

    @classmethod
    def zero(cls, reward: float) -> float:
        return 0.0

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self.clock += 1
        if self.clock == 100:
            self.reward = self.other(self)
        return observation, self.reward(reward) + 0.01 * self.clock, *rest


def switching(other: Callable[[Switching], Callable]) -> Callable[[], VecEnv]:
    def make() -> VecEnv:
        env = DummyVecEnv([lambda: Switching(gym.make("CartPole-v1"), other)])
        env.seed(3)
        return env

    return make


def halved(progress: float) -> float:
    return 5e-4 * progress


def halve(event: Event) -> None:
    event.model.lr_schedule = FloatSchedule(halved)


def event(change: Callable[[Event], None] = lambda event: None, **attributes: object) -> Callable[[], list[Event]]:
    return lambda: [Event(change, **attributes)]


def assign(**attributes: object) -> Callable[[], list[Event]]:
    return event(lambda event: vars(event).update(attributes))


def evaluation() -> list[EvalCallback]:
    pytest.importorskip("envpool")
    env = make_vec_env("CartPole-v1", 2, backend="envpool", seed=0)
    return [EvalCallback(env, n_eval_episodes=1, eval_freq=10**6, verbose=0)]


def change_much(callback: Event) -> None:
    model, rate = callback.model, 2e-3
    model.lr_schedule = FloatSchedule(lambda progress: rate * progress)
    model.clip_range = FloatSchedule(0.5)
    model.shaping = lambda x: x - x.square() / 2
    model.rollout_buffer.gamma = 0.5
    model.policy.action_net.requires_grad_(False)


# Most of these were once lost without a warning.
EXACT = {
    "much of the model": (event(change_much),),
    "a callback's text, with SB3's PPO": (assign(phase="exploit"), cart_pole, partial(PPO, "MlpPolicy", **PPO_SHORT)),
    "a learning rate that is a function": (event(halve),),
    "the length of rollouts": (event(lambda event: setattr(event.model, "n_steps", 64)),),
    "a method of an environment": (list, switching(lambda env: env.negative)),
    "a function of an environment": (list, switching(lambda env: operator.neg)),
    "a class method of an environment": (list, switching(lambda env: env.zero)),
    "a method whose name leads to another one": (list, switching(lambda env: env.reward)),
    "a lambda of an environment": (list, switching(lambda env: lambda reward: env.negative(reward) / 2)),
}


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.filterwarnings("ignore:shaping='.*' cannot be imported by its name:UserWarning")
def test_changes_by_callbacks_and_environments_are_restored(case, tmp_path):
    program = partial(Program, *EXACT[case])
    whole, again = program().learn(), program()
    interrupt(tmp_path, program())
    changes = [callback.change for callback in again.callbacks]
    assert_same(resume(tmp_path, again), whole)
    assert all(callback.optimizer is again.model.policy.optimizer for callback in again.callbacks)
    assert [callback.change for callback in again.callbacks] == changes  # the program's own, also if it is a lambda


def test_time_is_that_of_the_training(tmp_path, monkeypatch):
    program = partial(Program, event(lambda event: setattr(event.model, "start_time", time.time_ns() - 10**12)))
    interrupt(tmp_path, program())
    tomorrow = time.time_ns() + 10**14
    monkeypatch.setattr("time.time_ns", lambda: tomorrow)
    assert tomorrow - resume(tmp_path, program()).model.start_time == pytest.approx(10**12, rel=0.1)


NAMED = {
    "callback Event 0.phase": assign(phase="phases/exploit"),
    "callback Event 0.here": assign(here="."),
    "callback Event 0.place": assign(place=Path("somewhere")),
    "callback Event 0.stream": event(stream=(number for number in range(3))),
    "callback Event 0.opponent": lambda: event(opponent=PPO("MlpPolicy", "CartPole-v1", device="cpu"))(),
    "callback EvalCallback 0.eval_env": evaluation,
}


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
@pytest.mark.filterwarnings("ignore:Training and eval env are not of the same type:UserWarning")
@pytest.mark.parametrize("name", NAMED)
def test_attributes_that_cannot_be_restored_are_named(name, tmp_path, capsys):
    interrupt(tmp_path, Program(NAMED[name]), every=32, verbose=1)
    output = capsys.readouterr().out
    is_lost = name.endswith(("stream", "env", "opponent"))  # others are paths
    assert output.count(f"checkpoints lack {name}, which cannot be stored") == is_lost  # once
    assert "wrote" not in output  # only with verbose=2
    with pytest.warns(UserWarning, match=re.escape(f"TrainingCheckpoints: {name} cannot be restored and stay")) as caught:
        resume(tmp_path, Program(NAMED[name]))
    assert sum("cannot be restored" in str(warning.message) for warning in caught) == 1


def test_a_program_that_lacks_a_function_of_the_checkpoint_is_rejected(tmp_path, monkeypatch):
    interrupt(tmp_path, Program(event(halve)))
    monkeypatch.delitem(globals(), "halved")
    with pytest.raises(ValueError, match="refers to an object that this program does not define: .*halved"):
        resume(tmp_path, Program(event(halve)))
