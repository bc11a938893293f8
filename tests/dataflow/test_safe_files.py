"""Reading untrusted files never hangs, and errors name the file."""

import json
import os
from pathlib import Path

import pytest

from weft.dataflow.errors import UserError
from weft.dataflow.safe_files import MAX_DEPTH, open_file, parse_json, read_file, read_json


def test_only_a_regular_file_is_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(UserError, match=f"{path} is {kind}, not a file"):
            open_file(path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path):
    (tmp_path / "large").write_bytes(bytes(101))
    assert len(read_file(tmp_path / "large", 101)) == 101
    with pytest.raises(UserError, match="large has more than 100 bytes"):
        read_file(tmp_path / "large", 100)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than"),
        ("", "not JSON"),
        ("\udcff", "not JSON"),
        ("[1, 2]", "holds a list, not an object"),
        ("3", "holds a int, not an object"),
    ],
    ids=["deep lists", "deep objects", "too deep", "empty", "not UTF-8", "a list", "a number"],
)
def test_a_json_file_without_a_plain_object_is_refused_by_name(tmp_path: Path, text: str, why: str):
    path = tmp_path / "state.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=f"state.json is damaged: .*{why}"):
        read_json(path)


def test_any_json_object_is_read(tmp_path: Path):
    value = {"a": [1, {"b": [None, "x", 2.5]}]}
    (tmp_path / "state.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "state.json") == value
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "it")
