"""Channel: how the elements of boxes travel to a receiver that does not map the publisher's memory.

transport   buckets lie      the bytes go
auto        on the host      over the connection that messages go over, to another machine (on one machine the memory is mapped)
gloo        on the host      from rank 0 to rank 1 of a process group of torch.distributed, wherever the receiver is
nccl        on the device    the same, from device to device
ipc         on the device    nowhere: receivers map the device's memory

By vLLM's own backends, "vllm:nccl" and "vllm:ipc", whole tensors travel, and none of this is used (`vllm_publisher.py`).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from .connection import Connection

Transport = Literal["auto", "gloo", "nccl", "ipc"]


class Channel(Protocol):
    """Carries bytes of which both sides know how many they are. Its methods raise `OSError` when the other side is gone or silent."""

    def send(self, content: torch.Tensor) -> None:
        """Send bytes.

        Args:
            content: [bytes] uint8, contiguous, on any device.
        """
        ...

    def receive_into(self, target: torch.Tensor) -> None:
        """Fill a memory with the next bytes.

        Args:
            target: [bytes] uint8, contiguous, on any device.
        """
        ...

    def close(self) -> None:
        """Free what it has beside the connection; whoever waits on another thread is given an error."""
        ...


class Stream:
    """Bytes over the connection itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, content: torch.Tensor) -> None:
        """Send bytes from host memory."""
        self._connection.send_bytes(content.numpy())

    def receive_into(self, target: torch.Tensor) -> None:
        """Fill host memory."""
        own_bytes: Any = target.numpy()
        self._connection.receive_into(memoryview(own_bytes))

    def close(self) -> None:
        """It has nothing beside the connection."""
