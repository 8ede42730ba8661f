"""The trainer against TRL's own: losses, gradients and whole trainings."""

import math

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from sb3_ano.llm import GANOConfig, GANOTrainer, ShapedGRPOConfig, ShapedGRPOTrainer
from sb3_ano.llm.config import LOSS_TYPES
from sb3_ano.shaping import ano, ratio_form, surrogate
from tests.llm import tiny
from tests.llm.tiny import log_probabilities, loss, make, model, parameters, prompts, reward, rollout, tokenizer

LEVELS = ["token", "sequence"]


def clip(x: torch.Tensor) -> torch.Tensor:
    """PPO's shape, but not the package's own, which TRL's clip stands for."""
    return torch.minimum(x, torch.ones_like(x))


def shaped(folder, shaping, **settings):
    return make(folder, ShapedGRPOTrainer, ShapedGRPOConfig, named={"shaping": shaping}, **settings)


def gradient(trainer, inputs) -> torch.Tensor:
    gradients = torch.autograd.grad(loss(trainer, inputs), list(trainer.model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in gradients if g is not None])


def trained(trainer):
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
    stock, ours = make(tmp_path, noise=0.03, **settings), shaped(tmp_path, clip, noise=0.03, **settings)
    expected = loss(stock, inputs).item()
    assert abs(loss(ours, inputs).item() - expected) <= 1e-6 * max(1.0, abs(expected))
    assert difference(gradient(ours, inputs), gradient(stock, inputs)) < 2e-6
    # The clip has had something to do on both sides, or equality would prove little.
    metrics = ours._metrics["train"]
    assert metrics["ratio/outside_low"][0] > 0.02
    assert metrics["ratio/outside_high"][0] > 0.02
    narrower = shaped(tmp_path, clip, noise=0.03, **{**settings, "epsilon": epsilon / 4})
    assert difference(gradient(narrower, inputs), gradient(stock, inputs)) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": name, "importance_sampling_level": level} for name in LOSS_TYPES for level in LEVELS),
        {"beta": 0.1, "use_bias_correction_kl": None},  # which stands for TRL's default
        {"delta": 1.2, "off_policy_mask_threshold": 0.01},
        *({"loss_type": name, "epsilon_high": 5.0} for name in ("cispo", "sapo", "vespo")),
    ],
    ids=str,
)
def test_a_training_with_ppos_shape_is_trls_bit_for_bit(settings, tmp_path):
    """Also with what no other shape takes, see test_llm_cli.py."""
    ours = trained(make(tmp_path, ShapedGRPOTrainer, ShapedGRPOConfig, shaping="ppo", max_steps=4, **settings))
    default = {"use_bias_correction_kl": True} if "beta" in settings else {}
    stock = trained(make(tmp_path, max_steps=4, **{**settings, **default}))
    assert torch.equal(parameters(ours), parameters(stock))
    if "beta" in settings:
        assert shaped(tmp_path, "spo", **settings).args.use_bias_correction_kl is False
    if settings.get("loss_type") == "grpo":
        assert not torch.equal(parameters(trained(shaped(tmp_path, "spo", max_steps=4, **settings))), parameters(stock))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shaping", ["ano", "spo", ("spo", "ano")], ids=str)
def test_the_loss_is_the_objective_averaged_as_trl_does(shaping, level, tmp_path):
    settings = {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "importance_sampling_level": level}
    inputs = rollout(make(tmp_path, **settings))
    trainer = shaped(tmp_path, shaping, noise=0.03, **settings)
    log_ratio = log_probabilities(model(tmp_path, noise=0.03).train(), inputs) - inputs["old_per_token_logps"]
    mask = inputs["completion_mask"]
    ratios = log_ratio.exp()[mask.bool()]
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1)).unsqueeze(1)
        ratios = log_ratio.exp()
    objective = surrogate(log_ratio, inputs["advantages"].unsqueeze(1), shaping, eps_low=0.1, eps_high=0.3)
    expected = -((objective * mask).sum(1) / mask.sum(1)).mean() / 2
    assert loss(trainer, inputs).item() == pytest.approx(expected.item(), rel=1e-5)
    assert trainer._metrics["train"]["ratio/mean"] == [pytest.approx(ratios.mean().item(), rel=1e-6)]


def test_the_sign_error_of_the_official_trainers():
    """As docs/llm.md says: the slopes, ratios that rise instead of falling, and the pair of shapes that reproduces it."""
    ratio = torch.tensor([0.6, 1.25, 2.0], dtype=torch.float64, requires_grad=True)
    f, g = ratio_form("ano", eps_low=0.2, eps_high=0.2)
    f_slopes, g_slopes = (torch.autograd.grad(form(ratio).sum(), ratio)[0] for form in (f, g))
    assert (f_slopes[0].item(), g_slopes[0].item()) == pytest.approx((2.21, -0.69), abs=0.005)
    assert (f_slopes[1:] < 0).all()
    assert (g_slopes[1:] > 0).all()
    objective = surrogate(ratio.log(), -torch.ones(3), (ano, lambda x: -ano(-x)), eps_low=0.2, eps_high=0.2)
    torch.testing.assert_close(objective, -f(ratio))


@pytest.mark.parametrize("distance", [3.0, 100.0])
@pytest.mark.parametrize("level", LEVELS)
def test_extreme_ratios_in_bfloat16_are_finite(level, distance, tmp_path):
    settings = {"importance_sampling_level": level, "bf16": True}
    inputs = rollout(make(tmp_path, **settings))
    inputs["old_per_token_logps"] += distance * torch.randn(inputs["completion_ids"].shape).sign()
    for shaping in ("ano", "spo"):
        ours = shaped(tmp_path, shaping, **settings)
        assert loss(ours, inputs).isfinite()
        assert gradient(ours, inputs).isfinite().all()
        assert all(math.isfinite(value) for values in ours._metrics["train"].values() for value in values)


def test_ratios_are_counted_where_the_mask_says(tmp_path):
    trainer = shaped(tmp_path, "ano", epsilon=0.25, epsilon_high=0.2)
    trainer.model.train()
    ratio, mask = torch.tensor([[1.0, 1.3, 0.5], [1.1, 9.0, 0.7]]), torch.tensor([[1, 1, 1], [1, 0, 1]])
    seen = [1.0, 1.3, 0.5, 1.1, 0.7]
    expected = {"ratio/mean": 4.6 / 5, "ratio/max": 1.3, "ratio/outside_low": 2 / 5, "ratio/outside_high": 1 / 5}
    expected["ratio/kl"] = sum(r - 1 - math.log(r) for r in seen) / 5
    trainer._log_ratio(ratio.log(), mask.bool())
    assert {name: value for name, (value,) in trainer._metrics["train"].items()} == pytest.approx(expected, rel=1e-5)
    trainer._log_ratio(ratio.log(), mask.bool() & False)  # nothing but padding
    assert {values[1] for values in trainer._metrics["train"].values()} == {0.0}


def test_evaluation_and_metrics(tmp_path):
    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 8, "beta": 0.05}
    settings |= {"missing_eos_penalty": 0.5, "reward_weights": [2.0]}
    trainer = trained(make(tmp_path, GANOTrainer, GANOConfig, **settings))
    train = [entry for entry in trainer.state.log_history if "loss" in entry]
    (evaluation,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluation["eval_ratio/mean"] == 1.0
    for name in ("ratio/mean", "ratio/max", "ratio/outside_low", "ratio/outside_high", "ratio/kl", "kl"):
        assert all(name in entry for entry in train), name
    generated = [entry for entry in train if "reward" in entry]
    for entry in generated:
        score, kl, missing_eos = (entry[f"rewards/{name}/mean"] for name in ("reward", "kl", "missing_eos"))
        assert entry["reward"] == pytest.approx(2.0 * score - 0.05 * kl - 0.5 * missing_eos, abs=1e-5)
    assert generated
    assert not any(name.startswith("clip_ratio/") for entry in train for name in entry)
    assert train[0]["ratio/kl"] == pytest.approx(0.0, abs=1e-6)
    assert train[2]["ratio/kl"] > 1e-5


@pytest.mark.parametrize("critic", [False, True])
def test_lora_trains_the_adapter_and_all_of_the_critic(critic, tmp_path):
    named = {"peft_config": LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM")}
    settings = {"beta": 0.05, "max_steps": 3, "named": named}
    trainer = tiny.critic_trainer(tmp_path, **settings) if critic else make(tmp_path, GANOTrainer, GANOConfig, **settings)
    start = [parameter.clone() for parameter in trainer.critic.parameters()] if critic else []
    trainer.train()
    base = {name: value for name, value in trainer.model.get_base_model().state_dict().items() if "lora" not in name}
    for name, value in model(tmp_path).state_dict().items():
        assert torch.equal(base[name.replace("query_key_value.", "query_key_value.base_layer.")], value), name
    assert any(value.abs().sum() > 0 for name, value in trainer.model.state_dict().items() if "lora_B" in name)
    assert not any(torch.equal(*pair) for pair in zip(start, trainer.critic.parameters() if critic else (), strict=True))
    # The adapter is off in the reference: at first it equals the policy, later it does not.
    divergence = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 1e-6


@pytest.mark.parametrize("settings", [{"num_iterations": 1}, {"num_iterations": 2, "steps_per_generation": 1}])
def test_a_shape_that_cannot_act_is_warned_about(settings, tmp_path):
    """The ratio is 1, where no shape changes the gradient."""
    with pytest.warns(UserWarning, match="shaping='ano' cannot act: each completion is used for one update only"):
        ours = shaped(tmp_path, "ano", **settings)
    stock = shaped(tmp_path, "ppo", **settings)  # which loses nothing
    inputs = rollout(stock)
    assert difference(gradient(ours, inputs), gradient(stock, inputs)) < 1e-5
    assert ours._metrics["train"]["ratio/mean"] == [1.0]


@pytest.mark.parametrize("shaping", ["ano", "ppo"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_loss_that_the_shape_cannot_act_on_is_an_error(calls, shaping, tmp_path, monkeypatch):
    ours = shaped(tmp_path, shaping)
    inputs = rollout(ours)
    compute = GRPOTrainer._compute_loss

    def other(self, model, inputs):
        return sum((compute(self, model, inputs) for _ in range(calls)), inputs["advantages"].mean())

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", other)
    with pytest.raises(RuntimeError, match=f"asked for log-probabilities {calls} times, not once"):
        loss(ours, inputs)


def test_completions_end_with_any_eos_token_of_the_model(tmp_path):
    """A penalty for completions that ended with another one than the tokenizer's."""
    trainer = make(tmp_path, ShapedGRPOTrainer, ShapedGRPOConfig, missing_eos_penalty=0.5)
    trainer.eos_token_ids = [tokenizer().eos_token_id, 7]
    assert trainer._missing_eos([[5, 7], [5, tokenizer().eos_token_id], [5, 6], [7, 5], []]) == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert trainer.reward_weights.tolist() == [1.0, -0.5]


def test_fewer_prompts_than_a_generation_needs_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="train_dataset has 3 prompts; each generation needs 4, which a smaller"):
        make(tmp_path, GANOTrainer, GANOConfig, data=prompts().select(range(3)))
    make(tmp_path, GANOTrainer, GANOConfig, data=prompts().select(range(4)))


def rewarded(folder, shaping="spo", **settings):
    """With the KL divergence in the reward, which is compared with sums worked out from the models' own logits."""
    settings = {"noise": 0.03, "beta": 0.5, "kl_in": "reward", **settings}
    return make(folder, ShapedGRPOTrainer, ShapedGRPOConfig, shaping=shaping, **settings)


@torch.no_grad()
def divergence(folder, inputs, mask=None) -> torch.Tensor:
    policy, reference = model(folder, noise=0.03), model(folder)
    difference = log_probabilities(policy, inputs) - log_probabilities(reference, inputs)
    return (difference * (inputs["completion_mask"] if mask is None else mask)).sum(1)


def normalized(rewards: torch.Tensor) -> torch.Tensor:
    groups = rewards.view(-1, tiny.SMALL["num_generations"])
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


@pytest.mark.parametrize("iterations", [3, 1], ids=["old log-probabilities kept", "none kept"])
def test_it_lowers_the_reward_before_the_group_is_normalized(iterations, tmp_path):
    rewards = [reward]
    ours = rewarded(tmp_path, "spo" if iterations > 1 else "ppo", num_iterations=iterations, reward=rewards)
    assert rewards == [reward]  # the caller's list is left alone
    inputs = rollout(ours)
    assert ("old_per_token_logps" in inputs) == (iterations > 1)
    expected = normalized(tiny.scores_of(inputs) - 0.5 * divergence(tmp_path, inputs))
    torch.testing.assert_close(inputs["advantages"], expected, rtol=1e-4, atol=1e-4)
    # The divergence matters here: without it, the advantages are others.
    assert (inputs["advantages"] - normalized(tiny.scores_of(inputs))).abs().max() > 0.01
    logged = divergence(tmp_path, inputs).mean().item()
    assert ours._metrics["train"]["rewards/kl/mean"] == [pytest.approx(logged, rel=1e-4)]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_is_not_in_the_loss_too_and_logged_as_trl_does(level, tmp_path):
    others = ({}, {"beta": 0.0, "kl_in": "loss"}, {"kl_in": "loss"})
    ours, without, in_loss = (rewarded(tmp_path, importance_sampling_level=level, **other) for other in others)
    inputs = rollout(ours)
    assert loss(ours, inputs) == loss(without, inputs)
    assert loss(ours, inputs) != loss(in_loss, inputs)
    assert ours._metrics["train"]["kl"][0] == pytest.approx(in_loss._metrics["train"]["kl"][0], rel=1e-5)
    assert "kl" not in without._metrics["train"]
    assert ours.beta == 0.5  # which the next generation needs
    with pytest.raises(ValueError, match="beta=0.0 is not allowed; allowed are positive finite numbers"):
        rewarded(tmp_path, beta=0.0)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_tokens_that_the_policy_did_not_write_do_not_count(tmp_path):
    generator = torch.Generator().manual_seed(5)
    written: list[list[int]] = []

    def generate(prompts, trainer):
        ids = tokenizer()(text=prompts)["input_ids"]
        completions = [torch.randint(3, 30, (6,), generator=generator).tolist() for _ in prompts]
        written.extend(torch.randint(0, 2, (6,), generator=generator).tolist() for _ in prompts)
        some = torch.tensor(completions)  # asking for log-probabilities here must not be taken for the scoring
        trainer._get_per_token_logps_and_entropies(trainer.model, some, torch.ones_like(some), 3)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": written[-len(prompts) :]}

    ours = rewarded(tmp_path, named={"rollout_func": generate})
    expected = divergence(tmp_path, rollout(ours), torch.tensor(written)).mean().item()
    assert ours._metrics["train"]["rewards/kl/mean"] == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_completions_that_nothing_could_score_stay_out(tmp_path):
    advantages = rollout(rewarded(tmp_path, reward=tiny.sometimes))["advantages"].view(-1, 4)
    assert (advantages[:, 1] == 0.0).all()
    assert (advantages[:, [0, 2, 3]] != 0.0).all()
