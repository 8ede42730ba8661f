"""Collection of rollouts: SB3's own loop, behind a guard against numbers that are none."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

Arrays: TypeAlias = np.ndarray | dict[str, np.ndarray] | tuple[np.ndarray, ...]


class _FiniteCheck:
    """Looks at what one step of all environments returned, and counts the steps for the message."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, result: VecEnvStepReturn) -> VecEnvStepReturn:
        observations, rewards, dones, infos = result
        self._step += 1
        require_finite("reward", rewards, self._step)
        require_finite("observation", observations, self._step)
        for index in np.flatnonzero(dones):
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                require_finite("terminal observation", terminal, self._step, environment=int(index))
        return result


class FiniteGuard(VecEnvWrapper):
    """Raises where an environment returns NaN or infinity, naming the environment and the step.

    :param venv: the environments to guard
    :param step: steps that each of them has made so far in this training, for the message
    """

    def __init__(self, venv: VecEnv, step: int) -> None:
        super().__init__(venv)
        self._check = _FiniteCheck(step)

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step(self, actions: np.ndarray) -> VecEnvStepReturn:
        # The inner step, not step_async and step_wait: a wrapper may define nothing else.
        return self._check(self.venv.step(actions))

    def step_wait(self) -> VecEnvStepReturn:
        return self._check(self.venv.step_wait())


@contextlib.contextmanager
def guarded(env: VecEnv, step: int, last_observations: Any) -> Iterator[VecEnv]:
    """Guard ``env`` for the length of a rollout.

    VecNormalize is guarded below as well: it would spread one such number over the statistics of all environments, and
    clip an infinite one.

    :param env: the training environment
    :param step: steps that each environment has made so far
    :param last_observations: where the rollout starts
    :raises ValueError: if an observation or reward is not finite
    """
    normalize = unwrap_vec_normalize(env)
    if normalize is not None:
        require_finite("observation", normalize.old_obs, step)
    require_finite("observation", last_observations, step)
    with contextlib.nullcontext() if normalize is None else _checked_steps(normalize.venv, step):
        yield FiniteGuard(env, step)


@contextlib.contextmanager
def _checked_steps(env: VecEnv, step: int) -> Iterator[None]:
    """Check the steps of ``env`` without a wrapper: SB3's callbacks compare the wrappers of training and evaluation."""
    check, step_wait = _FiniteCheck(step), env.step_wait
    env.step_wait = lambda: check(step_wait())  # type: ignore[method-assign]
    try:
        yield
    finally:
        del env.step_wait  # what is left is the method of the class


def require_finite(what: str, values: Arrays, step: int, environment: int | None = None) -> None:
    """Complain of the first number in ``values`` that is none.

    :param what: what the values are, for the message
    :param values: with the environments along the first axis, unless ``environment`` says whose they are
    :raises ValueError: naming environment and step
    """
    for key, array in _named_arrays(values):
        array = np.asarray(array)
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        where = np.argwhere(~np.isfinite(array))[0]
        index = int(where[0]) if environment is None else environment
        raise ValueError(
            f"environment {index} returned {array[tuple(where)]} in its {what}{key} at step {step} of the training "
            "(environments count from 0, steps for each environment); observations and rewards must be finite"
        )


def _named_arrays(values: Arrays) -> list[tuple[str, np.ndarray]]:
    if isinstance(values, dict):
        return [(f" {name!r}", array) for name, array in values.items()]
    if isinstance(values, tuple):
        return [(f" {i}", array) for i, array in enumerate(values)]
    return [("", values)]
