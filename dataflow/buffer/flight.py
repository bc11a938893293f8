"""Segment transfer between nodes over Arrow Flight. `SegmentServer` serves a node's segments, and
`_SegmentClient` fetches them.

A server sends the schema of a message, then the message in pieces of opaque bytes. Tickets and
actions are JSON. Every call must carry the run's token, and a server only gives access to the
segment files of one folder. Between hosts, TLS encrypts everything. Each server creates its own
certificate, the only one that its clients trust.
"""

from __future__ import annotations

import datetime
import fcntl
import hmac
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.flight as pf

from ..errors import DamagedSegment, UserError, nearest
from ..runs.files import make_folder
from .segments import (
    END_OF_STREAM,
    FILE,
    Segment,
    SegmentReader,
    delete_local,
    full_disk_named,
    verify_segment,
    write_all,
)

# Certificate

NAME = "weft"
"""Host name in every certificate. Clients trust the certificate, not the name."""
VALID = datetime.timedelta(days=3650)
EARLIER = datetime.timedelta(days=1)
"""Backdating of certificates, because the clocks of nodes may differ."""


@dataclass(frozen=True)
class Certificate:
    """A server's certificate and private key (PEM). The key never leaves the process."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "<Certificate with its key>"


def make_certificate() -> Certificate:
    """Create a self-signed certificate with a P-256 key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return Certificate(made.public_bytes(pem), secret)


# Flight

PIECE_BYTES = 16 << 20
PIECES = pa.schema([("bytes", pa.large_binary())])
DAMAGED = b"damaged"


class SegmentServer(pf.FlightServerBase):
    """Serves the messages in one node's folder to other nodes, and deletes files on request.

    Args:
        folder: the node's folder, which also contains copies of other nodes' messages.
        node: name of the node.
        host: address to listen on. Only this machine can reach the default.
        token: the secret that every caller must send.
        certificate: certificate for TLS. None disables encryption, for use on a single machine.

    Raises:
        ValueError: the token is empty.
    """

    location: str

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        host: str = "127.0.0.1",
        token: str,
        certificate: Certificate | None = None,
    ) -> None:
        if not token:
            raise ValueError("SegmentServer.token is empty; set it, because it authenticates callers")
        scheme, address = ("grpc+tls" if certificate else "grpc"), f"[{host}]" if ":" in host else host
        secrets = [(certificate.certificate, certificate.key)] if certificate else None
        super().__init__(
            f"{scheme}://{address}:0", tls_certificates=secrets, middleware={"token": _TokenGate(token)}
        )
        self.location = f"{scheme}://{address}:{self.port}"
        self.folder, self.node = folder, node
        self._reader = SegmentReader(folder, node)

    def do_get(self, context: Any, ticket: pf.Ticket) -> pf.FlightDataStream:
        segment = Segment.from_json(json.loads(ticket.ticket))
        _check(segment.node, segment.file)
        if segment.node != self.node:
            raise pf.FlightServerError(f"this is node {self.node!r}, not {segment.node!r}")
        try:
            message, schema = self._reader.message(segment)
        except DamagedSegment as error:
            raise pf.FlightInternalError(str(error), DAMAGED) from None
        # Pieces limit the size of each gRPC message.
        starts = range(0, message.size, PIECE_BYTES)
        pieces = [schema.serialize()]
        pieces += [message.slice(i, min(PIECE_BYTES, message.size - i)) for i in starts]
        return pf.GeneratorStream(PIECES, map(_row, pieces))

    def do_action(self, context: Any, action: pf.Action) -> list[bytes]:
        match action.type:
            case "delete":
                self._delete(json.loads(action.body.to_pybytes()))
                return []
            case "verify":
                segments = list(map(Segment.from_json, json.loads(action.body.to_pybytes())))
                return list(map(self._verify, segments))
            case _:
                known = "the actions 'delete' and 'verify'"
                raise pf.FlightServerError(f"a segment server knows {known}, not {action.type!r}")

    def _verify(self, segment: Segment) -> bytes:
        _check(segment.node, segment.file)
        try:
            verify_segment(self.folder, segment)
        except DamagedSegment as error:
            return str(error).encode()
        return b""

    def _delete(self, files: Sequence[tuple[str, str]]) -> None:
        # An invalid request must delete nothing.
        for node, file in files:
            _check(node, file)
        failed: OSError | None = None
        for node, file in files:
            try:
                delete_local(self.folder, self.node, node, file)
            except OSError as error:  # still delete the other files
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Finish the current calls, then stop listening."""
        self.shutdown()
        self._reader.close()


class _SegmentClient:
    """A channel to the segment server of one node.

    Args:
        location: address of the server.
        token: token of the run.
        certificate: the server's certificate (PEM), the only trusted one. None disables encryption.
        timeout_s: [s] time limit of each call. A slower call raises a TimeoutError.
    """

    def __init__(
        self, location: str, token: str, certificate: bytes | None = None, *, timeout_s: float
    ) -> None:
        self._location, self._timeout_s = location, timeout_s
        trust = {"tls_root_certs": certificate, "override_hostname": NAME} if certificate else {}
        self._client = pf.FlightClient(location, **trust)
        self._headers = [(b"authorization", f"Bearer {token}".encode())]

    def __enter__(self) -> _SegmentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, segment: Segment) -> pa.Buffer:
        """Fetch a message of the server's node, as an Arrow IPC stream.

        Raises:
            TimeoutError: the server cannot be reached, or did not answer in time.
            DamagedSegment: the server reports that the message is damaged.
            FlightUnauthenticatedError: the server has a different token.
        """
        ticket = pf.Ticket(json.dumps(segment.to_json()).encode())
        what = f"fetching file {segment.file} of node {segment.node!r} from {self._location}"
        try:
            with self._deadline(what):
                table = self._client.do_get(ticket, self._options()).read_all()
        except pf.FlightInternalError as error:
            if error.extra_info != DAMAGED:
                raise
            path = f"{self._location}/{segment.file}"
            raise DamagedSegment(segment, path, f"its node says: {error}") from None
        sink = pa.BufferOutputStream()
        for array in table.column("bytes").chunks:
            for piece in array:
                sink.write(piece.as_buffer())
        sink.write(END_OF_STREAM)
        return sink.getvalue()

    def delete(self, files: Sequence[tuple[str, str]]) -> None:
        """Delete at least one (node, file), and the server's copies of their messages."""
        (node, file), more = files[0], f" and {len(files) - 1} more" if len(files) > 1 else ""
        with self._deadline(f"deleting file {file} of node {node!r}{more} at {self._location}"):
            # Reading the results raises the server's errors.
            list(
                self._client.do_action(pf.Action("delete", json.dumps(files).encode()), self._options())
            )

    def verify(self, segments: Sequence[Segment]) -> list[str]:
        """Let the server verify its messages (at least one). Return the problem of each, or ""."""
        asked = json.dumps([segment.to_json() for segment in segments]).encode()
        what = f"verifying {len(segments)} messages of node {segments[0].node!r} at {self._location}"
        with self._deadline(what):
            results = self._client.do_action(pf.Action("verify", asked), self._options())
            return [result.body.to_pybytes().decode() for result in results]

    def close(self) -> None:
        self._client.close()

    def _options(self) -> pf.FlightCallOptions:
        return pf.FlightCallOptions(timeout=self._timeout_s, headers=self._headers)

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        """Convert Flight's timeout and connection errors to a TimeoutError about `what`."""
        try:
            yield
        except (pf.FlightTimedOutError, pf.FlightUnavailableError) as error:
            unreachable = isinstance(error, pf.FlightUnavailableError)
            reason = "cannot be reached" if unreachable else f"no answer in {self._timeout_s:.3g} s"
            raise TimeoutError(f"{what}: {reason} ({str(error).splitlines()[0][:200]})") from None


class _TokenGate(pf.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str | bytes]]) -> None:
        shown = next(
            (v for name, values in headers.items() if name.lower() == "authorization" for v in values),
            b"",
        )
        # Compare in constant time, so that timing does not reveal the token.
        if not hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self._wanted):
            raise pf.FlightUnauthenticatedError("the token is missing, or is not this run's")


def _check(node: object, file: object) -> None:
    # The names become parts of paths, so reject names of other folders.
    if not isinstance(file, str) or not FILE.fullmatch(file):
        raise pf.FlightServerError(
            f"a segment's file is named writer.stream.sequence.arrows, not {file!r}"
        )
    if not isinstance(node, str) or node in ("", ".", "..") or "/" in node or "\0" in node:
        raise pf.FlightServerError(f"a node's name is one part of a path, not {node!r}")


def _row(piece: pa.Buffer) -> pa.RecordBatch:
    """Return a one-row batch with these bytes, without a copy."""
    offsets = pa.py_buffer(np.array([0, piece.size], np.int64))
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, piece])
    return pa.RecordBatch.from_arrays([array], schema=PIECES)


# Peers

VERIFIED_AT_ONCE = 64
"""Maximum number of segments to verify per call."""


@dataclass(frozen=True)
class Peers:
    """The segment servers of a run. Pass `Peers.fetch` as the `fetch` of a `SegmentReader`."""

    locations: Mapping[str, str]
    """Maps node names to the addresses of servers."""
    token: str
    certificates: Mapping[str, bytes] = field(default_factory=dict)
    """Maps addresses to the servers' certificates (PEM). Without one, there is no encryption."""
    timeout_s: float = 60.0

    def client(self, location: str, timeout_s: float) -> _SegmentClient:
        return _SegmentClient(location, self.token, self.certificates.get(location), timeout_s=timeout_s)

    def unreadable(self, segments: Iterable[Segment]) -> dict[Segment, str]:
        """Map each segment that its node cannot read to the reason. Skips segments of nodes that
        are not peers."""
        by_node: dict[str, list[Segment]] = {}
        for segment in sorted(segments, key=lambda one: (one.file, one.offset)):
            by_node.setdefault(segment.node, []).append(segment)
        found: dict[Segment, str] = {}
        for node, own in by_node.items():
            if (location := self.locations.get(node)) is None:
                continue
            with self.client(location, self.timeout_s) as client:
                for k in range(0, len(own), VERIFIED_AT_ONCE):
                    some = own[k : k + VERIFIED_AT_ONCE]
                    try:
                        problems = client.verify(some)
                    except TimeoutError as error:  # give up: further calls may time out too
                        found |= dict.fromkeys(own[k:], str(error))
                        break
                    found |= {s: problem for s, problem in zip(some, problems, strict=True) if problem}
        return found

    def fetch(self, segment: Segment, path: Path) -> None:
        """Fetch a message of another node to `path`, as an Arrow IPC stream, unless the file
        exists. A lock ensures that only one process of this node fetches the message.

        Raises:
            UserError: the other node is not a peer.
            TimeoutError: the message did not arrive in time.
            DamagedSegment: the other node reports that the message is damaged.
        """
        if (location := self.locations.get(segment.node)) is None:
            hint = nearest(segment.node, self.locations) or f"; there are {', '.join(self.locations)}"
            who = f"segment {segment.file} is on node {segment.node!r}"
            raise UserError(f"{who}, which is not a peer{hint}")
        make_folder(path.parent)
        deadline = time.monotonic() + self.timeout_s
        what = f"fetching file {segment.file} of node {segment.node!r} from {location}"
        with open(f"{path}.lock", "wb") as lock:
            self._wait_for(lock, deadline, what)
            # Another process fetched the message meanwhile.
            if path.exists():
                return
            with self.client(location, max(deadline - time.monotonic(), 1e-3)) as client:
                stream = client.fetch(segment)
            # Readers must only see complete copies.
            part = path.with_name(f"{path.name}.part")
            who = f"the copy of a message of node {segment.node!r}"
            with full_disk_named(path.parent, who, len(stream)), open(part, "wb") as file:
                write_all(file.fileno(), [stream], 0)
            os.rename(part, path)

    def _wait_for(self, lock: BinaryIO, deadline: float, what: str) -> None:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(
                        f"{what}: another process of this node has been fetching it for {self.timeout_s} s"
                    ) from None
                time.sleep(min(0.002, left))


# Deletions

MAX_FILES = 10_000
"""Maximum number of files to remember for an unresponsive peer."""
MAX_PAUSE_S = 60.0
"""[s] Maximum pause between attempts after failures."""

logger = logging.getLogger(__name__)


class Deletions:
    """Deletes files, and copies of their messages, on all peers: the `delete_remote` of a
    `SegmentStore`. Calls return at once. A thread collects the files and sends them to each peer,
    with retries. Files that are never deleted only cost disk space.

    Args:
        timeout_s: [s] time limit of a call to a peer.
        pause_s: [s] time to collect files before a call. The pause doubles after each failure, up
            to `MAX_PAUSE_S`.
    """

    def __init__(self, peers: Peers, *, timeout_s: float = 5.0, pause_s: float = 0.2) -> None:
        self._pause_s = pause_s
        self._peers = [
            _PeerToTell(peers, location, timeout_s, pause_s) for location in peers.locations.values()
        ]
        self._files: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="deletions", daemon=True)
        self._thread.start()

    def __call__(self, node: str, file: str) -> None:
        with self._changed:
            self._files.append((node, file))
            self._changed.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Try for at most `timeout_s` to send the remaining files."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._files or self._closing, self._until_next_attempt())
                files, self._files, closing = self._files, [], self._closing
            for peer in self._peers:
                peer.files += files
                # Forgotten files only cost the peer disk space.
                del peer.files[:-MAX_FILES]
                if peer.files and (closing or peer.next_attempt <= time.monotonic()):
                    peer.tell()
            if closing:
                for peer in self._peers:
                    peer.hang_up()
                return
            time.sleep(self._pause_s)

    def _until_next_attempt(self) -> float | None:
        due = [peer.next_attempt for peer in self._peers if peer.files]
        return max(0.0, min(due) - time.monotonic()) if due else None


class _PeerToTell:
    def __init__(self, peers: Peers, location: str, timeout_s: float, pause_s: float) -> None:
        self._peers, self._location, self._timeout_s = peers, location, timeout_s
        self.files: list[tuple[str, str]] = []
        self.next_attempt = 0.0
        self._first_pause_s, self._pause_s = pause_s, pause_s
        self._client: _SegmentClient | None = None

    def tell(self) -> None:
        try:
            if self._client is None:
                self._client = self._peers.client(self._location, self._timeout_s)
            self._client.delete(self.files)
        except Exception as error:  # a failed deletion must not end the run
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self.next_attempt = time.monotonic() + self._pause_s
            logger.warning("%s; tried again in %.3g s", str(error).partition("\n")[0], self._pause_s)
            self.hang_up()
        else:
            self.files, self._pause_s = [], self._first_pause_s

    def hang_up(self) -> None:
        if self._client is not None:
            with suppress(Exception):
                self._client.close()
            self._client = None
