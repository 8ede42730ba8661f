"""Nothing here asks a network; the tests are left out where the extra ``llm`` is not installed, but not in CI."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("trl") is None and "CI" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A working directory with a policy, a reward model and data."""
    from tests.llm.tiny import classifier, prompts

    monkeypatch.chdir(tmp_path)
    classifier(".")
    prompts().to_json("posts/train.jsonl")
    prompts().select(range(8)).to_json("posts/test.jsonl")
    return tmp_path
