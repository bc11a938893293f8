"""The folder of a model on this node: given by its path, or of a Hugging Face id, which is downloaded once on each node."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..dataflow.errors import RunError, UserError
from ..dataflow.model_location import find_cached, find_model_folder
from .model_folder import CONFIG_FILE, read_index

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is downloaded: settings, weights, tokenizer, chat template."""
_WAIT_S = 7200.0
"""Longest wait for another process of the node that downloads the same model."""
_POLL_S = 0.5
_LOOK_S = 2.0
"""Seconds between two looks at how much was downloaded."""


def node_folder(model: str | Path, *, wait_s: float = _WAIT_S, advance: Callable[[], None] = lambda: None) -> Path:
    """The folder of a model with its weights. The driver has seen that its own node knows the id; another node may not.

    Args:
        model: a folder, or a Hugging Face id.
        wait_s: how long to wait for another process that downloads it.
        advance: called whenever more of it was downloaded, by whichever process of the node (`Context.advance`).

    Raises:
        UserError: there is no such model, or it cannot be downloaded.
        RunError: the process that downloads it did not finish in time; it is named.
    """
    if Path(model).expanduser().is_dir() or not _may_be_downloaded(model):
        return find_model_folder(model, CONFIG_FILE)
    found = _cached(model)
    if found is None:
        with _growth_told(str(model), advance), _one_of_the_node(str(model), wait_s):
            found = _cached(model) or _download(str(model))
    return found


def _may_be_downloaded(model: str | Path) -> bool:
    """Whether a name is a Hugging Face id, and no path of a folder that is not there."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(str(model))
    except HFValidationError:
        return False
    return not ("/" in str(model) and Path(model).parent.is_dir())


def _cached(model: str | Path) -> Path | None:
    """The snapshot of an id in the cache; None if a part of it is lacking."""
    config = find_cached(model, CONFIG_FILE)
    return config.parent if config is not None and _has_weights(config.parent) else None


def _has_weights(folder: Path) -> bool:
    """Whether all files of the weights are there, as safetensors files or as torch's own.

    Raises:
        UserError: the index of the files is damaged.
    """
    for index in (folder / "model.safetensors.index.json", folder / "pytorch_model.bin.index.json"):
        if index.is_file():
            return all((folder / name).is_file() for name in read_index(index).values())
    return any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))


def _download(model: str) -> Path:
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_FILES)))
    except (OSError, ValueError, RuntimeError) as error:  # not on the hub; no network
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model {model!r} is not on this node, and cannot be downloaded ({reason})") from None
    if not _has_weights(folder):
        raise UserError(f"model {model!r}: {folder} has no complete weights in safetensors files")
    return folder


@contextmanager
def _growth_told(model: str, advance: Callable[[], None]) -> Iterator[None]:
    """Within it, a thread calls `advance` whenever there is more of a model in the cache than before."""
    over = threading.Event()

    def look() -> None:
        before = _bytes_cached(model)
        while not over.wait(_LOOK_S):
            now = _bytes_cached(model)
            if now != before:
                advance()
            before = now

    thread = threading.Thread(target=look, name="download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bytes_cached(model: str) -> int:
    """Bytes of a model in the cache, those of unfinished files included."""
    from huggingface_hub.constants import HF_HUB_CACHE

    total = 0
    for file in (Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").rglob("*"):
        with suppress(OSError):  # it has another name now
            total += 0 if file.is_symlink() else file.stat().st_size
    return total


@contextmanager
def _one_of_the_node(model: str, wait_s: float) -> Iterator[None]:
    """Held by one process of the node at a time; a process that dies gives it up.

    Raises:
        UserError: this user may not write to the cache.
        RunError: the process that holds it did not give it up in time.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    path = Path(HF_HUB_CACHE) / ".locks" / f"weft--{model.replace('/', '--')}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_lock(path)
    except OSError as error:
        raise UserError(
            f"model {model!r} is not on this node, and cannot be downloaded: {path} cannot be written ({error.strerror}); "
            "HF_HOME names another cache"
        ) from None
    try:
        end = time.monotonic() + wait_s
        while not _lock(descriptor):
            if time.monotonic() > end:
                holder = os.pread(descriptor, 20, 0).decode() or "unknown"
                raise RunError(
                    f"model {model!r}: process {holder} of this node downloads it, and did not end in {wait_s:g} s"
                )
            time.sleep(min(_POLL_S, wait_s))
        with suppress(OSError):  # of another user, who may have kept it from others: nobody learns the process then
            os.truncate(path, 0)
            path.write_text(str(os.getpid()))
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open a lock file that several users may share: whoever makes it lets all others write to it.

    Raises:
        OSError: it can be neither made nor read.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)  # a lock takes no right to write
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, 0o666)  # whatever the umask
    return descriptor


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
