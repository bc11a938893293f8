"""Sides of a transfer that kill themselves after some buckets: a program for `test_deaths.py`.

python dying.py publish AFTER...     # fork a publisher per number; each prints its record, and dies after that many buckets
python dying.py receive AFTER        # read a record from standard input, take that many buckets, and die
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from typing import Any

BUCKET_BYTES = 4096


def tensors() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    return {"a": torch.randn(40, 64), "b": torch.randn(1000), "c": torch.tensor(1.5)}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def publish(after: int) -> None:
    from weft.resharding import transfer
    from weft.resharding.mapped_memory import SharedMemory
    from weft.resharding.publisher import WeightPublisher
    from weft.resharding.weights import whole

    given = tensors()
    memory = SharedMemory(given["a"].nbytes)
    given["a"] = memory.empty(given["a"].shape, given["a"].dtype).copy_(
        given["a"]
    )  # read in place; the others are copied

    fill = transfer.Transfer._fill

    def fill_or_die(self: Any, number: int, slot: int) -> Any:
        if self.entries[number].bucket == after:
            die()
        return fill(self, number, slot)

    transfer.Transfer._fill = fill_or_die
    weights = WeightPublisher(bucket_bytes=BUCKET_BYTES).publish(whole(given), 3)
    os.write(
        1, json.dumps(dataclasses.asdict(weights)).encode() + b"\n"
    )  # one write: others share the pipe
    signal.pause()


def receive(after: int) -> None:
    # Without torch: only the protocol matters.
    from weft.resharding.connection import Connection

    weights = json.loads(sys.stdin.readline())
    (rank,) = weights["ranks"]
    connection = Connection.connect(rank["host"] or "127.0.0.1", rank["port"], rank["token"])
    hello = {
        "version": weights["version"],
        "receiver": f"mortal[{after}]",
        "part": 0,
        "parts": 1,
        "known": "",
        "process": str(os.getpid()),
        "groups": [],
        "machine": "",
    }
    connection.send(b"H", json.dumps(hello).encode())
    connection.receive()
    connection.receive()
    connection.send(b"W")
    for _ in range(after):
        connection.receive()
        connection.send(b"T")
    connection.receive()
    die()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    import torch as torch  # once, for all of them

    children: list[int] = []
    for after in sys.argv[2:]:
        if not (child := os.fork()):
            publish(int(after))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
