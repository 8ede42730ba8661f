"""Win rates: judges, their numbers, the command."""

import copy
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import binomtest
from transformers import GPTNeoXForSequenceClassification

from sb3_ano.llm.cli import main
from sb3_ano.llm.comparison import summarize, wilson, win_rate_at_equal_length
from sb3_ano.llm.generation import generate
from sb3_ano.llm.judges import ChatJudge, Ledger, ScoreJudge, parse_reply
from tests.llm.judge_server import JudgeServer
from tests.llm.tiny import ROOT, model, prompts, tokenizer

PAIRS = [(f"prompt {i}", {"completion": "x" * i}, {"completion": "y" * 3}) for i in range(1, 7)]
LONGER = ["second", "second", "tie", "first", "first", "first"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with completions of three policies, of lengths 1 to 6, 3, and 6."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, length in (("up", None), ("three", 3), ("six", 6)):
        rows = [{"prompt": f"prompt {i}", "completion": name[0] * (length or i)} for i in range(1, 7)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lengths.py").write_text("def score(completions, **_):\n    return [len(text) for text in completions]\n")
    return tmp_path


@pytest.fixture
def serve():
    """Start servers, and stop them at the end."""
    servers = []
    yield lambda mood="longer": servers.append(JudgeServer(mood)) or servers[-1]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def chat(serve, tmp_path):
    """Make a server and a judge that asks it."""

    def make(mood="longer"):
        server = serve(mood)
        return server, ChatJudge("m", Ledger(tmp_path / "verdicts.jsonl"), server.url, "secret-key")

    return make


def test_verdicts_are_counted_as_in_a_table_made_by_hand():
    verdicts = ["first"] * 5 + ["second"] * 2 + ["tie", "order", "unparseable"]
    found = summarize(verdicts, np.zeros(10))
    counts = {"prompts": 10, "win": 5, "lose": 2, "tie": 1, "order": 1, "unparseable": 1}
    assert {name: found[name] for name in counts} == counts
    assert found["win_rate"] == pytest.approx(6 / 9)  # 5 wins and two halves of 9 verdicts
    assert found["equal_length"] == pytest.approx(6 / 9, abs=1e-3)
    assert found["p"] == pytest.approx(58 / 128)  # two-sided: 2 * (C(7,0) + C(7,1) + C(7,2)) / 2^7


def test_no_verdict_has_no_win_rate():
    found = summarize(["unparseable"] * 3, np.zeros(3))
    assert found["unparseable"] == 3
    assert all(math.isnan(found[name]) for name in ("win_rate", "low", "high", "equal_length"))


@pytest.mark.parametrize(("wins", "number"), [(0, 5), (7, 10), (600, 1000)])
def test_wilson_equals_scipy(wins, number):
    expected = binomtest(wins, number).proportion_ci(0.95, method="wilson")
    assert wilson(wins, number) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_win_rate_at_equal_length_removes_the_judges_liking_for_length():
    # 90 % won where longer by 5, 40 % where shorter by 5: the logits' middle is the win rate without a difference.
    outcomes = np.concatenate([np.repeat([1.0, 0.0], [900, 100]), np.repeat([1.0, 0.0], [400, 600])])
    differences = np.repeat([5.0, -5.0], 1000)
    middle = (math.log(0.9 / 0.1) + math.log(0.4 / 0.6)) / 2
    assert win_rate_at_equal_length(outcomes, differences) == pytest.approx(1 / (1 + math.exp(-middle)), abs=1e-3)
    assert outcomes.mean() == 0.65


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [("A", "first"), ("thinking\n\n **b**. ", "second"), ("tie", "tie"), ("A or B", None), ("Answer: A", None), ("", None)],
)
def test_replies_are_parsed(reply, verdict):
    assert parse_reply(reply) == verdict


def test_a_chat_judge_asks_in_both_orders_and_never_twice(chat, tmp_path):
    server, judge = chat()
    verdicts, facts = judge(PAIRS)
    assert verdicts == LONGER
    assert facts == {"requests": 12, "first_preferred": 0.5, "prompt_tokens": 120, "completion_tokens": 24}
    assert set(server.asked.values()) == {1}
    server.mood = "down"  # another process finds the replies
    assert ChatJudge("m", Ledger(tmp_path / "verdicts.jsonl"), server.url)(PAIRS) == (verdicts, facts)
    assert server.keys == {"Bearer secret-key"}
    assert "secret-key" not in (tmp_path / "verdicts.jsonl").read_text()


def test_identical_completions_are_a_tie_without_a_request(chat):
    server, judge = chat("down")
    assert judge([("p", {"completion": "same"}, {"completion": "same"})])[0] == ["tie"]
    assert not server.asked


def test_a_completion_cannot_write_into_the_request(chat):
    server, judge = chat()
    judge([("{first}", {"completion": "{second}{prompt}"}, {"completion": "b"})])
    assert sum("[ANSWER A]\n{second}{prompt}\n" in text for text in server.asked) == 1


@pytest.mark.parametrize(
    ("mood", "verdict", "bias"), [("first", "order", 1.0), ("garbage", "unparseable", None), ("talk", "unparseable", None)]
)
def test_bias_and_garbage_are_counted_separately(chat, tmp_path, mood, verdict, bias):
    _, judge = chat(mood)
    verdicts, facts = judge(PAIRS)
    assert verdicts == [verdict] * 6
    assert facts["first_preferred"] == bias or math.isnan(facts["first_preferred"])
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 12  # also what could not be parsed


def test_a_busy_endpoint_is_asked_again(chat):
    server, judge = chat("busy")
    assert judge(PAIRS)[0] == LONGER
    assert set(server.asked.values()) == {3}
    assert set(server.answered.values()) == {1}


def test_an_endpoint_that_stays_down_is_one_line(serve, files, capsys):
    server = serve("down")
    chatting = ["--judge_model", "m", "--base_url", server.url, "--concurrency", "1", "--retries", "1"]
    assert main(["compare", "up.jsonl", "three.jsonl", *chatting, "--out", "out"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("error: judge 'm' failed: ")
    assert "503" in errors[-1]


@pytest.mark.slow
def test_a_killed_comparison_asks_only_what_is_missing(serve, files):
    server = serve("slow")
    arguments = ["compare", "up.jsonl", "three.jsonl", "six.jsonl", "--judge_model", "m", "--base_url", server.url]
    arguments += ["--concurrency", "2", "--out", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sb3_ano.llm", *arguments], cwd=files, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    while sum(server.answered.values()) < 6 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    verdicts = files / "out" / "verdicts.jsonl"
    kept = len(verdicts.read_text().splitlines())
    assert kept >= 4  # two may have been on their way
    with open(verdicts, "a") as file:
        file.write('{"key": "torn')
    assert main(arguments) == 0
    rows = [json.loads(line) for line in verdicts.read_text().splitlines()]
    assert len(rows) == len({row["key"] for row in rows}) == len(server.asked) == 36
    assert sum(server.asked.values()) <= len(rows) + 2
    table = pd.read_csv(files / "out" / "win_rates.csv")
    assert table[["win", "tie", "lose"]].to_numpy().tolist() == [[3, 1, 2], [0, 1, 5], [0, 0, 6]]


def test_a_function_judges_files_and_the_report_says_how(files, capsys, monkeypatch):
    arguments = ["compare", "up.jsonl", "three.jsonl", "last=six.jsonl", "--judge_function", "lengths:score", "--out", "out"]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    assert "| up | three |  | 6 | 3 | 1 | 2 | 0 | 0 | 58.3 (" in report
    assert "Judge: lengths:score." in report
    assert "Mean lengths of completions, in words: up 1.0" in report
    out = files / "out"
    assert {path.name for path in out.iterdir()} == {
        "matrix.png", "report.md", "win_rates.csv", "win_rates.png",
    }  # fmt: skip
    table = pd.read_csv(out / "win_rates.csv")
    assert table["win_rate"][0] == pytest.approx(3.5 / 6, abs=1e-5)
    assert table["low"][0] < table["win_rate"][0] < table["high"][0]
    # A function that has changed gives other verdicts.
    monkeypatch.setattr(sys.modules["lengths"], "score", lambda completions, **_: [-len(text) for text in completions])
    assert main([*arguments, "--against_first"]) == 0
    again = pd.read_csv(out / "win_rates.csv")
    assert again[["win", "tie", "lose"]].to_numpy().tolist() == [[2, 1, 3], [5, 1, 0]]


def test_a_score_that_is_nan_is_no_verdict():
    judge = ScoreJudge(lambda prompts, completions: [float("nan"), *range(len(prompts) - 1)], "s")
    assert judge(PAIRS[:2])[0] == ["unparseable", "second"]
    wrong = ScoreJudge(lambda prompts, completions: [1.0], "w")
    with pytest.raises(ValueError, match="'w' returned 1 scores for 4 completions"):
        wrong(PAIRS[:2])


def test_generation_resumes_with_the_same_completions(tmp_path):
    """Killed in the middle of a line of the third batch."""
    model(tmp_path)
    texts = prompts()["prompt"][:20]
    options = {"max_completion_length": 6, "batch_size": 4}
    path = tmp_path / "a" / "p_1.jsonl"
    whole = generate(str(tmp_path / "model"), texts, path, 1.0, seed=3, **options)
    assert list(whole) == texts
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:9]) + lines[9][:20])
    assert generate(str(tmp_path / "model"), texts, path, 1.0, seed=3, **options) == whole
    assert path.read_bytes() == content
    assert generate(str(tmp_path / "model"), texts, tmp_path / "b.jsonl", 1.0, seed=4, **options) != whole
    with pytest.raises(ValueError, match="made with seed=3, not 4"):
        generate(str(tmp_path / "model"), texts, path, 1.0, seed=4, **options)


def test_an_adapter_completes_conversations(tmp_path):
    """As its base model with the adapter merged; the judge reads the conversation, the model its chat template."""
    text = prompts()["prompt"][0]
    conversation = [{"role": "user", "content": text}]
    adapted = get_peft_model(model(tmp_path), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    chatty = copy.deepcopy(tokenizer())
    chatty.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    chatty.save_pretrained(tmp_path / "adapter")
    options = {"temperature": 0.0, "max_completion_length": 6}
    found = generate(str(tmp_path / "adapter"), [conversation], tmp_path / "a.jsonl", **options)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    tokenizer().save_pretrained(tmp_path / "merged")
    expected = generate(str(tmp_path / "merged"), [text], tmp_path / "m.jsonl", **options)[text]
    plain = generate(str(tmp_path / "model"), [text], tmp_path / "p.jsonl", **options)[text]
    assert found[f"user: {text}"]["completion_ids"] == expected["completion_ids"] != plain["completion_ids"]


def test_greedy_completions_are_the_most_probable_tokens(tmp_path):
    policy = model(tmp_path)
    text = prompts()["prompt"][0]
    row = generate(str(tmp_path / "model"), [text], tmp_path / "g.jsonl", 0.0, max_completion_length=5)[text]
    ids = tokenizer()(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in row["completion_ids"]:
        ids = torch.cat([ids, policy(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert ids[0, start:].tolist() == row["completion_ids"]
    assert row["completion"] == tokenizer().decode(row["completion_ids"], skip_special_tokens=True)


def test_models_are_compared_by_a_reward_model_at_temperatures(files, capsys):
    model(".")
    GPTNeoXForSequenceClassification.from_pretrained("model", num_labels=1).save_pretrained("scores")
    tokenizer().save_pretrained("scores")
    prompts().to_json("posts/test.jsonl")
    arguments = ["compare", "one=model", "same=model", "--dataset_name", "posts", "--samples", "8", "--out", "out"]
    arguments += ["--reward_model", "scores", "--max_completion_length", "4", "--temperatures", "0", "1"]
    assert main(arguments) == 0
    table = pd.read_csv("out/win_rates.csv")
    assert table["temperature"].tolist() == [0.0, 1.0]
    assert table["tie"].tolist() == [8, 8]  # the same model with the same seed
    assert "one at T = 1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("up.jsonl", "one policy cannot be compared"),
        ("up.jsonl up.jsonl", "two policies are called 'up'"),
        ("up.jsonl =six.jsonl", "policy '=six.jsonl' is not NAME=PATH"),
        ("up.jsonl none.jsonl", "'none.jsonl' does not exist"),
        ("up.jsonl model", "'model' is no JSONL file, but a model that needs prompts; give --dataset_name"),
        ("up.jsonl bad.jsonl", "bad.jsonl, line 2, is not a JSON object with 'prompt' and 'completion'"),
        ("up.jsonl twice.jsonl", "twice.jsonl, line 2, repeats a prompt"),
        ("up.jsonl empty.jsonl", "empty.jsonl has no rows"),
        ("up.jsonl other.jsonl", "up and other have no prompt in common"),
        ("up.jsonl six.jsonl --temperatures -1", "temperature -1.0 is not allowed"),
        ("up.jsonl six.jsonl --temperatures 1 1", "a temperature is given twice"),
        ("up.jsonl six.jsonl --samples 0", "0 is not a positive integer"),
        ("up.jsonl six.jsonl --reward_model x", "not allowed with argument"),
        ("up.jsonl six.jsonl --sample 3", "unrecognized arguments: --sample 3"),
    ],
    ids=lambda value: value[-25:],
)
def test_bad_input_of_compare_is_one_clear_line(arguments, message, files, capsys):
    row = json.dumps({"prompt": "p", "completion": "c"}) + "\n"
    (files / "bad.jsonl").write_text(row + '{"prompt": 1}\n')
    (files / "twice.jsonl").write_text(row * 2)
    (files / "empty.jsonl").write_text("")
    (files / "other.jsonl").write_text(row)
    _expect(message, [*arguments.split(), "--judge_function", "lengths:score"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "one of the arguments --judge_model --reward_model --judge_function is required"),
        ("--judge_function nowhere:it", "'nowhere:it' cannot be imported"),
        ("--judge_model m", "OpenAI asks for a key; set NO_SUCH_KEY, or give --base_url"),
        ("--judge_model m --base_url http://x --template none.txt", "template='none.txt' cannot be read"),
        ("--judge_model m --base_url http://x --template up.jsonl", "template lacks {prompt}, {first}, {second}"),
        ("--judge_model m --base_url http://127.0.0.1:9/v1 --retries 0", "judge 'm' failed: Connection error."),
        ("--reward_model nowhere/nothing", "model 'nowhere/nothing' cannot be loaded"),
    ],
    ids=lambda value: value[-25:],
)
def test_a_bad_judge_is_one_clear_line(arguments, message, files, capsys):
    _expect(message, ["up.jsonl", "six.jsonl", "--api_key_variable", "NO_SUCH_KEY", *arguments.split()], capsys)


def _expect(message, arguments, capsys):
    assert main(["compare", *arguments, "--out", "out"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.slow
def test_a_model_served_by_transformers_judges(files, capsys):
    """Its words are no verdicts, but its replies are those of a real server."""
    model(".", noise=0.0)
    served = tokenizer()
    template = served.chat_template
    served.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    served.save_pretrained("model")
    served.chat_template = template
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", "--device", "cpu", "--port", str(port)]
    process = subprocess.Popen([*command, "--host", "127.0.0.1"], env={**os.environ, "HF_HUB_OFFLINE": "1"})
    arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", str(files / "model"), "--out", "out"]
    arguments += ["--base_url", f"http://127.0.0.1:{port}/v1", "--max_tokens", "4"]
    try:
        assert main(arguments) == 0  # the client waits until the server listens
    finally:
        process.kill()
        process.wait()
    report = capsys.readouterr().out
    assert "in 12 requests" in report
    assert "| up | three |  | 6 | 0 | 0 | 0 | 0 | 6 |" in report
    assert main(arguments) == 0  # without the server
    assert capsys.readouterr().out.splitlines()[6:] == report.splitlines()[6:]
