"""VecNormalize against SB3's class of the same name, step by step and bit by bit."""

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.envs import VecNormalize, make_vec_env

SPACES = {
    "float64": spaces.Box(-np.inf, np.inf, (5,), np.float64),
    "float32": spaces.Box(-np.inf, np.inf, (3, 2), np.float32),
    "integers": spaces.Box(0, 255, (4,), np.uint8),
    "scalar": spaces.Box(-np.inf, np.inf, (), np.float64),
    "dict": spaces.Dict(a=spaces.Box(-9, 9, (2,), np.float32), b=spaces.Discrete(3), c=spaces.Box(-9, 9, (3,), np.float64)),
}


class Recorded(VecEnv):
    """Play random observations, rewards and ends of episodes; two with the same seed play the same."""

    def __init__(self, space: spaces.Space, n_envs: int) -> None:
        self.render_mode = None
        super().__init__(n_envs, space, spaces.Discrete(2))
        self.rng = np.random.default_rng(1)

    def observe(self):
        def draw(space):
            if isinstance(space, spaces.Discrete):
                return self.rng.integers(space.n, size=self.num_envs)
            return (50 + 30 * self.rng.normal(size=(self.num_envs, *space.shape))).astype(space.dtype)

        if isinstance(self.observation_space, spaces.Dict):
            return {key: draw(space) for key, space in self.observation_space.spaces.items()}
        return draw(self.observation_space)

    def reset(self):
        return self.observe()

    def step_async(self, actions):
        pass

    def step_wait(self):
        observations, last = self.observe(), self.observe()
        rewards, dones = self.rng.normal(size=self.num_envs).astype(np.float32), self.rng.random(self.num_envs) < 0.2
        rows = [{key: part[i] for key, part in last.items()} if isinstance(last, dict) else last[i] for i in range(len(dones))]
        infos = [{"terminal_observation": row} if done else {} for row, done in zip(rows, dones, strict=True)]
        return observations, rewards, dones, infos

    def close(self):
        pass

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, attr_name, value, indices=None):
        raise NotImplementedError

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


def assert_same(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_same(*pair)
    else:
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def statistics(env):
    kept = env.obs_rms if isinstance(getattr(env, "obs_rms", None), dict) else {"": getattr(env, "obs_rms", None)}
    parts = [*(rms for rms in kept.values() if rms is not None), env.ret_rms]
    return [(rms.mean, rms.var, rms.count) for rms in parts]


def both(kind, n_envs, **options):
    if kind == "dict":
        options["norm_obs_keys"] = ["a", "c"] if options.get("norm_obs", True) else None
    return [normalize(Recorded(SPACES[kind], n_envs), **options) for normalize in (VecNormalize, vec_env.VecNormalize)]


@pytest.mark.parametrize(
    "options", [{}, {"norm_obs": False}, {"norm_reward": False, "clip_obs": 0.5}, {"training": False}], ids=str
)
@pytest.mark.parametrize("n_envs", [1, 7])
@pytest.mark.parametrize("kind", SPACES)
def test_every_step_is_that_of_sb3(kind, n_envs, options):
    ours, theirs = both(kind, n_envs, gamma=0.9, clip_reward=1.5, epsilon=1e-6, **options)
    assert_same(ours.reset(), theirs.reset())
    for step in range(40):
        if step == 20:
            assert_same(ours.reset(), theirs.reset())
            ours.training = theirs.training = not theirs.training
        assert_same(ours.step(np.zeros(n_envs)), theirs.step(np.zeros(n_envs)))
        assert_same(statistics(ours), statistics(theirs))
        assert_same(ours.get_original_obs(), theirs.get_original_obs())
        assert_same(ours.get_original_reward(), theirs.get_original_reward())
        assert_same(ours.returns, theirs.returns)
    observation = theirs.get_original_obs()
    assert_same(
        ours.unnormalize_obs(ours.normalize_obs(observation)), theirs.unnormalize_obs(theirs.normalize_obs(observation))
    )


def test_what_is_returned_belongs_to_the_caller():
    env, _ = both("float64", 2, norm_obs=False)
    env.reset()
    observations, *_ = env.step(np.zeros(2))
    observations[:] = 0.0
    assert env.get_original_obs().all()
    env.get_original_obs()[:] = 0.0
    assert env.get_original_obs().all()


@pytest.mark.parametrize("kind", ["float64", "dict"])
def test_files_load_in_each_others_class(kind, tmp_path):
    ours, theirs = both(kind, 3)
    for env in (ours, theirs):
        env.reset()
        env.step(np.zeros(3))
        env.save(str(tmp_path / f"{type(env).__module__}.pkl"))
    for file in tmp_path.iterdir():
        assert b"sb3_ano" not in file.read_bytes()  # this package is not needed to load it
        for normalize in (VecNormalize, vec_env.VecNormalize):
            loaded = normalize.load(file, Recorded(SPACES[kind], 3))
            assert type(loaded) is normalize
            assert_same(statistics(loaded), statistics(theirs))
            assert_same(loaded.get_original_obs(), theirs.get_original_obs())
            loaded.reset()
    assert type(pickle.loads(pickle.dumps(ours))) is vec_env.VecNormalize


def test_ppo_trains_to_the_same_parameters():
    def trained(normalize):
        env = normalize(make_vec_env("Pendulum-v1", 1))
        model = PPO("MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=2, seed=3, device="cpu").learn(192)
        return model.policy.state_dict()

    for ours, theirs in zip(trained(VecNormalize).values(), trained(vec_env.VecNormalize).values(), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
