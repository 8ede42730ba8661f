"""Environments whose state is restored continue, number by number, as those from which it was captured."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from gymnasium.wrappers import RecordEpisodeStatistics
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_ano import ANO
from sb3_ano.checkpoints.state import TrainingState
from sb3_ano.envs import make_vec_env
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, TinyEnv, tiny_vec_env

CLASSIC = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"]
MUJOCO = [f"{name}-v5" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer", "Reacher", "Pusher")]
MUJOCO += ["InvertedPendulum-v5", "InvertedDoublePendulum-v5", "HumanoidStandup-v5"]
ATARI = ["PongNoFrameskip-v4", "ALE/Breakout-v5"]
SPACES = {"box": BOX_OBSERVATIONS, "dict": DICT_OBSERVATIONS, "image": IMAGE_OBSERVATIONS}


def make(case: str, n_envs: int = 2) -> VecEnv:
    def single() -> gym.Env:
        return RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=17))

    if case == "wrapped":
        return VecFrameStack(VecNormalize(VecMonitor(DummyVecEnv([single, single])), gamma=0.9), 3)
    if case in SPACES:
        return tiny_vec_env(SPACES[case], BOX_ACTIONS)
    return make_vec_env(case, 1 if case in ATARI else n_envs, backend="gymnasium")


def state_of(env: VecEnv, callback: BaseCallback | None = None) -> TrainingState:
    policy = "MultiInputPolicy" if isinstance(env.observation_space, gym.spaces.Dict) else "MlpPolicy"
    model = ANO(policy, env, n_steps=8, batch_size=8, torch_compile=False, policy_kwargs={"net_arch": [4]})
    return TrainingState(model, callback)


def drive(env: VecEnv, steps: int, seed: int) -> list:
    """Return what the environments answer to random actions."""
    env.action_space.seed(seed)
    answers = []
    for _ in range(steps):
        answers.append(env.step(np.stack([env.action_space.sample() for _ in range(env.num_envs)])))
        for info in answers[-1][3]:
            info.get("episode", {}).pop("t", None)  # of this process
    return answers


@pytest.mark.parametrize("case", [*CLASSIC, *MUJOCO, *ATARI, *SPACES, "wrapped"])
def test_environments_continue_exactly(case):
    first, second = make(case), make(case)  # of different seeds and pasts
    for seed, (env, past) in enumerate(((first, 100), (second, 20))):
        env.seed(seed)
        env.reset()
        drive(env, past, seed=past)
    captured = state_of(first).capture()
    assert (captured["without_state"], captured["dropped"]) == ([], [])
    steps = 300 if case in ATARI else 150
    expected = drive(first, steps, seed=5)
    state = state_of(second)
    np.testing.assert_raises(AssertionError, np.testing.assert_equal, drive(second, 3, seed=5), expected[:3])
    assert state.restore(captured["attributes"]) == []
    np.testing.assert_equal(drive(second, steps, seed=5), expected)
    first.close(), second.close()


class Halves(gym.Wrapper):
    """Play one of two environments, and draw from the generator of a third."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.first, self.second = gym.make("CartPole-v1"), gym.make("CartPole-v1")
        self.active, self.all = self.first, [self.first, self.second]

    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        self.generator = self.unwrapped.np_random
        return result


def test_restored_environments_share_generators_and_refer_to_each_other_as_before():
    envs = [DummyVecEnv([Halves]) for _ in range(2)]
    for env in envs:
        env.seed(3)
        env.reset()
    before, after = (env.envs[0] for env in envs)
    before.active, before.all = before.second, [before.second, before.first]
    assert state_of(envs[1]).restore(state_of(envs[0]).capture()["attributes"]) == []
    assert after.generator is after.unwrapped.np_random is not before.generator
    assert after.active is after.second
    assert after.all == [after.second, after.first]


class Views(gym.Wrapper):
    """Keep arrays that share memory, with each other and with the simulator."""

    def __init__(self) -> None:
        super().__init__(gym.make("HalfCheetah-v5"))
        self.all = np.arange(6.0).reshape(2, 3)
        self.row, self.columns, self.qpos = self.all[1], [self.all[:, ::-2]], self.unwrapped.data.qpos
        self.joints = {"legs": self.qpos[3:]}


def test_arrays_that_share_memory_share_it_afterwards():
    envs = [DummyVecEnv([Views]) for _ in range(3)]
    for env in envs:
        env.reset()
    first, last = envs[0].envs[0], envs[2].envs[0]
    first.all *= 10.0
    for before, after in itertools.pairwise(envs):  # resumed, and once more
        assert state_of(after).restore(state_of(before).capture()["attributes"]) == []
    last.all[1, 2] = -1.0
    assert last.row.tolist() == [30.0, 40.0, -1.0]
    assert last.columns[0].tolist() == [[20.0, 0.0], [-1.0, 30.0]]
    assert first.row.tolist() == [30.0, 40.0, 50.0]
    for env in (first, last):
        env.step(env.action_space.sample())
        assert env.qpos is env.unwrapped.data.qpos
        assert env.joints["legs"].tolist() == env.unwrapped.data.qpos[3:].tolist()


class Gate(EzPickle):
    """Is unpickled as it was made, whatever has happened since."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0


class Closing:
    """Has a finalizer, as PyBullet's clients and windows have."""

    def __del__(self) -> None:
        vars(self).clear()


def guarded(**attributes):
    env = TinyEnv(BOX_OBSERVATIONS, BOX_ACTIONS)
    vars(env).update(attributes)
    return lambda: DummyVecEnv([lambda: env])


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")  # Box2D
@pytest.mark.parametrize(
    ("make_env", "lost"),
    [
        (guarded(guard=Gate()), ["TinyEnv"]),
        (guarded(guard=(number for number in range(3))), ["TinyEnv"]),
        (guarded(window=(number for number in range(3))), []),  # is made again
        (guarded(viewer=Closing()), []),
        (guarded(client=Closing()), ["TinyEnv"]),
        (guarded(guard={"hidden": TinyEnv(BOX_OBSERVATIONS, BOX_ACTIONS)}), []),  # is found, and has a state
        (lambda: VecNormalize(make_vec_env("CartPole-v1", 1, vec_env_cls=SubprocVecEnv)), ["SubprocVecEnv"]),
        (lambda: VecNormalize(make_vec_env("CartPole-v1", 1, backend="envpool")), ["EnvPoolVecEnv"]),
        (lambda: make_vec_env("LunarLander-v3"), ["LunarLander"]),
    ],
    ids=["EzPickle", "generator", "window", "viewer", "client", "environment", "processes", "envpool", "Box2D"],
)
def test_environments_without_a_state_are_named(make_env, lost):
    pytest.importorskip("envpool")
    env = make_env()
    captured = state_of(env).capture()
    assert (captured["without_state"], captured["dropped"]) == (lost, [])
    env.close()


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (lambda: VecNormalize(make("CartPole-v1")), "env is VecNormalize, but DirectVecEnv in the checkpoint"),
        (lambda: make("CartPole-v1", 3), r"env.envs\[2\] is Monitor, but missing in the checkpoint"),
        (lambda: make("CartPole-v1", 1), r"env.envs\[1\] is missing, but Monitor in the checkpoint"),
        (lambda: make("Acrobot-v1"), "env.envs.*is AcrobotEnv, but CartPoleEnv in the checkpoint"),
    ],
)
def test_other_environments_are_rejected(make_other, message):
    content = state_of(make("CartPole-v1")).capture()["attributes"]
    with pytest.raises(ValueError, match=message):
        state_of(make_other()).restore(content)


def test_a_monitor_file_loses_the_episodes_that_are_repeated(tmp_path):
    def monitored(**kwargs) -> VecEnv:
        env = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"), str(tmp_path / "0"), **kwargs)])
        env.reset()
        return env

    env, file = monitored(), tmp_path / "0.monitor.csv"
    drive(env, 100, seed=0)
    content = state_of(env).capture()["attributes"]
    kept = file.read_bytes()
    drive(env, 100, seed=1)
    env.close()
    file.write_bytes(file.read_bytes() + b"11.0,1")  # interrupted in the middle of a row

    env = monitored(override_existing=False)
    state_of(env).restore(content)
    assert file.read_bytes() == kept
    drive(env, 100, seed=1)
    assert file.read_bytes().startswith(kept)
    assert env.envs[0].episode_lengths == load_results(str(tmp_path))["l"].tolist()
    env.close()


def test_callbacks_can_be_added_and_removed():
    env, callback, other = (
        make("CartPole-v1"),
        *(EvalCallback(make("CartPole-v1", 1), log_path=path) for path in (None, "else")),
    )
    callback.best_mean_reward, callback.evaluations_timesteps = 12.5, [100]
    content = state_of(env, callback).capture()["attributes"]
    state_of(env, other).restore(content)
    assert (other.best_mean_reward, other.evaluations_timesteps) == (12.5, [100])
    assert "else" in other.log_path
    state_of(env).restore(content)
