"""The publishing side of a transfer: a rank of the trainer gives away the parts that it holds, straight from where they lie.

    publish ──> receivers come, each takes all buckets (`transfer.py`) ──> finish

Receivers on the same machine map the memory of the buckets (`bucket_memory.py`), and that in which parameters lie that can be read there
(`shared_memory.py`); those on others are sent what they want of each (`channel.py`). Nothing is left behind when the publisher is killed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..dataflow.errors import WeightSyncError
from .buckets import (
    BUCKET_BYTES,
    SLOTS,
    BucketMemory,
    Cutter,
    DeviceBuckets,
    HostBuckets,
    device_of,
    fingerprint,
)
from .connection import (
    SMALL_BYTES,
    Channel,
    Connection,
    GroupChannel,
    Stream,
    Transport,
    listen,
    this_machine,
)
from .delta import Shadow
from .transfer import Sent, Transfer
from .weights import Part, RankWeights, Weights

SLOT_ALIGNMENT = 4096
"""[bytes] The memory of each bucket begins on a page."""
_AGAIN_S = 0.05
"""Pause before receivers are let in again when one could not be."""


class WeightPublisher:
    """Gives versions of a rank's weights away, one at a time. Together the ranks of a group give each element once.

    Memory beyond the model's own: SLOTS buckets, or none where all parts are read where they lie.

    Args:
        host: address at which receivers on other machines reach this process; empty: there are none.
        bucket_bytes: of one bucket.
        deltas: send receivers on other machines what has changed since the version that they hold. Where there are any, a copy of all parts
            is kept in host memory, in the dtype in which they travel, and each of them keeps one of what it takes.
        transport: how the bytes travel (see `channel.py`); whatever is not "auto" is used on this machine, too.

    Raises:
        WeightSyncError: this machine does not have that address, or not the device that the transport needs.
    """

    def __init__(
        self,
        host: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        deltas: bool = False,
        transport: Transport = "auto",
    ) -> None:
        self._cutter = Cutter(bucket_bytes)
        self._transport: Transport = transport
        self._device = device_of(transport)
        self._shadow = Shadow() if deltas else None
        self.sent = Sent()
        """What the last version sent over the network."""
        self.num_bytes = 0
        """Of the parts of the last version."""
        self._host = host
        self._listener = listen(host)
        self._memory: BucketMemory = (
            HostBuckets()
            if self._device is None
            else DeviceBuckets(self._device, mapped=transport == "ipc")
        )
        self._is_closed = False
        self._token = secrets.token_hex(32)
        self._version = -1
        """Published last."""
        self._transfer: Transfer | None = None
        self._lost: dict[str, str] = {}
        self._description = b""
        self._filling: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # One thread for all versions: torch makes a pool of threads for each thread that copies.
        threading.Thread(target=self._fill, name="weft-weights", daemon=True).start()
        threading.Thread(target=self._accept, name="weft-weights", daemon=True).start()

    def publish(self, parts: Iterable[Part], version: int, receivers: Sequence[str] = ()) -> Weights:
        """Offer the parts that this rank gives; returns at once. They must stay what they are until `finish`.

        Args:
            parts: on any device, of any dtype.
            version: policy version of these weights, at least 0. One that is lower than the version before begins anew: records and deltas
                of earlier versions are of no use from here on.
            receivers: names of those who will take them; they begin together. Whoever comes late begins when these are through.

        Returns:
            The record that receivers need; the records of several ranks add up.

        Raises:
            WeightSyncError: a part occurs twice, or this publisher is closed.
        """
        if self._is_closed:
            raise WeightSyncError(f"weights version {version}: this publisher was closed")
        self.finish()
        try:
            entries = self._cutter.cut(parts)
        except WeightSyncError as error:
            raise WeightSyncError(f"weights version {version}: {error}") from None
        self.num_bytes = sum(entry.num_bytes for entry, _ in entries)
        slot_bytes = max(
            (entry.offset + entry.num_bytes for entry, _ in entries if not entry.memory), default=0
        )
        memory = self._memory.of(SLOTS * (-(-slot_bytes // SLOT_ALIGNMENT) or 1) * SLOT_ALIGNMENT)
        if (
            version < self._version
        ):  # later versions will be others than those that receivers hold under the same numbers
            self._token, self._description = secrets.token_hex(32), b""
        self._version = version
        before, self._description = self._description, self._cutter.description
        if self._shadow is not None and before != self._description:
            self._shadow.forget()
        self._transfer = Transfer(version, entries, memory, receivers, self._shadow)
        self.sent = self._transfer.sent
        self._idle.clear()
        self._filling.put(self._transfer)
        port: int = self._listener.getsockname()[1]
        return Weights(version, (RankWeights(self._host, port, this_machine(), self._token),))

    def finish(self) -> str | None:
        """End the transfer that is under way: the weights may change from here on. Whoever has not taken everything is given an error.

        Returns:
            The checksum of what was given (see `checksum.py`): ranks' sums add up. None: nobody took it, or nothing was published.

        Raises:
            WeightSyncError: the parts could not be read, or were changed meanwhile.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return None
        self._lost = transfer.lost
        try:
            return transfer.end()
        finally:
            self._idle.wait()

    @property
    def lost(self) -> dict[str, str]:
        """Receivers of the version published last that did not take everything -> how far they came."""
        return dict(self._lost if self._transfer is None else self._transfer.lost)

    def close(self) -> None:
        """End what is under way, listen no more, and free the memory as soon as no receiver has it mapped."""
        if self._is_closed:
            return
        with contextlib.suppress(WeightSyncError):
            self.finish()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._is_closed = True
        self._listener.close()
        self._filling.put(None)
        self._memory.close()

    def _fill(self) -> None:
        while transfer := self._filling.get():
            transfer.fill()
            self._idle.set()
            del transfer

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_AGAIN_S)  # this one is gone, or too many files are open: others are let in
                continue
            threading.Thread(
                target=self._serve, args=(connected,), name="weft-weights", daemon=True
            ).start()

    def _serve(self, connected: socket.socket) -> None:
        # A receiver that dies, or strays, costs its own connection and nothing else.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection = Connection.accept(connected, self._token)
            try:
                _, content = connection.receive(SMALL_BYTES)
                hello = json.loads(content)
                transfer = self._transfer
                if transfer is None or transfer.version != hello["version"]:
                    now = (
                        "none is published"
                        if transfer is None
                        else f"version {transfer.version} is published"
                    )
                    connection.send(
                        b"F", f"version {hello['version']} is not there any more: {now}".encode()
                    )
                    return
                transfer.serve(
                    connection, hello, lambda: self._introduce(connection, hello), self._open_channel
                )
            finally:
                connection.close()

    def _introduce(self, connection: Connection, hello: dict[str, Any]) -> bytes:
        """Tell a receiver what comes and where it lies; returns what it wants."""
        description = self._description
        known = fingerprint(description) == hello["known"]
        place = {"known": known, "deltas": self._shadow is not None, "transport": self._transport}
        said = {**place, "memory": self._memory.said()}
        connection.send(b"D", json.dumps(said).encode())
        if not known:
            connection.send(b"L", description)
        _, wants = connection.receive()
        return wants

    def _open_channel(self, connection: Connection) -> Channel:
        """What a receiver that maps nothing is sent its bytes over."""
        if self._transport not in ("gloo", "nccl"):
            return Stream(connection)
        return GroupChannel(connection, rank=0, device=self._device or torch.device("cpu"))
