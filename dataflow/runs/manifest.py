"""Manifest: size and checksum of each file in a folder, to verify a checkpoint before reading it.

    {"files": {"actor/rank_0.json": {"bytes": 8112, "xxh3_64": "0f3c…"}, …}, "xxh3_64": "77ab…"}

The last checksum covers the list of files. With the canonical text format, it detects any changed
byte of the manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from ..errors import UserError
from ..safe_files import open_file, parse_object, read_file
from .files import PARTIAL, Disk, make_private

MANIFEST = "manifest.json"
_PARTIAL = MANIFEST + PARTIAL
_CHUNK_BYTES = 4 << 20
_THREADS = 4
"""Number of files to read in parallel. Reading and hashing release the GIL."""

_Entry = Mapping[str, Any]


def write_manifest(
    folder: Path, *, disk: Disk | None = None, advance: Callable[[], None] = lambda: None
) -> None:
    """Sync all files in a folder, make them private, and write the manifest. Several threads call
    `advance` after each chunk that they read. Raises an OSError, and writes no manifest, if a file
    cannot be read or the disk is full."""
    disk = disk or Disk()
    # A crash must not leave an old manifest with new files.
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / _PARTIAL).unlink(missing_ok=True)
    names = _files(folder)
    # `chmod` would follow links to targets outside the folder.
    for path in (folder, *(p for p in folder.rglob("*") if not p.is_symlink())):
        make_private(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = pool.map(lambda name: describe(folder / name, disk, advance), names)
        files = dict(zip(names, entries, strict=True))
    # Deepest folders first: each name must be on disk before its parent's name.
    inside = {folder / parent for name in names for parent in Path(name).parents}
    for parent in sorted(inside, reverse=True):
        disk.sync_folder(parent)
    disk.write_whole(folder / MANIFEST, _render(files))


def verify_manifest(folder: Path) -> list[str]:
    """Compare the files in a folder with its manifest. Return a sorted list with a line `FILE
    PROBLEM` for each file that differs or is missing, unreadable or not in the manifest. If the
    manifest is damaged, return only a line about that."""
    try:
        written = read_file(folder / MANIFEST)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, UserError) as error:
        return [f"{MANIFEST} {_unreadable(error)}"]
    files = _parse(written)
    if files is None:
        problem = f"is damaged: its {len(written)} bytes do not have the checksum that it names"
        return [f"{MANIFEST} {problem}"]
    found = set(_files(folder))
    wrong = dict.fromkeys(found - files.keys(), "is not in the manifest")
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(
            lambda name: _check(folder, name, files[name]) if name in found else "is missing", files
        )
        wrong |= {name: problem for name, problem in zip(files, checked, strict=True) if problem}
    return [f"{name} {problem}" for name, problem in sorted(wrong.items())]


def _check(folder: Path, name: str, entry: _Entry) -> str:
    try:
        size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            return f"is {size} bytes, not {entry['bytes']}"
        checksum = describe(folder / name)["xxh3_64"]
    except (OSError, UserError) as error:
        return _unreadable(error)
    return f"has checksum {checksum}, not {entry['xxh3_64']}" if checksum != entry["xxh3_64"] else ""


def _unreadable(error: OSError | UserError) -> str:
    return f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"


def describe(path: Path, sync: Disk | None = None, advance: Callable[[], None] = lambda: None) -> _Entry:
    """Return the size (`bytes`) and checksum (`xxh3_64`) of a file; `sync` also syncs it. Raises an
    OSError if the file cannot be read, and a UserError if it is not a regular file."""
    digest, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open_file(path) as file:
        descriptor = file.fileno()
        while count := os.readv(descriptor, [buffer]):
            advance()
            digest.update(buffer[:count])
            size += count
        if sync is not None:
            sync.sync(descriptor)
    return {"bytes": size, "xxh3_64": digest.hexdigest()}


def _files(folder: Path) -> list[str]:
    """Return the relative paths of all files in a folder, except the manifest."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if name != MANIFEST)


def _parse(written: bytes) -> Mapping[str, _Entry] | None:
    try:
        files = parse_object(written, MANIFEST)["files"]
        entries = [(entry["bytes"], entry["xxh3_64"]) for entry in files.values()]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if not all(isinstance(size, int) and isinstance(checksum, str) for size, checksum in entries):
        return None
    return files if _render(files) == written else None


def _render(files: Mapping[str, _Entry]) -> bytes:
    listed = json.dumps(files, sort_keys=True)
    document = {"files": files, "xxh3_64": xxhash.xxh3_64_hexdigest(listed.encode())}
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
