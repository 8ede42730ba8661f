"""Every adapter gives the steps of SB3's DummyVecEnv over the same environments with the same seeds."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import ClipReward, RecordEpisodeStatistics
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecMonitor, VecNormalize

from sb3_ano.envs import DirectVecEnv, ProcessVecEnv, from_vector_env
from tests.envs.contract_envs import SPACES, CustomVector, Reporting

# All processes of this module import PyTorch and SB3 once.
multiprocessing.set_forkserver_preload(["sb3_ano.envs.process", "tests.envs.contract_envs"])
N_ENVS = 3


def sync(makers: list, mode: AutoresetMode, **settings: Any) -> VecEnv:
    return from_vector_env(SyncVectorEnv(makers, autoreset_mode=mode, **settings))


def asynchronous(makers: list, mode: AutoresetMode, **settings: Any) -> VecEnv:
    return from_vector_env(AsyncVectorEnv(makers, autoreset_mode=mode, context="forkserver", **settings))


def custom(makers: list, mode: AutoresetMode) -> VecEnv:
    return from_vector_env(CustomVector(makers, mode))


ADAPTERS: dict[str, Callable[[list], VecEnv]] = {
    "direct": DirectVecEnv,
    "process": partial(ProcessVecEnv, n_workers=2),
    "sync uncopied": partial(sync, mode=AutoresetMode.NEXT_STEP, copy=False),
    "async unshared": partial(asynchronous, mode=AutoresetMode.SAME_STEP, shared_memory=False),
}
for mode in AutoresetMode:
    ADAPTERS[f"sync {mode.value}"] = partial(sync, mode=mode)
    ADAPTERS[f"async {mode.value}"] = partial(asynchronous, mode=mode)
    ADAPTERS[f"custom {mode.value}"] = partial(custom, mode=mode)
#: Those that reach the single environments.
REACHING = [name for name in ADAPTERS if not name.startswith("custom")]
#: Every adapter with two spaces, and those whose code depends on the space with all.
CASES = [(adapter, space) for adapter in ADAPTERS for space in ("Box", "Dict")]
for adapter in ("process", "sync NextStep", "custom SameStep"):
    CASES += [(adapter, space) for space in SPACES if space not in ("Box", "Dict")]


@pytest.fixture
def make():
    """Make environments with an adapter, which are closed at the end of the test."""
    envs: list[VecEnv] = []

    def made(adapter: Any, n_envs: int = N_ENVS, **settings: Any) -> VecEnv:
        envs.append(ADAPTERS.get(adapter, adapter)([partial(Reporting, **settings)] * n_envs))
        return envs[-1]

    yield made
    for env in envs:
        env.close()


def without_statistics(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in info.items() if key != "episode"} for info in infos]


@pytest.mark.parametrize(("adapter", "space"), CASES)
def test_steps_are_those_of_dummy_vec_env(make, adapter, space):
    actions = "Box" if space in ("Dict", "image") else "Discrete"
    ours = make(adapter, observations=space, actions=actions)
    theirs = make(DummyVecEnv, observations=space, actions=actions)
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    assert (ours.num_envs, ours.render_mode) == (theirs.num_envs, theirs.render_mode)
    theirs.action_space.seed(0)
    equal = np.testing.assert_equal
    returned, copies = [], []
    ends = {True: 0, False: 0}
    for start, n_steps in (("seeded", 40), ("options", 25), ("again", 30)):
        if start == "seeded":
            assert list(ours.seed(5)) == list(theirs.seed(5)) == [5, 6, 7]
        if start == "options":
            ours.set_options({"low": 1})
            theirs.set_options({"low": 1})
        equal(ours.reset(), theirs.reset())
        equal(ours.unwrapped.reset_infos, theirs.reset_infos)
        for _ in range(n_steps):
            chosen = np.stack([theirs.action_space.sample() for _ in range(N_ENVS)])
            returned.append(ours.step(chosen))
            copies.append(np.array([*map(repr, returned[-1])]))
            observations, rewards, dones, infos = returned[-1]
            expected, expected_rewards, expected_dones, expected_infos = theirs.step(chosen)
            equal(observations, expected)
            equal(np.asarray(rewards, np.float32), expected_rewards)
            equal(dones, expected_dones)
            equal(without_statistics(infos), expected_infos)
            equal(ours.unwrapped.reset_infos, theirs.reset_infos)
            for index in np.flatnonzero(dones):
                ends[infos[index]["TimeLimit.truncated"]] += 1
    assert min(ends.values()) >= 2
    # Nothing is overwritten by later steps.
    equal([np.array([*map(repr, step)]) for step in returned], copies)


@pytest.mark.parametrize("adapter", REACHING)
def test_attributes_and_methods_of_single_environments(make, adapter):
    env = make(adapter, render_mode="rgb_array")
    env.seed(0)
    env.reset()
    assert env.get_attr("speed") == [1.0] * N_ENVS
    env.set_attr("speed", [2.0], indices=[0, 2])
    assert env.get_attr("speed") == [[2.0], 1.0, [2.0]]
    assert env.get_attr("speed", indices=[2, 1]) == [[2.0], 1.0]
    env.set_attr("speed", 3.0)
    assert env.get_attr("speed", indices=-1) == [3.0]
    assert env.env_method("double", 4, plus=1) == [9] * N_ENVS
    assert (env.has_attr("speed"), env.has_attr("double"), env.has_attr("no_such_attribute")) == (True, True, False)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        env.get_attr("no_such_attribute")
    assert np.shape(env.env_method("action_masks")) == (N_ENVS, 4)
    assert env.get_attr("render_mode") == ["rgb_array"] * N_ENVS
    env.step(np.zeros(N_ENVS, int))
    images = env.get_images()
    assert (len(images), images[0].shape, images[0].max()) == (N_ENVS, (8, 8, 3), 1)
    assert env.render().shape == (16, 16, 3)
    if "sync" in adapter:
        with pytest.raises(ValueError, match=r"indices=\[1\] are not allowed"):
            env.env_method("double", 4, indices=[1])
    else:
        assert env.env_method("double", 4, indices=[1]) == [8]
        assert env.env_is_wrapped(Monitor, indices=[0]) == [False]


@pytest.mark.parametrize("adapter", ["process", "sync NextStep", "sync SameStep", "async Disabled"])
def test_sb3_trains_and_evaluates_with_the_wrappers_of_sb3(make, adapter):
    env = make(adapter)
    if adapter == "process":
        env = VecMonitor(env)
    model = PPO("MlpPolicy", VecNormalize(env), n_steps=32, batch_size=96, n_epochs=1, seed=0).learn(192)
    assert len(model.ep_info_buffer) >= 6
    model = PPO("MlpPolicy", env, n_steps=4, batch_size=12)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=6, return_episode_rewards=True)
    assert (len(returns), max(lengths)) == (6, 15)


def statistics_of(env: VecEnv) -> list[tuple[float, int]]:
    env.seed(1)
    env.reset()
    found = []
    for _ in range(60):
        for info in env.step(np.ones(env.num_envs, int))[3]:
            if "episode" in info:
                found.append((round(float(info["episode"]["r"]), 4), int(info["episode"]["l"])))
    return found


@pytest.mark.parametrize("mode", AutoresetMode)
def test_statistics_are_those_of_vec_monitor_also_around_record_episode_statistics(mode):
    makers = [Reporting] * N_ENVS
    expected = statistics_of(VecMonitor(DummyVecEnv(makers)))
    assert len(expected) > 9
    plain = from_vector_env(SyncVectorEnv(makers, autoreset_mode=mode))
    recorded = from_vector_env(RecordEpisodeStatistics(SyncVectorEnv(makers, autoreset_mode=mode)))
    assert statistics_of(plain) == statistics_of(recorded) == statistics_of(VecMonitor(recorded)) == expected
    clipped = from_vector_env(ClipReward(SyncVectorEnv(makers, autoreset_mode=mode), 0.0, 0.0))
    assert {total for total, _ in statistics_of(clipped)} == {0.0}


def test_vector_environments_that_cannot_follow_the_contract_give_one_line():
    makers = [Reporting] * N_ENVS
    env = CustomVector(makers, AutoresetMode.NEXT_STEP)
    env.metadata = {}
    with pytest.raises(ValueError, match=r"metadata\['autoreset_mode'\]=None of .* is not allowed"):
        from_vector_env(env)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        env = from_vector_env(CustomVector(makers, mode, resets_some=False))
        with pytest.raises(RuntimeError, match="resets all environments in spite of"):
            statistics_of(env)
    env = from_vector_env(CustomVector(makers, AutoresetMode.SAME_STEP))
    assert not env.has_attr("speed")
    for method, arguments in (("get_attr", ["speed"]), ("set_attr", ["speed", 1.0]), ("env_method", ["double", 1])):
        with pytest.raises(AttributeError, match="CustomVector"):
            getattr(env, method)(*arguments)
    env.set_options([{"low": 1}, {}, {}])
    with pytest.raises(ValueError, match="a vector environment has the same for all"):
        env.reset()


def test_processes_without_shared_memory_give_one_line_in_the_mode_next_step():
    env = AsyncVectorEnv([Reporting], context="forkserver", shared_memory=False)
    with pytest.raises(ValueError, match="shared_memory=False is not allowed in the mode NEXT_STEP"):
        from_vector_env(env)
    env.close()


@pytest.mark.parametrize("actions", ["Discrete", "Box"])
def test_processes_give_the_steps_of_subproc_vec_env_bit_for_bit(make, actions):
    ours = make("process", n_envs=5, actions=actions)
    theirs = make(SubprocVecEnv, n_envs=5, actions=actions)
    theirs.action_space.seed(0)
    for env in (ours, theirs):
        env.seed(3)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    for _ in range(60):
        chosen = np.stack([theirs.action_space.sample() for _ in range(5)])
        step, expected = ours.step(chosen), theirs.step(chosen)
        for index in range(3):
            np.testing.assert_array_equal(step[index], expected[index])
            assert step[index].dtype == expected[index].dtype
        np.testing.assert_equal(step[3], [*expected[3]])
