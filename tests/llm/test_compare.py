"""Win rates: judges, their numbers, the command."""

import asyncio
import base64
import contextlib
import functools
import http.server
import itertools
import json
import math
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import httpx2
import numpy as np
import openai
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import binomtest

from sb3_ano.llm import judges
from sb3_ano.llm.cli import main
from sb3_ano.llm.comparison import summarize, wilson, win_rate_at_equal_length
from sb3_ano.llm.generation import generate, read_completions
from sb3_ano.llm.judges import TEMPLATE, Ledger, judge_by_chat, judge_by_score, parse_reply
from tests.common import variables
from tests.llm.tiny import chatty, model, prompts, tokenizer


class Judge(httpx2.MockTransport):
    """An endpoint with the part of OpenAI's interface that a judge needs, and with the fixed verdict that ``mood`` names.

    Moods: ``longer`` (the longer answer is better), ``first`` (always A), ``garbage`` (a page of HTML), ``talk`` (a sentence),
    ``number`` (instead of a text), ``deep`` (JSON nested too deeply), ``parts`` (A as a list, without numbers of tokens),
    ``busy`` (429, then 500, then as ``longer``), ``down`` (503 after six answers).
    """

    def __init__(self, mood="longer"):
        super().__init__(self.answer)
        self.mood, self.asked, self.keys, self.answers, self.lock = mood, Counter(), set(), 0, threading.Lock()

    def answer(self, request):
        self.fields = json.loads(request.content)
        text = self.fields.pop("messages")[0]["content"]
        with self.lock:
            self.asked[text] += 1
            self.keys.add(request.headers["Authorization"])
            errors = {"down": [503] * (self.answers >= 6), "busy": [429, 500][self.asked[text] - 1 :]}.get(self.mood)
            self.answers += not errors
        if errors:
            return httpx2.Response(errors[0], json={"error": {"message": "later"}}, headers={"Retry-After": "0"})
        if self.mood == "garbage":
            return httpx2.Response(200, html="<html>no</html>")
        if self.mood == "deep":
            return httpx2.Response(200, text="[" * 100_000)
        first, second = (text.split(f"[ANSWER {name}]\n")[1].split(f"\n[END OF ANSWER {name}]")[0] for name in "AB")
        word = "A" if len(first) > len(second) else "B" if len(first) < len(second) else "TIE"
        other = {"talk": "Both have their merits.", "first": "a.", "number": 7, "parts": [{"type": "text", "text": "A"}]}
        content = other.get(self.mood, f"They differ.\n**{word}**")
        usage = [1] if self.mood == "parts" else {"prompt_tokens": 10, "completion_tokens": 2}
        return httpx2.Response(200, json={"choices": [{"message": {"content": content}}], "usage": usage})


def pair(prompt: str, *completions: str) -> tuple:
    return tuple({"prompt": prompt, "completion": completion} for completion in completions)


PAIRS = [pair(f"prompt {i}", "x" * i, "y" * 3) for i in range(1, 7)]
# A field of OpenAI's, and one of other servers.
REQUEST = {"max_tokens": 512, "chat_template_kwargs": {"enable_thinking": False}}
LONGER = ["lose", "lose", "tie", "win", "win", "win"]


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


def ask(judge: Judge, pairs: list, file: Path, retries: int = 8) -> pd.DataFrame:
    options = {"base_url": "http://judge", "api_key": "secret-key", "max_retries": retries}
    client = openai.OpenAI(http_client=httpx2.Client(transport=judge), **options)
    return pd.DataFrame(judge_by_chat(pairs, client, "m", Ledger(file), TEMPLATE, 8, REQUEST))


def rows(verdicts: list[str]) -> pd.DataFrame:
    return pd.DataFrame({"verdict": verdicts, "length": 1, "opponent_length": 1, "requests": 2})


def test_a_last_line_without_its_end_is_kept_if_it_is_whole(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    first.add("a", verdict="win")
    first.add("b", verdict="lose")
    for lost, kept in ((1, {"a", "b", "c"}), (5, {"a", "b"})):
        path.write_bytes(path.read_bytes()[:-lost])
        again = Ledger(path)
        again.add("c", verdict="tie")
        assert set(Ledger(path).rows) == kept | {"c"}


def test_verdicts_are_counted_as_in_a_table_made_by_hand():
    found = summarize(rows(["win"] * 5 + ["lose"] * 2 + ["tie", "order", "unparseable"]))
    counts = {"prompts": 10, "win": 5, "lose": 2, "tie": 1, "order": 1, "unparseable": 1, "requests": 20}
    assert {name: found[name] for name in counts} == counts
    assert found["win_rate"] == pytest.approx(6 / 9)  # 5 wins and two halves of 9 verdicts
    assert found["equal_length"] == pytest.approx(6 / 9, abs=1e-3)
    none = summarize(rows(["unparseable"] * 3))
    assert none["unparseable"] == 3
    assert all(math.isnan(none[name]) for name in ("win_rate", "low", "high", "equal_length"))


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
    assert math.isnan(win_rate_at_equal_length(outcomes, np.full(2000, 5.0)))
    assert win_rate_at_equal_length(outcomes, np.zeros(2000)) == pytest.approx(0.65, abs=1e-3)


FIRST = [
    "A",
    "a.",
    "thinking\n\n **A**. ",
    "Answer: A",
    "**Answer:** A",
    "**Final answer: A**",
    "Verdict - A.",
    "The better answer is A.",
    "The winner is Answer A",
    "Answer A is better.",
    "A is clearly the better answer.",
    "Answer: A, because it is concise.",
    "I prefer Answer A",
    "Option A",
    "```\nA\n```",
    '```json\n{"verdict": "A", "reason": "It is short."}\n```',
    '{"reasoning": "It does not repeat itself.", "answer": "A"}',
    'Here it is: {"better_answer": "Answer A"}',
    '"A"',
    "So $\\boxed{A}$.",
    "\\boxed{\\text{A}}",
    "[[A]]",
    "<think>Answer: B or A?</think>\n\nA",
    "A\n\nIt names the culprit and is not too long.",
    "Answer: A\n\nThe other one rambles.",
]
UNDECIDED = [
    "",
    "A or B",
    "A/B",
    "Answer: A or B",
    "Both have their merits.",
    "Neither is a better answer",
    "A is not better",
    "The worse answer is A",
    "It is a better answer.",
    "The flaw is in Answer B that follows",
    "A: good.\nB: bad.",
    "A\nrambles\nB\nis short",
    "A is better than B",
    "<think>Answer: A",
    '{"answer": "A", "winner": "B"}',
    '{"answer": 7}',
    "\\boxed{A} or \\boxed{C}",
]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        *((text, "first") for text in FIRST),
        *((re.sub(r"\bA\b", "B", text).replace("a.", "b."), "second") for text in FIRST),
        *((text, "tie") for text in ("tie", "**TIE**", "Verdict: Tie.", "It is a tie.", '{"winner": "tie"}', "\\boxed{TIE}")),
        *((text, None) for text in UNDECIDED),
    ],
)
def test_replies_are_parsed(reply, verdict):
    assert parse_reply(reply) == verdict


@pytest.mark.parametrize(
    ("mood", "verdicts", "shown", "tokens", "times"),
    [
        ("longer", LONGER, (5, 5), (120, 24), 1),
        ("busy", LONGER, (5, 5), (120, 24), 3),
        ("first", ["order"] * 6, (12, 0), (120, 24), 1),
        ("talk", ["unparseable"] * 6, (0, 0), (120, 24), 1),
        ("garbage", ["unparseable"] * 6, (0, 0), (0, 0), 1),
        ("number", ["unparseable"] * 6, (0, 0), (120, 24), 1),
        ("deep", ["unparseable"] * 6, (0, 0), (0, 0), 1),
        ("parts", ["order"] * 6, (12, 0), (0, 0), 1),
    ],
)
def test_a_chat_judge_asks_in_both_orders_and_never_twice(tmp_path, mood, verdicts, shown, tokens, times):
    """Bias and garbage are counted separately, and a busy endpoint is asked again."""
    judge, file = Judge(mood), tmp_path / "verdicts.jsonl"
    found = ask(judge, PAIRS, file)
    assert found.pop("verdict").tolist() == verdicts
    names = ("requests", "shown_first", "shown_second", "prompt_tokens", "completion_tokens")
    assert found.sum().to_dict() == dict(zip(names, (12, *shown, *tokens), strict=True))
    # Another process finds the replies, also those that could not be parsed.
    assert ask(judge, PAIRS, file)["verdict"].tolist() == verdicts
    assert set(judge.asked.values()) == {times}
    assert judge.fields == {"model": "m", "max_tokens": 512, "chat_template_kwargs": {"enable_thinking": False}}
    assert judge.keys == {"Bearer secret-key"}
    assert "secret-key" not in file.read_text()


@pytest.mark.parametrize(
    "text", ["answer " + "-" * 200_000, "{" * 200_000, "[[" * 100_000, "\\boxed{" * 30_000, "is " * 100_000]
)
def test_a_long_reply_is_read_in_time(text):
    start = time.process_time()
    assert parse_reply(text) is None
    assert time.process_time() - start < 5.0


class Server(socketserver.ThreadingTCPServer):
    """An endpoint that sends what it likes, for a client without any replacement of its network."""

    daemon_threads = True

    def __init__(self, send):
        self.requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler):  # noqa: N805
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                self.requests.append((handler.path, dict(handler.headers), body))
                with contextlib.suppress(OSError):
                    send(handler)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)

    @property
    def host(self):
        return f"127.0.0.1:{self.server_address[1]}"


def answered(content: str, status: int = 200, **fields):
    """A function that sends a reply with this content."""

    def send(handler):
        reply = {"choices": [{"message": {"content": content}}], **fields}
        body = json.dumps(reply if status == 200 else {"error": {"message": content}}).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return send


def slowly(content: bytes):
    """A function that sends one byte after another, for an hour."""

    def send(handler):
        for byte in content.ljust(36_000):
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.1)

    return send


SLOW = [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 36000\r\n\r\n"]


@pytest.mark.parametrize("start", SLOW, ids=["headers", "body"])
def test_a_judge_that_sends_a_byte_at_a_time_is_not_waited_for(start, files, capsys):
    with Server(slowly(start)) as server:
        began = time.monotonic()
        arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", "m", "--base_url", f"http://{server.host}/v1"]
        assert main([*arguments, "--timeout", "1", "--retries", "1", "--out", "out"]) == 2
        assert time.monotonic() - began < 30
    assert "judge 'm' failed: there was no complete reply within 1 seconds; the same command asks" in capsys.readouterr().err


def test_a_reply_that_does_not_end_is_left_alone(monkeypatch):
    """With the default of --timeout, which has room for repetitions."""
    now = iter(range(0, 10_000, 50))
    monkeypatch.setattr("sb3_ano.llm.judges.time.monotonic", lambda: next(now))
    with pytest.raises(TimeoutError, match="a reply has not ended after 120 seconds"):
        judges._read(itertools.repeat(b"x"))


def test_large_replies_are_neither_read_nor_kept_whole(files):
    """One is larger than any verdict; the other one has its verdict at the end."""
    sizes = iter([50_000_000, *[300_000] * 11])
    lock = threading.Lock()

    def send(handler):
        with lock:
            size = next(sizes)
        answered("word " * (size // 5) + "\nAnswer: A")(handler)

    with Server(send) as server:
        arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", "m", "--base_url", f"http://{server.host}/v1"]
        assert main([*arguments, "--out", "out"]) == 0
    rows = [json.loads(line) for line in Path("out/verdicts.jsonl").read_text().splitlines()]
    assert sorted(str(row["verdict"]) for row in rows) == ["None", *["first"] * 11]
    assert all(len(row["reply"]) <= 20_010 for row in rows)


def test_a_reply_whose_connection_breaks_is_asked_for_again(files):
    replies = itertools.count()

    def send(handler):
        if next(replies) % 2 == 0:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            answered("A")(handler)

    with Server(send) as server:
        arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", "m", "--base_url", f"http://{server.host}/v1"]
        assert main([*arguments, "--concurrency", "1", "--out", "out"]) == 0
        assert len(server.requests) == 24
    assert pd.read_csv("out/win_rates.csv")["order"].tolist() == [6]


KEY = "sk-proj-aB3/dE+f6Gh1J2k3L4m5N6_7"


@pytest.mark.parametrize("status", [200, 401])
def test_a_key_and_a_password_are_written_and_printed_nowhere(status, files, capsys, monkeypatch):
    """The server repeats the headers of the request, in several encodings, and the command is a password's in an address."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_LOG", "debug")

    def send(handler):
        token = handler.headers["Authorization"]
        echo = {"headers": dict(handler.headers), "url": handler.path, "part": token[:20], "end": token[-9:]}
        echo |= {
            "base64": base64.b64encode(token.encode()).decode(),
            "quoted": quote(token, safe=""),
            "json": json.dumps(token),
        }
        answered(json.dumps(echo) + f" {token} hunter2/9\nA", status)(handler)

    monkeypatch.setenv("SB3_ANO_TRACEBACK", "1" if status == 401 else "")
    with Server(send) as server:
        address = f"http://{server.host}/v1?api_key=query-secret-1"
        for extra in (["--base_url", address], ["--base_url", f"http://{server.host}/v1"]):
            body = json.dumps({"max_tokens": 5, "auth": {"password": "hunter2/9"}})
            arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", "m", *extra, "--request", body]
            assert main([*arguments, "--retries", "1", "--out", "out"]) == (0 if status == 200 else 2)
        assert {name.lower(): value for name, value in server.requests[0][1].items()}["authorization"] == f"Bearer {KEY}"
        assert server.requests[0][2]["auth"] == {"password": "hunter2/9"}
    assert main(["compare", "--base_url", "http://me:hunter2/9@127.0.0.1:9/v1", "--out", "x", "--judge_model", "m"]) == 2
    assert main(["compare", "--api_key", "argument-secret", "up.jsonl", "three.jsonl", "--out", "x"]) == 2
    shown = "".join(capsys.readouterr()).encode()
    contents = [shown, *(path.read_bytes() for path in Path("out").iterdir() if path.suffix != ".png")]
    for secret in (KEY, KEY[:12], KEY[-8:], "hunter2", "query-secret", "argument-secret", quote(KEY, safe="")[8:20]):
        assert not any(secret.encode() in content for content in contents), secret
    assert b"***" in shown
    if status == 200:
        assert pd.read_csv("out/win_rates.csv")["order"].tolist() == [6]
        assert "base_url http" in Path("out/report.md").read_text()


def test_an_error_of_the_judge_has_no_key_in_its_causes(tmp_path):
    class Echo(Judge):
        def answer(self, request):
            return httpx2.Response(401, json={"error": {"message": f"wrong: {request.headers['Authorization']}"}})

    with pytest.raises(ValueError, match="judge 'm' failed") as raised:
        ask(Echo(), PAIRS, tmp_path / "verdicts.jsonl", retries=0)
    text = "".join(traceback.format_exception(raised.value))
    assert "wrong: Bearer ***" in text
    assert "secret-key" not in text


@pytest.mark.parametrize(("content", "number"), [("A", 0), ("I cannot decide.", 6)])
def test_many_replies_without_a_verdict_are_a_warning(content, number, files, capsys):
    with Server(answered(content)) as server:
        arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", "m", "--base_url", f"http://{server.host}/v1"]
        assert main([*arguments, "--out", "out"]) == 0
    errors = capsys.readouterr().err
    warning = f"{number} of 6 pairs have no verdict that can be read; see the replies in out/verdicts.jsonl. They should end"
    assert (f"warning: {warning}" in errors) == (number > 0)
    assert (f"Warning: {warning}" in Path("out/report.md").read_text()) == (number > 0)


@pytest.mark.parametrize("line", ["{", "[]", '{"key": "a"}', '{"key": "a", "verdict": null}', "[" * 100_000])
def test_a_line_that_is_no_row_is_named(line, tmp_path):
    (tmp_path / "verdicts.jsonl").write_text('{"key": "k", "verdict": null, "usage": {}}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"verdicts.jsonl, line 2, is not a row of this comparison; remove the line"):
        Ledger(tmp_path / "verdicts.jsonl", ("verdict", "usage"))


SCORES = {
    "none": (lambda **_: None, "returned a NoneType; allowed is a list"),
    "text": (lambda **_: "1234", "returned a str; allowed is a list"),
    "texts": (lambda prompts, **_: ["1"] * len(prompts), "returned '1' for a completion; allowed is a list"),
    "pairs": (lambda prompts, **_: [[1.0]] * len(prompts), r"returned \[1.0\] for a completion; allowed is a list"),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_that_are_no_numbers_are_named(name):
    function, message = SCORES[name]
    with pytest.raises(ValueError, match=f"reward function 's' {message}"):
        judge_by_score(PAIRS, function, "s")


def test_a_function_that_waits_without_end_is_interrupted():
    async def wait(**_):
        await asyncio.sleep(60)

    def catch_everything(**_):
        with contextlib.suppress(Exception):
            time.sleep(60)

    for function in (wait, catch_everything, lambda **_: time.sleep(60)):
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"reward function 's' has not returned after 0.2 seconds"):
            judge_by_score(PAIRS, function, "s", timeout=0.2)
        assert time.monotonic() - start < 10
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_replies_are_kept_when_the_endpoint_fails(tmp_path):
    """And the line that a killed process left unfinished is asked for again."""
    judge, file = Judge("down"), tmp_path / "verdicts.jsonl"
    with pytest.raises(ValueError, match="judge 'm' failed: Error code: 503"):
        ask(judge, PAIRS, file, retries=0)
    kept = file.read_text().splitlines()
    assert len(kept) == 6
    file.write_text("\n".join(kept)[:-10])
    judge.mood = "longer"
    assert ask(judge, PAIRS, file)["verdict"].tolist() == LONGER
    assert judge.answers == 6 + 7
    assert len({json.loads(line)["key"] for line in file.read_text().splitlines()}) == 12


def test_identical_completions_are_a_tie_without_a_request_and_none_can_write_into_it(tmp_path):
    pairs, judge = [pair("p", "same", "same"), pair("{first}", "{second}{prompt}", "b")], Judge()
    assert ask(judge, pairs, tmp_path / "verdicts.jsonl")["verdict"].tolist() == ["tie", "win"]
    assert len(judge.asked) == 2
    assert sum("[ANSWER A]\n{second}{prompt}\n" in text for text in judge.asked) == 1


def test_a_function_or_a_chat_model_judges_files_and_the_report_says_how(files, capsys, monkeypatch):
    arguments = ["compare", "up.jsonl", "three.jsonl", "last=six.jsonl", "--judge_function", "lengths:score", "--out", "out"]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    assert "judge_function lengths:score" in report
    assert "seed 0" in report
    assert re.search(r"up +three +6 +3 +1 +2 +0 +0 +0.583 ", report)
    out = files / "out"
    assert {path.name for path in out.iterdir()} == {"report.md", "win_rates.csv", "win_rates.png"}
    table = pd.read_csv(out / "win_rates.csv")
    assert table["win_rate"][0] == pytest.approx(3.5 / 6, abs=1e-5)
    assert table["low"][0] < table["win_rate"][0] < table["high"][0]
    # A function that has changed gives other verdicts.
    monkeypatch.setattr(sys.modules["lengths"], "score", lambda completions, **_: [-len(text) for text in completions])
    assert main(arguments) == 0
    again = pd.read_csv(out / "win_rates.csv")
    assert again[["win", "tie", "lose"]].to_numpy().tolist() == [[2, 1, 3], [5, 1, 0], [6, 0, 0]]
    monkeypatch.setattr(openai, "OpenAI", functools.partial(openai.OpenAI, http_client=httpx2.Client(transport=Judge())))
    chatting = ["--judge_model", "m", "--base_url", "http://judge", "--concurrency", "2", "--out", "by_chat"]
    assert main([*arguments[:4], *chatting]) == 0
    table = pd.read_csv("by_chat/win_rates.csv")
    assert table[["win", "tie", "lose", "requests"]].to_numpy().tolist() == [[3, 1, 2, 12], [0, 1, 5, 12], [0, 0, 6, 12]]


def test_all_pairs_of_a_comparison_have_the_same_prompts_and_a_seed_chooses_them(files):
    Path("seen.py").write_text(
        "seen = []\ndef score(prompts, **_):\n    seen.extend(prompts)\n    return [0.0] * len(prompts)\n"
    )

    def judged(*options: str) -> list[str]:
        sys.modules.pop("seen", None)
        policies = ["compare", "up.jsonl", "three.jsonl", "six.jsonl"]
        assert main([*policies, "--judge_function", "seen:score", "--out", "out", *options]) == 0
        return sorted(sys.modules["seen"].seen)

    chosen = judged("--samples", "2")
    assert len(set(chosen)) == 2
    assert chosen == sorted(3 * list(set(chosen)))
    assert any(judged("--samples", "2", "--seed", str(seed)) != chosen for seed in range(1, 5))
    Path("few.jsonl").write_text('{"prompt": "prompt 5"}\n{"prompt": "prompt 9"}\n')
    assert set(judged("--dataset_name", "few.jsonl", "--dataset_split", "train")) == {"prompt 5"}


def test_an_asynchronous_function_judges_as_trl_calls_it():
    async def score(prompts, completions):
        return [len(text) for text in completions]

    assert [row["verdict"] for row in judge_by_score(PAIRS, score, "s")] == LONGER


def test_a_score_that_is_nan_is_no_verdict():
    found = judge_by_score(PAIRS[:2], lambda prompts, completions: [float("nan"), *range(len(prompts) - 1)], "s")
    assert found == [{"verdict": "unparseable"}, {"verdict": "lose"}]
    with pytest.raises(ValueError, match="'w' returned 1 rewards for 4 completions"):
        judge_by_score(PAIRS[:2], lambda prompts, completions: [1.0], "w")


def test_a_score_does_not_depend_on_the_order_of_policies():
    """The fourth policy is the first; the second one's tokens are unknown."""

    def policy(ids, known=True):
        return [
            {"prompt": str(row), "completion": "x", **({"completion_ids": [row + ids]} if known else {})} for row in range(40)
        ]

    def score(prompts, completions, completion_ids=None):
        return [5.0] * len(prompts) if completion_ids is None else [float(ids[0] % 7) for ids in completion_ids]

    first, text, same = policy(3), policy(0, known=False), policy(3)
    for order in ([text, same], [same, text]):
        verdicts = judge_by_score([pair for other in order for pair in zip(first, other, strict=True)], score, "s")
        ties = [verdict["verdict"] for verdict in verdicts[40 * order.index(same) :][:40]]
        assert ties == ["tie"] * 40


def test_functions_get_messages_for_conversations_and_completions_must_be_text(tmp_path):
    prompt = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": prompt, "completion": [{"role": "assistant", "content": text}]} for text in ("a", "bbb")]
    read = []
    for name, row in zip("ab", rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        read.append(next(iter(read_completions(str(tmp_path / f"{name}.jsonl")).values())))
    assert [row["completion"] for row in read] == ["a", "bbb"]

    def length(prompts, completions):  # as trl.rewards read them
        return [len(messages[0]["content"]) for messages in completions]

    assert judge_by_score([tuple(read)], length, "s") == [{"verdict": "lose"}]
    (tmp_path / "number.csv").write_text("prompt,completion\none plus one,2\n")
    with pytest.raises(ValueError, match=r"number.csv has the completion 2; allowed are texts, and lists of one message"):
        read_completions(str(tmp_path / "number.csv"))
    (tmp_path / "texts.csv").write_text("prompt,completion\nNone,\n")
    assert [row["completion"] for row in read_completions(str(tmp_path / "texts.csv")).values()] == [""]
    (tmp_path / "numbers.csv").write_text("prompt,completion\n0,a\n")
    with pytest.raises(ValueError, match="has the prompt 0 in row 0; every prompt needs text"):
        read_completions(str(tmp_path / "numbers.csv"))


def test_generation_resumes_with_the_same_completions(tmp_path):
    """Killed in the middle of a line of the third batch; other settings are added to the file."""
    model(tmp_path)
    texts, path = prompts()["prompt"][:20], tmp_path / "completions.jsonl"

    def complete(seed=3):
        return generate(str(tmp_path / "model"), texts, Ledger(path), 1.0, seed=seed, length=6, batch_size=4)

    whole = complete()
    assert list(whole) == texts
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:9]) + lines[9][:20])
    assert complete() == whole
    assert path.read_bytes() == content
    assert [row["completion"] for row in complete(seed=4).values()] != [row["completion"] for row in whole.values()]
    assert len(path.read_bytes().splitlines()) == 40
    # The model's own configuration made all seeds alike. Every end that it names is an end, as in training.
    settings = {"top_p": 0.01, "repetition_penalty": 9.0, "eos_token_id": [0, 7]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    path.unlink()
    for prompt, row in complete().items():
        ids = whole[prompt]["completion_ids"]
        assert row["completion_ids"] == (ids[: ids.index(7) + 1] if 7 in ids else ids)


def test_an_adapter_completes_conversations(tmp_path):
    """As its base model with the adapter merged; the judge reads the conversation, the model its chat template.

    Greedy completions are the most probable tokens.
    """
    text, policy = prompts()["prompt"][0], model(tmp_path)
    conversation = [{"role": "user", "content": text}]
    adapted = get_peft_model(model(tmp_path), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    chatty().save_pretrained(tmp_path / "adapter")
    options = {"temperature": 0.0, "seed": 0, "length": 6, "batch_size": 32}
    found = generate(str(tmp_path / "adapter"), [conversation], Ledger(tmp_path / "a.jsonl"), **options)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    tokenizer().save_pretrained(tmp_path / "merged")
    expected = generate(str(tmp_path / "merged"), [text], Ledger(tmp_path / "m.jsonl"), **options)[text]
    plain = generate(str(tmp_path / "model"), [text], Ledger(tmp_path / "p.jsonl"), **options)[text]
    assert found[f"user: {text}"]["completion_ids"] == expected["completion_ids"] != plain["completion_ids"]
    ids = tokenizer()(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in plain["completion_ids"]:
        ids = torch.cat([ids, policy(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert ids[0, start:].tolist() == plain["completion_ids"]
    assert plain["completion"] == tokenizer().decode(plain["completion_ids"], skip_special_tokens=True)


def test_models_are_compared_by_a_reward_model_at_temperatures(data, capsys, monkeypatch):
    """On the CPU, without a GPU: PyTorch's build for CUDA names CUDA all the same, unless asked for what is available."""
    named = {False: torch.device("cuda"), True: None}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: named[check_available])
    arguments = ["compare", "one=model", "same=model", "--dataset_name", "posts", "--samples", "8", "--out", "out"]
    arguments += ["--reward_model", "reward", "--max_completion_length", "4", "--temperatures", "0", "1"]
    assert main(arguments) == 0
    table = pd.read_csv("out/win_rates.csv")
    assert table["temperature"].tolist() == [0.0, 1.0]
    assert table["tie"].tolist() == [8, 8]  # the same model with the same seed
    assert "reward_model reward" in capsys.readouterr().out
    chatty().save_pretrained("model")  # the policy's chat template, which the reward model need not have
    messages = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two")]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in messages))
    chats = ["--dataset_name", "chats.jsonl", "--dataset_split", "train", "--out", "chats"]
    assert main([*arguments, *chats]) == 0
    tokenizer().save_pretrained("model")
    kept = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()][-3:]
    Path("kept.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"], "completion": "no"}) + "\n" for row in kept))
    policies, samples = ["one=model", "kept=kept.jsonl"], ["--samples", "2", "--out", "with_file"]
    assert main(["compare", *policies, *arguments[3:], *samples]) == 0
    assert pd.read_csv("with_file/win_rates.csv")["prompts"].tolist() == [2, 2]
    foreign = chatty()
    foreign.add_tokens(["another"])
    foreign.save_pretrained("model")
    assert main([*arguments, "--out", "other"]) == 2  # its tokens would be read as other words
    assert "'model' has another tokenizer than reward_model='reward'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_served_by_transformers_judges(files, capsys):
    """Its words are no verdicts, but its replies are those of a real server."""
    model(".")
    chatty().save_pretrained("model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", "--device", "cpu", "--port", str(port)]
    process = subprocess.Popen([*command, "--host", "127.0.0.1"], env=variables())
    arguments = ["compare", "up.jsonl", "three.jsonl", "--judge_model", str(files / "model"), "--out", "out"]
    arguments += ["--base_url", f"http://127.0.0.1:{port}/v1", "--request", '{"max_tokens": 4}']
    try:
        assert main(arguments) == 0  # the client waits until the server listens
    finally:
        process.kill()
        process.wait()
    report = capsys.readouterr().out
    table = pd.read_csv("out/win_rates.csv").iloc[0]
    assert (table["unparseable"], table["requests"]) == (6, 12)
    assert main(arguments) == 0  # without the server
    assert capsys.readouterr().out.splitlines()[4:] == report.splitlines()[4:]
