"""Programs that are interrupted and run again, for the tests of checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano import ANO
from sb3_ano.checkpoints import TrainingCheckpoints
from sb3_ano.envs import make_vec_env
from tests.common import parameters

TOTAL, EVERY = 320, 64
PPO_SHORT = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu"}
ANO_SHORT = {**PPO_SHORT, "torch_compile": False}
make_ano = partial(ANO, "MlpPolicy", **ANO_SHORT)


class Interrupted(BaseException):
    """Caught by nobody, like a signal."""


class Rows(KVWriter):
    """Keep the rows of the log, without times."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def write(self, key_values, key_excluded, step=0) -> None:
        self.rows.append({"step": step} | {key: value for key, value in key_values.items() if not key.startswith("time/")})


def cart_pole(n_envs: int = 1, seed: int = 3) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs, backend="gymnasium", seed=seed)


class Program:
    """Callbacks, environments and model as a program builds them when it starts."""

    def __init__(
        self, make_callbacks: Callable = list, make_env: Callable = cart_pole, make_model: Callable = make_ano
    ) -> None:
        torch.manual_seed(np.random.default_rng().integers(2**31))  # another process
        np.random.seed()
        self.model, self.log, self.callbacks = make_model(make_env()), Rows(), [*make_callbacks()]
        self.model.set_logger(Logger(None, [self.log]))

    def learn(self, *more: BaseCallback) -> "Program":
        self.model.learn(TOTAL, callback=[*self.callbacks[:1], *more, *self.callbacks[1:]])
        return self


def interrupt(directory: Path, program: Program, at: int = 225, every: int = EVERY, verbose: int = 0) -> None:
    """Start a training with checkpoints that ends after ``at`` steps, in the middle of a rollout."""

    def stop(*variables: dict) -> bool:
        if program.model.num_timesteps >= at:
            raise Interrupted
        return True

    with pytest.raises(Interrupted):
        program.learn(TrainingCheckpoints(directory, every, resume=True, verbose=verbose), ConvertCallback(stop))


def resume(directory: Path, program: Program, every: int = EVERY, **settings) -> Program:
    return program.learn(TrainingCheckpoints(directory, every, resume=True, **{"verbose": 0, **settings}))


def assert_same(again: Program, whole: Program) -> None:
    """Compare a resumed run with an uninterrupted one, bit for bit."""
    assert torch.equal(parameters(again.model), parameters(whole.model))
    assert again.log.rows == whole.log.rows[-len(again.log.rows) :]
    assert 0 < len(again.log.rows) < len(whole.log.rows)
    # By which "auto" decides whether to compile the updates.
    start = "_num_timesteps_at_start"
    assert (getattr(again.model, start), again.model._total_timesteps) == (getattr(whole.model, start), TOTAL)
