"""WeightPublisher: the sending side of a transfer, on each trainer rank.

    publish ──> receivers connect, and each takes all buckets ──> finish

    filler (one thread)                               session (one thread per connection)
    waits for receivers                               hello, description, requests  ──> joins the next pass
    pass: for each bucket
      waits until every receiver is done with the     waits until the bucket is filled
      previous bucket in this memory
      copies parts that cannot be mapped in place,    notifies the receiver, or sends it the requested boxes
      sums all parts
                                                      waits until the receiver has taken the bucket
    next pass: receivers that came late               checksum, then the receiver's acknowledgement

Invariants:
- A receiver is never more than SLOTS buckets behind, so memory for SLOTS buckets is enough.
- A late receiver, such as a replaced rank, gets keepalives until its own pass.
- A receiver that is gone or unresponsive delays others by at most its connection's timeout.
- A killed publisher leaves no files or memory behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import queue
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .buckets import (
    BUCKET_BYTES,
    SLOTS,
    Cutter,
    Entry,
    checksum_of,
    copy_elements,
    device_mapping,
    device_of,
    fingerprint,
    read_sums,
    start_sum,
)
from .connection import SMALL_BYTES, Connection, GroupChannel, Listener, Transport, reason
from .deltas import Shadow, bits_of, delta_of, within
from .weights import Box, TensorPart, Weights

GRACE_S = 1.0
"""[s] Longest time that the first receivers of a pass wait for the others."""
NEWS_S = 15.0
"""[s] Interval between keepalives to a receiver that waits for its pass."""
NUMBER = struct.Struct("<q")
FORM = struct.Struct("<qq")
"""Header of each box sent to a receiver: a delta's number of bytes of gaps, and of values."""
WHOLE = (-1, -1)
MOST_TIMES = 16
"""Limit on requests for one element. A receiver sends one for each tensor that contains it."""
SLOT_ALIGNMENT = 4096
"""[bytes] The memory of each bucket begins on a page."""


@dataclass(eq=False)
class _Sent:
    """Traffic to receivers on other machines."""

    num_bytes: int = 0
    whole_bytes: int = 0
    """Size of the same boxes without deltas."""
    compared: int = 0
    """Number of this rank's elements that were compared with the previous version."""
    changed: int = 0


class WeightPublisher:
    """Publishes a rank's weights, one version at a time. A group's ranks together publish each
    element once.

    Extra memory: SLOTS buckets, or none if all receivers read all parts in place.

    Args:
        host: address of this process for receivers on other machines; empty if there are none.
        deltas: send receivers on other machines only the elements that changed since their version.
            The publisher then keeps a copy of all parts in host memory, in the dtype of the
            transfer. Each receiver keeps a copy of its elements.
        transport: how elements reach the receivers (see `connection.py`). All values except "auto"
            also apply to receivers on this machine.

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
    ) -> None:
        self._cutter = Cutter(bucket_bytes)
        self._transport: Transport = transport
        self._device = device_of(transport)
        self._listener = Listener(host, self._serve)
        self._shadow = Shadow() if deltas else None
        self.sent = _Sent()
        self.num_bytes = 0
        self._memory = _BucketMemory(self._device, mapped=transport == "ipc")
        self._is_closed = False
        self._version = -1
        self._transfer: _Transfer | None = None
        self._lost: dict[str, str] = {}
        self._description = b""
        self._filling: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
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
        slot_bytes = max(
            (entry.offset + entry.num_bytes for entry, _ in entries if not entry.memory), default=0
        )
        pages = -(-slot_bytes // SLOT_ALIGNMENT) or 1
        memory = self._memory.with_room(SLOTS * pages * SLOT_ALIGNMENT)
        # The version numbers repeat, so receivers may hold other weights under them.
        if version < self._version:
            self._listener.token, self._description = secrets.token_hex(32), b""
        self._version = version
        before, self._description = self._description, self._cutter.description
        # The shadow stores bits by entry number, which now means another entry.
        if self._shadow is not None and before != self._description:
            self._shadow.forget()
        self._transfer = _Transfer(version, entries, memory, receivers, self._shadow)
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
        said = {**place, "memory": self._memory.mapping}
        connection.send(b"D", json.dumps(said).encode())
        if not known:
            connection.send(b"L", description)
        _, wants = connection.receive()
        return wants

    def _open_channel(self, connection: Connection) -> Connection | GroupChannel:
        if self._transport not in ("gloo", "nccl"):
            return connection
        return GroupChannel(connection, rank=0, device=self._device or torch.device("cpu"))


# Transfer: one version of a rank's parts on its way to its receivers


Want = tuple[int, Box]
"""Index of an entry, and the requested box of it."""


@dataclass(eq=False)
class _Pass:
    filled: int = 0
    through: bool = False
    """Whether all buckets are filled and their sums agree with earlier passes."""
    sums: list[list[int]] = field(default_factory=list)
    base: int | None = None
    """The version that `changed` compares with; None without deltas."""
    changed: dict[int, np.ndarray | None] = field(default_factory=dict)
    """For each entry in memory, the changed positions; None to send the whole entry."""


@dataclass(eq=False)
class _Session:
    receiver: str
    part: int
    """Index of this process among its receiver's processes."""
    parts: int
    connection: Connection
    channel: Connection | GroupChannel
    wants: dict[int, list[Want]] | None = None
    """Requested boxes by bucket; None if the receiver maps the memory."""
    base: int | None = None
    """The version of which the receiver holds everything that it requests, or None."""
    turn: _Pass | None = None
    taken: int = 0
    gone: bool = False

    def has_come(self, far: Callable[[_Pass], bool]) -> bool:
        return self.turn is not None and far(self.turn)

    def __str__(self) -> str:
        return self.receiver + (f" (part {self.part + 1} of {self.parts})" if self.parts > 1 else "")


class _Transfer:
    """One version of a rank's parts, and its receivers. `parts` are entries in bucket order with
    their elements, which must not change before `stop`. `memory` ([bytes] uint8) has room for SLOTS
    buckets, on any device. Receivers in `expected` start together if they connect within GRACE_S of
    each other. Receivers on other machines get deltas if they hold the version of `shadow`."""

    def __init__(
        self,
        version: int,
        parts: Sequence[tuple[Entry, torch.Tensor]],
        memory: torch.Tensor,
        expected: Sequence[str],
        shadow: Shadow | None = None,
    ) -> None:
        self.version = version
        self._shadow = shadow
        self.sent = _Sent()
        self._expected = set(expected)
        self._memory = memory
        self._slot_bytes = len(memory) // SLOTS
        self.entries = [entry for entry, _ in parts]
        self._tensors = [tensor for _, tensor in parts]
        self._num_bytes = sum(entry.num_bytes for entry in self.entries)
        self._buckets: list[list[int]] = [
            [] for _ in range(1 + max((e.bucket for e in self.entries), default=-1))
        ]
        for number, entry in enumerate(self.entries):
            self._buckets[entry.bucket].append(number)
        self._condition = threading.Condition()
        self._sessions: list[_Session] = []
        self._served: set[tuple[str, int]] = set()
        self._filled = 0
        self._ended = False
        self._failure = ""
        self._checksum: int | None = None
        self.lost: dict[str, str] = {}
        """Maps each receiver that did not take everything to its progress."""

    # The filler's thread

    def fill(self) -> None:
        """Run passes until the transfer ends. Receivers and `stop` report its errors."""
        try:
            while members := self._gather():
                self._fill_pass(members)
        except BaseException as error:
            with self._condition:
                self._failure = f"{type(error).__name__}: {error}"
                self._condition.notify_all()
        self._tensors = []

    def _gather(self) -> list[_Session]:
        """Return the receivers of the next pass; none if the transfer has ended."""
        with self._condition:
            self._condition.wait_for(lambda: self._ended or self._waiting())
            complete = self._condition.wait_for(lambda: self._ended or self._complete(), GRACE_S)
            if self._ended:
                return []
            members, turn = self._waiting(), _Pass()
            if not complete:  # late receivers get a separate pass
                self._expected &= self._came()
            for session in members:
                session.turn = turn
            return members

    def _waiting(self) -> list[_Session]:
        return [s for s in self._sessions if s.turn is None and not s.gone]

    def _complete(self) -> bool:
        here = self._waiting()
        came = self._served | {(s.receiver, s.part) for s in here}
        parts = {s.receiver: s.parts for s in here}
        return self._expected <= self._came() and all(
            (r, p) in came for r, count in parts.items() for p in range(count)
        )

    def _came(self) -> set[str]:
        return {name for name, _ in self._served} | {s.receiver for s in self._waiting()}

    def _fill_pass(self, members: Sequence[_Session]) -> None:
        turn = members[0].turn
        assert turn is not None
        shadow = self._shadow if any(s.wants is not None for s in members) else None
        if shadow is not None:
            turn.base = shadow.start_version()
        for number, entries in enumerate(self._buckets):
            copies = shadow is not None or any(not self.entries[entry].memory for entry in entries)
            # Entries that are read in place need no bucket memory, so do not wait for old buckets.
            if not self._await_taken(members, number + 1 - SLOTS if copies else 0):
                return
            for entry in self._buckets[number - SLOTS] if number >= SLOTS else ():
                turn.changed.pop(entry, None)
            slot = number % SLOTS
            sums = read_sums([self._fill(entry, slot) for entry in entries])
            if shadow is not None:
                turn.changed |= {
                    entry: shadow.changed(entry, bits_of(self._elements(entry, slot)))
                    for entry in entries
                }
            with self._condition:
                turn.sums.append(sums)
                turn.filled = number + 1
                self._filled += 1
                self._condition.notify_all()
        with self._condition:
            # Compare with earlier passes before any receiver of this pass gets the checksum.
            self._add_up(turn)
            turn.through = True
            if shadow is not None:
                shadow.version = self.version
                self.sent.compared, self.sent.changed = shadow.compared, shadow.differed
            self._condition.notify_all()
        self._await_taken(members, len(self._buckets))

    def _await_taken(self, members: Sequence[_Session], number: int) -> bool:
        """Wait until all members took the first `number` buckets. Return False if none is left."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._ended or all(s.gone or s.taken >= number for s in members)
            )
            return not self._ended and not all(s.gone for s in members)

    def _fill(self, number: int, slot: int) -> int | torch.Tensor:
        """Copy an entry into its bucket, unless it is read in place. Return its elements' sum, for
        `read_sums`."""
        entry, source, target = self.entries[number], self._tensors[number], self._elements(number, slot)
        if entry.memory:
            return start_sum(source, entry.box, entry.shape)
        if source.device.type == "cpu" or target.device.type != "cpu":
            copy_elements(target, source)
            return start_sum(target, entry.box, entry.shape)
        # Sum on the device before the copy to the host: a device sums a hundred times faster.
        source = source.to(target.dtype)
        found = start_sum(source, entry.box, entry.shape)
        target.copy_(source)
        return found

    def _elements(self, number: int, slot: int) -> torch.Tensor:
        entry = self.entries[number]
        return (
            self._tensors[number] if entry.memory else entry.view(self._memory, slot * self._slot_bytes)
        )

    def _add_up(self, turn: _Pass) -> None:
        total = checksum_of(self.entries, itertools.chain.from_iterable(turn.sums))
        if self._checksum not in (None, total):
            raise WeightSyncError(f"the weights of version {self.version} changed during the transfer")
        self._checksum = total

    # The sessions' threads

    def serve(
        self,
        connection: Connection,
        hello: dict[str, Any],
        answer: Callable[[], bytes],
        open_channel: Callable[[Connection], Connection | GroupChannel] = lambda connection: connection,
    ) -> None:
        """Serve a receiver on its connection's thread. `answer` describes the version to it, and
        returns its requests."""
        name, part, parts = str(hello["receiver"]), int(hello["part"]), int(hello["parts"])
        session = _Session(name, part, parts, connection, connection)
        try:
            connection.expect(self._num_bytes)
            with self._condition:
                self._sessions.append(session)
                session.turn = _Pass()  # keep it out of the next pass until its requests are known
            session.base, session.wants = self._read_wants(answer())
            if session.wants is not None:
                session.channel = open_channel(connection)
            with self._condition:
                session.turn = None
                self._condition.notify_all()
            for number in range(len(self._buckets)):
                self._give(session, number)
            self._await(session, lambda turn: turn.through)
            connection.send(b"E", f"{self._checksum or 0:016x}".encode())
            connection.receive(SMALL_BYTES)
            with self._condition:
                self._served.add((session.receiver, session.part))
        except Exception as error:  # any error ends only this session
            self._lose(session, error)
        finally:
            session.channel.hang_up()

    def _give(self, session: _Session, number: int) -> None:
        turn = self._await(session, lambda turn: turn.filled > number)
        sums = np.array(turn.sums[number], np.uint64).tobytes()
        session.connection.send(b"B", NUMBER.pack(number) + sums)
        if session.wants is None:
            session.connection.receive(SMALL_BYTES)
        else:
            applies = turn.base is not None and turn.base == session.base
            for entry, box in session.wants.get(number, ()):
                changed = turn.changed.get(entry) if applies else None
                self._send(session.channel, entry, box, number % SLOTS, changed)
        with self._condition:
            session.taken = number + 1
            self._condition.notify_all()

    def _await(self, session: _Session, come: Callable[[_Pass], bool]) -> _Pass:
        """Wait until `come` is true of the receiver's pass. Send keepalives meanwhile."""
        seen = self._filled
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stops(session) or session.has_come(come), NEWS_S)
                why = self._stops(session)
                if not why and session.has_come(come):
                    assert session.turn is not None
                    return session.turn
                seen, goes_on = self._filled, self._filled > seen
            if why:
                with contextlib.suppress(OSError):
                    session.connection.send(b"F", why.encode())
                raise ConnectionAbortedError(why)
            # Keepalives without progress would hide a stuck publisher.
            if goes_on:
                session.connection.send(b"P")

    def _send(
        self,
        channel: Connection | GroupChannel,
        number: int,
        box: Box,
        slot: int,
        changed: np.ndarray | None,
    ) -> None:
        """Send a box of an entry. If there is a shadow, a header precedes the elements."""
        entry = self.entries[number]
        elements = self._elements(number, slot)[box.within(entry.box)].contiguous()
        header, contents = FORM.pack(*WHOLE), [elements.reshape(-1).view(torch.uint8)]
        if changed is not None:
            gaps, values = delta_of(bits_of(elements), within(changed, entry.box, box))
            if gaps.nbytes + values.nbytes < elements.nbytes:
                header = FORM.pack(len(gaps), len(values))
                contents = [torch.from_numpy(gaps), torch.from_numpy(values.view(np.uint8))]
        # Count before sending, because a receiver with the last box may end the transfer at once.
        with self._condition:
            self.sent.num_bytes += sum(content.nbytes for content in contents)
            self.sent.whole_bytes += elements.nbytes
        if self._shadow is not None:
            channel.send_elements(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for content in contents:
            if len(content):
                channel.send_elements(content)

    def _read_wants(self, content: bytes) -> tuple[int | None, dict[int, list[Want]] | None]:
        """Parse a receiver's version and requests; both None if it maps the memory. Rejects boxes
        of other ranks, and requests for more than MOST_TIMES this rank's bytes."""
        if not content:
            return None, None
        wants: dict[int, list[Want]] = {}
        base, boxes = json.loads(content)
        num_bytes = 0
        for number, starts, stops in boxes:
            box = Box(tuple(starts), tuple(stops))
            # JSON may contain true, which is an int for `isinstance`.
            if not (type(number) is int and 0 <= number < len(self.entries)):
                raise ValueError(f"it wants entry {number} of {len(self.entries)}")
            entry = self.entries[number]
            if not _lies_in(box, entry.box):
                raise ValueError(f"it wants {box} of {entry.name!r}; this rank sends {entry.box}")
            num_bytes += box.numel * entry.num_bytes // max(entry.box.numel, 1)
            wants.setdefault(entry.bucket, []).append((number, box))
        if num_bytes > MOST_TIMES * self._num_bytes:
            raise ValueError(
                f"it wants {num_bytes} bytes, more than {MOST_TIMES} times the {self._num_bytes} that this rank sends"
            )
        return base, wants

    def _stops(self, session: _Session) -> str:
        """Return the reason to stop serving a receiver; empty to continue."""
        # A failure in a later pass does not affect receivers whose pass is complete.
        if self._failure and not session.has_come(lambda turn: turn.through):
            return self._failure
        return "the publisher has ended the transfer" if self._ended else ""

    def _lose(self, session: _Session, error: Exception) -> None:
        with self._condition:
            session.gone = True
            where = f"after {session.taken} of {len(self._buckets)} buckets"
            self.lost[str(session)] = f"{session} {reason(error)} {where} of version {self.version}"
            self._condition.notify_all()

    # The publisher's thread

    def stop(self) -> str | None:
        """End the transfer. Returns and raises the same as `WeightPublisher.finish`."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()
            sessions = list(self._sessions)
        for session in sessions:
            if (session.receiver, session.part) not in self._served:
                session.channel.hang_up()
        if self._failure:
            raise WeightSyncError(self._failure)
        return None if self._checksum is None else f"{self._checksum:016x}"


def _lies_in(box: Box, outer: Box) -> bool:
    """Return whether a received box, which is untrusted, is inside `outer`."""
    if not len(box.starts) == len(box.stops) == len(outer.starts):
        return False
    ends = zip(outer.starts, box.starts, box.stops, outer.stops, strict=True)
    return all(
        type(start) is type(stop) is int and low <= start <= stop <= high
        for low, start, stop, high in ends
    )


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
