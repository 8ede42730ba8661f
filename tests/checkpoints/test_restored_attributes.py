"""What callbacks and environments have changed is restored, or named in a warning."""

import operator
import re
from collections.abc import Callable
from functools import partial, reduce

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano import ANO
from sb3_ano.checkpoints import TrainingCheckpoints
from sb3_ano.envs import make_vec_env
from tests.checkpoints.programs import ANO_SHORT, EVERY, PPO_SHORT, TOTAL, Interrupted, cart_pole, interrupt
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


def switching(other: Callable[[Switching], Callable]) -> Callable[[], VecEnv]:
    def make() -> VecEnv:
        env = DummyVecEnv([lambda: Switching(gym.make("CartPole-v1"), other)])
        env.seed(3)
        return env

    return make


def halved(progress: float) -> float:
    return 5e-4 * progress


def nothing(event: Event) -> None:
    """Change nothing."""


def assign(name: str, value: object) -> Callable[[Event], None]:
    """Set an attribute of the callback, such as ``model.clip_range``."""

    def change(callback: Event) -> None:
        *owners, attribute = name.split(".")
        setattr(reduce(getattr, owners, callback), attribute, value)

    return change


def freeze(callback: Event) -> None:
    callback.model.policy.action_net.requires_grad_(False)


MAKE_ANO = partial(ANO, "MlpPolicy", **ANO_SHORT)


def whole_and_resumed(tmp_path, make_callback: Callable, make_env: Callable = cart_pole, make_model=MAKE_ANO) -> tuple:
    """Return an uninterrupted model, the call that resumes an interrupted one at 192 steps, and its callback."""
    whole = make_model(make_env()).learn(TOTAL, callback=make_callback())
    callbacks = [make_callback(), TrainingCheckpoints(tmp_path, EVERY, verbose=0), interrupt(220)]
    with pytest.raises(Interrupted):
        make_model(make_env()).learn(TOTAL, callback=callbacks)
    callback, checkpoints = make_callback(), TrainingCheckpoints(tmp_path, EVERY, resume=True, verbose=0)
    return whole, partial(make_model(make_env()).learn, TOTAL, [callback, checkpoints]), callback


# Review core 9 found that these were lost without a warning.
EXACT = {
    "a callback's text": (assign("phase", "exploit"), cart_pole),
    "a new learning rate": (assign("model.lr_schedule", FloatSchedule(3e-3)), cart_pole),
    "a learning rate that is a function": (assign("model.lr_schedule", FloatSchedule(halved)), cart_pole),
    "a new clip_range": (assign("model.clip_range", FloatSchedule(0.5)), cart_pole),
    "frozen parameters": (freeze, cart_pole),
    "the buffer's gamma": (assign("model.rollout_buffer.gamma", 0.5), cart_pole),
    "a method of an environment": (nothing, switching(lambda env: env.negative)),
    "a function of an environment": (nothing, switching(lambda env: operator.neg)),
    "a class method of an environment": (nothing, switching(lambda env: env.zero)),
}


@pytest.mark.parametrize(("case", "algorithm"), [("a callback's text", PPO), *((case, ANO) for case in EXACT)])
def test_changes_by_callbacks_and_environments_are_restored(case, algorithm, tmp_path):
    change, make_env = EXACT[case]
    make_model = partial(algorithm, "MlpPolicy", **(ANO_SHORT if algorithm is ANO else PPO_SHORT))
    whole, resume, _ = whole_and_resumed(tmp_path, partial(Event, change), make_env, make_model)
    assert torch.equal(parameters(resume()), parameters(whole))


def test_references_of_callbacks_lead_to_the_new_policy(tmp_path):
    class Keeper(Event):
        """Keep the optimizer and a parameter, and change the parameter after the resumption."""

        def _on_training_start(self) -> None:
            self.optimizer, self.bias = self.model.policy.optimizer, self.model.policy.action_net.bias

        def _on_rollout_end(self) -> None:
            if self.num_timesteps == 256:
                with torch.no_grad():
                    self.bias.fill_(0.5)

    whole, resume, callback = whole_and_resumed(tmp_path, Keeper)
    model = resume()
    assert callback.optimizer is model.policy.optimizer
    assert torch.equal(parameters(model), parameters(whole))


NAMED = {
    "callback Event 0.phase": (assign("phase", "phases/exploit"), cart_pole),
    "callback Event 0.stream": (assign("stream", iter(number for number in range(3))), cart_pole),
    "model.lr_schedule": (assign("model.lr_schedule", FloatSchedule(lambda progress: 1e-3 * progress)), cart_pole),
    "model.clip_range": (assign("model.clip_range", lambda progress: 0.5), cart_pole),
    "model.env.envs[0].reward": (nothing, switching(lambda env: lambda reward: -reward)),
}


@pytest.mark.parametrize("name", NAMED)
def test_attributes_that_cannot_be_restored_are_named(name, tmp_path):  # review core 9
    change, make_env = NAMED[name]
    _, resume, _ = whole_and_resumed(tmp_path, partial(Event, change), make_env)
    with pytest.warns(UserWarning, match=re.escape(f"TrainingCheckpoints: {name} cannot be restored and stay")) as caught:
        resume()
    assert len(caught) == 1


def test_attributes_that_cannot_be_pickled_are_reported_once(tmp_path, capsys):
    event = Event()
    event.stream = (number for number in range(3))
    ANO("MlpPolicy", cart_pole(), **ANO_SHORT).learn(96, callback=[TrainingCheckpoints(tmp_path, every=32), event])
    assert capsys.readouterr().out.count("checkpoints lack callback Event 0.stream, which cannot be pickled") == 1


def test_functions_that_the_program_builds_again_are_not_named(tmp_path):
    def make_env() -> VecEnv:
        return DummyVecEnv([lambda: gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: factor * reward)])

    factor = 1e-3
    make_model = partial(ANO, "MlpPolicy", learning_rate=lambda progress: factor * progress, **ANO_SHORT)
    whole, resume, _ = whole_and_resumed(tmp_path, lambda: Event(lambda event: None), make_env, make_model)
    assert torch.equal(parameters(resume()), parameters(whole))


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning")
@pytest.mark.filterwarnings("ignore:Training and eval env are not of the same type:UserWarning")
def test_an_evaluation_whose_environments_have_no_state_is_named(tmp_path):
    pytest.importorskip("envpool")

    def evaluation() -> EvalCallback:
        env = make_vec_env("CartPole-v1", 2, backend="envpool", seed=0)
        return EvalCallback(env, n_eval_episodes=1, eval_freq=10**6, verbose=0)

    whole, resume, _ = whole_and_resumed(tmp_path, evaluation)
    with pytest.warns(UserWarning, match="callback EvalCallback 0.eval_env cannot be restored"):
        model = resume()
    assert torch.equal(parameters(model), parameters(whole))


def test_a_program_that_lacks_a_function_of_the_checkpoint_is_rejected(tmp_path, monkeypatch):
    make_event = partial(Event, assign("model.lr_schedule", FloatSchedule(halved)))
    _, resume, _ = whole_and_resumed(tmp_path, make_event)
    monkeypatch.delitem(globals(), "halved")
    with pytest.raises(ValueError, match="refers to an object that this program does not define: .*halved"):
        resume()
