"""Keep Ray's authentication token private: whoever reads it can run programs on the cluster."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...dataflow.runs.files import make_folder

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Environment variables that Ray reads."""


def token_file(environment: Mapping[str, str], home: Path) -> Path | None:
    """Return the file where Ray looks for the token, or None if a variable holds the token.

    >>> str(token_file({}, Path("/home/me"))), token_file({"RAY_AUTH_TOKEN": "x"}, Path("/home/me"))
    ('/home/me/.ray/auth_token', None)
    """
    if environment.get(TOKEN):
        return None
    return Path(environment[PATH]) if environment.get(PATH) else home / ".ray" / "auth_token"


def keep_private(environment: Mapping[str, str], home: Path, *, make: bool) -> None:
    """Make the token file readable only by its owner. Ray itself lets others read it."""
    file = token_file(environment, home)
    if file is None:
        return
    if make and environment.get(MODE) == "token" and not file.exists():
        with suppress(
            OSError
        ):  # Ray reports problems with the folder; another process may have created the file
            make_folder(file.parent)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as written:
                written.write(secrets.token_hex(32))
    with suppress(OSError):  # the file does not exist
        found = file.stat()
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
            file.chmod(0o600)


def unprotected(address: str, environment: Mapping[str, str]) -> str:
    """Return a warning if this run joined the cluster without a token, or else "".

    >>> unprotected("head:6379", {"RAY_AUTH_MODE": "token"})
    ''
    """
    if environment.get(MODE, "").lower() == "token":
        return ""
    return (
        f"the Ray cluster at {address} was joined without an authentication token: anyone who can reach its ports can run programs on its "
        "nodes; start it with RAY_AUTH_MODE=token, and set that here (docs/clusters.md)"
    )
