"""RemoteRun: what is needed of a run to go on with it elsewhere, at any address that pyarrow knows (s3://, gs://, another disk).

    ADDRESS/NAME/checkpoints/step_000012/...      as in the run's directory; complete when its manifest is there, which comes last
    ADDRESS/NAME/buffer/ledger-*.checkpoint       the state of the ledgers at that step
    ADDRESS/NAME/buffer/history/*.log.zst         the log up to there, in parts
    ADDRESS/NAME/samples/*, metrics.arrows, ...   what was recorded

Columns of rows are not copied: a run that goes on from here issues the groups again that were in flight.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pf

from ...dataflow.buffer.disk import make_folder
from ...dataflow.buffer.folder import BUFFER, LOG, checkpoint_path
from ...dataflow.buffer.log_history import HISTORY, header, part_before
from ...dataflow.buffer.manifest import MANIFEST, verify_manifest
from ...dataflow.buffer.run_tables import METRICS, STREAM, TIMELINE
from ...dataflow.buffer.samples import FOLDER as SAMPLES
from ...dataflow.errors import UserError
from ..run_directory import CONFIG
from .checkpoints import FOLDER, complete_checkpoints, step_of
from .run_state import RunState

CHUNK_BYTES = 8 << 20
TABLES = (CONFIG, f"{METRICS}{STREAM}", f"{TIMELINE}{STREAM}")
FAILURES = (OSError, pa.ArrowException)
"""What a file system raises."""


class RemoteRun:
    """The copy of one run.

    Args:
        files: the file system.
        base: the folder of the run there.
        address: names it in messages.
    """

    def __init__(self, files: pf.FileSystem, base: str, address: str) -> None:
        self._files, self._base, self._address = files, PurePosixPath(base), address

    @classmethod
    def at(cls, address: str, name: str) -> RemoteRun:
        """The copy of a run below an address.

        Args:
            address: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder`, or a path.
            name: of the run.

        Raises:
            UserError: the address is none, or holds a password.
        """
        check_address(address)
        try:
            given = address if "://" in address else Path(address).absolute().as_uri()
            files, base = pf.FileSystem.from_uri(given)
        except FAILURES as error:
            raise UserError(f"CheckpointConfig.copy_to={address!r} cannot be used: {error}") from None
        return cls(files, f"{base}/{name}", f"{address.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self._address

    # What is there

    def steps(self) -> list[int]:
        """Steps whose checkpoints are complete there, latest first."""
        folders = (name for name in self._names(FOLDER) if re.fullmatch(r"step_\d+", name))
        return sorted((step_of(Path(n)) for n in folders if MANIFEST in self._names(f"{FOLDER}/{n}")), reverse=True)

    def _names(self, folder: str) -> dict[str, int]:
        """Name -> size in bytes, of what lies in a folder; none if it is not there."""
        selector = pf.FileSelector(str(self._base / folder), allow_not_found=True)
        return {info.base_name: info.size for info in self._files.get_file_info(selector)}

    # There

    def copy(self, run: Path, step: int) -> int:
        """Copy the checkpoint of a step, and what belongs to it. What is there already stays.

        Args:
            run: the directory of the run.
            step: of a complete checkpoint.

        Returns:
            Bytes that were written.

        Raises:
            OSError, pyarrow.ArrowException: a write failed, or the checkpoint was removed meanwhile.
        """
        folder = f"{FOLDER}/step_{step:06d}"
        if step in self.steps():
            self._files.delete_file(str(self._base / folder / MANIFEST))
        state, buffer = RunState.read(run / folder), run / BUFFER
        written = sum(self._write_new(run, SAMPLES, "*.arrow"))
        written += sum(self._write_file(run / name, name) for name in TABLES if (run / name).is_file())
        written += self._copy_log(buffer, state)
        ledgers = checkpoint_path(buffer, state.position)
        if ledgers.exists():
            written += self._write_file(ledgers, f"{BUFFER}/{ledgers.name}")
        inside = sorted(p for p in (run / folder).rglob("*") if p.is_file() and p.name != MANIFEST)
        for path in [*inside, run / folder / MANIFEST]:
            written += self._write_file(path, path.relative_to(run).as_posix())
        return written

    def prune(self, run: Path) -> None:
        """Remove the checkpoints there that the run does not keep any more."""
        kept = {step_of(path): RunState.read(path).position for path in complete_checkpoints(run / FOLDER)}
        for step in self.steps():
            if step not in kept:
                folder = self._base / FOLDER / f"step_{step:06d}"
                self._files.delete_file(str(folder / MANIFEST))
                self._files.delete_dir(str(folder))
        ledgers = {checkpoint_path(run, position).name for position in kept.values()}
        for name in self._names(BUFFER):
            if name.endswith(".checkpoint") and name not in ledgers:
                self._files.delete_file(str(self._base / BUFFER / name))

    def _copy_log(self, buffer: Path, state: RunState) -> int:
        """The log up to a checkpoint: the parts of its history, and what follows them as one more."""
        folder, there = f"{BUFFER}/{HISTORY}", self._names(f"{BUFFER}/{HISTORY}")
        # Before the parts: a log that is cut from here on is noticed when the rest of it is read.
        tail = part_before(buffer / LOG, state.position.offset, state.position.checksum)
        written = sum(self._write_new(buffer.parent, folder, "*.log.zst"))
        keep = {path.name for path in (buffer / HISTORY).glob("*.log.zst")}
        if tail is not None:
            name, chunks = tail
            keep.add(name)
            written += self._write(f"{folder}/{name}", chunks)
        for old in there.keys() - keep:  # of earlier checkpoints, whose records are in the later part, too
            self._files.delete_file(str(self._base / folder / old))
        return written

    def _write_new(self, run: Path, folder: str, pattern: str) -> Iterator[int]:
        there = self._names(folder)
        for path in sorted((run / folder).glob(pattern)):
            if there.get(path.name) != path.stat().st_size:
                yield self._write_file(path, f"{folder}/{path.name}")

    def _write_file(self, path: Path, name: str) -> int:
        with path.open("rb") as file:
            return self._write(name, iter(lambda: file.read(CHUNK_BYTES), b""))

    def _write(self, name: str, chunks: Iterable[bytes]) -> int:
        path, written = self._base / name, 0
        self._files.create_dir(str(path.parent), recursive=True)
        with self._files.open_output_stream(str(path), compression=None) as stream:
            for data in chunks:
                stream.write(data)
                written += len(data)
        found = self._files.get_file_info(str(path)).size
        if found != written:
            raise OSError(f"{self}/{name} has {found} bytes, not the {written} that were written")
        return written

    # Back

    def fetch(self, run: Path) -> int | None:
        """Make the directory of a run that is not here from its latest copy that is intact.

        Args:
            run: the directory, which is replaced if it exists. It is complete when this returns a step.

        Returns:
            The step of its checkpoint; None: there is none.

        Raises:
            OSError, pyarrow.ArrowException: it cannot be read.
        """
        for step in self.steps():
            shutil.rmtree(run, ignore_errors=True)
            for folder in (f"{FOLDER}/step_{step:06d}", SAMPLES, BUFFER):
                self._read(folder, run)
            for name in self._names("").keys() & {*TABLES}:
                self._read_file(name, run / name)
            checkpoint = run / FOLDER / f"step_{step:06d}"
            if verify_manifest(checkpoint):
                continue
            state = RunState.read(checkpoint)
            at = state.position
            for path in (run / BUFFER).glob("*.checkpoint"):
                if path != checkpoint_path(run / BUFFER, at):
                    path.unlink()
            make_folder(run / BUFFER)
            (run / BUFFER / LOG).write_bytes(header(at.offset, at.checksum) if at.offset else b"")
            return step
        return None

    def _read(self, folder: str, into: Path) -> None:
        selector = pf.FileSelector(str(self._base / folder), allow_not_found=True, recursive=True)
        for info in self._files.get_file_info(selector):
            if info.type is pf.FileType.File:
                name = PurePosixPath(info.path).relative_to(self._base)
                if ".." in name.parts:
                    raise OSError(f"{self} has a file of the name {name}")
                self._read_file(str(name), into / name)

    def _read_file(self, name: str, path: Path) -> None:
        make_folder(path.parent)
        with self._files.open_input_stream(str(self._base / name), compression=None) as stream, path.open("wb") as file:
            path.chmod(0o600)
            while data := stream.read(CHUNK_BYTES):
                file.write(data)


def check_address(address: str) -> None:
    """Refuse an address of copies that holds a password: it would stand in the run's configuration.

    Raises:
        UserError: it does, or is empty.
    """
    if not address.strip():
        raise UserError("CheckpointConfig.copy_to is empty; it is an address such as s3://bucket/runs, or a path")
    if "@" in urlsplit(address).netloc:
        raise UserError(
            "CheckpointConfig.copy_to holds a name or a password, which would be written to disk with the settings; give these by the "
            "environment (AWS_ACCESS_KEY_ID, ...) or a profile"
        )
