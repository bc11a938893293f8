"""Model folders on this node: find a model by path or Hugging Face id, download each id once per
node, and copy folders between nodes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...dataflow.errors import RunError, UserError, WorkerError
from ...dataflow.model_location import find_cached, find_model_folder
from ...dataflow.runs.files import make_folder
from .model_folder import CONFIG_FILE, read_index
from .weight_files import read_header

# One process of a node does the work. The others wait, and report its progress.


WAIT_S = 7200.0
"""[s] Maximum wait for another process of the node."""
_POLL_S = 0.5
_LOOK_S = 2.0
"""[s] Polling interval for progress."""


@contextmanager
def once_a_node(lock: Path, what: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold a lock file, which one process of the node can do at a time. A process that dies
    releases the lock. Creates the file and its folder if missing; several users may share the file.
    `what` names the work in messages. Raises OSError if the file can be neither created nor read,
    and RunError if the holder did not release it in time."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_lock(lock)
    try:
        end = time.monotonic() + wait_s
        while not _takes_lock(descriptor):
            if time.monotonic() > end:
                holder = os.pread(descriptor, 20, 0).decode() or "unknown"
                raise RunError(
                    f"process {holder} of this node {what}, but did not finish in {wait_s:g} s"
                )
            time.sleep(min(_POLL_S, wait_s))
        with suppress(OSError):  # the file is another user's and read-only, so the pid stays unknown
            lock.write_text(str(os.getpid()))
        yield
    finally:
        os.close(descriptor)


@contextmanager
def growth_told(folder: Path, advance: Callable[[], None]) -> Iterator[None]:
    """Call `advance` from a thread when the size of a folder changes, whichever process writes."""
    over = threading.Event()

    def look() -> None:
        before = _bytes_in(folder)
        while not over.wait(_LOOK_S):
            now = _bytes_in(folder)
            if now != before:
                advance()
            before = now

    thread = threading.Thread(target=look, name="growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """Return the total size of a folder's files [bytes]. The folder may be missing or renamed."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the file was renamed
                file = Path(path, name)
                total += 0 if file.is_symlink() else file.stat().st_size
    return total


def _open_lock(lock: Path) -> int:
    """Open a lock file. Its creator makes it writable for all users."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(lock, os.O_RDONLY)  # a read-only descriptor is enough for flock
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, 0o666)  # despite the umask
    return descriptor


def _takes_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


# Folder copies: a cache of model and tokenizer folders that only another node has.
#
#     CACHE/folders/qwen2-3f5a.../        a complete copy, named after its contents
#     CACHE/folders/.qwen2-3f5a.../       an unfinished copy; the next process restarts it
#     CACHE/folders/.qwen2-3f5a....lock   held by the process of the node that writes the copy
#
# The cache is in `~/.cache/weft` or `WEFT_CACHE`. A new copy deletes copies unused for MAX_AGE_S.


MARKS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "adapter_config.json",
)
"""A folder with one of these files has a model or tokenizer."""
PIECE_BYTES = 16 << 20
MAX_AGE_S = 30 * 86400.0
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_FOREIGN = (".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Suffixes of weight files in unsupported formats."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Number of places to compare in a file without known tensors, and bytes to compare at each."""
_SMALL_BYTES = 32 << 20
"""[bytes] Files up to this size are compared completely."""


@dataclass(frozen=True)
class FolderListing:
    """Contents of a folder."""

    name: str
    contents: str
    """Checksum of names, sizes, small files and tensor samples; equal for equal models."""
    key: str
    """Name of the copy. It also depends on modification times, because samples may miss changes."""
    files: Mapping[str, int]
    """Maps file names to sizes [bytes]."""

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def is_model_folder(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


def list_folder(folder: Path, *, weights: bool) -> FolderListing:
    """List the files of a model that workers read; without `weights`, those of its tokenizer."""
    found = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    has_safetensors = any(path.suffix == ".safetensors" for path in found)
    kept: dict[str, int] = {}
    contents, times = hashlib.sha256(), hashlib.sha256()
    for path in found:
        # `transformers` prefers safetensors, so skip files in torch's format beside them.
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
    """Return a checksum of a file: of all bytes if it is small, otherwise of samples."""
    with path.open("rb") as file:
        if size <= _SMALL_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        # Samples: both ends, places at even distances, and the middle of each tensor.
        places = [0, size - _SAMPLE_BYTES, *(size * i // _SAMPLES for i in range(1, _SAMPLES))]
        if path.suffix == ".safetensors":
            with suppress(ValueError):
                places += [(entry.start + entry.end) // 2 for entry in read_header(path)[0].values()]
        taken = hashlib.sha256()
        for start in sorted(min(max(0, place), size - _SAMPLE_BYTES) for place in places):
            file.seek(start)
            taken.update(file.read(_SAMPLE_BYTES))
        return taken.hexdigest()


def read_piece(path: Path, start: int) -> tuple[bytes, bytes]:
    """Return a piece of a file, at most PIECE_BYTES, and its checksum."""
    with path.open("rb") as file:
        file.seek(start)
        piece = file.read(PIECE_BYTES)
    return piece, hashlib.sha256(piece).digest()


def cache_folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("WEFT_CACHE") or caches / "weft").expanduser() / "folders"


def copy_of(
    listing: FolderListing,
    pieces: Callable[[str, int], Iterable[tuple[bytes, bytes]]],
    *,
    advance: Callable[[], None] = lambda: None,
) -> Path:
    """Return the cached copy of a folder. If it is missing, one process of the node writes it.
    `pieces` yields the pieces of a file of the given size with their checksums. Calls `advance`
    when data arrives, in whichever process of the node. Raises UserError if the cache is not
    writable or full, and WorkerError if data arrived damaged."""
    cache = cache_folder()
    copy, partial = cache / listing.key, cache / f".{listing.key}"
    try:
        make_folder(cache)
        lock = Path(f"{partial}.lock")
        with growth_told(partial, advance), once_a_node(lock, f"copies {listing.name}"):
            # Another process may have written it while this one waited for the lock.
            if not copy.is_dir():
                free = shutil.disk_usage(cache).free
                if free < listing.num_bytes:
                    raise UserError(
                        f"{listing.name} ({listing.num_bytes / 1e9:.1f} GB) is on the driver's node "
                        f"only, and {cache} of this node has room for {free / 1e9:.1f} GB; set "
                        "WEFT_CACHE in the environment of this Ray node to another folder"
                    )
                _remove_old(cache)
                _write(listing, pieces, partial)
                partial.rename(copy)
            os.utime(copy)
    except OSError as error:
        raise UserError(
            f"{listing.name} is on the driver's node only, and cannot be copied to {cache} "
            f"of this node ({error.strerror or error}); set WEFT_CACHE in the environment "
            "of this Ray node to another folder"
        ) from None
    return copy


def _write(
    listing: FolderListing, pieces: Callable[[str, int], Iterable[tuple[bytes, bytes]]], partial: Path
) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    for name, size in listing.files.items():
        if Path(name).name != name or name.startswith("."):
            raise WorkerError(f"{listing.name} names a file {name!r} in another folder")
        descriptor = os.open(partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for piece, checksum in pieces(name, size):
                if hashlib.sha256(piece).digest() != checksum:
                    raise WorkerError(f"{listing.name}: a piece of {name} arrived damaged")
                file.write(piece)
            if file.tell() != size:
                raise WorkerError(f"{listing.name}: {name} changed while it was copied; start again")


def _remove_old(cache: Path) -> None:
    oldest = time.time() - MAX_AGE_S
    for path in cache.iterdir():
        with suppress(OSError):  # owned by another user, or gone
            if path.is_dir() and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def pieces_of(size: int) -> Iterator[int]:
    return iter(range(0, size, PIECE_BYTES))


# Downloads


def node_folder(
    model: str | Path, *, wait_s: float = WAIT_S, advance: Callable[[], None] = lambda: None
) -> Path:
    """Return the folder of a model with its weights, after a download if necessary. Calls `advance`
    when data arrives, in whichever process of the node. Raises UserError if the model does not
    exist or cannot be downloaded, and RunError if another process downloads it too slowly."""
    if Path(model).expanduser().is_dir() or not _may_be_downloaded(model):
        return find_model_folder(model, CONFIG_FILE)
    found = cached_folder(model, weights=True)
    if found is None:
        with _one_of_the_node(str(model), wait_s, advance):
            # Another process may have downloaded it in the meantime.
            found = cached_folder(model, weights=True) or _download(str(model))
    return found


def cached_folder(name: str | Path, *, weights: bool) -> Path | None:
    """Return this node's cached snapshot of a Hugging Face id; None if it is incomplete or the name
    is no id. `weights` requires a model with all its weights."""
    marks = (CONFIG_FILE,) if weights else MARKS
    found = next((path for mark in marks if (path := find_cached(name, mark)) is not None), None)
    return found.parent if found is not None and (not weights or _has_weights(found.parent)) else None


def _may_be_downloaded(model: str | Path) -> bool:
    """Return whether a name is a Hugging Face id, not the path of a missing folder."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(str(model))
    except HFValidationError:
        return False
    return not ("/" in str(model) and Path(model).parent.is_dir())


def _has_weights(folder: Path) -> bool:
    names = ("model.safetensors", "pytorch_model.bin")
    for index in (folder / f"{name}.index.json" for name in names):
        if index.is_file():
            return all((folder / name).is_file() for name in read_index(index).values())
    return any((folder / name).is_file() for name in names)


def _download(model: str) -> Path:
    import huggingface_hub

    try:
        files = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=files))
    except (OSError, ValueError, RuntimeError) as error:  # not on the hub, or no network
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model {model!r} is not on this node and cannot be downloaded ({reason})"
        ) from None
    if not _has_weights(folder):
        raise UserError(f"model {model!r}: {folder} has no complete weights in safetensors files")
    return folder


@contextmanager
def _one_of_the_node(model: str, wait_s: float, advance: Callable[[], None]) -> Iterator[None]:
    from huggingface_hub.constants import HF_HUB_CACHE

    name = model.replace("/", "--")
    lock = Path(HF_HUB_CACHE) / ".locks" / f"weft--{name}.lock"
    with growth_told(Path(HF_HUB_CACHE) / f"models--{name}", advance), ExitStack() as held:
        try:
            held.enter_context(once_a_node(lock, f"downloads model {model!r}", wait_s=wait_s))
        except OSError as error:
            raise UserError(
                f"model {model!r} is not on this node and cannot be downloaded: {lock} is "
                f"not writable ({error.strerror}); set HF_HOME to another cache"
            ) from None
        yield
