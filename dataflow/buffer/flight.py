"""Segments between nodes, by Arrow Flight: each message is fetched at most once per node, and proved by its checksum.

A message travels as opaque bytes, in pieces, after its schema; what arrives is written beside the node's own files as
one Arrow IPC stream and mapped from there by every process of the node. Tickets and actions are JSON. Whoever calls
shows the run's token; nothing is served but files that are named like segments, in one folder. Between hosts all of it, the token
too, travels encrypted (TLS): each server makes a certificate of its own (`dataflow/buffer/certificate.py`), which its callers are given.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as pf

from ..errors import DamagedSegment
from .certificate import NAME, Certificate
from .disk import make_folder
from .segment_files import END_OF_STREAM, room_named, write_all
from .segments import FILE, Segment, SegmentReader, delete_local

PIECE_BYTES = 16 << 20
PIECES = pa.schema([("bytes", pa.large_binary())])
DAMAGED = b"damaged"

Certificates = Mapping[str, bytes]
"""Location of a server -> its certificate, as PEM. Those that are not in it are not encrypted."""
NONE: Certificates = {}

logger = logging.getLogger(__name__)


class SegmentServer(pf.FlightServerBase):
    """Serves the segments of one node's folder.

    Args:
        folder: the node's folder.
        host: the address to listen on; the default is reached from this machine alone.
        port: 0 takes a free one.
        token: the secret that every caller must show.
        node: its name, which tells this node's files from the copies of other nodes' messages. None: a caller's word
            is taken for it.
        certificate: its own; None: nothing is encrypted, which is for one machine.
    """

    location: str
    """Where it listens, as `grpc://host:port`, or `grpc+tls://host:port`."""
    num_fetches: int
    """Messages sent so far."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str,
        node: str | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        if not token:
            raise ValueError("SegmentServer.token must not be empty: it keeps strangers out")
        scheme, address = ("grpc+tls" if certificate else "grpc"), f"[{host}]" if ":" in host else host
        secrets = [(certificate.certificate, certificate.key)] if certificate else None
        super().__init__(
            f"{scheme}://{address}:{port}", tls_certificates=secrets, middleware={"token": _TokenGate(token)}
        )
        self.location = f"{scheme}://{address}:{self.port}"
        self.folder, self.node, self.num_fetches = folder, node, 0
        self._readers: dict[str, SegmentReader] = {}
        self._counting = threading.Lock()

    def do_get(self, context: Any, ticket: pf.Ticket) -> pf.FlightDataStream:
        segment = Segment.from_json(json.loads(ticket.ticket))
        self._check(segment.node, segment.file)
        reader = self._readers.setdefault(segment.node, SegmentReader(self.folder, segment.node))
        try:
            message, schema = reader.message(segment)
        except DamagedSegment as error:
            raise pf.FlightInternalError(str(error), DAMAGED) from None
        with self._counting:
            self.num_fetches += 1
        pieces = [schema.serialize()]
        pieces += [message.slice(i, min(PIECE_BYTES, message.size - i)) for i in range(0, message.size, PIECE_BYTES)]
        return pf.GeneratorStream(PIECES, map(_row, pieces))

    def do_action(self, context: Any, action: pf.Action) -> list[bytes]:
        if action.type != "delete":
            raise pf.FlightServerError(f"a segment server knows the action 'delete', not {action.type!r}")
        files = json.loads(action.body.to_pybytes())
        for node, file in files:
            self._check(node, file, copies=True)
        failed: OSError | None = None
        for node, file in files:
            try:
                delete_local(self.folder, self.node or node, node, file)
            except OSError as error:  # the others go all the same
                failed = error
        if failed is not None:
            raise failed
        return []

    def close(self) -> None:
        """Stop listening; calls under way end first."""
        self.shutdown()
        for reader in self._readers.values():
            reader.close()

    def _check(self, node: object, file: object, copies: bool = False) -> None:
        if not isinstance(file, str) or not FILE.fullmatch(file):
            raise pf.FlightServerError(f"a segment's file is named writer.stream.sequence.arrows, not {file!r}")
        if not isinstance(node, str) or node in ("", ".", "..") or "/" in node or "\0" in node:
            raise pf.FlightServerError(f"a node's name is one part of a path, not {node!r}")
        if not copies and self.node not in (None, node):
            raise pf.FlightServerError(f"this is node {self.node!r}, not {node!r}")


def fetch(
    location: str, token: str, segment: Segment, timeout_s: float, certificates: Certificates = NONE
) -> pa.Buffer:
    """One message from the node that it lies on, behind its schema: the bytes of an Arrow IPC stream.

    Raises:
        TimeoutError: the node cannot be reached, or did not answer in time.
        DamagedSegment: the node found that the message is damaged.
        FlightUnauthenticatedError: the token is not the server's.
    """
    what = f"file {segment.file} of node {segment.node!r} from {location}"

    ticket = pf.Ticket(json.dumps(segment.to_json()).encode())
    try:
        with _deadline(timeout_s, f"fetching {what}"), _client(location, certificates) as client:
            table = client.do_get(ticket, _options(token, timeout_s)).read_all()
    except pf.FlightInternalError as error:
        if error.extra_info != DAMAGED:
            raise
        raise DamagedSegment(segment, f"{location}/{segment.file}", f"its node says: {error}") from None
    sink = pa.BufferOutputStream()
    for array in table.column("bytes").chunks:
        for piece in array:
            sink.write(piece.as_buffer())
    sink.write(END_OF_STREAM)
    return sink.getvalue()


def delete(
    location: str,
    token: str,
    files: Sequence[tuple[str, str]],
    timeout_s: float,
    certificates: Certificates = NONE,
) -> None:
    """Have the server at `location` drop what it has of these files, each with the name of its node: the file, or copies of its
    messages.

    Raises:
        TimeoutError: it cannot be reached, or did not answer in time.
        FlightUnauthenticatedError: the token is not the server's.
    """
    with _client(location, certificates) as client:
        _delete(client, location, token, files, timeout_s)


class Deletions:
    """What `SegmentStore` wants for `delete_remote`: drops files, and the copies of their messages, on all `peers`.

    Nobody waits for it: a thread of its own tells each peer, over one channel, of all files that have come since it was told last.
    A peer that does not answer is tried again, less and less often, and never keeps the others from being told; what it keeps
    meanwhile costs room on its own disk, no more.

    Args:
        timeout_s: how long a peer may take.
        pause_s: time between two rounds, in which files gather; between two tries of a peer that failed, twice as long each time, up
            to `max_pause_s`.
    """

    MAX_FILES = 10_000
    """Files that are kept for a peer which does not answer; beyond, the oldest are forgotten."""

    def __init__(
        self,
        peers: Mapping[str, str],
        token: str,
        timeout_s: float = 5.0,
        *,
        certificates: Certificates = NONE,
        pause_s: float = 0.2,
        max_pause_s: float = 60.0,
    ) -> None:
        self._token, self._timeout_s, self._pause_s = token, timeout_s, pause_s
        self._peers = [_PeerToTell(location, certificates, pause_s, max_pause_s) for location in peers.values()]
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
        """Tell what is left, to those who answer, for no longer than this."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._files or self._closing, self._next_try())
                files, self._files, closing = self._files, [], self._closing
            for peer in self._peers:
                peer.files += files
                del peer.files[: -self.MAX_FILES]
                if peer.files and (closing or peer.again_at <= time.monotonic()):
                    peer.tell(self._token, self._timeout_s)
            if closing:
                for peer in self._peers:
                    peer.hang_up()
                return
            time.sleep(self._pause_s)

    def _next_try(self) -> float | None:
        """Seconds until a peer that failed is tried again."""
        due = [peer.again_at for peer in self._peers if peer.files]
        return max(0.0, min(due) - time.monotonic()) if due else None


class _PeerToTell:
    """A peer, and the files that it has not dropped yet."""

    def __init__(self, location: str, certificates: Certificates, pause_s: float, max_pause_s: float) -> None:
        self.location, self._certificates = location, certificates
        self.files: list[tuple[str, str]] = []
        self.again_at = 0.0
        self._first_pause_s, self._pause_s, self._max_pause_s = pause_s, pause_s, max_pause_s
        self._client: pf.FlightClient | None = None

    def tell(self, token: str, timeout_s: float) -> None:
        try:
            if self._client is None:
                self._client = _client(self.location, self._certificates)
            _delete(self._client, self.location, token, self.files, timeout_s)
        except Exception as error:  # whatever it is, it is no reason to end a run
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self.again_at = time.monotonic() + self._pause_s
            logger.warning("%s; tried again in %.3g s", str(error).partition("\n")[0], self._pause_s)
            self.hang_up()
        else:
            self.files, self._pause_s = [], self._first_pause_s

    def hang_up(self) -> None:
        if self._client is not None:
            with suppress(Exception):
                self._client.close()
            self._client = None


def fetch_into(
    path: Path,
    location: str,
    token: str,
    segment: Segment,
    timeout_s: float,
    certificates: Certificates = NONE,
) -> None:
    """Fetch a message to `path`, unless it is there: of all the processes of a node that want it, one does. Raises as
    `fetch`."""
    make_folder(path.parent)
    deadline = time.monotonic() + timeout_s
    with open(f"{path}.lock", "wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(
                        f"fetching file {segment.file} of node {segment.node!r} from {location}: another process of this "
                        f"node has been at it for {timeout_s} s"
                    ) from None
                time.sleep(min(0.002, left))
        if path.exists():
            return
        stream = fetch(location, token, segment, max(deadline - time.monotonic(), 1e-3), certificates)
        part = path.with_name(f"{path.name}.part")
        who = f"the copy of a message of node {segment.node!r}"
        with room_named(path.parent, who, len(stream)), open(part, "wb") as file:
            write_all(file.fileno(), [stream], 0)
        os.rename(part, path)


class _TokenGate(pf.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str | bytes]]) -> None:
        shown = next((v for name, values in headers.items() if name.lower() == "authorization" for v in values), b"")
        if not hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self._wanted):
            raise pf.FlightUnauthenticatedError("the token is missing, or is not this run's")


def _client(location: str, certificates: Certificates) -> pf.FlightClient:
    """A channel to a server; encrypted, it trusts the certificate of that server alone."""
    if location not in certificates:
        return pf.FlightClient(location)
    return pf.FlightClient(location, tls_root_certs=certificates[location], override_hostname=NAME)


def _delete(
    client: pf.FlightClient, location: str, token: str, files: Sequence[tuple[str, str]], timeout_s: float
) -> None:
    (node, file), more = files[0], f" and {len(files) - 1} more" if len(files) > 1 else ""
    with _deadline(timeout_s, f"deleting file {file} of node {node!r}{more} at {location}"):
        list(client.do_action(pf.Action("delete", json.dumps(files).encode()), _options(token, timeout_s)))


def _options(token: str, timeout_s: float) -> pf.FlightCallOptions:
    return pf.FlightCallOptions(timeout=timeout_s, headers=[(b"authorization", f"Bearer {token}".encode())])


@contextmanager
def _deadline(timeout_s: float, what: str) -> Iterator[None]:
    """Flight's errors of time say what was being done."""
    try:
        yield
    except (pf.FlightTimedOutError, pf.FlightUnavailableError) as error:
        reason = (
            "cannot be reached" if isinstance(error, pf.FlightUnavailableError) else f"no answer in {timeout_s:.3g} s"
        )
        raise TimeoutError(f"{what}: {reason} ({str(error).splitlines()[0][:200]})") from None


def _row(piece: pa.Buffer) -> pa.RecordBatch:
    """One row that holds these bytes, without a copy."""
    offsets = pa.py_buffer(np.array([0, piece.size], np.int64))
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, piece])
    return pa.RecordBatch.from_arrays([array], schema=PIECES)
