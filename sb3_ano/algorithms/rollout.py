"""Collection of rollouts: SB3's own loop, behind a guard against numbers that are none."""

from typing import TypeAlias

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize, unwrap_vec_wrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

Arrays: TypeAlias = np.ndarray | dict[str, np.ndarray] | tuple[np.ndarray, ...]


class FiniteGuard(VecEnvWrapper):
    """Raises where an environment returns NaN or infinity, naming the environment and the step.

    A single such number would spread through VecNormalize's statistics or the network to every environment, so what
    came before normalisation is searched first.
    """

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self._normalize = unwrap_vec_wrapper(venv, VecNormalize)
        self._step = 0

    def start_rollout(self, step: int, observations: VecEnvObs) -> None:
        """Check the observations from which a rollout starts.

        :param step: steps that each environment has made so far
        """
        self._step = step
        self._require_finite("observation", observations)

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = self.venv.step_wait()
        self._step += 1
        normalize = self._normalize
        if normalize is not None:
            self._require_finite("reward", normalize.old_reward)
            self._require_finite("observation", normalize.old_obs)
        self._require_finite("reward", rewards)
        self._require_finite("observation", observations)
        for index in np.flatnonzero(dones):
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                self._require_finite("terminal observation", terminal, environment=int(index))
        return observations, rewards, dones, infos

    def _require_finite(self, what: str, values: Arrays, environment: int | None = None) -> None:
        for key, array in _named_arrays(values):
            array = np.asarray(array)
            if array.dtype.kind != "f":
                continue
            finite = np.isfinite(array)
            if finite.all():
                continue
            where = np.argwhere(~finite)[0]
            index = int(where[0]) if environment is None else environment
            raise ValueError(
                f"environment {index} returned {array[tuple(where)]} in its {what}{key} at step {self._step} "
                f"(environments count from 0, steps are the environment's own); observations and rewards must be finite"
            )


def _named_arrays(values: Arrays) -> list[tuple[str, np.ndarray]]:
    if isinstance(values, dict):
        return [(f" {name!r}", array) for name, array in values.items()]
    if isinstance(values, tuple):
        return [(f" {i}", array) for i, array in enumerate(values)]
    return [("", values)]
