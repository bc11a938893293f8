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

import contextlib
import hmac
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

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
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
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
            if not hmac.compare_digest(connection._receive(_PROOF_BYTES), _proof(token, b"publisher", nonce)):
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
        while len(content) < num_bytes:  # allocate for the bytes that arrive, not for the announced number
            piece = bytearray(min(num_bytes - len(content), _PIECE_BYTES))
            self.receive_into(memoryview(piece))
            content += piece
        return bytes(content)


def _proof(token: str, whose: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), whose + nonce, "sha256")
