"""Random operations on ledgers over graphs: valid logs for tests of the checker."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.dataflow.buffer.check import Report, check_log
from weft.dataflow.buffer.leases import Lease, Published, Spread, Written
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.graph import Graph
from weft.dataflow.operation import Shape
from weft.dataflow.runs.log import Log

DATA = Segment("node", "w.0.000001.arrows", 0, 10, 0)


def children(ids: Any, versions: Any, parents: Any, finished: Any) -> Published:
    return Published(ids, np.ones(len(ids), np.int64), versions, parents, finished)


class Play:
    """Makes random moves in a run: claims, partial publications, releases, deadlines, losses,
    restarts."""

    def __init__(self, folder: Path, graphs: dict[str, Graph], chance: random.Random) -> None:
        self.folder, self.graphs, self.chance = folder, graphs, chance
        self.now, self.version, self.segments = 0.0, 0, 0
        self.bounds = [0, 1, 2]
        self.fate: Any = chance.choice(["wait", "mask", "requeue", "drop"])
        self.buffer = SampleBuffer.create(folder, graphs, clock=lambda: self.now)

    @property
    def ledger(self) -> Ledger:
        return self.chance.choice(list(self.buffer.ledgers.values()))

    def issue(self) -> None:
        number = self.chance.randint(1, 3)
        self.ledger.issue(
            [self.chance.randrange(9) for _ in range(number)], [2] * number, step=self.version
        )

    def claim(self) -> None:
        ledger = self.ledger
        node = self.chance.choice(ledger.graph.nodes)
        stale = (
            Staleness(self.version, self.chance.choice(self.bounds), self.fate)
            if node.operation.updates
            else None
        )
        limit = self.chance.choice([None, 1, 2])
        ledger.claim(
            node,
            max_rows=limit,
            max_groups=limit,
            staleness=stale,
            deadline_s=self.chance.choice([None, 9.0]),
        )

    def publish(self, part: float = 0.6) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(list(ledger.leases))
            self.give(ledger, lease, [i for i in lease.open if self.chance.random() < part])

    def give(self, ledger: Ledger, lease: Lease, held: list[int]) -> None:
        self.chance.shuffle(held)
        if lease.node.makes_level is None:
            into = self.written(lease, len(held))
            self.buffer.publish(
                ledger, lease, Published(np.array(held, np.int64), np.ones(len(held), np.int64)), into
            )
            return
        place = {id: k for k, id in enumerate(lease.ids.tolist())}
        parents = [parent for parent in held for _ in range(self.chance.randint(1, 3))]
        ids = [lease.first_children[place[p]] + parents[:k].count(p) for k, p in enumerate(parents)]
        versions = np.array([max(0, self.version - self.chance.randint(0, 3)) for _ in ids], np.int64)
        of, all_of_them = np.array(parents, np.int64), np.array(held, np.int64)
        made = children(np.array(ids, np.int64), versions, of, all_of_them)
        self.buffer.publish(ledger, lease, made, self.written(lease, len(ids)))

    def written(self, lease: Lease, rows: int) -> Written:
        """Place rows in one segment, or split them over segments of two ranks; one may be empty."""
        if not lease.node.writes:
            return None
        self.segments += 2
        segments = [replace(DATA, offset=self.segments + k) for k in (0, 1)]
        if lease.node.operation.takes_groups or self.chance.random() < 0.5:
            return segments[0]
        first = self.chance.randint(0, rows)
        return Spread(segments, [first, rows - first])

    def finish(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(list(ledger.leases))
            if lease.open and lease.node.operation.shape in (Shape.MAP, Shape.GROUP):
                self.give(ledger, lease, list(lease.open))
            ledger.finish(lease)

    def release(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            ledger.release(self.chance.choice(list(ledger.leases)), "its holder died")

    def wait(self) -> None:
        self.now += self.chance.choice([1.0, 4.0])
        self.version += self.chance.random() < 0.3
        for ledger in self.buffer.ledgers.values():
            ledger.expire()

    def give_some_back(self) -> None:
        ledger = self.ledger
        leases = [lease for lease in ledger.leases if not lease.node.operation.takes_groups]
        if leases:
            lease = self.chance.choice(leases)
            ledger.release(
                lease, "its rank died", ids=[i for i in lease.open if self.chance.random() < 0.5]
            )

    def fail(self) -> None:
        """Fail a node at its claimed rows, and continue without them."""
        ledger = self.ledger
        node = self.chance.choice(ledger.graph.nodes)
        lease = None if node.operation.quorum else ledger.claim(node, max_rows=2, max_groups=1)
        if lease is not None:
            ledger.release(lease, "it failed")
            ledger.drop(
                node, [i for i in lease.ids.tolist() if self.chance.random() < 0.6], "it failed again"
            )

    def lose(self) -> None:
        ledger = self.ledger
        if ledger.live.groups and not ledger.leases:
            ledger.lose(self.chance.choice(list(ledger.live.groups)), "its file is gone")

    def checkpoint(self) -> None:
        self.buffer.checkpoint()

    def restart(self) -> None:
        self.buffer.commit()
        self.buffer.log.close()
        self.buffer = SampleBuffer.recover(
            self.folder, self.graphs, check=lambda segment: None, clock=lambda: self.now
        )

    def random_moves(self, number: int) -> None:
        often = [
            self.issue,
            *[self.claim] * 6,
            *[self.publish] * 4,
            *[self.finish] * 3,
            self.release,
            self.wait,
        ]
        for _ in range(number):
            seldom = self.chance.random()
            if seldom < 0.02:
                self.chance.choice([self.restart, self.checkpoint, self.lose])()
            elif seldom < 0.06:
                self.chance.choice([self.give_some_back, self.fail])()
            else:
                self.chance.choice(often)()

    def run_dry(self) -> None:
        self.bounds = [1 << 30]
        for _ in range(20_000):
            if not any(len(g.live.groups) or g.leases for g in self.buffer.ledgers.values()):
                return
            self.chance.choice([self.claim, self.claim, self.publish, self.finish, self.wait])()
        raise AssertionError("it did not run dry")

    def report(self) -> Report:
        self.buffer.commit()
        return check_log(self.folder)


def drive(folder: Path, graph: Graph, *, prompts: int = 2, samples: int = 3) -> SampleBuffer:
    """Process all rows of a run with one graph.

    Filters keep the first row of each lease, and one lease is lost.
    """
    buffer = SampleBuffer.create(folder, {"train": graph}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue(range(prompts), [2] * prompts, step=0)
    ledger.release(lease_of(ledger, "generate"), "its holder died")
    while len(ledger.live.groups):
        for node in graph.nodes:
            stale = Staleness(1, 1) if node.operation.updates else None
            while lease := ledger.claim(node, max_rows=2, staleness=stale):
                publish(buffer, ledger, lease, samples)
                ledger.finish(lease)
    buffer.commit()
    return buffer


def lease_of(ledger: Ledger, name: str) -> Lease:
    lease = ledger.claim(next(n for n in ledger.graph.nodes if n.name == name))
    assert lease is not None
    return lease


def publish(buffer: SampleBuffer, ledger: Ledger, lease: Lease, samples: int) -> None:
    into = replace(DATA, offset=buffer.log.position.offset) if lease.node.writes else None
    if lease.node.makes_level is None:
        ids = lease.ids[:1] if lease.node.operation.shape is Shape.FILTER else lease.ids
        buffer.publish(ledger, lease, Published(ids, np.ones(len(ids), np.int64)), into)
        return
    parents = np.repeat(lease.ids, samples)
    ids = np.add.outer(lease.first_children, np.arange(samples)).ravel()
    made = children(ids, np.zeros(len(ids), np.int64), parents, lease.ids)
    buffer.publish(ledger, lease, made, into)


Records = list[dict[str, Any]]


def report_of(records: Records, folder: Path) -> Report:
    """Return the report on a log with these records and correct checksums."""
    place = folder / f"told-{len(list(folder.iterdir()))}"
    place.mkdir()
    log = Log(place / "ledger.log")
    for record in records:
        log.append(record)
    log.close()
    return check_log(place)


def at(records: Records, do: str, node: str | None = None, number: int = 0) -> int:
    """Return the index of the n-th record of this kind, for a lease of this node."""
    of = {r["lease"]: r["node"] for r in records if r["do"] == "claim"}
    found = [
        i for i, r in enumerate(records) if r["do"] == do and (node is None or of[r["lease"]] == node)
    ]
    return found[number]


def byte_of(records: Records, index: int) -> int:
    return sum(len(json.dumps(r, separators=(",", ":"))) + 10 for r in records[:index])
