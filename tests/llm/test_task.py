"""The small task: text that survives its tokenizer, and a rule that ranks summaries as a reader would."""

import pytest

from sb3_ano.llm import task

PROMPT = "SUBREDDIT: r/harbour\nTITLE: anna ben\nPOST: anna sold boat . ben likes rain . carl lost keys .\nTL;DR:"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" anna sold boat . carl lost keys .", 1.0),
        (" carl lost keys . anna sold boat .", 1.0),
        ("", 0.0),
        (" anna sold boat .", 0.5),
        (" anna sold boat . anna sold boat .", 0.25),  # repeats
        (" anna sold boat . ben likes rain .", 0.25),  # tells what is no news
        (" anna sold keys .", -0.5),  # invents
        (" boat boat .", -0.5),  # is no sentence
        (" anna sold boat . carl lost keys . ben likes rain . ben likes rain .", 0.5),
    ],
)
def test_the_rule(completion, score):
    assert task.gold_score(PROMPT, completion) == score
    assert task.gold_score(PROMPT, completion, ended=False) == score - 0.5


def test_the_reward_function_sees_whether_a_completion_ended():
    good = " anna sold boat . carl lost keys ."
    ids = task.make_tokenizer()(good)["input_ids"]
    ended = [*ids, task.make_tokenizer().eos_token_id]
    assert task.gold([PROMPT] * 2, [good] * 2, [ids, ended]) == [0.5, 1.0]


def test_text_comes_back_from_its_tokens():
    tokenizer = task.make_tokenizer()
    for row in task.make_posts(50, seed=0):
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        assert tokenizer.decode(ids) == row["prompt"] + row["completion"]
        assert tokenizer.unk_token_id not in ids
        # A completion is the same tokens alone as behind its prompt, or log-probabilities would be of others.
        assert ids == tokenizer(row["prompt"])["input_ids"] + tokenizer(row["completion"])["input_ids"]


def test_writers_leave_something_to_gain_and_summaries_fit():
    rows = task.make_posts(2000, seed=0)
    scores = [task.gold_score(row["prompt"], row["completion"]) for row in rows]
    assert 0.2 < sum(scores) / len(scores) < 0.6
    tokenizer = task.make_tokenizer()
    too_long = [row for row in rows if len(tokenizer(row["completion"])["input_ids"]) >= task.MAX_SUMMARY]
    assert len(too_long) < 0.03 * len(rows)


def test_judges_err_as_often_as_they_are_told_to():
    pairs = task.make_comparisons(1000, seed=0, mistakes=0.1)
    wrong = [task.gold_score(p["prompt"], p["chosen"]) < task.gold_score(p["prompt"], p["rejected"]) for p in pairs]
    assert 0.07 < sum(wrong) / len(wrong) < 0.13


def test_seeds_decide():
    assert task.make_posts(5, seed=1).to_list() == task.make_posts(5, seed=1).to_list()
    assert task.make_posts(5, seed=1).to_list() != task.make_posts(5, seed=2).to_list()
