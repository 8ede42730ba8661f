"""``ANO(shaping="ppo")`` against SB3's PPO: what a user may put into SB3 acts as in SB3, alone and in random combinations."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn

from sb3_ano import ANO
from tests.algorithms.comparison import Trained, assert_equals_sb3, made, traced_only
from tests.algorithms.configurations import AXES, COMPILED, CONFIGURATIONS, MORE, PLAIN, Configuration, chosen
from tests.common import needs_compiler


def run(examples: int, check: Callable[[Configuration], None], configurations: Any = CONFIGURATIONS) -> None:
    """Check the same sequence of configurations each time; Hypothesis prints one that fails."""
    reproducible = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    # Shrinking takes minutes, and a configuration is easily read as it is.
    settings(max_examples=examples, phases=[Phase.generate], **reproducible)(given(configurations)(check))()


def eager(config: Configuration) -> None:
    assert_equals_sb3(config, torch_compile=False)


def traced(config: Configuration) -> None:
    with traced_only():
        assert_equals_sb3(config, torch_compile=True)


def compiled(config: Configuration) -> None:
    assert_equals_sb3(config, torch_compile=True)


@pytest.mark.parametrize("examples", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_updates_and_rollouts_are_those_of_sb3(examples):
    run(examples, eager)


@pytest.mark.parametrize("examples", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_traced_updates_are_those_of_sb3(examples):
    run(examples, traced, COMPILED)


@pytest.mark.slow
@needs_compiler
def test_compiled_updates_are_those_of_sb3():
    run(12, compiled, COMPILED)


def test_these_configurations_tell_radii_of_0_2_and_0_201_apart():
    def another_radius(config: Configuration) -> None:
        assert_equals_sb3(config, torch_compile=False, clip_range=0.201)

    with pytest.raises(AssertionError):
        run(40, another_radius)


@functools.cache
def unchanged() -> torch.Tensor:
    return Trained(PPO, PLAIN).after


# What SB3 reads when a model is made and not again, and what changes nothing by itself.
WITHOUT_EFFECT = {"passive", "used", "gae_lambda", "learning_rate", "seed", "thawed", "saved optimizer", "VecMonitor"}
WITHOUT_EFFECT |= {"fused", "amsgrad", "unscale_action"}
ALONE = [
    (axis, value)
    for axis, values in AXES.items()
    for value in (*values, *MORE.get(axis, {}))
    if value not in (PLAIN[axis], "flipped")
]


# Every third one is fast; tests/fast/test_rules.py has the others that lead to another path.
MARKED = []
for number, one in enumerate(ALONE):
    MARKED.append(pytest.param(*one, marks=[] if number % 3 == 0 else pytest.mark.slow))


# Networks and methods of an instance, hooks of gradients and optimizers, attributes, callbacks with side effects, draws.
@pytest.mark.parametrize(("axis", "value"), MARKED)
def test_each_value_of_each_axis_acts_as_in_sb3(axis, value):
    expected = assert_equals_sb3({**PLAIN, axis: value}, torch_compile=False)
    acts = expected.after.shape != unchanged().shape or (expected.after - unchanged()).norm() > 1e-3 * expected.moved
    assert acts == (value not in WITHOUT_EFFECT and (axis, value) != ("before", "new optimizer"))


@pytest.mark.parametrize(
    "config",
    [
        {"observations": "grid", "extractor": "Viewing"},
        {"observations": "grid", "extractor": "Striding"},
        # found by these tests
        {"before": "frozen actor", "actions": "index"},
        {"between": "used", "extractor": "Unused"},
        {"before": "frozen actor", "between": "thawed"},
        {"before": "frozen actor", "between": "flipped"},
        {"extractor": "Unused", "optimizer": "weight decay"},
        {"gsde": "plain", "sde_sample_freq": 4, "share": False},
        {"gsde": "squashed", "policy": "unscale_action"},
        {"observations": "image", "share": False},
        {"observations": "image", "kwargs": {"normalize_images": False}},
        {"observations": "dict with image", "share": False},
        {"kwargs": {"ortho_init": False, "log_std_init": -1.0}},
        {"actions": "index", "net": "wide"},
        {"actions": "indices", "n_envs": 9},
        {"actions": "bits", "n_envs": 1},
        {"batch_size": 5},  # the last minibatch has one sample
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_these_combinations_act_as_in_sb3(config):
    eager({**PLAIN, **config})


def test_a_rollout_buffer_of_sb3_gives_the_same_training():
    assert_equals_sb3(PLAIN, torch_compile=False, rollout_buffer_class=RolloutBuffer)


@pytest.mark.parametrize(
    "config",
    [
        {"before": "gradient hook"},
        {"between": "gradient hook"},
        {"between": "normalize_advantage"},
        {"between": "set_parameters"},
        {"between": "frozen actor"},
        {"extractor": "Counting"},
    ],
    ids=lambda config: "-".join(config.values()),
)
def test_a_compiled_update_acts_as_in_sb3(config):
    traced({**PLAIN, **config})


IN_NUMPY = [
    *({"actions": actions} for actions in AXES["actions"]),
    *({"net": net} for net in ("default", "none", "uneven", "wide")),
    {"activation": "ReLU"},
    {"share": False},
    *({"observations": kind} for kind in ("matrix", "index", "indices", "bits", "dict")),
    {"n_envs": 64},  # above that, PyTorch multiplies faster
]
IN_TORCH = [
    {"n_envs": 65},
    {"activation": "GELU"},
    {"gsde": "plain"},
    {"observations": "dict with image"},
    {"policy": "WithResidualNets"},
    {"before": "hook on a net"},
    {"before": "different activations"},
    {"precision": "bfloat16"},
]


@pytest.mark.parametrize("config", [*IN_NUMPY, *IN_TORCH], ids=str)
@pytest.mark.filterwarnings("ignore:batch_size=")
def test_small_networks_act_in_numpy(config, monkeypatch):
    in_numpy, config = config in IN_NUMPY, {**PLAIN, **config}
    model = made(ANO, config, precision=config.get("precision", "float32"))
    chosen(config, "before")(model)
    model.train = lambda: None
    calls, forward = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(1) or forward(self, x))
    model.learn(model.n_steps * model.n_envs)
    assert (not calls) is in_numpy
