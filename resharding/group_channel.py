"""GroupChannel: bytes between two ranks of torch.distributed, by gloo from host to host, by NCCL from device to device.

The ranks meet over their connection, which knows the token: no store of torch listens anywhere. Neither gloo nor NCCL checks who connects
to it, at a port that only the other side is told of.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from .connection import Connection

_LOOK_S = 0.0002
"""How often a device is asked whether it is through."""


class GroupChannel:
    """One side of a process group of two.

    Args:
        connection: to the other side; nobody else uses it while the two meet.
        rank: 0 of who sends, 1 of who receives.
        device: on which both sides have what travels: "cpu" for gloo, a CUDA device for NCCL. What lies elsewhere is copied there first.

    Raises:
        OSError: the other side is gone, or was silent.
    """

    def __init__(self, connection: Connection, rank: int, device: torch.device) -> None:
        self.num_bytes = 0
        """That were handed to the group, or taken from it."""
        self._other = 1 - rank
        self._device = device
        self._connection = connection
        meeting = _Meeting(connection)
        with _as_os_errors():
            self._group: Any = (
                _gloo(meeting, connection, rank) if device.type == "cpu" else _nccl(meeting, rank, device)
            )
            if device.type != "cpu":
                self._greet(rank)  # NCCL connects with the first bytes
        meeting.end()

    def send(self, content: torch.Tensor) -> None:
        """Send bytes."""
        self.num_bytes += len(content)
        with _as_os_errors():
            self._await(self._group.send([content.to(self._device)], self._other, 0))

    def receive_into(self, target: torch.Tensor) -> None:
        """Fill a memory with the next bytes."""
        self.num_bytes += len(target)
        own = target if target.device == self._device else torch.empty_like(target, device=self._device)
        with _as_os_errors():
            self._await(self._group.recv([own], self._other, 0))
        if own is not target:
            target.copy_(own)

    def close(self) -> None:
        """End the group; whoever waits for the other side on another thread, and the other side, are given an error."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _greet(self, rank: int) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._await((self._group.recv if rank else self._group.send)([byte], self._other, 0))

    def _await(self, work: Any) -> None:
        """Wait until bytes are sent, or there. NCCL's own `wait` only has the device wait, with no end to it."""
        silence_s = self._connection.silence_s
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=silence_s))
            return
        deadline = time.monotonic() + silence_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"NCCL moved nothing for {silence_s:.0f} s")
            time.sleep(_LOOK_S)
        work.wait()  # the device's present stream goes on after it; an error is raised here


def _gloo(meeting: _Meeting, connection: Connection, rank: int) -> Any:
    options: Any = cast(Any, ProcessGroupGloo)._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=connection.own_address)]
    options._timeout = timedelta(seconds=connection.silence_s)
    options._threads = 1
    return ProcessGroupGloo(meeting, rank, 2, options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _nccl(meeting: _Meeting, rank: int, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL  # torch has it where it was built for CUDA

    with torch.cuda.device(device):
        return ProcessGroupNCCL(meeting, rank, 2, ProcessGroupNCCL.Options())


class _Meeting(TorchStore):
    """What the ranks of a group tell each other before they are connected: torch's store, over a connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._known: dict[str, bytes] = {}
        self._has_ended = False

    def end(self) -> None:
        """The ranks are connected: nothing is told any more, though NCCL's watchdog goes on using its store."""
        self._has_ended = True

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._known[key] = bytes(value)
        if not self._has_ended:
            said = {"key": key, "value": base64.b64encode(value).decode()}
            self._connection.send(b"G", json.dumps(said).encode())

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        while key not in self._known:
            if self._has_ended:
                raise KeyError(key)
            kind, content = self._connection.receive()
            if kind != b"G":
                raise ConnectionResetError(content.decode(errors="replace") or "the other side has given up")
            said = json.loads(content)
            self._known[said["key"]] = base64.b64decode(said["value"])
        return self._known[key]

    def check(self, keys: list[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for key in keys:
            self.get(key)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Errors of gloo and NCCL as those of a connection."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "imed out" in said or "timeout" in said.lower():
            raise TimeoutError(said.partition("\n")[0]) from None
        raise ConnectionResetError(f"the group: {said.partition('] ')[2].partition('. ')[0] or said}") from None
