"""Connection: messages between a publisher of weights and a receiver, over TCP.

    receiver                                         publisher
    connects                        <── nonce ──     listens
    HMAC of the nonce, own nonce    ── proof ──>     checks it; whoever has not the token is cut off
    checks it                       <── proof ──     HMAC of the receiver's nonce

Then both send messages: a letter, a length, and bytes. The token travels in the record of the weights, which only the driver and its
ranks see. Weights themselves travel in the clear, as they do with gloo and NCCL: the network of a run has to be one that strangers do
not reach.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from ..dataflow.errors import WeightSyncError
from .weights import LOOPBACK

SILENCE_S = 60.0
"""Longest time that either side waits for the other's next message, where little is to be sent."""

SLOWEST_BYTES_PER_S = 100e6
"""At least so much of a version is dealt with in a second: what a side does between two messages (packing a layer of experts, preparing
the whole model at the end) takes longer with a large one."""

_HEADER = struct.Struct("<cq")
MOST_BYTES = 256 << 20
"""Largest message. A description of a million boxes takes half of it. Weights are not sent as messages."""
SMALL_BYTES = 64 << 10
"""Largest greeting, challenge or acknowledgement."""
_PIECE_BYTES = 1 << 20
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def this_machine() -> str:
    """Identifies the kernel and the namespace of processes: where they are equal, one process can map what another one published.

    >>> this_machine() == this_machine()
    True
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def listen(host: str) -> socket.socket:
    """A socket that listens at a free port of this machine.

    Args:
        host: an address of this machine, IPv4 or IPv6; empty: LOOPBACK.

    Raises:
        WeightSyncError: this machine does not have that address.
    """
    address = host or LOOPBACK
    try:
        return socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
    except OSError as error:
        raise WeightSyncError(
            f"weights cannot be given away at {address}: {error.strerror or error}; "
            "receivers on other machines need an address of this one"
        ) from None


class Connection:
    """One side of an open connection whose two sides know each other's token. Made by `connect` and `accept`.

    All methods raise `OSError` when the other side is gone, and `TimeoutError` when it was silent for `silence_s`.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.silence_s = SILENCE_S
        """Longest time that this side waits for the other's next message."""
        connected.settimeout(SILENCE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Connection:
        """Connect to a publisher.

        Raises:
            OSError: it is not there, is silent, or does not have the token.
        """
        connection = cls(socket.create_connection((host, port), SILENCE_S))
        try:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            proof = _proof(token, b"receiver", connection._receive(_NONCE_BYTES))
            connection._socket.sendall(proof + nonce)
            if not hmac.compare_digest(
                connection._receive(_PROOF_BYTES), _proof(token, b"publisher", nonce)
            ):
                raise ConnectionRefusedError("whoever answers does not have the token of these weights")
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def accept(cls, connected: socket.socket, token: str) -> Connection:
        """Let a receiver in.

        Raises:
            OSError: it is silent, or does not have the token. The socket is closed.
        """
        connection = cls(connected)
        try:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connected.sendall(nonce)
            proof, other = connection._receive(_PROOF_BYTES), connection._receive(_NONCE_BYTES)
            if not hmac.compare_digest(proof, _proof(token, b"receiver", nonce)):
                raise ConnectionRefusedError("the receiver does not have the token of these weights")
            connected.sendall(_proof(token, b"publisher", other))
        except BaseException:
            connection.close()
            raise
        return connection

    def expect(self, num_bytes: int) -> None:
        """A version of so many bytes is to be sent: be as patient as that takes."""
        self.be_patient(SILENCE_S + num_bytes / SLOWEST_BYTES_PER_S)

    def be_patient(self, silence_s: float) -> None:
        """Wait so long for the other side's next message."""
        self.silence_s = silence_s
        self._socket.settimeout(silence_s)

    @property
    def own_address(self) -> str:
        """Address of this side, at which the other side reaches it."""
        return self._socket.getsockname()[0]

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message.

        Args:
            kind: one letter.
        """
        self._socket.sendall(_HEADER.pack(kind, len(content)) + content)

    def receive(self, most_bytes: int = MOST_BYTES) -> tuple[bytes, bytes]:
        """The next message: its letter, and its content.

        Raises:
            OSError: its content is larger than `most_bytes`, besides the reasons above.
        """
        kind, length = _HEADER.unpack(self._receive(_HEADER.size))
        if not 0 <= length <= most_bytes:
            raise ConnectionAbortedError(
                f"the other side announced a message of {length} bytes; at most {most_bytes} are accepted"
            )
        return kind, self._receive(length)

    def send_bytes(self, content: Any) -> None:
        """Send bytes of which the other side knows how many they are."""
        self._socket.sendall(content)

    def receive_into(self, target: memoryview) -> None:
        """Fill a memory with the next bytes."""
        while target:
            received = self._socket.recv_into(target)
            if not received:
                raise ConnectionResetError("the other side ended the connection")
            target = target[received:]

    def hang_up(self) -> None:
        """End the connection; whoever waits for the other side on another thread is given an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytes:
        content = bytearray()
        while (
            len(content) < num_bytes
        ):  # allocate for the bytes that arrive, not for the announced number
            piece = bytearray(min(num_bytes - len(content), _PIECE_BYTES))
            self.receive_into(memoryview(piece))
            content += piece
        return bytes(content)


def _proof(token: str, whose: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), whose + nonce, "sha256")


# Channel
#
# Channel: how the elements of boxes travel to a receiver that does not map the publisher's memory.
#
# transport   buckets lie      the bytes go
# auto        on the host      over the connection that messages go over, to another machine (on one machine the memory is mapped)
# gloo        on the host      from rank 0 to rank 1 of a process group of torch.distributed, wherever the receiver is
# nccl        on the device    the same, from device to device
# ipc         on the device    nowhere: receivers map the device's memory
#
# By vLLM's own backends, "vllm:nccl" and "vllm:ipc", whole tensors travel, and none of this is
# used (`vllm_publisher.py`).


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


# Group channel
#
# GroupChannel: bytes between two ranks of torch.distributed, by gloo from host to host, by NCCL
# from device to device.
#
# The ranks meet over their connection, which knows the token: no store of torch listens anywhere.
# Neither gloo nor NCCL checks who connects to it, at a port that only the other side is told of.


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
                raise ConnectionResetError(
                    content.decode(errors="replace") or "the other side has given up"
                )
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
        raise ConnectionResetError(
            f"the group: {said.partition('] ')[2].partition('. ')[0] or said}"
        ) from None
