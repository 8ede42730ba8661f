"""The KL divergence in the reward, against sums that are worked out from the models' own logits."""

import pytest
import torch

from sb3_ano.llm import ShapedGRPOConfig, ShapedGRPOTrainer
from tests.llm.tiny import SMALL, log_probabilities, loss, make, model, reward, rollout, scores_of, sometimes, tokenizer


def trainer(folder, shaping="spo", **settings):
    settings = {"noise": 0.03, "beta": 0.5, "kl_in": "reward", **settings}
    return make(folder, ShapedGRPOTrainer, ShapedGRPOConfig, shaping=shaping, **settings)


@torch.no_grad()
def divergence(folder, inputs, mask=None) -> torch.Tensor:
    policy, reference = model(folder, noise=0.03), model(folder)
    difference = log_probabilities(policy, inputs) - log_probabilities(reference, inputs)
    return (difference * (inputs["completion_mask"] if mask is None else mask)).sum(1)


def normalized(rewards: torch.Tensor) -> torch.Tensor:
    groups = rewards.view(-1, SMALL["num_generations"])
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


@pytest.mark.parametrize("iterations", [3, 1], ids=["old log-probabilities kept", "none kept"])
def test_it_lowers_the_reward_before_the_group_is_normalized(iterations, tmp_path):
    rewards = [reward]
    ours = trainer(tmp_path, "spo" if iterations > 1 else "ppo", num_iterations=iterations, reward=rewards)
    assert rewards == [reward]  # the caller's list is left alone
    inputs = rollout(ours)
    assert ("old_per_token_logps" in inputs) == (iterations > 1)
    expected = normalized(scores_of(inputs) - 0.5 * divergence(tmp_path, inputs))
    torch.testing.assert_close(inputs["advantages"], expected, rtol=1e-4, atol=1e-4)
    # The divergence matters here: without it, the advantages are others.
    assert (inputs["advantages"] - normalized(scores_of(inputs))).abs().max() > 0.01
    logged = divergence(tmp_path, inputs).mean().item()
    assert ours._metrics["train"]["rewards/kl/mean"] == [pytest.approx(logged, rel=1e-4)]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_is_not_in_the_loss_too_and_logged_as_trl_does(level, tmp_path):
    others = ({}, {"beta": 0.0, "kl_in": "loss"}, {"kl_in": "loss"})
    ours, without, in_loss = (trainer(tmp_path, importance_sampling_level=level, **other) for other in others)
    inputs = rollout(ours)
    assert loss(ours, inputs) == loss(without, inputs)
    assert loss(ours, inputs) != loss(in_loss, inputs)
    assert ours._metrics["train"]["kl"][0] == pytest.approx(in_loss._metrics["train"]["kl"][0], rel=1e-5)
    assert "kl" not in without._metrics["train"]
    assert ours.beta == 0.5  # which the next generation needs
    with pytest.raises(ValueError, match="beta=0.0 is not allowed; allowed are positive finite numbers"):  # review N8
        trainer(tmp_path, beta=0.0)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_tokens_that_the_policy_did_not_write_do_not_count(tmp_path):
    generator = torch.Generator().manual_seed(5)
    written: list[list[int]] = []

    def generate(prompts, trainer):
        ids = tokenizer()(text=prompts)["input_ids"]
        completions = [torch.randint(3, 30, (6,), generator=generator).tolist() for _ in prompts]
        written.extend(torch.randint(0, 2, (6,), generator=generator).tolist() for _ in prompts)
        some = torch.tensor(completions)  # asking for log-probabilities here must not be taken for the scoring (review B8)
        trainer._get_per_token_logps_and_entropies(trainer.model, some, torch.ones_like(some), 3)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": written[-len(prompts) :]}

    ours = trainer(tmp_path, named={"rollout_func": generate})
    expected = divergence(tmp_path, rollout(ours), torch.tensor(written)).mean().item()
    assert ours._metrics["train"]["rewards/kl/mean"] == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_completions_that_nothing_could_score_stay_out(tmp_path):
    advantages = rollout(trainer(tmp_path, reward=sometimes))["advantages"].view(-1, 4)
    assert (advantages[:, 1] == 0.0).all()
    assert (advantages[:, [0, 2, 3]] != 0.0).all()
