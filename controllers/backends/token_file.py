"""Token file: where Ray's authentication token lies. Nobody but its owner may read it: who has it runs programs on the cluster."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...dataflow.runs.files import make_folder

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Variables that Ray reads."""


def token_file(environment: Mapping[str, str], home: Path) -> Path | None:
    """Where Ray looks for the token; None: a variable has it.

    >>> str(token_file({}, Path("/home/me"))), token_file({"RAY_AUTH_TOKEN": "x"}, Path("/home/me"))
    ('/home/me/.ray/auth_token', None)
    """
    if environment.get(TOKEN):
        return None
    return Path(environment[PATH]) if environment.get(PATH) else home / ".ray" / "auth_token"


def keep_private(environment: Mapping[str, str], home: Path, *, make: bool) -> None:
    """See that only its owner can read the token file. Ray makes it for everybody who may look into the folder.

    Args:
        environment: in which Ray is going to be started, or joined.
        home: folder of the user.
        make: make a file with a token, where there is none, as Ray would for a local cluster.
    """
    file = token_file(environment, home)
    if file is None:
        return
    if make and environment.get(MODE) == "token" and not file.exists():
        with suppress(OSError):  # Ray says what is wrong with the place, or somebody has made one meanwhile
            make_folder(file.parent)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as written:
                written.write(secrets.token_hex(32))
    with suppress(OSError):  # it is not there
        found = file.stat()
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
            file.chmod(0o600)


def unprotected(address: str, environment: Mapping[str, str]) -> str:
    """What is said of a cluster that was joined without a token; empty: it was joined with one.

    >>> unprotected("head:6379", {"RAY_AUTH_MODE": "token"})
    ''
    """
    if environment.get(MODE, "").lower() == "token":
        return ""
    return (
        f"the Ray cluster at {address} was joined without an authentication token: whoever reaches its ports runs programs on its nodes; "
        "start it with RAY_AUTH_MODE=token, and set that here (docs/clusters.md)"
    )
