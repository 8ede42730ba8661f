"""An environment that reports much, and a vector environment that is not gymnasium's own."""

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from tests.tiny_envs import BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, MaskedEnv

SPACES: dict[str, spaces.Space] = {
    "Box": BOX_OBSERVATIONS,
    "image": IMAGE_OBSERVATIONS,
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
    "Dict": DICT_OBSERVATIONS,
    "Tuple": spaces.Tuple([BOX_OBSERVATIONS, spaces.Discrete(3)]),
}
ACTIONS: dict[str, spaces.Space] = {"Discrete": spaces.Discrete(4), "Box": spaces.Box(-1.0, 1.0, (2,), np.float32)}


class Reporting(MaskedEnv):
    """Episodes terminate, or are truncated after 15 steps; infos have several kinds of values, and change their keys."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  # gymnasium's way
    speed = 1.0

    def __init__(self, observations: str = "Box", actions: str = "Discrete", render_mode: str | None = None) -> None:
        # Of this environment alone.
        super().__init__(deepcopy(SPACES[observations]), deepcopy(ACTIONS[actions]))
        self.render_mode = render_mode
        self.options: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        self.options = options
        observation, _ = super().reset(seed=seed)
        return observation, {"start": float(self.np_random.random()), "options": str(options or {})}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {"steps": self._steps, "text": f"step {self._steps}", "array": np.arange(3) * self._steps}
        if self._steps % 3 == 0:
            info["third"] = {"reward": reward, "action": np.asarray(action).tolist()}
        return observation, 0.1 * reward + float(self.np_random.random()), terminated, truncated, info

    def double(self, number: int, plus: int = 0) -> int:
        return 2 * number + plus

    def fail(self) -> None:
        raise ValueError("this method\nalways fails")

    def render(self) -> np.ndarray:
        return np.full((8, 8, 3), self._steps, dtype=np.uint8)


class CustomVector(VectorEnv):
    """A vector environment that is none of gymnasium's, in one of the three modes.

    :param makers: functions that each make one environment
    :param mode: how environments are reset
    :param resets_some: whether it takes ``options={"reset_mask": ...}``
    """

    def __init__(self, makers: list, mode: AutoresetMode, resets_some: bool = True) -> None:
        self.makers = [make() for make in makers]
        self.num_envs = len(makers)
        self.mode = mode
        self.resets_some = resets_some
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = self.makers[0].observation_space
        self.single_action_space = self.makers[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        # It returns the same arrays again and again.
        self.rows = create_empty_array(self.single_observation_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        options = dict(options or {})
        mask = options.pop("reset_mask", np.ones(self.num_envs, bool))
        if not self.resets_some:
            mask = np.ones(self.num_envs, bool)
        infos: dict[str, Any] = {}
        if mask.all():
            self.last = [None] * self.num_envs
        for index in np.flatnonzero(mask):
            own = None if seed is None else seed + int(index)
            self.last[index], info = self.makers[index].reset(seed=own, options=options or None)
            infos = self._add_info(infos, info, index)
        if mask.all():
            self.done = np.zeros(self.num_envs, bool)
        self.done = self.done & ~mask
        return concatenate(self.single_observation_space, self.last, self.rows), infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, bool)
        truncated = np.zeros(self.num_envs, bool)
        infos: dict[str, Any] = {}
        for index, env in enumerate(self.makers):
            if self.done[index]:
                assert self.mode is AutoresetMode.NEXT_STEP
                self.last[index], info = env.reset()
                self.done[index] = False
                infos = self._add_info(infos, info, index)
                continue
            self.last[index], rewards[index], terminated[index], truncated[index], info = env.step(actions[index])
            done = terminated[index] or truncated[index]
            if done and self.mode is AutoresetMode.SAME_STEP:
                infos = self._add_info(infos, {"final_obs": self.last[index], "final_info": info}, index)
                self.last[index], info = env.reset()
            else:
                self.done[index] = done
            infos = self._add_info(infos, info, index)
        return concatenate(self.single_observation_space, self.last, self.rows), rewards, terminated, truncated, infos

    def render(self) -> tuple:
        return tuple(env.render() for env in self.makers)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.makers:
            env.close()
