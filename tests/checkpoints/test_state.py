"""Environments that get a state back go on, number by number, as those that it was taken from."""

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
MUJOCO = [
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Humanoid-v5",
    "Swimmer-v5",
    "Reacher-v5",
    "Pusher-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
    "HumanoidStandup-v5",
]


def state_of(env: VecEnv) -> TrainingState:
    policy = "MultiInputPolicy" if isinstance(env.observation_space, gym.spaces.Dict) else "MlpPolicy"
    return TrainingState(ANO(policy, env, n_steps=8, batch_size=8, torch_compile=False, policy_kwargs={"net_arch": [4]}), None)


def drive(env: VecEnv, steps: int, seed: int) -> list:
    """What the environments answer to random actions."""
    env.action_space.seed(seed)
    answers = []
    for _ in range(steps):
        observations, rewards, dones, infos = env.step(np.stack([env.action_space.sample() for _ in range(env.num_envs)]))
        if isinstance(observations, dict):
            observations = {key: value.copy() for key, value in observations.items()}
        for info in infos:
            if "episode" in info:
                info["episode"] = {**info["episode"], "t": "of this process"}
        answers.append((observations, rewards, dones, infos))
    return answers


def require_exact_continuation(make, before: int = 40, after: int = 150) -> None:
    """Compare environments with others, of another seed and another past, that got their state."""
    first, second = make(0), make(1)
    for env, steps in ((first, before), (second, before // 3)):
        env.reset()
        drive(env, steps, seed=steps)
    content = state_of(first).capture()
    expected = drive(first, after, seed=5)
    state = state_of(second)
    np.testing.assert_raises(AssertionError, np.testing.assert_equal, drive(second, 3, seed=5), expected[:3])
    state.restore(content)
    np.testing.assert_equal(drive(second, after, seed=5), expected)
    assert state.environments_without_state() == []
    first.close()
    second.close()


@pytest.mark.parametrize("env_id", [*CLASSIC, *MUJOCO])
def test_environments_go_on_exactly(env_id):
    require_exact_continuation(lambda seed: make_vec_env(env_id, 2, backend="gymnasium", seed=seed))


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Breakout-v5"])
def test_atari_games_go_on_exactly(env_id):
    pytest.importorskip("ale_py")
    require_exact_continuation(lambda seed: make_vec_env(env_id, 1, backend="gymnasium", seed=seed), after=300)


@pytest.mark.parametrize("observations", [BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS])
def test_generators_of_spaces_go_on(observations):
    def make(seed: int) -> VecEnv:
        env = tiny_vec_env(observations, BOX_ACTIONS)
        env.seed(seed)
        return env

    require_exact_continuation(make)


def test_wrappers_go_on_exactly():
    def single() -> gym.Env:
        return RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=17))

    def make(seed: int) -> VecEnv:
        env = DummyVecEnv([single, single])
        env.seed(seed)
        return VecFrameStack(VecNormalize(VecMonitor(env), gamma=0.9), 3)

    require_exact_continuation(make, before=100)


def test_restored_wrappers_and_environments_share_what_they_shared():
    class Wind(gym.Wrapper):
        """Draws from the generator of the environment below it."""

        def reset(self, **kwargs):
            result = super().reset(**kwargs)
            self.generator = self.unwrapped.np_random
            return result

    envs = [DummyVecEnv([lambda: Wind(gym.make("CartPole-v1"))]) for _ in range(2)]
    for env in envs:
        env.seed(3)
        env.reset()
    content = state_of(envs[0]).capture()
    state_of(envs[1]).restore(content)
    restored = envs[1].envs[0]
    assert restored.generator is restored.unwrapped.np_random
    assert restored.generator is not envs[0].envs[0].generator


class Gate(EzPickle):
    """Pickles as it was made, whatever has happened to it since."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0


class Guarded(TinyEnv):
    def __init__(self, guard) -> None:
        super().__init__(BOX_OBSERVATIONS, BOX_ACTIONS)
        self.guard = guard


@pytest.mark.parametrize(
    "guard", [Gate(), (number for number in range(3)), {"hidden": TinyEnv(BOX_OBSERVATIONS, BOX_ACTIONS)}]
)
def test_an_attribute_that_would_lose_its_state_is_told_of(guard):
    state = state_of(DummyVecEnv([lambda: Guarded(guard)]))
    state.capture()
    hidden = isinstance(guard, dict)  # an environment that is found, and has a state of its own
    assert state.environments_without_state() == ([] if hidden else ["Guarded"])


def test_environments_of_other_processes_and_libraries_are_told_of():
    pytest.importorskip("envpool")
    for env, name in (
        (make_vec_env("CartPole-v1", 2, backend="envpool", seed=0), "EnvPoolVecEnv"),
        (SubprocVecEnv([lambda: gym.make("CartPole-v1")]), "SubprocVecEnv"),
    ):
        state = state_of(VecNormalize(env))
        state.capture()
        assert state.environments_without_state() == [name]
        env.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda env: VecNormalize(env), "env is VecNormalize, and DirectVecEnv in the checkpoint"),
        (
            lambda env: make_vec_env("CartPole-v1", 3, backend="gymnasium"),
            r"env.envs\[2\] is Monitor, and missing in the checkpoint",
        ),
        (
            lambda env: make_vec_env("CartPole-v1", 1, backend="gymnasium"),
            r"env.envs\[1\] is missing, and Monitor in the checkpoint",
        ),
        (
            lambda env: make_vec_env("Acrobot-v1", 2, backend="gymnasium"),
            "env.envs.*is AcrobotEnv, and CartPoleEnv in the checkpoint",
        ),
    ],
)
def test_other_environments_are_refused(other, message):
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium")
    content = state_of(env).capture()
    with pytest.raises(ValueError, match=message):
        state_of(other(env)).restore(content)


def test_an_environment_that_refers_to_another_one_now_is_named():
    class Halves(gym.Wrapper):
        """Plays one of two environments."""

        def __init__(self) -> None:
            super().__init__(gym.make("CartPole-v1"))
            self.first, self.second = gym.make("CartPole-v1"), gym.make("CartPole-v1")
            self.active = self.first

    envs = [DummyVecEnv([Halves]) for _ in range(2)]
    content = state_of(envs[0]).capture()
    assert state_of(envs[1]).restore(content) == []
    envs[0].envs[0].active = envs[0].envs[0].second
    content = state_of(envs[0]).capture()
    assert state_of(envs[1]).restore(content) == ["model.env.envs[0].active"]


def test_a_monitor_file_loses_the_episodes_that_are_played_again(tmp_path):
    env = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"), str(tmp_path / "0"))])
    env.reset()
    drive(env, 100, seed=0)
    content = state_of(env).capture()
    kept = (tmp_path / "0.monitor.csv").read_bytes()
    drive(env, 100, seed=1)  # the run is interrupted in the middle of a row
    with (tmp_path / "0.monitor.csv").open("ab") as file:
        file.write(b"11.0,1")

    on = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"), str(tmp_path / "0"), override_existing=False)])
    env.close()
    on.reset()
    state_of(on).restore(content)
    assert (tmp_path / "0.monitor.csv").read_bytes() == kept
    episodes = load_results(str(tmp_path))
    drive(on, 100, seed=1)
    assert len(load_results(str(tmp_path))) > len(episodes)
    assert on.envs[0].episode_lengths == load_results(str(tmp_path))["l"].tolist()
    on.close()


def test_a_callback_more_or_less_moves_no_state():
    env = make_vec_env("CartPole-v1", 1, backend="gymnasium")
    callback = EvalCallback(make_vec_env("CartPole-v1", 1, backend="gymnasium"))
    model = ANO("MlpPolicy", env, n_steps=8, batch_size=8)
    callback.best_mean_reward, callback.evaluations_timesteps = 12.5, [100]
    content = TrainingState(model, callback).capture()

    other = EvalCallback(make_vec_env("CartPole-v1", 1, backend="gymnasium"), log_path="elsewhere")
    TrainingState(model, other).restore(content)
    assert (other.best_mean_reward, other.evaluations_timesteps) == (12.5, [100])
    assert "elsewhere" in other.log_path
    TrainingState(model, None).restore(content)
