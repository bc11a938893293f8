"""Data sets by their Hugging Face id, through the library `datasets`: from the local cache, else from the network."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError
from .folders import choose

TIMEOUT_S = 10.0
"""How long the hub may take to say whether it has a data set."""


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set."""

    name: str
    """What it is called in messages."""
    table: pa.Table
    split: str
    choices: tuple[str, ...]
    """Defaults that were taken."""


def is_hub_id(name: str) -> bool:
    """Whether this is meant as the id of a data set: OWNER/NAME, and no folder OWNER is here.

    >>> is_hub_id("openai/gsm8k"), is_hub_id("data/train.jsonl"), is_hub_id("train.parquet")
    (True, False, False)
    """
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is None or Path(name).parent.is_dir():
        return False
    return re.search(r"\.(parquet|jsonl?|csv|tsv|arrow|gz)$", name) is None


def read_hub(name: str, subset: str | None, split: str | None) -> HubSplit:
    """The rows of a split of a data set, mapped from the cache of `datasets`.

    Args:
        name: OWNER/NAME.
        subset: configuration of the data set; default: the only one, else `default` or `main`.
        split: default: the only one, else `train`.

    Raises:
        UserError: `datasets` is missing, there is no such data set, subset or split, or neither network nor cache has it.
    """
    try:
        import datasets
        import datasets.config
    except ModuleNotFoundError:
        raise UserError(
            f"{name!r} is no file or folder here; data sets by their Hugging Face id need the library datasets: "
            "pip install 'weft[datasets]'"
        ) from None
    source = _cached(name)
    if source is None:
        _check_reachable(name, Path(datasets.config.HF_DATASETS_CACHE))
        source = name

    def ask(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return call(source, *arguments, **more)
        except (OSError, ValueError, RuntimeError) as error:  # no network after all; files that cannot be read
            raise UserError(f"data set {name!r}: {_first_line(error)}") from None

    subset, chosen = choose("subset", ask(datasets.get_dataset_config_names), subset, name, ("default", "main"))
    splits = ask(datasets.get_dataset_split_names, subset)
    split, also = choose("split", splits, split, name, ("train",))
    rows = ask(datasets.load_dataset, subset, split=split)
    return HubSplit(f"{name} ({subset}, {split})", rows.with_format("arrow")[:], split, (*chosen, *also))


def _cached(name: str) -> str | None:
    """The folder of a data set in the hub's local cache, where it holds files beside its card."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name not in ("README.md", "LICENSE")]
    return folder if any(not path.name.startswith(".") for path in files) else None


def _check_reachable(name: str, cache: Path) -> None:
    """One question to the hub, so that no answer is an error now and not after many attempts."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"data set {name!r} asks for an agreement on its page first, and for `hf auth login`: {_first_line(error)}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"{name!r} is no file or folder here, and no data set on the Hugging Face hub") from None
    except Exception as error:  # no network, offline mode, a time-out: the client's library decides on the classes
        if (cache / name.replace("/", "___")).is_dir():
            return
        raise UserError(
            f"{name!r} is no file or folder here; as a data set it is not in the local Hugging Face cache, and the hub cannot be "
            f"reached ({_first_line(error)}). Where there is a network, `hf download --repo-type dataset {name}` puts it there"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
