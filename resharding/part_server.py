"""Published weights for receivers on other machines: the publisher's process serves its memory over TCP.

    receiver                                         publisher
    connects                        <── nonce ──     listens on the address of its node
    HMAC of the nonce, own nonce    ── proof ──>     checks it; whoever has not the token is cut off
    checks it                       <── proof ──     HMAC of the receiver's nonce
    asks for the table, and for all that it takes, in the order in which it takes it
                                    <── bytes ──     sends them one after another

So a transfer is one stream, the connection holds back a publisher that is faster than its receiver, and neither needs memory beyond
what it has. The token of a publisher travels in the record of its weights, which only the driver and its ranks see. Weights
themselves travel in the clear, as they do with gloo and NCCL: the network of a run has to be one that strangers do not reach.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ..dataflow.errors import WeightSyncError
from .box import Box

SILENCE_S = 60.0
"""Longest time that a receiver waits for a byte."""

PATIENCE_S = 600.0
"""Longest time that a publisher waits for a receiver to take what it asked for: it may be taking other publishers' parts before."""

_LENGTH = struct.Struct("<q")
_NONCE_BYTES = 32


def this_machine() -> str:
    """Identifies the kernel and the namespace of processes: where they are equal, one process can map what another one published.

    >>> this_machine() == this_machine()
    True
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


class PartServer:
    """Serves the published parts of one rank, until it is closed.

    Args:
        host: address of this machine at which receivers reach it.
        token: the secret that receivers must have.
        describe: gives the version, the table of sums and the description of the parts.
        part: gives the elements of a box of the part of this number.
    """

    def __init__(
        self,
        host: str,
        token: str,
        describe: Callable[[], tuple[bytes, bytes]],
        part: Callable[[int, Box], torch.Tensor],
    ) -> None:
        self._token, self._describe, self._part = token, describe, part
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        threading.Thread(target=self._accept, name="weft-weights", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._listener.getsockname()[:2]

    def hang_up(self, timeout_s: float = 10.0) -> None:
        """End the transfers that are under way, since the memory is about to change. Their receivers are given an error.

        Raises:
            WeightSyncError: a transfer did not end in time.
        """
        with self._lock:
            transfers = list(self._open.items())
        for connection, thread in transfers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(timeout_s)
            if thread.is_alive():
                raise WeightSyncError(f"a transfer of weights to {connection} did not end within {timeout_s:.0f} s")

    def close(self) -> None:
        """End what is under way, and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(WeightSyncError):
            self.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(connection,), name="weft-weights", daemon=True)
            with self._lock:
                self._open[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # A receiver that dies, or strays, costs its own connection and nothing else.
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError), connection:
                connection.settimeout(PATIENCE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._let_in(connection)
                for content in self._describe():
                    _send(connection, content)
                while request := _receive_message(connection):
                    for number, starts, stops in json.loads(request):
                        elements = self._part(number, Box(tuple(starts), tuple(stops)))
                        connection.sendall(_bytes_of(elements.contiguous()))
                        del elements
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def _let_in(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        proof, other = _receive(connection, 32), _receive(connection, _NONCE_BYTES)
        if not hmac.compare_digest(proof, _proof(self._token, b"receiver", nonce)):
            raise ConnectionRefusedError("the receiver does not have the token of these weights")
        connection.sendall(_proof(self._token, b"publisher", other))


class PartStream:
    """A receiver's connection to one publisher.

    Args:
        host: of the publisher.
        port: of the publisher.
        token: of the publisher.

    Raises:
        OSError: the publisher is not there, is silent, or does not have the token.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._connection = socket.create_connection((host, port), SILENCE_S)
        self._buffer = bytearray()
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prove(token)
            self.table = _receive_message(self._connection)
            """Version and sum of each part, 8 bytes each."""
            self.description = _receive_message(self._connection)
            """Of the parts, as JSON."""
        except BaseException:
            self._connection.close()
            raise

    def _prove(self, token: str) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._connection.sendall(_proof(token, b"receiver", _receive(self._connection, _NONCE_BYTES)) + nonce)
        if not hmac.compare_digest(_receive(self._connection, 32), _proof(token, b"publisher", nonce)):
            raise ConnectionRefusedError("whoever answers does not have the token of these weights")

    def ask(self, parts: Iterable[tuple[int, Box]]) -> None:
        """Ask for parts: number, and box within the tensor. They come in this order; `receive` takes them."""
        _send(self._connection, json.dumps([[number, box.starts, box.stops] for number, box in parts]).encode())

    def receive(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The elements of the next box. They are valid until the next `receive`."""
        num_bytes = box.numel * dtype.itemsize
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        _receive_into(self._connection, memoryview(self._buffer)[:num_bytes])
        return torch.frombuffer(self._buffer, dtype=dtype, count=box.numel).reshape(box.shape)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _proof(token: str, whose: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), whose + nonce, "sha256")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive_message(connection: socket.socket) -> bytes:
    """The next message; empty when the other side has ended the connection."""
    try:
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    except ConnectionResetError:
        return b""
    return _receive(connection, length)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    _receive_into(connection, memoryview(content))
    return bytes(content)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        received = connection.recv_into(target)
        if not received:
            raise ConnectionResetError("the other side ended the connection")
        target = target[received:]
