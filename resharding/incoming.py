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
import json
import mmap
import os
import selectors
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError, nearest
from .buckets import (
    SLOTS,
    Entry,
    checksum_of,
    copy_elements,
    device_of,
    fingerprint,
    open_device_memory,
    read_sums,
    start_sum,
)
from .connection import SILENCE_S, Connection, GroupChannel, reason, this_machine
from .deltas import apply_delta
from .publisher import FORM, GRACE_S, NUMBER, WHOLE
from .weights import (
    CHECKSUM_MODULUS,
    LOOPBACK,
    Box,
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


@dataclass(frozen=True, eq=False)
class _Description:
    """The entries of one publisher. Unchanged entries give one object, so receivers plan once."""

    entries: tuple[Entry, ...]
    numbers: dict[str, list[int]]
    """Maps each tensor name to the indexes of its entries, in the order of its pieces."""
    buckets: tuple[tuple[int, ...], ...]
    memories: tuple[tuple[str, int], ...]
    """Path and size in bytes of each memory that holds entries in place."""


@functools.lru_cache(maxsize=64)
def read_description(description: bytes) -> _Description:
    fields, memories = json.loads(description)
    entries = tuple(
        Entry(name, dtype, tuple(shape), Box(tuple(starts), tuple(stops)), bucket, offset, memory)
        for name, dtype, shape, starts, stops, bucket, offset, memory in fields
    )
    numbers: dict[str, list[int]] = {}
    buckets: list[list[int]] = [[] for _ in range(1 + max((e.bucket for e in entries), default=-1))]
    for number, entry in enumerate(entries):
        numbers.setdefault(entry.name, []).append(number)
        buckets[entry.bucket].append(number)
    return _Description(entries, numbers, tuple(map(tuple, buckets)), tuple(map(tuple, memories)))


@functools.lru_cache(maxsize=8)
def layout_of(ranks: tuple[_Description, ...]) -> Layout:
    """Return the trainer's layout, given its ranks' descriptions. Raises WeightSyncError unless the
    ranks together publish each element of each tensor exactly once."""
    layout = Layout.of_ranks([_rank_layout(rank.entries) for rank in ranks], "the trainer")
    for name, tensor in layout.tensors.items():
        given = sum(box.numel for boxes in tensor.boxes for box in boxes)
        if given != (whole := Box.full(tensor.shape).numel):
            raise WeightSyncError(
                f"the ranks publish {given} elements of tensor {name!r}, which has {whole}"
            )
    return layout


def _rank_layout(entries: Sequence[Entry]) -> Layout:
    pieces: dict[str, list[Piece]] = {}
    first: dict[str, Entry] = {}
    for entry in entries:
        first.setdefault(entry.name, entry)
        pieces.setdefault(entry.name, []).append(Piece(entry.box))
    tensors = [TensorLayout(n, e.shape, e.dtype, (tuple(pieces[n]),)) for n, e in first.items()]
    return Layout.of(tensors, [Where()])


# Mapped memory


class _Views:
    """The elements of entries in a publisher's memories ([bytes] uint8 each)."""

    def __init__(self, memories: Sequence[torch.Tensor], parts: _Description) -> None:
        self.memories = memories
        self.parts = parts
        self._elements: dict[int, torch.Tensor] = {}

    def elements(self, number: int) -> torch.Tensor:
        """Return the elements of an entry, valid until the next bucket."""
        if (known := self._elements.get(number)) is not None:
            return known
        entry = self.parts.entries[number]
        memory = self.memories[entry.memory]
        start = 0 if entry.memory else entry.bucket % SLOTS * (len(memory) // SLOTS)
        self._elements[number] = found = entry.view(memory, start)
        return found


_lock = threading.Lock()
"""Several threads of a process may receive weights at the same time."""

_maps: dict[tuple[tuple[str, int, int], ...], _Views] = {}
"""Keyed by path, size and inode, because paths may be reused."""


def _map_files(files: Sequence[tuple[str, int]], parts: _Description) -> _Views:
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
        return sum(source.memory is not None for source in self._sources)

    def slices(self, copies: Iterable[tuple[str, Copy]]) -> Iterator[tuple[str, Copy, torch.Tensor]]:
        """Yield each copy with its elements, valid until the next copy, as they arrive. `copies`
        are tensor names and copies from a plan whose source is this layout. Raises WeightSyncError
        if a publisher is gone, has given up, or did not answer in time."""
        wanted: list[dict[int, list[tuple[str, Copy, int]]]] = [{} for _ in self._sources]
        for name, copy in copies:
            number = self._sources[copy.source].parts.numbers[name][copy.source_piece]
            bucket = self._sources[copy.source].parts.entries[number].bucket
            wanted[copy.source].setdefault(bucket, []).append((name, copy, number))
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
            source.channel.hang_up()

    def close(self) -> None:
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
        """The publisher's memory, if this process has mapped it."""
        here = this_machine() == rank.machine
        if not here and not rank.host:
            raise WeightSyncError(
                f"{where} is on another machine, and only serves receivers on its own machine"
            )
        with self._named():
            self.connection = Connection.connect(host, rank.port, rank.token)
        self.channel: Connection | GroupChannel = self.connection
        try:
            known = _descriptions.get((rank.host, rank.port, rank.token), b"")
            hello = {"version": weights.version, "receiver": weights.receiver}
            hello |= {"part": part, "parts": parts, "known": fingerprint(known)}
            with self._named():
                self.connection.send(b"H", json.dumps(hello).encode())
            place = json.loads(self._receive(b"D"))
            description = known if place["known"] else self._receive(b"L")
            _remember((rank.host, rank.port, rank.token), description)
            self._held: _HeldBoxes | None = None
            self._transport = place["transport"]
            if self._transport == "ipc" and not here:
                raise WeightSyncError(
                    f'{where} is on another machine, and transport="ipc" works on one machine only; choose "nccl"'
                )
            self._device = (
                None if self._transport == "ipc" else device_of(self._transport)
            ) or torch.device("cpu")
            """Device that the bytes arrive on, unless the memory is mapped."""
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            mapped = here and self._transport in ("auto", "ipc")
            # Bytes in mapped memory are not sent, so deltas would save nothing.
            if place["deltas"] and not mapped:
                number = weights.ranks.index(rank)
                self._held = held_boxes(
                    weights.receiver, part, number, rank.token + fingerprint(description)
                )
            self.parts: _Description = read_description(description)
            self.sums = [0] * len(self.parts.entries)
            self.connection.expect(sum(entry.num_bytes for entry in self.parts.entries))
            if mapped:
                self.memory = self._map(place["memory"])
        except BaseException:
            self.connection.close()
            raise

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
        with self._named():
            self.connection.send(b"W", said)
            if self._transport in ("gloo", "nccl"):
                self.channel = GroupChannel(self.connection, rank=1, device=self._device)

    def next_bucket(self) -> int | None:
        """Wait for the next message. Return the bucket's number, or None for a keepalive."""
        kind, content = self._receive_one_of(b"BP")
        if kind == b"P":
            return None
        (bucket,) = NUMBER.unpack_from(content)
        self.at = f"after {bucket} of {len(self.parts.buckets)} buckets"
        sums = np.frombuffer(content, np.uint64, offset=NUMBER.size).tolist()
        for number, found in zip(self.parts.buckets[bucket], sums, strict=True):
            self.sums[number] = found
        return bucket

    def elements(self, number: int, copy: Copy) -> torch.Tensor:
        """Return the elements of a copy of this entry, which belongs to the current bucket."""
        entry = self.parts.entries[number]
        if self.memory is not None:
            found = self.memory.elements(number)
            return found if copy.box == entry.box else found[copy.box.within(entry.box)]
        if self._held is not None and copy.box.numel:
            return self._updated(self._held, number, copy)
        return self._streamed(entry, copy)

    def release_bucket(self, bucket: int) -> None:
        self._taken = bucket + 1
        self.at = f"after {self._taken} of {len(self.parts.buckets)} buckets"
        # A publisher that sends the bytes knows when the receiver has taken the bucket.
        if self.memory is not None:
            if self._transport == "ipc":
                torch.accelerator.synchronize()  # the device may still be reading the bucket
            with self._named():
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
        self.channel.close()
        self.connection.close()

    def _updated(self, held: _HeldBoxes, number: int, copy: Copy) -> torch.Tensor:
        """Receive a copy, as a delta or whole, and keep its bits for the next version."""
        dtype: torch.dtype = getattr(torch, self.parts.entries[number].dtype)
        bits = held.bits(number, copy.box, np.dtype(f"u{dtype.itemsize}"))
        form = bytearray(FORM.size)
        with self._named():
            self.channel.receive_elements(torch.frombuffer(form, dtype=torch.uint8))
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
            self.channel.receive_elements(own_bytes)

    def _streamed(self, entry: Entry, copy: Copy) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        num_bytes = copy.box.numel * dtype.itemsize
        if not num_bytes:
            return torch.empty(copy.box.shape, dtype=dtype)
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        with self._named():
            self.channel.receive_elements(self._buffer[:num_bytes])
        return self._buffer[:num_bytes].view(dtype).view(copy.box.shape)

    def _receive(self, wanted: bytes) -> bytes:
        return self._receive_one_of(wanted)[1]

    def _receive_one_of(self, wanted: bytes) -> tuple[bytes, bytes]:
        with self._named():
            kind, content = self.connection.receive()
        if kind == b"F":
            raise WeightSyncError(f"{self.where}: {content.decode(errors='replace')}, {self.at}")
        if kind not in wanted:
            raise WeightSyncError(f"{self.where}: it sent {kind!r} where {wanted!r} was due, {self.at}")
        return kind, content

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            silence_s = self.connection.silence_s if hasattr(self, "connection") else SILENCE_S
            why = reason(error, silence_s)
            raise WeightSyncError(f"{self.where}: the publisher {why}, {self.at}") from None

    def _map(self, buckets: dict[str, Any]) -> _Views:
        try:
            if self._transport == "auto":
                files = [(buckets["path"], buckets["num_bytes"]), *self.parts.memories]
                return _map_files(files, self.parts)
            own = [_map_files([file], self.parts).memories[0] for file in self.parts.memories]
            return _Views([open_device_memory(buckets), *own], self.parts)
        except OSError as error:
            raise WeightSyncError(
                f"{self.where}: {error.filename} cannot be mapped ({error.strerror})"
            ) from None


_descriptions: dict[tuple[str, int, str], bytes] = {}
"""Descriptions by publisher. Publishers send a description only if it has changed."""


def _remember(publisher: tuple[str, int, str], description: bytes) -> None:
    with _lock:
        _descriptions.pop(publisher, None)
        _descriptions[publisher] = description
        while len(_descriptions) > 64:
            del _descriptions[next(iter(_descriptions))]


# The previous version, the base of deltas


class _HeldBoxes:
    """The bits of the boxes that a receiver took last, to which the next deltas apply. Entry
    numbers are only valid for one publisher."""

    def __init__(self, publisher: str) -> None:
        self.publisher = publisher
        self.version: int | None = None
        """The version of all boxes; None without boxes, or if they belong to several versions."""
        self._bits: dict[tuple[int, Box], np.ndarray] = {}

    def start_version(self, wanted: Iterable[tuple[int, Box]]) -> int | None:
        """Start a version with these entry numbers and boxes. Return the version of all of them, or
        None if deltas do not apply. `version` is None until the caller sets it."""
        keys = set(wanted)
        # If the transfer breaks off, the bits belong to two versions.
        base, self.version = self.version, None
        if not keys <= self._bits.keys():
            base = None
        self._bits = {key: bits for key, bits in self._bits.items() if key in keys}
        return base

    def bits(self, number: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """Return the held bits of an entry's box, or new memory for them: [elements] unsigned
        integers of the elements' size."""
        key = (number, box)
        if key not in self._bits:
            self._bits[key] = np.empty(box.numel, dtype)
        return self._bits[key]


_held: dict[tuple[str, int, int], _HeldBoxes] = {}
"""Keyed by receiver name, part number, and rank of the publisher."""


def held_boxes(receiver: str, part: int, rank: int, publisher: str) -> _HeldBoxes:
    """Return a trainer rank's boxes that this process (`part` of a receiver) holds. Discards those
    of an earlier publisher. Does not keep boxes of a receiver without a name."""
    found = _held.get((receiver, part, rank))
    if found is None or found.publisher != publisher:
        found = _HeldBoxes(publisher)
        if receiver:
            _held[receiver, part, rank] = found
    return found


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
