"""SB3's ``evaluate_policy``, which ends whatever ends the episodes, and does not wait silently."""

import sys
import time
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common import evaluation
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor, is_vecenv_wrapped
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

# An Atari game, among the longest episodes in use, has at most 108,000 steps.
_MOST_STEPS = 1_000_000
_SECONDS_OF_SILENCE = 10.0


def evaluate_policy(
    model: PolicyPredictor, env: gym.Env | VecEnv, *arguments: Any, **keywords: Any
) -> tuple[float, float] | tuple[list[float], list[int]]:
    """Run whole episodes, as SB3's function of this name does.

    SB3 counts the episodes that Monitor reports. It thus waits without end if a wrapper outside of Monitor, such as
    ``gymnasium.wrappers.TimeLimit``, ends all episodes before Monitor sees an end. Here, such episodes count, with a warning.
    A line on stderr tells every ten seconds how far the evaluation is, unless episodes end in the meantime.

    :param model: object with SB3's ``predict``
    :param env: environment, or vectorized environments
    :param arguments: other arguments of SB3's function
    :param keywords: keyword arguments of SB3's function
    :return: as SB3's function
    :raises RuntimeError: if an episode does not end within 1,000,000 steps
    """
    if not isinstance(env, VecEnv):
        single = env
        env = DummyVecEnv([lambda: single])
    return evaluation.evaluate_policy(model, EvaluatedVecEnv(env), *arguments, **keywords)


class EvaluatedVecEnv(VecEnvWrapper):
    """Report every episode in ``infos[i]["episode"]``, also those that end outside of Monitor.

    :param venv: environments to evaluate in
    """

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        # A VecMonitor is outside of gymnasium's wrappers, so that it sees every end.
        is_monitored = bool(venv.env_is_wrapped(Monitor)[0])
        self._has_monitors = is_monitored and not is_vecenv_wrapped(venv, VecMonitor)

        # Of the running episodes, as the policy sees them.
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._first_steps: list[int | None] = [None] * self.num_envs

        # For the lines on stderr.
        self._episodes = 0
        self._steps = 0
        self._spoke = time.monotonic()

    def reset(self) -> VecEnvObs:
        """Reset all environments."""
        observations = self.venv.reset()

        self._returns[:] = 0.0
        self._lengths[:] = 0
        for index in range(self.num_envs):
            self._first_steps[index] = self._first_step(index)
        return observations

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments, and add what Monitor does not report.

        :raises RuntimeError: if an episode does not end
        """
        observations, rewards, dones, infos = self.venv.step_wait()

        self._steps += 1
        self._lengths += 1
        # Of what the outermost wrapper returns, which Monitor does not see.
        self._returns += rewards

        for index in np.flatnonzero(dones).tolist():
            first_step = self._first_step(index)
            # After a lost life of an Atari game, Monitor's episode continues: its first step is the same.
            is_unreported = self._has_monitors and "episode" not in infos[index]
            ended_outside = is_unreported and first_step != self._first_steps[index]
            if ended_outside:
                warnings.warn(
                    "a wrapper outside of Monitor ends episodes, such as env_wrapper: gymnasium.wrappers.TimeLimit; their "
                    "returns are sums of the rewards that it returns. Monitor sees the limit max_episode_steps in env_kwargs",
                    stacklevel=2,
                )
                # The two keys that SB3's function reads.
                infos[index]["episode"] = {"r": float(self._returns[index]), "l": int(self._lengths[index])}

            # Without Monitor, SB3's function counts every end itself.
            if "episode" in infos[index] or not self._has_monitors:
                self._first_steps[index] = first_step
                self._returns[index] = 0.0
                self._lengths[index] = 0
                self._episodes += 1
                self._spoke = time.monotonic()

        self._require_progress()
        return observations, rewards, dones, infos

    def _first_step(self, index: int) -> int | None:
        """Return the number of Monitor's steps before its present episode; None if there is no Monitor to ask."""
        if not self._has_monitors:
            return None
        try:
            total_steps = self.venv.get_attr("total_steps", [index])[0]
            rewards = self.venv.get_attr("rewards", [index])[0]
        except AttributeError:
            # A batch has no single Monitors, and reports all episodes.
            return None

        # The total includes the present episode, of which Monitor has a reward per step.
        return int(total_steps) - len(rewards)

    def _require_progress(self) -> None:
        """Say how far the evaluation is if no episode has ended for a while, and stop if none ends.

        :raises RuntimeError: if an episode does not end
        """
        # Of all environments, because SB3's function waits for each of them.
        longest = int(self._lengths.argmax())
        length = int(self._lengths[longest])
        if length >= _MOST_STEPS:
            raise RuntimeError(
                f"evaluation: environment {longest} has not ended its episode within {_MOST_STEPS:,} steps; "
                "give it a time limit, for example max_episode_steps in env_kwargs"
            )

        if time.monotonic() - self._spoke > _SECONDS_OF_SILENCE:
            self._spoke = time.monotonic()
            print(
                f"evaluation: {self._episodes} episodes in {self._steps:,} steps; the present one of environment {longest} "
                f"has {length:,} steps, and is given up after {_MOST_STEPS:,} (max_episode_steps in env_kwargs limits it)",
                file=sys.stderr,
                flush=True,
            )
