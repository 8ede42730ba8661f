"""Replay videos: what a decoder reads back is what the environment drew."""

import io
import os
import re
import subprocess
import sys

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub.video import RenderError, record
from tests.common import SMALL
from tests.envs.backends import needs_atari


def ffmpeg(path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), *arguments], capture_output=True)


def decoded(path) -> np.ndarray:
    frames = np.frombuffer(ffmpeg(path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-").stdout, np.uint8)
    width, height = re.search(r" (\d+)x(\d+)[, ]", ffmpeg(path).stderr.decode()).groups()
    return frames.reshape(-1, int(height), int(width), 3)


def drawn(model, env, length, seed) -> np.ndarray:
    """What gymnasium's own loop draws."""
    observation, _ = env.reset(seed=seed)
    pictures = []
    for _ in range(length):
        pictures.append(env.render())
        observation, _, terminated, truncated, _ = env.step(model.predict(observation, deterministic=True)[0])
        if terminated or truncated:
            observation, _ = env.reset()
    return np.stack(pictures)


def with_env(model, env):
    """The agent with other environments, loaded so that the original stays as it is."""
    stream = io.BytesIO()
    model.save(stream)
    stream.seek(0)
    return type(model).load(stream, env=env)


def test_the_video_shows_every_frame_at_the_environments_speed_and_plays_in_browsers(cartpole, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ffmpeg on the path is needed
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium")
    path = record(with_env(cartpole, env), tmp_path / "replay.mp4", 70, seed=3)
    frames = decoded(path)
    expected = drawn(cartpole, gym.make("CartPole-v1", render_mode="rgb_array"), 70, seed=3)
    assert frames.shape == expected.shape == (70, 400, 600, 3)
    # The cart's lines are thin, and a compressed line is blurred; frames in the wrong order would differ more.
    errors = [[np.abs(frame.astype(float) - other).mean() for other in expected[::10]] for frame in frames[::10]]
    assert np.argmin(errors, axis=1).tolist() == list(range(7))
    assert np.diag(errors).max() < 1.0
    about = ffmpeg(path).stderr.decode()
    assert re.search(r"Video: h264 .*yuv420p.* 50 fps", about), about
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a browser would have to load all of it before it plays"


@needs_atari
def test_atari_is_shown_in_color_though_the_agent_sees_gray(tmp_path):
    env = make_vec_env("PongNoFrameskip-v4", 1, backend="gymnasium", env_kwargs={"render_mode": "rgb_array"})
    model = ANO("CnnPolicy", env, policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}}, **SMALL)
    frames = decoded(record(model, tmp_path / "replay.mp4", 5))
    assert frames.shape == (5, 210, 160, 3)
    assert np.ptp(frames.astype(int), axis=-1).max() > 50


def test_mujoco_renders_without_a_display_and_without_settings(tmp_path):
    """In a process of its own: MuJoCo binds to one graphics library for good."""
    pytest.importorskip("mujoco")
    code = (
        "import sys\n"
        "from sb3_ano import ANO\n"
        "from sb3_ano.envs import make_vec_env\n"
        "from sb3_ano.hub.video import RenderError, record\n"
        "env = make_vec_env('InvertedPendulum-v5', 1, backend='gymnasium')\n"
        "model = ANO('MlpPolicy', env, n_steps=8, batch_size=8)\n"
        "try:\n    record(model, sys.argv[1], 4)\n"
        "except RenderError as error:\n    sys.exit(f'RenderError: {error}')\n"
    )
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM")
    clean = {key: value for key, value in os.environ.items() if key not in hidden}
    path = tmp_path / "replay.mp4"
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=clean, timeout=120)
    if "RenderError" in run.stderr and "CI" not in os.environ:
        pytest.skip(f"no software rendering here: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    frames = decoded(path)
    assert frames.shape == (4, 480, 480, 3)
    assert frames.std() > 5, "the frames are empty"


class Breaks(gym.Wrapper):
    """Render two frames."""

    frames = 2

    def render(self):
        self.frames -= 1
        if self.frames < 0:
            raise OSError("no graphics\nlibrary")
        return super().render()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gym.make("CartPole-v1"), "render_mode is None"),
        (lambda: Breaks(gym.make("CartPole-v1", render_mode="rgb_array")), "OSError: no graphics library.*MUJOCO_GL=egl"),
    ],
)
def test_an_environment_without_frames_says_why_and_leaves_nothing(cartpole, tmp_path, make, reason):
    with pytest.raises(RenderError, match=reason) as caught:
        record(with_env(cartpole, DummyVecEnv([make])), tmp_path / "replay.mp4", 5)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="length=0 is not allowed"):
        record(cartpole, tmp_path / "replay.mp4", 0)
