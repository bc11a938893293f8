"""RunLock: ensures that a run has only one writer. A file in the run directory names the run's
holder. Each start of the run has its own epoch.

    runs/NAME/lock/epoch_000003    {"epoch": 3, "host": "node-7", "pid": 4711, "since": "2026-11-22 04:20:15 UTC", ...}
                                   {"ended": "2026-11-22 09:02:51 UTC"}

To take a run, a driver writes a file and hard-links it to the name with the next epoch. Linking
fails if the name exists, so only one of two drivers succeeds, even on NFS. The new holder removes
the older files. A holder is in one of three states:

- ended: its file has a second line. Any driver may take the run.
- alive: its process runs on this machine, or it runs on another machine and touched its file within
  DEAD_AFTER_S. No other driver can take the run.
- dead: its process on this machine is gone (by pid and start time), or it has not touched its file
  for DEAD_AFTER_S, by the file system's clock, which all machines share. Any driver may take the
  run.

A holder that counts as dead may still be alive, for example suspended. It checks for its file
before it acts on logged records and before it writes to the run. If a new holder has removed the
file, the old one ends with a `TakenOverError`. All that it wrote in between went to unlinked files
(see `log.py`).

NFS clients may cache a file's attributes for up to 60 s (`acregmax`), less than DEAD_AFTER_S. The
heartbeat opens the file, so that the client asks the server.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import random
import re
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import TakenOverError, UserError
from ..safe_files import open_file, parse_object, read_file
from .files import LOCK, make_folder

BEAT_S = 10.0
"""[s] Interval between heartbeats."""
DEAD_AFTER_S = 90.0
"""[s] A holder on another machine without a heartbeat for this long counts as dead."""
TRY_S = 1.0
"""[s] How long to keep trying to take a run that other drivers also try to take."""
MOST_BYTES = 1 << 16
"""[bytes] Maximum size to read of a holder's file."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Error numbers of file systems without hard links."""
_NAME = re.compile(r"epoch_(\d+)")


@dataclass(frozen=True)
class Holder:
    """The process that holds a run."""

    epoch: int
    host: str
    machine: str
    """Boot id of the kernel and pid namespace. Two pids are comparable if these are equal."""
    pid: int
    started: str
    """Start time of the process, to distinguish processes with the same pid."""
    since: str

    @classmethod
    def here(cls, epoch: int) -> Holder:
        pid = os.getpid()
        return cls(epoch, platform.node(), _machine(), pid, _started(pid) or "", _now())

    @property
    def is_here(self) -> bool:
        return (self.host, self.machine) == (platform.node(), _machine())

    @property
    def has_ended_here(self) -> bool:
        """Whether the holder was on this machine and its process has ended."""
        started = _started(self.pid)
        other = bool(started and self.started and started != self.started)
        return self.is_here and (started is None or other)

    def __str__(self) -> str:
        return f"host {self.host!r}, process {self.pid}, since {self.since} (epoch {self.epoch})"


class RunLock:
    """A run that this process holds until `release`, or until this object is garbage-collected."""

    def __init__(self, run: Path, claim: _Claim) -> None:
        self.run = run
        self._hold(claim)

    @classmethod
    def take(cls, run: Path, *, after: int = 0) -> RunLock:
        """Take a run, with an epoch larger than `after`. Raises a UserError if it is held."""
        return cls(run, _take(run / LOCK, after, own=None))

    def renew(self) -> None:
        """Begin the next epoch. Raises a TakenOverError if another process holds the run."""
        self.check(sure=True)
        before = self._claim
        claim = _take(self.run / LOCK, before.holder.epoch, own=before.path)
        # The run continues, so the old claim must not write that it has ended.
        self._release.detach()
        self._hold(claim)
        before.let_go()

    def _hold(self, claim: _Claim) -> None:
        self._claim = claim
        claim.start_to_beat()
        self._release = weakref.finalize(self, claim.note_end)

    @property
    def epoch(self) -> int:
        return self._claim.holder.epoch

    def record(self) -> dict[str, Any]:
        """Return the holder's first record for the log."""
        holder = asdict(self._claim.holder)
        return {"do": "epoch", **{name: holder[name] for name in ("epoch", "host", "pid", "since")}}

    def check(self, *, sure: bool = False) -> None:
        """Raise a TakenOverError if another process took over the run. `sure` asks the file server
        instead of using this machine's cache."""
        if self._claim.is_held(sure=sure):
            return
        try:
            other = _read(max(epochs(self.run).items())[1])
        except (OSError, ValueError):  # the file is missing or damaged
            other = None
        gone = f"has no lock any more: {self._claim.path} was removed, or the run moved"
        who = f"is held by {other}" if other else gone
        raise TakenOverError(
            f"run {self.run} {who}; this driver held it as {self._claim.holder}, and ends"
        )

    def release(self) -> None:
        self._release()

    def give_back(self) -> None:
        """Release a run to which nothing was written, and restore earlier holders' files."""
        if self._claim.is_held(sure=True):
            self._claim.restore()
        self.release()


@dataclass
class _Claim:
    """A holder's file, open while the process holds the run, which reserves its inode number."""

    path: Path
    holder: Holder
    descriptor: int
    replaced: dict[Path, tuple[bytes, int]] = field(default_factory=dict)
    """Earlier holders' removed files: maps path to (content, modification time in ns)."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._lost = False
        self._lock = threading.Lock()

    def start_to_beat(self) -> None:
        name = f"{self.path.name} of {self.path.parent.parent.name}"
        threading.Thread(target=self._beat, name=name, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S) and self.is_held(sure=True):
            with self._lock, suppress(OSError):
                if self.descriptor >= 0:
                    os.utime(self.descriptor)

    def is_held(self, *, sure: bool) -> bool:
        """Return whether the file still has its name. After a temporary error, return True."""
        with self._lock:
            if self._lost or self.descriptor < 0:
                return not self._lost
            try:
                if sure:
                    again = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
                    try:
                        found = os.fstat(again)
                    finally:
                        os.close(again)
                else:
                    found = os.stat(self.path)
                self._lost = not os.path.samestat(found, os.fstat(self.descriptor))
            except OSError as error:
                # Other errors may be temporary, and must not end the run.
                self._lost = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
            return not self._lost

    def note_end(self) -> None:
        """Write to this holder's file, which may be unlinked, that the holder has ended."""
        # A forked child does not own the run.
        if self.holder.pid == os.getpid():
            with suppress(OSError):
                os.write(self.descriptor, _line({"ended": _now()}))
        self.let_go()

    def restore(self) -> None:
        for path, (content, touched_ns) in self.replaced.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(descriptor, content)
                os.utime(descriptor, ns=(touched_ns, touched_ns))
            finally:
                os.close(descriptor)
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder has other files
            self.path.parent.rmdir()

    def let_go(self) -> None:
        self._over.set()
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1


def _take(folder: Path, after: int, own: Path | None) -> _Claim:
    """Take the lock in a folder, with an epoch larger than `after`. `own` is this process's current
    file, if any."""
    try:
        return _try_to_take(folder, after, own)
    except OSError as error:
        what = f"{folder} is not a folder" if folder.is_symlink() or folder.is_file() else str(error)
        raise UserError(f"run {folder.parent} cannot be held: {what}") from error


def _try_to_take(folder: Path, after: int, own: Path | None) -> _Claim:
    make_folder(folder)
    deadline = time.monotonic() + TRY_S
    while True:
        found = epochs(folder.parent)
        claim, number = _write(folder, Holder.here(max([after, *found]) + 1))
        try:
            now = os.fstat(claim.descriptor).st_mtime
            for epoch, path in sorted(found.items(), reverse=True):
                if path != own:
                    _refuse_while_held(folder.parent, epoch, path, now)
            if _link(number, claim.path):
                # Another driver may have linked its file in between.
                if set(epochs(folder.parent)) == {*found, claim.holder.epoch}:
                    break
                claim.path.unlink()  # another driver was faster: try again
        except BaseException:
            claim.let_go()
            raise
        finally:
            number.unlink(missing_ok=True)
        claim.let_go()
        if time.monotonic() > deadline:
            raise UserError(f"run {folder.parent} is being taken by others at this moment; try again")
        time.sleep(random.uniform(0.0, 0.05))
    for path in folder.glob(".*"):
        # A driver that died while taking the run left this file.
        with suppress(OSError, ValueError):
            if now - path.stat().st_mtime > DEAD_AFTER_S or _read(path).has_ended_here:
                path.unlink(missing_ok=True)
    for path in found.values():
        with suppress(FileNotFoundError):
            claim.replaced[path] = read_file(path, MOST_BYTES), path.stat().st_mtime_ns
            path.unlink()
    return claim


def _write(folder: Path, holder: Holder) -> tuple[_Claim, Path]:
    unnamed = folder / f".{uuid.uuid4().hex}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.write(descriptor, _line(asdict(holder)))
    # Sync first: the final name must never refer to an incomplete file.
    os.fsync(descriptor)
    return _Claim(folder / f"epoch_{holder.epoch:06d}", holder, descriptor), unnamed


def _link(source: Path, target: Path) -> bool:
    """Give a file its final name. Return False if the name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:  # an NFS client may have repeated a request that succeeded
        with suppress(FileNotFoundError):
            return os.path.samefile(source, target)
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        # Without hard links: reserve the name with an empty file, then replace that file.
        source.rename(target)
    return True


def _refuse_while_held(run: Path, epoch: int, path: Path, now: float) -> None:
    try:
        touched, lines = _lines(path)
    except FileNotFoundError:
        return
    try:
        holder = _parse(lines, path)
    except ValueError:  # damaged, or still being written on a file system without hard links
        holder = None
    if holder is not None and (len(lines) > 1 or holder.has_ended_here):
        return
    silent = now - touched
    # A process on this machine that has not ended is alive, however old its heartbeat is.
    if holder is not None and holder.is_here:
        own = holder.pid == os.getpid()
        end = "close the other driver of this process" if own else f"end it (kill {holder.pid})"
        raise UserError(
            f"run {run} is held by {holder}, and a run has only one driver. Wait until it ends, or {end} and start this one "
            "with resume='latest'; or give this run another name"
        )
    if silent < DEAD_AFTER_S:
        who = str(holder) if holder else f"an unknown driver (epoch {epoch}), because {path} is damaged"
        raise UserError(
            f"run {run} is held by {who}, heard of {max(silent, 0.0):.0f} s ago. A run has only one driver: end that one, "
            f"or, if its machine is gone, start again in {DEAD_AFTER_S - silent:.0f} s. A driver counts as dead after "
            f"{DEAD_AFTER_S:.0f} s of silence"
        )


class Life(Enum):
    """State of a run's driver according to its lock file."""

    ALIVE = "alive"
    """The driver's process runs or, on another machine, its last heartbeat is recent."""
    ENDED = "ended"
    """The driver released the run."""
    DEAD = "dead"
    """The driver's process is gone, or its heartbeats stopped, without releasing the run."""
    UNKNOWN = "unknown"
    """There is no valid lock file."""


def life_of(run: Path) -> tuple[Life, Holder | None]:
    """Return the state of a run's latest driver. Never writes or raises an error."""
    try:
        path = max(epochs(run).items())[1]
        touched, lines = _lines(path)
        holder = _parse(lines, path)
    except (OSError, ValueError):
        return Life.UNKNOWN, None
    if len(lines) > 1:
        return Life.ENDED, holder
    recent = holder.is_here or abs(time.time() - touched) < DEAD_AFTER_S
    lives = recent and not holder.has_ended_here
    return (Life.ALIVE if lives else Life.DEAD), holder


def epochs(run: Path) -> dict[int, Path]:
    """Return the files of holders, keyed by epoch."""
    folder = run / LOCK
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir()) if folder.is_dir() else ()
    return {int(name[1]): path for name, path in found if name}


def _lines(path: Path) -> tuple[float, list[bytes]]:
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_mtime, file.read(MOST_BYTES).splitlines()


def _parse(lines: list[bytes], path: Path) -> Holder:
    """Parse the first line of a holder's file. Raises a ValueError if it is invalid."""
    try:
        holder = Holder(**parse_object(lines[0] if lines else b"", path))
    except TypeError as error:
        raise ValueError(f"{path} names no driver: {error}") from None
    texts = (holder.host, holder.machine, holder.started, holder.since)
    numbers = type(holder.pid) is type(holder.epoch) is int and 0 < holder.pid < 1 << 31
    if not (numbers and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"{holder} is not a valid driver")
    return holder


def _read(path: Path) -> Holder:
    return _parse(_lines(path)[1], path)


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def _started(pid: int) -> str | None:
    """Return a local process's start time; "" if unknown, None if it is gone or a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # the process belongs to another user
        pass
    try:
        # The program's name, before these fields, may contain spaces and parentheses.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:  # /proc is hidden or does not exist
        return ""
    return None if state in "ZX" else rest[18]
