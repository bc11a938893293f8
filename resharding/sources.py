"""RankSource: a receiver's connection to one rank of the trainer, and the memory with this rank's
elements."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..dataflow.errors import GroupBroken, WeightSyncError
from .bucket_group import (
    BucketGroup,
    Invitation,
    Member,
    known_groups,
    receivers_group,
    this_process,
)
from .buckets import (
    SLOTS,
    Description,
    Entry,
    fingerprint,
    packed,
    read_description,
)
from .connection import SILENCE_S, Connection, reason, this_machine
from .deltas import HeldBoxes, apply_delta, held_boxes
from .mapped_memory import (
    ALIGNMENT,
    MemoryPlace,
    SharedMemory,
    device_of,
    open_device_memory,
    seen_devices,
)
from .transfer import FORM, NUMBER, WHOLE
from .weights import (
    LOOPBACK,
    Copy,
    RankWeights,
    Weights,
)


class _Views:
    """The elements of entries in a publisher's memories ([bytes] uint8 each).

    Args:
        chunk: of each bucket in the first memory, the part that is this publisher's: its offset,
            and the distance between buckets [bytes], 0 if there is memory for one. None: a bucket
            is this publisher's alone, and the memory has room for SLOTS.
    """

    def __init__(
        self,
        memories: Sequence[torch.Tensor],
        parts: Description,
        chunk: tuple[int, int] | None = None,
    ) -> None:
        self.memories = memories
        self.parts = parts
        self._offset, self._distance = chunk or (0, len(memories[0]) // SLOTS)
        self._elements: dict[int, torch.Tensor] = {}

    def elements(self, number: int) -> torch.Tensor:
        """Return the elements of an entry, valid until the next bucket."""
        if (known := self._elements.get(number)) is not None:
            return known
        entry = self.parts.entries[number]
        memory = self.memories[entry.memory]
        start = 0 if entry.memory else entry.bucket % SLOTS * self._distance + self._offset
        self._elements[number] = found = entry.view(memory, start)
        return found


_lock = threading.Lock()
"""Several threads of a process may receive weights at the same time."""

_maps: dict[tuple[tuple[str, int, int], ...], _Views] = {}
"""Keyed by path, size and inode, because paths may be reused."""


def _map_files(files: Sequence[tuple[str, int]], parts: Description) -> _Views:
    """Map a publisher's memories, and keep them mapped. Raises OSError if a file is gone."""
    key = tuple((path, num_bytes, os.stat(path).st_ino) for path, num_bytes in files)
    with _lock:
        found = _maps.get(key)
        if found is None:
            for known in list(_maps):
                if not all(_is_there(path, inode) for path, _, inode in known):
                    del _maps[known]
            found = _Views([_map_file(path, num_bytes) for path, num_bytes in files], parts)
        elif found.parts is not parts:
            found = _Views(found.memories, parts)
        _maps[key] = found
    return found


def _is_there(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


def _map_file(path: str, num_bytes: int) -> torch.Tensor:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A private mapping: torch needs writable memory, but writes must not reach other receivers.
        mapping: Any = mmap.mmap(
            file, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        return torch.frombuffer(mapping, dtype=torch.uint8)
    finally:
        os.close(file)


class RankSource:
    """The publisher of one rank. Raises WeightSyncError if it is gone or has another version."""

    def __init__(self, rank: RankWeights, where: str, weights: Weights, part: int, parts: int) -> None:
        host = rank.host or LOOPBACK
        self.where = f"{where} at {host}:{rank.port}"
        self.at = "before the first bucket"
        self.sums: list[int] = []
        self._version = weights.version
        self._taken = 0
        self.memory: _Views | None = None
        """The memory that holds this publisher's elements; None if they come over the
        connection."""
        self._node: _Views | None = None
        """The buckets that a receiver on this machine carries for the others."""
        self._carries = self._is_shared = False
        """Whether this process carries; whether the current bucket is in shared memory."""
        self.own_memory: torch.Tensor | None = None
        """This process's memory for whole buckets, if it is a member of their group."""
        here = self.is_here = this_machine() == rank.machine
        if not here and not rank.host:
            raise WeightSyncError(
                f"{where} is on another machine, and only serves receivers on its own machine"
            )
        self._publisher = (rank.host, rank.port)
        with self.named():
            self.connection = Connection.connect(host, rank.port, rank.token)
        self._member = Member(weights.receiver, part, this_process())
        try:
            known = _descriptions.get((rank.host, rank.port, rank.token), b"")
            hello = {"version": weights.version, "receiver": weights.receiver}
            hello |= {"part": part, "parts": parts, "known": fingerprint(known)}
            hello |= {
                "process": self._member.process,
                "groups": known_groups(),
                "machine": this_machine(),
            }
            with self.named():
                self.connection.send(b"H", json.dumps(hello).encode())
            place = json.loads(self._receive(b"D"))
            description = known if place["known"] else self._receive(b"L")
            _remember((rank.host, rank.port, rank.token), description)
            self._held: HeldBoxes | None = None
            self.transport: str = place["transport"]
            self.mapping: dict[str, Any] = place["memory"]
            self.chunk_bytes: int = place["chunk_bytes"]
            self._buffer = torch.empty(0, dtype=torch.uint8)
            mapped = here and self.transport == "auto"
            # Bytes in mapped memory are not sent, so deltas would save nothing.
            if place["deltas"] and not mapped:
                number = weights.ranks.index(rank)
                self._held = held_boxes(
                    weights.receiver, part, number, rank.token + fingerprint(description)
                )
            self.parts: Description = read_description(description)
            self.sums = [0] * len(self.parts.entries)
            self.connection.expect(sum(entry.num_bytes for entry in self.parts.entries))
            if mapped:
                self.memory = self._map()
        except BaseException:
            self.connection.close()
            raise

    @property
    def is_together(self) -> bool:
        """Whether the trainer's ranks complete each bucket together."""
        return self.transport != "auto"

    @property
    def is_near(self) -> bool:
        """Whether the publisher is on this machine and sends nothing over the connection."""
        return self.is_here and self.memory is not None

    @property
    def is_on_device(self) -> bool:
        return self.memory is not None and self.memory.memories[0].device.type != "cpu"

    @property
    def is_through(self) -> bool:
        return self._taken == len(self.parts.buckets)

    def ask(self, wanted: list[tuple[int, Copy]]) -> None:
        """Request copies. Unless its memory is mapped, the publisher sends them in this order."""
        said = b""
        if self.memory is None:
            boxes = [[number, copy.box.starts, copy.box.stops] for number, copy in wanted]
            base = None
            if self._held is not None:
                base = self._held.start_version((number, copy.box) for number, copy in wanted)
            said = json.dumps([base, boxes]).encode()
        with self.named():
            self.connection.send(b"W", said)

    def ask_for_invitation(self, sizes: list[int]) -> Invitation:
        """Tell the trainer's rank 0 the sizes of the buckets, and wait for the start of the pass."""
        self.pass_invitation(sizes, None)
        while True:
            kind, content = self._receive_one_of(b"GP")
            if kind == b"G":
                return Invitation.of(json.loads(content))

    def pass_invitation(self, sizes: list[int], invitation: Invitation | None) -> None:
        plain = invitation.plain() if invitation is not None else None
        with self.named():
            self.connection.send(b"W", json.dumps([sizes, self._maps, plain]).encode())

    def join(self, invitation: Invitation, ranks: int) -> BucketGroup:
        assert self.own_memory is not None
        device, silence_s = self.own_memory.device, self.connection.silence_s
        with self.named():
            return receivers_group(
                invitation, self._member, ranks, self.connection.own_address, device, silence_s
            )

    @property
    def _maps(self) -> bool:
        return self.memory is not None and self.own_memory is None

    def next_bucket(self) -> int | None:
        """Wait for the next message. Return the bucket's number, or None for a keepalive."""
        kind, content = self._receive_one_of(b"BSPN")
        if kind == b"N":
            self._share(content)
        if kind in b"PN":
            return None
        (bucket,) = NUMBER.unpack_from(content)
        self.at = f"after {bucket} of {len(self.parts.buckets)} buckets"
        sums = np.frombuffer(content, np.uint64, offset=NUMBER.size).tolist()
        # The last buckets may have elements of other ranks only.
        numbers = self.parts.buckets[bucket] if bucket < len(self.parts.buckets) else ()
        for number, found in zip(numbers, sums, strict=True):
            self.sums[number] = found
        self._is_shared = self._carries or kind == b"S"
        if self._carries:
            self._store(numbers)
        return bucket

    def _share(self, content: bytes) -> None:
        """Carry whole buckets for the receivers on this machine, or map what another one carries."""
        parts = packed(self.parts)
        if not content:
            memory, place = carried_memory(
                self._publisher, self._member, SLOTS * max(parts.bucket_bytes, default=0)
            )
            self._carries, self._node = True, _Views([memory], parts)
            with self.named():
                self.connection.send(b"M", json.dumps([place.path, place.num_bytes]).encode())
            return
        path, num_bytes = json.loads(content)
        with contextlib.suppress(OSError):
            self._node = _map_files([(path, num_bytes)], parts)
        with self.named():
            self.connection.send(b"F" if self._node is None else b"T")

    def _store(self, numbers: Sequence[int]) -> None:
        assert self._node is not None
        with self.named():
            for number in numbers:
                elements = self._node.elements(number)
                if elements.numel():
                    self.connection.receive_elements(elements.view(-1).view(torch.uint8))
            self.connection.send(b"T")

    def elements(self, number: int, copy: Copy) -> torch.Tensor:
        """Return the elements of a copy of this entry, which belongs to the current bucket."""
        entry = self.parts.entries[number]
        memory = self._node if self._is_shared else self.memory
        if memory is not None:
            found = memory.elements(number)
            return found if copy.box == entry.box else found[copy.box.within(entry.box)]
        if self._held is not None and copy.box.numel:
            return self._updated(self._held, number, copy)
        return self._streamed(entry, copy)

    def release_bucket(self, bucket: int) -> None:
        self._taken = bucket + 1
        self.at = f"after {self._taken} of {len(self.parts.buckets)} buckets"
        # A publisher that sends the bytes knows when the receiver has taken the bucket.
        if self._maps or self._is_shared:
            if self.is_on_device:
                torch.accelerator.synchronize()  # the device may still be reading the bucket
            with self.named():
                self.connection.send(b"T")

    def checksum(self) -> int:
        return int(self._receive(b"E"), 16)

    def thank(self) -> None:
        # Deltas may only build on confirmed versions.
        if self._held is not None:
            self._held.version = self._version
        with contextlib.suppress(OSError):  # the version is complete even if the publisher is gone
            self.connection.send(b"K")

    def close(self) -> None:
        self.connection.close()

    def _updated(self, held: HeldBoxes, number: int, copy: Copy) -> torch.Tensor:
        """Receive a copy, as a delta or whole, and keep its bits for the next version."""
        dtype: torch.dtype = getattr(torch, self.parts.entries[number].dtype)
        bits = held.bits(number, copy.box, np.dtype(f"u{dtype.itemsize}"))
        form = bytearray(FORM.size)
        with self.named():
            self.connection.receive_elements(torch.frombuffer(form, dtype=torch.uint8))
            if (counts := FORM.unpack(form)) == WHOLE:
                self._receive_array(bits)
            elif not 0 <= counts[1] <= counts[0] <= bits.nbytes:
                raise WeightSyncError(
                    f"{self.where}: it sent a delta of {counts} for {copy.box}, {self.at}"
                )
            else:
                gaps, values = np.empty(counts[0], np.uint8), np.empty(counts[1], bits.dtype)
                self._receive_array(gaps)
                self._receive_array(values)
                apply_delta(bits, gaps, values)
        return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(copy.box.shape)

    def _receive_array(self, target: np.ndarray) -> None:
        own_bytes = torch.from_numpy(target.view(np.uint8))
        if len(own_bytes):
            self.connection.receive_elements(own_bytes)

    def _streamed(self, entry: Entry, copy: Copy) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        num_bytes = copy.box.numel * dtype.itemsize
        if not num_bytes:
            return torch.empty(copy.box.shape, dtype=dtype)
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        with self.named():
            self.connection.receive_elements(self._buffer[:num_bytes])
        return self._buffer[:num_bytes].view(dtype).view(copy.box.shape)

    def _receive(self, wanted: bytes) -> bytes:
        return self._receive_one_of(wanted)[1]

    def _receive_one_of(self, wanted: bytes) -> tuple[bytes, bytes]:
        with self.named():
            kind, content = self.connection.receive()
        if kind in b"AF":
            found = GroupBroken if kind == b"A" else WeightSyncError
            raise found(f"{self.where}: {content.decode(errors='replace')}, {self.at}")
        if kind not in wanted:
            raise WeightSyncError(f"{self.where}: it sent {kind!r} where {wanted!r} was due, {self.at}")
        return kind, content

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            silence_s = self.connection.silence_s if hasattr(self, "connection") else SILENCE_S
            why = reason(error, silence_s)
            raise WeightSyncError(f"{self.where}: the publisher {why}, {self.at}") from None

    def _map(self) -> _Views:
        files = [(self.mapping["path"], self.mapping["num_bytes"]), *self.parts.memories]
        with self._mapping():
            return _map_files(files, self.parts)

    def map_buckets(self) -> torch.Tensor:
        """Map the memory with the buckets that this publisher and the trainer's other ranks
        complete."""
        with self._mapping():
            if "path" in self.mapping:
                file = self.mapping["path"], self.mapping["num_bytes"]
                return _map_files([file], self.parts).memories[0]
            return open_device_memory(self.mapping)

    @contextlib.contextmanager
    def _mapping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WeightSyncError(
                f"{self.where}: {error.filename} cannot be mapped ({error.strerror})"
            ) from None


def map_chunks(sources: Sequence[RankSource]) -> None:
    """Give each source the memory that holds its chunks: this process's own, or that of the
    trainer's rank on this process's device."""
    first, distance = sources[0], 0
    if first.transport == "ipc":
        memory = _nearest(sources).map_buckets()
        distance = len(sources) * first.chunk_bytes
    else:
        device = device_of(first.transport) or torch.device("cpu")  # pyright: ignore[reportArgumentType]
        num_bytes = len(sources) * first.chunk_bytes
        memory = first.own_memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for number, source in enumerate(sources):
        source.memory = _Views([memory], source.parts, (number * first.chunk_bytes, distance))
        source.own_memory = first.own_memory


def _nearest(sources: Sequence[RankSource]) -> RankSource:
    """Return the trainer's rank on this process's device."""
    here = [source for source in sources if source.is_here]
    if not any("device" in source.mapping for source in sources):
        return (here or [sources[0]])[0]
    seen = seen_devices()
    # A process of an engine with several GPUs sees all of them.
    own = seen[torch.cuda.current_device()] if seen else None
    for device in (own, *seen):
        for source in here:
            if source.mapping["device"] == device:
                return source
    raise WeightSyncError(
        f'{sources[0].where}: transport="ipc" needs a rank of the trainer on the GPU of each receiver, and '
        f'none is on the GPUs of this process ({seen}); take transport="auto" or "vllm:ipc"'
    )


_carried: dict[tuple[tuple[str, int], Member], SharedMemory] = {}
"""Maps a publisher to the memory with the buckets that this process carries."""


def carried_memory(
    publisher: tuple[str, int], member: Member, num_bytes: int
) -> tuple[torch.Tensor, MemoryPlace]:
    """Return memory of this size ([bytes] uint8), the same for each version, and its place."""
    with _lock:
        memory = _carried.get((publisher, member))
        if memory is None or memory.num_bytes != max(num_bytes, ALIGNMENT):
            memory = _carried[publisher, member] = SharedMemory(num_bytes)
    return memory.content, memory.place


_descriptions: dict[tuple[str, int, str], bytes] = {}
"""Descriptions by publisher. Publishers send a description only if it has changed."""


def _remember(publisher: tuple[str, int, str], description: bytes) -> None:
    with _lock:
        _descriptions.pop(publisher, None)
        _descriptions[publisher] = description
        while len(_descriptions) > 64:
            del _descriptions[next(iter(_descriptions))]
