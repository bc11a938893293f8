"""Connection: authenticated messages between a weight publisher and a receiver, over TCP.

    receiver                                         publisher
    connects                        <── nonce ──     listens
    HMAC of the nonce, own nonce    ── proof ──>     checks it; closes the connection if it is wrong
    checks it                       <── proof ──     HMAC of the receiver's nonce

After that, both sides send messages: a letter, a length, and bytes. The token is part of the
`Weights` record, which only the driver and its ranks see. As with gloo and NCCL, weights are not
encrypted, so a run needs a private network.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from ..dataflow.errors import WeightSyncError
from .weights import LOOPBACK, RankWeights

SILENCE_S = 60.0
"""[s] Longest wait for the next message. `expect` extends it for a large version."""

SLOWEST_BYTES_PER_S = 100e6
"""[bytes/s] Slowest rate at which a side may process a version between two messages."""

_HEADER = struct.Struct("<cq")
MOST_BYTES = 256 << 20
"""[bytes] Largest message. A description of a million boxes takes half of this."""
SMALL_BYTES = 64 << 10
"""[bytes] Largest greeting, challenge or acknowledgement."""
_PIECE_BYTES = 1 << 20
_AGAIN_S = 0.05
"""[s] Pause after a failed `accept`."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def this_machine() -> str:
    """Return an identifier of this kernel and PID namespace. Processes with equal identifiers can
    map each other's memory."""
    # Processes map memory as /proc/PID/fd/N; a PID is only valid in its namespace.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def listen(host: str) -> socket.socket:
    """Return a socket on a free port of `host`, an IPv4 or IPv6 address of this machine (LOOPBACK
    if empty). Raises WeightSyncError if this machine does not have the address."""
    address = host or LOOPBACK
    try:
        return socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
    except OSError as error:
        raise WeightSyncError(
            f"cannot listen for weight receivers at {address}: {error.strerror or error}; "
            "the host must be an address of this machine"
        ) from None


class Connection:
    """One side of an authenticated connection. All methods raise `OSError` if the other side is
    gone, and `TimeoutError` if it sends nothing for `silence_s`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.silence_s = SILENCE_S
        connected.settimeout(SILENCE_S)
        # Without this, small messages wait for the acknowledgement of earlier ones.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Connection:
        """Connect to a publisher. Raises OSError if it is gone, is silent, or lacks the token."""
        connection = cls(socket.create_connection((host, port), SILENCE_S))
        try:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            proof = _proof(token, b"receiver", connection._receive(_NONCE_BYTES))
            connection._socket.sendall(proof + nonce)
            answer = connection._receive(_PROOF_BYTES)
            if not hmac.compare_digest(answer, _proof(token, b"publisher", nonce)):
                raise ConnectionRefusedError("the publisher does not have the token of these weights")
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def accept(cls, connected: socket.socket, token: str) -> Connection:
        """Authenticate a receiver. Closes the socket and raises OSError if the receiver does not
        answer or lacks the token."""
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
        """Extend the timeout for a version of this size."""
        self.set_silence(SILENCE_S + num_bytes / SLOWEST_BYTES_PER_S)

    def set_silence(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._socket.settimeout(silence_s)

    @property
    def own_address(self) -> str:
        return self._socket.getsockname()[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message; `kind` is one letter."""
        self._socket.sendall(_HEADER.pack(kind, len(content)) + content)

    def receive(self, most_bytes: int = MOST_BYTES) -> tuple[bytes, bytes]:
        """Return the next message's letter and content. Raises OSError above `most_bytes`."""
        kind, length = _HEADER.unpack(self._receive(_HEADER.size))
        if not 0 <= length <= most_bytes:
            raise ConnectionAbortedError(
                f"the other side announced a message of {length} bytes; at most {most_bytes} are accepted"
            )
        return kind, self._receive(length)

    def send_elements(self, content: torch.Tensor) -> None:
        """Send bytes whose number the other side knows: a contiguous uint8 tensor on the host."""
        self._socket.sendall(cast(Any, content.numpy()))

    def receive_elements(self, target: torch.Tensor) -> None:
        """Fill `target` (a contiguous uint8 tensor on the host) with the next bytes."""
        self._receive_into(memoryview(cast(Any, target.numpy())))

    def _receive_into(self, target: memoryview) -> None:
        while target:
            received = self._socket.recv_into(target)
            if not received:
                raise ConnectionResetError("the other side ended the connection")
            target = target[received:]

    def hang_up(self) -> None:
        """End the connection. A thread that waits for the other side gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytes:
        content = bytearray()
        # The announced length is untrusted, so allocate only for bytes that have arrived.
        while len(content) < num_bytes:
            piece = bytearray(min(num_bytes - len(content), _PIECE_BYTES))
            self._receive_into(memoryview(piece))
            content += piece
        return bytes(content)


def reason(error: Exception, silence_s: float | None = None) -> str:
    """Say in words that the other side did not answer (for this long), or is gone."""
    if isinstance(error, TimeoutError):
        return "was silent" if silence_s is None else f"was silent for {silence_s:.0f} s"
    return f"is gone ({error})"


def _proof(token: str, whose: bytes, nonce: bytes) -> bytes:
    # The digest includes the side's role, so that a peer cannot send our own proof back.
    return hmac.digest(token.encode(), whose + nonce, "sha256")


class Listener:
    """An endpoint at `host` (empty for this machine only) that calls `serve` in a new thread for
    each authenticated connection. An error in `serve` ends only that connection. Raises
    WeightSyncError if this machine does not have that address."""

    def __init__(self, host: str, serve: Callable[[Connection], None]) -> None:
        self.token = secrets.token_hex(32)
        self._host = host
        self._serve = serve
        self._socket = listen(host)
        self._is_closed = False
        threading.Thread(target=self._accept, name="weft-weights", daemon=True).start()

    @property
    def endpoint(self) -> RankWeights:
        return RankWeights(self._host, self._socket.getsockname()[1], this_machine(), self.token)

    def close(self) -> None:
        """Stop listening. Open connections continue."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, _ = self._socket.accept()
            except OSError:  # closed, the client hung up, or too many files are open
                time.sleep(0 if self._is_closed else _AGAIN_S)
                continue
            threading.Thread(
                target=self._greet, args=(connected,), name="weft-weights", daemon=True
            ).start()

    def _greet(self, connected: socket.socket) -> None:
        # A client that dies or misbehaves loses only its own connection.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._serve(Connection.accept(connected, self.token))
