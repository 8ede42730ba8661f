"""Policies whose critic observes more than the actor."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO

from sb3_ano import ANO, MaskableANO, RecurrentANO, RecurrentMaskableANO, accelerate, explain
from sb3_ano.hub import load_safe, save_safe
from sb3_ano.policies import AsymmetricPolicy
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, IMAGE_OBSERVATIONS, masked_vec_env, tiny_vec_env

OBSERVATIONS = spaces.Dict(
    {"joints": BOX_OBSERVATIONS, "kind": spaces.Discrete(3), "terrain": spaces.Box(-1.0, 1.0, (2, 3), np.float32)}
)
KEYS = ["kind", "terrain"]
ALGORITHMS = {
    ANO: "AsymmetricPolicy",
    MaskableANO: "AsymmetricPolicy",
    RecurrentANO: "AsymmetricLstmPolicy",
    RecurrentMaskableANO: "AsymmetricLstmPolicy",
}
SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "seed": 0}


def made(algorithm, observations=OBSERVATIONS, keys=KEYS, policy=None, **settings):
    if "Maskable" in algorithm.__name__:
        env = masked_vec_env(observations, spaces.Discrete(4))
    else:
        env = tiny_vec_env(observations, BOX_ACTIONS)
    policy = policy or ALGORITHMS[algorithm]
    return algorithm(policy, env, policy_kwargs={"critic_only_keys": keys}, **{**SETTINGS, **settings})


def acted(model, observation) -> np.ndarray:
    return model.predict(observation, deterministic=True)[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_the_critic_sees_the_keys_in_training_and_in_every_file(algorithm, tmp_path):
    model = made(algorithm).learn(128)
    observation = model.observation_space.sample()
    other = model.observation_space.sample()
    # The actor sees no difference, unless it is in what it sees.
    same = {**other, "joints": observation["joints"]}
    np.testing.assert_array_equal(acted(model, observation), acted(model, same))
    if algorithm is ANO:
        tensors = [model.policy.obs_to_tensor(part)[0] for part in (observation, same, other)]
        means = [model.policy.get_distribution(part).distribution.mean for part in tensors]
        assert torch.equal(means[0], means[1])
        assert not torch.equal(means[0], means[2])
        assert not torch.equal(*[model.policy.predict_values(part) for part in tensors[:2]])

    model.save(tmp_path / "model")
    save_safe(model, tmp_path / "safe")
    model.policy.save(tmp_path / "policy")
    for loaded in (
        algorithm.load(tmp_path / "model"),
        load_safe(tmp_path / "safe"),
        type(model.policy).load(tmp_path / "policy"),
    ):
        np.testing.assert_array_equal(acted(loaded, observation), acted(model, observation))
        np.testing.assert_array_equal(acted(loaded, same), acted(model, observation))
    assert type(loaded).__name__ == type(model.policy).__name__


def test_ppo_is_accelerated_with_the_same_numbers():
    vectors = []
    for is_accelerated in (False, True):
        env = tiny_vec_env(OBSERVATIONS, BOX_ACTIONS)
        model = PPO(AsymmetricPolicy, env, policy_kwargs={"critic_only_keys": KEYS}, **SETTINGS)
        if is_accelerated:
            accelerate(model)
            assert "acting: NumPy" in str(explain(model))
        model.learn(192)
        vectors.append(torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach())
    assert float((vectors[1] - vectors[0]).norm() / vectors[0].norm()) < 1e-5


def test_images_have_layers_of_their_own_and_those_of_the_actor_are_gone():
    observations = spaces.Dict({"joints": BOX_OBSERVATIONS, "camera": IMAGE_OBSERVATIONS})
    model = made(ANO, observations, ["camera"]).learn(64)
    names = [name for name, _ in model.policy.named_parameters() if "features_extractor" in name]
    assert names
    assert all(name.startswith("vf_features_extractor") for name in names)


def test_an_unknown_key_gives_one_line():
    with pytest.raises(
        ValueError, match=r"critic_only_keys=\['friction'\] has 'friction', .*; allowed are joints, kind, terrain"
    ):
        made(ANO, keys=["friction"])
