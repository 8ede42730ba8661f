"""Data, tokenizers and reward models: what can be read, and one line for what cannot."""

import json

import datasets
import pytest
import torch
from transformers import GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

from sb3_ano.llm import GANOConfig, GANOTrainer, LearnedReward
from sb3_ano.llm.data import check_prompts, load_split
from tests.llm.tiny import SMALL, model, prompts, reward, tokenizer


def dataset(**columns):
    return datasets.Dataset.from_dict(columns)


def test_a_dataset_is_read_from_a_directory_or_a_file(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    written = datasets.Dataset.from_list(rows)
    written.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=written, test=written.select([1])).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "files").mkdir()
    for path in (tmp_path / "rows.jsonl", tmp_path / "files" / "train.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("one", "two", "rows.jsonl", "files"):
        assert load_split(str(tmp_path / name), "train").to_list() == rows, name
    assert load_split(str(tmp_path / "two"), "test").to_list() == rows[1:]
    with pytest.raises(ValueError, match="one' has no split 'test'; it has 'train'"):
        load_split(str(tmp_path / "one"), "test")
    with pytest.raises(OSError, match="someone/nothing"):
        load_split("someone/nothing", "train")
    (tmp_path / "notes.txt").write_text("prompt")
    with pytest.raises(ValueError, match="notes.txt' cannot be read; allowed file names end in .json"):
        load_split(str(tmp_path / "notes.txt"), "train")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "data has no column 'prompt'; it has text"),
        ({"prompt": ["a", "  ", "b"]}, "data has an empty prompt in row 1; every prompt needs text"),
        ({"prompt": [[], [{"role": "user", "content": "a"}]]}, "data has an empty prompt in row 0"),
        ({"prompt": []}, "data has no rows"),
        ({"prompt": [[{"role": "user", "content": "a"}]]}, None),
    ],
    ids=str,
)
def test_prompts_are_checked(columns, message, tmp_path):
    if message is None:
        return check_prompts(dataset(**columns), "data")
    with pytest.raises(ValueError, match=message):
        check_prompts(dataset(**columns), "data")
    with pytest.raises(ValueError, match=message.replace("data", "train_dataset")):
        GANOTrainer(model(tmp_path), reward, GANOConfig(str(tmp_path), **SMALL), dataset(**columns), None, tokenizer())


def test_a_tokenizer_without_eos_is_rejected(tmp_path):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, pad_token="<|padding|>")
    with pytest.raises(ValueError, match="has no eos_token, without which no completion ends"):
        GANOTrainer(model(tmp_path), reward, GANOConfig(str(tmp_path), **SMALL), prompts(), None, without)


@pytest.fixture
def reward_model(tmp_path):
    model(tmp_path)
    made = GPTNeoXForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    made.save_pretrained(tmp_path / "reward")
    tokenizer().save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_a_reward_model_scores_what_the_policy_wrote_with_its_end(reward_model):
    """The same score as of the whole text, one at a time and without padding, at its last token."""
    scores = LearnedReward.load(str(reward_model), tokenizer(), "cpu", missing_eos_penalty=0.5)
    prompt = prompts()["prompt"][0]
    completions = [tokenizer()(text)["input_ids"] for text in (" anna won boat .", " ben")]
    completions[0].append(tokenizer().eos_token_id)
    found = scores([prompt, prompt], completions)
    bare = GPTNeoXForSequenceClassification.from_pretrained(reward_model)
    with torch.no_grad():
        alone = [bare(torch.tensor([tokenizer()(prompt)["input_ids"] + ids])).logits.item() for ids in completions]
    assert found == pytest.approx([alone[0], alone[1] - 0.5], abs=1e-5)
    assert scores([prompt], [completions[0][:-1]]) != pytest.approx([found[0] - 0.5], abs=1e-4)


def test_a_reward_model_with_another_tokenizer_is_rejected(reward_model):
    other = tokenizer().backend_tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    other.add_tokens(["another"])
    PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<|endoftext|>").save_pretrained(reward_model)
    with pytest.raises(ValueError, match="has another tokenizer .* than the policy .*; allowed are reward models"):
        LearnedReward.load(str(reward_model), tokenizer(), "cpu")
