"""An algorithm is added by its module, an entry in the registry, and a hyperparameter file; nothing else names it."""

from typing import Any

import pytest
import torch
from stable_baselines3.common.callbacks import ConvertCallback, EveryNTimesteps

from sb3_ano import _registry
from sb3_ano.algorithms import ANO, PAPO, SPO, ShapedPolicyAlgorithm
from sb3_ano.algorithms.arguments import inherit_signature
from sb3_ano.checkpoints import TrainingCheckpoints
from tests.common import SMALL, parameters

SHARED = ("check_finite", "clip_range_high", "desired_kl", "precision", "torch_compile")


class Toy(ShapedPolicyAlgorithm):
    """The policy gradient with the ratio to a power."""

    @inherit_signature(ShapedPolicyAlgorithm)
    def __init__(self, *, power: float = 1.0, **arguments: Any):
        self.power = power
        super().__init__(**arguments)

    def policy_loss(self, log_ratio, advantages, clip_range, samples):
        return -((self.power * log_ratio).exp() * advantages).mean()


@pytest.fixture
def toy(monkeypatch) -> type[ShapedPolicyAlgorithm]:
    monkeypatch.setitem(_registry.ALGORITHMS, "toy", _registry.Entry(Toy, "a toy"))
    return _registry.ALGORITHMS["toy"].algorithm


def test_an_added_algorithm_trains_saves_loads_and_resumes(toy, tmp_path):
    assert _registry.ALGORITHMS["toy"].own_arguments == tuple(sorted((*SHARED, "power")))

    def train(*callbacks: Any) -> ShapedPolicyAlgorithm:
        return toy("MlpPolicy", "CartPole-v1", **SMALL, power=0.5).learn(192, callback=[*callbacks])

    whole = train()
    assert not torch.equal(parameters(whole), parameters(toy("MlpPolicy", "CartPole-v1", **SMALL).learn(192)))
    whole.save(tmp_path / "model")
    loaded = toy.load(tmp_path / "model", env=whole.get_env())
    assert loaded.power == 0.5
    assert torch.equal(parameters(loaded), parameters(whole))
    loaded.learn(64)
    with pytest.raises(ValueError, match=r"was saved by Toy; load it with Toy\.load"):
        ANO.load(tmp_path / "model")

    train(TrainingCheckpoints(tmp_path / "c", every=64, verbose=0), EveryNTimesteps(128, ConvertCallback(lambda *_: False)))
    resumed = train(TrainingCheckpoints(tmp_path / "c", every=64, resume=True, verbose=0))
    assert resumed.num_timesteps == whole.num_timesteps
    assert torch.equal(parameters(resumed), parameters(whole))


def test_own_arguments_are_those_that_ppo_does_not_have():
    without_target = tuple(name for name in SHARED if name != "desired_kl")
    expected = {
        ANO: (*SHARED, "shaping"),
        SPO: SHARED,
        PAPO: (*without_target, "k", "omega1", "omega2", "max_epoch_kl"),
    }
    for entry in _registry.ALGORITHMS.values():
        assert entry.own_arguments == tuple(sorted(expected.get(entry.algorithm, expected[ANO])))


@pytest.mark.parametrize("name", ["nonsense", "n_envs"])
@pytest.mark.parametrize("cls", [ANO, SPO, PAPO, Toy])
def test_unknown_arguments_are_named(cls, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        cls("MlpPolicy", "CartPole-v1", **{name: 1})


def test_positional_arguments_are_those_of_ppo():
    model = ANO("MlpPolicy", "CartPole-v1", 1e-3, 32, 16, 3, 0.9)
    assert (model.learning_rate, model.n_steps, model.batch_size, model.n_epochs, model.gamma) == (1e-3, 32, 16, 3, 0.9)
    with pytest.raises(TypeError, match="multiple values for argument 'n_steps'"):
        ANO("MlpPolicy", "CartPole-v1", 1e-3, 32, n_steps=64)
