"""Published objectives by name, against TRL's own losses in process."""

import pytest
import torch

from sb3_ano.llm import ANOTrainer, ShapedGRPOConfig, ShapedGRPOTrainer, ShapedPPOTrainer
from sb3_ano.shaping import OBJECTIVES
from tests.llm.test_grpo import difference, gradient, shaped
from tests.llm.tiny import critic_trainer, make, parameters, rollout

# TRL's settings, and ours; TRL's epsilon_high is the cap itself with cispo, whose sum is divided as dapo's.
AGAINST_TRL = [
    ("cispo", {"loss_type": "cispo", "epsilon_high": 1.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "dapo", "epsilon_high": 4.0}),
    ("sapo", {"loss_type": "sapo"}, {"loss_type": "grpo"}),
    ("two_sided_clip", {"loss_type": "dapo", "delta": 4.0}, {"loss_type": "dapo"}),
    ("two_sided_clip", {"loss_type": "bnpo", "delta": 4.0}, {"loss_type": "bnpo"}),
]


@pytest.mark.parametrize(("name", "theirs", "ours"), AGAINST_TRL, ids=str)
def test_the_gradient_is_that_of_trls_loss(name, theirs, ours, tmp_path):
    inputs = rollout(make(tmp_path, **theirs))
    stock = gradient(make(tmp_path, noise=0.1, **theirs), inputs)
    trainer = shaped(tmp_path, name, noise=0.1, **ours)
    assert difference(gradient(trainer, inputs), stock) < 1e-6
    # The objective has had something to do, or equality would prove little.
    assert trainer._metrics["train"]["ratio/max"][0] > 4.0
    clipped = gradient(shaped(tmp_path, "identity", noise=0.1, **ours), inputs)
    assert difference(clipped, stock) > 1e-3


def test_trls_names_lead_to_ours(tmp_path):
    for loss_type in ("cispo", "sapo"):
        with pytest.raises(ValueError, match=f"loss_type='{loss_type}' is not allowed with a shape; shaping='cispo'"):
            ShapedGRPOConfig(str(tmp_path), loss_type=loss_type, use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"delta=4.0 is not allowed .* which shaping='two_sided_clip' has"):
        ShapedGRPOConfig(str(tmp_path), delta=4.0, use_cpu=True, bf16=False)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", [*("cispo", "dppo"), *(pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES)])
def test_each_trains_a_language_model(name, level, tmp_path):
    settings = {"loss_type": "grpo", "importance_sampling_level": level, "max_steps": 3}
    trainer = make(tmp_path, ShapedGRPOTrainer, ShapedGRPOConfig, shaping=name, **settings)
    before = parameters(trainer).clone()
    trainer.train()
    assert parameters(trainer).isfinite().all()
    assert not torch.equal(parameters(trainer), before)
    assert trainer.args.shaping == name


def test_a_trainer_with_a_critic_takes_them_too(tmp_path):
    trainer = critic_trainer(tmp_path, ShapedPPOTrainer, shaping="dppo", max_steps=2)
    trainer.train()
    assert parameters(trainer).isfinite().all()
    with pytest.raises(ValueError, match="ANOTrainer has the shape 'ano'"):
        critic_trainer(tmp_path, ANOTrainer, shaping="cispo")
