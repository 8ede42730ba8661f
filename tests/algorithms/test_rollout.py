"""Observations and rewards that are not numbers."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from sb3_ano import ANO
from sb3_ano.algorithms.buffers import FlatRolloutBuffer
from sb3_ano.algorithms.rollout import FiniteCheck, bootstrap_truncations
from tests.common import parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, TinyEnv, tiny_vec_env, vec_env_with_bad_number


def train(env, policy: str = "MlpPolicy") -> ANO:
    return ANO(policy, env, n_steps=32, batch_size=32, n_epochs=1, seed=0).learn(3 * 32 * env.num_envs)


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [3, 40])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_environment_and_the_step_are_named(what, number, at, normalize):
    env = vec_env_with_bad_number(2, what, number, at)
    if normalize:
        env = VecNormalize(env)
    with pytest.raises(ValueError, match=f"environment 2 returned {number} in its {what} at step {at} of the training"):
        train(env)


def test_the_key_of_a_dict_observation_is_named():
    env = vec_env_with_bad_number(1, "observation", math.nan, 7, observation_space=DICT_OBSERVATIONS)
    with pytest.raises(ValueError, match="environment 1 returned nan in its observation 'place' at step 7 of the training"):
        train(env, "MultiInputPolicy")


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_terminal_observation_is_looked_at(number, normalize):
    env = vec_env_with_bad_number(3, "observation", number, TinyEnv.length)
    message = f"environment 3 returned {number} in its terminal observation at step {TinyEnv.length} of"
    with pytest.raises(ValueError, match=message):
        train(VecNormalize(env) if normalize else env)


class BadReset(TinyEnv):
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return np.full_like(observation, math.nan), info


@pytest.mark.parametrize("normalize", [False, True])
def test_the_first_observation_is_looked_at(normalize):
    space = BOX_OBSERVATIONS, spaces.Discrete(2)
    env = DummyVecEnv([lambda: TinyEnv(*space), lambda: TinyEnv(*space), lambda: BadReset(*space)])
    with pytest.raises(ValueError, match="environment 2 returned nan in its observation at step 0 of"):
        train(VecNormalize(env) if normalize else env)


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_the_statistics_of_vecnormalize_stay_finite(what):
    env = VecNormalize(vec_env_with_bad_number(2, what, math.inf, 9))
    with pytest.raises(ValueError, match="environment 2"):
        train(env)
    assert np.isfinite(env.obs_rms.mean).all()
    assert np.isfinite(env.ret_rms.var)
    assert "step_wait" not in vars(env.venv)


def test_what_a_wrapper_makes_of_finite_numbers_is_looked_at_too():
    class Logarithm(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            observations, rewards, dones, infos = self.venv.step_wait()
            rewards[1] = -math.inf
            return observations, rewards, dones, infos

    with pytest.raises(ValueError, match="environment 1 returned -inf in its reward at step 1 of"):
        train(Logarithm(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2))))


def test_a_wrapper_that_overrides_step_is_called():
    class Seven(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            return self.venv.step_wait()

        def step(self, actions):
            observations, rewards, dones, infos = super().step(actions)
            return observations, np.full_like(rewards, 7.0), dones, infos

    model = ANO("MlpPolicy", Seven(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2))), n_steps=8, batch_size=16, gamma=0.0)
    model.learn(16)
    assert (model.rollout_buffer.rewards == 7.0).all()


def test_the_guard_follows_a_change_of_environment():
    model = train(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2), n_envs=4))
    model.set_env(vec_env_with_bad_number(0, "reward", math.nan, 5))
    with pytest.raises(ValueError, match="environment 0 returned nan in its reward"):
        model.learn(128)


def test_evaluation_with_normalised_observations_works_during_training():
    def normalised(training: bool) -> VecNormalize:
        return VecNormalize(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2)), training=training)

    evaluate = EvalCallback(normalised(False), eval_freq=8, n_eval_episodes=2, verbose=0, warn=False)
    model = ANO("MlpPolicy", normalised(True), n_steps=32, batch_size=32, n_epochs=1, seed=0)
    model.learn(128, callback=evaluate)
    assert np.isfinite(evaluate.last_mean_reward)
    np.testing.assert_allclose(evaluate.eval_env.obs_rms.mean, model.env.obs_rms.mean)


class Recorder(BaseCallback):
    """Keeps the local variables that SB3 shows to callbacks, by name: type, shape, and values where they are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict] = []

    def _on_step(self) -> bool:
        self.steps.append({name: self._kept(value) for name, value in self.locals.items()})
        return True

    @staticmethod
    def _kept(value):
        if isinstance(value, torch.Tensor):
            return type(value), value.numpy().copy()
        return (type(value), value.copy()) if isinstance(value, np.ndarray) else type(value)


# Left over from SB3's loop over truncated environments.
LOOP_VARIABLES = {"idx", "done", "terminal_obs", "terminal_value"}
OTHER_LOCALS = {"takes_arrays", "snapshot", "actor", "in_bounds", "discrete", "as_tensors", "check", "__class__"}


@pytest.mark.parametrize(
    ("observations", "actions"),
    [(BOX_OBSERVATIONS, BOX_ACTIONS), (BOX_OBSERVATIONS, spaces.Discrete(3)), (DICT_OBSERVATIONS, spaces.MultiBinary(2))],
    ids=["Box", "Discrete", "Dict"],
)
def test_callbacks_find_the_same_local_variables_as_in_sb3(observations, actions):
    policy = "MultiInputPolicy" if observations is DICT_OBSERVATIONS else "MlpPolicy"
    seen = []
    for cls in (ANO, PPO):
        recorder = Recorder()
        model = cls(policy, tiny_vec_env(observations, actions), n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
        model.learn(64, callback=recorder)
        seen.append(recorder.steps)
    for mine, theirs in zip(*seen, strict=True):
        assert set(theirs) - LOOP_VARIABLES <= set(mine)
        assert set(mine) - set(theirs) <= OTHER_LOCALS
        for name, expected in theirs.items():
            if name in LOOP_VARIABLES:
                continue
            if not isinstance(expected, tuple):
                assert name in ("self", "rollout_buffer") or mine[name] is expected, name
            elif expected[1].dtype.kind in "fiub":
                assert mine[name][0] is expected[0], name
                np.testing.assert_allclose(mine[name][1], expected[1], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("gamma", [0.5, 0.99])
@pytest.mark.parametrize("observations", [BOX_OBSERVATIONS, DICT_OBSERVATIONS], ids=["Box", "Dict"])
def test_the_rollout_is_that_of_sb3_with_truncations_bootstrapped(observations, gamma):
    policy = "MultiInputPolicy" if observations is DICT_OBSERVATIONS else "MlpPolicy"
    buffers = []
    for cls in (ANO, PPO):
        env = tiny_vec_env(observations, spaces.Discrete(3), n_envs=5)  # all of them are truncated after 15 steps
        model = cls(policy, env, n_steps=40, batch_size=40, seed=0, gamma=gamma, device="cpu")
        model.train = lambda: None
        model.learn(200)
        buffers.append(model.rollout_buffer)
    for name in ("rewards", "episode_starts", "values", "log_probs", "advantages", "returns", "actions"):
        np.testing.assert_allclose(*(getattr(buffer, name) for buffer in buffers), rtol=1e-5, atol=1e-6, err_msg=name)


def test_only_truncations_are_bootstrapped_and_all_of_one_step_together():
    asked = []

    class Actor:
        def terminal_values(self, observations):
            asked.append(observations)
            return np.arange(1.0, 1.0 + len(observations), dtype=np.float32)

    rewards = np.zeros(4, np.float32)
    infos = [
        {"terminal_observation": np.full(2, 10.0), "TimeLimit.truncated": True},
        {"terminal_observation": np.full(2, 11.0), "TimeLimit.truncated": False},
        {"TimeLimit.truncated": True},
        {"terminal_observation": np.full(2, 13.0), "TimeLimit.truncated": True},
    ]
    bootstrap_truncations(rewards, np.array([True, True, True, True]), infos, Actor(), gamma=0.5)
    np.testing.assert_array_equal(rewards, [0.5, 0.0, 0.0, 1.0])
    np.testing.assert_array_equal(asked, [[[10.0, 10.0], [13.0, 13.0]]])


class IntegerRewards(VecEnvWrapper):
    """Rewards of an integer type, as SubprocVecEnv makes them of Python's integers."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, np.ceil(100.0 * rewards).astype(np.int64), dones, infos


def test_integer_rewards_of_truncated_episodes_are_those_of_sb3():  # review core 3
    def run(cls):
        env = IntegerRewards(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(3)))
        model = cls("MlpPolicy", env, n_steps=40, batch_size=40, seed=0, device="cpu")
        with torch.no_grad():
            model.policy.value_net.bias.fill_(1.7)
        model.train = lambda: None
        return model.learn(80).rollout_buffer

    buffers = run(ANO), run(PPO)
    for name in ("rewards", "advantages"):
        np.testing.assert_allclose(*(getattr(buffer, name) for buffer in buffers), rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_step_wait_that_a_user_replaced_stays_and_is_called():  # review core 12
    env = tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2))
    calls, step_wait = [], env.step_wait

    def counted():
        calls.append(1)
        return step_wait()

    env.step_wait = counted
    ANO("MlpPolicy", VecNormalize(env), n_steps=16, batch_size=32, n_epochs=1, seed=0).learn(96)
    assert len(calls) == 48
    assert env.step_wait is counted


def test_an_overflowing_sum_of_finite_numbers_is_no_complaint():
    big = np.full((2, 4), 3e38, np.float32)
    FiniteCheck(0)(big, big[:, 0], np.zeros(2, bool), [{}, {}])


class AtRolloutStart(BaseCallback):
    """Changes the policy before the rollout, and again in the middle of it."""

    def _on_rollout_start(self) -> None:
        with torch.no_grad():
            self.model.policy.log_std.fill_(-3.0)

    def _on_step(self) -> bool:
        if self.n_calls == 16:
            with torch.no_grad():
                self.model.policy.action_net.bias.fill_(0.5)
        return True


class BetterReturns(BaseCallback):
    """Puts another array in the place of the buffer's."""

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer
        buffer.advantages = -buffer.advantages
        buffer.returns = buffer.returns + 5.0

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize("callback", [AtRolloutStart, BetterReturns])
def test_what_a_callback_changes_acts_as_in_sb3(callback):
    def run(cls, callback=None) -> torch.Tensor:
        env = tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS)
        options = {"shaping": "ppo"} if cls is ANO else {}
        model = cls("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu", **options)
        return parameters(model.learn(128, callback=callback))

    expected = run(PPO, callback())
    torch.testing.assert_close(run(ANO, callback()), expected, rtol=1e-5, atol=1e-6)
    assert (run(ANO) - expected).norm() > 1e-3


def test_the_length_of_a_rollout_may_be_changed_between_two_trainings():
    def run(cls) -> torch.Tensor:
        env = tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS)
        options = {"shaping": "ppo"} if cls is ANO else {}
        model = cls("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu", **options).learn(128)
        for n_steps in (16, 64):
            model.n_steps = model.rollout_buffer.buffer_size = n_steps
            model.learn(256)
        return parameters(model)

    torch.testing.assert_close(run(ANO), run(PPO), rtol=1e-5, atol=1e-6)


class OwnSamples(FlatRolloutBuffer):
    """A buffer of a user's that overrides what ours never calls in the fast way."""

    def add(self, obs, action, reward, episode_start, value, log_prob):
        super().add(obs, action, reward, episode_start, value.clone(), log_prob.clone())

    def _get_samples(self, batch_inds, env=None):
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(advantages=-samples.advantages)


def test_methods_that_a_users_buffer_overrides_are_called():
    env = tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS)
    settings = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "seed": 0}
    found = ANO("MlpPolicy", env, rollout_buffer_class=OwnSamples, **settings).learn(64)
    plain = ANO("MlpPolicy", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS), **settings).learn(64)
    assert not torch.equal(parameters(found), parameters(plain))


def test_a_policy_that_is_not_a_number_is_named_and_not_the_environment():
    model = ANO("MlpPolicy", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS), n_steps=32, batch_size=32, seed=0)
    with torch.no_grad():
        model.policy.action_net.bias.fill_(math.nan)
    with pytest.raises(ValueError, match="the policy returned actions that are not finite after 0 steps"):
        model.learn(64)
