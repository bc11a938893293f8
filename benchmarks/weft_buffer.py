"""Weft's sample buffer, a measurement at a time: the same work as `transfer_queue.py` does, in the same words.

    system = System([".venv/bin/python", "benchmarks/weft_buffer.py"], log)      # turns.py
    [answer] = system.run(1, work="ragged_put", rows=512, groups_per_put=8)

This process holds the ledgers and the log, as the driver does in a run. Rows are written and read by worker processes, which tell it
over a socket (lines of JSON) what they wrote, and are told what to read; the log is committed once a turn of the loop.

| work | arguments | answer |
|---|---|---|
| `ragged_put` | `rows`, `groups_per_put` | `rows_per_s`, `gb_per_s`, `seconds`: until all is in the ledger and its log |
| `ragged_get` | `rows`, `claim`, `in_flight` | the same: claimed, gathered into one batch in the order of the claim, summed up |
| `dense` | `bytes`, `rows` | `put_gb_per_s`, `get_gb_per_s`, `put_s`, `get_s`, and `memcpy_gb_per_s` of the same bytes |
| `claim` | `held`, `claims` | `claim_8_p50_ms`, ..., `claim_64_p99_ms`, `claim_64_max_ms`, log included |
| `stream` | `groups`, `group_ms`, `microbatch`, `train_ms` | `first_s`, `idle_share`, `total_s`, `microbatches` |

All answers have `work` and `verified`: what came back has the content (`buffer_work.content_hash`) of what was put.
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
from buffer_work import DTYPES, GROUP, content_hash, dense, joined, ragged, reward_of, touch
from buffer_work import Batch as Work
from buffer_work import Ragged as WorkColumn
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
DEFAULTS: dict[str, dict[str, Any]] = {
    "ragged_put": {"rows": 512, "groups_per_put": 8},
    "ragged_get": {"rows": 512, "claim": 64, "in_flight": 4},
    "dense": {"bytes": 128 << 20, "rows": 64},
    "claim": {"held": 1000, "claims": 500},
    "stream": {"groups": 64, "group_ms": 25.0, "microbatch": 32, "train_ms": 100.0},
}
SMALL: dict[str, dict[str, Any]] = {
    "ragged_put": {"rows": 32, "groups_per_put": 2},
    "ragged_get": {"rows": 32, "claim": 16},
    "dense": {"bytes": 1 << 20, "rows": 8},
    "claim": {"held": 256, "claims": 2},
    "stream": {"groups": 8, "group_ms": 10.0, "train_ms": 10.0},
}


GENERATED = ("prompt_ids", "response_ids", "response_logprobs", "response_versions")
"""What the producer of `stream` puts."""


# The graphs: what the rows go through


@node(shape=Shape.EXPAND, reads=("seed",), writes=tuple(DTYPES))
def put(rows: Batch) -> Batch:
    return rows


@node(reads=tuple(DTYPES))
def get(rows: Batch) -> Batch:
    return rows


@node(shape=Shape.EXPAND, reads=("seed",), writes=("numbers",))
def fill(rows: Batch) -> Batch:
    return rows


@node(reads=("numbers",))
def consume(rows: Batch) -> Batch:
    return rows


@node(shape=Shape.EXPAND, reads=("seed",), writes=GENERATED)
def generate(rows: Batch) -> Batch:
    return rows


@node(reads=("response_ids",), writes=("reward",))
def score(rows: Batch) -> Batch:
    return rows


@node(reads=(*GENERATED, "reward"))
def update(rows: Batch) -> Batch:
    return rows


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

    def serve(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message = self._line.receive()
                getattr(self, message.pop("do"))(**message)

    def make(self, groups: int, per_put: int, columns: Sequence[str]) -> None:
        made = ragged(groups * GROUP)
        self._made = [_batch(joined(made[i : i + per_put]), columns) for i in range(0, groups, per_put)]
        self._line.send(ready=True)

    def make_dense(self, bytes: int, rows: int) -> None:
        numbers = dense(bytes).reshape(-1)
        offsets = np.linspace(0, len(numbers), rows + 1).astype(np.int32)
        self._made = [Batch.of(numbers=(numbers, offsets))]
        self._line.send(ready=True)

    def put(self, number: int, ids: Sequence[int], tokens: Sequence[int], at: float = 0.0) -> None:
        if at:
            time.sleep(max(0.0, at - time.monotonic()))
        segment = self._data.writer.append(self._made[number].with_columns(sample_id=np.array(ids)))
        self._line.send(lease=number, ids=ids, tokens=tokens, segment=segment.to_json())

    def read(self, lease: int, task: Mapping[str, Any]) -> None:
        batch = self._gather(task)
        _touch(batch)
        self._got.append(batch)
        self._line.send(lease=lease)

    def score(self, lease: int, task: Mapping[str, Any]) -> None:
        batch = self._gather(task)
        values, offsets = batch.ragged_numpy("response_ids")
        rewards = [reward_of(values[a:b]) for a, b in itertools.pairwise(offsets)]
        segment = self._data.writer.append(
            Batch.of(reward=np.array(rewards, np.float32), sample_id=np.array(task["ids"]))
        )
        self._line.send(lease=lease, ids=task["ids"], tokens=[0] * len(rewards), segment=segment.to_json())

    def train(self, lease: int, task: Mapping[str, Any], seconds: float) -> None:
        batch = self._gather(task)
        _touch(batch)
        self._got.append(batch)
        now = time.monotonic()
        if self._first:
            self._idle += now - self._idle_since
        else:
            self._first = now
        time.sleep(seconds)
        self._idle_since = time.monotonic()
        self._line.send(lease=lease)

    def trained(self, start: float) -> None:
        first, end = self._first, self._idle_since
        self._line.send(first_s=first - start, idle_share=self._idle / (end - first), total_s=end - start)
        self._first = self._idle = 0.0

    def hashes(self) -> None:
        self._line.send(hashes=sorted(content_hash(row) for batch in self._got for row in _rows(batch)))
        self._got.clear()

    def _gather(self, task: Mapping[str, Any]) -> Batch:
        pieces = [
            Piece(tuple(columns), np.array(keys), tuple(Segment.from_json(s) for s in segments))
            for columns, keys, segments in task["pieces"]
        ]
        ids, parents = np.array(task["ids"]), np.array(task["parents"])
        declaration = declaration_of(get)
        assert declaration is not None
        return gather(RowTask(declaration.called_with({}), (), ids, parents, parents, pieces), self._data.reader)


def _batch(work: Work, columns: Sequence[str]) -> Batch:
    record = work.to_arrow()
    return Batch(record.select(list(columns)))


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    names = [n for n in (*DTYPES, "numbers") if n in batch]
    columns = {n: batch.ragged_numpy(n) if pa.types.is_list(batch[n].type) else None for n in names}
    for row in range(len(batch)):
        yield {
            n: pair[0][pair[1][row] : pair[1][row + 1]] if pair else batch.numpy(n)[row : row + 1]
            for n, pair in columns.items()
        }


def _touch(batch: Batch) -> float:
    ragged_columns = {n: WorkColumn(*batch.ragged_numpy(n)) for n in batch.columns if pa.types.is_list(batch[n].type)}
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


class System:
    """A buffer, its graph, and its workers; a new one for each measurement."""

    def __init__(self, folder: Path, graph: Callable[..., Graph], workers: Sequence[str]) -> None:
        source = TableSource("prompts", pa.table({"seed": [0]}))
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.graph = graph(source)
        self.buffer = SampleBuffer.create(self.folder, {"train": self.graph}, node=NODE, config=BufferConfig())
        self.ledger = self.buffer.ledgers["train"]
        self.workers = {name: WorkerProcess(self.folder / "segments", name) for name in workers}
        self.leases: dict[int, Lease] = {}
        """Number of a call -> what was claimed for it."""

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()
        self.buffer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What workers have said, at least one thing; then the log is committed."""
        self.buffer.commit()
        ready = [name for name, w in self.workers.items() if w.line.waiting()]
        if not ready:
            sockets = {w.line.socket: name for name, w in self.workers.items()}
            readable, _, _ = select.select(list(sockets), [], [], 60)
            if not readable:
                raise TimeoutError(f"no worker of {', '.join(self.workers)} answered for 60 s")
            for end in readable:
                self.workers[sockets[end]].line.fill()
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
        published = Published(ids, tokens, None, parents, lease.ids)
        self.buffer.publish(self.ledger, lease, published, Segment.from_json(answer["segment"]))
        self.ledger.finish(lease)

    def start(self, worker: str, do: str, node: Node, rows: int, **more: Any) -> bool:
        """Claim rows for a worker and tell it where they are; False: there are none."""
        lease = self.ledger.claim(node, max_rows=rows, holder=worker)
        if lease is None:
            return False
        self.leases[lease.token] = lease
        pieces = [
            [p.columns, p.keys.tolist(), [s.to_json() for s in p.segments]]
            for p in self.ledger.pieces(node, lease.rows)
        ]
        task = {"ids": lease.ids.tolist(), "parents": lease.parent_ids.tolist(), "pieces": pieces}
        self.workers[worker].tell(do, lease=lease.token, task=task, **more)
        return True

    def done(self, answer: Mapping[str, Any]) -> None:
        lease = self.leases.pop(answer["lease"])
        segment = Segment.from_json(answer["segment"]) if "segment" in answer else None
        self.buffer.publish(self.ledger, lease, Published(lease.ids, np.zeros(len(lease.rows), np.int64)), segment)
        self.ledger.finish(lease)

    def put_everything(self, node: Node, sizes: Sequence[int], groups_each: int) -> float:
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


def _hashes(groups: Sequence[Work], names: Sequence[str]) -> list[str]:
    return sorted(content_hash(row) for batch in groups for row in batch.rows(names))


def _throughput(groups: Sequence[Work], seconds: float) -> dict[str, float]:
    rows, num_bytes = sum(b.num_rows for b in groups), sum(b.num_bytes for b in groups)
    return {"seconds": seconds, "rows_per_s": rows / seconds, "gb_per_s": num_bytes / seconds / 1e9}


def _ragged(folder: Path, rows: int, groups_per_put: int, claim: int, in_flight: int) -> dict[str, Any]:
    groups = ragged(rows)
    sizes = [groups_per_put * GROUP] * (rows // (groups_per_put * GROUP))
    with System(folder, queue, ("producer", "reader")) as system:
        nodes = system.graph.nodes
        system.workers["producer"].ask("make", groups=len(groups), per_put=groups_per_put, columns=list(DTYPES))
        expected, verified = _hashes(groups, tuple(DTYPES)), True
        put_s = get_s = 0.0
        passes = 5 + 3 * FILE_BYTES // sum(batch.num_bytes for batch in groups)
        for _ in range(passes):  # the last one counts: files go round by then, as they do in a run
            put_s = system.put_everything(nodes[0], sizes, groups_per_put)
            get_s = system.read_everything(nodes[1], rows, claim, in_flight)
            verified &= system.workers["reader"].ask("hashes")["hashes"] == expected
        return {"put": _throughput(groups, put_s), "get": _throughput(groups, get_s), "verified": verified}


def ragged_put(folder: Path, *, rows: int, groups_per_put: int) -> dict[str, Any]:
    answer = _ragged(folder, rows, groups_per_put, GROUP, 1)
    return {**answer["put"], "verified": answer["verified"]}


def ragged_get(folder: Path, *, rows: int, claim: int, in_flight: int) -> dict[str, Any]:
    answer = _ragged(folder, rows, 1, claim, in_flight)
    return {**answer["get"], "verified": answer["verified"]}


def rectangle(folder: Path, *, bytes: int, rows: int) -> dict[str, Any]:
    numbers = dense(bytes).reshape(rows, -1)
    put_s = get_s = 0.0
    hashes: list[str] = []
    with System(folder, block, ("producer", "reader")) as system:
        nodes = system.graph.nodes
        system.workers["producer"].ask("make_dense", bytes=bytes, rows=rows)
        for _ in range(5):
            put_s = system.put_everything(nodes[0], [rows], 1)
            get_s = system.read_everything(nodes[1], rows, rows, 1)
            hashes = system.workers["reader"].ask("hashes")["hashes"]
    copy, copies = np.empty_like(numbers), []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(copy, numbers)
        copies.append(time.perf_counter() - start)
    return {
        "put_s": put_s,
        "get_s": get_s,
        "put_gb_per_s": bytes / put_s / 1e9,
        "get_gb_per_s": bytes / get_s / 1e9,
        "memcpy_gb_per_s": bytes / float(np.median(copies)) / 1e9,
        "verified": hashes == sorted(content_hash({"numbers": row}) for row in numbers),
    }


def claim(folder: Path, *, held: int, claims: int) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    claimed: set[tuple[int, int]] = set()
    for rows in (8, 64):
        with System(folder, queue, ()) as system:
            ledger, (first, second) = system.ledger, system.graph.nodes
            ledger.issue([0] * (held // GROUP), [0] * (held // GROUP), round=0)
            number = itertools.count()
            while lease := ledger.claim(first, max_rows=64):
                ids = np.add.outer(lease.first_children, np.arange(GROUP)).ravel()
                published = Published(ids, np.ones(len(ids), np.int64), None, np.repeat(lease.ids, GROUP), lease.ids)
                ledger.publish(lease, published, Segment(NODE, f"none-0.0.{next(number):06d}.arrows", 0, 1, 0))
                ledger.finish(lease)
                system.buffer.log.commit()
            seconds = []
            for _ in range(min(claims, held // rows)):
                start = time.perf_counter()
                lease = ledger.claim(second, max_rows=rows)
                system.buffer.log.commit()
                seconds.append(time.perf_counter() - start)
                assert lease is not None
                claimed.update((rows, id) for id in lease.ids.tolist())
            ledger.take_freed()
        for share in (50, 99):
            answer[f"claim_{rows}_p{share}_ms"] = 1e3 * float(np.percentile(seconds, share))
        answer[f"claim_{rows}_max_ms"] = 1e3 * max(seconds)
    wanted = sum(rows * min(claims, held // rows) for rows in (8, 64))
    return {**answer, "verified": len(claimed) == wanted}


def stream(folder: Path, *, groups: int, group_ms: float, microbatch: int, train_ms: float) -> dict[str, Any]:
    microbatches = groups * GROUP // microbatch
    with System(folder, streaming, ("producer", "reward", "trainer")) as system:
        first, second, third = system.graph.nodes
        system.workers["producer"].ask("make", groups=groups, per_put=1, columns=list(GENERATED))
        for worker in ("reward", "trainer"):
            system.workers[worker].ask("hashes")
        start = time.monotonic() + 0.5
        system.start_puts(first, [GROUP] * groups, 1, [start + (k + 1) * group_ms / 1e3 for k in range(groups)])
        left = microbatches
        while left:
            for name, answer in system.answers():
                if name == "producer":
                    system.put_done(answer)
                else:
                    system.done(answer)
                    left -= name == "trainer"
            if not system.workers["reward"].busy:
                system.start("reward", "score", second, 64)
            while system.workers["trainer"].busy < 2 and system.ledger.ready(third) >= microbatch:
                system.start("trainer", "train", third, microbatch, seconds=train_ms / 1e3)
        answer = system.workers["trainer"].ask("trained", start=start)
        made = ragged(groups * GROUP)
        for batch in made:
            batch.scalars["reward"][:] = [reward_of(batch["response_ids"][row]) for row in range(GROUP)]  # pyright: ignore[reportIndexIssue]
        hashes = system.workers["trainer"].ask("hashes")["hashes"]
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
            command = {k: v for k, v in turns.command.items() if k != "steps"}
            work = command.pop("work")
            settings = {**DEFAULTS[work], **(SMALL[work] if small else {}), **command}
            turns.say(work=work, **WORKS[work](Path(folder), **settings))


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
