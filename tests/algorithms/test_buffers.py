"""The rollout buffer whose memory is the training data, against SB3's."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer, RolloutSamples
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS

STEPS, N_ENVS = 11, 3
SPACES = {
    "Box": (BOX_OBSERVATIONS, BOX_ACTIONS),
    "float64": (spaces.Box(-1.0, 1.0, (4,), np.float64), spaces.Discrete(3)),
    "image": (IMAGE_OBSERVATIONS, spaces.MultiDiscrete([2, 3])),
    "Discrete": (spaces.Discrete(5), spaces.MultiBinary(3)),
    "Dict": (DICT_OBSERVATIONS, spaces.Discrete(3)),
}
NAMES = ("observations", "actions", "values", "log_probs", "advantages", "returns")


def batch(space: spaces.Space, n: int):
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in space.spaces}
    return np.stack([np.asarray(sample) for sample in samples])


def filled(case: str, n_envs: int = N_ENVS) -> tuple[FlatRolloutBuffer, RolloutBuffer]:
    """Ours and SB3's with the same random rollout."""
    observations, actions = SPACES[case]
    observations.seed(1)
    actions.seed(2)
    generator = np.random.default_rng(3)
    dictionary = isinstance(observations, spaces.Dict)
    settings = {"device": "cpu", "gae_lambda": 0.9, "gamma": 0.97, "n_envs": n_envs}
    ours = (DictFlatRolloutBuffer if dictionary else FlatRolloutBuffer)(STEPS, observations, actions, **settings)
    theirs = (DictRolloutBuffer if dictionary else RolloutBuffer)(STEPS, observations, actions, **settings)
    for _ in range(STEPS):
        numbers = generator.normal(size=(3, n_envs)).astype(np.float32)
        step = (
            batch(observations, n_envs),
            batch(actions, n_envs).reshape(n_envs, -1),
            numbers[0],
            generator.random(n_envs) < 0.2,
            torch.tensor(numbers[1]).reshape(-1, 1),
            torch.tensor(numbers[2]),
        )
        ours.add(*step)
        theirs.add(*step)
    last_values, dones = torch.tensor(generator.normal(size=(n_envs, 1)).astype(np.float32)), generator.random(n_envs) < 0.5
    for buffer in (ours, theirs):
        buffer.compute_returns_and_advantage(last_values, dones)
    return ours, theirs


def items(values):
    return values.items() if isinstance(values, dict) else [("", values)]


@pytest.mark.parametrize("n_envs", [1, N_ENVS])
@pytest.mark.parametrize("case", SPACES)
def test_the_arrays_are_those_of_sb3_bit_for_bit(case, n_envs):
    ours, theirs = filled(case, n_envs)
    assert ours.full
    for name in (*NAMES, "rewards", "episode_starts"):
        expected = dict(items(getattr(theirs, name)))
        for key, array in items(getattr(ours, name)):
            np.testing.assert_array_equal(array, expected[key])
            assert array.dtype == expected[key].dtype


@pytest.mark.parametrize("case", SPACES)
def test_minibatches_come_in_sb3s_order_with_sb3s_types(case):
    ours, theirs = filled(case)
    np.random.seed(5)
    found = list(ours.get(8))
    np.random.seed(5)
    for mine, expected in zip(found, theirs.get(8), strict=True):
        for name, values in expected._asdict().items():
            for key, tensor in items(values):
                assert torch.equal(dict(items(getattr(mine, name)))[key], tensor)
                assert dict(items(getattr(mine, name)))[key].dtype == tensor.dtype


@pytest.mark.parametrize("case", SPACES)
def test_the_tensors_are_the_rollout_environment_by_environment(case):
    ours, _ = filled(case)
    again = pickle.loads(pickle.dumps(ours))
    names = dict(zip(RolloutSamples._fields, (*NAMES, "td_errors"), strict=True))
    for buffer in (ours, again):
        for field, values in buffer.tensors()._asdict().items():
            arrays = dict(items(getattr(ours, names[field])))
            for key, tensor in items(values):
                for step, env in ((0, 0), (2, 1), (STEPS - 1, N_ENVS - 1)):
                    np.testing.assert_array_equal(tensor[env * STEPS + step].numpy(), arrays[key][step, env])


def test_arrays_that_are_assigned_are_the_training_data():
    ours, _ = filled("Box")
    ours.advantages = 2.0 * ours.advantages
    np.testing.assert_array_equal(ours.tensors().advantages.numpy(), ours.advantages.T.flatten())
    kept = ours.advantages.copy(), ours.advantages
    ours.reset()
    np.testing.assert_array_equal(*kept)  # what a callback keeps is not overwritten, as in SB3
    assert not ours.full


def test_td_errors_are_what_the_advantages_are_made_of():
    ours, _ = filled("Box")
    following = np.vstack([ours.advantages[1:] * (1.0 - ours.episode_starts[1:]), np.zeros((1, N_ENVS))])
    np.testing.assert_allclose(ours.td_errors, ours.advantages - 0.97 * 0.9 * following, atol=1e-6)
