"""What the sample buffer keeps when processes are killed, hang, and come back too late; proved from its log.

    .venv/bin/python benchmarks/buffer_kills.py             # 10,000 simulated kills over a million rows, then 50 real ones
    .venv/bin/python benchmarks/buffer_kills.py --small     # seconds

`simulated` runs the real buffer, log and checkpoints by a fake clock, with workers that only claim and answer. `real` starts a driver
and workers as processes of their own, which write and verify the real columns of `buffer_work`, and sends them signals. In
both a worker dies (its lease is released), hangs (its lease's deadline passes; later it wakes, answers, and is refused), or
the driver dies and recovers from its log. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from buffer_work import GROUP, content_hash, group, reward_of
from weft_buffer import GENERATED, Line

import weft
from weft.controllers.row_io import gather
from weft.controllers.tasks import RowTask
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.disk import Disk
from weft.dataflow.buffer.log import LogReader
from weft.dataflow.buffer.rows import Lease, Piece, Published
from weft.dataflow.buffer.sample_buffer import LOG, SEGMENTS, BufferConfig, SampleBuffer
from weft.dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from weft.dataflow.config import Config
from weft.dataflow.errors import DamagedSegment, LeaseError
from weft.dataflow.graph import Graph
from weft.dataflow.handle import group as worker_group
from weft.dataflow.node import Node
from weft.dataflow.operation import Shape, node
from weft.dataflow.source import TableSource
from weft.dataflow.takes import TrainingBatch
from weft.workers.dispatch import Dispatch
from weft.workers.remote import remote
from weft.workers.worker import Worker

NODE = "bench"
Fault = Literal["kill", "hang", "restart"]


# The graph: what the rows go through


@node(shape=Shape.EXPAND, reads=("seed",), writes=GENERATED)
def generate(rows: Batch, *, n: int) -> Batch:
    return rows


@node(reads=("response_ids",), writes=("reward",))
def score(rows: Batch) -> Batch:
    return rows


@node(shape=Shape.GROUP, reads=("reward",), writes=("advantage",))
def advantages(rows: Batch) -> Batch:
    return rows


class Trainer(Worker):
    Config = Config

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=(*GENERATED, "reward", "advantage"), takes=TrainingBatch())
    def update(self, rows: Batch) -> None: ...


@weft.graph
def training(prompts: Any, actor: Any) -> Any:
    return actor.update(advantages(score(generate(prompts, n=GROUP))))


def make_graph() -> Graph:
    return training(TableSource("prompts", pa.table({"seed": [0]})), worker_group(Trainer))


# The proof: what the log says, read without the ledger


def proof_of(folder: Path, prompts: int) -> dict[str, int]:
    """Of the log in a buffer's folder, whose run had these positions of the prompts (0, 1, ...) to train on.

    `lost` are samples that were never trained on, or not all that a prompt must have; `duplicated` are rows that a node was
    through with twice; `mixed_groups` are claims of nodes that take groups with others than all 8 rows of a prompt.
    """
    node_bits = {"generate": 1, "score": 2, "advantages": 4, "actor.update": 8}
    positions: dict[int, int] = {}
    """Row in flight -> the position of its prompt."""
    roots: dict[int, int] = {}
    members: dict[int, set[int]] = {}
    done: dict[int, int] = {}
    leases: dict[int, tuple[str, list[int]]] = {}
    staged: dict[int, list[int]] = {}
    trained: Counter[int] = Counter()
    duplicated = mixed = 0

    def through(name: str, ids: list[int]) -> int:
        """Takes note that a node is through with rows; how many of them it was through with before."""
        again, bit = 0, node_bits[name]
        for id in ids:
            if id not in done or done[id] & bit:  # forgotten ones were trained on
                again += 1
                continue
            done[id] |= bit
            if name == "actor.update":
                trained[positions.pop(id)] += 1
                root = roots.pop(id)
                del done[id]
                members[root].discard(id)
                if not members[root]:
                    del members[root], done[root], positions[root], roots[root]
        return again

    reader = LogReader(folder / LOG)
    for record in reader:
        match record["do"]:
            case "issue":
                for id, position in enumerate(record["positions"], record["first"]):
                    positions[id], roots[id], members[id], done[id] = position, id, set(), 0
            case "claim":
                name, ids = leases[record["lease"]] = record["node"], record["ids"]
                if name in ("advantages", "actor.update"):
                    by_root: dict[int, set[int]] = {}
                    for id in ids:
                        by_root.setdefault(roots.get(id, -1), set()).add(id)
                    whole = all(len(g) == GROUP and members.get(root) == g for root, g in by_root.items())
                    mixed += not whole or len(ids) != GROUP * len(by_root)
                    staged[record["lease"]] = []
            case "publish":
                name = leases[record["lease"]][0]
                if "parents" in record:
                    for id, parent in zip(record["ids"], record["parents"], strict=True):
                        positions[id], roots[id], done[id] = positions[parent], parent, 0
                        members[parent].add(id)
                    duplicated += through(name, list(dict.fromkeys(record["parents"])))
                elif record["lease"] in staged:
                    staged[record["lease"]] += record["ids"]
                else:
                    duplicated += through(name, record["ids"])
            case "finish":
                duplicated += through(leases.pop(record["lease"])[0], staged.pop(record["lease"], []))
            case "release":
                del leases[record["lease"]]
                staged.pop(record["lease"], None)
            case _:
                pass
    if reader.damage:
        raise RuntimeError(reader.damage)
    lost = sum(max(0, GROUP - trained[position]) for position in range(prompts))
    duplicated += sum(max(0, number - GROUP) for number in trained.values())
    return {"rows": trained.total(), "lost": lost, "duplicated": duplicated, "mixed_groups": mixed}


# Simulated: the real buffer, a fake clock, and workers that only claim and answer

TICK_S = 1.0
"""Seconds between two turns of the driver's loop."""
DEADLINE_S = 15.0


@dataclass(frozen=True)
class Role:
    """A kind of worker: the most that it claims (rows, or groups), and how much of that it publishes at once."""

    node: str
    workers: int
    claim: int
    part: int


ROLES = (
    Role("generate", 12, 8, 2),
    Role("score", 6, 128, 48),
    Role("advantages", 2, 32, 16),
    Role("actor.update", 1, 64, 16),
)


@dataclass
class FakeWorker:
    name: str
    role: Role
    lease: Lease | None = None
    parts: deque[slice] = field(default_factory=deque)
    """Of the rows of its lease, those that it has not published."""
    answers_at: float = 0.0
    """When it publishes its next part; hung, when it wakes."""
    since: float = 0.0
    """When it hung."""
    written: int = 0


class Death(Exception):
    """The process ends within a write."""


class MortalDisk(Disk):
    """The real disk under a process that dies: what it has open is closed, a write may end half-way."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._writes_left, self._share = -1, 0.0

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        self._open.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        super().close(descriptor)

    def write(self, descriptor: int, data: bytes) -> None:
        if not self._writes_left:
            super().write(descriptor, data[: int(self._share * len(data))])
            raise Death
        self._writes_left -= 1
        super().write(descriptor, data)

    def tear(self, share: float, *, writes: int = 0) -> None:
        """Let so many more writes pass, and stop after this share of the next."""
        self._writes_left, self._share = writes, share

    def die(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)


class Simulation:
    """A run of the driver's loop, turn by turn."""

    def __init__(self, folder: Path, kills: int, prompts: int, seed: int) -> None:
        self.folder, self.kills, self.prompts = folder, kills, prompts
        self.random = random.Random(seed)
        self.now = 0.0
        self.graph = make_graph()
        max_rows = min(6_000, prompts * GROUP // 4)
        self.config = BufferConfig(max_rows=max_rows, sync_interval_s=600)
        self.largest_batch = max(1, max_rows // (GROUP + 1) // 8)
        """Groups of an update: eight times as many are in flight."""
        self.disk = MortalDisk()
        self.buffer = SampleBuffer.create(
            folder, {"train": self.graph}, node=NODE, config=self.config, disk=self.disk, clock=self.clock
        )
        self.faults: Counter[str] = Counter()
        self.hung: list[FakeWorker] = []
        """Those that hang, or answer to a driver that is gone."""
        self.names = itertools.count()
        self.workers = [self.worker(role) for role in ROLES for _ in range(role.workers)]
        self.longest_stall_s = 0.0
        self.late_refused = self.turns = 0

    def clock(self) -> float:
        return self.now

    @property
    def ledger(self) -> Any:
        return self.buffer.ledgers["train"]

    def worker(self, role: Role) -> FakeWorker:
        return FakeWorker(f"{role.node.replace('.', '-')}-{next(self.names)}", role)

    def run(self) -> None:
        progress = 0
        while not self.finished():
            self.turn()
            if self.ledger.groups_finished * 10 // self.prompts > progress:
                progress = self.ledger.groups_finished * 10 // self.prompts
                faults = ", ".join(f"{number:,} {name}s" for name, number in sorted(self.faults.items()))
                print(f"{progress * 10:>3} % after {self.turns:,} turns: {faults}", flush=True)
        self.buffer.close()

    def finished(self) -> bool:
        everything = self.buffer.ids.next_group == self.prompts and not self.ledger.groups_in_flight
        return everything and not self.hung and self.faults.total() == self.kills

    def turn(self) -> None:
        self.now += TICK_S
        self.turns += 1
        due = round(self.kills * min(1.0, self.ledger.groups_finished / (0.95 * self.prompts))) - self.faults.total()
        now_due = sum(self.random.random() < 0.3 for _ in range(due))
        for fault in self.random.choices(("kill", "hang", "restart"), (56, 41, 3), k=now_due):
            busy = [w for w in self.workers if w.lease is not None and w not in self.hung]
            if fault == "restart" or busy or self.ledger.groups_finished == self.prompts:
                self.fault(fault if busy else "restart", busy)
        for worker in self.hung:
            if worker.lease is not None and self.ledger.holds(worker.lease):
                self.longest_stall_s = max(self.longest_stall_s, self.now - worker.since)
        expired = {lease.token for lease in self.ledger.expire()}
        for k, worker in enumerate(self.workers):
            if worker.lease is not None and worker.lease.token in expired:  # the driver gives it up
                self.workers[k] = self.worker(worker.role)
        self.wake()
        room = self.buffer.room("train").groups
        first = self.buffer.ids.next_group  # nothing is issued twice here: as many groups as positions
        positions = range(first, min(first + room, self.prompts))
        if positions:
            self.ledger.issue(positions, [self.random.randrange(50, 400) for _ in positions], round=self.turns)
        for worker in self.workers:
            if worker not in self.hung:
                self.act(worker)
        self.buffer.commit()
        if self.turns % 40 == 0:
            self.buffer.checkpoint()

    def fault(self, fault: str, busy: list[FakeWorker]) -> None:
        """At a moment since the last turn."""
        at = self.now - self.random.random() * TICK_S
        self.faults[fault] += 1
        if fault == "restart":
            return self.restart()
        worker = self.random.choice(busy)
        assert worker.lease is not None
        if fault == "hang":
            worker.since = max(at, (worker.lease.deadline or 0.0) - DEADLINE_S)
            worker.answers_at = at + self.random.expovariate(1 / (2 * DEADLINE_S))  # some within their deadline
            self.hung.append(worker)
            return
        self.longest_stall_s = max(self.longest_stall_s, self.now - at)
        rules = worker.lease.node
        ready, back = self.ledger.ready(rules), worker.lease.rows if rules.operation.takes_groups else worker.lease.open
        self.ledger.release(worker.lease, f"{worker.name} was killed")
        if self.ledger.ready(rules) != ready + len(back):
            raise RuntimeError(f"rows of lease {worker.lease.token} of {worker.name} are not ready again")
        self.buffer.store.writer_ended(worker.name, NODE)
        self.workers[self.workers.index(worker)] = self.worker(worker.role)

    def restart(self) -> None:
        """The driver dies somewhere in its turn, with records that are not committed, and is started again."""
        for worker in self.random.sample(self.workers, self.random.randrange(len(self.workers))):
            if worker not in self.hung:
                self.act(worker)
        how = self.random.randrange(4)
        with contextlib.suppress(Death):
            if how == 0:
                self.disk.tear(self.random.random())  # a record of the log is torn
                self.buffer.commit()
            elif how == 1:
                self.disk.tear(self.random.random(), writes=1)  # a checkpoint is torn
                self.buffer.checkpoint()
        for worker in self.hung:
            if worker.lease is not None and self.ledger.holds(worker.lease):
                self.longest_stall_s = max(self.longest_stall_s, self.now - worker.since)
        self.disk.die()
        del self.buffer
        self.disk = MortalDisk()
        self.buffer = SampleBuffer.recover(
            self.folder,
            {"train": self.graph},
            node=NODE,
            config=self.config,
            check=lambda segment: None,
            disk=self.disk,
            clock=self.clock,
        )
        self.hung += [w for w in self.workers if w.lease is not None and w not in self.hung]
        self.workers = [self.worker(role) for role in ROLES for _ in range(role.workers)]

    def wake(self) -> None:
        for worker in [w for w in self.hung if w.answers_at <= self.now]:
            self.hung.remove(worker)
            assert worker.lease is not None
            if not self.ledger.holds(worker.lease):
                self.be_late(worker)

    def be_late(self, worker: FakeWorker) -> None:
        lease, place = worker.lease, self.buffer.log.position
        assert lease is not None
        actions: list[Callable[[], None]] = [lambda: self.ledger.finish(lease)]
        actions += [lambda: self.publish(worker)] if worker.parts else []
        for action in actions:
            with contextlib.suppress(LeaseError):
                action()
                raise RuntimeError(f"{worker.name} used lease {lease.token}, which was given to others")
        if self.buffer.log.position != place:
            raise RuntimeError(f"{worker.name} was refused, and is in the log")
        self.late_refused += 1
        self.buffer.store.writer_ended(worker.name, NODE)

    def act(self, worker: FakeWorker) -> None:
        if worker.lease is None:
            self.claim(worker)
        elif worker.answers_at <= self.now:
            if worker.parts:
                self.publish(worker)
                worker.answers_at = self.now + self.random.uniform(0.5, 1.5)
            else:
                self.ledger.finish(worker.lease)
                worker.lease = None

    def claim(self, worker: FakeWorker) -> None:
        role = worker.role
        rules = self.graph[role.node]
        takes_groups = rules.operation.takes_groups
        limit = role.claim
        if rules.operation.updates:
            limit = min(limit, self.largest_batch, self.ledger.groups_in_flight)
            if self.ledger.ready_groups(rules) < limit:
                return
        limits = {"max_groups" if takes_groups else "max_rows": max(1, limit)}
        worker.lease = self.ledger.claim(rules, **limits, holder=worker.name, deadline_s=DEADLINE_S)
        if worker.lease is not None:
            part = role.part * (GROUP if takes_groups else 1)
            worker.parts = deque(slice(k, k + part) for k in range(0, len(worker.lease.rows), part))
            worker.answers_at = self.now + self.random.uniform(0.5, 1.5)

    def publish(self, worker: FakeWorker) -> None:
        lease, part = worker.lease, worker.parts[0]
        assert lease is not None
        ids, parents, versions = lease.ids[part], None, None
        if worker.role.node == "generate":
            parents = np.repeat(ids, GROUP)
            ids = np.add.outer(lease.first_children[part], np.arange(GROUP)).ravel()
            versions = np.full(len(ids), self.turns)
        segment = None
        if worker.role.node != "actor.update":
            file, number = divmod(worker.written, 32)
            segment = Segment(NODE, f"{worker.name}.0.{file:06d}.arrows", 1000 * number, 1000, 0)
            worker.written += 1
        tokens = np.full(len(ids), 1800 if parents is not None else 0)
        finished = None if parents is None else np.unique(parents)
        self.buffer.publish(self.ledger, lease, Published(ids, tokens, versions, parents, finished), segment)
        worker.parts.popleft()


def simulated(kills: int = 10_000, rows: int = 1_000_000, seed: int = 0) -> dict[str, Any]:
    """So many kills over so many samples, in seconds of a fake clock."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-kills-") as name:
        simulation = Simulation(Path(name), kills, rows // GROUP, seed)
        simulation.run()
        ran = time.perf_counter()
        found, violations = proof_of(Path(name), rows // GROUP), check_log(Path(name)).violations
        num_bytes = (Path(name) / LOG).stat().st_size
    return {
        "kills": simulation.faults.total(),
        **found,
        "longest_stall_s": round(simulation.longest_stall_s, 3),
        "late_refused": simulation.late_refused,
        "restarts": simulation.faults["restart"],
        "hangs": simulation.faults["hang"],
        "violations": [str(violation) for violation in violations],
        "turns": simulation.turns,
        "log_bytes": num_bytes,
        "run_s": round(ran - started, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


# Real: processes and signals


COLUMNS = (*GENERATED, "reward", "advantage")
LEASE_S = 1.0
"""Deadline of a lease of a real worker; its work takes a tenth of it."""
REAL_ROLES: Mapping[str, tuple[str, ...]] = {
    "producer-a": ("generate",),
    "producer-b": ("generate",),
    "reward": ("score", "advantages"),
    "trainer": ("actor.update",),
}
"""Worker -> the nodes that it works for."""
CLAIMS = {"generate": 4, "score": 48, "advantages": 6, "actor.update": 8}
"""The most that is claimed at once: rows, or groups."""
FILE_BYTES = 1 << 20
"""Small, so that files are recycled all the time."""


def expected_rows(seed: int, position: int) -> list[str]:
    """Hashes of the eight rows that must come of a prompt."""
    made = group(seed, position)
    rewards = np.array([reward_of(made["response_ids"][k]) for k in range(GROUP)], np.float32)
    extra = {"reward": rewards, "advantage": rewards - rewards.mean()}
    rows = enumerate(made.rows(GENERATED))
    return [content_hash({**row, **{n: column[k : k + 1] for n, column in extra.items()}}) for k, row in rows]


class RealWorker:
    """A worker process: writes and reads rows in the folder of the node, as it is told."""

    def __init__(self, line: Line, folder: Path, name: str, seed: int) -> None:
        self.line, self.seed = line, seed
        self.writer = SegmentWriter(folder, NODE, name, file_bytes=FILE_BYTES)
        self.reader = SegmentReader(folder, NODE)
        self.random = random.Random(name)

    def serve(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            self.line.send(ready=True)
            while True:
                message = self.line.receive()
                try:
                    for answer in getattr(self, message["node"].split(".")[-1])(message):
                        self.line.send(lease=message["lease"], **answer)
                    self.line.send(lease=message["lease"], finished=True)
                except (
                    DamagedSegment
                ) as error:  # who hung may find that others are through with the rows, and the file gone
                    self.line.send(lease=message["lease"], damaged=str(error))

    def generate(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A group is published as soon as it is there."""
        for parent, position, first in zip(task["ids"], task["positions"], task["first"], strict=True):
            time.sleep(self.random.uniform(0.02, 0.06))
            ids = list(range(first, first + GROUP))
            batch = Batch(group(self.seed, position).to_arrow().select(list(GENERATED)))
            tokens = np.diff(batch.ragged_numpy("response_ids")[1]).tolist()
            yield {"parents": [parent] * GROUP, **self.written(batch, ids, tokens)}

    def score(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        values, offsets = self.read(task).ragged_numpy("response_ids")
        rewards = np.array([reward_of(values[a:b]) for a, b in itertools.pairwise(offsets)], np.float32)
        yield self.written(Batch.of(reward=rewards), task["ids"])

    def advantages(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        rewards = self.read(task).numpy("reward").reshape(-1, GROUP)
        for k, row in enumerate(rewards):
            yield self.written(Batch.of(advantage=row - row.mean()), task["ids"][k * GROUP : (k + 1) * GROUP])

    def update(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        batch = self.read(task)
        ragged = {n: batch.ragged_numpy(n) for n in GENERATED}
        scalars = {n: batch.numpy(n) for n in COLUMNS[len(GENERATED) :]}
        found = [
            content_hash(
                {n: values[offsets[k] : offsets[k + 1]] for n, (values, offsets) in ragged.items()}
                | {n: values[k : k + 1] for n, values in scalars.items()}
            )
            for k in range(len(batch))
        ]
        expected = [h for position in task["positions"][::GROUP] for h in expected_rows(self.seed, position)]
        time.sleep(self.random.uniform(0.05, 0.1))
        yield {"ids": task["ids"], "tokens": [0] * len(found), "wrong": sum(map(str.__ne__, found, expected))}

    def written(self, batch: Batch, ids: list[int], tokens: list[int] | None = None) -> dict[str, Any]:
        segment = self.writer.append(batch.with_columns(sample_id=np.array(ids)))
        return {"ids": ids, "tokens": tokens or [0] * len(ids), "segment": segment.to_json()}

    def read(self, task: Mapping[str, Any]) -> Batch:
        pieces = [
            Piece(tuple(columns), np.array(keys), tuple(Segment.from_json(s) for s in segments))
            for columns, keys, segments in task["pieces"]
        ]
        ids, parents = np.array(task["ids"]), np.array(task["parents"])
        operation = make_graph()[task["node"]].operation
        return gather(RowTask(operation, (), ids, parents, parents, pieces), self.reader)


@dataclass
class Hand:
    """A worker process as its driver sees it."""

    role: str
    name: str
    process: subprocess.Popen[bytes]
    line: Line
    lease: Lease | None = None
    since: float = 0.0
    """When it was given its lease."""
    ready: bool = False
    given_up: bool = False


class RealDriver:
    """Holds the buffer; everything that it must know again after its death is in the log."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.graph = make_graph()
        self.events = Events(folder)
        config = BufferConfig(max_rows=80 * (GROUP + 1), file_bytes=FILE_BYTES)
        started = time.monotonic()
        make = SampleBuffer.recover if (folder / LOG).exists() else SampleBuffer.create
        self.buffer = make(folder, {"train": self.graph}, node=NODE, config=config)
        self.ledger = self.buffer.ledgers["train"]
        lost = [d for d in self.buffer.damage if "issued again" in d]  # nothing that was written may be lost by a kill
        now = time.monotonic()
        self.events.say(recovered=now, took=now - started, damage=self.buffer.damage, lost_segments=len(lost))
        self.life = self.buffer.notes.get("life", 0) + 1
        self.buffer.note("life", self.life)  # names of workers are new in each life
        self.buffer.commit()
        self.numbers = itertools.count()
        self.hands = [self.start(role) for role in REAL_ROLES]

    def run(self) -> None:
        saved = time.monotonic()
        while not (self.issued_all() and not self.ledger.groups_in_flight and not any(h.given_up for h in self.hands)):
            if not self.issued_all() and (room := self.buffer.room("train").groups):
                first = self.buffer.ids.next_group  # nothing was issued twice: as many groups as positions
                self.ledger.issue(range(first, first + room), [200] * room, round=0)
            self.give_work()
            readable = select.select([sys.stdin, *(h.line.socket for h in self.hands)], [], [], 0.05)[0]
            if sys.stdin in readable:
                raise SystemExit("who started this driver is gone")
            for hand in [h for h in self.hands if h.line.socket in readable]:
                self.hear(hand)
            expired = {lease.token for lease in self.ledger.expire()}
            for hand in [h for h in self.hands if h.lease is not None and h.lease.token in expired and not h.given_up]:
                hand.given_up = True  # it is heard, refused and sent away when it comes back
                self.events.say(freed=hand.name, at=time.monotonic())
                self.hands.append(self.start(hand.role))
            self.buffer.commit()
            if time.monotonic() - saved > 1:
                self.buffer.checkpoint()
                saved = time.monotonic()
        for hand in list(self.hands):
            self.end(hand)
        self.buffer.close()
        self.events.say(finished=True, positions=self.buffer.ids.next_group)

    def issued_all(self) -> bool:
        return (self.folder / "enough").exists()

    def start(self, role: str) -> Hand:
        name = f"{role}-{self.life}-{next(self.numbers)}"
        here, there = socket.socketpair()
        segments, number = str(self.folder / SEGMENTS / NODE), str(there.fileno())
        command = [sys.executable, __file__, "--worker", number, segments, name, str(self.seed)]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        self.events.say(started=name, pid=process.pid)
        return Hand(role, name, process, Line(here))

    def end(self, hand: Hand) -> None:
        """All that it said was heard; its process is gone, or goes now."""
        hand.line.socket.close()
        hand.process.wait()
        self.hands.remove(hand)
        self.buffer.store.writer_ended(hand.name, NODE)

    def give_work(self) -> None:
        """Claims are in the log before a worker hears of them."""
        told: list[tuple[Hand, dict[str, Any]]] = []
        for hand in self.hands:
            for name in REAL_ROLES[hand.role] if hand.ready and hand.lease is None else ():
                rules = self.graph[name]
                limit = {"max_groups" if rules.operation.takes_groups else "max_rows": CLAIMS[name]}
                hand.lease = self.ledger.claim(rules, **limit, holder=hand.name, deadline_s=LEASE_S)  # pyright: ignore[reportArgumentType]
                if hand.lease is not None:
                    hand.since = time.monotonic()
                    self.events.say(given=hand.name, at=hand.since)
                    told.append((hand, self.task(rules, hand.lease)))
                    break
        self.buffer.commit()
        for hand, task in told:
            with contextlib.suppress(ConnectionError):  # its end is heard
                hand.line.send(**task)

    def task(self, rules: Node, lease: Lease) -> dict[str, Any]:
        pieces = [] if rules.name == "generate" else self.ledger.pieces(rules, lease.rows)
        return {
            "node": rules.name,
            "lease": lease.token,
            "ids": lease.ids.tolist(),
            "parents": lease.parent_ids.tolist(),
            "positions": [row.position for row in lease.rows],
            "first": lease.first_children.tolist(),
            "pieces": [[p.columns, p.keys.tolist(), [s.to_json() for s in p.segments]] for p in pieces],
        }

    def hear(self, hand: Hand) -> None:
        try:
            hand.line.fill()
        except (EOFError, ConnectionError):
            if hand.lease is not None and self.ledger.holds(hand.lease):
                self.ledger.release(hand.lease, f"{hand.name} ended")
                self.events.say(freed=hand.name, at=time.monotonic())
            self.end(hand)
            if not hand.given_up:
                self.hands.append(self.start(hand.role))
            return
        while hand.line.waiting():
            answer = hand.line.receive()
            try:
                self.take(hand, answer)
            except LeaseError:
                self.events.say(late=hand.name)
                hand.process.kill()  # it may have been stopped again
                self.end(hand)
                return

    def take(self, hand: Hand, answer: Mapping[str, Any]) -> None:
        if "ready" in answer:
            hand.ready = True
            self.events.say(ready=hand.name)
            return
        assert hand.lease is not None and hand.lease.token == answer["lease"]
        if "damaged" in answer:
            if self.ledger.holds(hand.lease):
                self.events.say(lost_segments=1, damage=[answer["damaged"]])
            raise LeaseError(answer["damaged"])
        if "finished" in answer:
            self.ledger.finish(hand.lease)
            hand.lease = None
            self.events.say(done=hand.name)
            return
        ids, tokens = np.array(answer["ids"]), np.array(answer["tokens"])
        parents = np.array(answer["parents"]) if "parents" in answer else None
        versions = np.zeros(len(ids), np.int64) if parents is not None else None
        segment = Segment.from_json(answer["segment"]) if "segment" in answer else None
        finished = None if parents is None else np.unique(parents)
        self.buffer.publish(self.ledger, hand.lease, Published(ids, tokens, versions, parents, finished), segment)
        if "wrong" in answer:
            self.events.say(verified=len(ids), wrong=answer["wrong"])


class Events:
    """What drivers say to the one who kills them, a line each in a file that outlives them."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "events").open("ab+", buffering=0)
        self._tail, self._at = b"", 0

    def say(self, **event: Any) -> None:
        self._file.write(b"\n" + json.dumps(event).encode() + b"\n")  # after what the one before did not end

    def new(self) -> Iterator[dict[str, Any]]:
        self._file.seek(self._at)
        data = self._file.read() or b""
        self._at += len(data)
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in filter(None, lines):
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def close(self) -> None:
        self._file.close()


class Processes:
    """Processes of this benchmark, held so that no other one can be hit when a number is used again."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fsencode(folder)
        self._held: dict[str, int] = {}

    def add(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            descriptor = os.pidfd_open(pid)
            command = b""
            while not command and not select.select([descriptor], [], [], 0.001)[0]:  # it has none for a moment
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if self._folder in command:
                self._held[name] = descriptor
            else:
                os.close(descriptor)

    def alive(self) -> list[str]:
        if not self._held:
            return []
        ended = select.select(list(self._held.values()), [], [], 0)[0]
        for name in [n for n, d in self._held.items() if d in ended]:
            os.close(self._held.pop(name))
        return list(self._held)

    def send(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError):
            signal.pidfd_send_signal(self._held[name], number)

    def close(self) -> None:
        for name in self.alive():
            self.send(name, signal.SIGKILL)
        for descriptor in self._held.values():
            os.close(descriptor)


class Harness:
    """Starts the driver, sends signals at random moments, and measures how long rows lie with those who got them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.random = random.Random(seed)
        self.events, self.processes = Events(folder), Processes(folder)
        self.facts: Counter[str] = Counter()
        self.stalls: dict[str, float] = {"kill": 0.0, "hang": 0.0, "restart": 0.0}
        self.hit: dict[str, tuple[Fault, float]] = {}
        """Worker or "driver" -> what happened to it, and when."""
        self.given: dict[str, float] = {}
        """Worker -> since when it has rows."""
        self.ready: set[str] = set()
        self.longest_recovery_s = 0.0
        self.resumes: dict[str, float] = {}
        self.drivers = itertools.count()
        self.damage: list[str] = []
        self.start_driver()

    def start_driver(self) -> None:
        self.finished = False
        command = [sys.executable, __file__, "--driver", str(self.folder), str(self.seed)]
        self.driver = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.driver_name = f"driver-{next(self.drivers)}"
        self.processes.add(self.driver_name, self.driver.pid)

    def end_driver(self) -> int:
        assert self.driver.stdin is not None
        self.driver.stdin.close()
        return self.driver.wait(10)

    def look(self, seconds: float) -> None:
        """Let it run for a while: hear what is said, wake those whose time has come."""
        end = time.monotonic() + seconds
        while True:
            for event in self.events.new():
                self.note(event)
            for name in [n for n, at in self.resumes.items() if at <= time.monotonic()]:
                del self.resumes[name]
                self.processes.send(name, signal.SIGCONT)
            if time.monotonic() >= end or self.finished:
                return
            if self.driver.poll():
                raise RuntimeError(f"the driver ended with {self.driver.returncode}")
            time.sleep(0.01)

    def note(self, event: Mapping[str, Any]) -> None:
        if "started" in event:
            self.processes.add(event["started"], event["pid"])
        if "ready" in event:
            self.ready.add(event["ready"])
        if "given" in event:
            self.given[event["given"]] = event["at"]
        if "freed" in event:
            self.stalled(event["freed"], event["at"])
        if "done" in event:
            self.given.pop(event["done"], None)
        if "recovered" in event:
            self.longest_recovery_s = max(self.longest_recovery_s, event["took"])
            for name in list(self.given):
                self.stalled(name, event["recovered"])
            self.ready.clear()
        self.damage += event.get("damage", [])
        for fact in ("verified", "wrong", "lost_segments", "positions"):
            self.facts[fact] += event.get(fact, 0)
        self.facts["late"] += "late" in event
        self.finished |= "finished" in event

    def stalled(self, name: str, until: float) -> None:
        """Rows are ready again that lay with somebody who was hit, or whose driver was."""
        since = self.given.pop(name, until)
        fault, at = self.hit.get(name) or self.hit.get("driver") or ("hang", until)
        self.stalls[fault] = max(self.stalls[fault], until - max(at, since))

    def strike(self, fault: Fault) -> None:
        workers: list[str] = []
        while not workers:
            self.look(0.02)
            workers = sorted(self.ready.intersection(self.processes.alive()) - set(self.resumes))
        if fault == "restart":
            self.hit["driver"] = fault, time.monotonic()
            self.processes.send(self.driver_name, signal.SIGKILL)
            self.end_driver()
            for event in self.events.new():
                self.note(event)
            self.start_driver()
            return
        name = self.random.choice(workers)
        self.hit[name] = fault, time.monotonic()
        self.processes.send(name, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "hang":
            self.resumes[name] = time.monotonic() + LEASE_S + self.random.uniform(0.3, 2.0)

    def run(self, faults: list[Fault]) -> None:
        self.look(0.5)
        for number, fault in enumerate(faults, 1):
            before = self.facts["verified"]
            self.look(self.random.uniform(0.1, 0.8))
            while (
                self.facts["verified"] == before and self.random.random() < 0.95
            ):  # mostly when it is in full swing again
                self.look(0.05)
            self.strike(fault)
            if number % 10 == 0:
                print(
                    f"{number} of {len(faults)} processes were hit, {self.facts['verified']:,} rows trained", flush=True
                )
        (self.folder / "enough").touch()
        end = time.monotonic() + 60
        while not self.finished and time.monotonic() < end:
            self.look(0.1)
        if not self.finished or self.end_driver():
            raise RuntimeError(f"the driver did not finish; it ended with {self.driver.returncode}")

    def close(self) -> None:
        self.processes.close()
        self.end_driver()
        self.events.close()


def real(kills: int = 50, seed: int = 0) -> dict[str, Any]:
    """So many signals to processes that work on rows; as many rows as they get done meanwhile."""
    started = time.perf_counter()
    pattern: tuple[Fault, ...] = ("kill", "hang", "restart", "kill", "hang")
    faults: list[Fault] = [pattern[k % len(pattern)] for k in range(kills)]
    random.Random(seed).shuffle(faults)
    with tempfile.TemporaryDirectory(prefix="weft-kills-") as name:
        folder = Path(name)
        harness = Harness(folder, seed)
        try:
            harness.run(faults)
            left = harness.processes.alive() + [str(p) for p in (folder / SEGMENTS).glob("**/*")]
        finally:
            harness.close()
        found, violations = proof_of(folder, harness.facts["positions"]), check_log(folder).violations
    return {
        "kills": len(faults),
        **found,
        "longest_stall_s": round(max(harness.stalls.values()), 3),
        "late_refused": harness.facts["late"],
        "restarts": faults.count("restart"),
        "hangs": faults.count("hang"),
        "stalls_s": {name: round(stall, 3) for name, stall in harness.stalls.items()},
        "longest_recovery_s": round(harness.longest_recovery_s, 3),
        "verified": harness.facts["verified"],
        "wrong": harness.facts["wrong"],
        "lost_segments": harness.facts["lost_segments"],
        "damage": harness.damage,
        "left_behind": left,
        "violations": [str(violation) for violation in violations],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few kills: not a measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--driver", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        end, folder, name, seed = arguments.worker
        RealWorker(Line(socket.socket(fileno=int(end))), Path(folder), name, int(seed)).serve()
    elif arguments.driver:
        folder, seed = arguments.driver
        RealDriver(Path(folder), int(seed)).run()
    else:
        small = arguments.small
        first = simulated(200, 4_000, arguments.seed) if small else simulated(seed=arguments.seed)
        print(f"simulated: {first}", flush=True)
        second = real(4 if small else 50, arguments.seed)
        print(f"real: {second}", flush=True)
        print(json.dumps({"simulated": first, "real": second}))


if __name__ == "__main__":
    main()
