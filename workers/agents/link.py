"""The link between a rollout rank and the run's gateway: records over a WebSocket.

    rank                                            gateway
    connects with the run's key     ── Hello ──>    knows a replica
    a call of `run` begins          ── Open ──>     starts or joins episodes
                                    <── Sample ──   a turn of any session
    samples it                      ── Sampled ──>  answers the harness
                                    <── Ended ──    an episode that this rank has opened
    the call ends                   ── Rest ──>     sends no further turns

The gateway checks the key before it reads a record.
"""

from __future__ import annotations

import json
import math
import queue
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.buffer.rows import MAX_CHILDREN
from ...dataflow.errors import GatewayLost
from ..generation.engine import Response
from ..kept_sets import KeptSets
from ..rendezvous import GatewayAddress
from .harness import HarnessPlan
from .sessions import SessionRow

AGAIN_S = 0.5
"""[s] Pause between attempts to reach a gateway that the driver is starting again."""
CONNECT_S = 60.0
"""[s] Longest wait for a gateway, which the driver may be starting again."""
MOST_BYTES = 1 << 30
"""[bytes] Largest record."""
PATH = "/link"


# From ranks


@dataclass(frozen=True)
class Hello:
    group: str
    rank: int
    capacity: int
    """Number of turns to sample, or of episodes to play, at the same time."""
    plays: bool = False
    """Whether the rank has environments, which play episodes, rather than a model."""

    @property
    def who(self) -> str:
        return f"{self.group}[{self.rank}]"


@dataclass(frozen=True)
class EpisodeRequest:
    episode_id: int
    seed: int | None
    row: Mapping[str, Any]
    """Columns of the prompt as JSON values."""


@dataclass(frozen=True)
class Open:
    """Episodes of one call, to start or to join."""

    model: str
    """Folder or Hugging Face id, for the tokenizer and the chat template."""
    max_context: int
    sampling: Sampling
    plan: HarnessPlan
    episodes: tuple[EpisodeRequest, ...]
    most_rows: int = MAX_CHILDREN
    """Largest number of rows of an episode."""
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    policy: str = ""
    """The policy that samples the turns (`GenerationRequest.policy`)."""


@dataclass(frozen=True)
class Sampled:
    turn: int
    response: Response | None
    error: str = ""
    """Why the engine refused the turn."""


@dataclass(frozen=True)
class Close:
    """Episodes that are no longer needed."""

    episode_ids: tuple[int, ...]


@dataclass(frozen=True)
class Rest:
    """The rank takes no further turns until its next `Open`."""


# From the gateway


@dataclass(frozen=True)
class Sample:
    turn: int
    prompt_ids: np.ndarray
    seed: int | None
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    policy: str = ""


@dataclass(frozen=True)
class Abort:
    turn: int


@dataclass(frozen=True)
class Ended:
    """An episode has ended: with rows and a result, or with the reason that it has none."""

    episode_id: int
    rows: tuple[SessionRow, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict[str, Any])
    turns: int = 0
    retokenised: int = 0
    where: str = ""
    """Where it failed: "model", "harness", ...; empty if it did not fail."""
    failure: str = ""
    scored: bool = True
    """False for an episode to drop: the policy did not cause its failure."""
    fatal: bool = False
    """Whether no episode of this harness can run, so that the run must end."""


# Between the gateway and ranks with environments


@dataclass(frozen=True)
class Play:
    """Play an episode. The rank asks the model at the base URL of this key."""

    key: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Stop:
    """The result of an episode is no longer needed."""

    key: str


@dataclass(frozen=True)
class Played:
    key: str
    result: Mapping[str, Any]
    failure: Mapping[str, Any] | None = None
    """An `EpisodeFailure`, as JSON values."""


Record: TypeAlias = Hello | Open | Sampled | Close | Rest | Sample | Abort | Ended | Play | Stop | Played


# Records as bytes: the length of a JSON text, the text, and the arrays that it refers to.

_KNOWN: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(Hello, Open, Sampled, Close, Rest, Sample, Abort, Ended, Play, Stop, Played),
        *(EpisodeRequest, HarnessPlan, KeptSets, Response, Sampling, SessionRow),
    )
}
_LENGTH = struct.Struct("<q")


def to_bytes(record: Record) -> bytes:
    """Encode a record.

    >>> to_record(to_bytes(Close((7, 8))))
    Close(episode_ids=(7, 8))
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_plain(record, arrays)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)])


def to_record(content: bytes) -> Any:
    """Decode a record. Raises a ValueError if it is damaged."""
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    buffer = memoryview(content)[start:]
    return _whole(json.loads(content[_LENGTH.size : start]), buffer, [0])


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return JSON values. Containers become lists whose first item says what they are."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return ["array", value.dtype.str, value.shape]
    if isinstance(value, Mapping):
        return ["mapping", {name: _plain(each, arrays) for name, each in value.items()}]
    if isinstance(value, list | tuple):
        return ["list", [_plain(each, arrays) for each in value]]
    of = (
        dict(value)
        if isinstance(value, Sampling)
        else {f.name: getattr(value, f.name) for f in fields(value)}
    )
    return [type(value).__name__, {name: _plain(each, arrays) for name, each in of.items()}]


def _whole(value: Any, buffer: memoryview, used: list[int]) -> Any:
    """Undo `_plain`. `used` holds the number of bytes of the buffer that were read."""
    if not isinstance(value, list):
        return value
    kind = value[0]
    if kind == "array":
        dtype, shape = np.dtype(value[1]), tuple(value[2])
        count = math.prod(shape)
        array = np.frombuffer(buffer, dtype, count, used[0]).reshape(shape)
        used[0] += array.nbytes
        return array
    if kind == "list":
        return [_whole(each, buffer, used) for each in value[1]]
    found = {name: _whole(each, buffer, used) for name, each in value[1].items()}
    if kind == "mapping":
        return found
    made_of = _KNOWN[kind]
    if made_of is not Sampling:
        tuples = {f.name for f in fields(made_of) if str(f.type).startswith("tuple")}
        found |= {name: tuple(found[name]) for name in tuples}
    return made_of(**found)


class Link:
    """A rank's side. One thread receives, and calls `came` after each record, and when the gateway is
    gone. The worker's thread sends and takes.

    Raises:
        GatewayLost: no gateway answers within `CONNECT_S`.
    """

    def __init__(
        self, address: GatewayAddress, hello: Hello, came: Callable[[], object] = lambda: None
    ) -> None:
        from websockets.sync.client import connect

        context = address.ssl_context()
        headers = {"Authorization": f"Bearer {address.key}"}
        self._closing = ExitStack()
        try:
            connection = connect(
                address.url("ws", PATH),
                additional_headers=headers,
                ssl=context if isinstance(context, ssl.SSLContext) else None,
                open_timeout=CONNECT_S,
                max_size=MOST_BYTES,
                compression=None,
                proxy=None,
            )
            self._socket = self._closing.enter_context(connection)
        except Exception as error:
            at = address.url("ws", PATH)
            raise GatewayLost(f"the gateway at {at} does not answer: {error!r}") from None
        self._records: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tell = came
        self._lost = ""
        threading.Thread(target=self._receive, name="weft-gateway", daemon=True).start()
        self.send(hello)

    def send(self, record: Record) -> None:
        try:
            self._socket.send(to_bytes(record))
        except Exception as error:
            self._lost = self._lost or repr(error)
            raise GatewayLost(f"the gateway is gone: {self._lost}") from None

    def take(self) -> list[Any]:
        """Return the records that have arrived. Raises GatewayLost after the last one of a gateway
        that is gone."""
        found: list[Any] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._records.get_nowait())
        if not found and self._lost:
            raise GatewayLost(f"the gateway is gone: {self._lost}")
        return found

    def close(self) -> None:
        with suppress(Exception):
            self._closing.close()

    def _receive(self) -> None:
        try:
            for content in self._socket:
                assert isinstance(content, bytes)
                self._records.put(to_record(content))
                self._tell()
            self._lost = "it closed the connection"
        except Exception as error:
            self._lost = repr(error)
        with suppress(RuntimeError):  # the loop that it wakes may be closed
            self._tell()
