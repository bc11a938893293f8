"""Find the files of a model or tokenizer in a folder or in the local Hugging Face cache."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from .errors import UserError

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def find_model_folder(
    name: str | Path, file: str, *, kind: str = "model", download: Sequence[str] = ()
) -> Path:
    """Return a model's folder: `name` itself, or the cached snapshot of a Hugging Face model.

    Args:
        name: a folder or a Hugging Face id.
        file: a file that a cached snapshot must contain. A folder need not contain it.
        kind: "model" or "tokenizer", for messages.
        download: patterns of files to download if the cache lacks the model. Default: none.

    Raises:
        UserError: no such folder or model. The message suggests the closest folder.

    >>> find_model_folder("/no/such/folder", "config.json")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: model '/no/such/folder': no such folder
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UserError(
            f"{kind} {str(name)!r} is a file; give the folder that contains its {file} ({str(path.parent)!r})"
        )
    cached = find_cached(name, file)
    if cached is not None:
        return cached.parent
    said = f"{kind} {str(name)!r}: no such folder"
    # If a folder `models` exists, `models/qwne` is a mistyped path, not a Hugging Face id.
    if _is_hub_id(name) and not ("/" in str(name) and path.parent.is_dir()):
        said += ", and no model of that name in the local Hugging Face cache; "
        if not download:
            raise UserError(f"{said}`hf download {name}` puts it there{folders_near(name, file)}")
        # Import here, because the import is slow.
        import huggingface_hub

        try:
            return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=list(download)))
        except (OSError, ValueError, RuntimeError) as error:  # not on the hub; no network
            said += f"it cannot be downloaded ({str(error).strip().partition(chr(10))[0]})"
    raise UserError(f"{said}{folders_near(name, file)}") from None


def find_cached(name: str | Path, file: str) -> Path | None:
    """Return the path of a model's file in the local Hugging Face cache; None if not cached."""
    if not _is_hub_id(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(str(name), file)
    except ValueError:  # not a valid id: `_is_hub_id` accepts some names that the hub rejects
        return None
    # For a file known to be missing on the hub, the result is a marker object, not a path.
    return Path(found) if isinstance(found, str) else None


def folders_near(name: str | Path, file: str) -> str:
    """Return a suffix for an error message: the closest folder with such a file, or all of them."""
    path = Path(name).expanduser()
    near = [folder for folder in (path, path.parent) if folder.is_dir()]
    if not near and not _is_hub_id(name):
        return ""
    root = near[0] if near else Path()
    try:
        found = [each for depth in ("*", "*/*") for each in root.glob(f"{depth}/{file}")]
        folders = sorted(str(each.parent) for each in found)
    except OSError:
        return ""
    # Compare only the last part of each path: `Qwen2-tiny` matches `models/qwen2-tiny`. Of several
    # folders with the same last part, the first wins, because the list is reversed.
    by_last = {Path(folder).name: folder for folder in reversed(folders)}
    close = difflib.get_close_matches(path.name, by_last, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {by_last[close[0]]!r}?"
    more = ", ..." if len(folders) > 8 else ""
    return f"; folders with a {file} here: {', '.join(map(repr, folders[:8]))}{more}" if folders else ""


def _is_hub_id(name: str | Path) -> bool:
    """Whether a name has the form of a Hugging Face id: NAME or OWNER/NAME."""
    return _HUB_ID.fullmatch(str(name)) is not None
