"""Judges of pairs of completions: a chat model, or scores of a reward model or a Python function."""

import asyncio
import functools
import hashlib
import inspect
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import openai
from tqdm import tqdm

from sb3_ano._secrets import hide, remember
from sb3_ano.llm.rewards import check_rewards, limited

T = TypeVar("T")

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

#: Seconds for a request to a chat model with its repetitions, and for a batch of a function.
REQUEST_SECONDS = 600.0
FUNCTION_SECONDS = 1800.0
# A reply that takes longer once it has begun, or is larger, is not waited for.
_REPLY_SECONDS = 120.0
_LARGEST_REPLY = 1_000_000
# Characters of a reply that are kept: half of them from its end, where the verdict is.
_KEPT = 20_000
_LONGEST_ERROR = 1_000
# Characters at the end of a line in which a verdict is looked for
_LONGEST_LINE = 300


class Ledger:
    """Keep what has been paid for in a JSONL file, each row written as soon as it is known, without keys and passwords.

    A line that a killed process has left unfinished is removed.

    :param path: file; missing parent directories are made
    :param columns: columns that each row has
    :raises ValueError: if a line is not a row of such a file
    """

    def __init__(self, path: Path, columns: Iterable[str] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, threading.Lock()
        self.rows: dict[str, dict[str, Any]] = {}
        with open(path, "a+b") as file:
            file.seek(0)
            complete = [line for line in file if line.endswith(b"\n")]
            file.truncate(sum(map(len, complete)))
        for number, line in enumerate(complete, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not {"key", *columns} <= row.keys():
                raise ValueError(f"{path}, line {number}, is not a row of this comparison; remove the line")
            self.rows[row["key"]] = row

    def add(self, key: str, **content: Any) -> None:
        """Write a row.

        :param key: name of the row, which :func:`hash_key` makes
        :param content: other columns
        """
        with self._lock, open(self.path, "ab") as file:
            self.rows[key] = {"key": key, **hide(content)}
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


def judge_by_score(
    pairs: Sequence[Pair], score: Callable[..., Any], name: str, timeout: float = FUNCTION_SECONDS
) -> list[dict[str, Any]]:
    """Prefer the completion with the higher score; the verdict is ``unparseable`` if a score is NaN or None.

    :param pairs: completions to compare
    :param score: reward function as in TRL: keyword arguments ``prompts``, ``completions`` and, for completions whose tokens
        are known, ``completion_ids``; it returns one number per completion
    :param name: name of the judge in messages
    :param timeout: seconds for a batch
    :raises ValueError: if the function returns anything but one number per completion
    :raises TimeoutError: if a batch takes longer
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
        with limited(timeout, f"judge {name!r}"):
            values = score(**columns)
            values = asyncio.run(values) if inspect.iscoroutine(values) else values
        checked = check_rewards(values, len(batch), f"judge {name!r}", "scores")
        scores |= {id(row): value for row, value in zip(batch, checked, strict=True)}
    signs = [float(np.sign(scores[id(first)] - scores[id(second)])) for first, second in pairs]
    return [{"verdict": {1.0: "win", -1.0: "lose", 0.0: "tie"}.get(sign, "unparseable")} for sign in signs]


def _as_in_trl(row: dict[str, Any]) -> Any:
    text = row["completion"]
    return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]


def judge_by_chat(
    pairs: Sequence[Pair],
    client: openai.OpenAI,
    model: str,
    ledger: Ledger,
    template: str,
    concurrency: int,
    fields: dict[str, Any],
    timeout: float = REQUEST_SECONDS,
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
    :param timeout: seconds for a request, its repetitions and pauses included
    :return: verdicts, the numbers of requests, of answers that prefer the completion shown first or second, and of tokens
    :raises ValueError: if the endpoint fails or rejects a request; replies that have arrived are kept
    """
    remember({"api_key": client.api_key, "base_url": str(client.base_url), "fields": fields})
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
        replies = executor.map(functools.partial(_ask, client, ledger, timeout), missing, missing.values())
        try:
            # An error cancels what has not been sent; replies that are on their way are waited for, and kept.
            list(tqdm(replies, desc=model, total=len(missing), unit="request", disable=not missing or None))
        except (openai.OpenAIError, ConnectionError, TimeoutError) as error:
            # Without its cause, which may contain the key.
            reason = " ".join(hide(str(error)).split())[:_LONGEST_ERROR]
            raise ValueError(f"judge {model!r} failed: {reason}; the same command asks only what is missing") from None
    return [_summary([ledger.rows[key] for key in pair]) for pair in keys]


def _fill(template: str, prompt: str, first: str, second: str) -> str:
    texts = {"{prompt}": prompt, "{first}": first, "{second}": second}
    # One pass: a completion that contains "{second}" is left as it is.
    return re.sub(r"\{(prompt|first|second)\}", lambda match: texts[match[0]], template)


def _ask(client: openai.OpenAI, ledger: Ledger, timeout: float, key: str, request: dict[str, Any]) -> None:
    reply = _within(timeout, lambda: _request(client, request))
    usage: dict[str, int] = {}
    # A proxy may answer with a page of HTML and status 200: that is a reply without a verdict.
    try:
        parsed = json.loads(reply)
        content = parsed["choices"][0]["message"]["content"] or ""
        reply = "".join(part["text"] for part in content) if isinstance(content, list) else str(content)
        usage = {name: number for name, number in (parsed.get("usage") or {}).items() if isinstance(number, int)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        usage = {}
    verdict = parse_reply(reply)

    # Before it is cut, because a part of a secret is harder to know.
    reply = hide(reply)
    if len(reply) > _KEPT:
        reply = f"{reply[: _KEPT // 2]} [...] {reply[-_KEPT // 2 :]}"
    ledger.add(key, request=request, reply=reply, verdict=verdict, usage=usage)


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function, and return its result.

    :param seconds: time after which it is left alone; the thread that still waits for a server ends with the process
    :param function: function to call in a thread
    :raises TimeoutError: if it takes longer
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"there was no complete reply within {seconds:g} seconds") from None


def _request(client: openai.OpenAI, request: dict[str, Any]) -> str:
    """Send a request, again if the connection breaks during the reply, and return the reply."""
    fields = dict(request)
    known = {name: fields.pop(name) for name in ("model", "messages")}
    attempt = 0
    while True:
        # Fields in a body of their own, because local servers take some that the client does not know.
        with client.chat.completions.with_streaming_response.create(**known, extra_body=fields) as response:
            try:
                return _read(response.iter_bytes())
            except TimeoutError:
                raise
            except Exception as error:  # of the HTTP client, whose classes openai does not translate here
                if attempt >= client.max_retries:
                    raise ConnectionError(f"the connection broke during the reply: {error}") from None
        time.sleep(min(0.5 * 2**attempt, 8.0))
        attempt += 1


def _read(parts: Iterable[bytes]) -> str:
    """Read a reply, or the beginning of one that is too large.

    :param parts: the reply as it arrives
    :raises TimeoutError: if it does not end
    """
    reply = bytearray()
    deadline = time.monotonic() + _REPLY_SECONDS
    for part in parts:
        reply += part
        if len(reply) > _LARGEST_REPLY:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"a reply has not ended after {_REPLY_SECONDS:g} seconds")
    return reply[:_LARGEST_REPLY].decode(errors="replace")


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    shown = tuple(row["verdict"] for row in rows)
    verdict = "unparseable" if None in shown else _VERDICTS.get(shown, "order")
    numbers = {f"shown_{place}": shown.count(place) for place in ("first", "second")}
    numbers |= {name: sum(row["usage"].get(name, 0) for row in rows) for name in ("prompt_tokens", "completion_tokens")}
    return {"verdict": verdict, "requests": len(rows), **numbers}


def parse_reply(reply: str) -> str | None:
    """Return the verdict of a reply, or None if there is none, or more than one.

    The verdict is A, B or TIE: in the last line, in a line of its own, after a label such as ``Answer:``, in a box of LaTeX,
    in double brackets, or in a field of a JSON object. Markdown, punctuation and, if nothing follows, case do not matter.

    :param reply: text of the reply
    """
    if "<think>" in reply and "</think>" not in reply:  # it was cut before the answer
        return None
    reply = reply.rpartition("</think>")[2].strip()

    boxed = _BOXED.findall(reply)
    if boxed:
        return _only_verdict([_bare(boxed[-1])])
    verdict = _verdict_of_json(reply)
    if verdict is not None:
        return verdict

    lines = [line.strip()[-_LONGEST_LINE:] for line in reply.splitlines()]
    lines = [line for line in lines if line and not line.startswith("```")]
    if not lines:
        return None
    verdict = _verdict_of_line(lines[-1])
    if verdict is not None:
        return verdict
    if _is_undecided(lines[-1]):
        return None
    return _only_verdict([_bare(line) or _labeled(line) for line in lines])


_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\[\[([^\[\]]*)\]\]")
_OBJECT = re.compile(r"\{[^{}]*\}")
_LABELS = r"(?:answer|verdict|winner|choice|decision|conclusion|result|better|best|preferred|preference|judge?ment)"
_NOUNS = r"(?:answer|option|response|completion|assistant|summary)"
_SEPARATOR = r"(?:\s{0,4}[:=\u2013\u2014-]{1,3}>?\s{0,4}|\s+(?:is|would be)\s{0,4}:?\s{0,4})"
_CHOSEN = rf"\b(?:{_LABELS}{_SEPARATOR}|(?:choose|pick|prefer|select|go with)\s+)(?:{_NOUNS}\s+|an?\s+)?"
_LABELED = re.compile(rf"(?i:{_CHOSEN})\W{{0,4}}((?i:[AB]|TIE)(?=\W*$)|(?:A|B|TIE)\b)")
_BETTER = r"(?:is\s+(?:\w+\s+){0,2}(?:better|best|preferable|winner)|wins)\b"
_COMPARED = re.compile(rf"^\W*(?i:{_NOUNS}\W+)?([AB])\W+(?i:{_BETTER})")
_TIES = {"a tie", "it is a tie", "it s a tie", "this is a tie", "they are tied", "tied"}
_NEGATED = re.compile(r"(?i)\b(?:not|neither|nor|cannot|worse|worst|wrong|incorrect|loser|loses|less)\b|n't\b")
_FIELDS = re.compile(rf"(?i)^(?:final_?|overall_?|the_?)?{_LABELS}(?:_?{_NOUNS})?$")


def _bare(text: str | tuple[str, ...]) -> str | None:
    """Return the verdict that a text consists of."""
    text = text if isinstance(text, str) else "".join(text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\b", "", text)
    text = re.sub(rf"(?i)^\W*{_NOUNS}\b", "", text)
    return _ANSWERS.get(re.sub(r"[\W_]", "", text).upper())


def _labeled(line: str) -> str | None:
    """Return the verdict that follows a label."""
    line = re.sub(r"[*_`]", "", line)
    found = _LABELED.search(line)
    if found is None or _is_undecided(line):
        return None
    return _bare(found[1])


def _verdict_of_line(line: str) -> str | None:
    verdict = _bare(line) or _labeled(line)
    if verdict is not None or _is_undecided(line):
        return verdict
    found = _COMPARED.match(re.sub(r"[*_`]", "", line))
    if found is not None:
        return _bare(found[1])
    words = " ".join(re.findall(r"\w+", line.lower()))
    return "tie" if words in _TIES else None


def _is_undecided(line: str) -> bool:
    """Return whether a line names several verdicts, or denies one."""
    # The label "Answer A" names an answer, "a" may be an article.
    named = set(re.findall(r"\b(?:A|B|TIE)\b", line))
    return len(named) > 1 or (len(named) == 1 and _NEGATED.search(line) is not None)


def _only_verdict(verdicts: list[str | None]) -> str | None:
    different = {verdict for verdict in verdicts if verdict is not None}
    return different.pop() if len(different) == 1 else None


def _verdict_of_json(reply: str) -> str | None:
    """Return the verdict in the last JSON object of a reply, or in a JSON text."""
    bare = re.sub(r"^```\w*|```$", "", reply).strip()
    objects = [bare, *_OBJECT.findall(reply)[-1:]]
    for text in objects:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        fields = content if isinstance(content, dict) else {"answer": content}
        names = [name for name in fields if _FIELDS.match(str(name))] or list(fields)
        return _only_verdict([_bare(fields[name]) for name in names if isinstance(fields[name], str)])
    return None
