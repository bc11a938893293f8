"""Scratch: a run's folder on a node's local disk. It stores the node's segments if the run may use
several machines.

    SCRATCH/weft-NAME-1f0c5a33-9d2e71b0/           the run's name, a checksum of its directory, and a random part
    SCRATCH/weft-NAME-1f0c5a33-9d2e71b0/in_use     each process of the run on this machine locks it until it ends
    SCRATCH/weft-NAME-1f0c5a33-9d2e71b0/NODE/      the segments of a node

A daemon (`watch`) removes the folder once no process has held it for GRACE_S, however the run
ended. A run that restarts within that time finds its rows; a later one must generate them again.
The daemon runs this module, so it imports little.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..runs.files import Disk, make_folder
from ..safe_files import read_json

NOTE = "scratch.json"
"""File in the buffer's folder with the name of the scratch folder."""
IN_USE = "in_use"
OVER = "over"
"""File that marks the run as over, so that no process uses the folder again."""
GRACE_S = 30.0
"""[s] How long to keep a folder after the last process released it."""
HOLD_S = 10.0
"""[s] Maximum wait for a folder that is being removed."""
POLL_S = 0.5
"""[s] Interval between the daemon's checks."""
LEAST_BYTES = 1 << 30
"""[bytes] Warn if less space than this is free."""
MOUNTS = Path("/proc/self/mounts")
NETWORK = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"),
    *("nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
)
"""Types of network file systems, besides all `fuse.` types except `LOCAL_FUSE`."""
LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.overlayfs")

_held: dict[Path, int] = {}


@dataclass(frozen=True)
class Scratch:
    """A run's scratch folder, with the same name on all machines."""

    name: str
    parent: Path | None = None
    """Parent folder. Default: the machine's temporary folder (`TMPDIR`)."""
    grace_s: float = GRACE_S

    @classmethod
    def of(cls, buffer: Path, parent: Path | None) -> Scratch:
        """Return a run's scratch folder in `parent`, the folder that the user chose, if any. The
        buffer's folder stores its name, so that each start of the run uses the same one."""
        noted, made = buffer / NOTE, None
        with suppress(OSError, ValueError, LookupError, TypeError):
            found = read_json(noted)
            if re.fullmatch(r"weft-\w+-[0-9a-f]{8}-[0-9a-f]{8}", found["name"]):
                made = cls(found["name"], parent)
                if found.get("path") == str(made.path):
                    return made
        made = made or cls(f"{_prefix(buffer.parent)}{secrets.token_hex(4)}", parent)
        make_folder(buffer)
        note = json.dumps({"name": made.name, "path": str(made.path)})
        Disk().write_whole(noted, note.encode() + b"\n")
        return made

    @property
    def path(self) -> Path:
        return (self.parent or Path(tempfile.gettempdir())).absolute() / self.name

    def is_noted_in(self, buffer: Path) -> bool:
        try:
            return read_json(buffer / NOTE)["name"] == self.name
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def hold(self) -> Path:
        """Create the folder, hold it until `let_go` or the end of this process, and return its
        path. Raises a UserError if the folder cannot be created or belongs to another user."""
        path, deadline = self.path, time.monotonic() + HOLD_S
        while path not in _held:
            try:
                make_folder(path)
                if path.stat().st_uid != os.geteuid() or path.is_symlink():
                    raise UserError(
                        f"the scratch folder {path} belongs to another user; choose another place: {_SETTING}"
                    )
                descriptor = os.open(path / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise UserError(
                    f"the scratch folder {path} cannot be used ({error.strerror}); {_SETTING}"
                ) from None
            if _lock(descriptor, path / IN_USE):
                _held[path] = descriptor
                (path / OVER).unlink(missing_ok=True)  # from an earlier start
                _start_watching(path, self.grace_s)
                break
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the scratch folder {path} has been in the process of removal for {HOLD_S:.0f} s"
                )
            time.sleep(0.01)
        return path

    def let_go(self, *, over: bool) -> None:
        """Release the folder. `over` removes it as soon as no process holds it."""
        if (descriptor := _held.pop(self.path, None)) is None:
            return
        if over and self.path.is_dir():
            (self.path / OVER).touch(mode=0o600)
        os.close(descriptor)

    def remove_earlier(self, run: Path) -> None:
        """Remove free scratch folders of earlier runs in the directory `run`."""
        for path in self.path.parent.glob(f"{_prefix(run)}*"):
            if path != self.path and path not in _held:
                # The daemon may have removed it, or a process may hold it.
                with suppress(FileNotFoundError, BlockingIOError):
                    _remove_free(path)


def noted_folder(buffer: Path) -> Path | None:
    """Return the scratch folder on the run's first machine, if any."""
    try:
        return Path(read_json(buffer / NOTE)["path"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def notes(folder: Path, needed_bytes: int | None = None) -> list[str]:
    """Return warnings about a segment folder on a network file system or with too little space."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    lines: list[str] = []
    kind = file_system(there)
    if is_network(kind):
        served = (
            f"which is on a network file system ({kind}): each column is written and read through it"
        )
        lines.append(f"segments are stored in {folder}, {served}; {_SETTING}")
    free, needed = shutil.disk_usage(there).free, needed_bytes or LEAST_BYTES
    if free < needed:
        room = f"where {free / 1e9:.1f} GB are free, of {needed / 1e9:.1f} GB that may be needed"
        lines.append(f"segments are stored in {folder}, {room}; {_SETTING}")
    return lines


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of a path's file system, such as "nfs4"; empty if unknown."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    path, best = path.resolve(), ("", "")
    for line in lines:
        _, at, kind, *_ = line.split(" ")
        at = at.encode().decode("unicode_escape")  # a space is written as \040
        # A later mount at the same path hides an earlier one.
        if path.is_relative_to(at) and len(at) >= len(best[0]):
            best = at, kind
    return best[1]


def is_network(kind: str) -> bool:
    """Return whether this type of file system is a network file system.

    >>> [is_network(kind) for kind in ("ext4", "nfs4", "fuse.sshfs", "fuse.fuse-overlayfs")]
    [False, True, True, False]
    """
    return kind in NETWORK or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


_SETTING = "BufferConfig(scratch=...) names another place on each node"


def _prefix(run: Path) -> str:
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in run.name)[:40]
    return f"weft-{name}-{zlib.crc32(os.fsencode(run.resolve())):08x}-"


def _lock(descriptor: int, path: Path) -> bool:
    """Take a shared lock on an open file. Return False if the file is being removed or gone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_free(path: Path) -> None:
    """Remove this user's folder. Raises a BlockingIOError if a process holds it, and a
    FileNotFoundError if it disappears."""
    if not path.is_dir() or path.stat().st_uid != os.geteuid():
        return
    in_use = path / IN_USE
    descriptor = os.open(in_use, os.O_RDWR) if in_use.exists() else os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


# Watch


def watch(folder: Path, grace_s: float) -> None:
    """Remove the folder once no process has held it for `grace_s` seconds."""
    try:
        own = os.open(folder / "watched", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        in_use = os.open(folder / IN_USE, os.O_RDWR)
    except OSError:  # another daemon watches the folder, or the folder is gone
        return
    # The kernel releases a process's lock however the process ends.
    free_since: float | None = None
    while folder.exists():
        time.sleep(POLL_S)
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free_since = None
            continue
        free_since = free_since or time.monotonic()
        if (folder / OVER).exists() or time.monotonic() - free_since >= grace_s:
            removed = folder.with_name(f"{folder.name}.removed-{os.getpid()}")
            # Rename first, so that a process that starts meanwhile creates a new folder.
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            return
        # Unlock between checks, so that a restarted process can hold the folder.
        fcntl.flock(in_use, fcntl.LOCK_UN)


def _start_watching(path: Path, grace_s: float) -> None:
    """Start a daemon that watches the folder, unless one runs."""
    # Last, because modules in the user's folders may shadow Python's.
    folders = [folder or os.getcwd() for folder in sys.path]
    program = f"import sys; sys.path += {folders}; from {__name__} import run_daemon; run_daemon()"
    command = [sys.executable, "-P", "-c", program, str(path), str(grace_s)]
    quiet = subprocess.DEVNULL
    # No environment: it may contain secrets, and the daemon outlives this process.
    subprocess.run(
        command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", env={}, check=False, timeout=60
    )


def run_daemon() -> None:
    # Fork twice, so that the daemon leaves this session and is not this process's child.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            watch(Path(sys.argv[1]), float(sys.argv[2]))
        os._exit(0)
    os.wait()
