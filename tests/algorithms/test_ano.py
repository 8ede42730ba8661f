"""What only ANO has: the shaping argument."""

import pytest
import torch

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.shaping import ano, surrogate
from tests.common import parameters, pseudo_huber

SMALL = {"n_steps": 64, "batch_size": 32, "n_epochs": 4, "learning_rate": 3e-3, "seed": 0}


def trained(cls=ANO, **options):
    return cls("MlpPolicy", "CartPole-v1", **SMALL, **options).learn(192)


def test_spo_is_ano_with_the_shape_spo():
    assert torch.equal(parameters(trained(SPO)), parameters(trained(ANO, shaping="spo")))


def test_the_default_shape_is_ano():
    assert trained().shaping == "ano"
    assert torch.equal(parameters(trained()), parameters(trained(shaping=ano)))
    assert not torch.equal(parameters(trained()), parameters(trained(shaping="ppo")))


def test_a_pair_of_equal_shapes_is_the_symmetric_objective():
    assert torch.equal(parameters(trained(shaping=("ano", "ano"))), parameters(trained()))


def test_the_policy_loss_is_minus_the_mean_surrogate():
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, clip_range=0.1, clip_range_high=0.3)
    model.learn(64)
    log_ratio, advantages = torch.linspace(-1, 1, 9), torch.linspace(-2, 2, 9)
    expected = -surrogate(log_ratio, advantages, "ano", eps_low=0.1, eps_high=0.3).mean()
    region = model._updater.clip_range
    torch.testing.assert_close(model.policy_loss(log_ratio, advantages, region, None), expected)


@pytest.mark.parametrize("cls", [SPO, PAPO])
def test_spo_and_papo_take_no_shape(cls):
    with pytest.raises(TypeError, match="shaping"):
        cls("MlpPolicy", "CartPole-v1", shaping="ano")


@pytest.mark.parametrize(
    ("shaping", "error", "message"),
    [
        ("anno", ValueError, "shaping='anno' is unknown; allowed are .*'ano'"),
        (lambda x: x + 1, ValueError, "violates anchoring: h\\(0\\) = 1, allowed is 0.*from_ratio"),
        (lambda ratio, eps: ratio, TypeError, "from_ratio"),
        # review users U12, U13
        (lambda x: x.clamp(max=1.0).detach(), ValueError, "<lambda>' has the slope 0 at x = 0, allowed are slopes above 0"),
        (lambda x: -x.abs(), ValueError, "has the slope 0 at x = 0"),
        (torch.log1p, ValueError, "shaping='torch:log1p' is not finite at x = -1"),
        (("ano", torch.log1p), ValueError, "shaping='torch:log1p' is not finite at x = -1"),
        (3, TypeError, "shaping=3 is not a shape; allowed are"),
    ],
)
def test_bad_shapes_are_named_with_what_is_allowed(shaping, error, message):
    with pytest.raises(error, match=message):
        ANO("MlpPolicy", "CartPole-v1", shaping=shaping)


def leaky(x):
    return x.clamp(min=-5.0, max=1.0)


def test_a_shape_above_the_identity_is_warned_about():
    with pytest.warns(UserWarning, match="violates enclosure: h\\(-64\\) = -5"):
        ANO("MlpPolicy", "CartPole-v1", shaping=leaky)


def test_the_model_remembers_the_shape_as_given_and_by_name():
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, shaping=("spo", pseudo_huber))
    assert model.shaping == ("spo", pseudo_huber)
    assert model.shaping_name == ["spo", "tests.common:pseudo_huber"]
    model._setup_model()
    assert model.shaping == ("spo", pseudo_huber)


class Learned(torch.nn.Module):
    """A shape with float32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.layer(x.unsqueeze(-1)).squeeze(-1).square()


def test_a_module_is_a_shape(tmp_path):  # review core 12
    shape = Learned()
    with pytest.warns(UserWarning, match="cannot be imported by its name"):
        model = trained(shaping=shape)
    assert not torch.equal(parameters(model), parameters(trained()))
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="cannot be imported by its name"):
        assert ANO.load(tmp_path / "model", shaping=shape).shaping is shape


@pytest.mark.parametrize("shape", ["spo", "tests.common:pseudo_huber", ("ppo", "spo")], ids=str)
def test_a_shape_that_is_assigned_takes_effect_at_the_next_update(shape, tmp_path):  # review users U16
    expected = trained(shaping=shape)
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    model.shaping = shape
    assert model.shaping == shape
    model.learn(192)
    assert torch.equal(parameters(model), parameters(expected))
    assert (model.shaping_name, model.shaping_fingerprint) == (expected.shaping_name, expected.shaping_fingerprint)
    model.save(tmp_path / "model")
    assert ANO.load(tmp_path / "model").shaping_name == expected.shaping_name


def test_a_shape_may_be_assigned_between_updates_without_touching_the_optimizer():  # review users U16
    models = [trained(shaping=shape) for shape in ("ano", "ano")]
    models[1].shaping = "ano"
    for model in models:
        model.set_random_seed(1)
        model.learn(64, reset_num_timesteps=False)
    assert torch.equal(*map(parameters, models))


def test_a_bad_shape_is_not_assigned():  # review users U16
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    with pytest.raises(ValueError, match="shaping='anno' is unknown"):
        model.shaping = "anno"
    with pytest.raises(ValueError, match="violates anchoring"):
        model.shaping = torch.cos
    assert model.shaping == model.shaping_name == "ano"
    assert repr(model) == "ANO(shaping='ano', clip_range=0.2)"
