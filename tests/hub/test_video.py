"""Replay videos: what a decoder reads back is what the environment drew."""

import os
from unittest import mock

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest

from sb3_ano.hub.video import software_rendering

# imageio's reader leaves the pipes of its ffmpeg open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_the_video_shows_every_frame_at_the_environments_speed_and_plays_in_browsers(cartpole, pack, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ffmpeg on the path is needed
    path = pack(cartpole, video=True, video_length=70, seed=3) / "replay.mp4"
    about, *frames = imageio_ffmpeg.read_frames(str(path))
    assert (about["codec"], about["fps"], about["pix_fmt"][:7], len(frames)) == ("h264", 50, "yuv420p", 70)
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    observation, _ = env.reset(seed=3)
    for frame in frames:  # by gymnasium's own loop; the cart's lines are thin, and a compressed line is blurred
        assert np.abs(np.frombuffer(frame, np.uint8).reshape(400, 600, 3).astype(float) - env.render()).mean() < 1.0
        observation, *_, truncated, _ = env.step(cartpole.predict(observation, deterministic=True)[0])
        assert not truncated
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a browser would have to load all of it before it plays"


@pytest.mark.parametrize(("given", "used"), [({}, "egl"), ({"MUJOCO_GL": "osmesa"}, "osmesa"), ({"DISPLAY": ":0"}, None)])
def test_mujoco_renders_through_egl_without_a_display_unless_the_user_says_otherwise(given, used, monkeypatch):
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    with software_rendering():
        assert os.environ.get("MUJOCO_GL") == used
    assert os.environ.get("MUJOCO_GL") == given.get("MUJOCO_GL")


@pytest.mark.parametrize("n_frames", [0, 2])
def test_without_frames_the_push_continues_and_says_why(n_frames, cartpole, pack, capsys, monkeypatch):
    answers = [*[np.zeros((64, 64, 3), np.uint8)] * n_frames, OSError("no graphics\nlibrary")]
    monkeypatch.setattr("gymnasium.envs.classic_control.CartPoleEnv.render", mock.Mock(side_effect=answers))
    folder = pack(cartpole, video=True)
    assert capsys.readouterr().out == "no video: the environment does not render: OSError: no graphics library\n"
    assert not (folder / "replay.mp4").exists()
    assert "<video" not in (folder / "README.md").read_text()
