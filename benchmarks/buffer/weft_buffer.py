"""Weft's sample buffer, a measurement at a time: it does the works of `rows.py`, in the same words as `queue_peer.py`.

    system = System(HERE / "weft_buffer.py", log=log)      # turns.py
    [answer] = system.run(1, work="ragged_put", rows=512, groups_per_put=8)

This process holds the ledger and the log, as the driver does in a run. Worker processes write and read the rows. They tell it over a
socket (lines of JSON) what they wrote and are told what to read; the log is committed once a turn of the loop.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rows import DTYPES, GENERATED, GROUP, Ragged, content_hash, dense, joined, ragged, reward_of, settings, touch
from rows import Batch as Work
from turns import Turns

import weft
from weft.controllers.backends.backend import Files
from weft.controllers.row_io import DataAccess, gather
from weft.controllers.tasks import RowTask
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.rows import Lease, Piece, Published
from weft.dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.graph import Graph
from weft.dataflow.node import Node
from weft.dataflow.operation import Shape, declaration_of, node
from weft.dataflow.source import TableSource

NODE = "bench"
FILE_BYTES = BufferConfig().file_bytes


# What the rows go through: three graphs whose nodes are only claimed, never called


@node(shape=Shape.EXPAND, reads=("seed",), writes=tuple(DTYPES))
def put(rows: Batch) -> Batch: ...


@node(reads=tuple(DTYPES))
def get(rows: Batch) -> Batch: ...


@node(shape=Shape.EXPAND, reads=("seed",), writes=("numbers",))
def fill(rows: Batch) -> Batch: ...


@node(reads=("numbers",))
def consume(rows: Batch) -> Batch: ...


@node(shape=Shape.EXPAND, reads=("seed",), writes=GENERATED)
def generate(rows: Batch) -> Batch: ...


@node(reads=("response_ids",), writes=("reward",))
def score(rows: Batch) -> Batch: ...


@node(reads=(*GENERATED, "reward"))
def update(rows: Batch) -> Batch: ...


@weft.graph
def queue(prompts: Any) -> Any:
    return get(put(prompts))


@weft.graph
def block(prompts: Any) -> Any:
    return consume(fill(prompts))


@weft.graph
def streaming(prompts: Any) -> Any:
    return update(score(generate(prompts)))


# A worker process


class Line:
    """One end of a socket that carries lines of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = b""
        self._lines: deque[bytes] = deque()

    def send(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        while not self._lines:
            self.fill()
        return json.loads(self._lines.popleft())

    def waiting(self) -> bool:
        return bool(self._lines)

    def fill(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._lines.extend(lines)


class WorkerSide:
    """Writes and reads rows in the folder of the node, as it is told."""

    def __init__(self, line: Line, data: DataAccess) -> None:
        self._line, self._data = line, data
        self._made: list[Batch] = []
        self._got: list[Batch] = []
        self._idle_since = self._idle = self._first = 0.0
        calls = (self.make, self.make_dense, self.put, self.read, self.score, self.train, self.trained, self.hashes)
        self._calls: dict[str, Callable[..., dict[str, Any]]] = {call.__name__: call for call in calls}

    def serve(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message = self._line.receive()
                self._line.send(**self._calls[message.pop("do")](**message))

    def make(self, groups: int, per_put: int, columns: Sequence[str]) -> dict[str, Any]:
        made = ragged(groups * GROUP)
        parts = [joined(made[i : i + per_put]).to_arrow() for i in range(0, groups, per_put)]
        self._made = [Batch(part.select(list(columns))) for part in parts]
        return {"ready": True}

    def make_dense(self, bytes: int, rows: int) -> dict[str, Any]:
        numbers = dense(bytes).reshape(-1)
        offsets = np.linspace(0, len(numbers), rows + 1).astype(np.int32)
        self._made = [Batch.of(numbers=(numbers, offsets))]
        return {"ready": True}

    def put(self, number: int, ids: Sequence[int], tokens: Sequence[int], at: float = 0.0) -> dict[str, Any]:
        if at:
            time.sleep(max(0.0, at - time.monotonic()))
        segment = self._data.writer.append(self._made[number].with_columns(sample_id=np.array(ids)))
        return {"lease": number, "ids": ids, "tokens": tokens, "segment": segment.to_json()}

    def read(self, lease: int, task: Mapping[str, Any]) -> dict[str, Any]:
        self._got.append(self._gather(task))
        _touch(self._got[-1])
        return {"lease": lease}

    def score(self, lease: int, task: Mapping[str, Any]) -> dict[str, Any]:
        values, offsets = self._gather(task).ragged_numpy("response_ids")
        rewards = np.array([reward_of(values[a:b]) for a, b in itertools.pairwise(offsets)], np.float32)
        segment = self._data.writer.append(Batch.of(reward=rewards, sample_id=np.array(task["ids"])))
        return {"lease": lease, "ids": task["ids"], "tokens": [0] * len(rewards), "segment": segment.to_json()}

    def train(self, lease: int, task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        self._got.append(self._gather(task))
        _touch(self._got[-1])
        now = time.monotonic()
        if self._first:
            self._idle += now - self._idle_since
        else:
            self._first = now
        time.sleep(seconds)
        self._idle_since = time.monotonic()
        return {"lease": lease}

    def trained(self, start: float) -> dict[str, Any]:
        first, end, idle = self._first, self._idle_since, self._idle
        self._first = self._idle = 0.0
        return {"first_s": first - start, "idle_share": idle / (end - first), "total_s": end - start}

    def hashes(self) -> dict[str, Any]:
        """Of all rows that were read since the last call."""
        found = sorted(content_hash(row) for batch in self._got for row in _rows(batch))
        self._got.clear()
        return {"hashes": found}

    def _gather(self, task: Mapping[str, Any]) -> Batch:
        pieces = [
            Piece(tuple(columns), np.array(keys), tuple(Segment.from_json(s) for s in segments))
            for columns, keys, segments in task["pieces"]
        ]
        ids, parents = np.array(task["ids"]), np.array(task["parents"])
        declaration = declaration_of(get)
        assert declaration is not None
        return gather(RowTask(declaration.called_with({}), (), ids, parents, parents, pieces), self._data.reader)


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    names = [n for n in (*DTYPES, "numbers") if n in batch]
    columns = {n: batch.ragged_numpy(n) if pa.types.is_list(batch[n].type) else None for n in names}
    for row in range(len(batch)):
        yield {
            n: pair[0][pair[1][row] : pair[1][row + 1]] if pair else batch.numpy(n)[row : row + 1]
            for n, pair in columns.items()
        }


def _touch(batch: Batch) -> float:
    ragged_columns = {n: Ragged(*batch.ragged_numpy(n)) for n in batch.columns if pa.types.is_list(batch[n].type)}
    return touch(Work(ragged_columns, {n: batch.numpy(n) for n in ("reward",) if n in batch}))


# The driver's side


class WorkerProcess:
    """A worker as the driver sees it."""

    def __init__(self, folder: Path, name: str) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, __file__, "--worker", str(there.fileno()), str(folder), name]
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        self.line = Line(here)
        self.busy = 0

    def tell(self, do: str, **message: Any) -> None:
        self.line.send(do=do, **message)
        self.busy += 1

    def answer(self) -> dict[str, Any]:
        self.busy -= 1
        return self.line.receive()

    def ask(self, do: str, **message: Any) -> dict[str, Any]:
        self.tell(do, **message)
        return self.answer()

    def close(self) -> None:
        self.line.socket.close()
        self._process.wait(10)


class Driver:
    """A buffer, its graph, and its workers; a new one for each measurement."""

    def __init__(self, folder: Path, graph: Callable[..., Graph], workers: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.graph = graph(TableSource("prompts", pa.table({"seed": [0]})))
        self.buffer = SampleBuffer.create(self.folder, {"train": self.graph}, node=NODE, config=BufferConfig())
        self.ledger = self.buffer.ledgers["train"]
        self.workers = {name: WorkerProcess(self.folder / "segments", name) for name in workers}
        self.leases: dict[int, Lease] = {}
        """Number of a call -> what was claimed for it."""

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()
        self.buffer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Commit the log, wait for a worker, and take what all have said by then."""
        self.buffer.commit()
        if not any(worker.line.waiting() for worker in self.workers.values()):
            by_socket = {worker.line.socket: worker for worker in self.workers.values()}
            readable, _, _ = select.select(list(by_socket), [], [], 60)
            if not readable:
                raise TimeoutError(f"no worker of {', '.join(self.workers)} answered for 60 s")
            for end in readable:
                by_socket[end].line.fill()
        for name, worker in self.workers.items():
            while worker.line.waiting():
                yield name, worker.answer()

    def start_puts(self, node: Node, sizes: Sequence[int], groups_each: int, at: Sequence[float] = ()) -> None:
        """Claim a prompt for each group, and have the producer write its rows."""
        self.ledger.issue([0] * (len(sizes) * groups_each), [0] * (len(sizes) * groups_each), round=0)
        for number, rows in enumerate(sizes):
            lease = self.ledger.claim(node, max_rows=groups_each)
            assert lease is not None
            self.leases[number] = lease
            each = rows // groups_each
            ids = np.add.outer(lease.first_children, np.arange(each)).ravel().tolist()
            when = {"at": at[number]} if at else {}
            self.workers["producer"].tell("put", number=number, ids=ids, tokens=[2000] * rows, **when)

    def put_done(self, answer: Mapping[str, Any]) -> None:
        lease = self.leases.pop(answer["lease"])
        ids, tokens = np.array(answer["ids"]), np.array(answer["tokens"])
        parents = np.repeat(lease.ids, len(ids) // len(lease.rows))
        segment = Segment.from_json(answer["segment"])
        self.buffer.publish(self.ledger, lease, Published(ids, tokens, None, parents, lease.ids), segment)
        self.ledger.finish(lease)

    def start(self, worker: str, do: str, node: Node, rows: int, **more: Any) -> bool:
        """Claim rows for a worker and tell it where they are; False: there are none."""
        lease = self.ledger.claim(node, max_rows=rows, holder=worker)
        if lease is None:
            return False
        self.leases[lease.token] = lease
        found = self.ledger.pieces(node, lease.rows)
        pieces = [[p.columns, p.keys.tolist(), [s.to_json() for s in p.segments]] for p in found]
        task = {"ids": lease.ids.tolist(), "parents": lease.parent_ids.tolist(), "pieces": pieces}
        self.workers[worker].tell(do, lease=lease.token, task=task, **more)
        return True

    def done(self, answer: Mapping[str, Any]) -> None:
        lease = self.leases.pop(answer["lease"])
        segment = Segment.from_json(answer["segment"]) if "segment" in answer else None
        self.buffer.publish(self.ledger, lease, Published(lease.ids, np.zeros(len(lease.rows), np.int64)), segment)
        self.ledger.finish(lease)

    def put_everything(self, node: Node, sizes: Sequence[int], groups_each: int) -> float:
        """Seconds until all is in the ledger and its log."""
        start = time.perf_counter()
        self.start_puts(node, sizes, groups_each)
        left = len(sizes)
        while left:
            for _, answer in self.answers():
                self.put_done(answer)
                left -= 1
        self.buffer.commit()
        return time.perf_counter() - start

    def read_everything(self, node: Node, rows: int, claim: int, in_flight: int) -> float:
        """Seconds until all rows were claimed, gathered in the order of the claim, and summed up."""
        start = time.perf_counter()
        left, reader = rows // claim, self.workers["reader"]
        while left:
            while reader.busy < in_flight and self.start("reader", "read", node, claim):
                pass
            for _, answer in self.answers():
                self.done(answer)
                left -= 1
        self.buffer.commit()
        return time.perf_counter() - start


# The works


def _hashes(groups: Sequence[Work], names: Sequence[str]) -> list[str]:
    return sorted(content_hash(row) for batch in groups for row in batch.rows(names))


def _ragged(folder: Path, rows: int, groups_per_put: int, claim: int, in_flight: int) -> tuple[float, float, bool]:
    """Seconds of putting, seconds of getting, and whether what came back is what was put."""
    groups = ragged(rows)
    sizes = [groups_per_put * GROUP] * (rows // (groups_per_put * GROUP))
    with Driver(folder, queue, ("producer", "reader")) as driver:
        first, second = driver.graph.nodes
        driver.workers["producer"].ask("make", groups=len(groups), per_put=groups_per_put, columns=list(DTYPES))
        expected, verified = _hashes(groups, tuple(DTYPES)), True
        put_s = get_s = 0.0
        passes = 5 + 3 * FILE_BYTES // sum(batch.num_bytes for batch in groups)
        for _ in range(passes):  # the last one counts: files go round by then, as they do in a run
            put_s = driver.put_everything(first, sizes, groups_per_put)
            get_s = driver.read_everything(second, rows, claim, in_flight)
            verified &= driver.workers["reader"].ask("hashes")["hashes"] == expected
    return put_s, get_s, verified


def _rates(rows: int, seconds: float, verified: bool) -> dict[str, Any]:
    num_bytes = sum(batch.num_bytes for batch in ragged(rows))
    rates = {"rows_per_s": rows / seconds, "gb_per_s": num_bytes / seconds / 1e9}
    return {"seconds": seconds, **rates, "verified": verified}


def ragged_put(folder: Path, *, rows: int, groups_per_put: int) -> dict[str, Any]:
    put_s, _, verified = _ragged(folder, rows, groups_per_put, GROUP, 1)
    return _rates(rows, put_s, verified)


def ragged_get(folder: Path, *, rows: int, claim: int, in_flight: int) -> dict[str, Any]:
    _, get_s, verified = _ragged(folder, rows, 1, claim, in_flight)
    return _rates(rows, get_s, verified)


def rectangle(folder: Path, *, bytes: int, rows: int) -> dict[str, Any]:
    numbers = dense(bytes).reshape(rows, -1)
    put_s = get_s = 0.0
    hashes: list[str] = []
    with Driver(folder, block, ("producer", "reader")) as driver:
        first, second = driver.graph.nodes
        driver.workers["producer"].ask("make_dense", bytes=bytes, rows=rows)
        for _ in range(5):
            put_s = driver.put_everything(first, [rows], 1)
            get_s = driver.read_everything(second, rows, rows, 1)
            hashes = driver.workers["reader"].ask("hashes")["hashes"]
    copy, copies = np.empty_like(numbers), []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(copy, numbers)
        copies.append(time.perf_counter() - start)
    rates = {"put": bytes / put_s / 1e9, "get": bytes / get_s / 1e9, "memcpy": bytes / float(np.median(copies)) / 1e9}
    return {
        **{f"{name}_gb_per_s": rate for name, rate in rates.items()},
        "verified": hashes == sorted(content_hash({"numbers": row}) for row in numbers),
    }


def claim(folder: Path, *, held: int, claims: int) -> dict[str, Any]:
    """The log is written in what is timed."""
    answer: dict[str, Any] = {}
    claimed: set[tuple[int, int]] = set()
    for rows in (8, 64):
        with Driver(folder, queue, ()) as driver:
            seconds = _claims(driver, held, claims, rows, claimed)
        for share in (50, 99):
            answer[f"claim_{rows}_p{share}_ms"] = 1e3 * float(np.percentile(seconds, share))
    wanted = sum(rows * min(claims, held // rows) for rows in (8, 64))
    return {**answer, "verified": len(claimed) == wanted}


def _claims(driver: Driver, held: int, claims: int, rows: int, claimed: set[tuple[int, int]]) -> list[float]:
    ledger, log, (first, second) = driver.ledger, driver.buffer.log, driver.graph.nodes
    ledger.issue([0] * (held // GROUP), [0] * (held // GROUP), round=0)
    number = itertools.count()
    while lease := ledger.claim(first, max_rows=64):
        ids = np.add.outer(lease.first_children, np.arange(GROUP)).ravel()
        published = Published(ids, np.ones(len(ids), np.int64), None, np.repeat(lease.ids, GROUP), lease.ids)
        ledger.publish(lease, published, Segment(NODE, f"none-0.0.{next(number):06d}.arrows", 0, 1, 0))
        ledger.finish(lease)
        log.commit()
    seconds = []
    for _ in range(min(claims, held // rows)):
        start = time.perf_counter()
        lease = ledger.claim(second, max_rows=rows)
        log.commit()
        seconds.append(time.perf_counter() - start)
        assert lease is not None
        claimed.update((rows, id) for id in lease.ids.tolist())
    ledger.take_freed()
    return seconds


def stream(folder: Path, *, groups: int, group_ms: float, microbatch: int, train_ms: float) -> dict[str, Any]:
    microbatches = groups * GROUP // microbatch
    with Driver(folder, streaming, ("producer", "reward", "trainer")) as driver:
        first, second, third = driver.graph.nodes
        reward, trainer = driver.workers["reward"], driver.workers["trainer"]
        driver.workers["producer"].ask("make", groups=groups, per_put=1, columns=list(GENERATED))
        for worker in (reward, trainer):
            worker.ask("hashes")  # it is up
        start = time.monotonic() + 0.5
        driver.start_puts(first, [GROUP] * groups, 1, [start + (k + 1) * group_ms / 1e3 for k in range(groups)])
        left = microbatches
        while left:
            for name, answer in driver.answers():
                if name == "producer":
                    driver.put_done(answer)
                else:
                    driver.done(answer)
                    left -= name == "trainer"
            if not reward.busy:
                driver.start("reward", "score", second, 64)
            while trainer.busy < 2 and driver.ledger.ready(third) >= microbatch:
                driver.start("trainer", "train", third, microbatch, seconds=train_ms / 1e3)
        answer = trainer.ask("trained", start=start)
        made = ragged(groups * GROUP)
        for batch in made:
            batch.scalars["reward"][:] = [reward_of(batch["response_ids"][row]) for row in range(GROUP)]  # pyright: ignore[reportIndexIssue]
        hashes = trainer.ask("hashes")["hashes"]
    return {"microbatches": microbatches, **answer, "verified": hashes == _hashes(made, (*GENERATED, "reward"))}


WORKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "ragged_put": ragged_put,
    "ragged_get": ragged_get,
    "dense": rectangle,
    "claim": claim,
    "stream": stream,
}


def main(small: bool) -> None:
    turns = Turns()
    with tempfile.TemporaryDirectory(prefix="weft-buffer-") as folder:
        turns.say(ready=True)
        while turns.go_on():
            work, asked = settings(turns.command, small)
            turns.say(work=work, **WORKS[work](Path(folder), **asked))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few rows: not a measurement")
    parser.add_argument("--worker", nargs=3, metavar=("SOCKET", "FOLDER", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        end, folder, name = arguments.worker
        access = Files(Path(folder)).access(NODE, name)
        os.environ["OMP_NUM_THREADS"] = "1"
        WorkerSide(Line(socket.socket(fileno=int(end))), access).serve()
        access.close()
    else:
        main(arguments.small)
