"""Judges of pairs of completions: a chat model, or scores of a reward model or a Python function."""

import asyncio
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
from tqdm import tqdm

#: Two completions of the same prompt: rows of :mod:`sb3_ano.llm.generation`.
Pair = tuple[dict[str, Any], dict[str, Any]]
#: Return a row per pair: ``verdict``, and numbers, of which the report has the sums. The verdict of the first completion is
#: ``win``, ``lose``, ``tie``, ``order`` (it changed when the two were shown in the other order), or ``unparseable``.
Judge = Callable[[Sequence[Pair]], list[dict[str, Any]]]

#: What a chat model is asked. The three names in braces are replaced.
TEMPLATE = Path(__file__).with_name("judge.txt").read_text().strip()
#: Fields of a request besides model and messages, as JSON.
REQUEST = '{"temperature": 0.0, "max_tokens": 512}'
_ANSWERS = {"A": "first", "B": "second", "TIE": "tie"}
# Of the answers to both orders; identical completions need none.
_VERDICTS = {(): "tie", ("tie", "tie"): "tie", ("first", "second"): "win", ("second", "first"): "lose"}
_BATCH = 64


class Ledger:
    """Keep what has been paid for in a JSONL file, each row written as soon as it is known.

    A line that a killed process has left unfinished is removed. One that only lacks its end, as editors leave it, is kept.

    :param path: file; missing parent directories are made
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, threading.Lock()
        with open(path, "a+b") as file:
            file.seek(0)
            complete = file.readlines()
            if complete and not complete[-1].endswith(b"\n"):
                last = complete.pop()
                file.truncate(sum(map(len, complete)))
                with contextlib.suppress(ValueError):
                    json.loads(last)
                    complete.append(last + b"\n")
                    file.write(last + b"\n")
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, complete)}

    def add(self, key: str, **content: Any) -> None:
        """Write a row.

        :param key: name of the row, which :func:`hash_key` makes
        :param content: other columns
        """
        with self._lock, open(self.path, "ab") as file:
            self.rows[key] = {"key": key, **content}
            file.write((json.dumps(self.rows[key]) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def hash_key(*content: Any) -> str:
    """Return a hash of everything that decides about a reply or a completion.

    :param content: JSON values
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def plain(prompt: Any) -> str:
    """Return a prompt as a judge reads it.

    :param prompt: text, or a conversation: list of messages with ``role`` and ``content``
    """
    return prompt if isinstance(prompt, str) else "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def judge_by_score(pairs: Sequence[Pair], score: Callable[..., Sequence[float]], name: str) -> list[dict[str, Any]]:
    """Prefer the completion with the higher score; the verdict is ``unparseable`` if a score is NaN or None.

    :param pairs: completions to compare
    :param score: reward function as in TRL: keyword arguments ``prompts``, ``completions`` and, for completions whose tokens
        are known, ``completion_ids``; it returns one number per completion
    :param name: name of the judge in messages
    :raises ValueError: if the function returns another number of scores
    """
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # by whether the tokens are known
    for row in {id(row): row for pair in pairs for row in pair}.values():
        rows[row.get("completion_ids") is not None].append(row)
    # Batches of either kind, so that a score does not depend on the other rows of a batch.
    batches = [(known, part[start : start + _BATCH]) for known, part in rows.items() for start in range(0, len(part), _BATCH)]
    scores: dict[int, float] = {}
    for known, batch in tqdm(batches, desc=name, unit="batch"):
        columns = {"prompts": [row["prompt"] for row in batch], "completions": [_as_in_trl(row) for row in batch]}
        if known:
            columns["completion_ids"] = [row["completion_ids"] for row in batch]
        values = score(**columns)
        values = asyncio.run(values) if inspect.iscoroutine(values) else values
        if len(values) != len(batch):
            raise ValueError(f"judge {name!r} returned {len(values)} scores for {len(batch)} completions")
        scores |= {id(row): float("nan" if value is None else value) for row, value in zip(batch, values, strict=True)}
    signs = [float(np.sign(scores[id(first)] - scores[id(second)])) for first, second in pairs]
    return [{"verdict": {1.0: "win", -1.0: "lose", 0.0: "tie"}.get(sign, "unparseable")} for sign in signs]


def _as_in_trl(row: dict[str, Any]) -> Any:
    text = row["completion"]
    return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]


def judge_by_chat(
    pairs: Sequence[Pair], client: openai.OpenAI, model: str, ledger: Ledger, template: str, concurrency: int, fields: dict
) -> list[dict[str, Any]]:
    """Ask a chat model which completion is better, in both orders.

    After a reply with HTTP status 408, 409, 429 or 5xx, and after a broken connection, the client asks again after growing
    pauses.

    :param pairs: completions to compare
    :param client: client of an OpenAI-compatible endpoint, which is closed; its key is never written
    :param model: name of the model
    :param ledger: requests and replies that are known already; they are not sent again
    :param template: text of the request with ``{prompt}``, ``{first}`` and ``{second}``
    :param concurrency: number of requests at the same time
    :param fields: further fields of each request, such as those of :data:`REQUEST`
    :return: verdicts, the numbers of requests, of answers that prefer the completion shown first or second, and of tokens
    :raises ValueError: if the endpoint fails or rejects a request; replies that have arrived are kept
    """
    requests: dict[str, dict[str, Any]] = {}
    keys: list[list[str]] = []
    for one, other in pairs:
        texts = one["completion"], other["completion"]
        orders = () if texts[0] == texts[1] else (texts, texts[::-1])
        contents = [_fill(template, plain(one["prompt"]), *order) for order in orders]
        both = [{"model": model, **fields, "messages": [{"role": "user", "content": content}]} for content in contents]
        keys.append([hash_key(request) for request in both])
        requests |= zip(keys[-1], both, strict=True)
    missing = {key: request for key, request in requests.items() if key not in ledger.rows}
    with client, ThreadPoolExecutor(concurrency) as executor:
        replies = executor.map(functools.partial(_ask, client, ledger), missing, missing.values())
        try:
            # An error cancels what has not been sent; replies that are on their way are waited for, and kept.
            list(tqdm(replies, desc=model, total=len(missing), unit="request", disable=not missing or None))
        except openai.OpenAIError as error:
            raise ValueError(f"judge {model!r} failed: {error}; the same command asks only what is missing") from error
    return [_summary([ledger.rows[key] for key in pair]) for pair in keys]


def _fill(template: str, prompt: str, first: str, second: str) -> str:
    texts = {"{prompt}": prompt, "{first}": first, "{second}": second}
    # One pass: a completion that contains "{second}" is left as it is.
    return re.sub(r"\{(prompt|first|second)\}", lambda match: texts[match[0]], template)


def _ask(client: openai.OpenAI, ledger: Ledger, key: str, request: dict[str, Any]) -> None:
    fields = dict(request)
    known = {name: fields.pop(name) for name in ("model", "messages")}
    # As a body of its own, because local servers take fields that the client does not know.
    reply, usage = client.chat.completions.with_raw_response.create(**known, extra_body=fields).text, {}
    # A proxy may answer with a page of HTML and status 200: that is a reply without a verdict.
    try:
        parsed = json.loads(reply)
        content = parsed["choices"][0]["message"]["content"] or ""
        reply = "".join(part["text"] for part in content) if isinstance(content, list) else str(content)
        usage = {name: number for name, number in (parsed.get("usage") or {}).items() if isinstance(number, int)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        reply = reply[:2000]
    ledger.add(key, request=request, reply=reply, verdict=parse_reply(reply), usage=usage)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    shown = tuple(row["verdict"] for row in rows)
    verdict = "unparseable" if None in shown else _VERDICTS.get(shown, "order")
    numbers = {f"shown_{place}": shown.count(place) for place in ("first", "second")}
    numbers |= {name: sum(row["usage"].get(name, 0) for row in rows) for name in ("prompt_tokens", "completion_tokens")}
    return {"verdict": verdict, "requests": len(rows), **numbers}


def parse_reply(reply: str) -> str | None:
    """Return the verdict in the last line of a reply, or None if it is not exactly A, B or TIE.

    :param reply: text of the reply; punctuation and case do not matter
    """
    lines = reply.strip().splitlines()
    return _ANSWERS.get(re.sub(r"[\W_]", "", lines[-1]).upper()) if lines else None
