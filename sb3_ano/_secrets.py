"""Keys, tokens and passwords of this process, and their removal from texts that are printed, raised or stored."""

import base64
import contextlib
import copy
import functools
import html
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import quote, quote_plus, unquote

T = TypeVar("T")

#: What stands for a secret. Without brackets, which are markup in terminals and hosts in addresses.
MASK = "***"

# Words that end the name of a secret, as in api_key, hub_token, DB_PASSWORD and X-Api-Key.
_SECRET_WORDS = {"auth", "authorization", "cookie", "credential", "credentials", "pass", "passphrase", "passwd", "pwd"}
_SECRET_ENDINGS = ("apikey", "password", "secret")
_KINDS_OF_KEYS = {"access", "account", "admin", "api", "auth", "master", "private", "secret", "shared", "signing"}
# Names that something else may have, too, such as a row of a table.
_AMBIGUOUS = {"auth", "key", "pass", "token"}
# A tokenizer has tokens of these names.
_TOKENS_OF_TEXT = {"audio", "bos", "cls", "eos", "image", "mask", "pad", "sep", "special", "stop", "unk", "video"}
# Variables of shells with a directory.
_DIRECTORIES = {"PWD", "OLDPWD"}

# Secrets of less are not looked for.
_SHORTEST = 4
# Parts of this length of long secrets are hidden, except those that may be parts of any word.
_PART = 8
_LONG = 12
# Repeated characters, such as the dashes of a PEM file, give nothing away and occur everywhere.
_FEWEST_CHARACTERS = 5
_WORD_LIKE = re.compile("[_-]*[A-Za-z][a-z_-]*|[A-Z_-]+")

# User and password of an address. A database takes a slash in its password, so what follows a colon may contain one, unless
# the colon starts a port.
_USER = re.compile(r"""(\b[A-Za-z][\w+.-]*://)(?:[^\s/?#"'<>]+|[^\s/?#"'<>@:]*:(?!\d+(?:[/?#]|$))[^\s"'<>@]*)@""")
_QUERY = re.compile(r"""([?&])([\w.%-]+)=([^&#\s"'<>]+)""")
_SCHEME = r"(?:\s|%20|\+|\\u0020)+"
_HEADER = re.compile(rf"(?i)\b(bearer{_SCHEME})(?=[\w.~+/=-]*[\d_.-])[\w.~+/=-]{{6,}}")
_BASIC = re.compile(rf"\b((?i:basic){_SCHEME})(?=[A-Za-z0-9+/]*(?:[\d=]|[a-z][A-Z]))[A-Za-z0-9+/]{{6,}}={{0,2}}")
# Keys of well-known services, whoever they belong to.
_KEY = re.compile(
    r"\b(?:[spr]k-(?=[A-Za-z_-]*\d)[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})"
)
# Servers show the ends of a key: sk-ab***wxyz.
_SHORTENED = re.compile(r"(?<![\w-])([\w-]{0,64})(?:\*{3,}|\.{3}|…)([\w-]{0,64})")
_SHOWN = 3

_remembered: set[str] = set()


def hide(value: T) -> T:
    """Replace the secrets of this process in a text, or in the texts of a dictionary, list or tuple.

    Secrets are the values of environment variables and of arguments with names such as ``HF_TOKEN`` and ``--api_key``, users
    and passwords in addresses, the token of ``hf auth login``, and what :func:`remember` was given. Encodings and parts of
    them are replaced, too, and so are keys of well-known services, whoever they belong to.

    :param value: text, or dictionary, list or tuple; anything else is returned as it is
    """
    hidden: Any = value
    if isinstance(value, str):
        hidden = _hide_in_text(value)
    elif isinstance(value, Path):
        hidden = Path(_hide_in_text(str(value)))
    elif isinstance(value, dict):
        hidden = copy.copy(value)  # of the same class
        hidden.clear()
        for name, part in value.items():
            hidden[hide(name)] = _hide_field(name, part)
    elif type(value) in (list, tuple):  # a named tuple has another constructor
        parts: Any = value
        hidden = type(value)(map(hide, parts))  # type: ignore[call-arg]
    return hidden


def _hide_field(name: object, value: T) -> T | str:
    # The name says what the value is, however short it is.
    if isinstance(name, str) and is_surely_secret(name):
        if isinstance(value, str) and value:
            return MASK
        if type(value) in (list, tuple):
            parts: Any = value
            return type(value)(_hide_field(name, part) for part in parts)  # type: ignore[call-arg]
    return hide(value)


def remember(value: object, name: str = "") -> None:
    """Keep the secrets of a value until the process ends, so that :func:`hide` replaces them.

    :param value: text, or dictionary or list of values; texts are secrets if their names say so, or in addresses
    :param name: name of the value
    """
    _remembered.update(_secrets_of(name, value))


def remember_arguments(arguments: Sequence[str]) -> None:
    """Keep the secrets of a command line until the process ends.

    :param arguments: arguments such as ``--api_key KEY``, ``--token=TOKEN``, ``password:TEXT`` or an address with a password
    """
    option = ""
    for argument in arguments:
        if argument.startswith("-"):
            option, _, argument = argument.lstrip("-").partition("=")
            if not argument:
                continue
        remember(argument, option)

        # JSON, as for --request
        with contextlib.suppress(ValueError, RecursionError):
            remember(json.loads(argument), option)

        # NAME:VALUE and NAME=VALUE, as for --env-kwargs and --grid
        pair = re.match(r"([\w.-]+)[:=](.+)", argument)
        if pair is not None and is_surely_secret(pair[1]):
            remember(pair[2].strip("\"' "), pair[1])
        option = ""


@contextlib.contextmanager
def hidden_output() -> Iterator[None]:
    """Replace secrets in everything that Python prints in the block: logs, warnings, tracebacks and progress bars, too."""
    output: Any = _HidingStream(sys.stdout)
    errors: Any = _HidingStream(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        yield


class _HidingStream:
    """A stream of text that hides secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide(text))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether something with this name is a key, a token or a password.

    :param name: name of an argument, a field, a header or an environment variable
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words:
        return False

    last = words[-1]
    kind = "".join(words[-2:-1])
    if last == "key":
        return kind in {"", *_KINDS_OF_KEYS}
    if last == "token":
        return kind not in _TOKENS_OF_TEXT
    return last in _SECRET_WORDS or last.endswith(_SECRET_ENDINGS)


def is_surely_secret(name: str) -> bool:
    """Return whether :func:`is_secret`, and nothing else is called so, such as a row of a table is called key."""
    return is_secret(name) and name.lower() not in _AMBIGUOUS


def _secrets_of(name: str, value: object) -> Iterator[str]:
    """Yield the secrets of a value, by its name and by the addresses in it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _secrets_of(str(key), part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _secrets_of(name, part)
    elif isinstance(value, str):
        if is_secret(name):
            yield from _spellings(value)
        yield from _secrets_of_addresses(value)


def _spellings(secret: str) -> Iterator[str]:
    """Yield a secret, without the scheme of a header, and decoded if the scheme is Basic."""
    yield secret
    scheme, _, rest = secret.partition(" ")
    if rest and scheme.lower() in ("bearer", "basic", "token"):
        yield rest
    if rest and scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            pair = base64.b64decode(rest, validate=True).decode()
            yield from (pair, pair.partition(":")[2])


def _secrets_of_addresses(text: str) -> Iterator[str]:
    """Yield passwords, and values of the query that are secrets."""
    if "://" not in text:
        return
    for match in _USER.finditer(text):
        pair = match[0].removeprefix(match[1]).removesuffix("@")
        user, _, password = pair.partition(":")
        for spelled in (pair, password or user):
            yield from (spelled, unquote(spelled))
    for _, name, secret in _QUERY.findall(text):
        if is_secret(unquote(name)):
            yield from (secret, unquote(secret))


def known_secrets() -> set[str]:
    """Return the secrets that are known now."""
    secrets = set(_remembered)
    for name, value in os.environ.items():
        secrets.update(_secrets_of_variable(name, value))

    # The places where huggingface_hub looks for the token of hf auth login.
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    secrets.add(_stored_token(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")))
    return secrets


@functools.lru_cache(maxsize=4096)
def _secrets_of_variable(name: str, value: str) -> list[str]:
    """Return the secrets of an environment variable."""
    is_path = os.sep in value and os.path.exists(value)
    if is_path or name in _DIRECTORIES:
        return []
    secrets = list(_secrets_of(name, value))

    # Any key, such as WANDB_KEY
    if name.endswith("_KEY"):
        secrets += _spellings(value)

    # Headers, a line each, as in OPENAI_CUSTOM_HEADERS
    if name.endswith("_HEADERS"):
        for line in value.splitlines():
            header, _, content = line.partition(":")
            secrets += _secrets_of(header.strip(), content.strip())
    return secrets


@functools.lru_cache(maxsize=4)
def _stored_token(path: str) -> str:
    """Return the token that ``hf auth login`` has stored, or an empty text."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).read_text().strip()
    return ""


def _hide_in_text(text: str) -> str:
    if len(text) < _SHORTEST:
        return text
    patterns, parts, long = _patterns(frozenset(known_secrets()))

    if "://" in text:
        text = _USER.sub(rf"\1{MASK}@", text)
    if "=" in text:
        text = _QUERY.sub(_hide_in_query, text)

    for encoded, pattern in patterns.items():
        if encoded in text:  # which is faster than the pattern
            text = pattern.sub(MASK, text)
    if long:
        text = _SHORTENED.sub(lambda found: MASK if _is_shortened(found, long) else found[0], text)
        text = _hide_parts(text, parts)

    for pattern in (_HEADER, _BASIC):
        text = pattern.sub(rf"\1{MASK}", text)
    return _KEY.sub(MASK, text)


def _hide_in_query(found: re.Match[str]) -> str:
    if is_secret(unquote(found[2])):
        return f"{found[1]}{found[2]}={MASK}"
    return found[0]


def _is_shortened(found: re.Match[str], secrets: Sequence[str]) -> bool:
    start = found[1]
    end = found[2]
    for secret in secrets:
        if len(start) >= _SHOWN and secret.startswith(start):
            return True
        if len(end) >= _SHOWN and secret.endswith(end):
            return True
    return False


def _hide_parts(text: str, parts: set[str]) -> str:
    """Replace each stretch of a text that consists of parts."""
    kept = []
    start = 0  # of what is kept next
    position = 0
    while position <= len(text) - _PART:
        if text[position : position + _PART] not in parts:
            position += 1
            continue

        end = position + _PART
        while end < len(text) and text[end - _PART + 1 : end + 1] in parts:
            end += 1
        kept += [text[start:position], MASK]
        start = position = end
    return "".join([*kept, text[start:]])


@functools.lru_cache(maxsize=4)
def _patterns(secrets: frozenset[str]) -> tuple[dict[str, re.Pattern[str]], set[str], list[str]]:
    """Return what to look for in a text: patterns by encoded secret, the longest first; parts of long ones; long secrets.

    :param secrets: secrets that are known
    """
    encodings: set[str] = set()
    long = []
    for secret in secrets:
        # Short words are placeholders, such as "none" and "EMPTY", and occur in any text.
        if len(secret) >= _PART or (len(secret) >= _SHORTEST and not secret.isalpha()):
            encodings.update(_encodings(secret))
        if len(secret) >= _LONG:
            long.append(secret)

    patterns = {}
    parts = set()
    for encoded in sorted(encodings, key=len, reverse=True):
        pattern = re.escape(encoded)
        # A password that is a word must not change longer words, such as the names of fields.
        if len(encoded) < _LONG or encoded.isalpha():
            patterns[encoded] = re.compile(rf"(?<![A-Za-z0-9_]){pattern}(?![A-Za-z0-9_])")
            continue

        patterns[encoded] = re.compile(pattern)
        for index in range(len(encoded) - _PART + 1):
            part = encoded[index : index + _PART]
            if len(set(part)) >= _FEWEST_CHARACTERS and not _WORD_LIKE.fullmatch(part):
                parts.add(part)
    return patterns, parts, long


def _encodings(secret: str) -> Iterator[str]:
    """Yield a secret as it may occur in addresses, JSON, HTML, Base64 and hexadecimal numbers."""
    yield from (secret, repr(secret)[1:-1], html.escape(secret))

    # Addresses, and addresses in the queries of others
    escaped = quote(secret, safe="")
    yield from (escaped, quote(secret), quote_plus(secret), quote(escaped, safe=""))
    yield re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), escaped)

    # JSON, JSON in JSON, and the spellings of PHP and of careful encoders
    quoted = json.dumps(secret)[1:-1]
    yield from (quoted, json.dumps(quoted)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quoted.replace("/", r"\/"))
    yield re.sub("[^A-Za-z0-9]", lambda character: f"\\u{ord(character[0]):04x}", secret)

    content = secret.encode()
    yield content.hex()
    if len(content) < 6:  # a few letters of Base64 are a word
        return
    # Base64 of a text depends on the position of the secret in it. Letters that other bytes share are left out.
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(offset) + content).decode().rstrip("=")
        if (offset + len(content)) % 3:
            encoded = encoded[:-1]
        yield encoded[first:]
        yield encoded[first:].translate(str.maketrans("+/", "-_"))
