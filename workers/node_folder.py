"""The folder of a model on this node: given by its path, or of a Hugging Face id, which is downloaded once on each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..dataflow.errors import UserError
from ..dataflow.model_location import find_cached, find_model_folder
from .folder_copy import MARKS
from .model_folder import CONFIG_FILE, read_index
from .once_a_node import WAIT_S, growth_told, once_a_node

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is downloaded: settings, weights, tokenizer, chat template."""


def node_folder(model: str | Path, *, wait_s: float = WAIT_S, advance: Callable[[], None] = lambda: None) -> Path:
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
    found = cached_folder(model, weights=True)
    if found is None:
        with _one_of_the_node(str(model), wait_s, advance):
            found = cached_folder(model, weights=True) or _download(str(model))
    return found


def cached_folder(name: str | Path, *, weights: bool) -> Path | None:
    """The snapshot of a Hugging Face id in the cache of this node; None if it lacks a part, or this is no such id.

    Args:
        name: of a model or a tokenizer.
        weights: whether it must hold a model with all of its weights.

    Raises:
        UserError: the index of the weights is damaged.
    """
    marks = (CONFIG_FILE,) if weights else MARKS
    found = next((path for mark in marks if (path := find_cached(name, mark)) is not None), None)
    return found.parent if found is not None and (not weights or _has_weights(found.parent)) else None


def _may_be_downloaded(model: str | Path) -> bool:
    """Whether a name is a Hugging Face id, and no path of a folder that is not there."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(str(model))
    except HFValidationError:
        return False
    return not ("/" in str(model) and Path(model).parent.is_dir())


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
def _one_of_the_node(model: str, wait_s: float, advance: Callable[[], None]) -> Iterator[None]:
    """Held by one process of the node at a time, which may download a model.

    Raises:
        UserError: this user may not write to the cache.
        RunError: the process that holds it did not give it up in time.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    name = model.replace("/", "--")
    lock = Path(HF_HUB_CACHE) / ".locks" / f"weft--{name}.lock"
    with growth_told(Path(HF_HUB_CACHE) / f"models--{name}", advance), ExitStack() as held:
        try:
            held.enter_context(once_a_node(lock, f"downloads model {model!r}", wait_s=wait_s))
        except OSError as error:
            raise UserError(
                f"model {model!r} is not on this node, and cannot be downloaded: {lock} cannot be written ({error.strerror}); "
                "HF_HOME names another cache"
            ) from None
        yield
