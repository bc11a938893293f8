"""Training checkpoints: what a group of training workers needs to go on as if it had never stopped.

    rank_0.json …                steps, notes and random states: what each rank alone knows
    state/rank_0.safetensors …   what each rank holds: its part of the float32 parameters and of AdamW's moments and steps
    model/                       a Hugging Face folder of the same weights, in the dtype that is computed in

A rank copies its part into host memory while training waits; files are written by a thread, which for nearly all of its time
holds neither the interpreter nor the device. The model's folder is put together from the files of all ranks, so no tensor is
gathered. The parts say where they lie in the whole, as `torch.distributed.checkpoint` does in safetensors files (its
`HuggingFaceStorageReader` reads the folder `state`), so any other number of ranks can read them.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...dataflow.buffer.disk import Disk
from ...dataflow.errors import UserError
from ..model_folder import CONFIG_FILE
from ..worker import Context

MODEL, STATE = "model", "state"
_FORMAT = 1
_WRITE_TIMEOUT = timedelta(hours=6)
"""How long the ranks wait for the slowest of them to write; one that dies is noticed at once."""
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
_SHARDING = "DCP_SHARDING_INFO"


class SnapshotWriter:
    """Copies the state of this rank, and writes it in the background. Made on all ranks at once.

    Args:
        write_model: writes the folder of the model, given all its tensors as they are stored; called on rank 0.
    """

    def __init__(
        self, context: Context, device: torch.device, write_model: Callable[[StoredState, Path], None], disk: Disk
    ) -> None:
        self._context, self._device, self._write_model, self._disk = context, device, write_model, disk
        self._group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT) if context.world_size > 1 else None
        self._copies: dict[str, Tensor] = {}
        self._sharding: dict[str, dict[str, list[int]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def snapshot(self, folder: Path, state: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
        """Copy the state, and leave the rest to the thread; waits until nothing is being written.

        Args:
            folder: a new one, and the same one for all ranks: on a file system that they share.
            state: the same names in the same order as the last time.
            known: values of JSON that this rank alone knows.
        """
        if self._writing is not None:  # what it failed with is not raised here: other ranks may know already, and go on
            wait([self._writing])
        if not self._sharding:
            self._lay_out(state)
        for name, copy in self._copies.items():
            copy.copy_(local_part(state[name]), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        known = {"format": _FORMAT, "ranks": self._context.world_size, **known, "random": _random_states(self._device)}
        self._writing = self._thread.submit(self._write, folder, known)

    def written(self, *, wait: bool) -> bool:
        """Whether nothing is being written (any more); raises but once.

        Raises:
            OSError: a file could not be written, here or on another rank; it is named, and of a full disk is said how many
                bytes are needed.
            RuntimeError: another rank failed otherwise.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return self._writing is None
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def close(self) -> None:
        """Wait for what is being written; raises what it failed with."""
        try:
            self.written(wait=True)
        finally:
            self._thread.shutdown()
            if self._copies and self._device.type == "cuda":
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostUnregister(next(iter(self._copies.values())).untyped_storage().data_ptr())
            self._copies = {}

    def _lay_out(self, state: Mapping[str, Tensor]) -> None:
        """Allocate the copies, all in one piece. Pages of memory are made at the first copy, which is slower for it."""
        self._sharding = {
            name: {"saved_offsets": _offset(tensor)}
            for name, tensor in state.items()
            if _writes(tensor, self._context.rank)
        }
        parts = {name: local_part(state[name]) for name in self._sharding}
        starts = np.cumsum([0] + [-(-part.nbytes // 16) * 16 for part in parts.values()]).tolist()
        memory = mmap.mmap(-1, max(1, starts[-1]))
        with suppress(AttributeError, OSError):  # not everywhere; several times faster to make where it is
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.type == "cuda":  # torch's own pinned memory is rounded up to a power of two
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)))
        for start, (name, part) in zip(starts, parts.items(), strict=False):
            self._copies[name] = whole[start : start + part.nbytes].view(part.dtype).view(part.shape)

    def _write(self, folder: Path, known: Mapping[str, Any]) -> None:
        self._together(folder, lambda: self._write_own(folder, known))
        self._together(folder, lambda: self._write_all(folder))

    def _write_own(self, folder: Path, known: Mapping[str, Any]) -> None:
        rank = self._context.rank
        if (folder / _rank_file(rank)).exists():
            raise FileExistsError(errno.EEXIST, "a checkpoint goes to a new folder, and this one has one", str(folder))
        (folder / STATE).mkdir(parents=True, exist_ok=True)
        metadata = {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(self._sharding)}
        write_tensors(folder / STATE / f"rank_{rank}.safetensors", self._copies, metadata, self._disk)
        write_file(folder / _rank_file(rank), [json.dumps(known).encode()], self._disk)
        self._disk.sync_folder(folder / STATE)
        self._disk.sync_folder(folder)

    def _write_all(self, folder: Path) -> None:
        if self._context.rank == 0:
            self._write_model(StoredState(folder), folder / MODEL)
            self._disk.sync_folder(folder / MODEL)
            self._disk.sync_folder(folder)

    def _together(self, folder: Path, work: Callable[[], None]) -> None:
        """Do the work; return when all ranks have done theirs, and raise when any of them could not."""
        error, failed = None, torch.zeros(self._context.world_size)
        try:
            work()
        except Exception as problem:
            error = problem
            failed[self._context.rank] = getattr(problem, "errno", None) or -1
        if self._group is not None:
            try:
                dist.all_reduce(failed, group=self._group)
            except RuntimeError as lost:  # a rank is there no more
                raise error or lost from None
        if error is not None:
            raise error
        for rank, number in enumerate(failed.int().tolist()):
            if number > 0:
                raise OSError(number, f"rank {rank} could not write its part: {os.strerror(number)}", str(folder))
            if number:
                raise RuntimeError(f"rank {rank} could not write its part of {folder}")


class StoredState:
    """The tensors of a checkpoint, mapped into memory. Any part of each can be read, however it was cut when it was written.

    Raises:
        UserError: the folder is no checkpoint, or one of a later version of this format.
        ValueError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_ranks = int(self.known(0)["ranks"])
        self._parts: dict[str, list[tuple[Sequence[int], Tensor]]] = {}
        for rank in range(self.num_ranks):
            for name, offset, part in _map_tensors(folder / STATE / f"rank_{rank}.safetensors"):
                self._parts.setdefault(name, []).append((offset, part))
        self.shapes = {
            name: tuple(max(o + s for o, s in zip(*along, strict=True)) for along in _by_dimension(parts))
            for name, parts in self._parts.items()
        }
        """Of the whole tensors."""

    def known(self, rank: int) -> dict[str, Any]:
        """What a rank noted beside its tensors."""
        try:
            known = json.loads((self.folder / _rank_file(rank)).read_text())
        except FileNotFoundError:
            raise UserError(f"{self.folder} is no checkpoint of training: it has no {_rank_file(rank)}") from None
        if known["format"] != _FORMAT:
            raise UserError(f"{self.folder} is a checkpoint of format {known['format']}; this version reads {_FORMAT}")
        return known

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """See that it holds just these tensors.

        Raises:
            UserError: naming the tensor.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        for name in sorted(shapes.keys() | self.shapes.keys()):
            mine, stored = shapes.get(name), self.shapes.get(name)
            if mine != stored:
                said = [f"has shape {list(shape)}" if shape is not None else "is missing" for shape in (stored, mine)]
                raise UserError(f"checkpoint {self.folder}: {name!r} {said[0]} there, and {said[1]} in the model")

    def full(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor on the host; in `dtype`, if it has floating point."""
        stored = self._parts[name][0][1].dtype
        tensor = torch.empty(self.shapes[name], dtype=dtype if stored.is_floating_point else stored)
        self.read(name, tensor)
        return tensor

    def read(self, name: str, into: Tensor) -> None:
        """Fill a tensor, or this rank's part of one, converting to its dtype."""
        target, offset = local_part(into), _offset(into)
        num_read = 0
        for part_offset, part in self._parts[name]:
            starts = [max(a, b) for a, b in zip(offset, part_offset, strict=True)]
            stops = [
                min(a + n, b + m) for a, n, b, m in zip(offset, target.shape, part_offset, part.shape, strict=True)
            ]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                target[_slices(starts, stops, offset)].copy_(part[_slices(starts, stops, part_offset)])
                num_read += math.prod(stop - start for start, stop in zip(starts, stops, strict=True))
        if num_read != target.numel():
            raise ValueError(f"checkpoint {self.folder} has {num_read} of the {target.numel()} elements of {name!r}")


def write_model(
    folder: Path, causal_lm: Any, tensors: dict[str, Tensor], source: Path, changed: Mapping[str, Any], disk: Disk
) -> None:
    """Write a folder that `from_pretrained` loads.

    Args:
        tensors: on the host, full, by their names in the model; tied ones once.
        source: folder of the model that was loaded: its settings, tokenizer and chat template are copied.
        changed: settings that are others than the source's, the `dtype` of the tensors among them.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(folder, source, disk)
    settings = json.loads((source / CONFIG_FILE).read_text())
    settings.pop("torch_dtype", None)  # what older versions called it
    _write_json(folder / CONFIG_FILE, {**settings, **changed}, disk)
    # Not `save_pretrained`: safetensors holds the interpreter while it writes, and training would stand still.
    tensors = {n: t for n, t in tensors.items() if n not in (causal_lm._keys_to_ignore_on_save or ())}
    tensors = revert_weight_conversion(causal_lm, tensors)
    split = split_torch_state_dict_into_shards(tensors)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name] for name in names}, {"format": "pt"}, disk)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index, disk)


def copy_companions(folder: Path, source: Path, disk: Disk) -> None:
    """Copy what stands beside a model's weights and settings: tokenizer, chat template, generation settings."""
    for file in source.iterdir():
        is_weights = "safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth")
        if file.is_file() and not is_weights and file.name != CONFIG_FILE:
            write_file(folder / file.name, [file.read_bytes()], disk)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], disk: Disk) -> None:
    """Write host tensors as a safetensors file, as they lie in memory; the interpreter is free meanwhile."""
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


def set_random_states(states: Mapping[str, Any]) -> None:
    """Take over the random states of a rank, as they were stored."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]))


def _random_states(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state(device).numpy().tobytes().hex() if device.type == "cuda" else None,
    }


def _bytes_tensor(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _rank_file(rank: int) -> str:
    return f"rank_{rank}.json"


def _write_json(path: Path, content: Mapping[str, Any], disk: Disk) -> None:
    write_file(path, [json.dumps(content, indent=2).encode() + b"\n"], disk)


def _map_tensors(path: Path) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    """Name, place in the whole, and content of each tensor in a file that `write_tensors` wrote."""
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    start = 8 + int(data[:8].view(torch.int64)) if size >= 8 else size
    try:
        header = json.loads(data[8:start].numpy().tobytes())
        sharding = json.loads(header.pop("__metadata__")[_SHARDING])
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except (ValueError, KeyError):
        raise ValueError(f"{path}: the header is damaged") from None
    if start + max(ends, default=0) != size:
        raise ValueError(f"{path} is {size} bytes, not {start + max(ends, default=0)}")
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        part = data[start + first : start + last].view(_DTYPES[entry["dtype"]])
        yield name, sharding[name]["saved_offsets"], part.view(entry["shape"])


def _by_dimension(parts: Sequence[tuple[Sequence[int], Tensor]]) -> Iterator[tuple[list[int], list[int]]]:
    """For each dimension the offsets and the sizes of all parts."""
    for dimension in range(parts[0][1].ndim):
        yield [offset[dimension] for offset, _ in parts], [part.shape[dimension] for _, part in parts]


def _slices(starts: Sequence[int], stops: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - o, stop - o) for start, stop, o in zip(starts, stops, offset, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _offset(tensor: Tensor) -> list[int]:
    """Where this rank's part begins in the whole tensor."""
    if isinstance(tensor, DTensor):
        return list(tensor.__create_chunk_list__()[0].offsets)
    return [0] * tensor.ndim


def _writes(tensor: Tensor, rank: int) -> bool:
    """Whether a rank writes its part: there is any, and of equal copies it is the first."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    first = 0 in mesh.mesh and all(not placement.is_replicate() or at == 0 for at, placement in place)
    return first and tensor.to_local().numel() > 0
