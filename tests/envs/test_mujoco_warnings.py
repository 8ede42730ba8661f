"""MuJoCo's warnings are shown through Python, each text once, without MUJOCO_LOG.TXT."""

import subprocess
import sys

import numpy as np
import pytest

from sb3_ano import ANO
from sb3_ano.envs import make, make_vec_env
from sb3_ano.zoo.backends import make_agents_envs

mujoco = pytest.importorskip("mujoco")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Set MuJoCo up as in a new process, whose current directory is empty before and after."""
    monkeypatch.chdir(tmp_path)
    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(None)
    make._warn_once.cache_clear()
    yield
    mujoco.set_mju_user_warning(previous)
    assert list(tmp_path.iterdir()) == []


def make_in_the_zoo() -> None:
    for _ in range(2):
        make_agents_envs("HalfCheetah-v5", 1, {}, env_kwargs={}).close()


@pytest.mark.parametrize(
    "make_envs",
    [
        lambda: make_vec_env("HalfCheetah-v5", 4, backend="gymnasium").close(),
        lambda: [ANO("MlpPolicy", "HalfCheetah-v5", n_steps=64) for _ in range(2)],
        make_in_the_zoo,
    ],
    ids=["make_vec_env", "string id", "zoo"],
)
def test_a_warning_is_shown_once(make_envs, capfd):
    with pytest.warns(UserWarning, match="compiler attribute 'settotalmass'") as shown:
        make_envs()
    assert len(shown) == 1
    assert "settotalmass" not in capfd.readouterr().err


def test_an_unstable_simulation_warns_once_whatever_its_time():
    env = make_vec_env("Hopper-v5", 2, backend="gymnasium", seed=0)
    env.reset()
    unstable = np.full((2, 3), np.nan)
    env.step(np.zeros((2, 3)))  # gymnasium looks at the first step only
    with pytest.warns(UserWarning, match="huge value in CTRL") as shown:
        env.step(unstable)
    env.step(np.zeros((2, 3)))
    env.step(unstable)  # would raise, if it warned
    assert len(shown) == 1
    env.close()


def test_a_handler_of_the_users_own_stays():
    texts: list[str] = []
    mujoco.set_mju_user_warning(texts.append)
    make_vec_env("HalfCheetah-v5", 2, backend="gymnasium").close()
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("code", "options", "shown"),
    [
        # An exception that leaves MuJoCo's callback calls terminate().
        ("make_vec_env('HalfCheetah-v5', 2, backend='gymnasium')", ["-W", "error::UserWarning"], "MuJoCo: compiler attribute"),
        ("make_vec_env('HalfCheetah-v5', vec_env_cls=SubprocVecEnv).close()", [], "UserWarning: compiler attribute"),
        ("make_vec_env('CartPole-v1', 2); make_env('Pendulum-v1'); assert 'mujoco' not in sys.modules", [], None),
    ],
    ids=["as an error", "in other processes", "without MuJoCo"],
)
def test_a_process_shows_it_once_and_goes_on(code, options, shown):
    code = (
        "import sys; from stable_baselines3.common.vec_env import SubprocVecEnv\n"
        f"from sb3_ano.envs import make_env, make_vec_env\nif __name__ == '__main__': {code}"
    )
    finished = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("settotalmass") == finished.stderr.count(str(shown)) == (shown is not None)
