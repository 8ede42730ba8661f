"""The critic: its formulas against a table and closed forms, its losses against the models' own outputs, and its updates.

Data and reward models: what can be read, and what the scores are.
"""

import math
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from sb3_ano.llm import ANOTrainer, GANOConfig, GANOTrainer, LearnedReward, PPOTrainer, SPOTrainer
from sb3_ano.llm.data import load_split
from sb3_ano.llm.ppo import Critic, gae, token_rewards, value_loss, whiten
from sb3_ano.llm.resume import load_weights
from sb3_ano.llm.training import run
from sb3_ano.shaping import surrogate
from tests.llm import tiny
from tests.llm.tiny import classifier, critic_trainer, log_probabilities, loss, model, prompts, rollout, tokenizer


def flat(module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def test_a_table_worked_out_by_hand():
    """Four tokens, of which a tool wrote the third one, and one token before padding; gamma 0.9, lambda 0.5, beta 0.5."""
    mask, kl = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]), torch.tensor([[0.2, -0.4, 9.0, 0.6], [0.4, 9.0, 9.0, 9.0]])
    scores = torch.tensor([2.0, 1.0])
    rewards = token_rewards(scores, kl, mask, 0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.2, 0.0, 1.7], [0.8, 0.0, 0.0, 0.0]]))
    assert token_rewards(scores, None, mask, 0.5).tolist() == [[0.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0]]
    # Errors: 1.7 - 0.8 = 0.9; 0.2 + 0.9 * 0.8 - 0.5 = 0.42; -0.1 + 0.9 * 0.5 - 1.0 = -0.65; and 0.8 - 0.5
    advantages = gae(rewards, torch.tensor([[1.0, 0.5, 7.0, 0.8], [0.5, 7.0, 7.0, 7.0]]), mask, 0.9, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.27875, 0.825, 0.0, 0.9], [0.3, 0.0, 0.0, 0.0]]))
    whitened = whiten(advantages[:1], mask[:1], lambda sums: sums)  # mean 0.482083, variance 0.871113 / 2
    torch.testing.assert_close(whitened, torch.tensor([[-1.152834, 0.519596, 0.0, 0.633239]]), rtol=1e-5, atol=1e-5)
    # Values that moved by 0.5, away from the return, towards it, and by 0.1 only
    losses, clipped = value_loss(torch.tensor([1.5, 0.5, 1.1]), torch.ones(3), torch.zeros(3), 0.2)
    torch.testing.assert_close(losses, torch.tensor([1.125, 0.32, 0.605]))
    assert clipped.tolist() == [0.0, 1.0, 0.0]


def test_the_critic_starts_as_the_reward_model(tmp_path):
    """As a copy, without dropout, which would make values differ between generation and loss."""
    scores = LearnedReward.load(classifier(tmp_path), tokenizer(), "cpu")
    for module in scores.model.modules():
        module.p = 0.5
    trainer = critic_trainer(tmp_path, reward=[tiny.reward, scores], value_model=None)
    critic = trainer.accelerator.unwrap_model(trainer.critic).model
    assert torch.equal(flat(critic), flat(scores.model))
    assert critic is not scores.model
    assert {module.p for module in critic.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


def test_padding_on_the_left_shifts_no_positions():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": 33, "num_labels": 1}
    critic = Critic(GPT2ForSequenceClassification(GPT2Config(**sizes)).eval())  # which learns positions
    ids, mask = torch.tensor([[1, 1, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
    torch.testing.assert_close(critic(ids, mask)[:, 2:], critic(ids[:, 2:], mask[:, 2:]))
    with pytest.raises(ValueError, match="value_model is a GPT2ForSequenceClassification; allowed are classifiers"):
        Critic(GPT2ForSequenceClassification(GPT2Config(**{**sizes, "num_labels": 2})))


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
@pytest.mark.parametrize("trainer_class", [ANOTrainer, SPOTrainer, PPOTrainer])
def test_rewards_advantages_and_loss_are_those_of_the_models_own_outputs(trainer_class, loss_type, tmp_path):
    settings = {"loss_type": loss_type, "epsilon_high": 0.3, "missing_eos_penalty": 1.0, "beta": 0.5}
    batch = rollout(trainer := critic_trainer(tmp_path, trainer_class, noise=0.03, **settings))
    mask, ids = batch["completion_mask"], batch["completion_ids"]
    ends = ids * mask == tokenizer().eos_token_id
    scores = tiny.scores_of(batch) - 1.0 * ~(ends & mask.bool()).any(1)
    with torch.no_grad():
        logps = log_probabilities(model(tmp_path, noise=0.03), batch)
        kl = (logps - log_probabilities(model(tmp_path), batch)) * mask
    # One by one, and without padding
    scorer = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path))
    scorer.config.pad_token_id = None  # a policy may write it
    values = torch.zeros_like(logps)
    with torch.no_grad():
        for row, own in enumerate(mask.sum(1).tolist()):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            for token in range(own):
                values[row, token] = scorer(torch.cat([prompt, ids[row, :token]]).unsqueeze(0)).logits.item()
    torch.testing.assert_close(batch["values"] * mask, values, rtol=1e-4, atol=1e-4)
    expected = gae(token_rewards(scores, kl, mask, 0.5), values, mask, 1.0, 0.95)
    torch.testing.assert_close((batch["returns"] - batch["values"]) * mask, expected, rtol=1e-3, atol=1e-3)
    own = expected[mask.bool()]
    torch.testing.assert_close(batch["advantages"], (expected - own.mean()) / own.std() * mask, rtol=1e-3, atol=1e-3)
    means = batch["advantages"].sum(1) / mask.sum(1)
    assert list(trainer._logs["advantages"]) == pytest.approx(means.tolist(), rel=1e-5)
    assert len(means) == len(trainer._logs["prompt"]) == 16
    assert trainer._metrics["train"]["rewards/kl/mean"] == [pytest.approx(kl.sum(1).mean().item(), rel=1e-4)]
    assert trainer._metrics["train"]["rewards/missing_eos/mean"] == [pytest.approx(1 - ends.any(1).float().mean().item())]

    with torch.no_grad():  # otherwise the ratio is 1, and the values are the old ones
        for parameter in (*trainer.model.parameters(), *trainer.critic.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    half = {name: value[:8] if value.dim() else value for name, value in batch.items()}
    log_ratio = log_probabilities(trainer.model, half) - half["old_per_token_logps"]
    policy = -surrogate(log_ratio, half["advantages"], trainer_class.algorithm, eps_low=0.2, eps_high=0.3)
    new = trainer._values(trainer.critic, half)
    errors = (new - half["returns"]) ** 2, (half["values"] + (new - half["values"]).clamp(-0.2, 0.2) - half["returns"]) ** 2
    total = ((policy + 0.1 * 0.5 * torch.maximum(*errors)) * half["completion_mask"]).sum()
    count = half["completion_mask"].sum() if loss_type == "bnpo" else batch["num_items_in_batch"] / 2
    assert loss(trainer, half).item() == pytest.approx((total / count / 2).item(), rel=1e-5)
    metrics = trainer._metrics["train"]
    assert 0.0 < metrics["critic/clip_ratio"][0] < 1.0
    assert metrics["ratio/outside_high"][0] > 0.0
    value = (new * half["completion_mask"]).sum() / half["completion_mask"].sum()
    assert metrics["critic/value"] == [pytest.approx(value.item(), rel=1e-5)]


def test_completions_without_a_score_teach_nothing(tmp_path):
    # With the KL divergence in the loss, the others have nothing but their score.
    batch = rollout(critic_trainer(tmp_path, reward=tiny.sometimes, missing_eos_penalty=0.0, beta=0.3, kl_in="loss"))
    mask, scored = batch["completion_mask"], torch.arange(16) % 4 != 1
    expected = gae(token_rewards(torch.arange(1.0, 17.0), None, mask, 0.0), batch["values"], mask, 1.0, 0.95)
    torch.testing.assert_close(batch["returns"], batch["values"] + expected * scored.unsqueeze(1))
    assert (batch["advantages"][~scored] == 0.0).all()
    assert (batch["advantages"][scored] != 0.0).any(1).all()


def test_an_infinite_reward_is_named(tmp_path):
    with pytest.raises(ValueError, match="a reward is infinite; allowed are finite numbers"):
        critic_trainer(tmp_path, reward=lambda completion_ids, **_: [float("inf")] * len(completion_ids)).train()


def test_gradients_are_accumulated_clipped_and_cleared(tmp_path):
    """Plain gradient descent moves each model by the learning rate times the clipped norm, in every update."""
    clipped = {"optim": "sgd", "max_grad_norm": 1e-3, "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    trainer = critic_trainer(tmp_path, max_steps=3, **clipped)
    models = trainer.model, trainer.critic
    before = list(map(flat, models))
    trainer.train()
    assert all(1e-3 < (flat(each) - start).norm() <= 3.001e-3 for each, start in zip(models, before, strict=True))
    assert all(parameter.grad is None for parameter in trainer.critic.parameters())
    # Without clipping, both passes of an update count.
    settings = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 1.0, "max_steps": 1}
    fresh, trainer = (critic_trainer(tmp_path, **settings) for _ in range(2))
    trainer.train()
    total = sum(loss(fresh, part) for part in trainer._buffered_inputs)
    gradients = torch.autograd.grad(total, [*fresh.model.parameters(), *fresh.critic.parameters()], allow_unused=True)
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(tiny.parameters(fresh) - tiny.parameters(trainer), expected, rtol=1e-3, atol=1e-6)


def test_a_training_improves_the_critic_and_its_checkpoint_starts_another(tmp_path):
    settings = {"max_steps": 12, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "vf_coef": 1.0}
    trainer = critic_trainer(tmp_path, weight_decay=0.1, **settings)
    trainer.train()
    losses = [entry["critic/loss"] for entry in trainer.state.log_history if "critic/loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0, 0.1, 0.0]
    assert all(parameter.dim() == 2 for parameter in trainer.optimizer.param_groups[2]["params"])
    assert all(parameter.dim() == 1 for parameter in trainer.optimizer.param_groups[3]["params"])
    trainer.save_critic(tmp_path / "critic")
    again = critic_trainer(tmp_path, value_model=str(tmp_path / "critic"))
    assert torch.equal(flat(again.critic), flat(trainer.critic))
    trainer.train()  # which finds the critic in the optimizer


def test_a_language_model_as_critic_gets_a_new_score(tmp_path):
    model(tmp_path)
    settings = {"value_model": str(tmp_path / "model"), "bf16": True, "gradient_checkpointing": True}
    trainer = critic_trainer(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, **settings)
    trainer.train()
    (evaluation,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert math.isfinite(evaluation["eval_loss"])
    assert math.isfinite(evaluation["eval_critic/loss"])


def test_a_critic_that_lacks_layers_is_not_filled_with_random_ones(tmp_path):
    trainer = critic_trainer(tmp_path)
    trainer.save_critic(tmp_path / "critic")
    for directory in (tmp_path / "model", tmp_path / "critic"):
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" not in name}
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks .*layers.0.mlp.*; only the layer 'score' may be new"):
            critic_trainer(tmp_path, value_model=str(directory))
    with pytest.raises(ValueError, match=r"critic is damaged: it lacks .*layers.0.mlp"):
        load_weights(trainer.critic.model, tmp_path / "critic")


def test_the_hub_gets_the_final_policy_once_and_the_critic_on_request(tmp_path, monkeypatch):
    """It got the weights twice, with everything else in the output directory."""
    pushed: list[list[str]] = []

    def upload_folder(folder_path, token, **_):
        assert token == "hf_secret"
        pushed.append(sorted(str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*.safetensors")))
        contents = [path.read_bytes() for path in Path(folder_path).rglob("*") if path.is_file()]
        assert not any(b"hf_secret" in content for content in contents)  # transformers pickles all settings
        (done := Future()).set_result(None)
        return done

    hub = SimpleNamespace(create_repo=lambda *_, **__: SimpleNamespace(repo_id="me/out"), upload_folder=upload_folder)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    for push_critic in (False, True):
        run(critic_trainer(tmp_path, max_steps=1, push_to_hub=True, push_critic=push_critic, hub_token="hf_secret"))
        assert (tmp_path / "final" / "README.md").read_text().count(f"Model Card for {tmp_path.name}") == 1
    assert pushed == [["model.safetensors"], ["critic/model.safetensors", "model.safetensors"]]
    assert (tmp_path / "critic" / "model.safetensors").is_file()
    # With this strategy, another function of transformers pickles the settings.
    saving = {"save_strategy": "steps", "save_steps": 1, "hub_strategy": "all_checkpoints", "hub_token": "hf_secret"}
    critic_trainer(tmp_path / "all", max_steps=1, push_to_hub=True, **saving).train()
    assert len(pushed) == 4


def test_a_dataset_is_read_from_a_directory_or_a_file(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    written = datasets.Dataset.from_list(rows)
    written.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=written, test=written.select([1])).save_to_disk(str(tmp_path / "two"))
    for name in ("rows.jsonl", "files/train.jsonl"):
        written.to_json(tmp_path / name)
    written.to_csv(tmp_path / "rows.csv")
    written.to_parquet(tmp_path / "rows.parquet")
    for name in ("one", "two", "rows.jsonl", "rows.csv", "rows.parquet", "files"):
        assert load_split(str(tmp_path / name), None, "train").to_list() == rows, name
    assert load_split(str(tmp_path / "two"), None, "test").to_list() == rows[1:]


def test_a_reward_model_scores_what_the_policy_wrote_with_its_end(tmp_path):
    """The same score as of the whole text, one at a time and without padding, at its last token."""
    scores = LearnedReward.load(classifier(tmp_path), tokenizer(), "cpu")
    prompt = prompts()["prompt"][0]
    completions = [tokenizer()(text)["input_ids"] for text in (" anna won boat .", " ben")]
    completions[0].append(tokenizer().eos_token_id)
    found = scores([prompt, prompt], completion_ids=completions)
    bare = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path))
    with torch.no_grad():
        alone = [bare(torch.tensor([tokenizer()(prompt)["input_ids"] + ids])).logits.item() for ids in completions]
    assert found == pytest.approx(alone, abs=1e-5)
    assert scores([prompt], completion_ids=[completions[0][:-1]]) != pytest.approx(found[:1], abs=1e-4)
    assert scores([prompt], [" anna won boat ."]) == pytest.approx(found[:1], abs=1e-6)  # a text ends


def test_prompts_of_messages_are_scored_as_the_policy_has_seen_them(tmp_path):
    """They were an error of the tokenizer. The reward model's own tokenizer has no chat template."""
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}TL;DR:{% endif %}"
    chat = tiny.chatty(template)
    scores = LearnedReward.load(classifier(tmp_path), chat, "cpu")
    text = prompts()["prompt"][0].removesuffix("\nTL;DR:")
    completion = tokenizer()(" anna won boat .")["input_ids"]
    messages = [{"role": "user", "content": text}]
    assert scores([messages], None, [completion]) == scores([text + "\nTL;DR:"], None, [completion])
    scores.chat_template_kwargs = {"add_generation_prompt": False}
    with pytest.raises(TypeError, match="add_generation_prompt"):  # they reach the template
        scores([messages], None, [completion])
    scores.chat_template_kwargs = {}
    data = datasets.Dataset.from_dict({"prompt": [messages] * 4})
    rollout(GANOTrainer(model(tmp_path), scores, GANOConfig(str(tmp_path), **tiny.SMALL), data, None, chat))


def test_adapters_are_reward_models(tmp_path):
    base = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path))
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["query_key_value"], task_type="SEQ_CLS"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter.add_(0.1 if "lora_B" in name or "modules_to_save" in name else 0.0)
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer().save_pretrained(tmp_path / "adapter")
    args = [prompts()["prompt"][0]], None, [tokenizer()(" ben")["input_ids"]]
    expected = LearnedReward(adapted.merge_and_unload(), tokenizer())(*args)
    assert LearnedReward.load(str(tmp_path / "adapter"), tokenizer(), "cpu")(*args) == pytest.approx(expected, abs=1e-5)
    assert LearnedReward.load(classifier(tmp_path), tokenizer(), "cpu")(*args) != pytest.approx(expected, abs=1e-3)
