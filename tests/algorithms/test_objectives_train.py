"""Every published objective trains an agent, compiled or not, and comes back from both formats."""

import numpy as np
import pytest
import torch

from sb3_ano import ANO, MaskableANO, RecurrentANO
from sb3_ano.envs import make_vec_env
from sb3_ano.fast.step import ClipRange
from sb3_ano.hub import load_safe, save_safe
from sb3_ano.shaping import OBJECTIVES, surrogate
from tests.common import SMALL, needs_compiler, parameters

# One of each form: a weight with a radius of its own, functions of the ratio, a radius of the sample.
FAST = ("cispo", "dual_clip", "trgppo")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES]
pytestmark = pytest.mark.filterwarnings("ignore:.*violates enclosure")


def learned(name, steps=128, env="CartPole-v1", **options):
    return ANO("MlpPolicy", env, shaping=name, **{**SMALL, **options}).learn(steps)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_comes_back_from_both_formats(name, tmp_path):
    model = learned(name, clip_range="lin_0.2", clip_range_high=0.28)
    assert parameters(model).isfinite().all()
    model.save(tmp_path / "model")
    save_safe(model, tmp_path / "safe")
    for loaded in (ANO.load(tmp_path / "model"), load_safe(tmp_path / "safe")):
        assert loaded.shaping == name
        assert torch.equal(parameters(loaded), parameters(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_learns_cart_pole(name):
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    passes = {"batch_size": 256, "n_epochs": 4}
    if name in ("reinforce", "gppo"):
        # They push away from bad actions however improbable those have become, so that several epochs end in a collapse.
        passes = {"batch_size": 64, "n_epochs": 1}
    model = learned(name, 30_000, env, n_steps=128, learning_rate=1e-3, **passes)
    assert np.mean([episode["r"] for episode in model.ep_info_buffer]) > 80


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_compiled_update_gives_the_same_parameters(name):
    options = {"clip_range": "lin_0.2", "n_steps": 64, "batch_size": 32, "n_epochs": 4, "learning_rate": 3e-3}
    eager, compiled = (learned(name, 192, **options, torch_compile=compile) for compile in (False, True))
    assert not compiled.engine.obstacle
    difference = (parameters(compiled) - parameters(eager)).norm() / parameters(eager).norm()
    assert difference < 1e-5


def test_the_update_has_the_gradient_of_the_objective():
    """Also of an objective that reads the old log-probabilities, which the engine hands over."""
    for name in FAST:
        model = learned(name, 64, n_epochs=1, batch_size=64, n_steps=64)
        buffer = model.rollout_buffer
        samples = next(buffer.get(64))
        log_ratio = torch.linspace(-1, 1, 64).requires_grad_()
        radii = ClipRange(low=torch.tensor(0.1), high=torch.tensor(0.3))
        model.policy_loss(log_ratio, samples.advantages, radii, samples).backward()
        other = log_ratio.detach().clone().requires_grad_()
        objective = surrogate(other, samples.advantages, name, eps_low=0.1, eps_high=0.3, old_log_prob=samples.old_log_prob)
        (-objective.mean()).backward()
        torch.testing.assert_close(log_ratio.grad, other.grad)


@pytest.mark.parametrize("cls", [MaskableANO, RecurrentANO])
def test_masked_and_recurrent_agents_take_them_too(cls):
    policy = "MlpLstmPolicy" if cls is RecurrentANO else "MlpPolicy"
    for name in ("dppo", "sapo"):
        model = cls(policy, "CartPole-v1", shaping=name, **SMALL)
        model.learn(64, **({"use_masking": False} if cls is MaskableANO else {}))
        assert parameters(model).isfinite().all()


def test_the_warning_at_construction_says_which_guarantee_is_lost():
    with pytest.warns(UserWarning, match=r"shaping='tis, A < 0' violates enclosure: .* is not a lower bound of r A there"):
        ANO("MlpPolicy", "CartPole-v1", shaping="tis", **SMALL)


def test_radii_of_probabilities_are_warned_about_where_actions_have_densities():
    with pytest.warns(UserWarning, match="the radius of shaping='dppo' depends on the probabilities of actions; those of Box"):
        ANO("MlpPolicy", "Pendulum-v1", shaping="dppo", **SMALL)
