"""The KL divergence in the reward, against sums that are worked out from the models' own logits."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from sb3_ano.llm import ShapedGRPOConfig, ShapedGRPOTrainer
from tests.llm.tiny import SMALL, make, model, prompts, reward, tokenizer

OURS = {"trainer": ShapedGRPOTrainer, "config": ShapedGRPOConfig, "noise": 0.03, "beta": 0.5, "kl_in": "reward"}


def scored(trainer) -> dict:
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def loss(trainer, inputs) -> torch.Tensor:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(trainer.model, inputs)


def log_probabilities(policy, inputs) -> torch.Tensor:
    mask = inputs["completion_mask"]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def divergence(folder, inputs, mask=None) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(folder / "model")
    difference = log_probabilities(model(folder, noise=0.03), inputs) - log_probabilities(reference, inputs)
    return (difference * (inputs["completion_mask"] if mask is None else mask)).sum(1)


def normalised(rewards: torch.Tensor) -> torch.Tensor:
    groups = rewards.view(-1, SMALL["num_generations"])
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def own_rewards(inputs) -> torch.Tensor:
    completions = zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
    return torch.tensor(reward([ids[mask.bool()].tolist() for ids, mask in completions]))


@pytest.mark.parametrize("iterations", [3, 1], ids=["old log-probabilities kept", "none kept"])
def test_it_lowers_the_reward_before_the_group_is_normalised(iterations, tmp_path):
    trainer = make(tmp_path, shaping="spo" if iterations > 1 else "ppo", num_iterations=iterations, **OURS)
    inputs = scored(trainer)
    assert ("old_per_token_logps" in inputs) == (iterations > 1)
    expected = normalised(own_rewards(inputs) - 0.5 * divergence(tmp_path, inputs))
    torch.testing.assert_close(inputs["advantages"], expected, rtol=1e-4, atol=1e-4)
    # The divergence matters here: without it, the advantages are others.
    assert (inputs["advantages"] - normalised(own_rewards(inputs))).abs().max() > 0.01
    assert trainer._metrics["train"]["rewards/kl/mean"] == [
        pytest.approx(divergence(tmp_path, inputs).mean().item(), rel=1e-4)
    ]


def test_it_is_not_in_the_loss_too(tmp_path):
    trainer, without = make(tmp_path, shaping="spo", **OURS), make(tmp_path, shaping="spo", **{**OURS, "beta": 0.0})
    inputs = scored(trainer)
    assert loss(trainer, inputs) == loss(without, inputs)
    assert "kl" in trainer._metrics["train"]
    assert trainer.beta == 0.5  # which the next generation needs


def test_the_reported_divergence_is_trls(tmp_path):
    """The same number that TRL reports with the divergence in the loss."""
    trainer, in_loss = make(tmp_path, shaping="spo", **OURS), make(tmp_path, shaping="spo", **{**OURS, "kl_in": "loss"})
    inputs = scored(trainer)
    assert loss(trainer, inputs) != loss(in_loss, inputs)
    assert trainer._metrics["train"]["kl"] == pytest.approx(in_loss._metrics["train"]["kl"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_tokens_that_the_policy_did_not_write_do_not_count(tmp_path):
    generator = torch.Generator().manual_seed(5)
    written: list[list[int]] = []

    def rollout(prompts, trainer):
        ids = tokenizer()(text=prompts)["input_ids"]
        completions = [torch.randint(3, 30, (6,), generator=generator).tolist() for _ in prompts]
        own = [torch.randint(0, 2, (6,), generator=generator).tolist() for _ in prompts]
        written.extend(own)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": own}

    args = ShapedGRPOConfig(str(tmp_path), **{**SMALL, "beta": 0.5, "kl_in": "reward"})
    policy = model(tmp_path, noise=0.03)
    trainer = ShapedGRPOTrainer(policy, reward, args, prompts(), None, tokenizer(), rollout_func=rollout)
    inputs = scored(trainer)
    expected = divergence(tmp_path, inputs, torch.tensor(written))
    assert trainer._metrics["train"]["rewards/kl/mean"] == [pytest.approx(expected.mean().item(), rel=1e-4)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_completions_that_nothing_could_score_stay_out(tmp_path):
    def sometimes(completion_ids, **_):
        return [None if index % 4 == 1 else float(index) for index in range(len(completion_ids))]

    args = ShapedGRPOConfig(str(tmp_path), **{**SMALL, "beta": 0.5, "kl_in": "reward"})
    trainer = ShapedGRPOTrainer(model(tmp_path, noise=0.03), sometimes, args, prompts(), None, tokenizer())
    advantages = scored(trainer)["advantages"].view(-1, 4)
    assert (advantages[:, 1] == 0.0).all()
    assert (advantages[:, [0, 2, 3]] != 0.0).all()


def test_the_callers_list_of_rewards_is_left_alone(tmp_path):
    rewards = [reward]
    args = ShapedGRPOConfig(str(tmp_path), **{**SMALL, "beta": 0.5, "kl_in": "reward"})
    ShapedGRPOTrainer(model(tmp_path), rewards, args, prompts(), None, tokenizer())
    assert rewards == [reward]
