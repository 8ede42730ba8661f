"""Replay videos: what a decoder reads back is what the environment drew."""

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest

# imageio's reader leaves the pipes of its ffmpeg open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def decoded(path):
    """What a decoder says of a video, and its frames."""
    about, *frames = imageio_ffmpeg.read_frames(str(path))
    width, height = about["size"]
    return about, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames])


def drawn(model, env, length, seed) -> np.ndarray:
    """What gymnasium's own loop draws."""
    observation, _ = env.reset(seed=seed)
    frames = []
    for _ in range(length):
        frames.append(env.render())
        observation, _, terminated, truncated, _ = env.step(model.predict(observation, deterministic=True)[0])
        if terminated or truncated:
            observation, _ = env.reset()
    return np.stack(frames)


def test_the_video_shows_every_frame_at_the_environments_speed_and_plays_in_browsers(cartpole, pack, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ffmpeg on the path is needed
    path = pack(cartpole, video=True, video_length=70, seed=3) / "replay.mp4"
    about, frames = decoded(path)
    expected = drawn(cartpole, gym.make("CartPole-v1", render_mode="rgb_array"), 70, seed=3)
    assert frames.shape == expected.shape == (70, 400, 600, 3)
    # The cart's lines are thin, and a compressed line is blurred; frames in the wrong order would differ more.
    errors = [[np.abs(frame.astype(float) - other).mean() for other in expected[::10]] for frame in frames[::10]]
    assert np.argmin(errors, axis=1).tolist() == list(range(7))
    assert np.diag(errors).max() < 1.0
    assert (about["codec"], about["fps"], about["pix_fmt"][:7]) == ("h264", 50, "yuv420p")
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a browser would have to load all of it before it plays"


class Breaks(gym.Wrapper):
    """Render two frames."""

    frames = 2

    def render(self):
        self.frames -= 1
        if self.frames < 0:
            raise OSError("no graphics\nlibrary")
        return super().render()


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (lambda: gym.make("CartPole-v1"), "ValueError: its render_mode is None; it must be made with render_mode='rgb_array'"),
        (lambda: Breaks(gym.make("CartPole-v1", render_mode="rgb_array")), "OSError: no graphics library"),
    ],
)
def test_without_frames_the_push_continues_and_says_why(env, reason, cartpole, pack, capsys):
    folder = pack(cartpole, env(), video=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"no video: the environment does not render: {reason}"
    assert not (folder / "replay.mp4").exists()
    assert "<video" not in (folder / "README.md").read_text()
