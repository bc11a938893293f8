"""Folder copies: the folder of a model or a tokenizer that lies on one node only, in the cache of another.

    CACHE/folders/qwen2-3f5a.../        a copy, named after its contents; it is there when it is complete
    CACHE/folders/.qwen2-3f5a.../       a copy that is being written; whoever comes next begins it anew
    CACHE/folders/.qwen2-3f5a....lock   held by the process of the node that writes it

The cache is `~/.cache/weft`, or `WEFT_CACHE`. Copies that nobody has used for MAX_AGE_S are removed when another is made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.buffer.disk import make_folder
from ..dataflow.errors import UserError, WorkerError
from .once_a_node import growth_told, once_a_node
from .weight_files import read_header

MARKS = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "adapter_config.json")
"""A folder that has one of these is that of a model or a tokenizer."""
PIECE_BYTES = 16 << 20
MAX_AGE_S = 30 * 86400.0
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_FOREIGN = (".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Weights in formats that are never read here."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Places of a file that are compared, where a format does not say where its tensors are; and bytes at each."""
_SMALL_BYTES = 32 << 20
"""Files up to so many bytes are compared as a whole."""


@dataclass(frozen=True)
class FolderListing:
    """What a folder holds."""

    name: str
    contents: str
    """Checksum of names, sizes, all small files, and samples of each tensor: equal for the same model on two nodes."""
    key: str
    """Name of a copy. It also depends on when the files were changed, which samples may miss."""
    files: Mapping[str, int]
    """Name -> bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def is_model_folder(path: Path) -> bool:
    """Whether this is the folder of a model or a tokenizer."""
    return any((path / mark).is_file() for mark in MARKS)


def list_folder(folder: Path, *, weights: bool) -> FolderListing:
    """List what workers read of the folder of a model.

    Args:
        weights: also those; False for a tokenizer.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    found = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    has_safetensors = any(path.suffix == ".safetensors" for path in found)
    kept: dict[str, int] = {}
    contents, times = hashlib.sha256(), hashlib.sha256()
    for path in found:
        is_kept = not has_safetensors or path.suffix == ".safetensors"
        if path.suffix in _FOREIGN or (path.suffix in _WEIGHTS and not (weights and is_kept)):
            continue
        stat = path.stat()
        kept[path.name] = stat.st_size
        contents.update(f"{path.name} {stat.st_size} {_sampled(path, stat.st_size)}\n".encode())
        times.update(f"{stat.st_mtime_ns} ".encode())
    both = hashlib.sha256(contents.digest() + times.digest()).hexdigest()
    plain = "".join(c if c.isalnum() or c in "_-" else "_" for c in folder.resolve().name)[:40]
    return FolderListing(str(folder), contents.hexdigest(), f"{plain}-{both[:24]}", kept)


def _sampled(path: Path, size: int) -> str:
    """Checksum of a file: of all of it if it is small, else of samples."""
    with path.open("rb") as file:
        if size <= _SMALL_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        taken = hashlib.sha256()
        for start in _places(path, size):
            file.seek(start)
            taken.update(file.read(_SAMPLE_BYTES))
        return taken.hexdigest()


def _places(path: Path, size: int) -> list[int]:
    """Where a large file is sampled: at its ends, at even distances, and in the middle of each tensor."""
    places = [0, size - _SAMPLE_BYTES, *(size * i // _SAMPLES for i in range(1, _SAMPLES))]
    if path.suffix == ".safetensors":
        with suppress(ValueError):
            places += [(entry.start + entry.end) // 2 for entry in read_header(path)[0].values()]
    return sorted(min(max(0, place), size - _SAMPLE_BYTES) for place in places)


def read_piece(path: Path, start: int) -> tuple[bytes, bytes]:
    """A piece of a file, PIECE_BYTES at most, and its checksum."""
    with path.open("rb") as file:
        file.seek(start)
        piece = file.read(PIECE_BYTES)
    return piece, hashlib.sha256(piece).digest()


def cache_folder() -> Path:
    """Where copies lie on this node."""
    given = os.environ.get("WEFT_CACHE")
    if given:
        return Path(given).expanduser() / "folders"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weft" / "folders"


def copy_of(
    listing: FolderListing,
    pieces: Callable[[str, int], Iterable[tuple[bytes, bytes]]],
    *,
    advance: Callable[[], None] = lambda: None,
) -> Path:
    """The copy of a folder in the cache of this node, which one process of the node makes.

    Args:
        pieces: yields the pieces of a file of that size, each with its checksum.
        advance: called whenever more of it has come, to whichever process of the node.

    Raises:
        UserError: the cache cannot be written, or has no room.
        WorkerError: what came is damaged.
    """
    cache = cache_folder()
    copy, partial = cache / listing.key, cache / f".{listing.key}"
    try:
        make_folder(cache)
        with growth_told(partial, advance), once_a_node(Path(f"{partial}.lock"), f"copies {listing.name}"):
            if not copy.is_dir():
                _check_room(listing, cache)
                _remove_old(cache)
                _write(listing, pieces, partial)
                partial.rename(copy)
            os.utime(copy)  # it was used
    except OSError as error:
        raise UserError(
            f"{listing.name} lies on the driver's node only, and no copy of it can be written to {cache} of this node "
            f"({error.strerror or error}); WEFT_CACHE in the environment of its Ray node names another folder"
        ) from None
    return copy


def _write(listing: FolderListing, pieces: Callable[[str, int], Iterable[tuple[bytes, bytes]]], partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    for name, size in listing.files.items():
        if Path(name).name != name or name.startswith("."):
            raise WorkerError(f"{listing.name} names a file {name!r}, which lies elsewhere")
        descriptor = os.open(partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for piece, checksum in pieces(name, size):
                if hashlib.sha256(piece).digest() != checksum:
                    raise WorkerError(f"{listing.name}: a piece of {name} came damaged")
                file.write(piece)
            if file.tell() != size:
                raise WorkerError(f"{listing.name}: {name} changed while it was copied; start again")


def _check_room(listing: FolderListing, cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < listing.num_bytes:
        raise UserError(
            f"{listing.name} ({listing.num_bytes / 1e9:.1f} GB) lies on the driver's node only, and {cache} of this node has room for "
            f"{free / 1e9:.1f} GB; WEFT_CACHE in the environment of its Ray node names another folder"
        )


def _remove_old(cache: Path) -> None:
    """Remove copies that were not used for long, and those that were not finished by then."""
    oldest = time.time() - MAX_AGE_S
    for path in cache.iterdir():
        with suppress(OSError):  # another user's, or gone
            if path.is_dir() and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def pieces_of(size: int) -> Iterator[int]:
    """Where the pieces of a file begin.

    >>> list(pieces_of(PIECE_BYTES + 1)) == [0, PIECE_BYTES], list(pieces_of(0))
    (True, [])
    """
    return iter(range(0, size, PIECE_BYTES))
