"""Python environments, stepped one after another at little cost beyond their own steps."""

from copy import deepcopy
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs


class DirectVecEnv(DummyVecEnv):
    """SB3's ``DummyVecEnv`` without its deep copy of all info dictionaries at every step.

    What a step returns is new at each step and belongs to the caller: arrays, the list of infos, and the info dictionaries.
    The values inside the infos are the environment's own, except ``terminal_observation``, which is a copy.

    :param env_fns: functions that each make one environment
    :raises ValueError: if two of them return the same environment
    """

    def step_wait(self) -> VecEnvStepReturn:
        """Step every environment; those that are done are reset in the same step.

        :return: observations ``(n_envs, ...)``, rewards ``(n_envs,)`` float32, dones ``(n_envs,)`` bool, infos
        """
        rewards = np.empty(self.num_envs, np.float32)
        dones = np.empty(self.num_envs, bool)
        infos: list[dict[str, Any]] = []
        buffers = {key: np.empty_like(buffer) for key, buffer in self.buf_obs.items()}
        only: np.ndarray | None = buffers.get(None)  # type: ignore[call-overload]
        for index, env in enumerate(self.envs):
            observation, reward, terminated, truncated, info = env.step(self.actions[index])
            # An environment may return one dictionary again and again; what a caller keeps must not change.
            info = dict(info)
            info["TimeLimit.truncated"] = truncated and not terminated
            done = terminated or truncated
            if done:
                # Copied before the reset, which may write into the same array.
                info["terminal_observation"] = deepcopy(observation)
                observation, self.reset_infos[index] = env.reset()
            rewards[index] = reward
            dones[index] = done
            infos.append(info)
            if only is not None:
                only[index] = observation
            else:
                for key, buffer in buffers.items():
                    buffer[index] = observation[key]
        if only is not None:
            return only, rewards, dones, infos
        return dict_to_obs(self.observation_space, buffers), rewards, dones, infos
