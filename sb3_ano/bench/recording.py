"""Records of a training: episodes, evaluations, and the distance that each update moved the policy.

They use what SB3 offers to any callback, and nothing of the algorithms that are recorded.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_ano.algorithms.contrib import with_masks
from sb3_ano.bench.plan import Run
from sb3_ano.checkpoints.native import random_state, set_random_state
from sb3_ano.envs.evaluation import evaluate_policy

#: Evaluate a model for the n-th time: returns and lengths of the episodes.
Evaluator = Callable[[OnPolicyAlgorithm, int], tuple[list[float], list[int]]]
_SAMPLES_AT_ONCE = 4096


class EpisodeRecorder(VecEnvWrapper):
    """Write SB3's ``monitor.csv``, with the column ``timesteps``, for all environments of a training.

    It is a wrapper below VecNormalize and no callback, because a callback would slow down the collection of rollouts.

    :param env: environments whose infos have the episode statistics of SB3's Monitor
    :param file: file to write
    :param clock: function that returns the seconds of the training
    :param append: whether to append to the file, which the checkpoint then truncates to where it resumes
    """

    def __init__(
        self,
        env: VecEnv,
        file: Path,
        clock: Callable[[], float],
        append: bool = False,
    ) -> None:
        super().__init__(env)
        header: dict[str, float | str] = {"t_start": time.time()}
        self._writer = ResultsWriter(
            str(file),
            header,
            ("timesteps",),
            override_existing=not append,
        )
        self._clock = clock
        self._timesteps = 0

    def reset(self) -> VecEnvObs:
        """Reset all environments."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments, and record the episodes that end."""
        observations, rewards, dones, infos = self.venv.step_wait()
        # All environments step together, and each step is one of the training.
        self._timesteps += self.num_envs

        for index in np.flatnonzero(dones):
            episode = infos[index].get("episode")
            # A lost life ends no episode.
            if episode is not None:
                row = {
                    "r": float(episode["r"]),
                    "l": int(episode["l"]),
                    "t": round(self._clock(), 3),
                    "timesteps": self._timesteps,
                }
                self._writer.write_row(row)

        return observations, rewards, dones, infos

    def close(self) -> None:
        """Close the file and the environments."""
        self._writer.close()
        self.venv.close()


class UpdateRecorder(BaseCallback):
    """Record SB3's ``progress.csv``, a row per update, and ``evaluations.npz``.

    An update is over when the next rollout starts, or the training ends. The rows are part of the checkpoints, so that a
    resumed training continues them; :meth:`write` writes the files.

    :param directory: directory of the run
    :param run: run to record
    :param evaluate: evaluates the model. A function, because checkpoints would store the environments of an attribute as a
        part of the training's state
    """

    #: The collection of rollouts need not prepare tensors and local variables for it.
    reads_locals = False
    model: OnPolicyAlgorithm

    def __init__(
        self,
        directory: Path,
        run: Run,
        evaluate: Evaluator,
    ) -> None:
        super().__init__()
        points = run.evaluation["points"]
        self.due = []
        for point in range(1, points + 1):
            self.due.append(math.ceil(run.total_timesteps * point / points))
        self.directory = directory
        self.evaluate = evaluate
        self.rows: list[dict[str, float]] = []
        self.evaluations: list[tuple[int, list[float], list[int]]] = []
        self.seconds_paused = 0.0
        # Rollout of the update that has not been recorded.
        self.rollout: RolloutBuffer | None = None

    def seconds(self) -> float:
        """Return the seconds of the training, without evaluations and measurements."""
        return (time.time_ns() - self.model.start_time) / 1e9 - self.seconds_paused

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        # The buffer gets new arrays before the next rollout, and its copy keeps those of this one.
        self.rollout = copy.copy(self.model.rollout_buffer)
        # What the update does not log must not be taken for its values.
        self.logger.name_to_value.clear()

    def _on_rollout_start(self) -> None:
        self._record()

    def _on_training_end(self) -> None:
        self._record()

    def _record(self) -> None:
        """Record the last update, and evaluate the model if that is due."""
        if self.rollout is None:
            return

        start = time.perf_counter()
        done = self.model.num_timesteps
        # SB3's names, and milliseconds.
        row = {"time/total_timesteps": done, "time/seconds": round(self.seconds(), 3)}

        # What the algorithm has logged of its update
        for name, value in self.logger.name_to_value.items():
            if name.startswith("train/"):
                row[name] = float(value)
        for name, value in measure_update(self.model, self.rollout).items():
            row[f"update/{name}"] = value
        self.rows.append(row)
        self.rollout = None

        if self.due and done >= self.due[0]:
            # A long rollout can pass several points, which are one evaluation.
            self.due = [point for point in self.due if point > done]
            returns, lengths = self.evaluate(self.model, len(self.evaluations))
            self.evaluations.append((done, returns, lengths))

        # Speeds are those of the training alone.
        self.seconds_paused += time.perf_counter() - start

    def write(self) -> None:
        """Write the files of a training that has ended."""
        pd.DataFrame(self.rows).to_csv(self.directory / "progress.csv", index=False)
        timesteps, results, lengths = zip(*self.evaluations, strict=True)
        np.savez(
            self.directory / "evaluations.npz",
            timesteps=timesteps,
            results=results,
            ep_lengths=lengths,
        )


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Leave the process-wide random generators as they were before the block, so that the training does not notice it."""
    # Python's, NumPy's and PyTorch's.
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def make_evaluator(
    env: VecEnv,
    episodes: int,
    deterministic: bool,
    seed: int,
) -> Evaluator:
    """Return a function that evaluates a model.

    :param env: environments for evaluation, which get the training's normalization of observations
    :param episodes: episodes per evaluation
    :param deterministic: whether actions are the mode of the policy
    :param seed: seed of the first evaluation
    """

    def evaluate(model: OnPolicyAlgorithm, number: int) -> tuple[list[float], list[int]]:
        ours = unwrap_vec_normalize(env)
        theirs = model.get_vec_normalize_env()
        # The training continues with these statistics. They are only read here.
        if ours is not None and theirs is not None and theirs.norm_obs:
            ours.obs_rms = theirs.obs_rms

        with same_random_state(), torch.no_grad():
            # Other actions and episodes in each evaluation
            torch.manual_seed(seed + number)
            env.seed(seed + number * env.num_envs)
            actor = with_masks(model, env)
            returns, lengths = evaluate_policy(
                actor,
                env,
                episodes,
                deterministic,
                return_episode_rewards=True,
                warn=False,
            )

        return np.asarray(returns, float).tolist(), np.asarray(lengths).tolist()

    return evaluate


def measure_update(model: OnPolicyAlgorithm, rollout: RolloutBuffer) -> dict[str, float]:
    """Measure how far an update moved the policy, on all samples of its rollout.

    Algorithms log such numbers for minibatches during the update, each in its own way, or not at all.

    :param model: model after the update
    :param rollout: rollout of the update
    :return: ``kl_after`` (mean of ``r - 1 - log r``), ``ratio_mean_after``, ``ratio_max_after``, and ``outside_after``, the
        fraction of samples whose ratio is outside the radius, NaN for algorithms without a radius
    """
    parts = []

    # The buffer shuffles its samples.
    with same_random_state(), torch.no_grad():
        for samples in rollout.get(_SAMPLES_AT_ONCE):
            # In float64, because the KL divergence is a difference of almost equal numbers.
            parts.append(_log_ratios(model, samples).double().cpu().numpy())

    # A ratio may be too large for a number, and is then infinite.
    log_ratio = np.concatenate(parts)
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)

    outside = float("nan")
    if hasattr(model, "clip_range"):
        # The logger has the radii of this update, also where desired_kl adapts them.
        logged = model.logger.name_to_value
        low = logged.get("train/clip_range", model.clip_range(model._current_progress_remaining))
        high = logged.get("train/clip_range_high", low)
        is_outside = (ratio < 1.0 - low) | (ratio > 1.0 + high)
        outside = float(is_outside.mean())

    return {
        "kl_after": float((ratio - 1.0 - log_ratio).mean()),
        "ratio_mean_after": float(ratio.mean()),
        "ratio_max_after": float(ratio.max()),
        "outside_after": outside,
    }


def _log_ratios(model: OnPolicyAlgorithm, samples: Any) -> torch.Tensor:
    """Return log ratios of samples of any rollout buffer of SB3 and sb3-contrib, shape ``(samples,)``."""
    actions = samples.actions
    if isinstance(model.action_space, spaces.Discrete):
        # The buffer has them as floats, in a column.
        actions = actions.long().flatten()

    # sb3-contrib's policies take more.
    arguments = {}
    if getattr(samples, "action_masks", None) is not None:
        arguments["action_masks"] = samples.action_masks
    if hasattr(samples, "lstm_states"):
        arguments["lstm_states"] = samples.lstm_states
        arguments["episode_starts"] = samples.episode_starts
    _, log_prob, _ = model.policy.evaluate_actions(samples.observations, actions, **arguments)

    old_log_prob = samples.old_log_prob
    if hasattr(samples, "mask"):
        # Sequences of a recurrent policy are padded to the same length.
        present = samples.mask > 1e-8
        log_prob = log_prob[present]
        old_log_prob = old_log_prob[present]

    return log_prob - old_log_prob
