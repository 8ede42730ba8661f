"""Results on disk."""

import os

import pytest

from sb3_ano.bench.files import cores, machine, read_json, write_json


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "result.json"
    write_json(path, {"seconds": 0.25, "names": ["a"]})
    assert read_json(path) == {"seconds": 0.25, "names": ["a"]}
    assert read_json(tmp_path / "none.json") is None


def test_a_write_that_does_not_finish_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"seconds": 1})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"seconds": 2})
    assert read_json(path) == {"seconds": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ['{"seconds": ', "[1, 2]"])
def test_a_file_that_is_no_result_is_named(text, tmp_path):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="other.json is not a file of results"):
        read_json(tmp_path / "other.json")


def test_the_machine_is_described():
    assert machine()["cores"] == cores() >= 1
    assert machine()["cpu"]
