"""What the three algorithms share with SB3's PPO, and bad input."""

import inspect
import math
import types

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule

from sb3_ano import ANO, PAPO
from tests.common import ALGORITHMS, SMALL, parameters
from tests.tiny_envs import (
    BOX_ACTIONS,
    BOX_OBSERVATIONS,
    DICT_OBSERVATIONS,
    IMAGE_OBSERVATIONS,
    TinyEnv,
    tiny_vec_env,
)

every_algorithm = pytest.mark.parametrize("cls", ALGORITHMS)


@every_algorithm
def test_a_ppo_user_changes_one_word(cls):
    ours = list(inspect.signature(cls.__init__).parameters.values())
    theirs = list(inspect.signature(PPO.__init__).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in ours[len(theirs) :])


@every_algorithm
@pytest.mark.parametrize(
    "action_space",
    [BOX_ACTIONS, spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize(
    ("policy", "observation_space"),
    [("MlpPolicy", BOX_OBSERVATIONS), ("CnnPolicy", IMAGE_OBSERVATIONS), ("MultiInputPolicy", DICT_OBSERVATIONS)],
    ids=["Mlp", "Cnn", "MultiInput"],
)
def test_every_policy_learns_with_every_action_space(cls, policy, observation_space, action_space):
    model = cls(policy, tiny_vec_env(observation_space, action_space), **SMALL)
    before = parameters(model)
    model.learn(64)
    assert parameters(model).isfinite().all()
    assert not torch.equal(parameters(model), before)
    assert model.action_space.contains(model.predict(observation_space.sample())[0].squeeze()[()])


@every_algorithm
@pytest.mark.parametrize(("total", "n_steps"), [(96, 32), (100, 128)])
@pytest.mark.parametrize("end", [0.0, -0.01])
def test_schedules_may_end_at_zero_or_slightly_below(cls, total, n_steps, end):
    def to_the_end(progress_remaining: float) -> float:
        return 0.2 * progress_remaining + end

    schedules = {"clip_range": to_the_end, "clip_range_high": to_the_end, "clip_range_vf": to_the_end}
    model = cls("MlpPolicy", "CartPole-v1", **{**SMALL, "n_steps": n_steps}, **schedules).learn(total)
    assert model.num_timesteps >= total
    assert model.n_skipped_minibatches == 0
    assert parameters(model).isfinite().all()
    logged = model.logger.name_to_value
    assert [logged[f"train/{name}"] for name in schedules] == pytest.approx([1e-6, 1e-6, 0.0])


@every_algorithm
@pytest.mark.parametrize(("total", "n_steps"), [(96, 32), (100, 128)])
def test_a_linear_learning_rate_ends_at_zero_also_where_the_last_rollout_overshoots(cls, total, n_steps):
    model = cls("MlpPolicy", "CartPole-v1", **{**SMALL, "n_steps": n_steps}, learning_rate=lambda progress: 1e-3 * progress)
    before = parameters(model)
    model.learn(total)
    assert model.policy.optimizer.param_groups[0]["lr"] == 0.0
    if n_steps > total:  # a single update, with nothing to learn
        assert torch.equal(parameters(model), before)


@every_algorithm
def test_the_policy_is_in_training_mode_only_while_it_is_updated(cls):
    modes = []

    class Probe(FlattenExtractor):
        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(observations)

    cls("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"features_extractor_class": Probe}).learn(32)
    assert set(modes) == {(False, False), (True, True)}


@every_algorithm
def test_a_trained_model_can_be_pickled_like_ppo(cls):
    model = cls("MlpPolicy", "CartPole-v1", **SMALL).learn(32)
    again = cloudpickle.loads(cloudpickle.dumps(model))
    assert torch.equal(parameters(again), parameters(model))
    again.learn(32)


@every_algorithm
@pytest.mark.parametrize(("advantage", "acts"), [(1.0, "clip_range_high"), (-1.0, "clip_range")])
def test_the_upper_radius_acts_on_positive_advantages_and_the_lower_on_negative_ones(cls, advantage, acts):
    def loss(**radii: float) -> float:
        model = cls("MlpPolicy", "CartPole-v1", **SMALL, **radii).learn(32)
        assert model.logger.name_to_value["train/clip_range_high"] == pytest.approx(radii["clip_range_high"])
        log_ratio = torch.tensor([-0.5, -0.25, 0.25, 0.5])
        samples = types.SimpleNamespace(td_errors=torch.zeros(4), old_values=torch.zeros(4))
        return model.policy_loss(log_ratio, torch.full((4,), advantage), model._updater.clip_range, samples).item()

    base = {"clip_range": 0.1, "clip_range_high": 0.1}
    assert loss(**{**base, acts: 0.2}) != pytest.approx(loss(**base), rel=1e-3)
    other = ({"clip_range", "clip_range_high"} - {acts}).pop()
    assert loss(**{**base, other: 0.2}) == pytest.approx(loss(**base), rel=1e-6)


@every_algorithm
def test_target_kl_ends_the_update(cls, capsys):
    model = cls("MlpPolicy", "CartPole-v1", **{**SMALL, "n_epochs": 50}, learning_rate=0.05, target_kl=1e-3, verbose=1)
    model.learn(32)
    assert model._n_updates < 50
    if cls is not PAPO:  # whose own limit may come first
        assert "Early stopping in epoch" in capsys.readouterr().out


@every_algorithm
def test_target_kl_may_end_the_update_at_its_first_minibatch(cls):
    class Move(BaseCallback):
        """Moves the policy between collection and update."""

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            torch.nn.init.normal_(self.model.policy.action_net.weight)

    model = cls("MlpPolicy", "CartPole-v1", **SMALL, target_kl=1e-6)
    before = parameters(model)
    model.learn(32, callback=Move())
    moved = parameters(model) != before
    assert moved.sum() == model.policy.action_net.weight.numel()
    assert model.logger.name_to_value["train/grad_norm"] == 0.0
    assert model.logger.name_to_value["train/approx_kl"] > 1.5e-6


@every_algorithm
def test_sb3s_log_names_are_there(cls):
    ppo = PPO("MlpPolicy", "Pendulum-v1", n_steps=32, batch_size=32, n_epochs=2, clip_range_vf=0.2).learn(32)
    model = cls("MlpPolicy", "Pendulum-v1", **SMALL, clip_range_vf=0.2).learn(32)
    names = {name for name in ppo.logger.name_to_value if name.startswith("train/")}
    more = {"kl_mean", "kl_max", "ratio_mean", "ratio_max", "fraction_above", "fraction_below"}
    more |= {"ppo_discarded_gradient", "grad_norm", "skipped_minibatches"}
    assert names | {f"train/{name}" for name in more} <= set(model.logger.name_to_value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"clip_range": 0.0}, ValueError, "clip_range=0.0 .*allowed are"),
        ({"clip_range": -0.2}, ValueError, "clip_range=-0.2 .*allowed are"),
        ({"clip_range": math.nan}, ValueError, "clip_range=nan .*allowed are"),
        ({"clip_range": "0.2"}, ValueError, "clip_range='0.2' is not a schedule; allowed are"),
        ({"clip_range": None}, TypeError, "clip_range=None"),
        ({"clip_range": math.inf}, ValueError, "clip_range=inf .*allowed are"),
        ({"learning_rate": "cos_3e-4"}, ValueError, "learning_rate='cos_3e-4' .*allowed are"),
        ({"learning_rate": None}, TypeError, "learning_rate=None is of type NoneType; allowed are"),
        ({"learning_rate": -1e-3}, ValueError, "learning_rate=-0.001 .*allowed are"),
        ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm=nan .*allowed are"),
        # review users U18
        ({"max_grad_norm": None}, TypeError, "max_grad_norm=None is of type NoneType; allowed are numbers from 0, inf"),
        ({"gamma": 1.5}, ValueError, "gamma=1.5 is not allowed; allowed are numbers from 0 to 1"),
        ({"gamma": "0.9"}, TypeError, "gamma='0.9' is of type str"),
        ({"gae_lambda": -1}, ValueError, "gae_lambda=-1 .*from 0 to 1"),
        ({"ent_coef": "auto"}, TypeError, "ent_coef='auto' is of type str; allowed are finite numbers"),
        ({"ent_coef": math.nan}, ValueError, "ent_coef=nan .*finite"),
        ({"vf_coef": None}, TypeError, "vf_coef=None"),
        ({"target_kl": -1}, ValueError, "target_kl=-1 is not allowed; allowed are None and numbers above 0"),
        ({"target_kl": "0.1"}, TypeError, "target_kl='0.1'"),
        ({"normalize_advantage": 1}, TypeError, "normalize_advantage=1 is of type int; allowed are True and False"),
        ({"use_sde": 0}, TypeError, "use_sde=0 is of type int; allowed are True and False"),
        ({"sde_sample_freq": 0.5}, ValueError, "sde_sample_freq=0.5 .*integers from -1"),
        ({"stats_window_size": 0}, ValueError, "stats_window_size=0 .*positive integers"),
        ({"seed": -1}, ValueError, "seed=-1 is not allowed; allowed are None and integers from 0"),
        ({"seed": 2**32}, ValueError, "seed=4294967296"),
        ({"policy_kwargs": 3}, TypeError, "policy_kwargs=3 .*dictionaries"),
        ({"rollout_buffer_kwargs": [1]}, TypeError, "rollout_buffer_kwargs=.1. .*dictionaries"),
        ({"rollout_buffer_class": 3}, TypeError, "rollout_buffer_class=3 .*rollout buffer classes"),
        ({"tensorboard_log": 3}, TypeError, "tensorboard_log=3 .*paths"),
        ({"check_finite": None}, TypeError, "check_finite=None"),
        ({"torch_compile": None}, TypeError, "torch_compile=None .*'auto', True and False"),
        ({"precision": "float16"}, ValueError, "precision='float16' .*'float32' and 'bfloat16'"),
        ({"policy": 3}, TypeError, "policy_class=3 .*allowed are policy names and policy classes"),
        # review users U23
        ({"policy": "MlpLstmPolicy"}, ValueError, "'MlpLstmPolicy' is unknown; .*Recurrent and maskable .* not supported"),
        # review users U17
        ({"env": 3}, TypeError, "env=3 is of type int, not an environment; allowed are a registered id"),
        ({"env": gym.Env}, TypeError, "is of type type, not an environment"),
        ({"env": lambda: gym.make("CartPole-v1")}, TypeError, "is of type function, not an environment"),
        ({"env": None}, TypeError, "env=None is not allowed; allowed are a registered id"),
        ({"clip_range_high": 0.0}, ValueError, "clip_range_high=0.0"),
        ({"clip_range_high": "cos_0.2"}, ValueError, "clip_range_high='cos_0.2'"),
        ({"clip_range_high": "lin_0"}, ValueError, "clip_range_high='lin_0'"),
        ({"clip_range_vf": -1}, ValueError, "clip_range_vf=-1"),
        ({"batch_size": 1}, ValueError, "batch_size=1 .*allowed are 2 and more"),
        ({"batch_size": 0}, ValueError, "batch_size=0 .*allowed are"),
        ({"n_epochs": 2.5}, ValueError, "n_epochs=2.5 is not allowed; allowed are positive integers"),
        ({"n_steps": "32"}, TypeError, "n_steps='32' is of type str"),
        ({"n_steps": True}, TypeError, "n_steps=True is of type bool"),
        ({"n_steps": 1}, ValueError, "n_steps=1 .*allowed are"),
        ({"torch_compile": "maybe"}, ValueError, "torch_compile='maybe' .*allowed are"),
        ({"policy": "MlpPolitik"}, ValueError, "MlpPolitik"),
        ({"env": "CartPol-v1"}, ValueError, "env='CartPol-v1' is not a registered environment.*CartPole"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named_with_what_is_allowed(arguments, error, message):
    with pytest.raises(error, match=message):
        ANO(**{"policy": "MlpPolicy", "env": "CartPole-v1", **arguments})


# review users U19
SUPPORTED = TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2))


@pytest.mark.parametrize(
    ("kind", "space", "message"),
    [
        ("action", spaces.Dict({"a": spaces.Discrete(2)}), "space Dict.* is not supported; allowed are Box, Discrete"),
        ("action", spaces.Tuple([spaces.Discrete(2)]), "space Tuple.* is not supported"),
        ("action", spaces.Discrete(3, start=1), "space Discrete\\(3, start=1\\), which is not supported; .*start 0"),
        ("action", spaces.MultiDiscrete([2, 2], start=[0, 1]), ".*is not supported; .*start 0"),
        ("action", spaces.MultiDiscrete([[2, 2], [3, 3]]), ".*is not supported; .*one-dimensional MultiDiscrete"),
        ("action", spaces.MultiBinary([2, 2]), ".*is not supported; .*one-dimensional MultiBinary"),
        ("action", spaces.Box(-np.inf, np.inf, (1,)), "space Box"),
        ("observation", spaces.Tuple([BOX_OBSERVATIONS] * 2), "space Tuple.*, which is not supported; allowed are Box"),
        ("observation", spaces.Text(5), "space Text"),
        ("observation", spaces.Sequence(spaces.Discrete(2)), "space Sequence"),
        ("observation", spaces.Discrete(5, start=2), "space Discrete\\(5, start=2\\), .*start 0"),
        ("observation", spaces.MultiDiscrete([[2, 2], [3, 3]]), "space MultiDiscrete.*one-dimensional"),
        ("observation", spaces.Dict({"a": BOX_OBSERVATIONS, "mission": spaces.Text(5)}), "space 'mission' Text"),
        ("observation", spaces.Dict({"a": spaces.Dict({"b": BOX_OBSERVATIONS})}), "space 'a' Dict"),
    ],
    ids=str,
)
def test_unsupported_spaces_are_named_with_what_is_allowed(kind, space, message):
    chosen = {"action": SUPPORTED.action_space, "observation": SUPPORTED.observation_space, kind: space}
    with pytest.raises(ValueError, match=f"{kind} {message}") as caught:
        ANO("MultiInputPolicy", TinyEnv(chosen["observation"], chosen["action"]))
    assert "\n" not in str(caught.value)


@every_algorithm
def test_a_linear_learning_rate_may_be_given_as_in_the_zoo(cls, tmp_path):  # review users U20
    model = cls("MlpPolicy", "CartPole-v1", **SMALL, learning_rate="lin_0.001").learn(64)
    assert model.logger.name_to_value["train/learning_rate"] == 0.0
    assert [model.lr_schedule(progress) for progress in (1.0, 0.5)] == [0.001, 0.0005]
    model.save(tmp_path / "model")
    assert cls.load(tmp_path / "model", learning_rate="lin_0.002").lr_schedule(0.5) == 0.001


@pytest.mark.parametrize(
    ("total", "error", "message"),
    [
        ("100", TypeError, "total_timesteps='100' is of type str"),
        (None, TypeError, "total_timesteps=None"),
        (-1, ValueError, "total_timesteps=-1 is not allowed; allowed are numbers from 0"),
        (math.nan, ValueError, "total_timesteps=nan"),
    ],
)
def test_a_training_of_no_length_is_named(total, error, message):  # review users U18
    with pytest.raises(error, match=message):
        ANO("MlpPolicy", "CartPole-v1", **SMALL).learn(total)


@every_algorithm
def test_a_training_of_length_zero_only_sets_up_and_says_so(cls):  # review users U18
    model = cls("MlpPolicy", "CartPole-v1", **SMALL)
    before = parameters(model)
    with pytest.warns(UserWarning, match="total_timesteps=0: .*nothing is trained"):
        model.learn(0)
    model.logger.record("mine", 1)
    assert model.num_timesteps == 0
    assert torch.equal(parameters(model), before)
    assert model.learn(1e1).num_timesteps == 32  # a float is a number, as in SB3


@every_algorithm
def test_training_without_an_environment_says_what_to_do(cls, tmp_path):  # review users U18
    cls("MlpPolicy", "CartPole-v1", **SMALL).save(tmp_path / "model")
    model = cls.load(tmp_path / "model")
    with pytest.raises(ValueError, match="there is no environment to train in; pass env= to load, or call set_env first"):
        model.learn(32)
    model.set_env("CartPole-v1")  # review users U21
    assert model.learn(32).num_timesteps == 32
    assert cls.load(tmp_path / "model", env="CartPole-v1").learn(32).num_timesteps == 32
    with pytest.raises(ValueError, match="env='CartPol-v1' is not a registered environment"):
        cls.load(tmp_path / "model", env="CartPol-v1")


@every_algorithm
def test_the_representation_shows_the_radii(cls):  # review users U21
    shaping = "shaping='ano', " if cls is ANO else ""
    model = cls("MlpPolicy", "CartPole-v1", **SMALL)
    assert repr(model) == f"{cls.__name__}({shaping}clip_range=0.2)"
    model = cls("MlpPolicy", "CartPole-v1", **SMALL, clip_range=LinearSchedule(0.2, 0.1, 1.0), clip_range_high=0.28)
    schedule = "LinearSchedule(start=0.2, end=0.1, end_fraction=1.0)"
    assert repr(model) == f"{cls.__name__}({shaping}clip_range={schedule}, clip_range_high=0.28)"


@pytest.mark.parametrize("name", ["clip_range", "clip_range_high", "clip_range_vf", "learning_rate"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_schedule_that_is_not_a_number_is_named_before_it_does_harm(name, number):
    # finite when the model is made, at progress 1
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, **{name: lambda progress: 1e-3 if progress == 1.0 else number})
    before = parameters(model)
    with pytest.raises(ValueError, match=f"{name} is {number} at progress_remaining=0"):
        model.learn(32)
    assert torch.equal(parameters(model), before)


def test_numpy_numbers_are_numbers():
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, clip_range=np.float32(0.25), clip_range_high=np.float64(0.5)).learn(32)
    assert model.logger.name_to_value["train/clip_range"] == pytest.approx(0.25)


def test_a_batch_that_does_not_divide_the_rollout_is_warned_about():
    with pytest.warns(UserWarning, match="batch_size=24 does not divide the rollout of 32 samples"):
        ANO("MlpPolicy", "CartPole-v1", **{**SMALL, "batch_size": 24})


class OwnBuffer(RolloutBuffer):
    resets = 0

    def reset(self) -> None:
        super().reset()
        type(self).resets += 1


@every_algorithm
def test_custom_rollout_buffers_are_used(cls):
    if cls is PAPO:
        with pytest.raises(ValueError, match="OwnBuffer.* gives PAPO no td_errors.*allowed are FlatRolloutBuffer"):
            PAPO("MlpPolicy", "CartPole-v1", **SMALL, rollout_buffer_class=OwnBuffer)
        return
    before = OwnBuffer.resets
    model = cls("MlpPolicy", "CartPole-v1", **SMALL, rollout_buffer_class=OwnBuffer).learn(64)
    assert isinstance(model.rollout_buffer, OwnBuffer)
    assert OwnBuffer.resets >= before + 3
