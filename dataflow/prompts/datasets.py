"""Rows of a source, whatever it is: files, a folder, or a data set by its Hugging Face id."""

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
#
# The files of a data set in a folder: which of them are one split, and which subset they belong
# to.


SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits, and the words in the names of files and folders that mean them."""

_OTHER = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What `datasets` keeps beside the rows."""


@dataclass(frozen=True)
class DataPart:
    """The part of a data set that is read: its files, and what was chosen on the way."""

    files: tuple[Path, ...]
    split: str | None = None
    """None: the files have no splits."""
    choices: tuple[str, ...] = ()
    """Defaults that were taken: `split 'train' of train, test`."""


def find_part(folder: Path, subset: str | None, split: str | None) -> DataPart:
    """The files of one split of a folder, sorted by name.

    A split is known by a word in the names of files (`train-00000-of-00002.parquet`) or folders (`test/`); subsets are other folders
    that hold files. Without `split`, a folder with several gives `train`.

    Raises:
        UserError: there are no files to read, or they are not of one kind, or it is not clear which subset or split is meant.
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
            choices.append(f"files that are named after no split are not read: {_names(splits[None])}")
        files = splits[split]
    kinds = sorted({file_kind(file) for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"{folder}: holds files of several kinds ({_names(files)}); give the list of those that are meant, in place of the folder"
        )
    return DataPart(tuple(files), split or next(iter(splits)), tuple(choices))


def choose(
    what: str, known: Sequence[str], wanted: str | None, where: str, usual: Sequence[str]
) -> tuple[str, list[str]]:
    """The subset or split to read: the wanted one, else the only one, else a usual one.

    Returns:
        Its name, and what to tell the user where a default was taken.

    Raises:
        UserError: there is no such one, or several and none of them usual.

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
    raise UserError(f"{where}: has the {what}s {', '.join(known)}; say which: {what}={known[0]!r}")


def _files(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """Files to read in a folder, and in the folders in it that are named after a split or are called `data`.

    Args:
        above: the folders that it lies in, by their real paths; a link that leads back to one of them is not followed.
    """
    above = (*above, folder.resolve())
    found = [p for p in folder.iterdir() if p.is_file() and is_readable(p) and p.name not in _OTHER]
    for inner in (p for p in folder.iterdir() if p.is_dir() and p.resolve() not in above):
        if inner.name == "data" or _split_of(Path(inner.name)):
            found += _files(inner, above)
    if not found:
        raise UserError(f"{str(folder)!r} is a folder that holds no file which can be read as prompts")
    return sorted(found)


def _subsets(folder: Path) -> Mapping[str, list[Path]]:
    """Files by subset: the folders in this one, where it has no files of its own."""
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
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
    """The split that a path within the folder is named after; the file's own name counts most.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("dev/a.jsonl")), _split_of(Path("a.jsonl"))
    ('train', 'validation', None)
    """
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in SPLITS.items():
            if any(name in words for name in names):
                return split
    return None


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:5]) + (", ..." if len(files) > 5 else "")


# Hub
#
# Data sets by their Hugging Face id, through the library `datasets`: from the local cache, else
# from the network.


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
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # no network after all; files that cannot be read
            raise UserError(f"data set {name!r}: {_first_line(error)}") from None

    subset, chosen = choose(
        "subset", ask(datasets.get_dataset_config_names), subset, name, ("default", "main")
    )
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
    files = [
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name not in ("README.md", "LICENSE")
    ]
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
        raise UserError(
            f"{name!r} is no file or folder here, and no data set on the Hugging Face hub"
        ) from None
    except (
        Exception
    ) as error:  # no network, offline mode, a time-out: the client's library decides on the classes
        if (cache / name.replace("/", "___")).is_dir():
            return
        raise UserError(
            f"{name!r} is no file or folder here; as a data set it is not in the local Hugging Face cache, and the hub cannot be "
            f"reached ({_first_line(error)}). Where there is a network, `hf download --repo-type dataset {name}` puts it there"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass(frozen=True)
class Rows:
    """Rows as they were read."""

    name: str
    """A short name of the source."""
    table: pa.Table
    origin: Origin
    choices: tuple[str, ...] = ()
    """Defaults that were taken: a subset, a split."""


def check_paths(source: object) -> None:
    """Refuse anything but a list of paths.

    Raises:
        UserError: rows of a program, say, which `Prompts.from_rows` takes.
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
    """Read a source.

    Args:
        source: a file, files (their rows one after the other), a folder, or a Hugging Face id.
        subset: of a folder or data set.
        split: of a folder or data set.
        limit: read no more than this many rows.

    Raises:
        UserError: with the file or id, the rule, the value and the nearest right name.
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
