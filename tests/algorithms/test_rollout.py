"""The collection against SB3's, and the check for NaN and Inf."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from sb3_ano import ANO
from sb3_ano.algorithms.buffers import FlatRolloutBuffer
from sb3_ano.algorithms.rollout import bootstrap_truncations
from tests.common import ALGORITHMS, parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, TinyEnv, tiny_vec_env, vec_env_with_bad_number

SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "seed": 0, "device": "cpu"}
NAN, INF = math.nan, math.inf


def train(env, policy: str = "MlpPolicy", **options) -> ANO:
    return ANO(policy, env, **SETTINGS, **options).learn(3 * 32 * env.num_envs)


def plain(actions: spaces.Space | None = None, n_envs: int = 2):
    return tiny_vec_env(BOX_OBSERVATIONS, actions or spaces.Discrete(2), n_envs)


class Wrapper(VecEnvWrapper):
    """A wrapper that changes the rewards."""

    def __init__(self, env, change) -> None:
        super().__init__(env)
        self.change = change

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, self.change(rewards), dones, infos


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("number", "at"), [(NAN, 3), (INF, 40), (-INF, 33), (NAN, 32)])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_the_environment_and_the_step_are_named(what, number, at, normalize):
    env = vec_env_with_bad_number(2, what, number, at)
    if normalize:
        env = VecNormalize(env)
    with pytest.raises(ValueError, match=f"environment 2 returned {number} in its {what} at step {at} of the training"):
        train(env)
    if normalize:  # it would spread the number over the statistics of all environments
        assert np.isfinite(env.obs_rms.mean).all()
        assert np.isfinite(env.ret_rms.var)
        assert np.isfinite(env.returns).all()


@pytest.mark.parametrize(
    ("policy", "observations", "options", "place"),
    [
        ("MultiInputPolicy", DICT_OBSERVATIONS, {}, "observation 'place'"),
        # Its distribution raises an error of its own when it gets NaN.
        ("MlpPolicy", BOX_OBSERVATIONS, {"policy_kwargs": {"activation_fn": torch.nn.ELU}}, "observation"),
    ],
)
def test_the_environment_is_named_if_the_policy_raises(policy, observations, options, place):
    env = vec_env_with_bad_number(1, "observation", NAN, 7, observation_space=observations)
    with pytest.raises(ValueError, match=f"environment 1 returned nan in its {place} at step 7 of the training"):
        train(env, policy, **options)


@pytest.mark.parametrize(("number", "normalize"), [(NAN, False), (INF, False), (NAN, True)])
def test_a_terminal_observation_is_looked_at(number, normalize):
    env = vec_env_with_bad_number(3, "observation", number, TinyEnv.length)
    message = f"environment 3 returned {number} in its terminal observation at step {TinyEnv.length} of"
    with pytest.raises(ValueError, match=message):
        train(VecNormalize(env) if normalize else env)


class BadReset(TinyEnv):
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return np.full_like(observation, NAN), info


@pytest.mark.parametrize("normalize", [False, True])
def test_the_first_observation_is_looked_at(normalize):
    space = BOX_OBSERVATIONS, spaces.Discrete(2)
    env = DummyVecEnv([lambda: TinyEnv(*space), lambda: TinyEnv(*space), lambda: BadReset(*space)])
    with pytest.raises(ValueError, match="environment 2 returned nan in its observation at step 0 of"):
        train(VecNormalize(env) if normalize else env)


@pytest.mark.parametrize("normalize", [False, True])
def test_other_errors_are_left_alone(normalize):
    def fail(rewards):
        raise OSError("the simulator is gone")

    env = Wrapper(plain(), fail)
    with pytest.raises(OSError, match="the simulator is gone"):
        train(VecNormalize(env) if normalize else env)


class Blind(gym.ObservationWrapper):
    """Sees nothing if the first number is negative."""

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.where(observation[0] < 0.0, np.array([NAN, INF, -INF, 0.0]), observation).astype(np.float32)


class Forgiving(FlattenExtractor):
    """Replaces NaN and Inf by numbers."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(super().forward(observations), nan=0.0, posinf=10.0, neginf=-10.0)


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_the_check_can_be_switched_off(cls, tmp_path):  # review users U7
    settings = {**SETTINGS, "policy_kwargs": {"features_extractor_class": Forgiving}}

    def env():
        return Blind(TinyEnv(copy.deepcopy(BOX_OBSERVATIONS), spaces.Discrete(2)))

    model = cls("MlpPolicy", env(), **settings)
    with pytest.raises(ValueError, match="environment 0 returned nan .* or check_finite=False leaves them to the policy"):
        model.learn(128)
    model = cls("MlpPolicy", env(), **settings, check_finite=False).learn(128)
    assert np.isnan(model.rollout_buffer.observations).any()
    assert model.n_skipped_minibatches == 0
    assert parameters(model).isfinite().all()
    model.save(tmp_path / "unchecked")
    assert cls.load(tmp_path / "unchecked").check_finite is False
    if cls is ANO:
        ppo = PPO("MlpPolicy", env(), **settings).learn(128)
        model = cls("MlpPolicy", env(), **settings, shaping="ppo", check_finite=False).learn(128)
        assert torch.allclose(parameters(model), parameters(ppo), rtol=1e-5, atol=1e-7)


def test_what_a_wrapper_makes_of_finite_numbers_is_looked_at_too():
    with pytest.raises(ValueError, match="environment 1 returned -inf in its reward at step 1 of"):
        train(Wrapper(VecNormalize(plain()), lambda rewards: np.array([0.0, -INF])))


def test_a_wrapper_that_overrides_step_is_called():
    class Seven(Wrapper):
        def step(self, actions):
            observations, rewards, dones, infos = super().step(actions)
            return observations, np.full_like(rewards, 7.0), dones, infos

    model = train(Seven(plain(), lambda rewards: rewards), gamma=0.0)
    assert (model.rollout_buffer.rewards == 7.0).all()


def test_the_check_follows_a_change_of_environment():
    model = train(plain(n_envs=4))
    model.set_env(vec_env_with_bad_number(0, "reward", NAN, 5))
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


def test_integer_rewards_of_truncated_episodes_are_those_of_sb3():  # review core 3
    def run(cls):
        # An integer type, as SubprocVecEnv makes of Python's integers.
        env = Wrapper(plain(actions=spaces.Discrete(3)), lambda rewards: np.ceil(100.0 * rewards).astype(np.int64))
        model = cls("MlpPolicy", env, n_steps=40, batch_size=40, seed=0, device="cpu")
        with torch.no_grad():
            model.policy.value_net.bias.fill_(1.7)
        model.train = lambda: None
        return model.learn(80).rollout_buffer

    buffers = run(ANO), run(PPO)
    for name in ("rewards", "advantages"):
        np.testing.assert_allclose(*(getattr(buffer, name) for buffer in buffers), rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_step_wait_that_a_user_replaced_stays_and_is_called():  # review core 12
    env = plain()
    calls, step_wait = [], env.step_wait
    env.step_wait = lambda: calls.append(1) or step_wait()
    replaced = env.step_wait
    train(VecNormalize(env))
    assert len(calls) == 96
    assert env.step_wait is replaced


def test_large_finite_actions_are_allowed():
    model = ANO("MlpPolicy", plain(actions=BOX_ACTIONS), **SETTINGS)
    model.train = lambda: None
    with torch.no_grad():
        model.policy.action_net.bias.fill_(1e25)  # the sum of squares overflows
    assert model.learn(64).rollout_buffer.full


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
        options = {"shaping": "ppo"} if cls is ANO else {}
        model = cls("MlpPolicy", plain(actions=BOX_ACTIONS), **{**SETTINGS, "n_epochs": 2}, **options)
        return parameters(model.learn(128, callback=callback))

    expected = run(PPO, callback())
    torch.testing.assert_close(run(ANO, callback()), expected, rtol=1e-5, atol=1e-6)
    assert (run(ANO) - expected).norm() > 1e-3


class OwnSamples(FlatRolloutBuffer):
    """A buffer of a user's that overrides what ours never calls in the fast way."""

    def add(self, obs, action, reward, episode_start, value, log_prob):
        super().add(obs, action, reward, episode_start, value.clone(), log_prob.clone())

    def _get_samples(self, batch_inds, env=None):
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(advantages=-samples.advantages)


def test_methods_that_a_users_buffer_overrides_are_called():
    runs = [train(plain(actions=BOX_ACTIONS), rollout_buffer_class=buffer) for buffer in (OwnSamples, None)]
    assert not torch.equal(*map(parameters, runs))


def test_a_policy_that_is_not_a_number_is_named_and_not_the_environment():
    model = ANO("MlpPolicy", plain(actions=BOX_ACTIONS), **SETTINGS)
    with torch.no_grad():
        model.policy.action_net.bias.fill_(math.nan)
    with pytest.raises(ValueError, match="the policy returned actions that are not finite after 0 steps"):
        model.learn(64)


def test_infinity_is_found_if_the_statistics_are_fixed():
    env = VecNormalize(vec_env_with_bad_number(2, "observation", INF, 5), training=False)
    with pytest.raises(ValueError, match="environment 2 returned inf in its observation at step 5 of the training"):
        train(env)


class AtStart(BaseCallback):
    """Set statistics as a resumed training does, and fail at a step if one is given."""

    def __init__(self, fail_at: int = 0) -> None:
        super().__init__()
        self.fail_at = fail_at

    def _on_rollout_start(self) -> None:
        self.training_env.obs_rms.mean = np.full(4, 7.0)

    def _on_step(self) -> bool:
        if self.n_calls == self.fail_at:
            raise OSError("enough")
        return True


def test_statistics_are_put_back_to_where_the_rollout_started():
    env = VecNormalize(vec_env_with_bad_number(0, "observation", NAN, 5))
    with pytest.raises(ValueError, match="returned nan"):
        ANO("MlpPolicy", env, **SETTINGS).learn(64, callback=AtStart())
    np.testing.assert_array_equal(env.obs_rms.mean, 7.0)


def test_an_error_of_a_callback_does_not_put_statistics_back():
    env = VecNormalize(plain())
    with pytest.raises(OSError, match="enough"):
        ANO("MlpPolicy", env, **SETTINGS).learn(64, callback=AtStart(fail_at=20))
    assert env.obs_rms.count > 2 * 20
