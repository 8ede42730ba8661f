"""``shaping="ppo"`` with LSTM policies and masks against sb3-contrib, an independent implementation of the same algorithms."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.ppo_recurrent import MlpLstmPolicy
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecNormalize
from torch import nn

from sb3_ano import MaskableANO, RecurrentANO, RecurrentMaskableANO
from sb3_ano.algorithms.contrib import with_masks
from tests.algorithms.comparison import relative_difference
from tests.algorithms.test_equals_sb3_ppo import loss_and_gradient_of_a_moved_policy, tolerance
from tests.common import needs_compiler, parameters
from tests.tiny_envs import (
    BOX_ACTIONS,
    BOX_OBSERVATIONS,
    DICT_OBSERVATIONS,
    IMAGE_OBSERVATIONS,
    MaskedEnv,
    OneAllowed,
    masked_vec_env,
    n_choices,
    vec_env_with_bad_number,
)

DISCRETE, MULTI_DISCRETE, MULTI_BINARY = spaces.Discrete(4), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)
ALGORITHMS = [MaskableANO, RecurrentANO, RecurrentMaskableANO]


SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 6, "learning_rate": 1e-2, "seed": 3, "device": "cpu"}
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
PAIRS = [
    pytest.param(ours, theirs, case, id=f"{ours.__name__}-{case}")
    for ours, theirs in [(MaskableANO, MaskablePPO), (RecurrentANO, RecurrentPPO)]
    for case in CASES
    if ours is RecurrentANO or case not in ("Box", "gSDE")
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:batch_size=24 does not divide"),
    pytest.mark.filterwarnings("ignore:You have specified a mini-batch size"),
]


class FloatActions(MlpLstmPolicy):
    """RecurrentPPO's policy, whose update fails with the integers of MultiBinary actions."""

    def evaluate_actions(self, obs: Any, actions: torch.Tensor, *rest: Any) -> Any:
        return super().evaluate_actions(obs, actions.float(), *rest)


def make(cls: type[BaseAlgorithm], case: str, env: Any = None, **options: Any) -> Any:
    name, observations, actions, settings = CASES[case]
    recurrent = cls in (RecurrentANO, RecurrentPPO, RecurrentMaskableANO)
    kwargs: dict = {"features_extractor_kwargs": {"features_dim": 16}} if case == "image" else {}
    kwargs |= {"lstm_hidden_size": 8, "net_arch": [8]} if recurrent else {}
    kwargs |= options.pop("policy_kwargs", {})
    faster = {"learning_rate": 2e-2} if recurrent and case in ("Discrete", "MultiBinary") else {}
    options = {**SETTINGS, **settings, **faster, "policy_kwargs": kwargs, **options}
    policy = FloatActions if cls is RecurrentPPO and case == "MultiBinary" else f"{name}{'Lstm' if recurrent else ''}Policy"
    return cls(policy, env or masked_vec_env(observations, actions), **options)


def after_three_rollouts(cls: type[BaseAlgorithm], case: str, learn: dict | None = None, **options: Any) -> Any:
    model = make(cls, case, **options)
    return model.learn(3 * model.n_steps * model.n_envs, **(learn or {}))


def actions(model: Any) -> np.ndarray:
    # sb3-contrib rearranges its arrays by the end of the update, and so do buffers that inherit from it.
    buffer = model.rollout_buffer
    return np.asarray(buffer.tensors().actions if hasattr(buffer, "tensors") else buffer.actions)


@pytest.mark.parametrize(
    ("ours", "theirs", "case", "options"),
    [
        pytest.param(*pair.values, options, id=f"{pair.id}-{name}")
        for pair in PAIRS
        for name, options in OPTIONS.items()
        if name == "plain" or pair.values[2] in ("Discrete", "Box", "Dict")
    ],
)
def test_parameters_actions_and_diagnostics_are_those_of_sb3_contrib(ours, theirs, case, options):
    expected = after_three_rollouts(theirs, case, **options)
    found = after_three_rollouts(ours, case, shaping="ppo", torch_compile=False, **options)
    assert relative_difference(expected, found) <= tolerance(case)
    np.testing.assert_allclose(actions(found), actions(expected), rtol=1e-3, atol=1e-4 if case in ("Box", "gSDE") else 0)
    for name in ("approx_kl", "clip_fraction", "policy_gradient_loss", "value_loss", "entropy_loss", "loss"):
        logged, expected_log = (model.logger.name_to_value[f"train/{name}"] for model in (found, expected))
        assert logged == pytest.approx(expected_log, rel=1e-3, abs=1e-5), name


# Not with images, whose learning rate is too small for the clip to act.
@pytest.mark.parametrize(("ours", "theirs", "case"), [pair for pair in PAIRS if pair.values[2] != "image"])
def test_that_test_tells_another_radius_apart(ours, theirs, case):
    found = after_three_rollouts(ours, case, shaping="ppo", clip_range=0.201)
    assert relative_difference(after_three_rollouts(theirs, case), found) > 10 * tolerance(case)


@pytest.mark.parametrize(("ours", "theirs", "case"), PAIRS)
def test_loss_and_gradient_of_a_minibatch_are_those_of_sb3_contrib(ours, theirs, case):
    # No clipping by norm: a scaled gradient would hide a difference in its length.
    once = {"n_epochs": 1, "batch_size": 64, "max_grad_norm": 1e9, "clip_range": 0.05, "ent_coef": 0.1}
    scale = 0.1 if case == "image" else 0.3
    loss, gradient = loss_and_gradient_of_a_moved_policy(make(ours, case, shaping="ppo", clip_range_vf=0.1, **once), scale)
    expected, expected_gradient = loss_and_gradient_of_a_moved_policy(make(theirs, case, clip_range_vf=0.1, **once), scale)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-7)  # the terms nearly cancel
    assert (expected_gradient - gradient).norm() <= 1e-6 * expected_gradient.norm()


class AllAllowed(MaskedEnv):
    def action_masks(self) -> np.ndarray:
        return np.ones(n_choices(self.action_space), dtype=bool)


VARIANTS: dict[str, tuple[type, type, str, dict]] = {
    "no masking": (MaskableANO, MaskablePPO, "Discrete", {"learn": {"use_masking": False}}),
    "recurrent, no masking": (RecurrentMaskableANO, RecurrentPPO, "Dict", {"learn": {"use_masking": False}}),
    "sb3-contrib's buffer": (MaskableANO, MaskablePPO, "Discrete", {"rollout_buffer_class": MaskableRolloutBuffer}),
    "shared LSTM": (RecurrentANO, RecurrentPPO, "Box", {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}}),
    "two layers": (
        RecurrentANO,
        RecurrentPPO,
        "Discrete",
        {"policy_kwargs": {"enable_critic_lstm": False, "n_lstm_layers": 2}},
    ),
    "extractors": (RecurrentANO, RecurrentPPO, "MultiDiscrete", {"policy_kwargs": {"share_features_extractor": False}}),
}


@pytest.mark.parametrize(("ours", "theirs", "case", "options"), VARIANTS.values(), ids=VARIANTS)
def test_variants_are_those_of_sb3_contrib(ours, theirs, case, options):
    few = {**options, "n_epochs": 2}
    theirs_options = {key: value for key, value in few.items() if key != "learn" or theirs is MaskablePPO}
    expected, found = (
        after_three_rollouts(theirs, case, **theirs_options),
        after_three_rollouts(ours, case, shaping="ppo", **few),
    )
    assert relative_difference(expected, found) <= 1e-6
    np.testing.assert_allclose(actions(found), actions(expected), rtol=1e-3, atol=1e-5)


def test_recurrent_masks_that_allow_all_change_nothing():
    expected = after_three_rollouts(RecurrentPPO, "MultiDiscrete")
    env = masked_vec_env(BOX_OBSERVATIONS, MULTI_DISCRETE, kind=AllAllowed)
    assert (
        relative_difference(expected, after_three_rollouts(RecurrentMaskableANO, "MultiDiscrete", env=env, shaping="ppo"))
        <= 1e-6
    )


def moving_and_ending() -> Callable:
    """Change the policy in the middle of a rollout, and end the next one early."""
    steps = itertools.count(1)

    def callback(variables: dict, _: dict) -> bool:
        step = next(steps)
        if step == 10:
            nn.utils.vector_to_parameters(1.1 * parameters(variables["self"]), variables["self"].policy.parameters())
        return step != 50

    return callback


@pytest.mark.parametrize(("ours", "theirs"), [(MaskableANO, MaskablePPO), (RecurrentANO, RecurrentPPO)])
def test_a_callback_may_change_the_policy_and_end_a_rollout_as_in_sb3_contrib(ours, theirs):
    def run(cls: type, **options: Any) -> Any:
        model = make(cls, "Discrete", n_epochs=2, **options).learn(128, callback=moving_and_ending())
        return model.learn(64, reset_num_timesteps=False)

    assert relative_difference(run(theirs), run(ours, shaping="ppo")) <= 1e-6


class Sharper(MaskableCategoricalDistribution):
    def proba_distribution(self, action_logits: torch.Tensor) -> Any:
        return super().proba_distribution(3.0 * action_logits)


class SharperPolicy(MaskableActorCriticPolicy):
    """A distribution of the user's own."""

    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = Sharper(4)
        super()._build(lr_schedule)


def test_a_distribution_of_the_users_own_is_used():
    models = [
        cls(SharperPolicy, masked_vec_env(BOX_OBSERVATIONS, DISCRETE), **SETTINGS, **options).learn(192)
        for cls, options in [(MaskablePPO, {}), (MaskableANO, {"shaping": "ppo"})]
    ]
    assert relative_difference(*models) <= 1e-6


def test_masks_reach_processes_through_wrappers():
    # The environment raises if an action is not allowed.
    env = VecNormalize(make_vec_env(OneAllowed, 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"}))
    try:
        model = MaskableANO("MlpPolicy", env, **SETTINGS).learn(64)
        assert evaluate_policy(with_masks(model, env), env, 2, warn=False)
    finally:
        env.close()


def test_fewer_environments_may_follow_after_loading(tmp_path):
    model = after_three_rollouts(RecurrentANO, "Dict")
    model.save(tmp_path / "model")
    loaded = RecurrentANO.load(tmp_path / "model", env=masked_vec_env(DICT_OBSERVATIONS, DISCRETE, 1))
    assert loaded.learn(64)._last_lstm_states.pi[0].shape == (1, 1, 8)


def one_hot(env: gym.Env) -> gym.Env:
    codes = np.eye(3, dtype=np.float32)
    return TransformObservation(env, lambda index: codes[index], spaces.Box(0.0, 1.0, (3,), np.float32))


def test_lstm_policies_take_discrete_observations():
    # sb3-contrib's do not, but they take their one-hot codes.
    def env(*wrapper: Callable) -> VecEnv:
        tiny = functools.partial(MaskedEnv, spaces.Discrete(3), spaces.Discrete(4))
        return make_vec_env(functools.reduce(lambda inner, wrap: lambda: wrap(inner()), wrapper, tiny), 2)

    expected = after_three_rollouts(RecurrentPPO, "Discrete", env=env(one_hot))
    assert relative_difference(expected, after_three_rollouts(RecurrentANO, "Discrete", env=env(), shaping="ppo")) <= 1e-6


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")  # of the compiler
@pytest.mark.parametrize("case", ["Discrete", "MultiDiscrete", "MultiBinary", "Dict"])
def test_the_compiled_update_is_that_of_sb3_contrib(case):
    expected = after_three_rollouts(MaskablePPO, case)
    found = after_three_rollouts(MaskableANO, case, shaping="ppo", torch_compile=True)
    assert found._updater.compiled
    assert relative_difference(expected, found) <= 1e-6


@pytest.mark.parametrize("case", ["Discrete", "MultiDiscrete", "MultiBinary", "Dict"])
@pytest.mark.parametrize("cls", [MaskableANO, RecurrentMaskableANO])
def test_masks_are_respected_and_the_update_sees_the_policy_of_the_rollout(cls, case):
    model = make(cls, case, n_epochs=1, batch_size=64)
    model.learn(64)
    # Before the first step of the optimizer all ratios are 1, if states and masks are those of the rollout.
    assert model.logger.name_to_value["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    buffer, sizes = model.rollout_buffer, np.atleast_1d(getattr(model.action_space, "nvec", 2))
    taken = actions(model).reshape(64, -1).astype(int)
    masks = buffer.tensors().action_masks.numpy() if cls is MaskableANO else buffer.action_masks
    assert not masks.reshape(64, -1).all()
    starts = np.cumsum([0, *sizes[:-1]]) if case == "MultiDiscrete" else 2 * np.arange(taken.shape[1])
    assert np.take_along_axis(masks.reshape(64, -1), taken + starts, axis=1).all()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), [(MaskableANO, MaskablePPO), (RecurrentANO, RecurrentPPO)])
def test_predict_takes_states_episode_starts_and_masks_as_in_sb3_contrib(ours, theirs, deterministic):
    masks = {"action_masks": np.array([[0, 1, 1, 0], [1, 0, 0, 0]], dtype=bool)} if ours is MaskableANO else {}
    found, expected = (trajectory(make(cls, "Discrete"), deterministic, masks) for cls in (ours, theirs))
    for (action, state), (expected_action, expected_state) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(action, expected_action)
        np.testing.assert_allclose(state or (), expected_state or (), rtol=1e-6)
        assert not masks or (action[1] == 0 and action[0] in (1, 2))


def trajectory(model: Any, deterministic: bool, options: dict) -> list:
    """Actions and states of two environments over ten steps, with an episode that starts at step 5 in one of them."""
    torch.manual_seed(0)
    space, state, steps = spaces.flatten_space(model.observation_space), None, []
    space.seed(1)
    for step in range(10):
        rows = [spaces.unflatten(model.observation_space, space.sample().clip(-1.0, 1.0)) for _ in "ab"]
        batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]} if isinstance(rows[0], dict) else np.stack(rows)
        action, state = model.predict(batch, state, np.array([step == 0, step in (0, 5)]), deterministic, **options)
        steps.append((action, state))
    return steps


@pytest.mark.parametrize("case", ["Discrete", "Dict"])
@pytest.mark.parametrize("cls", ALGORITHMS)
def test_a_loaded_model_acts_and_continues_like_the_saved_one(cls, case, tmp_path):
    model = after_three_rollouts(cls, case)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=model.get_env())
    masks = {} if cls is RecurrentANO else {"action_masks": np.array([[0, 1, 1, 0], [1, 0, 1, 1]], dtype=bool)}
    for saved, found in zip(*(trajectory(m, False, masks) for m in (model, loaded)), strict=True):
        np.testing.assert_array_equal(found[0], saved[0])
        np.testing.assert_array_equal(found[1] or (), saved[1] or ())
    assert torch.equal(parameters(loaded), parameters(model))
    loaded.learn(64)
    assert not torch.equal(parameters(loaded), parameters(model))


@pytest.mark.parametrize("cls", [MaskableANO, RecurrentMaskableANO])
def test_sb3_contribs_callback_evaluates_with_masks(cls):
    env = masked_vec_env(BOX_OBSERVATIONS, DISCRETE, 1)
    callback = MaskableEvalCallback(env, n_eval_episodes=2, eval_freq=32, verbose=0, warn=False)
    make(cls, "Discrete", env=masked_vec_env(BOX_OBSERVATIONS, DISCRETE, 1)).learn(32, callback=callback)
    assert np.isfinite(callback.last_mean_reward)


def learn_with_masks(masks: Any, case: str = "MultiDiscrete", cls: type = MaskableANO) -> Any:
    model = make(cls, case)
    model.env.env_method = lambda *_: [masks, masks]
    return model.learn(64)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: RecurrentANO("MlpPolicy", "CartPole-v1"), "policy='MlpPolicy' is not a policy of RecurrentANO"),
        (lambda: MaskableANO(ActorCriticPolicy, "CartPole-v1"), "subclasses of MaskableActorCriticPolicy"),
        (lambda: RecurrentMaskableANO(MlpLstmPolicy, "CartPole-v1"), "not a policy of RecurrentMaskableANO"),
        (lambda: make(MaskableANO, "Box"), "action space Box.* cannot be masked; allowed are Discrete"),
        (lambda: MaskableANO("MlpPolicy", "CartPole-v1").learn(9), "no method 'action_masks'; wrap it in .*ActionMasker"),
        (lambda: learn_with_masks([True] * 4), r"shape \(4,\); allowed are 5 values"),
        (lambda: learn_with_masks([True] * 3, "MultiBinary", RecurrentMaskableANO), r"shape \(3,\); allowed are 6 values"),
        (lambda: learn_with_masks([True] * 3 + [False] * 2), "environment 0 allows no action"),
        (
            lambda: RecurrentANO("MlpLstmPolicy", vec_env_with_bad_number(1, "reward", np.nan, 9), n_steps=16).learn(64),
            "environment 1 returned nan in its reward at step 9",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:batch_size=.* does not divide")
def test_invalid_input_is_named_in_one_line(use, message):
    with pytest.raises(ValueError, match=message) as error:
        use()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", [{"torch_compile": True}, {"precision": "bfloat16"}])
def test_arguments_without_effect_on_recurrent_policies_are_warned_about(option):
    with pytest.warns(UserWarning, match=f"{next(iter(option))}=.* has no effect on recurrent policies"):
        make(RecurrentANO, "Discrete", **option)
