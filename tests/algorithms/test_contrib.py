"""Policies with LSTMs and masks: variants, masks, files and messages; test_equals_sb3_contrib.py has their plain trainings."""

import contextlib
import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.ppo_recurrent import MlpLstmPolicy
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_ano import MaskableANO, RecurrentANO, RecurrentMaskableANO
from sb3_ano.algorithms.contrib import with_masks
from tests.algorithms.comparison import relative_difference, traced_only, with_some_seed
from tests.algorithms.configurations import CHANGES, Callback
from tests.algorithms.test_equals_sb3_contrib import CASES, DISCRETE, SETTINGS, THEIRS, after_three_rollouts, make, taken
from tests.algorithms.test_equals_sb3_ppo import tolerance
from tests.common import parameters
from tests.tiny_envs import BOX_OBSERVATIONS, MaskedEnv, TwoAllowed, masked_vec_env, n_choices

# Policies, optimizers and buffers of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")

ALGORITHMS = [MaskableANO, RecurrentANO, RecurrentMaskableANO]


class AllAllowed(MaskedEnv):
    def action_masks(self) -> np.ndarray:
        return np.ones(n_choices(self.action_space), dtype=bool)


class Sharper(MaskableCategoricalDistribution):
    def proba_distribution(self, action_logits: torch.Tensor) -> Any:
        return super().proba_distribution(3.0 * action_logits)


class SharperPolicy(MaskableActorCriticPolicy):
    """A distribution of the user's own."""

    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = Sharper(4)
        super()._build(lr_schedule)


VARIANTS: dict[str, tuple[type, str, dict]] = {
    "no masking": (MaskableANO, "Discrete", {"learn": {"use_masking": False}}),
    "recurrent, no masking": (RecurrentMaskableANO, "Dict", {"learn": {"use_masking": False}}),
    "masks that allow all": (RecurrentMaskableANO, "MultiDiscrete", {"kind": AllAllowed}),
    "sb3-contrib's buffer": (MaskableANO, "Discrete", {"rollout_buffer_class": MaskableRolloutBuffer}),
    "own distribution": (MaskableANO, "Discrete", {"policy": SharperPolicy}),
    "shared LSTM": (RecurrentANO, "Box", {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}}),
    "two layers": (RecurrentANO, "Discrete", {"policy_kwargs": {"enable_critic_lstm": False, "n_lstm_layers": 2}}),
    "extractors": (RecurrentANO, "MultiDiscrete", {"policy_kwargs": {"share_features_extractor": False}}),
}


@pytest.mark.parametrize(("ours", "case", "options"), VARIANTS.values(), ids=VARIANTS)
def test_variants_are_those_of_sb3_contrib(ours, case, options):
    few, theirs = {**options, "n_epochs": 2}, THEIRS.get(ours, RecurrentPPO)
    found = after_three_rollouts(ours, case, shaping="ppo", **few)
    if theirs is RecurrentPPO:
        few.pop("learn", None)
    expected = after_three_rollouts(theirs, case, **few)
    assert relative_difference(expected, found) <= 1e-6
    np.testing.assert_allclose(taken(found), taken(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("ours", [MaskableANO, RecurrentANO])
def test_a_callback_may_change_the_policy_and_end_a_rollout_as_in_sb3_contrib(ours):
    def run(cls: type, **options: Any) -> Any:
        model = make(cls, "Discrete", n_epochs=2, **options)
        model.learn(128, callback=[Callback(CHANGES["parameters"]), StopTrainingOnMaxEpisodes(4)])
        assert 64 < model.num_timesteps < 128  # the second rollout was ended
        return model.learn(64, reset_num_timesteps=False)

    assert relative_difference(run(THEIRS[ours]), run(ours, shaping="ppo")) <= 1e-6


@pytest.mark.parametrize("ours", [MaskableANO, RecurrentANO])
def test_callbacks_find_the_local_variables_of_sb3_contrib(ours):
    names = {MaskableANO: ["action_masks", "use_masking"], RecurrentANO: ["lstm_states", "episode_starts"]}[ours]

    def seen(cls: type, **options: Any) -> list[np.ndarray]:
        values: list[Any] = []
        record = lambda variables, _: values.append([copy.deepcopy(variables[name]) for name in names]) or True  # noqa: E731
        make(cls, "Discrete", **options).learn(64, callback=record)
        flat = [torch.cat([torch.as_tensor(x).double().flatten() for x in leaves(value)]) for value in values]
        return [step.numpy() for step in flat]

    np.testing.assert_allclose(seen(ours), seen(THEIRS[ours]), rtol=1e-5, atol=1e-6)


def leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list | tuple) else [value]


def test_masks_reach_processes_through_wrappers():
    # The environment raises if an action is not allowed.
    env = VecNormalize(make_vec_env(TwoAllowed, 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"}))
    try:
        model = MaskableANO("MlpPolicy", env, **SETTINGS).learn(64)
        assert evaluate_policy(with_masks(model, env), env, 2, warn=False)
    finally:
        env.close()


def test_lstm_policies_take_multi_discrete_observations():
    # sb3-contrib's do not, but they take their one-hot codes.
    def env(wrap: Any = lambda inner: inner) -> Any:
        return masked_vec_env(spaces.MultiDiscrete([3, 2]), DISCRETE, kind=lambda *both: wrap(MaskedEnv(*both)))

    expected = after_three_rollouts(RecurrentPPO, "Discrete", env=env(FlattenObservation))
    assert relative_difference(expected, after_three_rollouts(RecurrentANO, "Discrete", env=env(), shaping="ppo")) <= 1e-6


@pytest.mark.parametrize("case", ["Discrete", "MultiDiscrete", "MultiBinary", "Dict"])
@pytest.mark.parametrize("cls", [MaskableANO, RecurrentMaskableANO])
def test_masks_are_respected_and_the_update_sees_the_policy_of_the_rollout(cls, case):
    model = make(cls, case, n_epochs=1, batch_size=64)
    model.learn(64)
    # Before the first step of the optimizer all ratios are 1, if states and masks are those of the rollout.
    assert model.logger.name_to_value["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    buffer, sizes = model.rollout_buffer, np.atleast_1d(getattr(model.action_space, "nvec", 2))
    chosen = taken(model).reshape(64, -1).astype(int)
    masks = buffer.action_masks
    assert not masks.reshape(64, -1).all()
    starts = np.cumsum([0, *sizes[:-1]]) if case == "MultiDiscrete" else 2 * np.arange(chosen.shape[1])
    assert np.take_along_axis(masks.reshape(64, -1), chosen + starts, axis=1).all()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("ours", [MaskableANO, RecurrentANO])
def test_predict_takes_states_episode_starts_and_masks_as_in_sb3_contrib(ours, deterministic):
    masks = {"action_masks": np.array([[0, 1, 1, 0], [1, 0, 0, 0]], dtype=bool)} if ours is MaskableANO else {}
    found, expected = (trajectory(make(cls, "Discrete"), deterministic, masks) for cls in (ours, THEIRS[ours]))
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
    # Fewer environments may follow.
    cls.load(tmp_path / "model", env=masked_vec_env(*CASES[case][1:3], 1)).learn(32)


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


def test_a_sequence_that_starts_anew_within_is_that_of_sb3_contrib():
    policy = make(RecurrentANO, "Box").policy
    generator = torch.Generator().manual_seed(0)
    features, states = (torch.randn(*shape, generator=generator) for shape in ((6, 4), (2, 1, 2, 8)))
    for starts in torch.eye(6):
        arguments = features, (states[0], states[1]), starts, policy.lstm_actor
        found, expected = policy._process_sequence(*arguments), RecurrentActorCriticPolicy._process_sequence(*arguments)
        torch.testing.assert_close(found, expected)


class Nothing(MaskedEnv):
    """Masks that allow no action at every third step, or none in the first dimension."""

    def action_masks(self) -> np.ndarray:
        masks = super().action_masks()
        if self._steps % 3 == 2:
            masks[: masks.size if isinstance(self.action_space, spaces.Discrete) else 2] = False
            masks[:3] = False
        return masks


@pytest.mark.parametrize("case", ["Discrete", "MultiDiscrete", "MultiBinary", "Dict", "image"])
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_that_allow_no_action_train_as_in_sb3_contrib_with_one_warning(case, compiled):
    with_some_seed(lambda seed: compare_without_actions(case, compiled, seed))


def compare_without_actions(case: str, compiled: bool, seed: int) -> None:
    options: dict[str, Any] = {"kind": Nothing, "n_epochs": 2, "seed": seed}
    expected = after_three_rollouts(MaskablePPO, case, **options)
    with traced_only() if compiled else contextlib.nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = after_three_rollouts(MaskableANO, case, **options, shaping="ppo", torch_compile=compiled)

    where = " in dimension 0" if case.startswith("Multi") else ""
    messages = [str(warning.message) for warning in caught if "allows no action" in str(warning.message)]
    assert len(messages) == 1
    assert f"action_masks() of environment 0 allows no action{where} at step 2 of the training" in messages[0]
    np.testing.assert_allclose(taken(found), taken(expected))
    assert relative_difference(expected, found) <= tolerance(case)


def test_masks_that_allow_no_action_are_warned_about_in_each_training():
    model = make(MaskableANO, "Discrete", kind=Nothing)
    for _ in range(2):
        with pytest.warns(UserWarning, match="allows no action at step") as caught:
            model.learn(64)
        assert len(caught) == 1
