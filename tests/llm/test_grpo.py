"""The trainer against TRL's own: losses, gradients and whole trainings."""

import math

import pytest
import torch
from trl import GRPOConfig

from sb3_ano.llm import GANOConfig, GANOTrainer, ShapedGRPOConfig, ShapedGRPOTrainer
from sb3_ano.llm.config import LOSS_TYPES
from sb3_ano.shaping import ratio_form, surrogate
from tests.llm.tiny import make, model, parameters, prompts, reward, tokenizer

OURS = {"trainer": ShapedGRPOTrainer, "config": ShapedGRPOConfig}
LEVELS = ["token", "sequence"]


def clip(x: torch.Tensor) -> torch.Tensor:
    """PPO's shape, and not the package's own, which TRL's clip stands for."""
    return torch.minimum(x, torch.ones_like(x))


def rollout(trainer) -> dict:
    """A batch as TRL makes it, half of it with advantages below 0, and a policy that has moved since."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(batch)
    trainer.current_gradient_accumulation_steps = 2
    return inputs


def loss_and_gradient(trainer, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    gradients = torch.autograd.grad(loss, list(trainer.model.parameters()), allow_unused=True)
    return loss.detach(), torch.cat([g.flatten() for g in gradients if g is not None])


def trained(folder, **settings):
    trainer = make(folder, **settings)  # which also seeds everything
    trainer.train()
    return trainer


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}], ids=str)
def test_a_clip_as_shape_has_trls_loss_and_gradient(loss_type, level, settings, tmp_path):
    epsilon = 0.2 if level == "token" else 0.05  # the mean over a sequence moves less
    settings = {**settings, "loss_type": loss_type, "importance_sampling_level": level, "epsilon": epsilon}
    inputs = rollout(make(tmp_path, **settings))
    stock = make(tmp_path, noise=0.03, **settings)
    shaped = make(tmp_path, noise=0.03, shaping=clip, **OURS, **settings)
    loss, gradient = loss_and_gradient(stock, inputs)
    own_loss, own_gradient = loss_and_gradient(shaped, inputs)
    assert abs(own_loss - loss) <= 1e-6 * max(1.0, abs(loss))
    assert difference(own_gradient, gradient) < 2e-6
    # The clip has had something to do on both sides, or equality would prove little.
    metrics = shaped._metrics["train"]
    assert metrics["ratio/outside_low"][0] > 0.02
    assert metrics["ratio/outside_high"][0] > 0.02
    narrower = make(tmp_path, noise=0.03, shaping=clip, **OURS, **{**settings, "epsilon": epsilon / 4})
    assert difference(loss_and_gradient(narrower, inputs)[1], gradient) > 1e-3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_training_with_ppos_shape_is_trls_bit_for_bit(loss_type, level, tmp_path):
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "max_steps": 4}
    stock = trained(tmp_path, **settings)
    assert torch.equal(parameters(trained(tmp_path, shaping="ppo", **OURS, **settings)), parameters(stock))


def test_a_training_with_another_shape_is_another(tmp_path):
    stock, other = trained(tmp_path, max_steps=4), trained(tmp_path, max_steps=4, shaping="spo", **OURS)
    assert not torch.equal(parameters(other), parameters(stock))


def test_a_training_with_a_clip_as_shape_is_trls_to_rounding(tmp_path):
    settings = {"max_steps": 6, "learning_rate": 3e-3}
    stock, shaped, before = trained(tmp_path, **settings), trained(tmp_path, shaping=clip, **OURS, **settings), make(tmp_path)
    assert difference(parameters(shaped) - parameters(before), parameters(stock) - parameters(before)) < 1e-3
    assert max(entry.get("ratio/outside_high", 0.0) for entry in shaped.state.log_history) > 0.0


@pytest.mark.parametrize(
    ("shaping", "dual"), [("ano", "paper"), ("spo", "paper"), (("spo", "ano"), "paper"), ("ano", "official_rlhf")], ids=str
)
def test_the_loss_is_the_objective_averaged_as_trl_does(shaping, dual, tmp_path):
    """Token by token, from log-probabilities that this test computes with the model's own forward."""
    settings = {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3}
    inputs = rollout(make(tmp_path, **settings))
    shaped = make(tmp_path, noise=0.03, shaping=shaping, **OURS, **settings, dual=dual)
    loss, _ = loss_and_gradient(shaped, inputs)

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = inputs["completion_mask"]
    attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
    policy = model(tmp_path, noise=0.03).train()
    logits = policy(input_ids=ids, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    log_ratio, advantages = logps - inputs["old_per_token_logps"], inputs["advantages"].unsqueeze(1)
    objective = surrogate(log_ratio, advantages, shaping, eps_low=0.1, eps_high=0.3)
    if dual == "official_rlhf":  # f for both signs, with the radius of each
        f = [ratio_form(shaping, eps_low=eps, eps_high=eps)[0](log_ratio.exp()) for eps in (0.3, 0.1)]
        objective = advantages * torch.where(advantages >= 0, *f)
    expected = -((objective * mask).sum(1) / mask.sum(1)).mean() / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_ratio_is_1_on_the_first_pass_and_no_shape_changes_its_gradient(tmp_path):
    inputs = rollout(make(tmp_path))
    stock, shaped = make(tmp_path), make(tmp_path, shaping="ano", **OURS)
    gradient = loss_and_gradient(stock, inputs)[1]
    assert difference(loss_and_gradient(shaped, inputs)[1], gradient) < 1e-5
    metrics = shaped._metrics["train"]
    assert metrics["ratio/mean"] == [pytest.approx(1.0, abs=1e-6)]
    assert metrics["ratio/outside_low"] == metrics["ratio/outside_high"] == [0.0]


@pytest.mark.parametrize("distance", [3.0, 100.0])
@pytest.mark.parametrize("level", LEVELS)
def test_extreme_ratios_in_bfloat16_are_finite(level, distance, tmp_path):
    settings = {"importance_sampling_level": level, "bf16": True}
    inputs = rollout(make(tmp_path, **settings))
    inputs["old_per_token_logps"] = (
        inputs["old_per_token_logps"] + distance * torch.randn(inputs["completion_ids"].shape).sign()
    )
    for shaping in ("ano", "spo"):
        shaped = make(tmp_path, shaping=shaping, **OURS, **settings)
        loss, gradient = loss_and_gradient(shaped, inputs)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(math.isfinite(value) for values in shaped._metrics["train"].values() for value in values)


def test_evaluation_and_metrics(tmp_path):
    args = GANOConfig(str(tmp_path), **_small_gano(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=8))
    trainer = GANOTrainer(model(tmp_path), reward, args, prompts(), prompts().select(range(4)), tokenizer())
    trainer.train()
    train = [entry for entry in trainer.state.log_history if "loss" in entry]
    (evaluation,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluation["eval_ratio/mean"] == 1.0
    for name in ("ratio/mean", "ratio/max", "ratio/outside_low", "ratio/outside_high", "approx_kl", "kl"):
        assert all(name in entry for entry in train), name
    assert "rewards/kl/mean" in train[0]
    assert not any(name.startswith("clip_ratio/") for entry in train for name in entry)
    assert train[0]["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert train[2]["approx_kl"] > 1e-5


def test_lora_trains_the_adapter_alone(tmp_path):
    from peft import LoraConfig

    args = GANOConfig(str(tmp_path), **_small_gano())
    lora = LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM")
    trainer = GANOTrainer(model(tmp_path), reward, args, prompts(), None, tokenizer(), peft_config=lora)
    trainer.train()
    base = {name: value for name, value in trainer.model.get_base_model().state_dict().items() if "lora" not in name}
    for name, value in model(tmp_path).state_dict().items():
        assert torch.equal(base[name.replace("query_key_value.", "query_key_value.base_layer.")], value), name
    assert any(value.abs().sum() > 0 for name, value in trainer.model.state_dict().items() if "lora_B" in name)
    # The adapter is off in the reference: at first it equals the policy, later it does not.
    divergence = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 1e-6


def _small_gano(**settings):
    from tests.llm.tiny import SMALL

    return {**SMALL, "beta": 0.05, "max_steps": 3, **settings}


def test_gano_has_the_papers_settings(tmp_path):
    config = GANOConfig(str(tmp_path), bf16=False)
    assert (config.num_generations, config.num_iterations, config.epsilon, config.beta) == (4, 3, 0.2, 0.05)
    assert (config.learning_rate, config.lr_scheduler_type, config.max_completion_length) == (3e-6, "cosine", 53)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert (config.shaping, config.kl_in, config.dual) == ("ano", "reward", "paper")


@pytest.mark.parametrize("settings", [{"num_iterations": 1}, {"num_iterations": 2, "steps_per_generation": 1}])
def test_a_shape_that_cannot_act_is_warned_about(settings, tmp_path):
    settings = {"gradient_accumulation_steps": 2, **settings}
    with pytest.warns(UserWarning, match="shaping='ano' cannot act: each completion is used for one update only"):
        make(tmp_path, shaping="ano", **OURS, **settings)
    make(tmp_path, shaping="ppo", **OURS, **settings)  # where nothing is lost


def test_settings_of_another_trainer_are_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a GRPOConfig; allowed are ShapedGRPOConfig and GANOConfig"):
        make(tmp_path, trainer=ShapedGRPOTrainer, config=GRPOConfig)
