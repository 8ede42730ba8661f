"""Python environments, stepped one after another at little cost beyond their own steps."""

from collections import OrderedDict
from copy import deepcopy

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs


class DirectVecEnv(DummyVecEnv):
    """SB3's ``DummyVecEnv`` without its deep copies at every step.

    Attributes and methods are those of SB3's class. As there, ``buf_obs``, ``buf_rews``, ``buf_dones`` and ``buf_infos`` hold
    the last step and are overwritten by the next one, while what a step returns is new and belongs to the caller: arrays, the
    list of infos, the dictionaries in it, and ``terminal_observation``. Other values in infos belong to the environment.

    :param env_fns: functions that each make one environment
    :raises ValueError: if two of them return the same environment
    """

    def step_wait(self) -> VecEnvStepReturn:
        """Step every environment; those that are done are reset in the same step.

        :return: observations ``(n_envs, ...)``, rewards ``(n_envs,)`` float32, dones ``(n_envs,)`` bool, infos
        """
        # Looked up once instead of for each environment.
        actions = self.actions
        rewards: np.ndarray = self.buf_rews
        dones: np.ndarray = self.buf_dones
        only = self._only_buffer()
        infos = []

        for index, env in enumerate(self.envs):
            observation, reward, terminated, truncated, info = env.step(actions[index])
            done = terminated or truncated

            if done:
                # An environment may return one dictionary again and again, and the next step's must have no last observation.
                info = info.copy()
                # Copied before the reset, which may write into the same array.
                info["terminal_observation"] = deepcopy(observation)
            info["TimeLimit.truncated"] = truncated and not terminated
            self.buf_infos[index] = info

            # Another dictionary than that in buf_infos, because wrappers such as VecNormalize change what a step returns.
            returned = info.copy()
            if done:
                returned["terminal_observation"] = deepcopy(observation)
                observation, self.reset_infos[index] = env.reset()
            infos.append(returned)

            rewards[index] = reward
            dones[index] = done
            if only is not None:
                only[index] = observation
            else:
                self._save_obs(index, observation)

        return self._obs_from_buf(), rewards.copy(), dones.copy(), infos

    def _only_buffer(self) -> np.ndarray | None:
        """Return the buffer of observations, or None if they are a dictionary or a tuple."""
        return self.buf_obs.get(None)  # type: ignore[call-overload, no-any-return]

    def _obs_from_buf(self) -> VecEnvObs:
        only = self._only_buffer()
        if only is not None:
            return only.copy()

        copies: OrderedDict[str, np.ndarray] = OrderedDict()
        for key, buffer in self.buf_obs.items():
            copies[key] = buffer.copy()
        return dict_to_obs(self.observation_space, copies)
