"""Environments whose state is restored continue, number by number, as those from which it was captured."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from gymnasium.wrappers import RecordEpisodeStatistics
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_ano import ANO
from sb3_ano.checkpoints.state import TrainingState
from sb3_ano.envs import make_vec_env
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, TinyEnv, tiny_vec_env

CLASSIC = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"]
MUJOCO = ["HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer", "Reacher", "Pusher"]
MUJOCO += ["InvertedPendulum", "InvertedDoublePendulum", "HumanoidStandup"]
ATARI = ["PongNoFrameskip-v4", "ALE/Breakout-v5"]


def state_of(env: VecEnv) -> TrainingState:
    policy = "MultiInputPolicy" if isinstance(env.observation_space, gym.spaces.Dict) else "MlpPolicy"
    return TrainingState(ANO(policy, env, n_steps=8, batch_size=8, torch_compile=False, policy_kwargs={"net_arch": [4]}), None)


def drive(env: VecEnv, steps: int, seed: int) -> list:
    """Return what the environments answer to random actions."""
    env.action_space.seed(seed)
    answers = []
    for _ in range(steps):
        observations, rewards, dones, infos = env.step(np.stack([env.action_space.sample() for _ in range(env.num_envs)]))
        for info in infos:
            if "episode" in info:
                info["episode"] = {**info["episode"], "t": "of this process"}
        answers.append((observations, rewards, dones, infos))
    return answers


def maker(env_id: str, n_envs: int = 2):
    return lambda: make_vec_env(env_id, n_envs, backend="gymnasium")


def wrapped() -> VecEnv:
    def single() -> gym.Env:
        return RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=17))

    return VecFrameStack(VecNormalize(VecMonitor(DummyVecEnv([single, single])), gamma=0.9), 3)


ENVIRONMENTS = {env_id: (maker(env_id), 150) for env_id in (*CLASSIC, *(f"{name}-v5" for name in MUJOCO))}
ENVIRONMENTS |= {env_id: (maker(env_id, 1), 300) for env_id in ATARI} | {"wrapped": (wrapped, 150)}
for name, space in {"box": BOX_OBSERVATIONS, "dict": DICT_OBSERVATIONS, "image": IMAGE_OBSERVATIONS}.items():
    ENVIRONMENTS[name] = (lambda space=space: tiny_vec_env(space, BOX_ACTIONS)), 150


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_environments_continue_exactly(case):
    make, steps = ENVIRONMENTS[case]
    first, second = make(), make()  # of different seeds and pasts
    for seed, (env, past) in enumerate(((first, 100), (second, 20))):
        env.seed(seed)
        env.reset()
        drive(env, past, seed=past)
    captured = state_of(first).capture()
    assert (captured["without_state"], captured["dropped"]) == ([], [])
    expected = drive(first, steps, seed=5)
    state = state_of(second)
    np.testing.assert_raises(AssertionError, np.testing.assert_equal, drive(second, 3, seed=5), expected[:3])
    assert state.restore(captured["attributes"]) == []
    np.testing.assert_equal(drive(second, steps, seed=5), expected)
    first.close(), second.close()


class Wind(gym.Wrapper):
    """Draw from the generator of the environment below."""

    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        self.generator = self.unwrapped.np_random
        return result


class Halves(gym.Wrapper):
    """Play one of two environments."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.first, self.second = gym.make("CartPole-v1"), gym.make("CartPole-v1")
        self.active, self.all = self.first, [self.first, self.second]


def test_restored_environments_share_generators_and_refer_to_each_other_as_before():
    envs = [DummyVecEnv([lambda: Wind(gym.make("CartPole-v1")), Halves]) for _ in range(2)]
    for env in envs:
        env.seed(3)
        env.reset()
    halves = envs[0].envs[1]
    halves.active, halves.all = halves.second, [halves.second, halves.first]
    assert state_of(envs[1]).restore(state_of(envs[0]).capture()["attributes"]) == []
    wind, halves = envs[1].envs
    assert wind.generator is wind.unwrapped.np_random
    assert wind.generator is not envs[0].envs[0].generator
    assert halves.active is halves.second
    assert halves.all == [halves.second, halves.first]


class Gate(EzPickle):
    """Is unpickled as it was made, whatever has happened since."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0


class Guarded(TinyEnv):
    def __init__(self, **attributes) -> None:
        super().__init__(BOX_OBSERVATIONS, BOX_ACTIONS)
        vars(self).update(attributes)


def guarded(**attributes):
    return lambda: DummyVecEnv([lambda: Guarded(**attributes)])


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (guarded(guard=Gate()), ["Guarded"]),
        (guarded(guard=(number for number in range(3))), ["Guarded"]),
        (guarded(window=(number for number in range(3))), []),  # is made again
        (guarded(guard={"hidden": TinyEnv(BOX_OBSERVATIONS, BOX_ACTIONS)}), []),  # is found, and has a state
        (lambda: VecNormalize(make_vec_env("CartPole-v1", 1, vec_env_cls=SubprocVecEnv)), ["SubprocVecEnv"]),
        (lambda: VecNormalize(make_vec_env("CartPole-v1", 1, backend="envpool")), ["EnvPoolVecEnv"]),
    ],
    ids=["EzPickle", "generator", "window", "environment", "processes", "envpool"],
)
def test_environments_without_a_state_are_named(make, lost):
    pytest.importorskip("envpool")
    env = make()
    captured = state_of(env).capture()
    assert (captured["without_state"], captured["dropped"]) == (lost, [])
    env.close()


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (lambda: VecNormalize(maker("CartPole-v1")()), "env is VecNormalize, but DirectVecEnv in the checkpoint"),
        (maker("CartPole-v1", 3), r"env.envs\[2\] is Monitor, but missing in the checkpoint"),
        (maker("CartPole-v1", 1), r"env.envs\[1\] is missing, but Monitor in the checkpoint"),
        (maker("Acrobot-v1"), "env.envs.*is AcrobotEnv, but CartPoleEnv in the checkpoint"),
    ],
)
def test_other_environments_are_rejected(make_other, message):
    content = state_of(maker("CartPole-v1")()).capture()["attributes"]
    with pytest.raises(ValueError, match=message):
        state_of(make_other()).restore(content)


def test_a_monitor_file_loses_the_episodes_that_are_repeated(tmp_path):
    def make(**kwargs) -> VecEnv:
        env = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"), str(tmp_path / "0"), **kwargs)])
        env.reset()
        return env

    env, file = make(), tmp_path / "0.monitor.csv"
    drive(env, 100, seed=0)
    content = state_of(env).capture()["attributes"]
    kept = file.read_bytes()
    drive(env, 100, seed=1)  # the run is interrupted in the middle of a row
    env.close()
    file.write_bytes(file.read_bytes() + b"11.0,1")

    env = make(override_existing=False)
    state_of(env).restore(content)
    assert file.read_bytes() == kept
    episodes = load_results(str(tmp_path))
    drive(env, 100, seed=1)
    assert len(load_results(str(tmp_path))) > len(episodes)
    assert env.envs[0].episode_lengths == load_results(str(tmp_path))["l"].tolist()
    env.close()


def test_callbacks_can_be_added_and_removed():
    cart_pole = maker("CartPole-v1", 1)
    model, callback = ANO("MlpPolicy", cart_pole(), n_steps=8, batch_size=8), EvalCallback(cart_pole())
    callback.best_mean_reward, callback.evaluations_timesteps = 12.5, [100]
    content = TrainingState(model, callback).capture()["attributes"]
    other = EvalCallback(cart_pole(), log_path="elsewhere")
    TrainingState(model, other).restore(content)
    assert (other.best_mean_reward, other.evaluations_timesteps) == (12.5, [100])
    assert "elsewhere" in other.log_path
    TrainingState(model, None).restore(content)
