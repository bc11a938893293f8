"""Both ends of the wire between nodes, over Arrow Flight: `SegmentServer` has the segments of a node, `SegmentClient` asks for them.

A message travels as opaque bytes, in pieces, after its schema. Tickets and actions are JSON. Every call shows the token of the
run, and a server gives out only files of one folder that are named as segment files are. Between hosts everything, the token
included, is encrypted (TLS): each server makes a certificate of its own (`certificate.py`), which the clients are given.
"""

from __future__ import annotations

import datetime
import fcntl
import hmac
import itertools
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
from .segment_store import delete_local
from .segments import (
    END_OF_STREAM,
    FILE,
    Segment,
    SegmentReader,
    full_disk_named,
    verify_segment,
    write_all,
)

# Certificate
#
# A certificate for one server of one run. Its key never leaves the process; clients get the
# certificate itself to trust.


NAME = "weft"
"""The name in every certificate. Clients trust the certificate itself, not the name."""
VALID = datetime.timedelta(days=3650)
"""How long a certificate is valid."""
EARLIER = datetime.timedelta(days=1)
"""A certificate is valid from this long before it was made, because the clocks of nodes may differ."""


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, both in PEM form."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "<Certificate with its key>"


def make_certificate() -> Certificate:
    """Make a P-256 key and a certificate that is signed with it."""
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
    return Certificate(
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


PIECE_BYTES = 16 << 20
PIECES = pa.schema([("bytes", pa.large_binary())])
DAMAGED = b"damaged"


class SegmentServer(pf.FlightServerBase):
    """Gives other nodes the messages in one node's folder, and deletes files at their word.

    Args:
        folder: the node's folder.
        node: the node's name. Files of other nodes are known here only as copies of their messages.
        host: the address to listen on, on a free port; the default is reached from this machine alone.
        token: the secret that every caller must show.
        certificate: the server's own. None: nothing is encrypted, which is for one machine.

    Raises:
        ValueError: the token is empty.
    """

    location: str
    """Where it listens: `grpc://host:port`, or `grpc+tls://host:port`."""

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
            raise ValueError("SegmentServer.token must not be empty: it keeps strangers out")
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
        pieces = [schema.serialize()]
        pieces += [
            message.slice(i, min(PIECE_BYTES, message.size - i))
            for i in range(0, message.size, PIECE_BYTES)
        ]
        return pf.GeneratorStream(PIECES, map(_row, pieces))

    def do_action(self, context: Any, action: pf.Action) -> list[bytes]:
        match action.type:
            case "delete":
                return self._delete(json.loads(action.body.to_pybytes()))
            case "verify":
                return self._verify(json.loads(action.body.to_pybytes()))
            case _:
                known = "the actions 'delete' and 'verify'"
                raise pf.FlightServerError(f"a segment server knows {known}, not {action.type!r}")

    def _verify(self, listed: Sequence[Sequence[Any]]) -> list[bytes]:
        """For each of these segments what is wrong with it; empty where nothing is."""
        problems: list[bytes] = []
        for segment in map(Segment.from_json, listed):
            _check(segment.node, segment.file)
            try:
                verify_segment(self.folder, segment)
                problems.append(b"")
            except DamagedSegment as error:
                problems.append(str(error).encode())
        return problems

    def _delete(self, files: Sequence[tuple[str, str]]) -> list[bytes]:
        for node, file in files:
            _check(node, file)
        failed: OSError | None = None
        for node, file in files:
            try:
                delete_local(self.folder, self.node, node, file)
            except OSError as error:  # the others are deleted all the same
                failed = error
        if failed is not None:
            raise failed
        return []

    def close(self) -> None:
        """Stop listening, after the calls under way."""
        self.shutdown()
        self._reader.close()


class SegmentClient:
    """A channel to the segment server of one node.

    Args:
        location: where the server listens.
        token: the server's.
        certificate: the server's, as PEM; the client trusts no other. None: nothing is encrypted.
        timeout_s: the longest that a call may take.
    """

    def __init__(
        self, location: str, token: str, certificate: bytes | None = None, *, timeout_s: float
    ) -> None:
        self._location, self._timeout_s = location, timeout_s
        trust = {"tls_root_certs": certificate, "override_hostname": NAME} if certificate else {}
        self._client = pf.FlightClient(location, **trust)
        self._headers = [(b"authorization", f"Bearer {token}".encode())]

    def __enter__(self) -> SegmentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, segment: Segment) -> pa.Buffer:
        """A message of the server's node, behind its schema.

        Returns:
            The bytes of an Arrow IPC stream.

        Raises:
            TimeoutError: the server cannot be reached, or did not answer in time.
            DamagedSegment: the server found the message damaged.
            FlightUnauthenticatedError: the token is not the server's.
        """
        ticket = pf.Ticket(json.dumps(segment.to_json()).encode())
        try:
            with self._deadline(
                f"fetching file {segment.file} of node {segment.node!r} from {self._location}"
            ):
                table = self._client.do_get(ticket, self._options()).read_all()
        except pf.FlightInternalError as error:
            if error.extra_info != DAMAGED:
                raise
            raise DamagedSegment(
                segment, f"{self._location}/{segment.file}", f"its node says: {error}"
            ) from None
        sink = pa.BufferOutputStream()
        for array in table.column("bytes").chunks:
            for piece in array:
                sink.write(piece.as_buffer())
        sink.write(END_OF_STREAM)
        return sink.getvalue()

    def delete(self, files: Sequence[tuple[str, str]]) -> None:
        """Have the server delete files, and its copies of messages of files of other nodes.

        Args:
            files: at least one (node, file).

        Raises:
            TimeoutError: the server cannot be reached, or did not answer in time.
            FlightUnauthenticatedError: the token is not the server's.
        """
        (node, file), more = files[0], f" and {len(files) - 1} more" if len(files) > 1 else ""
        with self._deadline(f"deleting file {file} of node {node!r}{more} at {self._location}"):
            list(self._client.do_action(pf.Action("delete", json.dumps(files).encode()), self._options()))

    def verify(self, segments: Sequence[Segment]) -> list[str]:
        """Have the server read messages of its node.

        Args:
            segments: at least one.

        Returns:
            For each what is wrong with it; empty where nothing is.

        Raises:
            TimeoutError: the server cannot be reached, or did not answer in time.
        """
        asked = json.dumps([segment.to_json() for segment in segments]).encode()
        with self._deadline(
            f"verifying {len(segments)} messages of node {segments[0].node!r} at {self._location}"
        ):
            results = self._client.do_action(pf.Action("verify", asked), self._options())
            return [result.body.to_pybytes().decode() for result in results]

    def close(self) -> None:
        self._client.close()

    def _options(self) -> pf.FlightCallOptions:
        return pf.FlightCallOptions(timeout=self._timeout_s, headers=self._headers)

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        """Flight's errors of time say what was being done."""
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
        if not hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self._wanted):
            raise pf.FlightUnauthenticatedError("the token is missing, or is not this run's")


def _check(node: object, file: object) -> None:
    if not isinstance(file, str) or not FILE.fullmatch(file):
        raise pf.FlightServerError(
            f"a segment's file is named writer.stream.sequence.arrows, not {file!r}"
        )
    if not isinstance(node, str) or node in ("", ".", "..") or "/" in node or "\0" in node:
        raise pf.FlightServerError(f"a node's name is one part of a path, not {node!r}")


def _row(piece: pa.Buffer) -> pa.RecordBatch:
    """One row that holds these bytes, without a copy."""
    offsets = pa.py_buffer(np.array([0, piece.size], np.int64))
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, piece])
    return pa.RecordBatch.from_arrays([array], schema=PIECES)


# Peers
#
# Peers: how a process reaches the segments of other nodes. A node fetches each message at most
# once.


VERIFIED_AT_ONCE = 64
"""Segments that a server is asked for in one call."""


@dataclass(frozen=True)
class Peers:
    """The segment servers of a run. `Peers.fetch` is what a `SegmentReader` takes as its `fetch`."""

    locations: Mapping[str, str]
    """Name of a node -> where its server listens."""
    token: str
    """The secret that all of them ask for."""
    certificates: Mapping[str, bytes] = field(default_factory=dict)
    """Location -> the server's certificate, as PEM. A location without one is not encrypted."""
    timeout_s: float = 60.0
    """The longest that a fetch may take."""

    def client(self, location: str, timeout_s: float) -> SegmentClient:
        """A channel to one of the servers."""
        return SegmentClient(location, self.token, self.certificates.get(location), timeout_s=timeout_s)

    def unreadable(self, segments: Iterable[Segment]) -> dict[Segment, str]:
        """Those of the segments that cannot be read on their nodes, and why. Nodes that are no peers are passed over."""
        found: dict[Segment, str] = {}
        for node, own in itertools.groupby(
            sorted(segments, key=_place), key=lambda segment: segment.node
        ):
            if (location := self.locations.get(node)) is None:
                continue
            left = list(own)
            with self.client(location, self.timeout_s) as client:
                while left:
                    some, left = left[:VERIFIED_AT_ONCE], left[VERIFIED_AT_ONCE:]
                    try:
                        problems = client.verify(some)
                    except TimeoutError as error:  # it is asked no more: each question may take as long
                        some, left = [*some, *left], []
                        problems = [str(error)] * len(some)
                    found |= {
                        segment: problem
                        for segment, problem in zip(some, problems, strict=True)
                        if problem
                    }
        return found

    def fetch(self, segment: Segment, path: Path) -> None:
        """Fetch a message to a file, unless it exists: of the processes of a node that want a message, one fetches it.

        Args:
            segment: of another node.
            path: the file, which then holds an Arrow IPC stream.

        Raises:
            UserError: the node is none of these.
            TimeoutError: the message did not arrive in time.
            DamagedSegment: the other node found the message damaged.
        """
        if (location := self.locations.get(segment.node)) is None:
            hint = nearest(segment.node, self.locations) or f"; there are {', '.join(self.locations)}"
            raise UserError(
                f"segment {segment.file} lies on node {segment.node!r}, which is not a peer{hint}"
            )
        make_folder(path.parent)
        deadline = time.monotonic() + self.timeout_s
        with open(f"{path}.lock", "wb") as lock:
            self._wait_for(
                lock, deadline, f"fetching file {segment.file} of node {segment.node!r} from {location}"
            )
            if path.exists():
                return
            with self.client(location, max(deadline - time.monotonic(), 1e-3)) as client:
                stream = client.fetch(segment)
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


def _place(segment: Segment) -> tuple[str, str, int]:
    return segment.node, segment.file, segment.offset


# Deletions
#
# Deletions: tells the other nodes which files have no live rows any more.


MAX_FILES = 10_000
"""Files that are remembered for a peer which does not answer; beyond, the oldest are forgotten."""
MAX_PAUSE_S = 60.0
"""Longest pause between two attempts to tell a peer that failed."""

logger = logging.getLogger(__name__)


class Deletions:
    """Deletes files, and the copies of their messages, on all peers. A `SegmentStore` takes it as `delete_remote`.

    Nobody waits for it: its own thread tells each peer, over one channel, of all files that have gathered. A peer that does not
    answer is tried again, with longer and longer pauses, and does not keep the others from being told. What it still holds costs
    space on its own disk, no more.

    Args:
        peers: the servers to tell.
        timeout_s: the longest that a peer may take.
        pause_s: time in which files gather. After a failure, the pause before the next attempt doubles, up to `MAX_PAUSE_S`.
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
        """Tell the peers that answer what is left, for no longer than this."""
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
                del peer.files[:-MAX_FILES]
                if peer.files and (closing or peer.next_attempt <= time.monotonic()):
                    peer.tell()
            if closing:
                for peer in self._peers:
                    peer.hang_up()
                return
            time.sleep(self._pause_s)

    def _until_next_attempt(self) -> float | None:
        """Seconds until a peer that failed is tried again."""
        due = [peer.next_attempt for peer in self._peers if peer.files]
        return max(0.0, min(due) - time.monotonic()) if due else None


class _PeerToTell:
    """A peer, and the files that it has not deleted yet."""

    def __init__(self, peers: Peers, location: str, timeout_s: float, pause_s: float) -> None:
        self._peers, self._location, self._timeout_s = peers, location, timeout_s
        self.files: list[tuple[str, str]] = []
        self.next_attempt = 0.0
        self._first_pause_s, self._pause_s = pause_s, pause_s
        self._client: SegmentClient | None = None

    def tell(self) -> None:
        try:
            if self._client is None:
                self._client = self._peers.client(self._location, self._timeout_s)
            self._client.delete(self.files)
        except Exception as error:  # no failure of a deletion is a reason to end a run
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
