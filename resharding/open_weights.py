"""The receiving side of published weights: mapped where they are on this machine, and fetched from publishers on others."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .box import Box
from .checksum import model_sum, tensor_factor
from .description import checked_description, layout_of
from .layout import Layout
from .part_server import SILENCE_S, PartStream, this_machine
from .plan import Copy
from .weights import CHECKSUM_MODULUS, RankWeights, Weights


class OpenWeights:
    """A published version of the weights: mapped into this process, or to be fetched from publishers on other machines. It is valid until
    the publishers write their next version.

    Raises:
        WeightSyncError: a publisher has ended, has published a later version, or its description of the parts is damaged.
    """

    def __init__(self, weights: Weights) -> None:
        self.version = weights.version
        self._weights = weights
        self._sources: list[_Mapped | _Remote] = []
        here = this_machine()
        for number, rank in enumerate(weights.ranks):
            where = f"weights version {weights.version}, rank {number} of the trainer"
            source = _Mapped(rank, where) if rank.machine == here else _Remote(rank, where)
            self._sources.append(source)
            if source.version != weights.version:
                raise WeightSyncError(f"{where}: version {source.version} was published before this one was received")
        self.layout: Layout = layout_of(tuple(source.parts for source in self._sources))
        """Which rank published which boxes: the same object for all versions whose parts lie in the same places."""

    def slices(self, copies: Iterable[tuple[str, Copy]]) -> Iterator[tuple[str, Copy, torch.Tensor]]:
        """The elements of these copies, with the copies, in this order. A tensor is valid until the next one is taken.

        Args:
            copies: of a plan whose source is this layout, with the tensors' names.

        Raises:
            WeightSyncError: a publisher on another machine has ended, or was silent for too long.
        """
        wanted = list(copies)
        for number, source in enumerate(self._sources):
            source.ask([(n, copy.source_piece, copy.box) for n, copy in wanted if copy.source == number])
        for name, copy in wanted:
            yield name, copy, self._sources[copy.source].read(name, copy.source_piece, copy.box)

    def part(self, name: str, rank: int, piece: int, box: Box) -> torch.Tensor:
        """Elements of one tensor; nobody may write to them. Without a copy where they are on this machine.

        Args:
            name: of the tensor.
            rank: who published them.
            piece: which of that rank's pieces in the layout.
            box: which elements of the piece.
        """
        self._sources[rank].ask([(name, piece, box)])
        return self._sources[rank].read(name, piece, box)

    def published_sum(self, name: str) -> int:
        """`box_sum` over all of a tensor, as the ranks that published it computed it."""
        pieces = self.layout.tensors[name].pieces
        return (
            sum(self.piece_sum(name, rank, n) for rank, own in enumerate(pieces) for n in range(len(own)))
            % CHECKSUM_MODULUS
        )

    def piece_sum(self, name: str, rank: int, piece: int) -> int:
        """`box_sum` of one piece, as the rank that published it computed it."""
        source = self._sources[rank]
        return int(source.sums[source.parts.numbers[name][piece]])

    def check(self) -> None:
        """Compare the sums that ranks wrote beside their parts with the checksum of the record.

        Raises:
            WeightSyncError: they differ, or the ranks' parts do not make up each tensor.
        """
        factors: dict[str, int] = {}
        for name, tensor in self.layout.tensors.items():
            given = sum(box.numel for boxes in tensor.boxes for box in boxes)
            if given != (whole := Box.full(tensor.shape).numel):
                raise WeightSyncError(
                    f"weights version {self.version}: the ranks published {given} elements of tensor {name!r}, which has {whole}"
                )
            factors[name] = tensor_factor(name, tensor.dtype, tensor.shape)
        found = model_sum({name: self.published_sum(name) for name in factors}, factors)
        if found != self._weights.checksum:
            raise WeightSyncError(
                f"weights version {self.version}: checksum {self._weights.checksum} was published, {found} was received"
            )


def open_weights(weights: Weights) -> OpenWeights:
    """Map published weights and check that they are complete; the elements themselves are checked as they are received.

    Raises:
        WeightSyncError: a publisher has ended or published a later version, or the parts are not those that were published.
    """
    opened = OpenWeights(weights)
    opened.check()
    return opened


class _Mapped:
    """What a rank of this machine published."""

    def __init__(self, rank: RankWeights, where: str) -> None:
        try:
            file = os.open(rank.location, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(
                f"{where}: {rank.location} cannot be opened ({error.strerror}): has the process that published them ended?"
            ) from None
        try:
            found_bytes = os.fstat(file).st_size
            if found_bytes < rank.num_bytes:
                raise WeightSyncError(f"{where}: {rank.num_bytes} bytes were published, {found_bytes} found")
            # Private rather than read-only: torch wants writable memory, and no receiver may change what others read.
            self._memory = mmap.mmap(
                file, rank.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(file)
        header = self._memory[rank.num_bytes - rank.header_bytes : rank.num_bytes]
        self.parts = checked_description(header, rank, where)
        count = 1 + len(self.parts.entries)
        table = np.frombuffer(self._memory, np.uint64, count, rank.num_bytes - rank.header_bytes - 8 * count)
        self.version, self.sums = int(table[0]), table[1:].copy()

    def ask(self, parts: Iterable[tuple[str, int, Box]]) -> None:
        """Everything is here."""

    def read(self, name: str, piece: int, box: Box) -> torch.Tensor:
        entry = self.parts.entries[self.parts.numbers[name][piece]]
        return entry.view(self._memory)[box.within(entry.box)]


class _Remote:
    """What a rank on another machine published."""

    def __init__(self, rank: RankWeights, where: str) -> None:
        self._where = f"{where} at {rank.host}:{rank.port}"
        if not rank.host:
            raise WeightSyncError(f"{where} is on another machine, and its weights are served on its own alone")
        with self._named():
            self._stream = PartStream(rank.host, rank.port, rank.token)
        self.parts = checked_description(self._stream.description, rank, self._where)
        table = np.frombuffer(self._stream.table, np.uint64)
        self.version, self.sums = int(table[0]), table[1:]

    def ask(self, parts: Iterable[tuple[str, int, Box]]) -> None:
        with self._named():
            self._stream.ask([(self.parts.numbers[name][piece], box) for name, piece, box in parts])

    def read(self, name: str, piece: int, box: Box) -> torch.Tensor:
        entry = self.parts.entries[self.parts.numbers[name][piece]]
        with self._named():
            return self._stream.receive(box, getattr(torch, entry.dtype))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the connection say who was waited for."""
        try:
            yield
        except OSError as error:
            reason = f"was silent for {SILENCE_S:.0f} s" if isinstance(error, TimeoutError) else f"is gone ({error})"
            raise WeightSyncError(f"{self._where}: the publisher {reason}") from None

    def __del__(self) -> None:
        if stream := getattr(self, "_stream", None):
            stream.close()
