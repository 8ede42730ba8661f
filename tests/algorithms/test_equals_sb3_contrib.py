"""``MaskableANO`` and ``RecurrentANO`` with ``shaping="ppo"`` against sb3-contrib's MaskablePPO and RecurrentPPO."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.ppo_recurrent import MlpLstmPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_ano import ANO, MaskableANO, RecurrentANO, RecurrentMaskableANO, accelerate
from tests.algorithms.comparison import relative_difference, with_some_seed
from tests.algorithms.test_equals_sb3_ppo import loss_and_gradient_of_a_moved_policy, tolerance
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, MaskedEnv, masked_vec_env

# Policies, optimizers and buffers of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")

# Enough epochs and learning rate for the clip to act: a radius of 0.201 differs from one of 0.2 only on samples whose ratio
# comes to lie between the two. (More of it, and training would amplify a sample that rounding moves across the edge of the
# region, where PPO's gradient jumps.)
SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 6, "learning_rate": 1e-2, "seed": 3, "device": "cpu"}
DISCRETE, MULTI_DISCRETE, MULTI_BINARY = spaces.Discrete(4), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)
#: Policy without its end, spaces, options.
CASES: dict[str, tuple[str, spaces.Space, spaces.Space, dict]] = {
    "Discrete": ("Mlp", BOX_OBSERVATIONS, DISCRETE, {}),
    "Box": ("Mlp", BOX_OBSERVATIONS, BOX_ACTIONS, {}),
    "gSDE": ("Mlp", BOX_OBSERVATIONS, BOX_ACTIONS, {"use_sde": True, "sde_sample_freq": 4}),
    "MultiDiscrete": ("Mlp", BOX_OBSERVATIONS, MULTI_DISCRETE, {}),
    "MultiBinary": ("Mlp", BOX_OBSERVATIONS, MULTI_BINARY, {}),
    "Dict": ("MultiInput", DICT_OBSERVATIONS, DISCRETE, {}),
    "image": ("Cnn", IMAGE_OBSERVATIONS, DISCRETE, {"learning_rate": 1e-3}),
}
OPTIONS: dict[str, dict] = {
    "plain": {},
    "clip_range_vf": {"clip_range_vf": 0.05},
    "target_kl": {"target_kl": 0.001},
    "batches that do not divide": {"batch_size": 24, "normalize_advantage": False, "ent_coef": 0.01},
}
THEIRS: dict[type, type] = {ANO: PPO, MaskableANO: MaskablePPO, RecurrentANO: RecurrentPPO}
PAIRS = [(ours, case) for ours in THEIRS for case in CASES if ours is not MaskableANO or case not in ("Box", "gSDE")]
# test_equals_sb3_ppo.py compares ANO.
every_pair = pytest.mark.parametrize(("ours", "case"), [pair for pair in PAIRS if pair[0] is not ANO])


class FloatActions(MlpLstmPolicy):
    """RecurrentPPO's policy, whose update fails with the integers of MultiBinary actions."""

    def evaluate_actions(self, obs: Any, actions: torch.Tensor, *rest: Any) -> Any:
        return super().evaluate_actions(obs, actions.float(), *rest)


def make(
    cls: type[BaseAlgorithm], case: str, policy: Any = None, kind: type = MaskedEnv, env: Any = None, **options: Any
) -> Any:
    name, observations, actions, settings = CASES[case]
    recurrent = cls in (RecurrentANO, RecurrentPPO, RecurrentMaskableANO)
    kwargs: dict = {"features_extractor_kwargs": {"features_dim": 16}} if case == "image" else {}
    kwargs |= {"lstm_hidden_size": 8, "net_arch": [8]} if recurrent else {}
    kwargs |= options.pop("policy_kwargs", {})
    tuned: dict = {"learning_rate": 2e-2} if recurrent and case in ("Discrete", "MultiBinary") else {}
    if cls in (ANO, PPO) and case != "image":
        tuned = {"n_steps": 128, "batch_size": 64, "learning_rate": 3e-3}
    if policy is None:
        policy = (
            FloatActions if cls is RecurrentPPO and case == "MultiBinary" else f"{name}{'Lstm' if recurrent else ''}Policy"
        )
    env = env or masked_vec_env(observations, actions, kind=kind)
    return cls(policy, env, **{**SETTINGS, **settings, **tuned, "policy_kwargs": kwargs, **options})


def after_three_rollouts(cls: type[BaseAlgorithm], case: str, learn: dict | None = None, **options: Any) -> Any:
    model = make(cls, case, **options)
    return model.learn(3 * model.n_steps * model.n_envs, **(learn or {}))


@functools.cache
def theirs_after_three_rollouts(ours: type, case: str, options: str, seed: int) -> Any:
    return after_three_rollouts(THEIRS[ours], case, seed=seed, **OPTIONS[options])


def taken(model: Any) -> np.ndarray:
    """Actions of the last rollout."""
    return np.asarray(model.rollout_buffer.actions)


@pytest.mark.filterwarnings("ignore:batch_size=24 does not divide")
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize(
    "options",
    [
        "plain",
        "target_kl",
        *[pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS if name not in ("plain", "target_kl")],
    ],
)
@every_pair
def test_parameters_actions_and_log_are_theirs_after_three_rollouts(ours, case, options):
    with_some_seed(lambda seed: compare_after_three_rollouts(ours, case, options, seed))


def compare_after_three_rollouts(ours: type, case: str, options: str, seed: int) -> None:
    expected = theirs_after_three_rollouts(ours, case, options, seed)
    with_shape = after_three_rollouts(ours, case, shaping="ppo", torch_compile=False, seed=seed, **OPTIONS[options])
    model = accelerate(make(THEIRS[ours], case, seed=seed, **OPTIONS[options]), torch_compile=False)
    accelerated = model.learn(3 * model.n_steps * model.n_envs)
    assert accelerated.logger.name_to_value.keys() == expected.logger.name_to_value.keys()

    for found in (with_shape, accelerated):
        assert relative_difference(expected, found) <= tolerance(case)
        np.testing.assert_allclose(taken(found), taken(expected), rtol=1e-3, atol=1e-4 if case in ("Box", "gSDE") else 0)
        for name in ("approx_kl", "clip_fraction", "policy_gradient_loss", "value_loss", "entropy_loss", "loss"):
            logged, expected_log = (model.logger.name_to_value[f"train/{name}"] for model in (found, expected))
            assert logged == pytest.approx(expected_log, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    "different", [pytest.param({"clip_range": 0.201}, marks=pytest.mark.slow), {"shaping": "spo"}], ids=["0.201", "spo"]
)
@every_pair
def test_that_test_tells_another_radius_and_another_shape_apart(ours, case, different):
    if case == "image" and "clip_range" in different:
        pytest.skip("its learning rate is too small for the clip to act")

    def differs(seed: int) -> None:
        found = after_three_rollouts(ours, case, seed=seed, **{"shaping": "ppo", **different})
        assert relative_difference(theirs_after_three_rollouts(ours, case, "plain", seed), found) > 10 * tolerance(case)

    with_some_seed(differs)


@pytest.mark.parametrize("options", [{}, {"clip_range_vf": 0.1, "ent_coef": 0.1}], ids=["plain", "clip_range_vf"])
@every_pair
def test_loss_and_gradient_of_a_minibatch_are_theirs(ours, case, options):
    # No clipping by norm: a scaled gradient would hide a difference in its length.
    once = {"n_steps": 32, "n_epochs": 1, "batch_size": 64, "max_grad_norm": 1e9, "clip_range": 0.05, **options}
    model, scale = make(ours, case, shaping="ppo", **once), 0.1 if case == "image" else 0.3
    loss, gradient = loss_and_gradient_of_a_moved_policy(model, scale)
    expected_loss, expected_gradient = loss_and_gradient_of_a_moved_policy(make(THEIRS[ours], case, **once), scale)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-7)  # the terms may nearly cancel
    assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()
    assert model.logger.name_to_value["train/grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
