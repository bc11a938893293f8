"""RunLock: a run has one writer. A file in the run directory names the holder, and each start of the run has its own epoch.

    runs/NAME/lock/epoch_000003    {"epoch": 3, "host": "node-7", "pid": 4711, "since": "2026-11-22 04:20:15 UTC", ...}
                                   {"ended": "2026-11-22 09:02:51 UTC"}

A driver takes a run by linking its file to the next number, which fails where the name is taken: of two that try, one succeeds, also
on NFS. It is the holder when it finds no other holder; then it removes the older files. A holder is in one of three states:

- ended: a second line in its file says so. Any driver may take the run.
- alive: its process lives, on this machine; or, on another one, its file was touched within DEAD_AFTER_S. Others are refused.
- dead: its process is gone, which is known at once on the same machine (pid and start time); or its file was not touched for
  DEAD_AFTER_S by the clock of the file system, which all machines share. Any driver may take the run.

A holder that was taken for dead may live: it was suspended, or cut off from the file system. Its file is gone. It looks for its
file before it acts on what it has logged and whenever it writes into the run, and ends with a `TakenOverError`. What it wrote in
between went into files of its own (see `dataflow/runs/log.py`).

On NFS a machine may remember the attributes of a file for up to 60 s (`acregmax`), which is less than DEAD_AFTER_S. The heartbeat opens
the file, whereupon the client asks the server.
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from ..errors import TakenOverError, UserError
from ..safe_files import open_file, parse_object, read_file
from .files import LOCK, make_folder
from .log import Record

BEAT_S = 10.0
"""Seconds from one sign of life to the next."""
DEAD_AFTER_S = 90.0
"""Seconds without a sign of life after which a holder on another machine is taken for dead."""
TRY_S = 1.0
"""Seconds that a driver tries to take a run while other drivers do the same."""
MOST_BYTES = 1 << 16
"""More is not read of a holder's file."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""A file system without hard links says one of these."""
_NAME = re.compile(r"epoch_(\d+)")


@dataclass(frozen=True)
class Holder:
    """A process that holds a run, as its file names it."""

    epoch: int
    host: str
    machine: str
    """The boot of the kernel and the namespace of process ids: where these are the same, a pid means the same process."""
    pid: int
    started: str
    """Start time of the process as the kernel reports it. It tells apart two processes with the same pid."""
    since: str

    @classmethod
    def here(cls, epoch: int) -> Holder:
        pid = os.getpid()
        return cls(epoch, platform.node(), _machine(), pid, _started(pid) or "", _now())

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return (self.host, self.machine) == (platform.node(), _machine())

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, if it was a process of this machine."""
        started = _started(self.pid)
        return started is None or bool(started and self.started and started != self.started)

    def __str__(self) -> str:
        return f"host {self.host!r}, process {self.pid}, since {self.since} (epoch {self.epoch})"


class RunLock:
    """A run that this process holds, until `release` or until this object is garbage-collected."""

    def __init__(self, run: Path, claim: _Claim) -> None:
        self.run = run
        self._hold(claim)

    @classmethod
    def take(cls, run: Path, *, after: int = 0) -> RunLock:
        """Hold a run.

        Args:
            run: its directory.
            after: the last epoch that is known otherwise: the next is larger.

        Raises:
            UserError: somebody else holds it; the message says who, since when, and what to do.
        """
        return cls(run, _take(run / LOCK, after, own=None))

    def renew(self) -> None:
        """Begin the next epoch, for another start of the run by the same process.

        Raises:
            TakenOverError: somebody else holds it by now.
        """
        self.check(sure=True)
        before, self._claim = (
            self._claim,
            _take(self.run / LOCK, self._claim.holder.epoch, own=self._claim.path),
        )
        self._release.detach()
        self._hold(self._claim)
        before.let_go()

    def _hold(self, claim: _Claim) -> None:
        self._claim = claim
        claim.start_to_beat()
        self._release = weakref.finalize(self, claim.release)

    @property
    def epoch(self) -> int:
        return self._claim.holder.epoch

    def record(self) -> Record:
        """The record of this epoch in the log."""
        holder = self._claim.holder
        return {
            "do": "epoch",
            "epoch": holder.epoch,
            "host": holder.host,
            "pid": holder.pid,
            "since": holder.since,
        }

    def check(self, *, sure: bool = False) -> None:
        """See that this process may write.

        Args:
            sure: ask the file server, too; else what this machine remembers of it is enough.

        Raises:
            TakenOverError: another driver has taken the run over, or its lock was removed.
        """
        if self._claim.is_held(sure=sure):
            return
        try:
            other = _read(max(epochs(self.run).items())[1])
        except (OSError, ValueError):  # it is gone, or damaged
            other = None
        who = (
            f"is held by {other}"
            if other
            else f"has no lock any more: {self._claim.path} was removed, or the run moved"
        )
        raise TakenOverError(
            f"run {self.run} {who}; this driver held it as {self._claim.holder}, and ends"
        )

    def release(self) -> None:
        """Let others take the run."""
        self._release()

    def give_back(self) -> None:
        """Release a run without any writes, as if it had never been held: this restores the files of earlier holders."""
        if self._claim.is_held(sure=True):
            self._claim.give_back()
        self.release()


@dataclass
class _Claim:
    """A holder's file, which is open for as long as the run is held: no other file can have its number meanwhile."""

    path: Path
    holder: Holder
    descriptor: int
    replaced: dict[Path, tuple[bytes, int]] = field(default_factory=dict)
    """File of an earlier holder, which is gone -> its content, and when it was touched, in nanoseconds."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._lost = False
        self._lock = threading.Lock()

    def start_to_beat(self) -> None:
        threading.Thread(
            target=self._beat, name=f"{self.path.name} of {self.path.parent.parent.name}", daemon=True
        ).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S) and self.is_held(sure=True):
            with self._lock, suppress(OSError):
                if self.descriptor >= 0:
                    os.utime(self.descriptor)

    def is_held(self, *, sure: bool) -> bool:
        """Whether the file still has its name. What cannot be found out for now is no reason to end a run."""
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
                self._lost = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
            return not self._lost

    def release(self) -> None:
        """Say in the own file, whatever its name is by now, that the run is no longer held."""
        if self.holder.pid == os.getpid():
            with suppress(OSError):
                os.write(self.descriptor, _line({"ended": _now()}))
        self.let_go()

    def give_back(self) -> None:
        """Put the files of earlier holders back, and remove the own one."""
        for path, (content, touched_ns) in self.replaced.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(descriptor, content)
                os.utime(descriptor, ns=(touched_ns, touched_ns))
            finally:
                os.close(descriptor)
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # others have files there
            self.path.parent.rmdir()

    def let_go(self) -> None:
        self._over.set()
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1


def _take(folder: Path, after: int, own: Path | None) -> _Claim:
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
                if set(epochs(folder.parent)) == {*found, claim.holder.epoch}:
                    break
                claim.path.unlink()  # somebody came between: look who it is
        except BaseException:
            claim.let_go()
            raise
        finally:
            number.unlink(missing_ok=True)
        claim.let_go()
        if time.monotonic() > deadline:
            raise UserError(f"run {folder.parent} is being taken by others at this moment; try again")
        time.sleep(random.uniform(0.0, 0.05))
    for path in _never_named(folder, now):
        path.unlink(missing_ok=True)
    for path in found.values():
        with suppress(FileNotFoundError):
            claim.replaced[path] = read_file(path, MOST_BYTES), path.stat().st_mtime_ns
            path.unlink()
    return claim


def _never_named(folder: Path, now: float) -> Iterator[Path]:
    """Files of those who were ended while they took the run."""
    for path in folder.glob(".*"):
        with suppress(OSError, ValueError):
            if now - path.stat().st_mtime > DEAD_AFTER_S or (
                (by := _read(path)).is_here and by.has_ended
            ):
                yield path


def _write(folder: Path, holder: Holder) -> tuple[_Claim, Path]:
    """A file that names its holder, whole and on the disk before it has its place."""
    unnamed = folder / f".{uuid.uuid4().hex}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.write(descriptor, _line(asdict(holder)))
    os.fsync(descriptor)
    return _Claim(folder / f"epoch_{holder.epoch:06d}", holder, descriptor), unnamed


def _link(source: Path, target: Path) -> bool:
    """Give a file its name; False when the name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:  # an answer of the server may be lost, and the request sent again
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
        source.rename(target)
    return True


def _refuse_while_held(run: Path, epoch: int, path: Path, now: float) -> None:
    try:
        touched, lines = _lines(path)
    except FileNotFoundError:
        return
    try:
        holder = _parse(lines, path)
    except ValueError:  # being written, on a file system without links; or damaged
        holder = None
    if holder is not None and (len(lines) > 1 or (holder.is_here and holder.has_ended)):
        return
    silent = now - touched
    if holder is not None and holder.is_here:
        end = (
            "close the other driver of this process"
            if holder.pid == os.getpid()
            else f"end it (kill {holder.pid})"
        )
        raise UserError(
            f"run {run} is held by {holder}: one run has one driver. Wait until it is over, or {end} and go on with "
            "resume='latest'; or give this run another name"
        )
    if silent < DEAD_AFTER_S:
        who = str(holder) if holder else f"somebody whom {path} does not name (epoch {epoch})"
        raise UserError(
            f"run {run} is held by {who}, heard of {max(silent, 0.0):.0f} s ago: one run has one driver. End it there, or, when that "
            f"machine is gone, start again in {DEAD_AFTER_S - silent:.0f} s: who is silent for {DEAD_AFTER_S:.0f} s is taken for dead"
        )


class Life(Enum):
    """What is known of a run's driver, from the file that names it."""

    ALIVE = "alive"
    """Its process lives; or it is on another machine, and was heard of within DEAD_AFTER_S."""
    ENDED = "ended"
    """It said that it ended."""
    DEAD = "dead"
    """Its process is gone, or was not heard of, and it said nothing."""
    UNKNOWN = "unknown"
    """No file names a driver, or none can be read."""


def life_of(run: Path) -> tuple[Life, Holder | None]:
    """What is known of the latest driver of a run. Nothing is written, and no error is raised.

    Args:
        run: its directory.
    """
    try:
        path = max(epochs(run).items())[1]
        touched, lines = _lines(path)
        holder = _parse(lines, path)
    except (OSError, ValueError):
        return Life.UNKNOWN, None
    if len(lines) > 1:
        return Life.ENDED, holder
    lives = not holder.has_ended if holder.is_here else abs(time.time() - touched) < DEAD_AFTER_S
    return (Life.ALIVE if lives else Life.DEAD), holder


def epochs(run: Path) -> dict[int, Path]:
    """Epoch -> the file of its holder."""
    folder = run / LOCK
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir()) if folder.is_dir() else ()
    return {int(name[1]): path for name, path in found if name}


def _sound(holder: Holder) -> Holder:
    """The holder, if its file says what a driver writes.

    Raises:
        ValueError: it does not.
    """
    texts = (holder.host, holder.machine, holder.started, holder.since)
    numbers = type(holder.pid) is type(holder.epoch) is int and 0 < holder.pid < 1 << 31
    if not (numbers and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"{holder} is no driver's")
    return holder


def _lines(path: Path) -> tuple[float, list[bytes]]:
    """The time when a holder's file was touched, and its lines. Opening the file makes NFS ask the server."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_mtime, file.read(MOST_BYTES).splitlines()


def _parse(lines: list[bytes], path: Path) -> Holder:
    """The holder that the first line of its file names.

    Raises:
        ValueError: it names none.
    """
    try:
        return _sound(Holder(**parse_object(lines[0] if lines else b"", path)))
    except TypeError as error:
        raise ValueError(f"{path} names no driver: {error}") from None


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
    """When a process of this machine was started; "" when nobody says; None when it is gone, or is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it is somebody else's
        pass
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:  # hidden, or this is no Linux
        return ""
    return None if state in "ZX" else rest[18]
