"""Transfer: one version of a rank's parts on its way to its receivers.

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
- One of several receivers on another machine, the carrier, receives whole buckets, stores them in
  shared memory, and reports that. The others map this memory, or get their boxes if it is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .bucket_group import Invitation, Member, TrainerSide
from .buckets import (
    SLOTS,
    Entry,
    checksum_of,
    copy_elements,
    read_sums,
    start_sum,
)
from .connection import SILENCE_S, SLOWEST_BYTES_PER_S, SMALL_BYTES, Connection, reason
from .deltas import Shadow, bits_of, delta_of, within
from .weights import Box

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


@dataclass(eq=False)
class Sent:
    """Traffic to receivers on other machines."""

    num_bytes: int = 0
    whole_bytes: int = 0
    """Size of the same boxes without deltas."""
    compared: int = 0
    """Number of this rank's elements that were compared with the previous version."""
    changed: int = 0


Want = tuple[int, Box]
"""Index of an entry, and the requested box of it."""


@dataclass(eq=False)
class _Pass:
    filled: int = 0
    through: bool = False
    """Whether all buckets are filled and their sums agree with earlier passes."""
    sums: list[list[int]] = field(default_factory=list)
    invitation: Invitation | None = None
    """The members of this pass, if the trainer's ranks complete buckets together."""
    base: int | None = None
    """The version that `changed` compares with; None without deltas."""
    changed: dict[int, np.ndarray | None] = field(default_factory=dict)
    """For each entry in memory, the changed positions; None to send the whole entry."""


@dataclass(eq=False)
class _Session:
    member: Member
    parts: int
    """Number of processes of the receiver."""
    connection: Connection
    groups: set[str] = field(default_factory=set)
    """Names of the groups that this process has."""
    maps: bool = True
    """Whether the receiver maps the memory, and reports when it has taken a bucket."""
    wants: dict[int, list[Want]] = field(default_factory=dict)
    """Requested boxes by bucket, if the receiver does not map the memory."""
    sizes: tuple[int, ...] = ()
    """[bytes] Size of each bucket's chunks, if the ranks complete buckets together."""
    invitation: Invitation | None = None
    """The invitation from rank 0 that the receiver has carried to this rank."""
    base: int | None = None
    """The receiver holds all requested boxes of this version; None if it holds no version
    completely."""
    turn: _Pass | None = None
    taken: int = 0
    gone: bool = False
    again: str = ""
    """Why the receiver is to connect again: another member has broken the group."""
    machine: str = ""
    node: _Node | None = None
    """The receivers on the same machine that share what one of them receives."""

    @property
    def receiver(self) -> str:
        return self.member.receiver

    @property
    def part(self) -> int:
        return self.member.part

    def has_come(self, far: Callable[[_Pass], bool]) -> bool:
        return self.turn is not None and far(self.turn)

    def __str__(self) -> str:
        return self.receiver + (f" (part {self.part + 1} of {self.parts})" if self.parts > 1 else "")


@dataclass(eq=False)
class _Node:
    """Several receivers on one other machine. The carrier receives whole buckets into memory that
    the others map."""

    carrier: _Session
    members: list[_Session]
    memory: dict[str, Any] | None = None
    stored: int = 0
    """Number of buckets that the carrier has stored."""


class Transfer:
    """One version of a rank's parts, and its receivers. `parts` are entries in bucket order with
    their elements, which must not change before `stop`. `memory` ([bytes] uint8) has room for SLOTS
    buckets, on any device. Receivers in `expected` start together if they connect within GRACE_S of
    each other. Receivers on other machines get deltas if they hold the version of `shadow`. With
    `side`, each bucket holds a chunk of each of the trainer's ranks, which complete it together.
    `rank` is this rank's number in the trainer: the ranks choose different carriers."""

    def __init__(
        self,
        version: int,
        parts: Sequence[tuple[Entry, torch.Tensor]],
        memory: torch.Tensor,
        expected: Sequence[str],
        shadow: Shadow | None = None,
        side: TrainerSide | None = None,
        rank: int = 0,
    ) -> None:
        self.version = version
        self._side = side
        self._rank = rank
        self._shadow = shadow
        self.sent = Sent()
        self._expected = set(expected)
        self._memory = memory
        self._slot_bytes = len(memory) // SLOTS
        self._chunk_bytes = self._slot_bytes // (side.ranks if side is not None else 1)
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
        self._turn = _Pass(through=True)
        """The current or last pass."""
        self._filled = 0
        # A receiver that is late for buckets in common costs another group and pass.
        self._patience_s = GRACE_S if side is None else NEWS_S
        self._ended = False
        self._failure = ""
        self._checksum: int | None = None
        self.lost: dict[str, str] = {}
        """Maps each receiver that did not take everything to its progress."""

    # The filler's thread

    def fill(self) -> None:
        """Run passes until the transfer ends. Receivers and `stop` report its errors. If a member
        breaks the group, the others connect again, for another pass."""
        try:
            while members := self._gather():
                try:
                    self._fill_pass(members)
                except OSError as error:
                    if self._side is None:
                        raise
                    self._break_off(members, str(error))
        except BaseException as error:
            with self._condition:
                self._failure = f"{type(error).__name__}: {error}"
                self._condition.notify_all()
            if self._side is not None:
                self._side.leave()
        self._tensors = []

    def _gather(self) -> list[_Session]:
        """Return the receivers of the next pass; none if the transfer has ended."""
        with self._condition:
            self._condition.wait_for(lambda: self._ended or self._waiting())
            if self._side is not None and self._side.rank:
                self._condition.wait_for(lambda: self._ended or self._invited())
                members = self._invited()
                complete = True
            else:
                complete = self._condition.wait_for(
                    lambda: self._ended or self._complete(), self._patience_s
                )
                members = self._waiting()
            if self._ended:
                return []
            turn = _Pass()
            if not complete:  # late receivers get a separate pass
                self._expected &= self._came()
            if self._side is not None and members:
                turn.invitation = members[0].invitation or self._side.invite(
                    [s.member for s in members], [s.groups for s in members]
                )
            self._share_on_nodes(members)
            for session in members:
                session.turn = turn
            self._condition.notify_all()
            return members

    def _break_off(self, members: Sequence[_Session], why: str) -> None:
        assert self._side is not None
        self._side.leave()
        with self._condition:
            self._patience_s = GRACE_S  # one of them is dead, and the others know that they are to come
            self._expected |= {s.receiver for s in members}
            for session in members:
                session.again = why
            self._condition.notify_all()

    def _share_on_nodes(self, members: Sequence[_Session]) -> None:
        """Choose a carrier on each other machine that has several receivers."""
        # Each receiver has its own base of deltas.
        streams = [s for s in members if not s.maps and self._side is None and self._shadow is None]
        for machine in {s.machine for s in streams}:
            own = sorted((s for s in streams if s.machine == machine), key=lambda s: s.member)
            # The processes of one receiver want different parts.
            if len({s.receiver for s in own}) > 1:
                node = _Node(own[self._rank % len(own)], own)
                for session in own:
                    session.node = node

    def _invited(self) -> list[_Session]:
        """Return the receivers of an invitation once all of them have come to this rank."""
        waiting = self._waiting()
        latest = {s.member: s for s in self._sessions}
        lost = {member for member, session in latest.items() if session.gone}
        for invitation in {s.invitation for s in waiting}:
            assert invitation is not None
            members = [s for s in waiting if s.invitation == invitation]
            if {s.member for s in members} | lost >= set(invitation.receivers):
                return members
        return []

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
        self._turn = turn
        if self._side is not None:
            assert turn.invitation is not None
            self._side.join(turn.invitation, SILENCE_S + self._num_bytes / SLOWEST_BYTES_PER_S)
        shadow = self._shadow if not all(s.maps for s in members) else None
        if shadow is not None:
            turn.base = shadow.start_version()
        for number, entries in enumerate(self._buckets):
            copies = shadow is not None or any(not self.entries[entry].memory for entry in entries)
            copies |= self._side is not None  # of the other ranks' chunks
            # Entries that are read in place need no bucket memory, so do not wait for old buckets.
            if not self._await_taken(members, number + 1 - SLOTS if copies else 0):
                if self._side is not None:
                    self._side.leave()
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
            if self._side is not None:
                self._side.complete(self._chunks(slot, members[0].sizes[number]))
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
        if entry.memory:
            return self._tensors[number]
        own = self._side.rank if self._side is not None else 0
        return entry.view(self._memory, slot * self._slot_bytes + own * self._chunk_bytes)

    def _chunks(self, slot: int, num_bytes: int) -> list[torch.Tensor]:
        """Return the memory of each rank's chunk of a bucket; none of an empty bucket."""
        first, last = slot * self._slot_bytes, (slot + 1) * self._slot_bytes
        starts = range(first, last, self._chunk_bytes) if num_bytes else ()
        return [self._memory[start : start + num_bytes] for start in starts]

    def _add_up(self, turn: _Pass) -> None:
        total = checksum_of(self.entries, itertools.chain.from_iterable(turn.sums))
        if self._checksum not in (None, total):
            raise WeightSyncError(f"the weights of version {self.version} changed during the transfer")
        self._checksum = total

    # The sessions' threads

    def serve(self, connection: Connection, hello: dict[str, Any], answer: Callable[[], bytes]) -> None:
        """Serve a receiver on its connection's thread. `answer` describes the version to it, and
        returns its requests."""
        member = Member(str(hello["receiver"]), int(hello["part"]), str(hello["process"]))
        session = _Session(member, int(hello["parts"]), connection, set(hello["groups"]))
        session.machine = str(hello["machine"])
        try:
            connection.expect(self._num_bytes)
            with self._condition:
                self._sessions.append(session)
                self.lost.pop(str(session), None)  # it has come again
                session.turn = _Pass()  # keep it out of the next pass until its requests are known
            wants = answer()
            if self._side is not None:
                self._read_sizes(session, wants)
            elif wants:
                session.maps = False
                session.base, session.wants = self._read_wants(wants)
            with self._condition:
                session.turn = None
                self._condition.notify_all()
            if self._side is not None and not self._side.rank:
                turn = self._await(session, lambda turn: turn.invitation is not None)
                assert turn.invitation is not None
                connection.send(b"G", json.dumps(turn.invitation.plain()).encode())
            self._await(session, lambda turn: True)
            self._meet_node(session)
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
            connection.hang_up()

    def _read_sizes(self, session: _Session, content: bytes) -> None:
        """Parse the sizes of all ranks' buckets, and the invitation from rank 0."""
        sizes, maps, invitation = json.loads(content)
        session.maps = bool(maps)
        session.sizes = tuple(sizes)
        if not all(type(size) is int and 0 <= size <= self._chunk_bytes for size in sizes):
            raise ValueError(f"it announced buckets of {sizes} bytes; at most {self._chunk_bytes} fit")
        if len(sizes) < len(self._buckets):
            raise ValueError(f"it announced {len(sizes)} buckets; this rank has {len(self._buckets)}")
        session.invitation = Invitation.of(invitation) if invitation is not None else None
        with self._condition:
            # Other ranks may have more buckets.
            self._buckets += [[] for _ in range(len(sizes) - len(self._buckets))]

    def _meet_node(self, session: _Session) -> None:
        """Tell a receiver that it carries for its machine, or which memory to map. A receiver that
        cannot map it gets its boxes over the connection."""
        node = session.node
        if node is None:
            return
        if session is node.carrier:
            session.connection.send(b"N", b"")
            memory = json.loads(session.connection.receive(SMALL_BYTES)[1])
            with self._condition:
                node.memory = memory
                self._condition.notify_all()
            return
        self._await(session, lambda turn: node.memory is not None or node.carrier.gone)
        if node.memory is not None:
            session.connection.send(b"N", json.dumps(node.memory).encode())
        if node.memory is None or session.connection.receive(SMALL_BYTES)[0] != b"T":
            with self._condition:
                node.members.remove(session)
                session.node = None

    def _carry(self, session: _Session, node: _Node, number: int) -> None:
        """Send a whole bucket to a carrier, and wait until it has stored it."""

        def is_free(turn: _Pass) -> bool:
            return all(s.gone or s.taken > number - SLOTS for s in node.members)

        turn = self._await(session, is_free)
        self._announce(session, turn, number, b"B")
        for entry in self._buckets[number]:
            if self.entries[entry].num_bytes:
                self._send(session.connection, entry, self.entries[entry].box, number % SLOTS, None)
        session.connection.receive(SMALL_BYTES)
        with self._condition:
            node.stored = number + 1
            self._condition.notify_all()
        session.connection.receive(SMALL_BYTES)

    def _announce(self, session: _Session, turn: _Pass, number: int, kind: bytes) -> None:
        sums = np.array(turn.sums[number], np.uint64).tobytes()
        session.connection.send(kind, NUMBER.pack(number) + sums)

    def _give(self, session: _Session, number: int) -> None:
        turn = self._await(session, lambda turn: turn.filled > number)
        node = session.node
        if node is not None and session is not node.carrier:
            self._await(session, lambda turn: node.stored > number or node.carrier.gone)
        if node is not None and session is node.carrier:
            self._carry(session, node, number)
        elif node is not None and node.stored > number:
            self._announce(session, turn, number, b"S")
            session.connection.receive(SMALL_BYTES)
        elif session.maps:
            self._announce(session, turn, number, b"B")
            session.connection.receive(SMALL_BYTES)
        else:
            self._announce(session, turn, number, b"B")
            applies = turn.base is not None and turn.base == session.base
            for entry, box in session.wants.get(number, ()):
                changed = turn.changed.get(entry) if applies else None
                self._send(session.connection, entry, box, number % SLOTS, changed)
        with self._condition:
            session.taken = number + 1
            self._condition.notify_all()

    def _await(self, session: _Session, come: Callable[[_Pass], bool]) -> _Pass:
        """Wait until `come` is true of the receiver's pass. Send keepalives while waiting."""
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
                    session.connection.send(b"A" if session.again else b"F", why.encode())
                raise ConnectionAbortedError(why)
            # Keepalives without progress would hide a stuck publisher.
            if goes_on:
                session.connection.send(b"P")

    def _send(
        self,
        connection: Connection,
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
            connection.send_elements(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for content in contents:
            if len(content):
                connection.send_elements(content)

    def _read_wants(self, content: bytes) -> tuple[int | None, dict[int, list[Want]]]:
        """Parse a receiver's version and requests. Rejects boxes of other ranks, and requests for
        more than MOST_TIMES this rank's bytes."""
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
        if not session.has_come(lambda turn: turn.through) and (session.again or self._failure):
            return session.again or self._failure
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
                session.connection.hang_up()
        if self._side is not None and not self._turn.through:
            self._side.leave()  # the filler may wait for members that have given up
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
