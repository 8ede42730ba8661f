"""What only ANO has: the shaping argument."""

import pytest
import torch

from sb3_ano import ANO, SPO
from sb3_ano.shaping import ano
from tests.common import parameters, pseudo_huber

SMALL = {"n_steps": 64, "batch_size": 32, "n_epochs": 4, "learning_rate": 3e-3, "seed": 0}


def trained(cls=ANO, **options):
    return cls("MlpPolicy", "CartPole-v1", **SMALL, **options).learn(192)


@pytest.fixture(scope="module")
def default() -> ANO:
    return trained()


def test_equal_shapes_give_equal_trainings(default):
    assert default.shaping == "ano"
    for shaping in (ano, ("ano", "ano")):
        assert torch.equal(parameters(trained(shaping=shaping)), parameters(default))
    assert torch.equal(parameters(trained(SPO)), parameters(trained(ANO, shaping="spo")))
    assert not torch.equal(parameters(trained(SPO)), parameters(default))


@pytest.mark.parametrize(
    ("shaping", "error", "message"),
    [
        ("anno", ValueError, "shaping='anno' is unknown; allowed are .*'ano'"),
        (lambda x: x + 1, ValueError, "violates anchoring: h\\(0\\) = 1, allowed is 0.*from_ratio"),
        (lambda ratio, eps: ratio, TypeError, "from_ratio"),
        # review users U12, U13
        (lambda x: x.clamp(max=1.0).detach(), ValueError, "<lambda>' has the slope 0 at x = 0, allowed are slopes above 0"),
        (torch.log1p, ValueError, "shaping='torch:log1p' is not finite at x = -1"),
        (("ano", torch.log1p), ValueError, "shaping='torch:log1p' is not finite at x = -1"),
        (3, TypeError, "shaping=3 is not a shape; allowed are"),
    ],
)
def test_bad_shapes_are_named_with_what_is_allowed(shaping, error, message):
    with pytest.raises(error, match=message):
        ANO("MlpPolicy", "CartPole-v1", shaping=shaping)
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    with pytest.raises(error, match=message):  # review users U16
        model.shaping = shaping
    assert model.shaping == model.shaping_name == "ano"


def leaky(x):
    return x.clamp(min=-5.0, max=1.0)


def test_a_shape_above_the_identity_is_warned_about():
    with pytest.warns(UserWarning, match="violates enclosure: h\\(-64\\) = -5"):
        ANO("MlpPolicy", "CartPole-v1", shaping=leaky)


@pytest.mark.parametrize("shape", ["spo", "tests.common:pseudo_huber", ("ppo", pseudo_huber)], ids=["name", "path", "pair"])
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
    models = [trained(), trained()]
    models[1].shaping = "ano"
    for model in models:
        model.set_random_seed(1)
        model.learn(64, reset_num_timesteps=False)
    assert torch.equal(*map(parameters, models))
