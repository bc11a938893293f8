"""IncomingWeights: the receiving side of a transfer, connected to every trainer rank.

connect ──> layout ──> slices, written on arrival ──> confirm: checks completeness

with IncomingWeights(weights) as incoming:
    plan = ReshardPlan(incoming.layout, mine)
    for name, copy, elements in incoming.slices(plan.received_by(0)):
        ...                          # write the elements, and sum them in their destination
        incoming.check(name, copy, found)
    incoming.confirm()
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import mmap
import os
import selectors
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError, nearest
from .bucket_group import (
    BucketGroup,
    Invitation,
    Member,
    known_groups,
    leave_group,
    receivers_group,
    this_process,
)
from .buckets import (
    SLOTS,
    Description,
    Entry,
    checksum_of,
    copy_elements,
    fingerprint,
    layout_of,
    packed,
    read_description,
    read_sums,
    start_sum,
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
from .transfer import FORM, GRACE_S, NUMBER, WHOLE
from .weights import (
    CHECKSUM_MODULUS,
    LOOPBACK,
    Copy,
    Layout,
    Piece,
    RankWeights,
    ReshardPlan,
    TensorLayout,
    TensorPart,
    Weights,
    Where,
)

# Mapped memory


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


PATIENCE_S = 2 * SILENCE_S + GRACE_S
"""[s] Longest wait for a bucket. The publisher may itself wait for another receiver."""


class IncomingWeights:
    """One version on its way to process `part` of a receiver with `parts` processes. Closing it
    tells the publishers that this receiver is done. Raises WeightSyncError if a publisher is gone
    or has another version, or if the ranks' parts do not make up each tensor."""

    def __init__(self, weights: Weights, part: int = 0, parts: int = 1) -> None:
        self.version = weights.version
        self.receiver = weights.receiver or "a receiver"
        self._sources: list[_Source] = []
        try:
            for number, rank in enumerate(weights.ranks):
                where = f"weights version {weights.version}, rank {number} of the trainer"
                self._sources.append(_Source(rank, where, weights, part, parts))
            self._group: BucketGroup | None = None
            if self._sources[0].is_together:
                _map_chunks(self._sources)
            try:
                self.layout: Layout = layout_of(tuple(source.parts for source in self._sources))
                """The boxes that each rank publishes. Equal versions share one object."""
            except WeightSyncError as error:
                raise WeightSyncError(f"weights version {weights.version}: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def neighbours(self) -> int:
        """Number of trainer ranks on this machine, which publish at the same time."""
        return sum(source.is_near for source in self._sources)

    def slices(self, copies: Iterable[tuple[str, Copy]]) -> Iterator[tuple[str, Copy, torch.Tensor]]:
        """Yield each copy with its elements, valid until the next copy, as they arrive. `copies`
        are tensor names and copies from a plan whose source is this layout. Raises WeightSyncError
        if a publisher is gone, has given up, or did not answer in time."""
        wanted: list[dict[int, list[tuple[str, Copy, int]]]] = [{} for _ in self._sources]
        for name, copy in copies:
            number = self._sources[copy.source].parts.numbers[name][copy.source_piece]
            bucket = self._sources[copy.source].parts.entries[number].bucket
            wanted[copy.source].setdefault(bucket, []).append((name, copy, number))
        if self._sources[0].is_together:
            yield from self._slices_together(wanted)
            return
        # Send all requests first: a publisher fills its buckets once its receivers have asked.
        for source, of in zip(self._sources, wanted, strict=True):
            source.ask([(number, copy) for bucket in sorted(of) for _, copy, number in of[bucket]])
        with selectors.DefaultSelector() as selector:
            for number, source in enumerate(self._sources):
                if not source.is_through:
                    selector.register(source.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                for number in self._ready(selector):
                    source = self._sources[number]
                    if (bucket := source.next_bucket()) is None:
                        continue
                    for name, copy, entry in wanted[number].get(bucket, ()):
                        yield name, copy, source.elements(entry, copy)
                    source.release_bucket(bucket)
                    if source.is_through:
                        selector.unregister(source.connection)

    def _slices_together(
        self, wanted: Sequence[dict[int, list[tuple[str, Copy, int]]]]
    ) -> Iterator[tuple[str, Copy, torch.Tensor]]:
        """The same as `slices`, for buckets that all ranks of the trainer complete together."""
        first = self._sources[0]
        chunks = [source.parts.bucket_bytes for source in self._sources]
        sizes = [max(each) for each in itertools.zip_longest(*chunks, fillvalue=0)]
        invitation = first.ask_for_invitation(sizes)
        for source in self._sources[1:]:
            source.pass_invitation(sizes, invitation)
        memory = first.own_memory
        if memory is not None:
            self._group = first.join(invitation, len(self._sources))
        for bucket, num_bytes in enumerate(sizes):
            if self._group is not None and memory is not None and num_bytes:
                starts = range(0, len(memory), first.chunk_bytes)
                with first.named():
                    self._group.complete([memory[start : start + num_bytes] for start in starts])
            for source in self._sources:
                while source.next_bucket() is None:
                    pass
            for source, of in zip(self._sources, wanted, strict=True):
                for name, copy, entry in of.get(bucket, ()):
                    yield name, copy, source.elements(entry, copy)
            for source in self._sources:
                source.release_bucket(bucket)
        self._group = None  # complete, so it can be kept

    def _ready(self, selector: selectors.BaseSelector) -> list[int]:
        # PATIENCE_S has the timeout twice, so add the extension for a large version twice.
        patience_s = PATIENCE_S + 2 * max(s.connection.silence_s - SILENCE_S for s in self._sources)
        ready = [key.data for key, _ in selector.select(patience_s)]
        if not ready:
            silent = [self._sources[key.data] for key in selector.get_map().values()]
            raise WeightSyncError(
                "; ".join(f"{s.where}: nothing came for {patience_s:.0f} s, {s.at}" for s in silent)
            )
        return ready

    def piece_sum(self, name: str, rank: int, piece: int) -> int:
        source = self._sources[rank]
        return source.sums[source.parts.numbers[name][piece]]

    def published_sum(self, name: str) -> int:
        pieces = self.layout.tensors[name].pieces
        sums = (
            self.piece_sum(name, rank, n) for rank, own in enumerate(pieces) for n in range(len(own))
        )
        return sum(sums) % CHECKSUM_MODULUS

    def check(self, name: str, copy: Copy, found: int) -> None:
        """Compare a received copy with the published elements, if the copy is a whole piece.
        `found` is the `box_sum` of the received elements, in the publisher's dtype."""
        whole = copy.box == self.layout.tensors[name].boxes[copy.source][copy.source_piece]
        if whole and found != self.piece_sum(name, copy.source, copy.source_piece):
            raise WeightSyncError(
                f"weights version {self.version}: tensor {name!r} did not arrive as it was published: {copy.box} from rank "
                f"{copy.source} of the trainer differs at {self.receiver}"
            )

    def confirm(self) -> str:
        """Check and acknowledge the complete version. Return its checksum."""
        total = 0
        for source in self._sources:
            own = checksum_of(source.parts.entries, source.sums)
            if (found := source.checksum()) != own:
                raise WeightSyncError(
                    f"{source.where}: checksum {found:016x} was published, but {own:016x} arrived"
                )
            total += own
        # Not earlier: the acknowledgement makes a publisher count this receiver as served.
        for source in self._sources:
            source.thank()
        return f"{total % CHECKSUM_MODULUS:016x}"

    def hang_up(self) -> None:
        """End the connections, from any thread. Iterating over slices then raises an error."""
        for source in self._sources:
            source.connection.hang_up()
        if (group := self._group) is not None:
            leave_group(group)

    def close(self) -> None:
        if (group := getattr(self, "_group", None)) is not None:
            leave_group(group)  # the other members are at another bucket
        # After an error, the device may still be reading memory that the publisher then reuses.
        if any(source.is_on_device for source in self._sources):
            torch.accelerator.synchronize()
        for source in self._sources:
            source.close()


class _Source:
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
                self._publisher, self._member, SLOTS * max(parts.bucket_bytes)
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
        if kind == b"F":
            raise WeightSyncError(f"{self.where}: {content.decode(errors='replace')}, {self.at}")
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
        """Map the memory in which this publisher and the trainer's other ranks complete buckets."""
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


def _map_chunks(sources: Sequence[_Source]) -> None:
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


def _nearest(sources: Sequence[_Source]) -> _Source:
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
"""The memory in which this process carries buckets, by publisher."""


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


# Receiver for modules whose parameters match the checkpoint, whole or sharded by FSDP. vLLM fuses,
# pads and repacks its parameters, so it uses `vllm_writer.py` instead.


@torch.no_grad()
def receive_parts(
    incoming: IncomingWeights,
    parts: Sequence[TensorPart],
    counted: Sequence[bool] | None = None,
    sum_over_ranks: Callable[[np.ndarray], np.ndarray] | None = None,
) -> str:
    """Copy this rank's parts of a version into its tensors as they arrive, check them, confirm the
    version, and return its checksum. `parts` are the tensors to overwrite, each one box of a
    published tensor. The copy casts elements to the dtype of the part.

    Args:
        counted: for each part, whether this rank adds it to the checksum. Exactly one of the ranks
            with equal parts must. None counts all parts.
        sum_over_ranks: sums an int64 array over the group, modulo 2^64. None if each part is a
            whole tensor.

    Raises:
        WeightSyncError: either names or shapes differ from the published tensors, and no part is
            overwritten; or a tensor arrived damaged or incomplete, and parts are partly
            overwritten. The message names the tensor, the box and the rank.
    """
    own = {part.name: part for part in parts}
    for name in incoming.layout.tensors:
        if name not in own:
            raise WeightSyncError(
                f"weights version {incoming.version}: tensor {name!r} was published, "
                f"but the model has no tensor of that name{nearest(name, own)}"
            )
    plan = _plan(
        incoming.layout,
        tuple((p.name, p.shape, p.box, str(p.tensor.dtype).removeprefix("torch.")) for p in parts),
    )
    started: list[tuple[str, Copy, torch.Tensor]] = []
    sums = dict.fromkeys(own, 0)

    def add(name: str, copy: Copy, found: int) -> None:
        incoming.check(name, copy, found)
        sums[name] += found

    for name, copy, source in incoming.slices(plan.received_by(0)):
        part = own[name]
        target = part.tensor[copy.box.within(part.box)]
        copy_elements(target, source)
        # A cast changes the bits, so check the elements as received.
        found = start_sum(target if target.dtype == source.dtype else source, copy.box, part.shape)
        if isinstance(found, torch.Tensor):
            started.append((name, copy, found))
        else:
            add(name, copy, found)
    for (name, copy, _), found in zip(started, read_sums([each[2] for each in started]), strict=True):
        add(name, copy, found)
    found = [
        sums[p.name] % CHECKSUM_MODULUS if c else 0
        for p, c in zip(parts, counted or [True] * len(parts), strict=True)
    ]
    totals = np.array(found, np.uint64)
    if sum_over_ranks is not None:
        totals = sum_over_ranks(totals.view(np.int64)).view(np.uint64)
    for part, total in zip(parts, totals.tolist(), strict=True):
        if total != incoming.published_sum(part.name):
            sources = sorted({copy.source for name, copy in plan.received_by(0) if name == part.name})
            raise WeightSyncError(
                f"weights version {incoming.version}: tensor {part.name!r} did not arrive as it was published: {part.box} at "
                f"{incoming.receiver}, from the trainer's ranks {sources}, or a part on another rank of the receiver"
            )
    return incoming.confirm()


@functools.lru_cache(maxsize=8)
def _plan(source: Layout, parts: tuple[tuple[object, ...], ...]) -> ReshardPlan:
    tensors = [TensorLayout(n, s, d, ((Piece(box),),)) for n, s, box, d in parts]  # pyright: ignore[reportArgumentType]
    return ReshardPlan(source, Layout.of(tensors, [Where()], "the receiver"))
