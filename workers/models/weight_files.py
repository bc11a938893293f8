"""Weight files: read safetensors headers without torch, to report bad files early."""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...dataflow.errors import UserError
from ...dataflow.safe_files import open_file, parse_object
from .model_folder import find_model_config, read_index

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGERS: Mapping[str, int] = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
DTYPES: Mapping[str, int] = {**FLOATS, **INTEGERS}
"""Maps supported dtypes of these files to bytes per element."""
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor's entry in a header."""

    file: Path
    dtype: str
    """Dtype in the safetensors format."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file; `end` is one past the last."""
    end: int


Header = tuple[dict[str, _TensorEntry], dict[str, str]]
"""A mapping from tensor names to entries, and the file's metadata."""


def read_header(file: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the file is damaged or not a safetensors file. The message names it.
    """
    size = file.stat().st_size
    with open_file(file) as opened:
        first = opened.read(8)
        start = 8 + int.from_bytes(first, "little")
        if len(first) < 8 or start > size:
            # A clone without Git LFS has a small text file in place of the weights.
            if (first + opened.read(len(_POINTER))).startswith(_POINTER):
                raise ValueError(
                    f"{file} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
                )
            raise ValueError(
                f"{file} is damaged or not a safetensors file: its {size} bytes end before "
                "its header does"
            )
        text = opened.read(start - 8)
    try:
        header = parse_object(text, file)
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(file, start, about) for name, about in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(
            f"{file} is damaged or not a safetensors file: the header cannot be read"
        ) from None
    end = max((entry.end for entry in entries.values()), default=start)
    # The header may be complete even if the download was interrupted.
    if end != size:
        raise ValueError(f"{file} is {size} bytes, not {end} as its header says; fetch or copy it again")
    for name, entry in entries.items():
        taken = math.prod(entry.shape) * DTYPES.get(entry.dtype, 0)
        if taken != entry.end - entry.start and entry.dtype in DTYPES:
            raise ValueError(
                f"{file} is damaged: {name!r} of shape {list(entry.shape)} and dtype {entry.dtype} "
                f"needs {taken} bytes, but the header gives it {entry.end - entry.start}"
            )
    return entries, metadata


def _entry(file: Path, start: int, about: Any) -> _TensorEntry:
    first, last = about["data_offsets"]
    shape = tuple(int(extent) for extent in about["shape"])
    if not 0 <= first <= last or min(shape, default=0) < 0:
        raise ValueError
    return _TensorEntry(file, str(about["dtype"]), shape, start + first, start + last)


def weight_files(model: str | Path, folder: Path) -> list[Path]:
    """Return a model's safetensors files; empty without any. `model` names the model in messages.
    Raises a UserError if the index is damaged or names a missing file."""
    if (folder / FILE).is_file():
        return [folder / FILE]
    if not (folder / INDEX).is_file():
        return []
    index = read_index(folder / INDEX)
    files = [folder / name for name in sorted(set(index.values()))]
    lacking = [file.name for file in files if not file.is_file()]
    if lacking:
        more = f" ({len(lacking)} of {len(files)} files are missing)" if len(lacking) > 1 else ""
        raise UserError(f"model {str(model)!r}: {INDEX} names {lacking[0]}, which is missing{more}")
    return files


@contextmanager
def damage_named(model: str | Path) -> Iterator[None]:
    """Turn errors in reading a model's files into a UserError that names the model."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"model {str(model)!r}: {error.filename} cannot be read ({error.strerror})"
        ) from None
    except ValueError as error:
        raise UserError(f"model {str(model)!r}: {error}") from None


def stored_tensors(model: str | Path, folder: Path) -> dict[str, _TensorEntry]:
    """Map tensor names to entries in a model's safetensors files; empty without files. Raises a
    UserError if a file is damaged, missing, or lacks a tensor of the index."""
    files = weight_files(model, folder)
    found: dict[str, _TensorEntry] = {}
    with damage_named(model):
        for file in files:
            found |= read_header(file)[0]
    if not (folder / FILE).is_file() and (folder / INDEX).is_file():
        for name, file in read_index(folder / INDEX).items():
            if name not in found or found[name].file.name != file:
                raise UserError(
                    f"model {str(model)!r}: {INDEX} says that {file} holds {name!r}, but it does not"
                )
    return found


def check_weights(model: str | Path, *, trained: bool) -> None:
    """Check the headers of a model's files, if the model is a folder. If `trained`, weights must be
    floating-point. Raises a UserError that names the file."""
    if not Path(model).expanduser().is_dir():
        return
    folder = find_model_config(model).parent
    stored = stored_tensors(model, folder)
    for file in () if stored else sorted(folder.glob("pytorch_model*.bin")):
        if reason := _not_only_tensors(file):
            raise UserError(
                f"model {str(model)!r}: {file} {reason}; Weft never runs code from files. "
                "Fetch the model as safetensors, or, if you trust the file, load it where "
                "it was made and write it with save_pretrained()"
            )
    for name, entry in stored.items():
        # Only weights need a gradient; buffers may be integers.
        if trained and entry.dtype not in (FLOATS if name.endswith(".weight") else DTYPES):
            raise UserError(
                f"model {str(model)!r} cannot be trained: {name!r} in {entry.file.name} has "
                f"the dtype {entry.dtype}; weights must have one of {', '.join(FLOATS)}"
            )


def _not_only_tensors(file: Path) -> str:
    """Return why a file of `torch.save` contains more than tensors, or "". Reads only the names in
    its pickle, and runs no code."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                name = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
                if name is None:
                    raise ValueError("it holds no data.pkl")
                with archive.open(name) as opened:
                    found = _foreign_names(opened)
        else:  # files from before torch 1.6 are consecutive pickles
            with file.open("rb") as opened:
                found = _foreign_names(opened)
                with suppress(ValueError):
                    # Then follow protocol, system information, tensors and storage keys.
                    for _ in range(4):
                        found += _foreign_names(opened)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return f"is damaged or not a file of torch.save ({error})"
    names = ", ".join(sorted(set(found))[:3])
    return f"holds more than tensors: a pickle that calls {names}" if names else ""


def _foreign_names(pickled: IO[bytes]) -> list[str]:
    """Return the functions and classes in a pickle, except those that rebuild tensors."""
    texts: list[str] = []
    named: list[str] = []
    for code, argument, _ in pickletools.genops(pickled):
        if code.name == "GLOBAL":
            named.append(str(argument).replace(" ", ".", 1))
        elif code.name == "STACK_GLOBAL":
            named.append(".".join(texts[-2:]))
        elif isinstance(argument, str):
            texts.append(argument)
    of_tensors = ("torch.", "collections.OrderedDict", "numpy.", "_codecs.")
    return [name for name in named if not name.startswith(of_tensors)]


def find_tensor(model: str | Path, name: str) -> Path | None:
    """Return the safetensors file of a model that has this tensor, or None."""
    folder = find_model_config(model).parent
    if (folder / FILE).is_file() or not (folder / INDEX).is_file():
        entry = stored_tensors(model, folder).get(name)
        return entry.file if entry else None
    file = read_index(folder / INDEX).get(name)  # the files may not be downloaded yet
    return folder / file if file else None
