"""Programs that are interrupted and run again, for the tests of checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano import ANO
from sb3_ano.checkpoints import TrainingCheckpoints
from sb3_ano.envs import make_vec_env

TOTAL, EVERY = 320, 64
SHORT = {"n_steps": 32, "seed": 3, "device": "cpu"}
PPO_SHORT = {**SHORT, "batch_size": 32, "n_epochs": 2}
ANO_SHORT = {**PPO_SHORT, "torch_compile": False}
make_ano = partial(ANO, "MlpPolicy", **ANO_SHORT)


class Interrupted(BaseException):
    """Caught by nobody, like a signal."""


class Interrupt(BaseCallback):
    """End the process, as far as the training is concerned, in the middle of a rollout."""

    at: int  # of the class, because attributes would be restored

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.at:
            raise Interrupted
        return True


def cart_pole(n_envs: int = 1, seed: int = 3) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs, backend="gymnasium", seed=seed)


def learn(model: OnPolicyAlgorithm, *callbacks: BaseCallback) -> OnPolicyAlgorithm:
    return model.learn(TOTAL, [*callbacks])


def interrupt(directory: Path, learn: Callable, at: int = 220, every: int = EVERY) -> None:
    """Start a training with checkpoints that is interrupted after ``at`` steps. ``learn`` takes the callbacks for that."""
    interrupting = type("Interrupt", (Interrupt,), {"at": at})()
    with pytest.raises(Interrupted):
        learn(TrainingCheckpoints(directory, every, resume=True, verbose=0), interrupting)


def whole_and_resumed(directory: Path, make_callback: Callable, make_env: Callable = cart_pole, make_model=make_ano) -> tuple:
    """Return an uninterrupted model, the call that resumes an interrupted one, and the callback of the latter."""
    whole = make_model(make_env()).learn(TOTAL, make_callback())
    interrupt(directory, partial(learn, make_model(make_env()), make_callback()))
    callback, checkpoints = make_callback(), TrainingCheckpoints(directory, EVERY, resume=True, verbose=0)
    return whole, partial(learn, make_model(make_env()), callback, checkpoints), callback
