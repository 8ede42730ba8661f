"""Keys and passwords are hidden in what is printed, raised and stored, in any encoding, and other texts are left alone."""

import base64
import html
import itertools
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import quote

import pytest
import yaml

from sb3_ano import _secrets, cli
from sb3_ano._io import write_file, write_json
from sb3_ano._secrets import MASK, hide, is_secret, remember, remember_arguments
from sb3_ano._system import require_reachable
from tests.common import python

KEY = "sk-proj-aB3/dE+f6Gh1J2k3L4m5N6_7"
PASSWORD = "s3cret&'pass/word"


@pytest.fixture(autouse=True)
def _secrets_of_this_test(monkeypatch, tmp_path):
    monkeypatch.setattr(_secrets, "_remembered", set())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


ENCODINGS = {
    "plain": str,
    "header": lambda key: f"Authorization: Bearer {key}",
    "address": lambda key: quote(key, safe=""),
    "address in an address": lambda key: quote(quote(key, safe=""), safe=""),
    "address in lower case": lambda key: quote(key, safe="").replace("%2F", "%2f").replace("%2B", "%2b"),
    "JSON": lambda key: json.dumps({"echo": key}),
    "JSON in JSON": lambda key: json.dumps(json.dumps({"echo": key})),
    "JSON of PHP": lambda key: key.replace("/", r"\/"),
    "JSON without punctuation": lambda key: "".join(c if c.isalnum() else f"\\u{ord(c):04x}" for c in key),
    "HTML": html.escape,
    "Python": repr,
    "hexadecimal": lambda key: key.encode().hex(),
    "start": lambda key: f"your key {key[:12]} is wrong",
    "middle": lambda key: key[5:16],
    "end": lambda key: key[-10:],
    **{f"Base64 after {n} bytes": lambda key, n=n: base64_of("x" * n + key + "y" * n) for n in range(3)},
    "Base64 of addresses": lambda key: base64.urlsafe_b64encode(f"Bearer {key}".encode()).decode(),
}


@pytest.mark.parametrize("secret", [KEY, PASSWORD])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_secret_is_hidden_in_any_encoding(encoding, secret):
    remember(PASSWORD, "password")
    echo = ENCODINGS[encoding](secret)
    hidden = hide(f"The server said: {echo} .")
    assert hidden.startswith("The server said: ")
    assert hidden.endswith(" .")
    assert MASK in hidden
    # No eight characters of it are left, and a Base64 text without them does not decode to them.
    parts = {echo[i : i + 8] for i in range(len(echo) - 7)}
    secret_parts = {form[i : i + 8] for form in (secret, ENCODINGS["address"](secret)) for i in range(len(form) - 7)}
    assert not any(part in hidden for part in parts & secret_parts)
    if "Base64" in encoding:
        assert len(hidden) < len(f"The server said: {echo} .") - len(secret)


@pytest.mark.parametrize("echo", ["sk-proj-***L4m5N6_7", "sk-pr****************6_7", "sk-p...N6_7", "sk-…6_7"])
def test_the_ends_of_a_key_are_hidden(echo):
    assert hide(f"Incorrect API key provided: {echo}.") == f"Incorrect API key provided: {MASK}."


@pytest.mark.parametrize(
    ("variable", "value", "secret"),
    [
        ("HF_TOKEN", "hf_AbCdEfGhIj", "hf_AbCdEfGhIj"),
        ("WANDB_API_KEY", "0123456789abcdef0123", "0123456789abcdef0123"),
        ("OPENAI_BASE_URL", "https://user:hunter2@host/v1", "hunter2"),
        ("HTTPS_PROXY", "http://me:pa%20ss1@proxy:3128", "pa ss1"),
        ("OPENAI_CUSTOM_HEADERS", "X-Team: blue\nX-Api-Key: headerkey1", "headerkey1"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
        ("PGPASSWORD", "tiger12", "tiger12"),
    ],
    ids=itertools.count(),  # pytest puts the id into a variable
)
def test_secrets_of_the_environment_are_known(variable, value, secret, monkeypatch):
    assert secret in hide(secret)
    monkeypatch.setenv(variable, value)
    assert hide(f"before {secret} after") == f"before {MASK} after"


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME"])
def test_the_token_of_hf_auth_login_is_known(variable, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HOME")
    place = {"HF_HOME": "token", "HF_TOKEN_PATH": "", "XDG_CACHE_HOME": "huggingface/token"}[variable]
    file = tmp_path / variable / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("hf_StoredToken1234\n")
    monkeypatch.setenv(variable, str(tmp_path / variable))
    assert hide("token hf_StoredToken1234") == f"token {MASK}"


@pytest.mark.parametrize(
    ("arguments", "secret"),
    [
        (["--api_key", "hunter2", "up.jsonl"], "hunter2"),
        (["--api-key=correct-horse"], "correct-horse"),
        (["--hub_token", "hf_12345678"], "hf_12345678"),
        (["--base_url", "http://me:correct%20horse@host/v1"], "correct horse"),
        (["--base_url", "http://host/v1?api_key=abc-123"], "abc-123"),
        (["--storage", "postgresql://me:with/slash1@host/db"], "with/slash1"),
        (["--request", '{"extra_headers": {"Authorization": "Bearer abcd-1234"}}'], "abcd-1234"),
        (["--env-kwargs", "password:'tiger12'"], "tiger12"),
    ],
)
def test_secrets_of_the_command_line_are_known(arguments, secret):
    remember_arguments(arguments)
    assert secret not in hide(f"a {secret} b {base64_of('me:' + secret)}")
    assert secret not in hide(" ".join(arguments))
    assert hide("up.jsonl host/v1 db me") == "up.jsonl host/v1 db me"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("http://me:pw@host:80/v1", f"http://{MASK}@host:80/v1"),
        ("redis://:pw@host", f"redis://{MASK}@host"),
        ("https://token@github.com/a", f"https://{MASK}@github.com/a"),
        ("mysql+pymysql://me:p@ss@host/db", f"mysql+pymysql://{MASK}@host/db"),
        ("GET /v1?key=abc&size=3&access_token=x", f"GET /v1?key={MASK}&size=3&access_token={MASK}"),
        ("Bearer unknown-token-1", f"Bearer {MASK}"),
        ("Basic dTpwYXNz", f"Basic {MASK}"),
        ("another key sk-1234567890abcdefgh", f"another key {MASK}"),
    ],
)
def test_addresses_and_headers_are_known_by_their_form(text, hidden):
    assert hide(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "https://medium.com/@user/post http://127.0.0.1:8000/@x mail me@host",
        "The bearer of basic understanding, and so on... the end***",
        "--eos_token <|endoftext|> --max_tokens 512 key=value",
        "EMPTY none ollama test",
        "0.123456789 --------------- ================",
    ],
)
def test_other_texts_are_left_alone(text, monkeypatch):
    monkeypatch.setenv("LOCAL_API_KEY", "EMPTY")
    monkeypatch.setenv("OTHER_API_KEY", "test")
    remember_arguments(["--eos_token", "<|endoftext|>", "key=value"])
    assert hide(text) == text


def test_names_of_secrets():
    names = ("OPENAI_API_KEY", "api-key", "hub_token", "X-Api-Key", "apiKey", "DB_PASSWORD", "client_secret", "Authorization")
    assert all(map(is_secret, names))
    assert not any(map(is_secret, ("eos_token", "max_tokens", "norm_obs_keys", "text_key", "keyboard", "policy", "")))


def test_values_are_hidden_by_name_and_keep_their_types():
    settings = {"hub_token": "x", "key": "a row", "list": [KEY, 3, None], "pair": ("a", KEY), "path": Path("runs")}
    settings["password"] = ["y", 2]
    hidden = {"hub_token": MASK, "key": "a row", "list": [MASK, 3, None], "pair": ("a", MASK), "path": Path("runs")}
    hidden["password"] = [MASK, 2]
    assert hide(settings) == hidden
    assert settings["list"][0] == KEY  # the original is left alone


def test_files_are_written_without_secrets(tmp_path):
    write_file(tmp_path / "a.md", f"made with {KEY}")
    write_json(tmp_path / "a.json", {"args": ["--api_key", KEY], "note": f'"{KEY}"'})
    assert (tmp_path / "a.md").read_text() == f"made with {MASK}"
    assert json.loads((tmp_path / "a.json").read_text()) == {"args": ["--api_key", MASK], "note": f'"{MASK}"'}


def test_nothing_printed_by_a_command_has_a_secret(monkeypatch, capsys):
    """Texts, logs, the error in one line, and the traceback with its causes."""

    def fail(_):
        print("printed", KEY)
        sys.stdout.writelines([KEY])
        print("printed", "hunter2", file=sys.stderr)
        logging.getLogger("client").error("POST %s", f"http://me:hunter2@host?api_key={KEY}")
        try:
            raise KeyError(KEY)
        except KeyError as error:
            raise ValueError(f"401: {KEY} hunter2") from error

    assert cli.run(fail, ["--password", "hunter2"]) == 2
    monkeypatch.setenv("SB3_ANO_TRACEBACK", "1")
    assert cli.run(fail, ["--password", "hunter2"]) == 2
    shown = "".join(capsys.readouterr())
    assert shown.count("401: *** ***") == 2
    assert "KeyError" in shown
    for secret in (KEY, "hunter2", KEY[:10], KEY[-10:]):
        assert secret not in shown


def test_a_wrong_option_does_not_repeat_a_key(capsys):
    arguments = ["bench", "report", "--results", ".", "--out", "x", "--api_key", "hunter2-and-more"]
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert "--api_key" in shown
    assert "hunter2" not in shown


def test_messages_about_storages_and_clusters_have_no_password(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    storage = "nothing://me:hunter2@host/db"
    assert cli.main(["train", "--algo", "ano", "--env", "CartPole-v1", "-optimize", "--storage", storage]) == 2
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err
    with pytest.raises(ValueError, match="is not allowed") as refused:
        require_reachable("--address", "ray://me:hunter2@host:1")
    assert "hunter2" not in str(refused.value)


def test_a_run_of_the_zoo_stores_no_password(tmp_path):
    """In its options, its command line, its record, and on the terminal."""
    arguments = ["train", "--algo", "ano", "--env", "CartPole-v1", "-n", "64", "-params", "n_steps:8", "batch_size:8"]
    arguments += ["--wandb-project-name", "https://host/project?password=tiger-12345"]
    arguments += ["--verbose", "0", "--env-kwargs", "render_mode:None"]
    done = python("-m", "sb3_ano.zoo", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "logs" / "ano").glob("CartPole-v1_1")
    texts = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {"args.yml", "command.txt", "run.json"} <= texts.keys()
    assert yaml.unsafe_load(texts["args.yml"])["wandb_project_name"].endswith(f"?password={MASK}")
    for name, content in {**texts, "shown": (done.stdout + done.stderr).encode()}.items():
        assert b"tiger-12345" not in content, name


def test_weights_and_biases_gets_no_secrets(monkeypatch):
    from sb3_ano.zoo import fixes

    seen = []
    wandb = SimpleNamespace(init=lambda config, **_: seen.extend([config, list(sys.argv)]), __spec__=mock.Mock())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(sys, "argv", ["train", "--storage", "mysql://me:hunter2@host/db"])
    remember_arguments(sys.argv)
    with fixes.secrets_in_wandb():
        wandb.init(config={"storage": "mysql://me:hunter2@host/db"}, project="x")
    address = f"mysql://{MASK}@host/db"
    assert seen == [{"storage": address}, ["train", "--storage", address]]
    assert sys.argv[-1] == "mysql://me:hunter2@host/db"
