"""The returns of ``enjoy`` with several environments and in Atari games, for which the zoo prints no mean."""

from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn


class EpisodeCounter(VecEnvWrapper):
    """Keep the returns and lengths of all episodes.

    :param venv: environments
    :param only_monitored: count only episodes that end for the monitor, too: in Atari games a lost life looks like an end
    """

    def __init__(self, venv: VecEnv, only_monitored: bool) -> None:
        super().__init__(venv)
        self.only_monitored = only_monitored
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.successes: list[bool] = []
        self._running_returns = np.zeros(venv.num_envs)
        self._running_lengths = np.zeros(venv.num_envs, dtype=int)

    def reset(self) -> Any:
        """Reset all environments."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments and keep the episodes that end."""
        observations, rewards, dones, infos = self.venv.step_wait()
        self._running_returns += rewards
        self._running_lengths += 1
        for index in np.flatnonzero(dones):
            self._end(int(index), infos[index])
        return observations, rewards, dones, infos

    def _end(self, index: int, info: dict[str, Any]) -> None:
        monitored = info.get("episode")
        if self.only_monitored and monitored is not None:
            self.returns.append(float(monitored["r"]))
            self.lengths.append(int(monitored["l"]))
        elif not self.only_monitored:
            self.returns.append(float(self._running_returns[index]))
            self.lengths.append(int(self._running_lengths[index]))
        if info.get("is_success") is not None:
            self.successes.append(bool(info["is_success"]))
        self._running_returns[index] = 0.0
        self._running_lengths[index] = 0

    def print_summary(self, n_timesteps: int) -> None:
        """Print the mean return and length in the zoo's words, or that no episode has ended.

        :param n_timesteps: steps of each environment
        """
        if not self.returns:
            print(f"No episode has ended within {n_timesteps} steps of each environment; use a larger -n")
            return
        if self.successes:
            print(f"Success rate: {100 * np.mean(self.successes):.2f}%")
        print(f"{len(self.returns)} Episodes")
        print(f"Mean reward: {np.mean(self.returns):.2f} +/- {np.std(self.returns):.2f}")
        print(f"Mean episode length: {np.mean(self.lengths):.2f} +/- {np.std(self.lengths):.2f}")
