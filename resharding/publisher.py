"""WeightPublisher: the sending side of a transfer, on each trainer rank.

    publish ──> receivers connect, and each takes all buckets (`transfer.py`) ──> finish

Receivers on the same machine map the bucket memory (`buckets.py`) and the shared memory that holds
parameters (`memory.py`). Receivers on other machines get the boxes that they request
(`connection.py`). A killed publisher leaves nothing behind.
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
"""[s] Pause after a connection could not be accepted."""


class WeightPublisher:
    """Publishes a rank's weights, one version at a time. A group publishes each element once.

    Extra memory: SLOTS buckets, or none if receivers read all parts in place.

    Args:
        host: address of this process for receivers on other machines; empty if there are none.
        bucket_bytes: size of a bucket.
        deltas: send receivers on other machines only the elements that changed since the version
            that they hold. The publisher keeps a copy of all parts in host memory, in the dtype of
            the transfer, once such a receiver has connected. Each receiver keeps a copy of its
            elements.
        transport: route of the bytes (see `connection.py`). Any value except "auto" also applies on
            this machine.

    Raises:
        WeightSyncError: this machine does not have that address, or the transport needs a device
            that is missing.
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
        """Network traffic of the last version."""
        self.num_bytes = 0
        """Size of the parts of the last version."""
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
        self._transfer: Transfer | None = None
        self._lost: dict[str, str] = {}
        self._description = b""
        self._filling: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # One thread serves all versions: torch creates a thread pool for each thread that copies.
        threading.Thread(target=self._fill, name="weft-weights", daemon=True).start()
        threading.Thread(target=self._accept, name="weft-weights", daemon=True).start()

    def publish(self, parts: Iterable[Part], version: int, receivers: Sequence[str] = ()) -> Weights:
        """Offer this rank's parts and return at once. Do not change the parts before `finish`.

        Args:
            parts: parts on any device, of any dtype.
            version: policy version of these weights, at least 0. A version below the previous one
                starts over: earlier records and deltas become invalid.
            receivers: names of the expected receivers, which begin together. Late receivers begin
                after these.

        Returns:
            The record that receivers need. Records of several ranks add up.

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
        # Receivers may hold other weights under the version numbers that follow.
        if version < self._version:
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
        """End the current transfer. Receivers that are not done get an error.

        Returns:
            The checksum of the published elements (see `weights.py`); checksums of ranks add up.
            None if no receiver took everything, or no version was published.

        Raises:
            WeightSyncError: the parts could not be read, or changed during the transfer.
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
        """Receivers that did not take all of the last published version -> their progress."""
        return dict(self._lost if self._transfer is None else self._transfer.lost)

    def close(self) -> None:
        """End the current transfer, stop listening, and free the memory."""
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
                time.sleep(_AGAIN_S)  # the client hung up, or too many files are open
                continue
            threading.Thread(
                target=self._serve, args=(connected,), name="weft-weights", daemon=True
            ).start()

    def _serve(self, connected: socket.socket) -> None:
        # A receiver that dies or misbehaves loses its connection, without effect on others.
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
                        b"F", f"version {hello['version']} is no longer available: {now}".encode()
                    )
                    return
                transfer.serve(
                    connection, hello, lambda: self._introduce(connection, hello), self._open_channel
                )
            finally:
                connection.close()

    def _introduce(self, connection: Connection, hello: dict[str, Any]) -> bytes:
        """Describe the buckets and their memory to a receiver, and return its requests."""
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
        if self._transport not in ("gloo", "nccl"):
            return Stream(connection)
        return GroupChannel(connection, rank=0, device=self._device or torch.device("cpu"))
