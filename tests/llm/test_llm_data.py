"""Data, tokenizers and models that cannot be used, each with one line that says so."""

import json

import datasets
import pytest
from transformers import GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

from sb3_ano.llm import GANOConfig, GANOTrainer
from sb3_ano.llm.data import check_columns, check_model, check_prompts, load_split, load_tokenizer
from sb3_ano.llm.rewards import LearnedReward
from tests.llm.tiny import SMALL, model, prompts, reward, tokenizer


def dataset(**columns):
    return datasets.Dataset.from_dict(columns)


def test_a_dataset_is_read_from_a_folder_or_a_file(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    written = dataset(prompt=["a", "c"], completion=["b", "d"])
    written.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=written, test=written.select([1])).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "files").mkdir()
    for path in (tmp_path / "rows.jsonl", tmp_path / "files" / "train.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("one", "two", "rows.jsonl", "files"):
        assert load_split(str(tmp_path / name), "train").to_list() == rows, name
    assert load_split(str(tmp_path / "two"), "test").to_list() == rows[1:]


def test_data_that_cannot_be_had(tmp_path):
    dataset(prompt=["a"]).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(ValueError, match="data' has no split 'test'; it has 'train'"):
        load_split(str(tmp_path / "data"), "test")
    with pytest.raises(ValueError, match="dataset='someone/nothing' is no local file or folder, and cannot be downloaded"):
        load_split("someone/nothing", "train")
    (tmp_path / "notes.txt").write_text("prompt")
    with pytest.raises(ValueError, match=r"notes.txt' cannot be read \(files may end in .json"):
        load_split(str(tmp_path / "notes.txt"), "train")


def test_data_that_lack_something():
    with pytest.raises(
        ValueError, match="data has no column 'chosen', 'rejected'; needed are prompt, chosen, rejected, it has"
    ):
        check_columns(dataset(prompt=["a"]), ("prompt", "chosen", "rejected"), "data")
    with pytest.raises(ValueError, match="data has an empty prompt in row 1; every prompt needs text"):
        check_prompts(dataset(prompt=["a", "  ", "b"]), "data")
    with pytest.raises(ValueError, match="data has an empty prompt in row 0"):
        check_prompts(dataset(prompt=[[], [{"role": "user", "content": "a"}]]), "data")
    with pytest.raises(ValueError, match="data has no rows"):
        check_prompts(dataset(prompt=[]), "data")
    check_prompts(dataset(prompt=[[{"role": "user", "content": "a"}]]), "data")


def without_eos():
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, pad_token="<|padding|>")
    assert made.eos_token_id is None
    return made


def test_the_trainer_looks_at_prompts_and_tokenizer_itself(tmp_path):
    args = GANOConfig(str(tmp_path), **SMALL)
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt'; needed are prompt, it has text"):
        GANOTrainer(model(tmp_path), reward, args, dataset(text=["a"]), None, tokenizer())
    with pytest.raises(ValueError, match="train_dataset has an empty prompt in row 1"):
        GANOTrainer(model(tmp_path), reward, args, dataset(prompt=["a", ""]), None, tokenizer())
    with pytest.raises(ValueError, match="has no eos_token, without which no completion ends"):
        GANOTrainer(model(tmp_path), reward, args, prompts(), None, without_eos())


def test_models_that_cannot_be_had(tmp_path):
    with pytest.raises(ValueError, match="model='someone/nothing' is no local folder, and cannot be downloaded") as caught:
        load_tokenizer("someone/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="reward_model=.* holds no model"):
        check_model(str(tmp_path), "reward_model")
    model(tmp_path)
    without_eos().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="model' has no eos_token"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.fixture
def reward_model(tmp_path):
    model(tmp_path)
    made = GPTNeoXForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    made.save_pretrained(tmp_path / "reward")
    tokenizer().save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_a_reward_model_scores_what_the_policy_wrote_with_its_end(reward_model):
    """The same score as of the whole text, one at a time and without padding, at its last token."""
    import torch

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


def test_reward_models_that_cannot_be_used(reward_model, tmp_path):
    other = tokenizer().backend_tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    other.add_tokens(["another"])
    PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<|endoftext|>").save_pretrained(reward_model)
    with pytest.raises(ValueError, match="has another tokenizer .* than the policy .*; allowed are reward models"):
        LearnedReward.load(str(reward_model), tokenizer(), "cpu")
    with pytest.raises(ValueError, match="model' is no reward model: it lacks score.weight"):
        LearnedReward.load(str(tmp_path / "model"), tokenizer(), "cpu")
