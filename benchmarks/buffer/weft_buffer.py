"""Weft's sample buffer on the works of `rows.py`, one measurement at a time.

    system = System(HERE / "weft_buffer.py", log=log)      # turns.py
    [answer] = system.run(1, work="ragged_put", rows=512, groups_per_put=8)

Commands are those of `queue_peer.py`. As in a run, the driver process holds the ledger and the log,
and worker processes (`weft_nodes.py`) write and read rows. Pipes carry their reports and orders.
Each loop commits the log once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rows import (
    CLAIMED,
    DTYPES,
    GENERATED,
    GROUP,
    REWARDED,
    claim_times,
    content_hash,
    dense,
    hashes,
    ragged,
    rewarded,
    settings,
    throughput,
)
from turns import Turns
from weft_nodes import NODE, PROCESSES, Reply, block, get, queue, serve, streaming

from weft.controllers.backends.backend import FILE_BYTES
from weft.controllers.ranks.tasks import RowTask
from weft.dataflow.buffer.leases import Lease, Published, column_pieces
from weft.dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.graph import Graph, Node
from weft.dataflow.operation import declaration_of
from weft.dataflow.source import TableSource

ANSWER_S = 60
"""[s] Longest wait for a worker process."""


class WorkerProcess:
    def __init__(self, folder: Path, name: str) -> None:
        self.connection, there = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=serve, args=(there, folder, name), daemon=True)
        self._process.start()
        there.close()
        self.busy = 0

    def tell(self, do: str, **message: Any) -> None:
        self.connection.send((do, message))
        self.busy += 1

    def answer(self) -> Any:
        self.busy -= 1
        return self.connection.recv()

    def ask(self, do: str, **message: Any) -> Any:
        self.tell(do, **message)
        return self.answer()

    def close(self) -> None:
        self.connection.close()
        self._process.join(10)


class Driver:
    """A buffer with its graph and workers, new for each measurement."""

    def __init__(self, folder: Path, graph: Callable[..., Graph], workers: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.graph = graph(TableSource("prompts", pa.table({"seed": [0]})))
        self.buffer = SampleBuffer.create(
            self.folder, {"train": self.graph}, node=NODE, config=BufferConfig()
        )
        self.ledger = self.buffer.ledgers["train"]
        self.workers = {name: WorkerProcess(self.folder / "segments", name) for name in workers}
        self.leases: dict[int, Lease] = {}
        """Maps tokens to leases."""
        declaration = declaration_of(get)
        assert declaration is not None
        self._operation = declaration.called_with({})

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()
        self.buffer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self) -> Iterator[tuple[str, Reply]]:
        """Commit the log, wait for any worker, and yield all available replies."""
        self.buffer.commit()
        if not wait([worker.connection for worker in self.workers.values()], ANSWER_S):
            raise TimeoutError(f"no worker of {', '.join(self.workers)} answered for {ANSWER_S} s")
        for name, worker in self.workers.items():
            while worker.connection.poll():
                yield name, worker.answer()

    def start_puts(
        self, node: Node, sizes: Sequence[int], groups_each: int, at: Sequence[float] = ()
    ) -> None:
        """Claim a prompt per group, and let the producer write its rows at these monotonic
        times."""
        self.ledger.issue([0] * (len(sizes) * groups_each), [0] * (len(sizes) * groups_each), step=0)
        for number, rows in enumerate(sizes):
            lease = self.ledger.claim(node, max_rows=groups_each)
            assert lease is not None
            self.leases[lease.token] = lease
            published = _children(lease, rows // groups_each, tokens=2000)
            when = at[number] if at else 0.0
            self.workers["producer"].tell(
                "put", number=number, lease=lease.token, published=published, at=when
            )

    def start(self, worker: str, do: str, node: Node, rows: int, **more: Any) -> bool:
        """Claim rows for a worker and send it their locations; return False if there are none."""
        lease = self.ledger.claim(node, max_rows=rows, holder=worker)
        if lease is None:
            return False
        self.leases[lease.token] = lease
        parents = lease.parent_ids
        every = range(lease.num_rows)
        source, index = self.ledger.source, np.arange(len(every))
        pieces = column_pieces(self.ledger.graph, source, lease, [every], index)[0]
        task = RowTask(self._operation, (), lease.ids, parents, parents, pieces)
        self.workers[worker].tell(do, lease=lease.token, task=task, **more)
        return True

    def done(self, token: int, published: Published, segment: Segment | None) -> None:
        lease = self.leases.pop(token)
        self.buffer.publish(self.ledger, lease, published, segment)
        self.ledger.finish(lease)

    def put_everything(self, node: Node, sizes: Sequence[int], groups_each: int) -> float:
        """Return the seconds until everything is in the ledger and its log."""
        start = time.perf_counter()
        self.start_puts(node, sizes, groups_each)
        while self.leases:
            for _, reply in self.answers():
                self.done(*reply)
        self.buffer.commit()
        return time.perf_counter() - start

    def read_everything(self, node: Node, rows: int, claim: int, in_flight: int) -> float:
        """Return the seconds until all rows are claimed, gathered in claim order, and summed."""
        start = time.perf_counter()
        left, reader = rows // claim, self.workers["reader"]
        while left:
            while reader.busy < in_flight and self.start("reader", "read", node, claim):
                pass
            for _, reply in self.answers():
                self.done(*reply)
                left -= 1
        self.buffer.commit()
        return time.perf_counter() - start


def _children(lease: Lease, each: int, tokens: int) -> Published:
    """Return a publication of all children of a lease, `each` per row."""
    ids = np.add.outer(lease.first_children, np.arange(each)).ravel()
    return Published(ids, np.full(len(ids), tokens), None, np.repeat(lease.ids, each), lease.ids)


# Works


def _ragged(folder: Path, rows: int, groups_per_put: int, claim: int, in_flight: int) -> tuple[Any, Any]:
    """Return the answers of `ragged_put` and `ragged_get`."""
    groups = ragged(rows)
    sizes = [groups_per_put * GROUP] * (rows // (groups_per_put * GROUP))
    with Driver(folder, queue, ("producer", "reader")) as driver:
        first, second = driver.graph.nodes
        driver.workers["producer"].ask(
            "make", groups=len(groups), per_put=groups_per_put, columns=list(DTYPES)
        )
        expected, verified = hashes(groups), True
        put_s = get_s = 0.0
        passes = 5 + 3 * FILE_BYTES // sum(batch.nbytes for batch in groups)
        # only the last pass counts: by then files are recycled, as in a run
        for _ in range(passes):
            put_s = driver.put_everything(first, sizes, groups_per_put)
            get_s = driver.read_everything(second, rows, claim, in_flight)
            verified &= driver.workers["reader"].ask("hashes", names=list(DTYPES)) == expected
    put, get = ({**throughput(groups, seconds), "verified": verified} for seconds in (put_s, get_s))
    return put, get


def ragged_put(folder: Path, *, rows: int, groups_per_put: int) -> dict[str, Any]:
    return _ragged(folder, rows, groups_per_put, GROUP, 1)[0]


def ragged_get(folder: Path, *, rows: int, claim: int, in_flight: int) -> dict[str, Any]:
    return _ragged(folder, rows, 1, claim, in_flight)[1]


def rectangle(folder: Path, *, bytes: int, rows: int) -> dict[str, Any]:
    numbers = dense(bytes).reshape(rows, -1)
    put_s = get_s = 0.0
    found: list[str] = []
    with Driver(folder, block, ("producer", "reader")) as driver:
        first, second = driver.graph.nodes
        driver.workers["producer"].ask("make_dense", bytes=bytes, rows=rows)
        for _ in range(5):
            put_s = driver.put_everything(first, [rows], 1)
            get_s = driver.read_everything(second, rows, rows, 1)
            found = driver.workers["reader"].ask("hashes", names=["numbers"])
    copy, copies = np.empty_like(numbers), []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(copy, numbers)
        copies.append(time.perf_counter() - start)
    seconds = {"put": put_s, "get": get_s, "memcpy": float(np.median(copies))}
    return {
        **{f"{name}_gb_per_s": bytes / each / 1e9 for name, each in seconds.items()},
        "verified": found == sorted(content_hash({"numbers": row}) for row in numbers),
    }


def claim(folder: Path, *, held: int, claims: int) -> dict[str, Any]:
    """Measure `claim`, including the writes to the log."""
    seconds: dict[int, list[float]] = {}
    claimed: set[tuple[int, int]] = set()
    for rows in CLAIMED:
        with Driver(folder, queue, ()) as driver:
            seconds[rows] = _claims(driver, held, claims, rows, claimed)
    wanted = sum(rows * min(claims, held // rows) for rows in CLAIMED)
    return {**claim_times(seconds), "verified": len(claimed) == wanted}


def _claims(
    driver: Driver, held: int, claims: int, rows: int, claimed: set[tuple[int, int]]
) -> list[float]:
    ledger, log, (first, second) = driver.ledger, driver.buffer.log, driver.graph.nodes
    ledger.issue([0] * (held // GROUP), [0] * (held // GROUP), step=0)
    number = itertools.count()
    while lease := ledger.claim(first, max_rows=64):
        segment = Segment(NODE, f"none-0.0.{next(number):06d}.arrows", 0, 1, 0)
        ledger.publish(lease, _children(lease, GROUP, tokens=1), segment)
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
    ledger.parts.take_freed()
    return seconds


def stream(
    folder: Path, *, groups: int, group_ms: float, microbatch: int, train_ms: float
) -> dict[str, Any]:
    left = microbatches = groups * GROUP // microbatch
    with Driver(folder, streaming, ("producer", "reward", "trainer")) as driver:
        first, second, third = driver.graph.nodes
        reward, trainer = driver.workers["reward"], driver.workers["trainer"]
        driver.workers["producer"].ask("make", groups=groups, per_put=1, columns=list(GENERATED))
        for worker in (reward, trainer):
            worker.ask("hashes", names=[])  # wait until it is up
        start = time.monotonic() + 0.5
        driver.start_puts(
            first, [GROUP] * groups, 1, [start + (k + 1) * group_ms / 1e3 for k in range(groups)]
        )
        while left:
            for name, reply in driver.answers():
                driver.done(*reply)
                left -= name == "trainer"
            if not reward.busy:
                driver.start("reward", "score", second, 64)
            while trainer.busy < 2 and driver.ledger.readiness.ready(third) >= microbatch:
                driver.start("trainer", "train", third, microbatch, seconds=train_ms / 1e3)
        answer = trainer.ask("trained", start=start)
        found = trainer.ask("hashes", names=list(REWARDED))
    verified = found == hashes(rewarded(groups * GROUP), REWARDED)
    return {"microbatches": microbatches, **answer, "verified": verified}


WORKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "ragged_put": ragged_put,
    "ragged_get": ragged_get,
    "dense": rectangle,
    "claim": claim,
    "stream": stream,
}


def main(small: bool) -> None:
    turns = Turns()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the worker processes
    with tempfile.TemporaryDirectory(prefix="weft-buffer-") as folder:
        turns.say(ready=True)
        while turns.go_on():
            work, asked = settings(turns.command, small)
            turns.say(work=work, **WORKS[work](Path(folder), **asked))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a few rows: not a measurement")
    main(parser.parse_args().small)
