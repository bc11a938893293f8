"""Segments between nodes, by Arrow Flight: each message is fetched at most once per node, and proved by its checksum.

A message travels as opaque bytes, in pieces, after its schema; what arrives is written beside the node's own files as
one Arrow IPC stream and mapped from there by every process of the node. Tickets and actions are JSON. Whoever calls
shows the run's token; nothing is served but files that are named like segments, in one folder.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as pf

from .errors import DamagedSegment
from .segment_files import END_OF_STREAM, room_named, write_all
from .segments import FILE, Segment, SegmentReader, delete_local

PIECE_BYTES = 16 << 20
PIECES = pa.schema([("bytes", pa.large_binary())])
DAMAGED = b"damaged"

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
    """

    location: str
    """Where it listens, as `grpc://host:port`."""
    num_fetches: int
    """Messages sent so far."""

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, token: str, node: str | None = None
    ) -> None:
        if not token:
            raise ValueError("SegmentServer.token must not be empty: it keeps strangers out")
        super().__init__(f"grpc://{host}:{port}", middleware={"token": _TokenGate(token)})
        self.location = f"grpc://{host}:{self.port}"
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
        node, file = json.loads(action.body.to_pybytes())
        self._check(node, file, copies=True)
        delete_local(self.folder, self.node or node, node, file)
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


def fetch(location: str, token: str, segment: Segment, timeout_s: float) -> pa.Buffer:
    """One message from the node that it lies on, behind its schema: the bytes of an Arrow IPC stream.

    Raises:
        TimeoutError: the node cannot be reached, or did not answer in time.
        DamagedSegment: the node found that the message is damaged.
        FlightUnauthenticatedError: the token is not the server's.
    """
    what = f"file {segment.file} of node {segment.node!r} from {location}"

    def get(client: pf.FlightClient, options: pf.FlightCallOptions) -> pa.Table:
        return client.do_get(pf.Ticket(json.dumps(segment.to_json()).encode()), options).read_all()

    try:
        table = _call(location, token, timeout_s, f"fetching {what}", get)
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


def delete(location: str, token: str, node: str, file: str, timeout_s: float) -> None:
    """Have the server at `location` drop what it has of a file of `node`: the file, or copies of its messages.

    Raises:
        TimeoutError: it cannot be reached, or did not answer in time.
        FlightUnauthenticatedError: the token is not the server's.
    """

    def act(client: pf.FlightClient, options: pf.FlightCallOptions) -> None:
        list(client.do_action(pf.Action("delete", json.dumps([node, file]).encode()), options))

    _call(location, token, timeout_s, f"deleting file {file} of node {node!r} at {location}", act)


def delete_everywhere(peers: Mapping[str, str], token: str, timeout_s: float = 5.0) -> Callable[[str, str], None]:
    """What `SegmentStore` wants for `delete_remote`: drops a file, and the copies of its messages, on all `peers`.

    A peer that does not answer is logged and passed over: what it keeps costs room on its own disk, no more.
    """

    def delete_remote(node: str, file: str) -> None:
        for location in peers.values():
            try:
                delete(location, token, node, file, timeout_s)
            except TimeoutError as error:
                logger.warning("%s", error)

    return delete_remote


def fetch_into(path: Path, location: str, token: str, segment: Segment, timeout_s: float) -> None:
    """Fetch a message to `path`, unless it is there: of all the processes of a node that want it, one does. Raises as
    `fetch`."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
        stream = fetch(location, token, segment, max(deadline - time.monotonic(), 1e-3))
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


def _call(location: str, token: str, timeout_s: float, what: str, do: Callable[[Any, Any], Any]) -> Any:
    """`do(client, options)` under a deadline."""
    headers = [(b"authorization", f"Bearer {token}".encode())]
    try:
        with pf.FlightClient(location) as client:
            return do(client, pf.FlightCallOptions(timeout=timeout_s, headers=headers))
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
