"""VecNormalize and DirectVecEnv against SB3's VecNormalize and DummyVecEnv, step by step and bit by bit."""

import functools
import pickle
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import DirectVecEnv, VecNormalize
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, TinyEnv, tiny_vec_env

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


@pytest.mark.parametrize("base", [VecNormalize, vec_env.VecNormalize])
def test_a_subclass_keeps_its_class_in_files_and_copies(base, tmp_path):
    made = own_class(base)(both("float32", 2)[0].venv)
    made.save(str(tmp_path / "own.pkl"))
    copies = [own_class(base).load(tmp_path / "own.pkl", made.venv), VecNormalize.load(tmp_path / "own.pkl", made.venv)]
    for copied in (*copies, deepcopy(made)):
        assert type(copied) is own_class(base)
        np.testing.assert_array_equal(copied.normalize_reward(np.ones(1)), made.normalize_reward(np.ones(1)))


@functools.cache
def own_class(base):
    double = lambda self, reward: 2 * base.normalize_reward(self, reward)  # noqa: E731
    kind = type(f"Own{base.__module__.partition('.')[0]}", (base,), {"normalize_reward": double, "__module__": __name__})
    globals()[kind.__name__] = kind  # where pickle finds it
    return kind


def test_last_observations_that_are_python_integers_are_left_alone():
    ours, theirs = (
        of(DummyVecEnv([lambda: gym.make("FrozenLake-v1")]), norm_obs=False) for of in (VecNormalize, vec_env.VecNormalize)
    )
    for env in (ours, theirs):
        env.seed(3)
        env.reset()
    ends = 0
    for _ in range(40):
        (*mine, infos), (*expected, sb3_infos) = ours.step([1]), theirs.step([1])
        assert_same(mine, expected)
        assert infos[0].get("terminal_observation") == sb3_infos[0].get("terminal_observation")
        ends += "terminal_observation" in infos[0]
    assert ends > 1


STEPPED = {
    "box": BOX_OBSERVATIONS,
    "image": IMAGE_OBSERVATIONS,
    "discrete": spaces.Discrete(5),
    "multi-binary": spaces.MultiBinary(3),
    "dict": DICT_OBSERVATIONS,
    "tuple": spaces.Tuple([BOX_OBSERVATIONS, spaces.Discrete(3)]),
}


@pytest.mark.parametrize("observation_space", STEPPED.values(), ids=STEPPED)
@pytest.mark.parametrize("action_space", [BOX_ACTIONS, spaces.Discrete(2)], ids=["box", "discrete"])
def test_every_step_equals_dummy_vec_envs(observation_space, action_space):
    env_fns = [lambda: TinyEnv(deepcopy(observation_space), deepcopy(action_space))] * 3
    envs = DirectVecEnv(env_fns), DummyVecEnv(env_fns)
    for env in envs:
        env.seed(3)
    np.testing.assert_equal(*[env.reset() for env in envs])
    actions = deepcopy(action_space)
    actions.seed(0)
    for _ in range(40):
        action = np.stack([actions.sample() for _ in range(3)])
        ours, theirs = (env.step(action) for env in envs)
        np.testing.assert_equal(ours, theirs)
        assert [part.dtype for part in ours[1:3]] == [part.dtype for part in theirs[1:3]]
        assert envs[0].reset_infos == envs[1].reset_infos


class ThriftyEnv(gym.Env):
    """Returns the same array and the same dictionary at every step and reset."""

    observation_space = spaces.Box(0, 1000, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation, self.info = np.zeros(2), {"inner": [0]}

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        self.observation[:] = 0
        return self.observation, self.info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.observation += 1
        self.info["count"] = self.observation[0]
        over = self.observation[0] >= 5
        return self.observation, 1.0, over, over, self.info


def test_returned_values_stay_though_the_environment_reuses_them():
    env = DirectVecEnv([ThriftyEnv] * 2)
    env.reset()
    steps = [env.step(np.zeros(2, int)) for _ in range(7)]
    np.testing.assert_array_equal([step[0][0, 0] for step in steps], [1, 2, 3, 4, 0, 1, 2])
    assert [step[3][0]["count"] for step in steps] == [1, 2, 3, 4, 5, 1, 2]
    np.testing.assert_array_equal(steps[4][3][1]["terminal_observation"], [5, 5])
    # The environment keeps its dictionary, and nothing of the end of an episode comes back with it.
    assert "terminal_observation" not in steps[5][3][0]
    assert [bool(step[2][0]) for step in steps] == [False] * 4 + [True] + [False] * 2
    # Terminated and truncated counts as terminated.
    assert not any(step[3][0]["TimeLimit.truncated"] for step in steps)
