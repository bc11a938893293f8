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

import base64
import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

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


# Transports: how elements reach the receivers.
#
# transport   buckets          how receivers get the bytes
# auto        on the host      by mapping them (same machine) or over the message connection
# gloo        on the host      through a process group of two ranks, even on the same machine
# nccl        on the device    through a process group of two ranks, from device to device
# ipc         on the device    by mapping the device's memory
#
# vLLM's own backends, "vllm:nccl" and "vllm:ipc", send whole tensors (`vllm_publisher.py`).


Transport = Literal["auto", "gloo", "nccl", "ipc"]


# GroupChannel: bytes between two torch.distributed ranks, from host to host with gloo, from device
# to device with NCCL.
#
# The ranks set up the group over their authenticated connection, so no torch store has to listen.
# gloo and NCCL do not authenticate peers, but only the other side learns the port.


_LOOK_S = 0.0002
"""[s] Polling interval of `_await`."""
_AGAIN_S = 0.05
"""[s] Pause after a failed `accept`."""


class GroupChannel:
    """One side of a process group of two ranks. It sends uint8 tensors, whose lengths both sides
    know, from rank 0 to rank 1. It first copies them to `device` ("cpu" for gloo, CUDA for NCCL).
    Nothing else may use the connection during setup. Raises OSError if the other side is gone or
    does not answer."""

    def __init__(self, connection: Connection, rank: int, device: torch.device) -> None:
        self.num_bytes = 0
        self._other = 1 - rank
        self._device = device
        self._connection = connection
        meeting = _Meeting(connection)
        with _as_os_errors():
            self._group: Any = (
                _gloo(meeting, connection, rank)
                if device.type == "cpu"
                else _nccl(meeting, rank, device)
            )
            if device.type != "cpu":
                self._greet(rank)  # NCCL connects with the first transfer
        meeting.stop_sending()

    def send_elements(self, content: torch.Tensor) -> None:
        self.num_bytes += len(content)
        with _as_os_errors():
            self._await(self._group.send([content.to(self._device)], self._other, 0))

    def receive_elements(self, target: torch.Tensor) -> None:
        self.num_bytes += len(target)
        own = target if target.device == self._device else torch.empty_like(target, device=self._device)
        with _as_os_errors():
            self._await(self._group.recv([own], self._other, 0))
        if own is not target:
            target.copy_(own)

    def hang_up(self) -> None:
        """End the group and its connection. Threads that wait for the other side get an error."""
        self.close()
        self._connection.hang_up()

    def close(self) -> None:
        """End the group. A side that waits for the other gets an error."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _greet(self, rank: int) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._await((self._group.recv if rank else self._group.send)([byte], self._other, 0))

    def _await(self, work: Any) -> None:
        """Wait for the transfer. NCCL's own `wait` blocks only the device, and has no timeout."""
        silence_s = self._connection.silence_s
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=silence_s))
            return
        deadline = time.monotonic() + silence_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"NCCL moved nothing for {silence_s:.0f} s")
            time.sleep(_LOOK_S)
        work.wait()  # order the device's current stream after it; raise its errors


def _gloo(meeting: _Meeting, connection: Connection, rank: int) -> Any:
    options: Any = cast(Any, ProcessGroupGloo)._Options()
    # Listen only at the address that this connection already uses.
    options._devices = [ProcessGroupGloo.create_device(hostname=connection.own_address)]
    options._timeout = timedelta(seconds=connection.silence_s)
    options._threads = 1
    return ProcessGroupGloo(meeting, rank, 2, options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _nccl(meeting: _Meeting, rank: int, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in torch builds without CUDA

    with torch.cuda.device(device):
        return ProcessGroupNCCL(meeting, rank, 2, ProcessGroupNCCL.Options())


class _Meeting(TorchStore):
    """A torch store over a connection, through which two ranks exchange their addresses."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._known: dict[str, bytes] = {}
        self._has_ended = False

    def stop_sending(self) -> None:
        """Stop sending once the ranks are connected. NCCL's watchdog continues to use the store."""
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
    try:
        yield
    except RuntimeError as error:
        # torch raises one class for timeouts and lost connections; only the text tells them apart.
        said = str(error)
        if "imed out" in said or "timeout" in said.lower():
            raise TimeoutError(said.partition("\n")[0]) from None
        raise ConnectionResetError(
            f"the group: {said.partition('] ')[2].partition('. ')[0] or said}"
        ) from None
