"""Arguments of the constructor, of ``load`` and ``learn``, and attributes that are assigned: ranges, types, messages."""

import copy
import inspect
import math
import pickle
import re
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule

from sb3_ano import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO
from sb3_ano._arguments import constructor_parameters
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.algorithms.contrib_policies import MaskedLstmPolicy
from sb3_ano.hub.codec import stored_arguments
from sb3_ano.shaping import ShapingLike
from sb3_ano.zoo.hyperparameters import read_hyperparameters
from tests.common import ALGORITHMS, SMALL, parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, TinyEnv

every_algorithm = pytest.mark.parametrize("cls", ALGORITHMS)


def model(cls: type = ANO, **options: Any) -> Any:
    return cls(**{"policy": "MlpPolicy", "env": "CartPole-v1", **SMALL, **options})


# Each algorithm, and the one whose arguments it takes.
ORIGINALS = [
    (ShapedPolicyAlgorithm, PPO),
    (ANO, PPO),
    (SPO, PPO),
    (PAPO, PPO),
    (MaskableANO, MaskablePPO),
    (RecurrentANO, RecurrentPPO),
    (RecurrentMaskableANO, RecurrentPPO),
]
# Annotations that differ: upstream's type would accept what does not work here.
NARROWER = {
    # None takes the whole rollout as one minibatch in sb3-contrib, and nowhere else.
    (MaskableANO, "batch_size"): int,
    (RecurrentANO, "batch_size"): int,
    (RecurrentMaskableANO, "batch_size"): int,
    (RecurrentMaskableANO, "policy"): str | type[MaskedLstmPolicy],
}
SHARED = {
    "clip_range_high": (float | str | Schedule | None, None),
    "desired_kl": (float | str | Schedule | None, None),
    "torch_compile": (bool | Literal["auto"], "auto"),
    "precision": (Literal["float32", "bfloat16"], "float32"),
    "check_finite": (bool, True),
}
WITH_SHAPE = {"shaping": (ShapingLike, "ano"), **SHARED}
KEYWORDS = {
    ShapedPolicyAlgorithm: SHARED,
    ANO: WITH_SHAPE,
    SPO: SHARED,
    PAPO: {
        "k": (float, 7.0),
        "omega1": (float, 0.005),
        "omega2": (float, 0.005),
        "max_epoch_kl": (float | None, 0.02),
        **{name: argument for name, argument in SHARED.items() if name != "desired_kl"},
    },
    MaskableANO: WITH_SHAPE,
    RecurrentANO: WITH_SHAPE,
    RecurrentMaskableANO: WITH_SHAPE,
}


@pytest.mark.parametrize(("cls", "original"), ORIGINALS)
def test_a_user_of_sb3_changes_one_word(cls, original):
    ours = list(inspect.signature(cls).parameters.values())
    theirs = list(inspect.signature(original).parameters.values())
    positional, keywords = ours[: len(theirs)], ours[len(theirs) :]

    assert [(p.name, p.default, p.kind) for p in positional] == [(p.name, p.default, p.kind) for p in theirs]
    for mine, upstream in zip(positional, theirs, strict=True):
        assert mine.annotation == NARROWER.get((cls, mine.name), upstream.annotation), mine.name

    assert {parameter.name: (parameter.annotation, parameter.default) for parameter in keywords} == KEYWORDS[cls]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in keywords)


@pytest.mark.parametrize(("cls", "original"), ORIGINALS)
@pytest.mark.parametrize("method", ["learn", "predict", "load", "save", "set_parameters", "set_env"])
def test_methods_take_the_arguments_of_sb3(method, cls, original):
    ours = inspect.signature(getattr(cls, method)).parameters
    theirs = inspect.signature(getattr(original, method)).parameters
    if cls is RecurrentMaskableANO and method in ("learn", "predict"):
        theirs = inspect.signature(getattr(MaskablePPO, method)).parameters

    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    for name, upstream in theirs.items():
        mine = ours[name]
        # The name of a TensorBoard run is that of the class.
        expected = None if name == "tb_log_name" else upstream.default
        assert mine.default == expected, name
        # Ids of environments and None are allowed in addition; upstream does not annotate self and kwargs.
        if name not in ("self", "kwargs", "env", "tb_log_name"):
            assert mine.annotation == upstream.annotation, name


@pytest.mark.parametrize(("cls", "original"), ORIGINALS)
def test_every_argument_reaches_the_model(cls, original):
    """A constructor that hands its arguments on by name may forget one."""
    values = {
        "learning_rate": 1e-3,
        "n_steps": 6,
        "batch_size": 3,
        "n_epochs": 2,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "clip_range": 0.11,
        "clip_range_vf": 0.12,
        "normalize_advantage": False,
        "ent_coef": 0.01,
        "vf_coef": 0.4,
        "max_grad_norm": 0.3,
        "use_sde": True,
        "sde_sample_freq": 2,
        "rollout_buffer_class": RolloutBuffer,
        "rollout_buffer_kwargs": {"given": True},
        "target_kl": 0.2,
        "stats_window_size": 7,
        "tensorboard_log": "log",
        "policy_kwargs": {"net_arch": [3]},
        "verbose": 2,
        "seed": 5,
        "device": torch.device("meta"),
        "shaping": "spo",
        "clip_range_high": 0.13,
        "desired_kl": 0.14,
        "torch_compile": True,
        "precision": "bfloat16",
        "check_finite": False,
        "k": 3.0,
        "omega1": 0.1,
        "omega2": 0.2,
        "max_epoch_kl": 0.5,
    }
    names = set(inspect.signature(cls).parameters) - {"policy", "env", "_init_setup_model"}
    assert names <= set(values)

    given = {name: values[name] for name in names}
    env = TinyEnv(BOX_OBSERVATIONS, BOX_ACTIONS)
    made = cls("MlpPolicy", env, **given, _init_setup_model=False)

    for name, value in given.items():
        kept = getattr(made, "_stats_window_size" if name == "stats_window_size" else name)
        if isinstance(kept, FloatSchedule):
            kept = kept(1.0)
        assert kept == value, name


# An argument, a value, and the error; they are the same when the value is assigned, and when a model is loaded with it.
class CustomBuffer(RolloutBuffer):
    def get(self, batch_size=None):
        return super().get(batch_size)


BAD = [
    ("n_steps", 0, ValueError, "n_steps=0 is not allowed; allowed are positive integers"),
    ("n_steps", True, TypeError, "n_steps=True is of type bool"),
    ("batch_size", 0, ValueError, "batch_size=0 is not allowed; allowed are positive integers"),
    ("n_epochs", 2.5, ValueError, "n_epochs=2.5 is not allowed; allowed are positive integers"),
    ("gamma", 1.5, ValueError, "gamma=1.5 is not allowed; allowed are numbers from 0 to 1"),
    ("gae_lambda", -1, ValueError, "gae_lambda=-1 .*from 0 to 1"),
    ("clip_range", -0.2, ValueError, "clip_range=-0.2 .*allowed are"),
    ("clip_range", math.nan, ValueError, "clip_range=nan .*allowed are"),
    ("clip_range", "0.2", TypeError, "clip_range='0.2' is of type str; allowed are"),
    ("clip_range_high", "lin_inf", ValueError, "clip_range_high='lin_inf'"),
    ("clip_range_high", "lin_x", ValueError, "clip_range_high='lin_x'"),
    ("clip_range_vf", True, TypeError, "clip_range_vf=True is of type bool"),
    ("desired_kl", -0.01, ValueError, "desired_kl=-0.01"),
    ("ent_coef", math.nan, ValueError, "ent_coef=nan .*finite"),
    ("vf_coef", -0.5, ValueError, "vf_coef=-0.5 .*finite numbers from 0"),
    ("vf_coef", math.inf, ValueError, "vf_coef=inf .*finite numbers from 0"),
    ("max_grad_norm", None, TypeError, "max_grad_norm=None is of type NoneType; allowed are numbers from 0, inf"),
    ("target_kl", -1, ValueError, "target_kl=-1 is not allowed; allowed are None and numbers above 0"),
    ("normalize_advantage", 1, TypeError, "normalize_advantage=1 is of type int; allowed are True and False"),
    ("use_sde", 0, TypeError, "use_sde=0 is of type int; allowed are True and False"),
    ("sde_sample_freq", -2, ValueError, "sde_sample_freq=-2 .*integers from -1"),
    ("seed", -1, ValueError, "seed=-1 is not allowed; allowed are None and integers from 0"),
    ("seed", 2**32, ValueError, "seed=4294967296"),
    ("rollout_buffer_class", 3, TypeError, "rollout_buffer_class=3 .*rollout buffer classes"),
    ("check_finite", None, TypeError, "check_finite=None"),
    ("torch_compile", None, TypeError, "torch_compile=None .*'auto', True and False"),
    ("torch_compile", "maybe", ValueError, "torch_compile='maybe' .*allowed are"),
    ("precision", "float16", ValueError, "precision='float16' .*'float32' and 'bfloat16'"),
]
# These are looked at when a model is made only.
BAD_WHEN_MADE = [
    *((name, 0.0, ValueError, f"{name}=0.0 .*allowed are") for name in ("clip_range", "clip_range_high", "desired_kl")),
    ("learning_rate", -1e-3, ValueError, "learning_rate=-0.001 .*allowed are"),
    ("batch_size", 1, ValueError, "batch_size=1 .*allowed are 2 and more"),
    ("n_steps", 1, ValueError, "rollout of 1 samples .*allowed are 2 and more"),
    ("stats_window_size", 0, ValueError, "stats_window_size=0 .*positive integers"),
    ("policy", "MlpLstmPolicy", ValueError, "policy='MlpLstmPolicy' is not a policy of ANO; .*RecurrentANO has LSTM policies"),
    ("env", 3, ValueError, "type <class 'int'>, not a Gymnasium environment"),
    ("env", None, TypeError, "env=None is not allowed; allowed are a registered id"),
    ("env", "CartPol-v1", ValueError, "env='CartPol-v1' is not a registered environment.*CartPole"),
    # Of other classes.
    ("shaping", "anno", ValueError, "shaping='anno' is unknown"),
    ("power", 0.5, TypeError, "unexpected keyword argument 'power'"),
]
BAD_OF_PAPO = [
    ("k", 0, ValueError, "k=0 .*allowed are"),
    ("omega1", -0.1, ValueError, "omega1=-0.1 .*allowed are"),
    ("omega2", "much", TypeError, "omega2='much' is of type str; allowed are"),
    ("max_epoch_kl", 0.0, ValueError, "max_epoch_kl=0.0 .*allowed are"),
    ("shaping", "ano", TypeError, "unexpected keyword argument 'shaping'"),
    ("desired_kl", 0.01, TypeError, "unexpected keyword argument 'desired_kl'"),
    ("rollout_buffer_class", CustomBuffer, ValueError, "gives PAPO no td_errors; leave it as it is"),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "error", "message"),
    [*((ANO, *row) for row in (*BAD, *BAD_WHEN_MADE)), *((PAPO, *row) for row in BAD_OF_PAPO)],
)
def test_bad_arguments_are_named_with_what_is_allowed(cls, name, value, error, message):
    with pytest.raises(error, match=message) as caught:
        model(cls, **{name: value})
    assert "\n" not in str(caught.value)


def test_the_bounds_of_the_ranges_are_allowed():
    with pytest.warns(UserWarning, match="batch_size=24 does not divide the rollout of 32 samples"):
        model(batch_size=24)
    zeros = dict.fromkeys(("gamma", "gae_lambda", "vf_coef", "max_grad_norm", "learning_rate"), 0.0)
    made = model(n_steps=2, batch_size=2, n_epochs=1, stats_window_size=1, ent_coef=-1.0, seed=2**32 - 1, **zeros)
    assert made.learn(2)._n_updates == 1
    one_by_one = model(n_steps=1, batch_size=1, normalize_advantage=False, gamma=1.0, gae_lambda=1.0, max_grad_norm=math.inf)
    assert one_by_one.learn(1)._n_updates == SMALL["n_epochs"]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_a_bad_value_that_is_assigned_raises_before_the_next_update(name, value, error, message):
    made = model()
    before, good = parameters(made), getattr(made, name)
    with pytest.raises(error, match=message):
        made.learn(32, callback=lambda *_: setattr(made, name, value) or True)
    with pytest.raises(error, match=message):
        made.learn(32)
    assert torch.equal(parameters(made), before)
    setattr(made, name, good)
    made.learn(32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    model().save(path)
    return path


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        *BAD,
        ("batch_size", 1, ValueError, "batch_size=1"),
        ("learning_rate", "fast", TypeError, "learning_rate='fast'"),
        ("shaping", "anno", ValueError, "shaping='anno'"),
        ("shaping", lambda x: x + 1, ValueError, "violates anchoring"),
        ("clip_rang_high", 0.5, TypeError, r"ANO.load got .*'clip_rang_high', did you mean 'clip_range_high'\?"),
        ("env", "CartPol-v1", ValueError, "env='CartPol-v1' is not a registered environment"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* was trained with shaping=")
def test_bad_arguments_of_load_are_named(name, value, error, message, saved):
    with pytest.raises(error, match=message):
        ANO.load(saved, **{name: value})


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 2], start=[0, 1]), spaces.MultiDiscrete([[2, 2], [3, 3]])]
)
def test_discrete_spaces_that_sb3_takes_for_others_are_rejected(space):
    for observations, actions in [(BOX_OBSERVATIONS, space), (space, BOX_ACTIONS), (spaces.Dict({"a": space}), BOX_ACTIONS)]:
        with pytest.raises(ValueError, match="not supported; allowed are one-dimensional discrete spaces with start 0"):
            ANO("MultiInputPolicy", TinyEnv(observations, actions))


@every_algorithm
def test_training_without_an_environment_says_what_to_do(cls, tmp_path):
    model(cls).save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model")
    with pytest.raises(ValueError, match="there is no environment to train in; pass env= to load, or call set_env first"):
        loaded.learn(32)
    loaded.set_env("CartPole-v1")
    assert loaded.learn(32).num_timesteps == 32
    assert re.fullmatch(rf"{cls.__name__}\((shaping=.ano., )?clip_range=ConstantSchedule\(val=0.2\)\)", repr(loaded))


@pytest.mark.parametrize("name", ["clip_range", "clip_range_high", "clip_range_vf", "desired_kl", "learning_rate"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_schedule_that_is_not_a_number_is_named_before_it_does_harm(name, number):
    # finite when the model is made, at progress 1
    made = model(**{name: lambda progress: 1e-3 if progress == 1.0 else number})
    before = parameters(made)
    with pytest.raises(ValueError, match=f"{name} is {number} at progress_remaining=0"):
        made.learn(32)
    assert torch.equal(parameters(made), before) or name == "desired_kl"  # which is for the next update


@every_algorithm
def test_schedules_may_be_given_as_in_the_zoo(cls, tmp_path):
    made = model(cls, learning_rate="lin_0.001", clip_range_high="lin_0.3").learn(64)
    assert made.logger.name_to_value["train/learning_rate"] == 0.0
    assert [made.lr_schedule(progress) for progress in (1.0, 0.5)] == [0.001, 0.0005]
    assert made.clip_range_high(0.5) == pytest.approx(0.15)
    made.save(tmp_path / "model")
    assert cls.load(tmp_path / "model", learning_rate="lin_0.002").lr_schedule(0.5) == 0.001


@pytest.mark.parametrize("radius", [0.05, "lin_0.05", LinearSchedule(0.05, 0.0, 1.0), np.float32(0.05)], ids=str)
def test_a_radius_is_assigned_as_it_is_given_to_the_constructor(radius):  # SB3 takes nothing but schedules
    names = ("clip_range", "clip_range_high", "clip_range_vf")
    made, expected = model(), model(**dict.fromkeys(names, radius))
    for name in names:
        setattr(made, name, radius)
    for each in (made, expected):
        each.set_random_seed(0)
        each.learn(64)
    assert torch.equal(parameters(made), parameters(expected))
    assert made.clip_range(1.0) == pytest.approx(0.05)


class Toy(ShapedPolicyAlgorithm):
    """The policy gradient with the ratio to a power."""

    def __init__(self, *args: Any, power: float = 1.0, **kwargs: Any):
        self.power = power
        super().__init__(*args, **kwargs)

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        return -((self.power * log_ratio).exp() * advantages).mean()


class Popping(ANO):
    """A constructor that takes an argument which no signature shows."""

    def __init__(self, env: Any, **kwargs: Any):
        self.power = kwargs.pop("power", 1.0)
        super().__init__("MlpPolicy", env, **kwargs)


def test_constructors_of_users_take_arguments_of_their_own():
    assert Toy("MlpPolicy", "CartPole-v1", 1e-3, power=0.5, n_steps=64).learning_rate == 1e-3
    assert Popping("CartPole-v1", power=0.5, n_steps=64).power == 0.5
    with pytest.raises(TypeError, match=r"ANO.__init__\(\) got an unexpected keyword argument 'powr'"):
        Popping("CartPole-v1", powr=0.5)


def test_the_arguments_of_a_constructor_with_kwargs_are_those_of_its_base_class_too():
    taken = constructor_parameters(Toy)
    assert list(taken) == ["power", *inspect.signature(ShapedPolicyAlgorithm).parameters]
    assert taken["power"].default == 1.0
    assert taken["n_steps"].default == 2048
    given = {"power": 0.5, "n_steps": 64}
    assert read_hyperparameters(given, Toy) == given
    with pytest.raises(ValueError, match="unknown key 'powr' for Toy, did you mean 'power'"):
        read_hyperparameters({"powr": 0.5}, Toy)
    assert stored_arguments(Toy)["power"] == 1.0


# An unknown argument, and the end of the message.
UNKNOWN = [
    (ANO, "clip_rnge", ", did you mean 'clip_range'?"),
    (SPO, "n_step", ", did you mean 'n_steps'?"),
    (PAPO, "max_epoch_k", ", did you mean 'max_epoch_kl'?"),
    (PAPO, "shaping", "; allowed are policy, env, learning_rate, .*check_finite"),
    (MaskableANO, "lr", ", did you mean 'learning_rate'?"),
    (MaskableANO, "use_sde", "; allowed are policy, .*check_finite"),
    (RecurrentANO, "shape", ", did you mean 'shaping'?"),
    (RecurrentANO, "rollout_buffer_clas", "; allowed are policy, .*check_finite"),
    (RecurrentMaskableANO, "desired_k", ", did you mean 'desired_kl'?"),
]


@pytest.mark.parametrize(("cls", "name", "end"), UNKNOWN)
def test_an_unknown_argument_is_named_with_class_and_suggestion(cls, name, end):
    start = f"{cls.__name__} got an unexpected keyword argument '{name}'"
    with pytest.raises(TypeError, match=f"^{start}{end}$".replace("?", r"\?")) as caught:
        cls("MlpPolicy", "CartPole-v1", **{name: 0.1})
    assert "\n" not in str(caught.value)


def test_a_model_is_copied_and_pickled_without_arguments():
    made = model(SPO)
    for copied in (copy.copy(made), pickle.loads(pickle.dumps(SPO.__new__(SPO)))):
        assert type(copied) is SPO


def test_an_added_algorithm_trains_saves_and_loads(tmp_path):
    assert constructor_parameters(Toy).keys() - constructor_parameters(PPO).keys() == {*SHARED, "power"}
    whole = model(Toy, power=0.5).learn(192)
    assert not torch.equal(parameters(whole), parameters(model(Toy).learn(192)))
    whole.save(tmp_path / "model")
    loaded = Toy.load(tmp_path / "model", env=whole.get_env())
    assert loaded.power == 0.5
    assert torch.equal(parameters(loaded), parameters(whole))
    loaded.learn(64)
    with pytest.raises(ValueError, match=r"was saved by Toy; load it with Toy\.load"):
        ANO.load(tmp_path / "model")


def test_a_learning_rate_schedule_is_called_as_often_as_by_sb3():
    """Some schedules count their calls, to warm up for example."""
    calls = {}
    for cls in (PPO, ANO):
        schedule = mock.Mock(return_value=1e-3)
        cls("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1, learning_rate=schedule, device="cpu").learn(96)
        calls[cls] = schedule.call_count
    assert calls[ANO] == calls[PPO] > 3
