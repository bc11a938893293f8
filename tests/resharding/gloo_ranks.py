"""Two sending and two receiving ranks over gloo, each a process controlled by a pipe, for
`test_gloo.py`."""

from __future__ import annotations

import itertools
import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import numpy as np
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import publisher
from weft.resharding import sources as rank_sources
from weft.resharding.bucket_group import BucketGroup, Transport
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.publisher import WeightPublisher
from weft.resharding.transfer import Transfer
from weft.resharding.weights import Box, TensorPart

SHAPES = {"a": (40, 64), "b": (6, 1000)}
BUCKET_BYTES = 4096


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def share(shape: tuple[int, ...], dim: int, number: int) -> Box:
    """Return half of a tensor, by rows or by columns."""
    size = shape[dim]
    return Box.along(shape, dim, size * number // 2, size * (number + 1) // 2)


def counted() -> list[str]:
    """Record the names of the groups that this process joins from here on."""
    names: list[str] = []
    made = BucketGroup.__init__

    def noted(self: BucketGroup, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        names.append(self.name)

    cast(Any, BucketGroup).__init__ = noted
    return names


def without_gpus() -> None:
    """Let host memory stand in for that of a GPU. Receivers map the buckets of different ranks."""
    cast(Any, publisher).device_of = lambda transport: None

    def nearest(sources: Any) -> Any:
        return sources[sources[0]._member.receiver == "right"]

    cast(Any, rank_sources)._nearest = nearest


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give(pipe: Pipe, number: int, transport: Transport) -> None:
    """Publish rows, version by version.

    Messages are (version, receivers, bucket to die before, bucket with a flipped bit). After the
    receivers have finished, a message names a killed rank. Answers end with the number of groups.
    """
    without_gpus()
    names, fill, complete = counted(), Transfer._fill, BucketGroup.complete
    sender = WeightPublisher(bucket_bytes=BUCKET_BYTES, transport=transport, rank=number, ranks=2)
    while True:
        version, receivers, last, wrong = pipe.recv()
        buckets = itertools.count()

        def complete_wrongly(
            self: BucketGroup, chunks: Any, wrong: int | None = wrong, buckets: Any = buckets
        ) -> None:
            if next(buckets) == wrong:
                chunks[number][0] ^= 1
            complete(self, chunks)

        cast(Any, BucketGroup).complete = complete_wrongly

        def fill_or_die(self: Transfer, entry: int, slot: int, last: int | None = last) -> Any:
            if self.entries[entry].bucket == last:
                die()
            return fill(self, entry, slot)

        cast(Any, Transfer)._fill = fill_or_die
        parts: list[TensorPart] = []
        for name, tensor in tensors(version).items():
            box = share(SHAPES[name], 0, number)
            parts.append(TensorPart(name, SHAPES[name], box, tensor[box.slices]))
        pipe.send(sender.publish(parts, version, receivers))
        killed, deadline = pipe.recv(), time.monotonic() + 30
        while killed and killed not in sender.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        lost = dict(sender.lost)
        try:
            checksum = sender.finish()
        except WeightSyncError as error:
            checksum = str(error)
        pipe.send((checksum, lost, len(names)))


def take(pipe: Pipe, number: int, transport: Transport) -> None:
    """Receive columns, version by version.

    Messages are (record, number of copies to die after). Answers are the checksum, correctness,
    number of groups, and for each tensor the received and the published sum.
    """
    without_gpus()
    names = counted()
    while True:
        weights, last = pipe.recv()
        whole = tensors(weights.version)
        parts: list[TensorPart] = []
        sums: list[tuple[int, int]] = []
        for name, shape in SHAPES.items():
            box = share(shape, 1, number)
            parts.append(TensorPart(name, shape, box, torch.zeros(box.shape)))
        try:
            with IncomingWeights(weights.to(("left", "right")[number])) as coming:
                if last is not None:
                    slices = coming.slices

                    def until(copies: Any, last: int = last, slices: Any = slices) -> Any:
                        for count, found in enumerate(slices(copies)):
                            if count == last:
                                die()
                            yield found

                    coming.slices = until
                checksum = receive_parts(coming, parts, None, partial(_published, coming, parts, sums))
            right = all(torch.equal(part.tensor, whole[part.name][part.box.slices]) for part in parts)
            pipe.send((checksum, right, len(names), sums))
        except WeightSyncError as error:
            pipe.send(str(error))


def _published(
    coming: IncomingWeights, parts: list[TensorPart], sums: list[tuple[int, int]], own: np.ndarray
) -> np.ndarray:
    """Return local sums: this receiver has no group, so the test adds them up."""
    published = np.array([coming.published_sum(part.name) for part in parts], np.uint64)
    sums += zip(own.view(np.uint64).tolist(), published.tolist(), strict=True)
    return published.view(np.int64)
