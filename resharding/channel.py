"""Channel: how the elements of boxes travel to a receiver that does not map the publisher's memory.

    transport   the bytes go
    auto        over the connection that messages go over, to another machine (on one machine the memory is mapped)
    gloo        from rank 0 to rank 1 of a process group of torch.distributed, point to point, wherever the receiver is

The two ranks of such a group meet over their connection, which knows the token: no store of torch listens anywhere. Gloo itself checks
nobody who connects to it, at a port that only the other side is told of.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from .connection import Connection

Transport = Literal["auto", "gloo"]


class Channel(Protocol):
    """Carries bytes of which both sides know how many they are. Its methods raise `OSError` when the other side is gone or silent."""

    def send_bytes(self, content: Any) -> None:
        """Send the bytes of a writable buffer."""
        ...

    def receive_into(self, target: memoryview) -> None:
        """Fill a memory with the next bytes."""
        ...


class GlooChannel:
    """One side of a process group of two.

    Args:
        connection: to the other side; nobody else uses it while the two meet.
        rank: 0 of who sends, 1 of who receives.

    Raises:
        OSError: the other side is gone, or was silent.
    """

    def __init__(self, connection: Connection, rank: int) -> None:
        self.num_bytes = 0
        """That were handed to gloo, or taken from it."""
        self._other = 1 - rank
        options: Any = cast(Any, ProcessGroupGloo)._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=connection.own_address)]
        options._timeout = timedelta(seconds=connection.silence_s)
        options._threads = 1
        with _as_os_errors():
            self._group: Any = ProcessGroupGloo(_Meeting(connection), rank, 2, options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def send_bytes(self, content: Any) -> None:
        """Send the bytes of a writable buffer."""
        with _as_os_errors():
            self._group.send([self._elements(content)], self._other, 0).wait()

    def receive_into(self, target: memoryview) -> None:
        """Fill a memory with the next bytes."""
        with _as_os_errors():
            self._group.recv([self._elements(target)], self._other, 0).wait()

    def close(self) -> None:
        """End the group; whoever waits for the other side on another thread, and the other side, are given an error."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _elements(self, content: Any) -> torch.Tensor:
        self.num_bytes += len(content)
        return torch.frombuffer(content, dtype=torch.uint8)


class _Meeting(TorchStore):
    """What the ranks of a group tell each other before they are connected: torch's store, over a connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._known[key] = bytes(value)
        said = {"key": key, "value": base64.b64encode(value).decode()}
        self._connection.send(b"G", json.dumps(said).encode())

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        while key not in self._known:
            kind, content = self._connection.receive()
            if kind != b"G":
                raise ConnectionResetError(content.decode(errors="replace") or "the other side has given up")
            said = json.loads(content)
            self._known[said["key"]] = base64.b64decode(said["value"])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for key in keys:
            self.get(key)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Errors of gloo as those of a connection."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "imed out" in said or "timeout" in said.lower():
            raise TimeoutError(said.partition("\n")[0]) from None
        raise ConnectionResetError(f"gloo: {said.partition('] ')[2].partition('. ')[0] or said}") from None
