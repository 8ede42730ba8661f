"""Our evaluation of SB3's policies, against SB3's own."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import preprocess_obs

from sb3_ano import ANO
from sb3_ano.algorithms.policy_evaluation import PolicyEvaluation, customization, preprocessing
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

OBSERVATIONS = {
    "Box": BOX_OBSERVATIONS,
    "Box of float64": spaces.Box(-1.0, 1.0, (3,), np.float64),
    "Box of rank 2": spaces.Box(-1.0, 1.0, (3, 2), np.float32),
    "Box of rank 3": spaces.Box(-1.0, 1.0, (3, 4, 4), np.float32),
    "image": spaces.Box(0, 255, (3, 36, 36), np.uint8),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([2, 4]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict({"image": spaces.Box(0, 255, (1, 36, 36), np.uint8), "kind": spaces.Discrete(3)}),
}
ACTIONS = [BOX_ACTIONS, spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]


def tensors(space: spaces.Space, n: int):
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: torch.as_tensor(np.stack([np.asarray(s[key]) for s in samples])) for key in space.spaces}
    return torch.as_tensor(np.stack([np.asarray(sample) for sample in samples]))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_preprocessing_is_sb3s(space, normalize, channels_last):
    observations = tensors(space, 4)
    expected = preprocess_obs(observations, space, normalize_images=normalize)
    found = preprocessing(space, normalize, channels_last)(observations)
    if isinstance(space, spaces.Dict):
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], expected[key]) and found[key].dtype == torch.float32 for key in expected)
    else:
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype


def test_images_come_out_in_channels_last_if_asked():
    found = preprocessing(OBSERVATIONS["image"], True, channels_last=True)(tensors(OBSERVATIONS["image"], 4))
    assert found.is_contiguous(memory_format=torch.channels_last)


def model(policy: str, observations: spaces.Space, actions: spaces.Space, **options) -> ANO:
    return ANO(policy, tiny_vec_env(observations, actions), n_steps=32, batch_size=32, seed=0, **options)


POLICIES = [("MlpPolicy", BOX_OBSERVATIONS), ("CnnPolicy", IMAGE_OBSERVATIONS), ("MultiInputPolicy", DICT_OBSERVATIONS)]


@pytest.mark.parametrize("options", [{}, {"policy_kwargs": {"share_features_extractor": False}}], ids=["shared", "apart"])
@pytest.mark.parametrize("actions", [*ACTIONS, "gSDE"], ids=lambda space: getattr(type(space), "__name__", space))
@pytest.mark.parametrize(("policy", "observations"), POLICIES, ids=["Mlp", "Cnn", "MultiInput"])
def test_values_log_probabilities_and_entropies_are_those_of_the_policy(policy, observations, actions, options):
    options = {**options, "use_sde": actions == "gSDE"}
    actions = BOX_ACTIONS if actions == "gSDE" else actions
    made = model(policy, observations, actions, **options)
    inputs = tensors(made.observation_space, 16), tensors(actions, 16).float()
    expected = made.policy.evaluate_actions(*inputs)
    for precision, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        found = PolicyEvaluation(made.policy, precision)(*inputs)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
            assert mine.dtype == torch.float32


def test_bfloat16_is_used():
    made = model(*POLICIES[0], BOX_ACTIONS)
    inputs = tensors(made.observation_space, 16), tensors(BOX_ACTIONS, 16)
    values = [PolicyEvaluation(made.policy, precision)(*inputs)[0] for precision in ("float32", "bfloat16")]
    assert not torch.equal(*values)


class Overriding(ActorCriticPolicy):
    def evaluate_actions(self, obs, actions):
        values, log_prob, entropy = super().evaluate_actions(obs, actions)
        return values + 1.0, log_prob, entropy


def test_a_policy_that_overrides_something_is_asked_itself():
    made = model(Overriding, BOX_OBSERVATIONS, BOX_ACTIONS)
    assert customization(made.policy) == "Overriding overrides evaluate_actions"
    inputs = tensors(made.observation_space, 16), tensors(BOX_ACTIONS, 16)
    assert torch.equal(PolicyEvaluation(made.policy)(*inputs)[0], made.policy.evaluate_actions(*inputs)[0])


def test_a_method_put_on_the_instance_counts_as_overridden():
    made = model(*POLICIES[0], BOX_ACTIONS)
    assert customization(made.policy) is None
    made.policy.extract_features = lambda observations: observations
    assert customization(made.policy) == "policy.extract_features was replaced"


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("forward", True),
        ("predict_values", True),
        ("extract_features", True),
        ("_get_action_dist_from_latent", True),
        ("obs_to_tensor", True),
        ("unscale_action", True),
        ("parameters", True),
        ("predict", False),
        ("reset_noise", False),
        ("init_weights", False),
        ("set_training_mode", False),
    ],
)
def test_methods_that_the_collection_and_the_update_replace_may_not_be_overridden(name, counts):
    original = getattr(ActorCriticPolicy, name)
    own = type("Own", (ActorCriticPolicy,), {name: lambda self, *args, **kwargs: original(self, *args, **kwargs)})
    made = ANO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16)
    made.policy.__class__ = own
    assert customization(made.policy) == (f"Own overrides {name}" if counts else None)
