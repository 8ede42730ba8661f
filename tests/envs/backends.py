"""The vectorized environments whose contract is tested."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import make_vec_env


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None and "CI" not in os.environ


needs_envpool = pytest.mark.skipif(_absent("envpool"), reason="envpool is not installed")
needs_mujoco = pytest.mark.skipif(_absent("mujoco"), reason="mujoco is not installed")
needs_atari = pytest.mark.skipif(_absent("ale_py") or _absent("cv2"), reason="ale-py is not installed")


def _dummy(env_id: str, n_envs: int = 1, **kwargs: Any) -> VecEnv:
    return env_util.make_vec_env(env_id, n_envs, vec_env_cls=DummyVecEnv, **kwargs)


def _with(backend: str) -> Callable[..., VecEnv]:
    def make(env_id: str, n_envs: int = 1, **kwargs: Any) -> VecEnv:
        return make_vec_env(env_id, n_envs, backend=backend, **kwargs)

    return make


@dataclasses.dataclass(frozen=True)
class Case:
    """A function ``make(env_id, n_envs, **arguments of make_vec_env)``, and a task for it."""

    name: str
    env_id: str
    make: Callable[..., VecEnv]

    @property
    def atari(self) -> bool:
        return self.env_id == "Breakout-v5"


DUMMY = pytest.param(Case("dummy", "Hopper-v5", _dummy), id="dummy", marks=needs_mujoco)
DIRECT = pytest.param(Case("direct", "Hopper-v5", _with("gymnasium")), id="direct", marks=needs_mujoco)
ENVPOOL = pytest.param(Case("envpool", "Hopper-v5", _with("envpool")), id="envpool", marks=needs_envpool)
ATARI_PYTHON = pytest.param(Case("gymnasium", "Breakout-v5", _with("gymnasium")), id="gymnasium-atari", marks=needs_atari)
ATARI_ENVPOOL = pytest.param(Case("envpool", "Breakout-v5", _with("envpool")), id="envpool-atari", marks=needs_envpool)
ATARI_ALE = pytest.param(Case("ale", "Breakout-v5", _with("ale")), id="ale", marks=needs_atari)

MUJOCO = [DUMMY, DIRECT, ENVPOOL]
ATARI = [ATARI_PYTHON, ATARI_ENVPOOL, ATARI_ALE]
BATCHED = [ENVPOOL, ATARI_ENVPOOL, ATARI_ALE]
ALL = MUJOCO + ATARI


class RandomPolicy:
    """Draw actions; also a model for ``evaluate_policy``."""

    def __init__(self, env: VecEnv, seed: int = 0) -> None:
        self.env, self.random = env, np.random.default_rng(seed)

    def actions(self) -> np.ndarray:
        space = self.env.action_space
        if hasattr(space, "n"):
            return self.random.integers(space.n, size=self.env.num_envs)
        return self.random.uniform(space.low, space.high, (self.env.num_envs, *space.shape)).astype(space.dtype)

    def predict(self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False) -> tuple:
        return self.actions(), state
