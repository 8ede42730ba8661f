"""Data and reward models: what can be read, and what the scores are."""

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPTNeoXForSequenceClassification

from sb3_ano.llm import GANOConfig, GANOTrainer, LearnedReward
from sb3_ano.llm.data import load_split
from tests.llm.tiny import SMALL, chatty, classifier, model, prompts, rollout, tokenizer


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
    bare = GPTNeoXForSequenceClassification.from_pretrained(classifier(tmp_path))
    with torch.no_grad():
        alone = [bare(torch.tensor([tokenizer()(prompt)["input_ids"] + ids])).logits.item() for ids in completions]
    assert found == pytest.approx(alone, abs=1e-5)
    assert scores([prompt], completion_ids=[completions[0][:-1]]) != pytest.approx(found[:1], abs=1e-4)
    assert scores([prompt], [" anna won boat ."]) == pytest.approx(found[:1], abs=1e-6)  # a text ends


def test_prompts_of_messages_are_scored_as_the_policy_has_seen_them(tmp_path):
    """Review B7: they were an error of the tokenizer. The reward model's own tokenizer has no chat template."""
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}TL;DR:{% endif %}"
    chat = chatty(template)
    scores = LearnedReward.load(classifier(tmp_path), chat, "cpu")
    text = prompts()["prompt"][0].removesuffix("\nTL;DR:")
    completion = tokenizer()(" anna won boat .")["input_ids"]
    messages = [{"role": "user", "content": text}]
    assert scores([messages], None, [completion]) == scores([text + "\nTL;DR:"], None, [completion])
    data = datasets.Dataset.from_dict({"prompt": [messages] * 4})
    rollout(GANOTrainer(model(tmp_path), scores, GANOConfig(str(tmp_path), **SMALL), data, None, chat))


def test_adapters_are_reward_models(tmp_path):
    """Review B1."""
    base = GPTNeoXForSequenceClassification.from_pretrained(classifier(tmp_path))
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
