"""Safetensors files: tensors written from host memory as they lie there, and mapped back without a copy.

Weft writes these files itself because the `safetensors` package holds the interpreter while it writes, and training would stand still.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...dataflow.buffer.disk import Disk

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
SHARDING = "DCP_SHARDING_INFO"
"""Key of a file's metadata: where each tensor lies in the full one, as `torch.distributed.checkpoint` writes it."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], disk: Disk) -> None:
    """Write tensors on the host as a new safetensors file, and sync it. The interpreter is free meanwhile.

    Raises:
        OSError: see `write_file`.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # each at a multiple of its size
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    contents = (t.contiguous().reshape(-1).view(torch.uint8).numpy().data for _, t in ordered if t.numel())
    write_file(path, [len(text).to_bytes(8, "little") + text, *contents], disk)


def write_file(path: Path, contents: Iterable[bytes | memoryview], disk: Disk) -> None:
    """Write a new file, and sync it.

    Raises:
        OSError: naming the file; when the disk is full, how many bytes are needed and how many are free.
    """
    contents = list(contents)
    descriptor = disk.open(path)
    try:
        for content in contents:
            disk.write(descriptor, cast(bytes, content))  # it takes any buffer
        disk.sync(descriptor)
    except OSError as error:
        problem = error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            path.unlink()
            needed, free = sum(len(content) for content in contents), shutil.disk_usage(path.parent).free
            problem = f"the disk is full: {needed:,} bytes are needed, {free:,} are free"
        raise OSError(error.errno, problem, str(path)) from None
    finally:
        disk.close(descriptor)


def map_tensors(path: Path) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    """Name, offset in the full tensor, and content of each tensor in a file that `write_tensors` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    start = 8 + int(data[:8].view(torch.int64)) if size >= 8 else size
    try:
        header = json.loads(data[8:start].numpy().tobytes())
        sharding = json.loads(header.pop("__metadata__")[SHARDING])
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except (ValueError, KeyError):
        raise ValueError(f"{path}: the header is damaged") from None
    if start + max(ends, default=0) != size:
        raise ValueError(f"{path} is {size} bytes, not {start + max(ends, default=0)}")
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        part = data[start + first : start + last].view(_DTYPES[entry["dtype"]])
        yield name, sharding[name]["saved_offsets"], part.view(entry["shape"])
