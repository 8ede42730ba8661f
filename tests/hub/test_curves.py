"""Learning curves."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.monitor import Monitor

from sb3_ano.hub.curves import plot_learning_curve, read_returns
from tests.hub.agents import one_line


@pytest.fixture
def run(tmp_path):
    """A directory with the monitor file of 30 random episodes, and their returns."""
    env = Monitor(gym.make("CartPole-v1"), str(tmp_path / "0"))
    env.action_space.seed(0)
    for seed in range(30):
        env.reset(seed=seed)
        while not env.needs_reset:
            env.step(env.action_space.sample())
    env.close()
    return tmp_path, env.get_episode_rewards()


def test_returns_are_those_of_the_monitor(run):
    folder, expected = run
    returns = read_returns(folder)
    np.testing.assert_allclose(returns["episode_return"], expected)
    np.testing.assert_array_equal(returns["timesteps"], np.cumsum(expected))


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_figure_is_written(run, ending, start, tmp_path):
    figure = plot_learning_curve(run[0], tmp_path / "figures" / f"curve.{ending}", "CartPole")
    assert figure.read_bytes().startswith(start)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], "r,l\n", *lines[2:]],
        lambda lines: [lines[0], lines[1], "x,y,z\n", *lines[2:]],
        lambda lines: ["#[]\n", *lines[1:]],
        lambda lines: ["#" + "[" * 100_000 + "\n", *lines[1:]],
        lambda lines: ["r,l,t\n", *lines[2:]],
        lambda lines: [lines[0], "a,b,c\n", *lines[2:]],
    ],
)
def test_a_damaged_monitor_file_is_one_clear_line(change, run):
    """Review safety, unclear errors: TypeError, KeyError, AssertionError, RecursionError."""
    folder, _ = run
    file = next(folder.glob("*monitor.csv"))
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    with one_line(ValueError, "holds a damaged monitor file: "):
        read_returns(folder)


def test_a_directory_without_a_finished_episode_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no monitor files"):
        read_returns(tmp_path)
    Monitor(gym.make("CartPole-v1"), str(tmp_path / "0")).close()
    with pytest.raises(ValueError, match="holds no finished episode yet"):
        read_returns(tmp_path)
