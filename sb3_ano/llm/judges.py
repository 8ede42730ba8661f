"""Judges of pairs of completions: a chat model, or scores of a reward model or a Python function."""

import asyncio
import contextlib
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
from typing import Any, TypeAlias

import numpy as np
import openai
from tqdm import tqdm

from sb3_ano._secrets import hide, remember
from sb3_ano.llm.data import Prompt
from sb3_ano.llm.rewards import checked_function

#: A row of a table or a file, or a JSON object.
Row: TypeAlias = dict[str, Any]
#: Two completions of the same prompt: rows of :mod:`sb3_ano.llm.generation`.
Pair: TypeAlias = tuple[Row, Row]
#: Return a row per pair: ``verdict``, and numbers, of which the report has the sums. The verdict of the first completion is
#: ``win``, ``lose``, ``tie``, ``order`` (it changed when the two were shown in the other order), or ``unparseable``.
Judge: TypeAlias = Callable[[Sequence[Pair]], list[Row]]

#: What a chat model is asked. The three names in braces are replaced.
TEMPLATE = Path(__file__).with_name("judge.txt").read_text().strip()
#: Fields of a request besides model and messages, as JSON.
REQUEST = '{"temperature": 0.0, "max_tokens": 512}'
_ANSWERS = {"A": "first", "B": "second", "TIE": "tie"}
# Of the answers to both orders; identical completions need none.
_VERDICTS = {
    (): "tie",
    ("tie", "tie"): "tie",
    ("first", "second"): "win",
    ("second", "first"): "lose",
}
# Of differences of scores
_SIGNS = {1.0: "win", 0.0: "tie", -1.0: "lose"}
# Completions that a function scores at the same time
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

    A line that a killed process has left unfinished is removed. One that only lacks its end, as editors leave it, is kept.

    :param path: file; missing parent directories are made
    :param columns: columns that each row has
    :raises ValueError: if a line is not a row of such a file
    """

    def __init__(self, path: Path, columns: Iterable[str] = ()) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self._lock = threading.Lock()

        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.seek(0)
            lines = file.readlines()

            # The line that a process was writing when it was killed
            if lines and not lines[-1].endswith(b"\n"):
                last = lines.pop()
                file.truncate(sum(map(len, lines)))
                with contextlib.suppress(ValueError):
                    json.loads(last)
                    lines.append(last + b"\n")
                    file.write(last + b"\n")

        # Anything else is of another file, or was edited.
        required = {"key", *columns}
        for number, line in enumerate(lines, start=1):
            row = None
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
            if not isinstance(row, dict) or not required <= row.keys():
                raise ValueError(f"{path}, line {number}, is not a row of this comparison; remove the line")
            self.rows[row["key"]] = row

    def add(self, key: str, **content: object) -> None:
        """Write a row.

        :param key: name of the row, which :func:`hash_key` makes
        :param content: other columns
        """
        row = {"key": key, **hide(content)}
        with self._lock, open(self.path, "ab") as file:
            self.rows[key] = row
            file.write((json.dumps(row) + "\n").encode())
            # A reply that is paid for must not be lost with the machine.
            file.flush()
            os.fsync(file.fileno())


def hash_key(*content: object) -> str:
    """Return a hash of everything that decides about a reply or a completion.

    :param content: JSON values
    """
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def plain(prompt: Prompt) -> str:
    """Return a prompt as a judge reads it.

    :param prompt: text, or a conversation: list of messages with ``role`` and ``content``
    """
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def judge_by_score(
    pairs: Sequence[Pair],
    score: Callable[..., Any],
    name: str,
    timeout: float = FUNCTION_SECONDS,
) -> list[Row]:
    """Prefer the completion with the higher score; the verdict is ``unparseable`` if a score is NaN or None.

    :param pairs: completions to compare
    :param score: reward function as in TRL: keyword arguments ``prompts``, ``completions`` and, for completions whose tokens
        are known, ``completion_ids``; it returns one number per completion
    :param name: name of the judge in messages
    :param timeout: seconds for a batch
    :raises ValueError: if the function returns anything but one number per completion
    :raises TimeoutError: if a batch takes longer
    """
    # Completions whose tokens are known, and others, so that a score does not depend on the other rows of a batch.
    known: dict[int, Row] = {}
    texts: dict[int, Row] = {}
    for pair in pairs:
        for row in pair:
            is_known = row.get("completion_ids") is not None
            (known if is_known else texts)[id(row)] = row

    score = checked_function(score, name, timeout)
    scores: dict[int, float] = {}
    for rows in (list(known.values()), list(texts.values())):
        starts = range(0, len(rows), _BATCH)
        for start in tqdm(starts, desc=name, unit="batch", disable=not rows or None):
            batch = rows[start : start + _BATCH]
            columns: dict[str, list[Any]] = {}
            columns["prompts"] = [row["prompt"] for row in batch]
            columns["completions"] = [_as_in_trl(row) for row in batch]
            if id(batch[0]) in known:
                columns["completion_ids"] = [row["completion_ids"] for row in batch]

            values = score(**columns)
            if inspect.iscoroutine(values):
                values = asyncio.run(values)
            scores.update(zip(map(id, batch), values, strict=True))

    verdicts = []
    for one, other in pairs:
        # The sign is NaN if one of them has no score.
        sign = float(np.sign(scores[id(one)] - scores[id(other)]))
        verdicts.append({"verdict": _SIGNS.get(sign, "unparseable")})
    return verdicts


def _as_in_trl(row: Row) -> Prompt:
    text = row["completion"]
    if isinstance(row["prompt"], str):
        return text
    return [{"role": "assistant", "content": text}]


def judge_by_chat(
    pairs: Sequence[Pair],
    client: openai.OpenAI,
    model: str,
    ledger: Ledger,
    template: str,
    concurrency: int,
    fields: Row,
    timeout: float = REQUEST_SECONDS,
) -> list[Row]:
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

    # Two requests per pair; a request whose reply is known is not sent again.
    missing: dict[str, Row] = {}
    keys: list[list[str]] = []
    for pair in pairs:
        keys.append([])
        for first, second in (pair, pair[::-1]):
            # Identical completions are a tie.
            if first["completion"] == second["completion"]:
                continue
            prompt = plain(pair[0]["prompt"])
            content = _fill(template, prompt, first["completion"], second["completion"])
            message = {"role": "user", "content": content}
            request = {"model": model, **fields, "messages": [message]}
            key = hash_key(request)
            keys[-1].append(key)
            if key not in ledger.rows:
                missing[key] = request

    def ask(key: str) -> None:
        reply = _within(timeout, lambda: _request(client, missing[key]))
        _record(ledger, key, missing[key], reply)

    with client, ThreadPoolExecutor(concurrency) as executor:
        try:
            # An error cancels what has not been sent; replies that are on their way are waited for, and kept.
            replies = executor.map(ask, missing)
            bar = tqdm(
                replies,
                desc=model,
                total=len(missing),
                unit="request",
                disable=not missing or None,
            )
            for _ in bar:
                pass
        except (openai.OpenAIError, ConnectionError, TimeoutError) as error:
            # Without its cause, which may contain the key.
            words = hide(str(error)).split()
            reason = " ".join(words)[:_LONGEST_ERROR]
            raise ValueError(f"judge {model!r} failed: {reason}; the same command asks only what is missing") from None

    summaries = []
    for keys_of_pair in keys:
        replies_to_pair = [ledger.rows[key] for key in keys_of_pair]
        summaries.append(_summary(replies_to_pair))
    return summaries


def _fill(template: str, prompt: str, first: str, second: str) -> str:
    # One pass: a completion that contains "{second}" is left as it is.
    texts = {"{prompt}": prompt, "{first}": first, "{second}": second}
    return re.sub(r"\{(prompt|first|second)\}", lambda match: texts[match[0]], template)


def _record(ledger: Ledger, key: str, request: Row, reply: str) -> None:
    """Write a reply with its verdict."""
    # A proxy may answer with a page of HTML and status 200: that is a reply without a verdict.
    usage: dict[str, int] = {}
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        parsed = json.loads(reply)
        content = parsed["choices"][0]["message"]["content"] or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        reply = str(content)

        # Servers may send anything here.
        for name, number in (parsed.get("usage") or {}).items():
            if isinstance(number, int):
                usage[name] = number
    verdict = parse_reply(reply)

    # Before it is cut, because a part of a secret is harder to know.
    reply = hide(reply)
    if len(reply) > _KEPT:
        reply = f"{reply[: _KEPT // 2]} [...] {reply[-_KEPT // 2 :]}"
    ledger.add(key, request=request, reply=reply, verdict=verdict, usage=usage)


def _within(seconds: float, function: Callable[[], str]) -> str:
    """Call a function, and return its result.

    :param seconds: time after which it is left alone; the thread that still waits for a server ends with the process
    :param function: function to call in a thread
    :raises TimeoutError: if it takes longer
    """
    # Unlike the threads of an executor, this one does not keep the process from ending.
    result: Future[str] = Future()

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


def _request(client: openai.OpenAI, request: Row) -> str:
    """Send a request, again if the connection breaks during the reply, and return the reply."""
    # The others in a body of their own, because local servers take some that the client does not know.
    others = dict(request)
    model = others.pop("model")
    messages = others.pop("messages")

    for attempt in range(client.max_retries + 1):
        create = client.chat.completions.with_streaming_response.create
        with create(model=model, messages=messages, extra_body=others) as response:
            try:
                return _read(response.iter_bytes())
            except TimeoutError:
                raise
            except Exception as error:
                # The classes of the HTTP client, which openai does not translate here.
                broken = f"the connection broke during the reply: {error}"
        if attempt < client.max_retries:
            time.sleep(min(0.5 * 2**attempt, 8.0))
    raise ConnectionError(broken)


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


def _summary(rows: list[Row]) -> Row:
    """Return the verdict of a pair, from the answers to both orders, and numbers of answers and tokens."""
    # Any other combination depends on the order in which the completions are shown.
    answers = tuple(row["verdict"] for row in rows)
    verdict = _VERDICTS.get(answers, "order")
    if None in answers:
        verdict = "unparseable"
    return {
        "verdict": verdict,
        "requests": len(rows),
        "shown_first": answers.count("first"),
        "shown_second": answers.count("second"),
        "prompt_tokens": sum(row["usage"].get("prompt_tokens", 0) for row in rows),
        "completion_tokens": sum(row["usage"].get("completion_tokens", 0) for row in rows),
    }


# A box of LaTeX, or double brackets
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\[\[([^\[\]]*)\]\]")
_OBJECT = re.compile(r"\{[^{}]*\}")
# Words before a verdict, as in "Answer: A", "The winner is Answer A" and "I prefer A"
_LABELS = r"(?:answer|verdict|winner|choice|decision|conclusion|result|better|best|preferred|preference|judge?ment)"
_NOUNS = r"(?:answer|option|response|completion|assistant|summary)"
_SEPARATOR = r"(?:\s{0,4}[:=\u2013\u2014-]{1,3}>?\s{0,4}|\s+(?:is|would be)\s{0,4}:?\s{0,4})"
_CHOSEN = rf"\b(?:{_LABELS}{_SEPARATOR}|(?:choose|pick|prefer|select|go with)\s+)(?:{_NOUNS}\s+|an?\s+)?"
_LABELED = re.compile(rf"(?i:{_CHOSEN})\W{{0,4}}((?i:[AB]|TIE)(?=\W*$)|(?:A|B|TIE)\b)")
# Words after a verdict, as in "Answer A is the better one"
_BETTER = r"(?:is\s+(?:\w+\s+){0,2}(?:better|best|preferable|winner)|wins)\b"
_COMPARED = re.compile(rf"^\W*(?i:{_NOUNS}\W+)?([AB])\W+(?i:{_BETTER})")
_TIES = re.compile(r"(?i)^\W*(?:(?:it|this)\W+i?s\s+)?(?:a\s+tie|tied)\W*$")
_NEGATED = re.compile(r"(?i)\b(?:not|neither|nor|cannot|worse|worst|wrong|incorrect|loser|loses|less)\b|n't\b")
_FIELDS = re.compile(rf"(?i)^(?:final_?|overall_?|the_?)?{_LABELS}(?:_?{_NOUNS})?$")


def parse_reply(reply: str) -> str | None:
    """Return the verdict of a reply, or None if there is none, or more than one.

    The verdict is A, B or TIE: in the last line, in a line of its own, after a label such as ``Answer:``, in a box of LaTeX,
    in double brackets, or in a field of a JSON object. Markdown, punctuation and, if nothing follows, case do not matter.

    :param reply: text of the reply
    """
    # A reply that was cut before the answer has only thoughts.
    _, _, answer = reply.rpartition("</think>")
    if "<think>" in answer:
        return None
    answer = answer.strip()

    # The last box, or the last JSON object
    boxed = _BOXED.findall(answer)
    if boxed:
        return _bare("".join(boxed[-1]))
    verdict = _verdict_of_json(answer)
    if verdict is not None:
        return verdict

    # Without the marks and fences of Markdown
    lines = []
    for line in answer.splitlines():
        line = re.sub(r"[*_`]", "", line.strip()[-_LONGEST_LINE:])
        if line:
            lines.append(line)
    if not lines:
        return None

    # The last line, or else the only verdict in any line
    verdicts = [_verdict_of_line(line) for line in lines]
    if verdicts[-1] is not None or _is_undecided(lines[-1]):
        return verdicts[-1]
    return _only_verdict(verdicts)


def _verdict_of_line(line: str) -> str | None:
    """Return the verdict in a line of a reply."""
    verdict = _bare(line)
    if verdict is not None or _is_undecided(line):
        return verdict

    # After a label, or before a comparison
    found = _LABELED.search(line) or _COMPARED.match(line)
    if found is not None:
        return _bare(found[1])
    return "tie" if _TIES.match(line) else None


def _bare(text: str) -> str | None:
    """Return the verdict that a text consists of."""
    # Without commands of LaTeX, a noun such as Answer, and punctuation
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\b", "", text)
    text = re.sub(rf"(?i)^\W*{_NOUNS}\b", "", text)
    text = re.sub(r"[\W_]", "", text)
    return _ANSWERS.get(text.upper())


def _is_undecided(line: str) -> bool:
    """Return whether a line names several verdicts, or denies one."""
    # The label "Answer A" names an answer, "a" may be an article.
    named = set(re.findall(r"\b(?:A|B|TIE)\b", line))
    is_denied = len(named) == 1 and _NEGATED.search(line) is not None
    return len(named) > 1 or is_denied


def _only_verdict(verdicts: list[str | None]) -> str | None:
    different = set(verdicts) - {None}
    return different.pop() if len(different) == 1 else None


def _verdict_of_json(reply: str) -> str | None:
    """Return the verdict in the last JSON object of a reply, or in a JSON text."""
    bare = re.sub(r"^```\w*|```$", "", reply).strip()
    for text in (bare, *_OBJECT.findall(reply)[-1:]):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue

        # Fields with the name of a verdict, or all if there is none
        fields = content if isinstance(content, dict) else {"answer": content}
        names = [name for name in fields if _FIELDS.match(name)] or list(fields)
        verdicts = []
        for name in names:
            if isinstance(fields[name], str):
                verdicts.append(_bare(fields[name]))
        return _only_verdict(verdicts)
    return None
