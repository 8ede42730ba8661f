"""What callbacks and environments have changed is restored, or named in a warning."""

import operator
import re
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.checkpoints import TrainingCheckpoints
from sb3_ano.envs import make_vec_env
from tests.checkpoints.programs import PPO_SHORT, cart_pole, make_ano, whole_and_resumed
from tests.common import parameters


class Event(BaseCallback):
    """Change something once, at the end of the rollout at step 128, which the resumed program does not repeat."""

    def __init__(self, change: Callable[["Event"], None] = lambda event: None) -> None:
        super().__init__()
        self.change = change
        self.phase = "explore"

    def _on_rollout_end(self) -> None:
        if self.num_timesteps == 128:
            self.change(self)
        self.model.ent_coef = 0.1 if "exploit" in self.phase else 0.0

    def _on_step(self) -> bool:
        return True


class Keeper(Event):
    """Keep the optimizer and a parameter, and change the parameter after the resumption."""

    def _on_training_start(self) -> None:
        self.optimizer, self.bias = self.model.policy.optimizer, self.model.policy.action_net.bias

    def _on_rollout_end(self) -> None:
        if self.num_timesteps == 256:
            with torch.no_grad():
                self.bias.fill_(0.5)


class Switching(gym.Wrapper):
    """Replace the function that computes the reward after 100 steps."""

    def __init__(self, env: gym.Env, other: Callable[["Switching"], Callable]) -> None:
        super().__init__(env)
        self.clock, self.other, self.reward = 0, other, self.same  # clock: in gymnasium's environments, a window's

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


def wrapped(wrapper: Callable, *arguments: object) -> Callable[[], VecEnv]:
    def make() -> VecEnv:
        env = DummyVecEnv([lambda: wrapper(gym.make("CartPole-v1"), *arguments)])
        env.seed(3)
        return env

    return make


def halved(progress: float) -> float:
    return 5e-4 * progress


def assign(name: str, value: object) -> Callable[[], Event]:
    """Make a callback that sets one of its attributes, such as ``model.clip_range``."""

    def change(callback: Event) -> None:
        *owners, attribute = name.split(".")
        setattr(reduce(getattr, owners, callback), attribute, value)

    return partial(Event, change)


def freeze(callback: Event) -> None:
    callback.model.policy.action_net.requires_grad_(False)


def evaluation() -> EvalCallback:
    pytest.importorskip("envpool")
    env = make_vec_env("CartPole-v1", 2, backend="envpool", seed=0)
    return EvalCallback(env, n_eval_episodes=1, eval_freq=10**6, verbose=0)


def scale(factor: float) -> Callable[[float], float]:
    return lambda value: factor * value


# Review core 9 found that most of these were lost without a warning.
EXACT = {
    "a callback's text": (assign("phase", "exploit"),),
    "a callback's text, with SB3's PPO": (assign("phase", "exploit"), cart_pole, partial(PPO, "MlpPolicy", **PPO_SHORT)),
    "a new learning rate": (assign("model.lr_schedule", FloatSchedule(3e-3)),),
    "a learning rate that is a function": (assign("model.lr_schedule", FloatSchedule(halved)),),
    "a new clip_range": (assign("model.clip_range", FloatSchedule(0.5)),),
    "a new shape": (assign("model.shaping", "spo"),),
    "frozen parameters": (partial(Event, freeze),),
    "the buffer's gamma": (assign("model.rollout_buffer.gamma", 0.5),),
    "references to the policy": (Keeper,),
    "a method of an environment": (Event, wrapped(Switching, lambda env: env.negative)),
    "a function of an environment": (Event, wrapped(Switching, lambda env: operator.neg)),
    "a class method of an environment": (Event, wrapped(Switching, lambda env: env.zero)),
    # Functions that cannot be pickled, and that the program builds again.
    "equal lambdas": (Event, wrapped(gym.wrappers.TransformReward, scale(1e-3)), partial(make_ano, learning_rate=scale(1e-3))),
}


@pytest.mark.parametrize("case", EXACT)
def test_changes_by_callbacks_and_environments_are_restored(case, tmp_path):
    whole, resume, callback = whole_and_resumed(tmp_path, *EXACT[case])
    model = resume()
    assert torch.equal(parameters(model), parameters(whole))
    assert getattr(callback, "optimizer", model.policy.optimizer) is model.policy.optimizer


doubled = assign("model.lr_schedule", FloatSchedule(scale(2e-3)))
NAMED = {
    "callback Event 0.phase": (assign("phase", "phases/exploit"),),
    "callback Event 0.here": (assign("here", "."),),
    "callback Event 0.place": (assign("place", Path("somewhere")),),
    "callback Event 0.stream": (assign("stream", iter(number for number in range(3))),),
    "callback EvalCallback 0.eval_env": (evaluation,),
    "model.lr_schedule": (doubled, cart_pole, partial(make_ano, learning_rate=scale(1e-3))),
    "model.clip_range": (assign("model.clip_range", lambda progress: 0.5),),
    "model.shaping": (assign("model.shaping", lambda x: x - x.square() / 2),),
    "model.env.envs[0].reward": (Event, wrapped(Switching, lambda env: lambda reward: -reward)),
}


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
@pytest.mark.filterwarnings("ignore:Training and eval env are not of the same type:UserWarning")
@pytest.mark.filterwarnings("ignore:shaping='.*' cannot be imported by its name:UserWarning")
@pytest.mark.parametrize("name", NAMED)
def test_attributes_that_cannot_be_restored_are_named(name, tmp_path):  # review core 9
    _, resume, _ = whole_and_resumed(tmp_path, *NAMED[name])
    with pytest.warns(UserWarning, match=re.escape(f"TrainingCheckpoints: {name} cannot be restored and stay")) as caught:
        resume()
    assert sum("cannot be restored" in str(warning.message) for warning in caught) == 1


def test_attributes_that_cannot_be_pickled_are_reported_once(tmp_path, capsys):
    event = Event()
    event.stream = (number for number in range(3))
    make_ano(cart_pole()).learn(96, callback=[TrainingCheckpoints(tmp_path, every=32), event])
    output = capsys.readouterr().out
    assert output.count("checkpoints lack callback Event 0.stream, which cannot be pickled") == 1
    assert "wrote" not in output  # only with verbose=2


def test_a_program_that_lacks_a_function_of_the_checkpoint_is_rejected(tmp_path, monkeypatch):
    _, resume, _ = whole_and_resumed(tmp_path, assign("model.lr_schedule", FloatSchedule(halved)))
    monkeypatch.delitem(globals(), "halved")
    with pytest.raises(ValueError, match="refers to an object that this program does not define: .*halved"):
        resume()
