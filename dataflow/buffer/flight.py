"""Both ends of the wire between nodes, over Arrow Flight: `SegmentServer` has the segments of a node, `SegmentClient` asks for them.

A message travels as opaque bytes, in pieces, after its schema. Tickets and actions are JSON. Every call shows the token of the
run, and a server gives out only files of one folder that are named as segment files are. Between hosts everything, the token
included, is encrypted (TLS): each server makes a certificate of its own (`certificate.py`), which the clients are given.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as pf

from ..errors import DamagedSegment
from .certificate import NAME, Certificate
from .segment_files import END_OF_STREAM
from .segment_store import delete_local
from .segments import FILE, Segment, SegmentReader, verify_segment

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
        self, folder: Path, node: str, *, host: str = "127.0.0.1", token: str, certificate: Certificate | None = None
    ) -> None:
        if not token:
            raise ValueError("SegmentServer.token must not be empty: it keeps strangers out")
        scheme, address = ("grpc+tls" if certificate else "grpc"), f"[{host}]" if ":" in host else host
        secrets = [(certificate.certificate, certificate.key)] if certificate else None
        super().__init__(f"{scheme}://{address}:0", tls_certificates=secrets, middleware={"token": _TokenGate(token)})
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
        pieces += [message.slice(i, min(PIECE_BYTES, message.size - i)) for i in range(0, message.size, PIECE_BYTES)]
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

    def __init__(self, location: str, token: str, certificate: bytes | None = None, *, timeout_s: float) -> None:
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
            with self._deadline(f"fetching file {segment.file} of node {segment.node!r} from {self._location}"):
                table = self._client.do_get(ticket, self._options()).read_all()
        except pf.FlightInternalError as error:
            if error.extra_info != DAMAGED:
                raise
            raise DamagedSegment(segment, f"{self._location}/{segment.file}", f"its node says: {error}") from None
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
        with self._deadline(f"verifying {len(segments)} messages of node {segments[0].node!r} at {self._location}"):
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
        shown = next((v for name, values in headers.items() if name.lower() == "authorization" for v in values), b"")
        if not hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self._wanted):
            raise pf.FlightUnauthenticatedError("the token is missing, or is not this run's")


def _check(node: object, file: object) -> None:
    if not isinstance(file, str) or not FILE.fullmatch(file):
        raise pf.FlightServerError(f"a segment's file is named writer.stream.sequence.arrows, not {file!r}")
    if not isinstance(node, str) or node in ("", ".", "..") or "/" in node or "\0" in node:
        raise pf.FlightServerError(f"a node's name is one part of a path, not {node!r}")


def _row(piece: pa.Buffer) -> pa.RecordBatch:
    """One row that holds these bytes, without a copy."""
    offsets = pa.py_buffer(np.array([0, piece.size], np.int64))
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, piece])
    return pa.RecordBatch.from_arrays([array], schema=PIECES)
