"""Judges of pairs of completions: a chat model, a reward model, or a Python function."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

import openai
from tqdm import tqdm

#: The better completion of a pair. Order means that the verdict changed when the two were shown in the other order.
Verdict = Literal["first", "second", "tie", "order", "unparseable"]
#: Prompt, first completion and second completion. A completion is a row of :mod:`sb3_ano.llm.generation`.
Pair = tuple[str, dict[str, Any], dict[str, Any]]
#: Return a verdict for each pair, and numbers about the requests.
Judge = Callable[[Sequence[Pair]], tuple[list[Verdict], dict[str, float]]]

#: What a chat model is asked. The three names in braces are replaced.
TEMPLATE = """\
Compare two answers to the same prompt. Judge their content, not their length, and not the order in which they are shown.

[PROMPT]
{prompt}
[END OF PROMPT]

[ANSWER A]
{first}
[END OF ANSWER A]

[ANSWER B]
{second}
[END OF ANSWER B]

Which answer is better? Reply with one word: A, B, or TIE."""
_ANSWERS: dict[str, Literal["first", "second", "tie"]] = {"A": "first", "B": "second", "TIE": "tie"}
_BATCH = 64


class Ledger:
    """Keep requests and replies in a JSONL file, each line written as soon as it is known.

    A line that a killed process has left unfinished is removed.

    :param path: file; missing parent directories are made
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, dict[str, Any]] = {}
        self.path, self._lock = path, threading.Lock()
        with open(path, "a+b") as file:
            file.seek(0)
            complete = [line for line in file if line.endswith(b"\n")]
            file.truncate(sum(map(len, complete)))
        for row in map(json.loads, complete):
            self.rows[row["key"]] = row

    def add(self, key: str, **content: Any) -> dict[str, Any]:
        """Write a row, and return it.

        :param key: name of the request, which :func:`request_key` makes
        :param content: request and reply
        """
        row = {"key": key, **content}
        with self._lock, open(self.path, "ab") as file:
            self.rows[key] = row
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        return row


def request_key(*content: Any) -> str:
    """Return a hash of everything that decides about a reply.

    :param content: JSON values
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class ScoreJudge:
    """Prefer the completion with the higher score.

    :param score: reward function as in TRL: keyword arguments ``prompts``, ``completions`` and, if all completions have
        tokens, ``completion_ids``; it returns one number per completion
    :param name: name of the judge in messages
    """

    def __init__(self, score: Callable[..., Sequence[float]], name: str) -> None:
        self.score, self.name = score, name
        # Not kept in a file: a function or a model may have changed under its name.
        self._scores: dict[str, float] = {}

    def __call__(self, pairs: Sequence[Pair]) -> tuple[list[Verdict], dict[str, float]]:
        """Return a verdict for each pair; it is "unparseable" if a score is NaN."""
        keys = [[self._key(prompt, row) for row in rows] for prompt, *rows in pairs]
        rows = {self._key(prompt, row): (prompt, row) for prompt, *completions in pairs for row in completions}
        missing = [(key, *value) for key, value in rows.items() if key not in self._scores]
        for start in tqdm(range(0, len(missing), _BATCH), desc=self.name, unit="batch", disable=not missing):
            batch = missing[start : start + _BATCH]
            texts = {"prompts": [prompt for _, prompt, _ in batch], "completions": [row["completion"] for *_, row in batch]}
            if all(row.get("completion_ids") for *_, row in batch):
                texts["completion_ids"] = [row["completion_ids"] for *_, row in batch]
            scores = self.score(**texts)
            if len(scores) != len(batch):
                raise ValueError(f"judge {self.name!r} returned {len(scores)} scores for {len(batch)} completions")
            self._scores |= {key: float(score) for (key, *_), score in zip(batch, scores, strict=True)}
        return [self._verdict(*(self._scores[key] for key in pair)) for pair in keys], {}

    def _key(self, prompt: str, row: dict[str, Any]) -> str:
        return request_key(prompt, row["completion"], row.get("completion_ids"))

    @staticmethod
    def _verdict(first: float, second: float) -> Verdict:
        if first > second:
            return "first"
        if first < second:
            return "second"
        return "tie" if first == second else "unparseable"  # NaN


class ChatJudge:
    """Ask a chat model which of two completions is better, in both orders.

    The pair is a tie if the answer depends on the order. After a reply with HTTP status 408, 409, 429 or 5xx, and after
    a broken connection, the client asks again after growing pauses.

    :param model: name of the model
    :param ledger: requests and replies that are known already; they are not sent again
    :param base_url: address of an OpenAI-compatible endpoint, OpenAI's by default
    :param api_key: key, which is sent, but never written
    :param template: text of the request with ``{prompt}``, ``{first}`` and ``{second}``
    :param concurrency: number of requests at the same time
    :param retries: repetitions of a failed request
    :param timeout: seconds to wait for a reply
    :param max_tokens: maximum number of tokens of a reply; a model that reasons needs many
    """

    def __init__(
        self,
        model: str,
        ledger: Ledger,
        base_url: str | None = None,
        api_key: str | None = None,
        template: str = TEMPLATE,
        concurrency: int = 8,
        retries: int = 8,
        timeout: float = 120.0,
        max_tokens: int = 512,
    ) -> None:
        if absent := [name for name in ("{prompt}", "{first}", "{second}") if name not in template]:
            raise ValueError(f"template lacks {', '.join(absent)}")
        self.model, self.ledger, self.template = model, ledger, template
        self.concurrency, self.max_tokens = concurrency, max_tokens
        # A local server asks for no key, but the client does.
        self.endpoint: dict[str, Any] = {
            "api_key": api_key or "none",
            "base_url": base_url,
            "max_retries": retries,
            "timeout": timeout,
        }

    def __call__(self, pairs: Sequence[Pair]) -> tuple[list[Verdict], dict[str, float]]:
        """Return a verdict for each pair, and the number of requests, the fraction that prefers the first, and tokens.

        :raises ValueError: if the endpoint fails or rejects a request; replies that have arrived are kept
        """
        requests: dict[str, dict[str, Any]] = {}
        keys: list[list[str]] = []
        for prompt, one, other in pairs:
            first, second = one["completion"], other["completion"]
            orders = [] if first == second else [(first, second), (second, first)]
            made = {request_key(request): request for request in (self._request(prompt, *order) for order in orders)}
            keys.append(list(made))
            requests |= made
        self._ask_all({key: request for key, request in requests.items() if key not in self.ledger.rows})
        rows = {key: self.ledger.rows[key] for key in requests}
        shown = [row["verdict"] for row in rows.values()]
        decided = shown.count("first") + shown.count("second")
        facts = {"requests": len(rows), "first_preferred": shown.count("first") / decided if decided else float("nan")}
        for name in ("prompt_tokens", "completion_tokens"):
            facts[name] = sum(row["usage"].get(name, 0) for row in rows.values())
        return [self._verdict(*(rows[key]["verdict"] for key in pair)) if pair else "tie" for pair in keys], facts

    def _request(self, prompt: str, first: str, second: str) -> dict[str, Any]:
        texts = {"{prompt}": prompt, "{first}": first, "{second}": second}
        # One pass: a completion that contains "{second}" is left as it is.
        content = re.sub(r"\{(prompt|first|second)\}", lambda match: texts[match[0]], self.template)
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": self.max_tokens}

    def _ask_all(self, requests: dict[str, dict[str, Any]]) -> None:
        with (
            openai.OpenAI(**self.endpoint) as client,
            ThreadPoolExecutor(self.concurrency) as executor,
            tqdm(total=len(requests), desc=self.model, unit="request", disable=not requests) as progress,
        ):
            futures = [executor.submit(self._ask, client, key, request) for key, request in requests.items()]
            try:
                for future in as_completed(futures):
                    future.result()
                    progress.update()
            except openai.OpenAIError as error:
                raise ValueError(
                    f"judge {self.model!r} failed: {error}; the same command asks only what is missing"
                ) from error
            finally:
                executor.shutdown(cancel_futures=True)  # replies that are on their way are waited for, and kept

    def _ask(self, client: openai.OpenAI, key: str, request: dict[str, Any]) -> None:
        response = client.chat.completions.with_raw_response.create(**request)
        reply, usage = response.text, {}
        # A proxy may answer with a page of HTML and status 200: that is a reply without a verdict.
        try:
            parsed = json.loads(reply)
            usage = {name: number for name, number in (parsed.get("usage") or {}).items() if isinstance(number, int)}
            reply = parsed["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError, AttributeError):
            reply = reply[:2000]
        self.ledger.add(key, request=request, reply=reply, verdict=parse_reply(reply), usage=usage)

    @staticmethod
    def _verdict(shown: str | None, swapped: str | None) -> Verdict:
        if shown is None or swapped is None:
            return "unparseable"
        agreed: dict[tuple[str, str], Verdict] = {("first", "second"): "first", ("second", "first"): "second"}
        return "tie" if shown == swapped == "tie" else agreed.get((shown, swapped), "order")


def parse_reply(reply: str) -> Literal["first", "second", "tie"] | None:
    """Return the verdict in the last line of a reply, or None if it is not exactly A, B or TIE.

    :param reply: text of the reply; punctuation and case do not matter
    """
    lines = reply.strip().splitlines()
    return _ANSWERS.get(re.sub(r"[\W_]", "", lines[-1]).upper()) if lines else None
