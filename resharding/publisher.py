"""The publishing side: each rank of the trainer writes the parts that it holds into memory that receivers of its machine map.

Receivers on other machines take the same parts from the publisher's process (`part_server.py`). The memory is an anonymous file
(`memfd_create`) that others open as `/proc/PID/fd/N`. It has no name in any folder, so nothing is left behind when the publisher is
killed; it is gone with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import secrets
import zlib
from collections.abc import Iterable

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .box import Box
from .checksum import box_sum, tensor_factor
from .description import Entry, described
from .part_server import PartServer, this_machine
from .weights import CHECKSUM_MODULUS, Part, RankWeights, Weights

_ALIGNMENT = 64  # a view as any dtype needs its own size; a cache line is kinder to copies


class WeightPublisher:
    """Writes versions of a rank's weights, each over the one before: receivers must be done before the next `publish`.

    Memory beyond the model's own: the published parts, and one part at a time where it is gathered or converted.

    Args:
        host: address at which receivers on other machines reach this process; empty: there are none.
    """

    def __init__(self, host: str = "") -> None:
        self._file: int | None = os.memfd_create("weft-weights", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._host = host
        self._token = secrets.token_hex(32) if host else ""
        self._server: PartServer | None = None
        self._entries: tuple[Entry, ...] = ()
        self._ends_with: tuple[bytes, bytes] = (b"", b"")
        """Table and description of what is published now."""

    def publish(self, parts: Iterable[Part], version: int) -> Weights:
        """Write the parts that this rank gives, one after another. Together the ranks of a group give each element once.

        Args:
            parts: on any device, of any dtype; may be a generator that gathers each when its turn comes.
            version: policy version of these weights, at least 0.

        Returns:
            The record that receivers need to map and check them; the records of several ranks add up.

        Raises:
            WeightSyncError: a part occurs twice, or this publisher is closed.
        """
        if self._file is None:
            raise WeightSyncError(f"weights version {version}: this publisher was closed")
        if self._server is not None:
            self._server.hang_up()
        entries: dict[tuple[str, Box], Entry] = {}
        sums: list[int] = []
        end, checksum = 0, 0
        for name, shape, box, tensor in parts:
            dtype = str(tensor.dtype).removeprefix("torch.")
            entry = Entry(name, dtype, shape, box, _aligned(end))
            if entries.setdefault((name, box), entry) is not entry:
                raise WeightSyncError(f"weights version {version}: {box} of tensor {name!r} was published twice")
            end = entry.offset + box.numel * tensor.element_size()
            target = entry.view(self._memory_of(end))
            target.copy_(tensor.detach())
            sums.append(box_sum(target, box, shape))
            checksum += sums[-1] * tensor_factor(name, dtype, shape)
            del target, tensor  # a mapping with views on it cannot grow
        header = described(entries.values())
        table = np.array([version, *sums], np.uint64).tobytes()
        start = _aligned(end)
        end = start + len(table) + len(header)
        self._memory_of(end)[start:end] = table + header
        self._entries, self._ends_with = tuple(entries.values()), (table, header)
        rank = RankWeights(
            f"/proc/{os.getpid()}/fd/{self._file}",
            end,
            len(header),
            f"{zlib.crc32(header):08x}",
            this_machine(),
            *self._serve(),
            token=self._token,
        )
        return Weights(version, (rank,), f"{checksum % CHECKSUM_MODULUS:016x}")

    def close(self) -> None:
        """Free the memory as soon as no receiver has it mapped."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _serve(self) -> tuple[str, int]:
        """Host and port for receivers on other machines; nobody listens where there are none."""
        if not self._host:
            return "", 0
        if self._server is None:
            self._server = PartServer(self._host, self._token, lambda: self._ends_with, self._part)
        return self._server.address

    def _part(self, number: int, box: Box) -> torch.Tensor:
        assert self._memory is not None
        entry = self._entries[number]
        return entry.view(self._memory)[box.within(entry.box)]

    def _memory_of(self, num_bytes: int) -> mmap.mmap:
        """The mapped memory, with at least so many bytes. Pages that were never written take no memory."""
        assert self._file is not None
        if self._memory is None:
            os.ftruncate(self._file, max(num_bytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(self._file, 0)
        elif num_bytes > len(self._memory):
            self._memory.resize(max(num_bytes, 2 * len(self._memory)))
        return self._memory


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
