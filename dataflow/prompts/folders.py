"""The files of a data set in a folder: which of them are one split, and which subset they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, nearest
from .files import is_readable
from .origin import file_kind

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
            raise UserError(f"{folder}: no file is named after a split (split={split!r}); it has {_names(files)}")
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
