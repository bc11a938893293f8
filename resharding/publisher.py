"""WeightPublisher: the sending side of a transfer, on each trainer rank.

    publish ──> receivers connect, and each takes all buckets ──> finish

`transfer.py` sends one version; a publisher keeps what lasts from version to version: the listener,
the filler's thread, bucket memory, and the base of deltas.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..dataflow.errors import WeightSyncError
from .bucket_group import TrainerSide, Transport
from .buckets import BUCKET_BYTES, SLOTS, Cutter, fingerprint
from .connection import SMALL_BYTES, Connection, Listener
from .deltas import Shadow
from .mapped_memory import device_mapping, device_of
from .transfer import Sent, Transfer
from .weights import TensorPart, Weights

MOST_TOGETHER_BYTES = 128 << 20
"""[bytes] Largest bucket that the trainer's ranks complete together; each has SLOTS of them."""
SLOT_ALIGNMENT = 4096
"""[bytes] The memory of each bucket begins on a page."""


class WeightPublisher:
    """Publishes a rank's weights, one version at a time. A group's ranks together publish each
    element once.

    Extra memory: SLOTS buckets, or none if all receivers read all parts in place. If the ranks
    complete buckets together, each bucket has a chunk of `bucket_bytes` for each rank.

    Args:
        host: address of this process for receivers on other machines; empty if there are none.
        deltas: send receivers on other machines only the elements that changed since their version.
            The publisher then keeps a copy of all parts in host memory, in the dtype of the
            transfer. Each receiver keeps a copy of its elements.
        transport: how elements reach the receivers (see `bucket_group.py`). All values except
            "auto" also apply to receivers on this machine.
        rank: number of this rank among the `ranks` of the trainer, which publish together.

    Raises:
        WeightSyncError: this machine lacks that address, or the device that the transport needs.
    """

    def __init__(
        self,
        host: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        deltas: bool = False,
        transport: Transport = "auto",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if transport != "auto":
            bucket_bytes = min(bucket_bytes, MOST_TOGETHER_BYTES // ranks)
        self._cutter = Cutter(bucket_bytes, in_place=transport == "auto")
        self._transport: Transport = transport
        self._device = device_of(transport)
        self._chunk_bytes = -(-bucket_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._rank = rank
        self._side: TrainerSide | None = None
        if transport != "auto":
            device = self._device or torch.device("cpu")
            with_receivers = transport != "ipc"
            self._side = TrainerSide(rank, ranks, host, device, with_receivers=with_receivers)
        self._listener = Listener(host, self._serve)
        self._shadow = Shadow() if deltas else None
        self.sent = Sent()
        self.num_bytes = 0
        self._memory = _BucketMemory(self._device, mapped=transport == "ipc")
        self._is_closed = False
        self._version = -1
        self._transfer: Transfer | None = None
        self._lost: dict[str, str] = {}
        self._description = b""
        self._filling: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # One thread for all versions, because torch creates a thread pool for each copying thread.
        threading.Thread(target=self._fill, name="weft-weights", daemon=True).start()

    def publish(
        self, parts: Iterable[TensorPart], version: int, receivers: Sequence[str] = ()
    ) -> Weights:
        """Offer this rank's parts (on any device, of any dtype), and return the record for
        receivers, which the driver adds up over the ranks. Do not change the parts before `finish`.
        The named `receivers` start together; late ones follow. Versions start at 0. A version below
        the previous one invalidates earlier records and deltas. Raises WeightSyncError if a part
        occurs twice or this publisher is closed."""
        if self._is_closed:
            raise WeightSyncError(f"weights version {version}: this publisher was closed")
        self.finish()
        try:
            entries = self._cutter.cut(parts)
        except WeightSyncError as error:
            raise WeightSyncError(f"weights version {version}: {error}") from None
        self.num_bytes = sum(entry.num_bytes for entry, _ in entries)
        if self._side is None:
            slot_bytes = max(
                (entry.offset + entry.num_bytes for entry, _ in entries if not entry.memory), default=0
            )
            pages = -(-slot_bytes // SLOT_ALIGNMENT) or 1
            memory = self._memory.with_room(SLOTS * pages * SLOT_ALIGNMENT)
        else:
            memory = self._memory.with_room(SLOTS * self._side.ranks * self._chunk_bytes)
        # The version numbers repeat, so receivers may hold other weights under them.
        if version < self._version:
            self._listener.token, self._description = secrets.token_hex(32), b""
        self._version = version
        before, self._description = self._description, self._cutter.description
        # The shadow stores bits by entry number, which now means another entry.
        if self._shadow is not None and before != self._description:
            self._shadow.forget()
        self._transfer = Transfer(
            version, entries, memory, receivers, self._shadow, self._side, self._rank
        )
        self.sent = self._transfer.sent
        self._idle.clear()
        self._filling.put(self._transfer)
        return Weights(version, (self._listener.endpoint,))

    def finish(self) -> str | None:
        """End the current transfer. Unfinished receivers get an error. Return the checksum of the
        published elements (checksums of ranks add up), or None if no receiver took everything.
        Raises WeightSyncError if the parts could not be read or changed during the transfer."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return None
        self._lost = transfer.lost
        try:
            return transfer.stop()
        finally:
            # The filler may still read the parts, which the caller is about to change.
            self._idle.wait()

    @property
    def lost(self) -> dict[str, str]:
        """Maps each receiver that did not take the complete last version to its progress."""
        return dict(self._lost if self._transfer is None else self._transfer.lost)

    def close(self) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(WeightSyncError):
            self.finish()
        self._is_closed = True
        self._listener.close()
        self._filling.put(None)
        self._memory.close()
        if self._side is not None:
            self._side.leave()

    def _fill(self) -> None:
        while transfer := self._filling.get():
            transfer.fill()
            self._idle.set()
            # Otherwise this thread keeps the memory alive until the next version.
            del transfer

    def _serve(self, connection: Connection) -> None:
        try:
            _, content = connection.receive(SMALL_BYTES)
            hello = json.loads(content)
            transfer = self._transfer
            if transfer is None or transfer.version != hello["version"]:
                now = "none" if transfer is None else f"version {transfer.version}"
                why = f"version {hello['version']} is no longer available: {now} is published"
                connection.send(b"F", why.encode())
                return
            transfer.serve(connection, hello, lambda: self._introduce(connection, hello))
        finally:
            connection.close()

    def _introduce(self, connection: Connection, hello: dict[str, Any]) -> bytes:
        """Describe the buckets and their memory to a receiver, and return its requests."""
        description = self._description
        known = fingerprint(description) == hello["known"]
        place = {"known": known, "deltas": self._shadow is not None, "transport": self._transport}
        said = {**place, "memory": self._memory.mapping, "chunk_bytes": self._chunk_bytes}
        connection.send(b"D", json.dumps(said).encode())
        if not known:
            connection.send(b"L", description)
        _, wants = connection.receive()
        return wants


# The publisher's memory: buckets, and the elements that it sent last


class _BucketMemory:
    """Memory that grows to fit the largest version. Without a device, it is an anonymous file on
    the host (`memfd_create`), which processes of this user on this machine map as /proc/PID/fd/N.
    If `mapped`, it is on the device, and receivers map it by its IPC handle."""

    def __init__(self, device: torch.device | None = None, *, mapped: bool = False) -> None:
        self._device = device
        self._mapped = mapped
        self._memory: torch.Tensor | None = None
        self._file = os.memfd_create("weft-weights", os.MFD_CLOEXEC) if device is None else None
        self.mapping: dict[str, Any] = {}

    def with_room(self, num_bytes: int) -> torch.Tensor:
        """Return at least `num_bytes` of memory as [bytes] uint8. Memory in use stays valid."""
        if self._memory is not None and num_bytes <= len(self._memory):
            return self._memory
        if self._device is not None:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.mapping = device_mapping(self._memory) if self._mapped else {}
            return self._memory
        assert self._file is not None
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, num_bytes)
        mapped: Any = mmap.mmap(self._file, num_bytes)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.mapping = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "num_bytes": num_bytes}
        return self._memory

    def close(self) -> None:
        """Free the memory once no process uses it."""
        self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None
