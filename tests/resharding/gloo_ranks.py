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
from weft.resharding.connection import GroupChannel
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.publisher import WeightPublisher, _Transfer
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


def counted() -> list[GroupChannel]:
    """Record the channels that this process opens from here on."""
    channels: list[GroupChannel] = []
    made = GroupChannel.__init__

    def noted(self: GroupChannel, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        channels.append(self)

    cast(Any, GroupChannel).__init__ = noted
    return channels


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give(pipe: Pipe, number: int) -> None:
    """Publish rows, version by version.

    Messages are (version, bucket to die before, box with a flipped bit). After the receivers have
    finished, a message names a killed rank.
    """
    channels, publisher, fill = (
        counted(),
        WeightPublisher(bucket_bytes=BUCKET_BYTES, transport="gloo"),
        _Transfer._fill,
    )
    send = GroupChannel.send_elements
    while True:
        version, last, wrong = pipe.recv()
        boxes = itertools.count()

        def send_wrongly(
            self: GroupChannel, content: Any, wrong: int | None = wrong, boxes: Any = boxes
        ) -> None:
            changed = content.clone()
            if next(boxes) == wrong:
                changed[len(changed) // 2] ^= 1
            send(self, changed)

        if wrong is not None:
            cast(Any, GroupChannel).send_elements = send_wrongly

        def fill_or_die(self: _Transfer, number: int, slot: int, last: int | None = last) -> int:
            if self.entries[number].bucket == last:
                die()
            return fill(self, number, slot)

        _Transfer._fill = fill_or_die
        channels.clear()
        parts: list[TensorPart] = []
        for name, tensor in tensors(version).items():
            box = share(SHAPES[name], 0, number)
            parts.append(TensorPart(name, SHAPES[name], box, tensor[box.slices]))
        pipe.send(publisher.publish(parts, version, ["left", "right"]))
        killed, deadline = pipe.recv(), time.monotonic() + 30
        while killed and killed not in publisher.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        lost = dict(publisher.lost)
        pipe.send((publisher.finish(), [channel.num_bytes for channel in channels], lost))


def take(pipe: Pipe, number: int) -> None:
    """Receive columns, version by version.

    Messages are (record, number of copies to die after). Answers are the checksum, correctness,
    bytes per channel, and for each tensor the received and the published sum.
    """
    channels = counted()
    while True:
        weights, last = pipe.recv()
        channels.clear()
        whole = tensors(weights.version)
        parts: list[TensorPart] = []
        sums: list[tuple[int, int]] = []
        for name, shape in SHAPES.items():
            box = share(shape, 1, number)
            parts.append(TensorPart(name, shape, box, torch.zeros(box.shape)))
        try:
            with IncomingWeights(weights.to(("left", "right")[number])) as incoming:
                if last is not None:
                    slices = incoming.slices

                    def until(copies: Any, last: int = last, slices: Any = slices) -> Any:
                        for count, found in enumerate(slices(copies)):
                            if count == last:
                                die()
                            yield found

                    incoming.slices = until
                checksum = receive_parts(
                    incoming, parts, None, partial(_published, incoming, parts, sums)
                )
            right = all(torch.equal(part.tensor, whole[part.name][part.box.slices]) for part in parts)
            pipe.send((checksum, right, [channel.num_bytes for channel in channels], sums))
        except WeightSyncError as error:
            pipe.send(str(error))


def _published(
    incoming: IncomingWeights, parts: list[TensorPart], sums: list[tuple[int, int]], own: np.ndarray
) -> np.ndarray:
    """Return local sums: this receiver has no group, so the test adds them up."""
    published = np.array([incoming.published_sum(part.name) for part in parts], np.uint64)
    sums += zip(own.view(np.uint64).tolist(), published.tolist(), strict=True)
    return published.view(np.int64)
