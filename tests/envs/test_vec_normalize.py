"""VecNormalize against SB3's class of the same name, step by step and bit by bit."""

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.envs import VecNormalize
from tests.tiny_envs import BOX_ACTIONS, tiny_vec_env

SPACES = {
    "float64": spaces.Box(-np.inf, np.inf, (5,), np.float64),
    "float32": spaces.Box(7.0, np.inf, (3, 2), np.float32),
    "integers": spaces.Box(0, 255, (4,), np.uint8),
    "scalar": spaces.Box(-np.inf, np.inf, (), np.float64),
    "dict": spaces.Dict(a=spaces.Box(-9, 9, (2,), np.float32), b=spaces.Discrete(3), c=spaces.Box(-9, 9, (3,), np.float64)),
}


def both(kind: str, n_envs: int, **options) -> list[VecEnv]:
    """Return environments that play the same, normalized by this class and by SB3's."""
    if kind == "dict":
        options["norm_obs_keys"] = ["a", "c"] if options.get("norm_obs", True) else None
    normalized = []
    for normalize in (VecNormalize, vec_env.VecNormalize):
        env = tiny_vec_env(SPACES[kind], BOX_ACTIONS, n_envs)
        env.seed(1)
        for index in range(n_envs):
            env.envs[index].unwrapped.length = 3 + index
        normalized.append(normalize(env, **options))
    return normalized


def leaves(value) -> list[np.ndarray]:
    parts = list(value.values()) if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves(part)] if isinstance(parts, list | tuple) else [np.asarray(parts)]


def assert_same(ours, theirs):
    np.testing.assert_equal(ours, theirs)
    assert [leaf.dtype for leaf in leaves(ours)] == [leaf.dtype for leaf in leaves(theirs)]


def statistics(env):
    kept = getattr(env, "obs_rms", {})
    return [vars(part) for part in (*(kept.values() if isinstance(kept, dict) else [kept]), env.ret_rms)]


def everything(env):
    observations, rewards, dones, infos = env.last
    infos = [{**info, "episode": None} for info in infos]  # which holds the time
    originals = env.get_original_obs(), env.get_original_reward()
    return [observations, rewards, dones, infos, statistics(env), env.returns, *originals]


@pytest.mark.parametrize(
    "options", [{}, {"norm_obs": False}, {"norm_reward": False, "clip_obs": 0.5}, {"training": False}], ids=str
)
@pytest.mark.parametrize("n_envs", [1, 7])
@pytest.mark.parametrize("kind", SPACES)
def test_every_step_is_that_of_sb3(kind, n_envs, options):
    ours, theirs = both(kind, n_envs, gamma=0.9, clip_reward=1.5, epsilon=1e-6, **options)
    random = np.random.default_rng(0)
    for step in range(40):
        if step in (0, 20):
            assert_same(ours.reset(), theirs.reset())
        if step == 20:
            ours.training = theirs.training = not theirs.training
        actions = random.normal(scale=100.0, size=(n_envs, 2))
        for env in (ours, theirs):
            env.last = env.step(actions)
        assert_same(everything(ours), everything(theirs))


def test_what_is_returned_belongs_to_the_caller():
    env, _ = both("float64", 2, norm_obs=False)
    env.reset()
    observations, *_ = env.step(np.zeros((2, 2)))
    observations[:] = 0.0
    assert env.get_original_obs().all()
    env.get_original_obs()[:] = 0.0
    assert env.get_original_obs().all()


@pytest.mark.parametrize("kind", ["float64", "dict"])
def test_files_load_in_each_others_class(kind, tmp_path):
    ours, theirs = both(kind, 3)
    for env in (ours, theirs):
        env.reset()
        env.step(np.zeros((3, 2)))
        env.save(str(tmp_path / f"{type(env).__module__}.pkl"))
    for file in tmp_path.iterdir():
        assert b"sb3_ano" not in file.read_bytes()  # this package is not needed to load it
        for normalize in (VecNormalize, vec_env.VecNormalize):
            loaded = normalize.load(file, both(kind, 3)[0].venv)
            assert type(loaded) is normalize
            assert_same(statistics(loaded), statistics(theirs))
            assert_same(loaded.get_original_obs(), theirs.get_original_obs())
            loaded.reset()
    assert type(pickle.loads(pickle.dumps(ours))) is vec_env.VecNormalize
