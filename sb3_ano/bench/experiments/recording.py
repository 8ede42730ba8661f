"""What is written down while an algorithm trains: episodes, evaluations, and what each update did to the policy."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_ano.bench.experiments.tables import LOGGED, TableStream

_SAMPLES_AT_ONCE = 4096
_FLUSH_SECONDS = 10.0


class Clock:
    """Seconds of training; evaluations and measurements do not count."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0

    def start(self) -> None:
        """Begin at zero."""
        self._start, self._paused = time.perf_counter(), 0.0

    def seconds(self) -> float:
        """Seconds since the start without pauses."""
        return time.perf_counter() - self._start - self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin


class EpisodeRecorder(VecEnvWrapper):
    """Writes a row for each episode that ends; below VecNormalize and without a callback, so that training stays as fast.

    :param env: the training environments, with the statistics of SB3's Monitor in their infos
    :param table: of the episodes
    :param clock: of the training
    """

    def __init__(self, env: VecEnv, table: TableStream, clock: Clock) -> None:
        super().__init__(env)
        self._table, self._clock = table, clock
        self._timesteps = 0

    def reset(self) -> VecEnvObs:
        """Start new episodes everywhere."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments."""
        result = self.venv.step_wait()
        self._timesteps += self.num_envs
        dones, infos = result[2], result[3]
        if np.count_nonzero(dones):
            for index in np.flatnonzero(dones):
                episode = infos[index].get("episode")
                if episode is not None:
                    self._record(episode)
        return result

    def _record(self, episode: dict[str, Any]) -> None:
        self._table.add(
            {
                "timesteps": self._timesteps,
                "wall_seconds": self._clock.seconds(),
                "episode_return": float(episode["r"]),
                "episode_length": int(episode["l"]),
            }
        )


class UpdateRecorder:
    """Writes a row for each update, and evaluates the policy at even distances.

    :param model: in training
    :param evaluation_env: its environments for evaluation
    :param points: evaluations, the last one at the end of the training
    :param episodes: of each
    :param tables: streams by name
    :param clock: of the training
    :param report: gets the number of steps that are done
    """

    def __init__(
        self,
        model: OnPolicyAlgorithm,
        evaluation_env: VecEnv,
        total_timesteps: int,
        points: int,
        episodes: int,
        tables: dict[str, TableStream],
        clock: Clock,
        report: Callable[[int], None],
    ) -> None:
        self._model, self._evaluation_env = model, evaluation_env
        self._due = [math.ceil(total_timesteps * point / points) for point in range(1, points + 1)]
        self._episodes = episodes
        self._tables, self._clock, self._report = tables, clock, report
        self._flushed = time.monotonic()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Record every update of the model inside the block; outside, nothing of this is in the model, which can be saved."""
        train = self._model.train

        def train_and_record() -> None:
            self._model.logger.name_to_value.clear()
            train()
            with self._clock.paused():
                self._record()

        self._model.train = train_and_record  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._model.train  # what is left is the method of the class

    def _record(self) -> None:
        done, seconds = self._model.num_timesteps, self._clock.seconds()
        logged = self._model.logger.name_to_value
        row = {name: float(logged[f"train/{name}"]) for name in LOGGED if f"train/{name}" in logged}
        row |= measure_update(self._model)
        self._tables["diagnostics"].add({"timesteps": done, "wall_seconds": seconds, **row})
        evaluated = bool(self._due) and done >= self._due[0]
        if evaluated:
            self._due = [point for point in self._due if point > done]
            self._evaluate(done, seconds)
        if evaluated or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            for table in self._tables.values():
                table.flush()
            self._flushed = time.monotonic()
        self._report(done)

    def _evaluate(self, done: int, seconds: float) -> None:
        returns, lengths = evaluate_policy(
            self._model, self._evaluation_env, self._episodes, deterministic=True, return_episode_rewards=True, warn=False
        )
        pairs = zip(np.asarray(returns).tolist(), np.asarray(lengths).tolist(), strict=True)
        for episode, (episode_return, length) in enumerate(pairs):
            row = {"timesteps": done, "wall_seconds": seconds, "episode": episode}
            self._tables["evaluations"].add({**row, "episode_return": episode_return, "episode_length": length})


def measure_update(model: OnPolicyAlgorithm) -> dict[str, float]:
    """How far an update moved the policy, from all samples of its rollout.

    Algorithms log this of minibatches on the way, each in its own manner, or not at all.

    :param model: after its update, with the rollout in its buffer
    :return: ``approx_kl`` (mean of ``r - 1 - log r``), ``ratio_mean``, ``ratio_max``, and ``clip_fraction``, the share of
        samples whose ratio is outside the radius, NaN where the algorithm has none
    """
    buffer = model.rollout_buffer
    size = buffer.buffer_size * buffer.n_envs
    parts = []
    with torch.no_grad():
        for start in range(0, size, _SAMPLES_AT_ONCE):
            samples = buffer._get_samples(np.arange(start, min(start + _SAMPLES_AT_ONCE, size)))
            actions = samples.actions
            if isinstance(model.action_space, spaces.Discrete):
                actions = actions.long().flatten()
            _, log_prob, _ = model.policy.evaluate_actions(samples.observations, actions)
            parts.append((log_prob - samples.old_log_prob).double().cpu().numpy())
    log_ratio = np.concatenate(parts)
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)
    outside = float("nan")
    if hasattr(model, "clip_range"):
        progress = model._current_progress_remaining
        logged = model.logger.name_to_value  # has the radii of this update, also where desired_kl adapts them
        low = logged.get("train/clip_range", model.clip_range(progress))
        high = logged.get("train/clip_range_high", low)
        outside = float(((ratio < 1.0 - low) | (ratio > 1.0 + high)).mean())
    return {
        "approx_kl": float((ratio - 1.0 - log_ratio).mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "clip_fraction": outside,
    }
