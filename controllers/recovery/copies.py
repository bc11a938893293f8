"""Copy checkpoints to a second location (`CheckpointConfig.copy_to`) in the background.

    complete ─queue─> waiting ──> being copied ──> copied
                         ^            │ failed: reported, and retried after a pause
                         └────────────┘ (dropped when a later checkpoint waits)

Training never waits for a copy. An ending run waits at most END_S for the last copy.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.fs as pf

from ...dataflow.buffer.recovery import checkpoint_path
from ...dataflow.errors import UserError
from ...dataflow.runs.directory import CONFIG, hold, make_aside, require_folder, set_run_aside
from ...dataflow.runs.files import (
    BUFFER,
    CHECKPOINTS,
    LOCK,
    LOG,
    METRICS,
    SAMPLES,
    STREAM,
    TIMELINE,
    make_folder,
)
from ...dataflow.runs.log_archive import HISTORY, header, part_before
from ...dataflow.runs.manifest import MANIFEST, describe, verify_manifest
from .checkpoints import CheckpointConfig, RunState, complete_checkpoints, has_checkpoints, step_of

# The copy of a run has everything needed to resume the run elsewhere, at any address that pyarrow
# supports (s3://, gs://, another disk).
#
#     ADDRESS/NAME/checkpoints/step_000012/...      as in the run's directory; the manifest comes last
#     ADDRESS/NAME/buffer/ledger-*.checkpoint       the state of the ledgers at that step
#     ADDRESS/NAME/buffer/history/*.log.zst         the log up to that step, in parts
#     ADDRESS/NAME/samples/*, metrics.arrows, ...   samples, metrics, timeline
#     ADDRESS/NAME/copied.json                      checksums of the copied samples and log parts
#
# Weft first removes the manifests of checkpoints that no longer belong to the run: the run may have
# gone back to an earlier step, or another run may have had its name. Then it writes the files whose
# checksums differ from the copy's, and removes extra files from the copy.
#
# Weft does not copy row data. A run resumed from a copy issues the groups in flight again.

CHUNK_BYTES = 8 << 20
TABLES = (CONFIG, f"{METRICS}{STREAM}", f"{TIMELINE}{STREAM}")
COPIED = "copied.json"
FAILURES = (OSError, pa.ArrowException)


class _RemoteRun:
    """The copy of one run, in the folder `base` of `files`. `address` is for messages."""

    def __init__(self, files: pf.FileSystem, base: str, address: str) -> None:
        self._files, self._address = pf.SubTreeFileSystem(base, files), address
        self._described: dict[Path, tuple[tuple[int, int], Mapping[str, Any]]] = {}
        """Local file -> (size and modification time when it was read, description)."""

    @classmethod
    def at(cls, address: str, name: str) -> _RemoteRun:
        """Open the copy of a run below an address (`s3://bucket/folder`) or a path."""
        check_address(address)
        try:
            given = address if "://" in address else Path(address).expanduser().absolute().as_uri()
            files, base = pf.FileSystem.from_uri(given)
        except (*FAILURES, RuntimeError) as error:  # RuntimeError: the user has no home folder
            raise UserError(f"CheckpointConfig.copy_to={address!r} cannot be used: {error}") from None
        # Object stores reject two slashes in a row.
        return cls(files, str(PurePosixPath(base, name)), f"{address.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self._address

    # Content of the copy

    def steps(self) -> list[int]:
        folders = [name for name in self._names(CHECKPOINTS) if re.fullmatch(r"step_\d+", name)]
        complete = [name for name in folders if MANIFEST in self._names(f"{CHECKPOINTS}/{name}")]
        return sorted((step_of(Path(name)) for name in complete), reverse=True)

    def has(self, run: Path, step: int) -> bool:
        """Return whether the copy has this run's complete checkpoint of a step."""
        name = f"{_folder_of(step)}/{MANIFEST}"
        return step in self.steps() and self._read_whole(name) == (run / name).read_bytes()

    def _names(self, folder: str) -> dict[str, int]:
        """Return name -> size [bytes] of the files in a folder, which need not exist."""
        selector = pf.FileSelector(folder, allow_not_found=True)
        return {info.base_name: info.size for info in self._files.get_file_info(selector)}

    def _below(self, folder: str) -> list[str]:
        selector = pf.FileSelector(folder, allow_not_found=True, recursive=True)
        found = self._files.get_file_info(selector)
        return [info.path for info in found if info.type is pf.FileType.File]

    def _read_whole(self, name: str) -> bytes:
        # By default, pyarrow decompresses files with names such as *.zst.
        with self._files.open_input_stream(name, compression=None) as stream:
            return stream.read()

    # Writing the copy

    def copy(self, run: Path, step: int, *, went_back_to: int | None = None) -> int:
        """Copy the checkpoint of a step, with log and samples. Return the number of bytes written.

        Args:
            went_back_to: Step after which the run resumed, if nothing was copied since. Copies of
                later steps are outdated.

        Raises:
            OSError, pyarrow.ArrowException: A write failed, or the checkpoint was removed.
        """
        checkpoint, buffer = run / _folder_of(step), run / BUFFER
        self._withdraw(run, step, went_back_to)
        position = RunState.read(checkpoint).position
        samples = sorted((run / SAMPLES).glob("*.arrow"))
        written = self._write_changed(run, samples)
        # Open the tail of the log before listing the parts. If the log is cut in between, reading
        # the tail raises OSError.
        tail = part_before(buffer / LOG, position)
        parts = sorted((buffer / HISTORY).glob("*.log.zst"))
        written += self._write_changed(run, parts)
        inside = [p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST]
        keep = {_name(run, path) for path in (*samples, *parts, *inside)}
        if tail is not None:
            # The parts now contain the records of earlier copied tails, so remove these tails.
            name = f"{BUFFER}/{HISTORY}/{tail[0]}"
            written += self._write(name, tail[1])
            keep.add(name)
        for folder in (SAMPLES, f"{BUFFER}/{HISTORY}", _folder_of(step)):
            for name in self._below(folder):
                if name not in keep and not name.endswith(MANIFEST):
                    self._files.delete_file(name)
        tables = (*(run / name for name in TABLES), checkpoint_path(buffer, position))
        for path in (*filter(Path.is_file, tables), *sorted(inside), checkpoint / MANIFEST):
            written += self._write_file(path, _name(run, path))
        return written

    def _withdraw(self, run: Path, step: int, went_back_to: int | None) -> None:
        """Remove the manifests of outdated checkpoints, and of the one that is being copied."""
        for there in self.steps():
            manifest = f"{_folder_of(there)}/{MANIFEST}"
            given_up = went_back_to is not None and there > went_back_to
            if there == step or given_up or ((run / manifest).exists() and not self.has(run, there)):
                self._files.delete_file(manifest)

    def prune(self, run: Path) -> None:
        kept = complete_checkpoints(run / CHECKPOINTS)
        ledgers = {checkpoint_path(run, RunState.read(path).position).name for path in kept}
        complete = self.steps()
        for name in self._names(CHECKPOINTS):
            if re.fullmatch(r"step_\d+", name) and name not in {path.name for path in kept}:
                if step_of(Path(name)) in complete:
                    self._files.delete_file(f"{CHECKPOINTS}/{name}/{MANIFEST}")
                self._files.delete_dir(f"{CHECKPOINTS}/{name}")
        for name in self._names(BUFFER):
            if name.endswith(".checkpoint") and name not in ledgers:
                self._files.delete_file(f"{BUFFER}/{name}")

    def _write_changed(self, run: Path, paths: Iterable[Path]) -> int:
        """Write the files that differ from the copy. Return the number of bytes written."""
        described = {_name(run, path): self._describe(path) for path in paths}
        sizes = {
            f"{folder}/{name}": size
            for folder in {str(PurePosixPath(n).parent) for n in described}
            for name, size in self._names(folder).items()
        }
        copied = self._copied()
        new = [n for n, one in described.items() if copied.get(n) != one or sizes.get(n) != one["bytes"]]
        # Forget the checksums of these files first: an interrupted copy may not match them.
        if copied.keys() & {*new}:
            copied = {name: one for name, one in copied.items() if name not in new}
            self._note_copied(copied)
        written = sum(self._write_file(run / name, name) for name in new)
        if new:
            self._note_copied(copied | {name: described[name] for name in new})
        return written

    def _describe(self, path: Path) -> Mapping[str, Any]:
        """Return the size and checksum of a local file. Reads it only if it has changed."""
        found = path.stat()
        at = found.st_size, found.st_mtime_ns
        if self._described.get(path, (None,))[0] != at:
            self._described[path] = at, describe(path)
        return self._described[path][1]

    def _copied(self) -> dict[str, Mapping[str, Any]]:
        """Return the recorded checksums; empty if the record is damaged."""
        with suppress(ValueError):
            noted = json.loads(self._read_whole(COPIED)) if COPIED in self._names("") else {}
            return noted if isinstance(noted, dict) else {}
        return {}

    def _note_copied(self, copied: Mapping[str, Mapping[str, Any]]) -> None:
        self._write(COPIED, [json.dumps(copied).encode()])

    def _write_file(self, path: Path, name: str) -> int:
        with path.open("rb") as file:
            return self._write(name, iter(lambda: file.read(CHUNK_BYTES), b""))

    def _write(self, name: str, chunks: Iterable[bytes]) -> int:
        written = 0
        # A folder "." would become an object of that name.
        folder = PurePosixPath(self._files.base_path, name).parent
        self._files.base_fs.create_dir(str(folder), recursive=True)
        # By default, pyarrow compresses files with names such as *.zst.
        with self._files.open_output_stream(name, compression=None) as stream:
            for data in chunks:
                stream.write(data)
                written += len(data)
        # A service may lose bytes without an error.
        found = self._files.get_file_info(name).size
        if found != written:
            raise OSError(f"{self}/{name} has {found} bytes, not the {written} that were written")
        return written

    # Fetching the run

    def fetch(self, run: Path, tell_damage: Callable[[str], None] = lambda line: None) -> int | None:
        """Create the directory of a run from its latest intact copy.

        Args:
            run: The directory, whose current content is removed.
            tell_damage: Receives a line about each damaged copy.

        Returns:
            The step of the fetched checkpoint, or None if every copy is damaged.

        Raises:
            OSError, pyarrow.ArrowException: The copy cannot be read.
        """
        for step in self.steps():
            shutil.rmtree(run, ignore_errors=True)
            checkpoint = run / _folder_of(step)
            tables = self._names("").keys() & {*TABLES}
            below = [self._below(folder) for folder in (_folder_of(step), SAMPLES, BUFFER)]
            for name in itertools.chain(tables, *below):
                if ".." in name.split("/"):
                    raise OSError(f"{self} contains a file with the unsafe path {name}")
                path = run / name
                make_folder(path.parent)
                pf.copy_files(name, str(path), self._files, pf.LocalFileSystem(), chunk_size=CHUNK_BYTES)
                path.chmod(0o600)
            if damage := verify_manifest(checkpoint):
                tell_damage(f"{self}/{_folder_of(step)}: {', '.join(damage)}")
                continue
            at = RunState.read(checkpoint).position
            for path in (run / BUFFER).glob("*.checkpoint"):
                if path != checkpoint_path(run / BUFFER, at):
                    path.unlink()
            make_folder(run / BUFFER)
            # Earlier records are in the history, so the log begins empty at this position.
            (run / BUFFER / LOG).write_bytes(header(at))
            return step
        return None


def _folder_of(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step:06d}"


def _name(run: Path, path: Path) -> str:
    return path.relative_to(run).as_posix()


def check_address(address: str) -> None:
    """Raise `UserError` if an address is invalid, or contains a password, which is not shown."""
    if not address.strip():
        raise UserError(
            "CheckpointConfig.copy_to is empty; give an address such as s3://bucket/runs, or a path"
        )
    scheme, colon, rest = address.partition(":")
    if colon and re.fullmatch(r"[A-Za-z]\w+", scheme) and re.match("/(?!/)", rest):
        raise UserError(
            f"CheckpointConfig.copy_to: an address begins with {scheme}://, not with {scheme}:/; "
            f"write ./{scheme}:/... for a folder of that name"
        )
    host = re.split(r"[/?#]", address.partition("://")[2], maxsplit=1)[0]
    if "@" in host:
        raise UserError(
            "CheckpointConfig.copy_to holds a name or a password, which would be written to disk with the settings; pass these through "
            "the environment (AWS_ACCESS_KEY_ID, ...) or a profile"
        )
    if "://" in address and not host and scheme != "file":
        raise UserError(
            f"CheckpointConfig.copy_to={address!r} names no bucket; give an address such as {scheme}://bucket/runs"
        )


# Copies

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 300.0
"""[s] First and longest pause before the retry of a failed copy. Each pause doubles."""
END_S = 600.0
"""[s] Longest wait for the copy of the last checkpoint when a run ends."""
LEAVE_S = 60.0
"""[s] Longest wait for that copy when a run was asked to end."""
SAY_S = 30.0
"""[s] Interval between messages about the wait."""


class Copies:
    """Copies the checkpoints of a run in a thread, one at a time: always the latest that waits."""

    def __init__(
        self, run: Path, remote: _RemoteRun | None, *, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self._run, self._remote, self._first_pause_s = run, remote, first_pause_s
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._went_back_to: int | None = None
        """Step after which the run resumed, until the first copy. Later copies are outdated."""
        self._busy = False
        self._closing = False
        self._notes: list[str] = []
        self.copied: list[int] = []
        if remote is not None:
            threading.Thread(
                target=self._work, args=(remote,), name="copies of checkpoints", daemon=True
            ).start()

    @classmethod
    def of(cls, run: Path, config: CheckpointConfig) -> Copies:
        return cls(run, None if config.copy_to is None else _RemoteRun.at(config.copy_to, run.name))

    def resume(self) -> None:
        """Copy the latest local checkpoint, unless an earlier start of the run copied it."""
        latest = next(iter(complete_checkpoints(self._run / CHECKPOINTS)), None)
        if latest is not None:
            self._went_back_to = step_of(latest)
            self.queue(self._went_back_to)

    def queue(self, step: int) -> None:
        """Queue a complete checkpoint. It replaces an earlier one that still waits."""
        if self._remote is not None:
            with self._changed:
                self._waiting = step
                self._changed.notify_all()

    def take_notes(self) -> list[str]:
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def close(
        self,
        timeout_s: float = 0.0,
        *,
        say: Callable[[str], None] = lambda line: None,
        say_s: float = SAY_S,
    ) -> None:
        """Wait up to `timeout_s` for pending copies, and end the thread. `say` reports the wait."""
        end = time.monotonic() + timeout_s
        while not (done := self._is_done(min(say_s, max(0.0, end - time.monotonic())))):
            left_s = end - time.monotonic()
            if left_s <= 0:
                break
            for line in self.take_notes():
                say(line)
            say(f"waiting for the copy of the last checkpoint to {self._remote}, {left_s:.0f} s at most")
        with self._changed:
            if not done and timeout_s:
                self._notes.append(
                    f"the last checkpoint was not copied to {self._remote} within {timeout_s:.0f} s; it is complete in {self._run}"
                )
            self._closing = True
            self._changed.notify_all()

    def _is_done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`, and return whether no copy is pending."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._busy, timeout_s)

    def _work(self, remote: _RemoteRun) -> None:
        pause_s = self._first_pause_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._closing or self._waiting is None:
                    return
                step, self._waiting, self._busy = self._waiting, None, True
            failure = self._copy(remote, step)
            with self._changed:
                self._busy = False
                if failure:
                    self._notes.append(
                        f"checkpoint of step {step} could not be copied to {remote}: {failure}"
                    )
                    if self._waiting is None and (self._run / _folder_of(step)).exists():
                        self._notes[-1] += f"; retrying in {pause_s:.3g} s"
                        self._waiting = step
                self._changed.notify_all()
                if failure:
                    failed = (None, step)  # a later checkpoint ends the pause
                    self._changed.wait_for(
                        lambda known=failed: self._closing or self._waiting not in known, pause_s
                    )
                pause_s = min(2 * pause_s, MAX_PAUSE_S) if failure else self._first_pause_s

    def _copy(self, remote: _RemoteRun, step: int) -> str:
        """Copy a checkpoint. Return the error, or an empty string."""
        began = time.monotonic()
        # Even if the checkpoint cannot be read, the thread must continue with the next one.
        try:
            if remote.has(self._run, step):
                return ""
            written = remote.copy(self._run, step, went_back_to=self._went_back_to)
        except Exception as error:
            return _in_a_line(error)
        self._went_back_to = None
        size, seconds = written / 1e6, time.monotonic() - began
        notes = [f"checkpoint of step {step} was copied to {remote} ({size:.1f} MB, {seconds:.1f} s)"]
        try:
            remote.prune(self._run)
        except Exception as error:  # the next copy tries again
            notes.append(
                f"old checkpoints could not be removed from {remote} for now: {_in_a_line(error)}"
            )
        with self._changed:
            self.copied.append(step)
            self._notes += notes
        return ""


def _in_a_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


# Fetching a run from its copy before resuming it, while this process holds the run.
#
# runs/NAME/.fetched       the fetched files, until the checkpoint is known to be intact
# runs/NAME.begun-1        the earlier content of the directory, moved only then
# runs/NAME                the fetched run; checkpoints come last, so an interrupted fetch restarts


_FETCHED = ".fetched"


def fetch_run(resume: str | Path, root: Path, name: str | None, address: str) -> str:
    """Fetch a run from its copy, if it is to be resumed and has no checkpoint here. Return a
    message for the user, or "" if nothing was fetched.

    Raises:
        UserError: Another driver holds the run, the copy cannot be read, or a new run would replace
            the copy of another run.
        TakenOverError: Another driver took over the run during the fetch. Its files are untouched.
    """
    remote = _RemoteRun.at(address, name or "run")
    if resume not in ("none", "latest", "weights") or name is None or has_checkpoints(root / name):
        return ""
    run = root / name
    try:
        steps = remote.steps()
        if steps and resume == "none":
            raise UserError(
                f"name={name!r}: {remote} holds a copy of a run of that name already, with its checkpoint of step {steps[0]}; "
                "give the run another name, or resume that one (resume='latest')"
            )
        return _fetch(remote, run) if steps else ""
    except FAILURES as error:
        raise UserError(f"the copy of the run at {remote} cannot be read: {error}") from error


def _fetch(remote: _RemoteRun, run: Path) -> str:
    require_folder(run.parent, f"root {str(run.parent)!r}", private=False)
    aside = ""
    if run.exists() and not run.is_dir():
        aside = f"; the earlier content was moved to {set_run_aside(run).name}"
    require_folder(run, f"run directory {str(run)!r}")
    lock, fetched = hold(run), run / _FETCHED
    try:
        if has_checkpoints(run):  # another driver has just fetched it
            return ""
        damage: list[str] = []
        step = remote.fetch(fetched, damage.append)
        if step is None:
            raise UserError(f"no copy of the run at {remote} is intact: {'; '.join(damage)}")
        # Another driver may have taken over the run during the fetch.
        lock.check(sure=True)
        before = [path for path in run.iterdir() if path.name not in (LOCK, _FETCHED)]
        if before:
            folder = make_aside(run)
            aside = f"; the earlier content was moved to {folder.name}"
            for path in before:
                path.rename(folder / path.name)
        for path in sorted(fetched.iterdir(), key=lambda path: path.name == CHECKPOINTS):
            path.rename(run / path.name)
    finally:
        shutil.rmtree(fetched, ignore_errors=True)
        lock.give_back()  # the next epoch follows the one that the fetched run names
    passed_over = "".join(f"; damaged: {one}; an earlier one is used" for one in damage)
    return f"the run was fetched from {remote}, with its checkpoint of step {step}{aside}{passed_over}"
