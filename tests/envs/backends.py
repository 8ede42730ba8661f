"""The vectorized environments whose contract is tested."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.envs import make_vec_env


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None and "CI" not in os.environ


needs_envpool = pytest.mark.skipif(_absent("envpool"), reason="envpool is not installed")
needs_mujoco = pytest.mark.skipif(_absent("mujoco"), reason="mujoco is not installed")
needs_atari = pytest.mark.skipif(_absent("ale_py") or _absent("cv2"), reason="ale-py is not installed")
needs_all = [needs_envpool, needs_mujoco, needs_atari]


@dataclasses.dataclass(frozen=True)
class Case:
    """A backend, or SB3's DummyVecEnv, and a task for it. ``make`` has the arguments of ``make_vec_env``."""

    name: str
    env_id: str

    @property
    def atari(self) -> bool:
        return self.env_id == "Breakout-v5"

    @property
    def make(self) -> Callable[..., VecEnv]:
        return env_util.make_vec_env if self.name == "dummy" else partial(make_vec_env, backend=self.name)


ENVPOOL = Case("envpool", "Hopper-v5")
MUJOCO = {
    "dummy": Case("dummy", "Hopper-v5"),
    "direct": Case("gymnasium", "Hopper-v5"),
    "process": Case("process", "Hopper-v5"),
    "envpool": ENVPOOL,
}
ATARI = {f"{name}-atari": Case(name, "Breakout-v5") for name in ("gymnasium", "envpool", "ale")}
BATCHED = {"envpool": ENVPOOL} | {name: case for name, case in ATARI.items() if case.name != "gymnasium"}


def cases(chosen: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


class RandomPolicy:
    """Draw actions; also a model for ``evaluate_policy``."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.random = env, np.random.default_rng(0)

    def actions(self) -> np.ndarray:
        space = self.env.action_space
        if hasattr(space, "n"):
            return self.random.integers(space.n, size=self.env.num_envs)
        return self.random.uniform(space.low, space.high, (self.env.num_envs, *space.shape)).astype(space.dtype)

    def predict(self, observation: Any, **kwargs: Any) -> tuple:
        return self.actions(), None
