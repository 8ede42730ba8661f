"""Replay videos, with the ffmpeg that comes with imageio."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.extras import missing_extra

try:
    import imageio.v2
    import imageio_ffmpeg  # type: ignore[import-untyped]  # noqa: F401  # imageio looks for it only when it writes
except ImportError as error:
    raise missing_extra("hub", error.name or "imageio[ffmpeg]") from error


class RenderError(RuntimeError):
    """The environment gives no pictures; the message says why, and what helps."""


def record(
    model: BaseAlgorithm, env: VecEnv, path: str | Path, length: int = 1000, *, deterministic: bool = True, seed: int = 0
) -> Path:
    """Record an agent in the first of its environments, over as many episodes as fit.

    :param model: the agent
    :param env: environments made with ``render_mode="rgb_array"``; normalised as in training
    :param path: the video to write, H.264 in MP4
    :param length: steps, one frame each
    :param deterministic: whether to take the mode of the policy in place of a sample
    :param seed: of the environments
    :return: the path of the video
    :raises RenderError: if the environment does not render
    """
    if length < 1:
        raise ValueError(f"length={length} is not allowed; allowed are whole numbers from 1")
    path = Path(path)
    partial = path.with_name(f".{path.stem}.partial.mp4")
    try:
        with software_rendering():
            _write(partial, _frames(model, env, length, deterministic, seed), _frames_per_second(env))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def software_rendering() -> Iterator[None]:
    """Render MuJoCo through EGL where there is no display and nothing else was asked for.

    gymnasium would take GLFW because it can be imported, and fail.
    """
    headless = sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if not headless or "MUJOCO_GL" in os.environ:
        yield
        return
    os.environ["MUJOCO_GL"] = "egl"
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]


def _frames(model: BaseAlgorithm, env: VecEnv, length: int, deterministic: bool, seed: int) -> Iterator[np.ndarray]:
    env.seed(seed)
    observations = env.reset()
    for _ in range(length):
        yield _picture(env)
        actions, _ = model.predict(observations, deterministic=deterministic)  # type: ignore[arg-type]  # no tuples
        observations, _, _, _ = env.step(actions)


def _picture(env: VecEnv) -> np.ndarray:
    if env.render_mode != "rgb_array":
        raise RenderError(f"its render_mode is {env.render_mode!r}; it must be made with render_mode='rgb_array'")
    try:
        picture = env.get_images()[0]
    except Exception as error:  # graphics drivers and their bindings raise anything
        raise RenderError(
            f"{type(error).__name__}: {' '.join(str(error).split())}. Without a display, MuJoCo renders with MUJOCO_GL=egl "
            "and EGL's library (Debian: apt install libegl1)"
        ) from error
    if picture is None:
        raise RenderError("it returns no picture")
    return np.asarray(picture)


def _frames_per_second(env: VecEnv) -> float:
    try:
        metadata = env.get_attr("metadata", [0])[0] or {}
    except AttributeError:
        metadata = {}
    return float(metadata.get("render_fps") or 30)


def _write(path: Path, frames: Iterator[np.ndarray], frames_per_second: float) -> None:
    first = next(frames)
    # Browsers play yuv420p, whose sides are even numbers.
    writer = imageio.v2.get_writer(
        path, format="FFMPEG", mode="I", fps=frames_per_second, codec="libx264", pixelformat="yuv420p", macro_block_size=2,
        output_params=["-movflags", "+faststart"],
    )  # fmt: skip
    with writer:
        writer.append_data(first)
        for frame in frames:
            writer.append_data(frame)
