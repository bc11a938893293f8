"""Only the owner can read the token of a cluster."""

import os
from pathlib import Path

from weft.controllers.backends.token_file import keep_private, unprotected


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_a_token_is_made_for_its_owner_alone_and_kept(tmp_path: Path):
    environment, file = {"RAY_AUTH_MODE": "token"}, tmp_path / ".ray" / "auth_token"
    before = os.umask(0)
    try:
        keep_private(environment, tmp_path, make=True)
    finally:
        os.umask(before)
    token = file.read_text()
    assert mode(file) == 0o600 and len(token) == 64
    keep_private(environment, tmp_path, make=True)
    assert file.read_text() == token


def test_a_file_that_others_may_read_is_closed_also_before_a_cluster_is_joined(tmp_path: Path):
    file = tmp_path / "elsewhere"
    file.write_text("a token")
    file.chmod(0o644)
    keep_private({"RAY_AUTH_TOKEN_PATH": str(file)}, tmp_path, make=False)
    assert mode(file) == 0o600 and file.read_text() == "a token"
    assert list(tmp_path.iterdir()) == [file]


def test_nothing_is_made_where_a_variable_has_the_token_or_none_is_wanted(tmp_path: Path):
    keep_private({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, tmp_path, make=True)
    keep_private({"RAY_AUTH_MODE": "disabled"}, tmp_path, make=True)
    keep_private({"RAY_AUTH_MODE": "token"}, tmp_path, make=False)
    assert not list(tmp_path.iterdir())


def test_a_cluster_without_a_token_is_said_to_be_open():
    assert "anyone who can reach its ports can run programs on its nodes" in unprotected("head:6379", {})
