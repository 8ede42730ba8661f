"""Every public attribute and method of our classes against SB3's classes that they pass for."""

import copy
import pickle
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common import vec_env
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecMonitor
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

from sb3_ano import ANO
from sb3_ano.envs import DirectVecEnv, VecNormalize

OBSERVATIONS = {
    "box": spaces.Box(-9, 9, (3,), np.float32),
    "float64": spaces.Box(-9, 9, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
    "discrete": spaces.Discrete(5),
    "dict": spaces.Dict(a=spaces.Box(-9, 9, (2,), np.float32), b=spaces.Discrete(3)),
    "tuple": spaces.Tuple([spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(3)]),
}
N_ENVS = 3


class RecordedEnv(gym.Env):
    """Uses all that a vectorized environment passes on: seeds, options, infos of the reset, images, attributes, methods.

    Episodes of the environments end at different steps, some by termination and some by truncation.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  # gymnasium's way
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, kind: str, number: int) -> None:
        self.observation_space = copy.deepcopy(OBSERVATIONS[kind])
        self.render_mode = "rgb_array"
        self.number = number
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {"seed": seed, "options": options}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        terminated = self.steps == 4 + self.number
        truncated = self.steps == 5
        info = {"steps": self.steps, "action": action.copy(), "nested": {"sum": float(action.sum())}}
        return self.observation_space.sample(), float(action[0]) / 3.0, terminated, truncated, info

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.steps, np.uint8)

    def close(self) -> None:
        self.closed += 1

    def scaled(self, factor: int, plus: int = 0) -> int:
        return factor * self.number + plus


def make(vec_env_class: type, kind: str, monitor: Any = Monitor) -> Any:
    def env_fn(number: int) -> Any:
        return lambda: monitor(RecordedEnv(kind, number))

    return vec_env_class([env_fn(number) for number in range(N_ENVS)])


def public(vec_env: VecEnv) -> dict[str, Any]:
    """Return copies of all public attributes, with environments and methods by their names."""
    attributes: dict[str, Any] = {}
    for name in dir(vec_env):
        if name.startswith("_") or name in ("venv", "class_attributes"):
            continue
        value = getattr(vec_env, name)
        if callable(value):
            value = "method"
        if name == "envs":
            value = [str(env) for env in value]
        if name in ("unwrapped", "t_start"):
            value = None
        attributes[name] = copy.deepcopy(value)
    return attributes


def plain(value: Any) -> Any:
    """Turn what numpy does not compare into what it does, with the type of each value, and without the time."""
    if isinstance(value, RunningMeanStd | StackedObservations):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in ("t", "t_start")}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(plain(part) for part in value)]
    if isinstance(value, np.ndarray):
        return [value.dtype.name, value]
    return [type(value).__name__, value]


def assert_same(ours: Any, theirs: Any) -> None:
    np.testing.assert_equal(plain(ours), plain(theirs))


def assert_same_attributes(ours: VecEnv, theirs: VecEnv) -> None:
    own = public(ours)
    expected = public(theirs)
    missing = {name for name in expected if name not in own}
    assert not missing
    for name, value in expected.items():
        assert_same({name: own[name]}, {name: value})


def played(ours: VecEnv, theirs: VecEnv, spoil: bool = False) -> int:
    """Step both with the same actions, with a reset in mid-episode, and compare everything after each call.

    :param spoil: whether to write into everything that is returned, which belongs to the caller
    :return: number of finished episodes
    """
    random = np.random.default_rng(0)
    ends = 0
    for step in range(25):
        if step in (0, 7):
            assert_same(ours.seed(step), theirs.seed(step))
            for env in (ours, theirs):
                env.set_options({"step": step})
        if step in (0, 7, 14):
            assert_same(ours.reset(), theirs.reset())
            assert_same_attributes(ours, theirs)

        actions = random.uniform(-1, 1, (N_ENVS, 2)).astype(np.float32)
        for env in (ours, theirs):
            env.step_async(actions)
        returned = [env.step_wait() for env in (ours, theirs)]
        assert_same(*returned)
        ends += int(returned[0][2].sum())
        if spoil:
            for values in returned:
                overwrite(values)
        assert_same_attributes(ours, theirs)
    return ends


def overwrite(returned: tuple[Any, ...]) -> None:
    observations, rewards, dones, infos = returned
    parts = observations.values() if isinstance(observations, dict) else observations
    for array in [observations] if isinstance(observations, np.ndarray) else parts:
        array[...] = 0
    rewards[:] = -1.0
    dones[:] = True
    for info in infos:
        last = info.get("terminal_observation")
        if isinstance(last, np.ndarray):
            last[...] = 0
        info.clear()
    infos.clear()


@pytest.mark.parametrize("spoil", [False, True], ids=["kept", "overwritten by the caller"])
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_attributes_equal_dummy_vec_envs_after_each_call(kind, spoil):
    assert played(make(DirectVecEnv, kind), make(DummyVecEnv, kind), spoil) > 10


@pytest.mark.parametrize("wrap", [VecMonitor, lambda env: VecFrameStack(env, 2)], ids=["VecMonitor", "VecFrameStack"])
def test_wrappers_of_sb3_have_the_same_attributes_on_top(wrap):
    ours, theirs = (wrap(make(vec_env_class, "box", lambda env: env)) for vec_env_class in (DirectVecEnv, DummyVecEnv))
    assert played(ours, theirs) > 10


@pytest.mark.parametrize("options", [{}, {"norm_obs": False}, {"training": False}, {"norm_reward": False}], ids=str)
@pytest.mark.parametrize("kind", ["box", "float64", "dict"])
def test_attributes_equal_vec_normalizes_after_each_call(kind, options):
    if kind == "dict" and options.get("norm_obs", True):
        options = {**options, "norm_obs_keys": ["a"]}
    ours = VecNormalize(make(DirectVecEnv, kind), **options)
    theirs = vec_env.VecNormalize(make(DummyVecEnv, kind), **options)
    assert played(ours, theirs) > 10
    assert_same(ours.get_original_obs(), theirs.get_original_obs())
    assert_same(ours.get_original_reward(), theirs.get_original_reward())
    observations = theirs.get_original_obs()
    assert_same(ours.unnormalize_obs(observations), theirs.unnormalize_obs(observations))
    assert_same(ours.unnormalize_reward(np.ones(3)), theirs.unnormalize_reward(np.ones(3)))


#: Calls of the public methods, except for those that ``played`` makes.
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "get_attr": [(("number",), {}), (("steps",), {"indices": [0, 2]}), (("spec", 1), {})],
    "has_attr": [(("number",), {}), (("no_such_attribute",), {})],
    "set_attr": [(("number", 7), {"indices": 1}), (("extra", [1]), {})],
    "env_method": [(("scaled", 3), {"plus": 1}), (("scaled", 2), {"indices": [2]})],
    "env_is_wrapped": [((Monitor,), {}), ((gym.wrappers.TimeLimit, 0), {})],
    "get_images": [((), {})],
    "render": [((), {}), (("rgb_array",), {})],
    "getattr_depth_check": [(("num_envs", True), {}), (("num_envs", False), {}), (("nothing", True), {})],
    "step": [((np.full((N_ENVS, 2), 0.5, np.float32),), {})],
    "close": [((), {}), ((), {})],
}


def test_methods_equal_dummy_vec_envs():
    ours = make(DirectVecEnv, "box")
    theirs = make(DummyVecEnv, "box")
    for env in (ours, theirs):
        env.seed(0)
        env.reset()
    for name, calls in CALLS.items():
        for arguments, keywords in calls:
            results = []
            for env in (ours, theirs):
                result = getattr(env, name)(*arguments, **keywords)
                if name == "getattr_depth_check" and result is not None:
                    assert result.rpartition(".")[2] == type(env).__name__
                    result = "name of the class"
                results.append(result)
            assert_same(*results)
            assert_same_attributes(ours, theirs)
    assert [env.get_wrapper_attr("number") for env in ours.envs] == [0, 7, 2]
    assert [env.unwrapped.closed for env in ours.envs] == [env.unwrapped.closed for env in theirs.envs]

    methods = {name for name in dir(DummyVecEnv) if not name.startswith("_") and callable(getattr(DummyVecEnv, name))}
    assert methods == {*CALLS, "reset", "seed", "set_options", "step_async", "step_wait"}


def test_buffers_are_the_same_objects_after_each_step_as_in_dummy_vec_env():
    for vec_env_class in (DirectVecEnv, DummyVecEnv):
        env = make(vec_env_class, "box")
        env.reset()
        held = {name: getattr(env, name) for name in ("buf_obs", "buf_rews", "buf_dones", "buf_infos")}
        for _ in range(6):
            _, rewards, dones, _ = env.step(np.full((N_ENVS, 2), 0.5, np.float32))
            np.testing.assert_array_equal(held["buf_rews"], rewards)
            np.testing.assert_array_equal(held["buf_dones"], dones)
        assert all(getattr(env, name) is buffer for name, buffer in held.items())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))], ids=["deep", "pickle"]
)
@pytest.mark.parametrize("vec_env_class", [DirectVecEnv, DummyVecEnv])
def test_copies_in_mid_episode_continue_as_the_original(copied, vec_env_class):
    env = make(vec_env_class, "box")
    env.seed(0)
    env.reset()
    actions = np.full((N_ENVS, 2), 0.5, np.float32)
    for _ in range(2):
        env.step(actions)
    other = copied(env)
    assert type(other) is vec_env_class
    assert_same_attributes(other, env)
    for _ in range(8):
        assert_same(other.step(actions), env.step(actions))
        assert_same_attributes(other, env)


class Shifted(DirectVecEnv):
    """Overrides what SB3's class calls for its observations."""

    def _obs_from_buf(self):
        return super()._obs_from_buf() + 100.0


def test_a_subclass_overrides_the_observations():
    env = make(Shifted, "box")
    assert env.reset().min() > 90
    assert env.step(np.zeros((N_ENVS, 2), np.float32))[0].min() > 90


def test_infos_that_are_not_copied_deeply_are_those_of_the_environment():
    env = make(DirectVecEnv, "box")
    env.reset()
    infos = env.step(np.full((N_ENVS, 2), 0.5, np.float32))[3]
    assert infos[0] is not env.buf_infos[0]
    assert infos[0]["nested"] is env.buf_infos[0]["nested"]


class Counted(BaseCallback):
    """Counts episodes, rewards and infos as a callback can that reads SB3's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _on_step(self) -> bool:
        env = self.training_env
        ends = ["terminal_observation" in info for info in env.buf_infos]
        self.seen.append((int(env.buf_dones.sum()), float(env.buf_rews.sum()), ends, env.buf_obs[None].shape))
        return True


def test_a_callback_that_reads_the_buffers_sees_what_it_sees_with_ppo():
    counts = []
    for algorithm in (PPO, ANO):
        callback = Counted()
        algorithm("MlpPolicy", "CartPole-v1", n_steps=256, seed=0, device="cpu").learn(256, callback=callback)
        counts.append(callback.seen)
    assert counts[0] == counts[1]
    assert sum(count[0] for count in counts[1]) > 5


class HalvedStatistics(RunningMeanStd):
    """Statistics of a user, which learn at half of the rate."""

    def update(self, arr: np.ndarray) -> None:
        super().update(arr / 2)


def test_statistics_that_a_user_assigned_update_themselves():
    normalized = []
    for normalize, vec_env_class in ((VecNormalize, DirectVecEnv), (vec_env.VecNormalize, DummyVecEnv)):
        env = normalize(make(vec_env_class, "box"))
        env.obs_rms = HalvedStatistics(shape=(3,))
        env.ret_rms = HalvedStatistics(shape=())
        normalized.append(env)
    assert played(*normalized) > 10


def test_copies_of_vec_normalize_keep_their_class_and_take_environments():
    env = VecNormalize(make(DirectVecEnv, "box"))
    env.seed(0)
    env.reset()
    env.step(np.full((N_ENVS, 2), 0.5, np.float32))
    for copied in (copy.copy(env), copy.deepcopy(env)):
        assert type(copied) is VecNormalize
        assert copied.venv is None
        assert_same(copied.obs_rms, env.obs_rms)
        copied.set_venv(env.venv)
        with pytest.raises(ValueError, match="Trying to set venv of already initialized"):
            copied.set_venv(env.venv)
    assert copy.deepcopy(env).obs_rms is not env.obs_rms
    assert type(pickle.loads(pickle.dumps(env))) is vec_env.VecNormalize
