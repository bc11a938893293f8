"""Read rows from files, a folder, or a Hugging Face data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError, nearest
from .files import ACCEPTED_ROWS, Origin, described, file_kind, is_readable, read_files

# Folders


SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits, and the words for them in names of files and folders."""

_OTHER = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class DataPart:
    """The part of a data set to read: its files, and the defaults that chose them."""

    files: tuple[Path, ...]
    split: str | None = None
    """Name of the split; None if the files have no splits."""
    choices: tuple[str, ...] = ()
    """Defaults that were used: `split 'train' of train, test`."""


def find_part(folder: Path, subset: str | None, split: str | None) -> DataPart:
    """Find the files of one split in a folder, sorted by name.

    A word in the names of files (`train-00000-of-00002.parquet`) or folders (`test/`) identifies a
    split. Other folders with files are subsets. Without `split`, a folder with several splits gives
    `train`.

    Raises:
        UserError: the folder has no readable files, or files of several kinds, or the subset or
            split is ambiguous.
    """
    subsets = _subsets(folder)
    choices: list[str] = []
    if subsets:
        subset, choice = choose("subset", list(subsets), subset, str(folder), ("default", "main"))
        choices += choice
        files = subsets[subset]
    elif subset is not None:
        raise UserError(f"{folder}: has no subsets (subset={subset!r})")
    else:
        files = _files(folder)
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    named = [name for name in splits if name is not None]
    if split is not None or len(splits) > 1:
        if not named:
            raise UserError(
                f"{folder}: no file is named after a split (split={split!r}); it has {_names(files)}"
            )
        split, choice = choose("split", named, split, str(folder), ("train",))
        choices += choice
        if None in splits:
            choices.append(f"files without a split in their name are not read: {_names(splits[None])}")
        files = splits[split]
    kinds = sorted({file_kind(file) for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"{folder}: holds files of several kinds ({_names(files)}); pass a list of files instead of the folder"
        )
    return DataPart(tuple(files), split or next(iter(splits)), tuple(choices))


def choose(
    what: str, known: Sequence[str], wanted: str | None, where: str, usual: Sequence[str]
) -> tuple[str, list[str]]:
    """Choose the subset or split to read: the wanted one, else the only one, else a usual one.

    Returns:
        Its name, and lines to tell the user if a default was used.

    Raises:
        UserError: the wanted one does not exist, or there are several and none is usual.

    >>> choose("split", ["train", "test"], None, "sums", ["train"])
    ('train', ["split 'train' of train, test"])
    >>> choose("split", ["train", "test"], "tset", "sums", ["train"])
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: sums: there is no split 'tset'; did you mean 'test'?
    """
    if wanted is not None:
        if wanted not in known:
            hint = nearest(wanted, known) or f"; it has {', '.join(known)}"
            raise UserError(f"{where}: there is no {what} {wanted!r}{hint}")
        return wanted, []
    if len(known) == 1:
        return known[0], []
    for name in usual:
        if name in known:
            return name, [f"{what} {name!r} of {', '.join(known)}"]
    raise UserError(
        f"{where}: has the {what}s {', '.join(known)}; choose one, such as {what}={known[0]!r}"
    )


def _files(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """Return the readable files in a folder, and in its folders named `data` or after a split.

    Args:
        above: real paths of the parent folders; links back to one of them are not followed.
    """
    above = (*above, folder.resolve())
    found = [p for p in folder.iterdir() if p.is_file() and is_readable(p) and p.name not in _OTHER]
    for inner in (p for p in folder.iterdir() if p.is_dir() and p.resolve() not in above):
        if inner.name == "data" or _split_of(Path(inner.name)):
            found += _files(inner, above)
    if not found:
        raise UserError(f"{str(folder)!r} is a folder without readable prompt files")
    return sorted(found)


def _subsets(folder: Path) -> Mapping[str, list[Path]]:
    """Return subset -> files: the inner folders, if this folder has no readable files itself."""
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    # Files next to the folders: the folders are not subsets.
    if any(p.is_file() and is_readable(p) and p.name not in _OTHER for p in folder.iterdir()):
        return {}
    if any(p.name == "data" or _split_of(Path(p.name)) for p in inner):
        return {}
    found: dict[str, list[Path]] = {}
    for path in inner:
        if any(is_readable(p) and p.name not in _OTHER for p in path.rglob("*")):
            found[path.name] = _files(path)
    return found


def _split_of(path: Path) -> str | None:
    """Return the split in a path's name, preferring the file's own name.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("dev/a.jsonl")), _split_of(Path("a.jsonl"))
    ('train', 'validation', None)
    """
    for part in reversed(path.parts):
        # Whole words only: `latest.jsonl` is not a test split.
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in SPLITS.items():
            if any(name in words for name in names):
                return split
    return None


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:5]) + (", ..." if len(files) > 5 else "")


# Hugging Face hub


TIMEOUT_S = 10.0
"""[s] Time limit for asking the hub about a data set."""


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set."""

    name: str
    table: pa.Table
    split: str
    choices: tuple[str, ...]


def is_hub_id(name: str) -> bool:
    """Return whether a name looks like the id of a data set: OWNER/NAME, without a local folder
    OWNER.

    >>> is_hub_id("openai/gsm8k"), is_hub_id("data/train.jsonl"), is_hub_id("train.parquet")
    (True, False, False)
    """
    # A local folder OWNER makes the name a path.
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is None or Path(name).parent.is_dir():
        return False
    return re.search(r"\.(parquet|jsonl?|csv|tsv|arrow|gz)$", name) is None


def read_hub(name: str, subset: str | None, split: str | None) -> HubSplit:
    """Read a split of a data set, mapped from the cache of `datasets`.

    Args:
        name: OWNER/NAME.
        subset: configuration of the data set; the default is the only one, else `default` or
            `main`.
        split: the default is the only one, else `train`.

    Raises:
        UserError: `datasets` is not installed, there is no such data set, subset or split, or
            neither network nor cache has it.
    """
    try:
        import datasets
        import datasets.config
    except ModuleNotFoundError:
        raise UserError(
            f"{name!r} is not a file or folder; to read it from the Hugging Face hub, install the library datasets: "
            "pip install 'weft[datasets]'"
        ) from None
    source = _cached(name)
    if source is None:
        _check_reachable(name, Path(datasets.config.HF_DATASETS_CACHE))
        source = name

    def ask(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return call(source, *arguments, **more)
        except (OSError, ValueError, RuntimeError) as error:  # no network, or unreadable files
            raise UserError(f"data set {name!r}: {_first_line(error)}") from None

    subset, chosen = choose(
        "subset", ask(datasets.get_dataset_config_names), subset, name, ("default", "main")
    )
    splits = ask(datasets.get_dataset_split_names, subset)
    split, also = choose("split", splits, split, name, ("train",))
    rows = ask(datasets.load_dataset, subset, split=split)
    return HubSplit(f"{name} ({subset}, {split})", rows.with_format("arrow")[:], split, (*chosen, *also))


def _cached(name: str) -> str | None:
    """Return the folder of a data set in the hub's local cache, if it has files other than its
    card."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    files = [
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name not in ("README.md", "LICENSE")
    ]
    return folder if any(not path.name.startswith(".") for path in files) else None


def _check_reachable(name: str, cache: Path) -> None:
    """Ask the hub once, so that a missing network fails at once instead of after many retries."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"data set {name!r} is gated; accept its terms on its page, then run `hf auth login`: {_first_line(error)}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name!r} is not a file or folder, and not a data set on the Hugging Face hub"
        ) from None
    except Exception as error:  # no network, offline mode, or a timeout; the class depends on the client
        if (cache / name.replace("/", "___")).is_dir():
            return
        raise UserError(
            f"{name!r} is not a file or folder, and not a data set in the local Hugging Face cache; the hub cannot be "
            f"reached ({_first_line(error)}); on a machine with network access, run `hf download --repo-type dataset {name}`"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# Datasets


@dataclass(frozen=True)
class Rows:
    """The rows of a source, with their origin."""

    name: str
    table: pa.Table
    origin: Origin
    choices: tuple[str, ...] = ()


def check_paths(source: object) -> None:
    """Refuse anything but a list of paths.

    Raises:
        UserError: for example, the source is rows, which `Prompts.from_rows` takes.
    """
    paths = source if isinstance(source, Sequence) else None
    if paths is None or not all(isinstance(path, str | Path) for path in paths):
        raise UserError(
            f"prompts are read from a path, a list of paths, or the id of a data set, not from {described(source)}; "
            f"Prompts.from_rows takes {ACCEPTED_ROWS}"
        )


def read_rows(
    source: str | Path | Sequence[str | Path], subset: str | None, split: str | None, limit: int | None
) -> Rows:
    """Read the rows of a source.

    Args:
        source: a file, files (read one after the other), a folder, or a Hugging Face id.
        subset: subset, for a folder or data set.
        split: split, for a folder or data set.
        limit: most rows to read.

    Raises:
        UserError: naming the file or id, the rule, the value and the nearest valid name.
    """
    alone = isinstance(source, (str, Path))
    if not alone:
        check_paths(source)
    paths = [Path(p).expanduser() for p in ([source] if alone else source)]
    if alone and paths[0].is_dir():
        part = find_part(paths[0], subset, split)
        table, origin = read_files(part.files, limit)
        name = paths[0].resolve().name
        return Rows(f"{name}_{part.split}" if part.split else name, table, origin, part.choices)
    if isinstance(source, str) and is_hub_id(source):
        found = read_hub(source, subset, split)
        table = found.table if limit is None else found.table.slice(0, limit)
        if not len(table):
            raise UserError(f"{found.name}: there are no rows")
        name = f"{source.partition('/')[2]}_{found.split}"
        return Rows(name, table.replace_schema_metadata(None), Origin(((found.name, 0),)), found.choices)
    for setting, value in (("subset", subset), ("split", split)):
        if value is not None:
            raise UserError(
                f"{setting}={value!r} is for folders and Hugging Face ids, and {str(source)!r} is files"
            )
    table, origin = read_files(paths, limit)
    names = list(dict.fromkeys(Path(path.name).stem.split(".")[0] for path in paths))
    return Rows("+".join(names) if len(names) <= 3 else f"{names[0]}+{len(names) - 1}", table, origin)
