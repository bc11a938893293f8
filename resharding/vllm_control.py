"""vLLM control: a trainer drives engines that receive weights through vLLM's own transfer backends.

vLLM's trainers call four methods of a client. Weft sends each call over a `Connection` to each
engine, which forwards it to its ranks.

    engine                                              rank 0 of the trainer
    connects, sends its identity            ── H ──>    waits for all expected engines
    sets its timeout                        <── D ──    bytes of the version
    calls its ranks                         <── C ──    a method of vLLM's workers, and its payload
    reports success or the error            ── K, F ──> continues when all have answered
    compares with what its loaders got      <── E ──    sums of all tensors
    acknowledges the version                ── K ──>
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..dataflow.errors import WeightSyncError
from .buckets import tensor_factor
from .connection import SILENCE_S, Connection, Listener, reason, this_machine
from .weights import CHECKSUM_MODULUS, LOOPBACK, RankWeights, Weights

# Payloads of vLLM's transfer backends, as JSON instead of pickles. They are dictionaries of names,
# numbers and shapes. Payloads for CUDA IPC also contain torch's arguments to open shared memory:
# bytes, dtypes and torch classes. `encoded` rejects any other value.


_CLASSES: dict[str, type] = {
    "torch.Tensor": torch.Tensor,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.TypedStorage": torch.storage.TypedStorage,
}
_NAMES = {found: name for name, found in _CLASSES.items()}


def encoded(value: Any) -> str:
    """Encode a payload as JSON. Raises TypeError if it contains any other value.

    >>> decoded(encoded({"handle": (torch.Size([2, 3]), b"\\x00", torch.float32, None)}))
    {'handle': ((2, 3), b'\\x00', torch.float32, None)}
    """
    return json.dumps(_plain(value))


def decoded(text: str | bytes) -> Any:
    """Decode a text from `encoded`; `torch.Size` becomes a tuple. Raises ValueError for others."""
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"map": {key: _plain(each) for key, each in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, type) and value in _NAMES:
        return {"class": _NAMES[value]}
    raise TypeError(
        f"cannot encode {value!r} for receivers; choose a transfer backend with plain payloads"
    )


def _value(said: Any) -> Any:
    if isinstance(said, list):
        return [_value(each) for each in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        ((kind, content),) = said.items()
        if kind == "map" and isinstance(content, dict):
            return {key: _value(each) for key, each in content.items()}
        if kind == "tuple" and isinstance(content, list):
            return tuple(_value(each) for each in content)
        if kind == "bytes" and isinstance(content, str):
            return base64.b64decode(content)
        if kind == "dtype" and isinstance(found := getattr(torch, str(content), None), torch.dtype):
            return found
        if kind == "class" and content in _CLASSES:
            return _CLASSES[content]
    raise ValueError(f"{said!r} is not a payload of a transfer backend")


METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Methods of vLLM's `VLLMWeightSyncClient` and of its workers."""


class TensorSum(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    box_sum: int


def checksum_of_tensors(tensors: Mapping[str, TensorSum]) -> str:
    """Return the checksum of a version or of one rank's part, given its tensors' sums."""
    total = sum(
        found.box_sum * tensor_factor(name, found.dtype, found.shape) for name, found in tensors.items()
    )
    return f"{total % CHECKSUM_MODULUS:016x}"


@dataclass(eq=False)
class _Engine:
    receiver: str
    ranks: int
    identity: str
    """A replacement engine with the same name has another identity."""
    version: int
    connection: Connection
    lost: str = ""
    """Why the engine was dropped; empty while it takes part."""

    def ask(self, method: str, payload: Any) -> None:
        """Call a method on the engine's ranks. If that fails, set `lost`."""
        try:
            self.connection.send(b"C", encoded([method, payload]).encode())
            kind, content = self.connection.receive()
        except OSError as error:
            self.lost = reason(error)
            return
        if kind != b"K":
            self.lost = f"failed in {method}: {content.decode(errors='replace')}"


class Receivers:
    """The receiving engines: the client of vLLM's trainer (`VLLMWeightSyncClient`), on rank 0 at
    the address `host`. If all engines share one collective (`together`), losing one stops all."""

    def __init__(self, host: str, *, together: bool) -> None:
        self.lost: dict[str, str] = {}
        """Maps each engine that did not take the last version to the reason."""
        self._together = together
        self._came: queue.SimpleQueue[_Engine] = queue.SimpleQueue()
        self._engines: list[_Engine] = []
        self._listener = Listener(host, self._greet)

    @property
    def endpoint(self) -> RankWeights:
        return self._listener.endpoint

    def gather(
        self, version: int, expected: Sequence[str], num_bytes: int, patience_s: float = SILENCE_S
    ) -> list[str]:
        """Wait at most `patience_s` for the expected engines, and begin a transfer of `num_bytes`
        with those that came. Return their names and identities in the expected order, the order of
        their ranks."""
        self.lost = {}
        self._engines, here = [], {}
        deadline = time.monotonic() + patience_s
        while not set(expected) <= here.keys():
            try:  # even with a timeout of 0, take engines that have already connected
                engine = self._came.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if engine.version != version:
                why = f"version {engine.version} is no longer available: version {version} is published"
                _refuse(engine, why)
                continue
            here[engine.receiver] = engine
        for name in expected:
            if name not in here:
                self.lost[name] = f"{name} did not come within {patience_s:.0f} s for version {version}"
        for engine in (here[name] for name in expected if name in here):
            engine.connection.expect(num_bytes)
            try:
                engine.connection.send(b"D", json.dumps({"num_bytes": num_bytes}).encode())
            except OSError as error:
                self.lost[engine.receiver] = f"{engine.receiver} is gone ({error})"
                engine.connection.close()
            else:
                self._engines.append(engine)
        return [f"{engine.receiver} {engine.identity}" for engine in self._engines]

    @property
    def num_ranks(self) -> int:
        return sum(engine.ranks for engine in self._engines)

    # Methods that vLLM's trainers call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the ranks to receive. Rank numbers, if the backend has any, span all engines."""
        payloads, offset = [], init_info.get("rank_offset")
        for engine in self._engines:
            payloads.append(init_info if offset is None else {**init_info, "rank_offset": offset})
            offset = None if offset is None else offset + engine.ranks
        self._ask("init_weight_transfer_engine", payloads)

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask("update_weights", [update_info] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update. The engines already know the version, so the argument is unused."""
        self._ask("finish_weight_update")

    def _ask(self, method: str, payloads: Sequence[Any] | None = None) -> None:
        """Call a method on all engines in parallel. Raises an error if no engine is left, or if one
        has failed and the backend needs all."""
        each = payloads or [None] * len(self._engines)
        asked = [(e, payload) for e, payload in zip(self._engines, each, strict=True) if not e.lost]
        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            list(threads.map(lambda one: one[0].ask(method, one[1]), asked))
        newly = {
            engine.receiver: f"{engine.receiver} {engine.lost}" for engine, _ in asked if engine.lost
        }
        self.lost |= newly
        if newly and self._together:
            raise WeightSyncError("; ".join(newly.values()))
        if newly and all(engine.lost for engine in self._engines):
            raise WeightSyncError("; ".join(self.lost.values()))

    def send_sums(self, tensors: Mapping[str, TensorSum]) -> None:
        said = json.dumps(
            {name: [t.dtype, t.shape, f"{t.box_sum:x}"] for name, t in tensors.items()}
        ).encode()
        for engine in (engine for engine in self._engines if not engine.lost):
            try:
                engine.connection.send(b"E", said)
            except OSError as error:
                self.lost[engine.receiver] = f"{engine.receiver} is gone ({error})"
        # Wait only after sending to all, so that the engines compare in parallel.
        for engine in (engine for engine in self._engines if engine.receiver not in self.lost):
            with contextlib.suppress(OSError):  # the engine has the version even if it is gone
                engine.connection.receive()
        self._hang_up("")

    def dismiss(self, why: str) -> None:
        while True:
            try:
                self._engines.append(self._came.get_nowait())
            except queue.Empty:
                break
        self._hang_up(why)

    def close(self) -> None:
        self._listener.close()
        self.dismiss("the trainer has ended")

    def _hang_up(self, why: str) -> None:
        for engine in self._engines:
            _refuse(engine, why)
        self._engines = []

    def _greet(self, connection: Connection) -> None:
        hello = json.loads(connection.receive()[1])
        receiver, ranks, identity = str(hello["receiver"]), int(hello["ranks"]), str(hello["engine"])
        self._came.put(_Engine(receiver, ranks, identity, int(hello["version"]), connection))


def _refuse(engine: _Engine, why: str) -> None:
    with contextlib.suppress(OSError):
        if why:
            engine.connection.send(b"F", why.encode())
        engine.connection.hang_up()
    engine.connection.close()


def take_as_told(
    weights: Weights,
    ranks: int,
    engine: str,
    call: Callable[[str, Any], None],
    loaded: Callable[[], Sequence[Mapping[str, TensorSum]]],
) -> str:
    """Receive a version as directed by the trainer's rank 0, compare it with the published sums,
    and return its checksum. `engine` distinguishes this engine from earlier ones with its name.
    `call` calls one of `METHODS` with its payload (or None) on all ranks. `loaded` returns each
    rank's sums of the tensors that its loaders got. Raises WeightSyncError if the trainer is gone,
    has given up or does not answer, if a rank has failed, or if a tensor differs."""
    (place,) = weights.ranks
    host = place.host or LOOPBACK
    where = f"weights version {weights.version}, the trainer at {host}:{place.port}"
    if not place.host and this_machine() != place.machine:
        raise WeightSyncError(
            f"{where}: it is on another machine, and only serves receivers on its own machine"
        )
    try:
        connection = Connection.connect(host, place.port, place.token)
    except OSError as error:
        raise WeightSyncError(f"{where}: it is gone ({error})") from None
    try:
        hello = {"receiver": weights.receiver, "ranks": ranks}
        hello |= {"engine": engine, "version": weights.version}
        connection.send(b"H", json.dumps(hello).encode())
        connection.set_silence(2 * SILENCE_S)  # the trainer may be waiting for other engines
        while True:
            kind, content = connection.receive()
            if kind == b"D":
                connection.expect(json.loads(content)["num_bytes"])
            elif kind == b"C":
                _carry_out(connection, content, call)
            elif kind == b"E":
                said = {
                    name: TensorSum(d, tuple(s), int(t, 16))
                    for name, (d, s, t) in json.loads(content).items()
                }
                _compare(weights, said, loaded())
                with contextlib.suppress(OSError):  # the version is complete even if the trainer is gone
                    connection.send(b"K")
                return checksum_of_tensors(said)
            else:
                raise WeightSyncError(f"{where}: {content.decode(errors='replace')}")
    except OSError as error:
        raise WeightSyncError(f"{where}: it {reason(error, connection.silence_s)}") from None
    finally:
        connection.close()


def _carry_out(connection: Connection, content: bytes, call: Callable[[str, Any], None]) -> None:
    method, payload = decoded(content)
    try:
        if method not in METHODS:
            raise WeightSyncError(f"{method!r} is not a method of a weight update")
        call(method, payload)
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(b"F", f"{type(error).__name__}: {error}".encode())
        raise
    connection.send(b"K")


def _compare(
    weights: Weights, given: Mapping[str, TensorSum], ranks: Sequence[Mapping[str, TensorSum]]
) -> None:
    for rank, came in enumerate(ranks):
        for name in dict.fromkeys([*given, *came]):
            if given.get(name) != came.get(name):
                what = "did not arrive as it was published at"
                if name not in came or name not in given:
                    what = "did not arrive at" if name in given else "was not published, and came to"
                raise WeightSyncError(
                    f"weights version {weights.version}: tensor {name!r} {what} rank {rank} of {weights.receiver or 'vLLM'}"
                )
