"""Replay videos, written with the ffmpeg that comes with imageio."""

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any, cast
from unittest import mock

import imageio.v2
import imageio_ffmpeg  # type: ignore[import-untyped]  # noqa: F401  # imageio looks for it only when it writes
import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms.contrib import with_masks


def record(model: BaseAlgorithm, path: Path, length: int = 1000, *, deterministic: bool = True, seed: int = 0) -> None:
    """Record an agent in the first of its environments, over as many episodes as fit.

    :param model: agent with environments that were made with ``render_mode="rgb_array"``
    :param path: video to write, H.264 in MP4
    :param length: number of steps, one frame each
    :param deterministic: whether to take the mode of the policy instead of a sample
    :param seed: seed of the environments
    :raises Exception: of any class, because graphics drivers and their bindings do, if the environment returns no frames
    """
    env = cast(VecEnv, model.get_env())
    metadata = env.get_attr("metadata", [0])[0] or {}
    fps = metadata.get("render_fps") or 30
    # Browsers play yuv420p, whose sides are even, and start early if the index comes first.
    writer = imageio.v2.get_writer(
        path, format="FFMPEG", mode="I", fps=fps, codec="libx264", pixelformat="yuv420p", macro_block_size=2,
        output_params=["-movflags", "+faststart"],
    )  # fmt: skip
    with software_rendering(), contextlib.closing(writer):  # the writer itself is not closed after an error
        env.seed(seed)
        agent = with_masks(model, env)

        # Recurrent policies keep their states, and forget them where an episode starts.
        states = None
        starts = np.ones(env.num_envs, dtype=bool)
        observations: Any = env.reset()
        for _ in range(length):
            # Before the step, so that the first frame is the start of an episode.
            writer.append_data(_frame(env))
            actions, states = agent.predict(observations, states, starts, deterministic)
            observations, _, starts, _ = env.step(actions)


def _frame(env: VecEnv) -> np.ndarray:
    """Return the frame of the first environment.

    :raises ValueError: if it has none
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SB3's and gymnasium's, which say the same in more lines
        frames = list(env.get_images())

    # An environment without a mode returns None, or nothing.
    frame = None
    if frames:
        frame = frames[0]
    if frame is None:
        raise ValueError(
            "the environment was made without render_mode='rgb_array'; make it with gym.make(id, render_mode='rgb_array') and "
            "pass it as env="
        )
    return np.asarray(frame)


def software_rendering() -> contextlib.AbstractContextManager[Any]:
    """Render MuJoCo with EGL if there is no display and the user has not set ``MUJOCO_GL``.

    gymnasium would take GLFW, because it can be imported, and fail.
    """
    # macOS and Windows always have one.
    has_display = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_display or "MUJOCO_GL" in os.environ:
        return contextlib.nullcontext()
    return mock.patch.dict(os.environ, MUJOCO_GL="egl")
