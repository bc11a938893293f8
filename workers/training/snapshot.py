"""Snapshots: a training group's part of a checkpoint, needed to resume training.

    rank_0.json …                steps, notes and random states of each rank
    state/rank_0.safetensors …   each rank's part of float32 parameters, AdamW's moments and steps
    model/                       a Hugging Face folder of the same weights, in the dtype of passes

A rank copies its part into host memory while training waits. A thread then writes the files, with
hardly any use of the interpreter lock or the device. Rank 0 builds the model's folder from the
files of all ranks, so no rank gathers tensors. Each part records its position in the full tensor,
so any number of ranks can read the parts. `torch.distributed.checkpoint` can read the folder
`state` with its `HuggingFaceStorageReader`.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...dataflow.errors import UserError
from ...dataflow.runs.files import Disk
from ...dataflow.safe_files import read_json
from ...resharding.weights import Box
from ..worker import Context
from .device_memory import PinnedBlock
from .safetensors_files import SHARDING, map_tensors, write_file, write_tensors
from .sharding import box_of, local_part, writes

MODEL, STATE = "model", "state"
_FORMAT = 1
_WRITE_TIMEOUT = timedelta(hours=6)
"""Maximum wait for the slowest rank to finish writing. Ranks notice a dead rank at once."""


class SnapshotWriter:
    """Copies the state of this rank, and writes it to disk in the background. All ranks must call
    its methods together. On rank 0, `write_model` builds the model's folder from the tensors that
    all ranks have stored."""

    def __init__(
        self,
        context: Context,
        device: torch.device,
        write_model: Callable[[Snapshot, Path], None],
        disk: Disk,
    ) -> None:
        self._context, self._device, self._write_model, self._disk = context, device, write_model, disk
        self._group = (
            dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT) if context.world_size > 1 else None
        )
        self._block: PinnedBlock | None = None
        self._copies: dict[str, Tensor] = {}
        self._sharding: dict[str, dict[str, list[int]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None

    def snapshot(self, folder: Path, state: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Copy the state, and write it to `folder` in a thread, after the previous snapshot is on
        disk.

        Args:
            folder: a new folder, the same for all ranks, on a shared file system.
            state: tensors by name. Each call must have the same names in the same order.
            notes: JSON values to store with this rank's part.
        """
        # Ignore its error: `written` raises it, and other ranks may know it already and have
        # continued.
        if self._writing is not None:
            wait([self._writing])
        if not self._sharding:
            self._lay_out(state)
        for name, copy in self._copies.items():
            copy.copy_(local_part(state[name]), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        notes = {"format": _FORMAT, "ranks": self._context.world_size, **notes}
        notes["random"] = _random_states(self._device)
        self._writing = self._thread.submit(self._write, folder, notes)

    def written(self, *, wait: bool) -> bool:
        """Return whether nothing is being written. Raises an error once: an OSError if this or
        another rank could not write a file (the message names the file and, if the disk is full,
        the bytes needed), or a RuntimeError if another rank failed in some other way."""
        if self._writing is None or not (wait or self._writing.done()):
            return self._writing is None
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def close(self) -> None:
        """Wait until the last snapshot is on disk. Raises its error if it failed."""
        try:
            self.written(wait=True)
        finally:
            self._thread.shutdown()
            if self._block is not None:
                self._block.close()
            self._block, self._copies = None, {}

    def _lay_out(self, state: Mapping[str, Tensor]) -> None:
        """Allocate all copies in one block."""
        self._sharding = {
            name: {"saved_offsets": list(box_of(tensor).starts)}
            for name, tensor in state.items()
            if writes(tensor, self._context.rank)
        }
        parts = {name: local_part(state[name]) for name in self._sharding}
        self._block = PinnedBlock(parts, self._device)
        self._copies = self._block.copies

    def _write(self, folder: Path, notes: Mapping[str, Any]) -> None:
        self._together(folder, lambda: self._write_own(folder, notes))
        # The model's folder needs the files of all ranks.
        self._together(folder, lambda: self._write_all(folder))

    def _write_own(self, folder: Path, notes: Mapping[str, Any]) -> None:
        rank = self._context.rank
        if (folder / _rank_file(rank)).exists():
            why = "a snapshot needs a new folder, but this one has a snapshot already"
            raise FileExistsError(errno.EEXIST, why, str(folder))
        (folder / STATE).mkdir(parents=True, exist_ok=True)
        metadata = {"format": "pt", "DCP_VERSION": "1.0", SHARDING: json.dumps(self._sharding)}
        write_tensors(folder / STATE / f"rank_{rank}.safetensors", self._copies, metadata, self._disk)
        write_file(folder / _rank_file(rank), [json.dumps(notes).encode()], self._disk)
        self._disk.sync_folder(folder / STATE)
        self._disk.sync_folder(folder)

    def _write_all(self, folder: Path) -> None:
        if self._context.rank == 0:
            self._write_model(Snapshot(folder), folder / MODEL)
            self._disk.sync_folder(folder / MODEL)
            self._disk.sync_folder(folder)

    def _together(self, folder: Path, work: Callable[[], None]) -> None:
        """Run `work` and wait for the other ranks. Raises an error if any rank failed."""
        error, failed = None, torch.zeros(self._context.world_size)
        try:
            work()
        except Exception as problem:
            error = problem
            # -1 means an error without errno.
            failed[self._context.rank] = getattr(problem, "errno", None) or -1
        if self._group is not None:
            try:
                dist.all_reduce(failed, group=self._group)
            except RuntimeError as lost:  # a rank has ended
                raise error or lost from None
        if error is not None:
            raise error
        for rank, number in enumerate(failed.int().tolist()):
            if number > 0:
                raise OSError(
                    number, f"rank {rank} could not write its part: {os.strerror(number)}", str(folder)
                )
            if number:
                raise RuntimeError(f"rank {rank} could not write its part of {folder}")


class Snapshot:
    """The tensors of a snapshot, mapped into memory, readable in parts. Raises UserError if the
    folder is not a snapshot in this format, and ValueError if a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_ranks = int(self.notes_of(0)["ranks"])
        self._parts: dict[str, list[tuple[Box, Tensor]]] = {}
        for rank in range(self.num_ranks):
            for name, box, part in map_tensors(folder / STATE / f"rank_{rank}.safetensors"):
                self._parts.setdefault(name, []).append((box, part))
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, parts in self._parts.items():
            self.shapes[name] = tuple(map(max, zip(*(box.stops for box, _ in parts), strict=True)))

    def notes_of(self, rank: int) -> dict[str, Any]:
        try:
            notes = read_json(self.folder / _rank_file(rank))
        except FileNotFoundError:
            raise UserError(
                f"{self.folder} is not a snapshot of training: it has no {_rank_file(rank)}"
            ) from None
        if notes["format"] != _FORMAT:
            raise UserError(
                f"{self.folder} is a snapshot of format {notes['format']}; this version reads {_FORMAT}"
            )
        return notes

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Check that the snapshot holds exactly these tensors. The error names one that differs."""
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        for name in sorted(shapes.keys() | self.shapes.keys()):
            mine, stored = shapes.get(name), self.shapes.get(name)
            if mine != stored:
                said = ["is missing" if s is None else f"has shape {list(s)}" for s in (stored, mine)]
                raise UserError(
                    f"snapshot {self.folder}: {name!r} {said[0]} there, and {said[1]} in the model"
                )

    def full(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a full tensor on the host, a floating-point one as `dtype`."""
        stored = self._parts[name][0][1].dtype
        tensor = torch.empty(self.shapes[name], dtype=dtype if stored.is_floating_point else stored)
        self.fill(name, tensor)
        return tensor

    def fill(self, name: str, into: Tensor) -> None:
        """Fill a tensor, or this rank's part of it, converting to its dtype."""
        target, box, num_read = local_part(into), box_of(into), 0
        for there, part in self._parts[name]:
            if (common := box.intersection(there)) is not None:
                target[common.within(box)].copy_(part[common.within(there)])
                num_read += common.numel
        if num_read != target.numel():
            raise ValueError(
                f"snapshot {self.folder} has {num_read} of the {target.numel()} elements of {name!r}"
            )


def set_random_states(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]))


def _random_states(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": None if on_device is None else on_device.numpy().tobytes().hex(),
    }


def _bytes_tensor(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _rank_file(rank: int) -> str:
    return f"rank_{rank}.json"
