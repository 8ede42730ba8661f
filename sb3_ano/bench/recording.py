"""Records of a training: episodes, evaluations, and the distance that each update moved the policy."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.algorithms.policy_evaluation import make_evaluation
from sb3_ano.bench.plan import Run
from sb3_ano.checkpoints.native import random_state, set_random_state
from sb3_ano.envs.evaluation import evaluate_policy

_SAMPLES_AT_ONCE = 4096


class EpisodeRecorder(VecEnvWrapper):
    """Write SB3's ``monitor.csv``, with the column ``timesteps``, for all environments of a training.

    It is a wrapper below VecNormalize and no callback, because a callback would slow down the collection of rollouts.

    :param env: environments whose infos have the episode statistics of SB3's Monitor
    :param file: file to write
    :param clock: function that returns the seconds of the training
    :param append: whether to append to the file, which the checkpoint then truncates to where it resumes
    """

    def __init__(self, env: VecEnv, file: Path, clock: Callable[[], float], append: bool = False) -> None:
        super().__init__(env)
        self._writer = ResultsWriter(str(file), {"t_start": time.time()}, ("timesteps",), override_existing=not append)
        self._clock = clock
        self._timesteps = 0

    def reset(self) -> VecEnvObs:
        """Reset all environments."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments, and record the episodes that end."""
        observations, rewards, dones, infos = self.venv.step_wait()
        self._timesteps += self.num_envs
        for index in np.flatnonzero(dones):
            if episode := infos[index].get("episode"):
                row = {"r": float(episode["r"]), "l": int(episode["l"]), "t": round(self._clock(), 3)}
                self._writer.write_row({**row, "timesteps": self._timesteps})
        return observations, rewards, dones, infos

    def close(self) -> None:
        """Close the file and the environments."""
        self._writer.close()
        self.venv.close()


class UpdateRecorder(BaseCallback):
    """Record SB3's ``progress.csv``, a row per update, and ``evaluations.npz``.

    The rows are part of the checkpoints, so that a resumed training continues them, and files at its end.

    :param directory: directory of the run
    :param run: run to record
    """

    #: The collection of rollouts need not prepare tensors and local variables for it.
    reads_locals = False
    model: OnPolicyAlgorithm

    def __init__(self, directory: Path, run: Run) -> None:
        super().__init__()
        self.directory = directory
        points = run.evaluation["points"]
        self.due = [math.ceil(run.total_timesteps * point / points) for point in range(1, points + 1)]
        self.episodes, self.deterministic = run.evaluation["episodes"], run.evaluation["deterministic"]
        self.rows: list[dict[str, float]] = []
        self.evaluations: list[tuple[int, list[float], list[int]]] = []
        self.seconds_paused = 0.0

    def seconds(self) -> float:
        """Return the seconds of the training, without evaluations and measurements."""
        return (time.time_ns() - self.model.start_time) / 1e9 - self.seconds_paused

    def _on_step(self) -> bool:
        return True

    @contextlib.contextmanager
    def attached(self, model: OnPolicyAlgorithm, evaluation_env: VecEnv, seed: int) -> Iterator[None]:
        """Record every update of a model inside the block, and write the files at its end.

        The method is replaced in the class: in the instance, it would be saved with the model.

        :param model: model in training
        :param evaluation_env: environments for evaluation
        :param seed: seed of the first evaluation
        """

        # A function, because checkpoints would store the environments of an attribute as a part of the training's state.
        def evaluate(number: int) -> tuple[list[float], list[int]]:
            env, ours, theirs = evaluation_env, unwrap_vec_normalize(evaluation_env), model.get_vec_normalize_env()
            if ours is not None and theirs is not None and theirs.norm_obs:
                ours.obs_rms = theirs.obs_rms
            state = random_state()
            torch.manual_seed(seed + number)
            env.seed(seed + number * env.num_envs)
            with torch.no_grad():
                returns, lengths = evaluate_policy(
                    with_masks(model, env), env, self.episodes, self.deterministic, return_episode_rewards=True, warn=False
                )
            set_random_state(state)
            return np.asarray(returns, float).tolist(), np.asarray(lengths).tolist()

        recorder, kind, train = self, type(model), type(model).train

        def train_and_record(self: OnPolicyAlgorithm) -> None:
            if self is not model:
                return train(self)
            self.logger.name_to_value.clear()
            train(self)
            return recorder._record(evaluate)

        # Unlike an assignment, patch.object also restores a method that the class inherits.
        with mock.patch.object(kind, "train", train_and_record):
            yield
        pd.DataFrame(self.rows).to_csv(self.directory / "progress.csv", index=False)
        timesteps, results, lengths = zip(*self.evaluations, strict=True)
        np.savez(self.directory / "evaluations.npz", timesteps=timesteps, results=results, ep_lengths=lengths)

    def _record(self, evaluate: Callable[[int], tuple[list[float], list[int]]]) -> None:
        start, seconds, done = time.perf_counter(), self.seconds(), self.model.num_timesteps
        row = {"time/total_timesteps": done, "time/seconds": round(seconds, 3)}
        row |= {name: float(value) for name, value in self.logger.name_to_value.items() if name.startswith("train/")}
        self.rows.append(row | {f"update/{name}": value for name, value in measure_update(self.model).items()})
        if self.due and done >= self.due[0]:
            self.due = [point for point in self.due if point > done]
            self.evaluations.append((done, *evaluate(len(self.evaluations))))
        self.seconds_paused += time.perf_counter() - start


def measure_update(model: OnPolicyAlgorithm) -> dict[str, float]:
    """Measure how far an update moved the policy, on all samples of its rollout.

    Algorithms log such numbers for minibatches during the update, each in its own way, or not at all.

    :param model: model after an update, with the rollout in its buffer
    :return: ``kl_after`` (mean of ``r - 1 - log r``), ``ratio_mean_after``, ``ratio_max_after``, and ``outside_after``, the
        fraction of samples whose ratio is outside the radius, NaN for algorithms without a radius
    """
    buffer = model.rollout_buffer
    size = buffer.buffer_size * buffer.n_envs
    parts = []
    evaluate = make_evaluation(model.policy, "float32")
    with torch.no_grad():
        for start in range(0, size, _SAMPLES_AT_ONCE):
            samples: Any = buffer._get_samples(np.arange(start, min(start + _SAMPLES_AT_ONCE, size)))
            actions = samples.actions
            if isinstance(model.action_space, spaces.Discrete):
                actions = actions.long().flatten()
            _, log_prob, _ = evaluate(samples, actions)
            parts.append((log_prob - samples.old_log_prob).double().cpu().numpy())
    log_ratio = np.concatenate(parts)
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)
    outside = float("nan")
    if hasattr(model, "clip_range"):
        logged = model.logger.name_to_value  # has the radii of this update, also where desired_kl adapts them
        low = logged.get("train/clip_range", model.clip_range(model._current_progress_remaining))
        high = logged.get("train/clip_range_high", low)
        outside = float(((ratio < 1.0 - low) | (ratio > 1.0 + high)).mean())
    return {
        "kl_after": float((ratio - 1.0 - log_ratio).mean()),
        "ratio_mean_after": float(ratio.mean()),
        "ratio_max_after": float(ratio.max()),
        "outside_after": outside,
    }
