"""Random runs of a sample buffer that are ended and resumed."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from buffer_graphs import GRAPHS

from weft.dataflow.buffer.leases import Lease, Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.recovery import restore, save
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.operation import Shape
from weft.dataflow.runs.files import LOG, Disk
from weft.dataflow.runs.log import LogReader


@dataclass
class Driver:
    """Makes random moves, the same from the same state."""

    buffer: SampleBuffer
    chance: random.Random
    clock: list[float]
    name: str
    prompts: int = 7
    committed: int = 0
    """[B] Committed bytes of the log."""
    snapshots: dict[int, str] | None = None
    """Position -> state of the ledgers there, if recorded."""

    def __post_init__(self) -> None:
        self.seen()

    def seen(self) -> None:
        if self.snapshots is not None:
            self.snapshots[self.buffer.log.position.offset] = state_of(self.buffer)

    @property
    def ledger(self) -> Ledger:
        return self.buffer.ledgers[self.chance.choice(["train", "train", "eval"])]

    def step(self) -> None:
        moves = [self.issue, self.claim, self.claim, self.claim, self.publish, self.finish, self.finish]
        seldom = [self.release, self.wait, self.checkpoint]
        self.chance.choice([*moves, *moves, self.commit, self.commit, *seldom])()
        self.seen()

    def issue(self) -> None:
        ledger = self.ledger
        issued = self.buffer.notes.get(ledger.name, 0)
        if issued < self.prompts and len(ledger.live.groups) < 4:
            ledger.issue([issued], [2], step=issued // 2)
            self.seen()
            self.buffer.note(ledger.name, issued + 1)

    def claim(self) -> None:
        ledger = self.ledger
        n = self.chance.choice(ledger.graph.nodes)
        staleness = (
            Staleness(self.buffer.notes.get("version", 0), 1, "requeue") if n.operation.updates else None
        )
        ledger.claim(n, max_rows=2, max_groups=1, deadline_s=3.0, staleness=staleness)

    def publish(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(list(ledger.leases))
            self.give(ledger, lease, [i for i in lease.open if self.chance.random() < 0.6])

    def give(self, ledger: Ledger, lease: Lease, held: list[int]) -> None:
        offset = self.buffer.log.position.offset
        into = Segment(self.buffer.node, f"{self.name}.0.{offset // 4000:06d}.arrows", offset, 10, 0)
        where = into if lease.node.writes else None
        if lease.node.makes_level is None:
            published = Published(np.array(held, np.int64), np.ones(len(held), np.int64))
            self.buffer.publish(ledger, lease, published, where)
            return
        each = lease.node.arguments["n"]
        ids = [lease.first_children[lease.ids.tolist().index(p)] + k for p in held for k in range(each)]
        versions = np.full(len(ids), self.buffer.notes.get("version", 0))
        parents = np.repeat(np.array(held, np.int64), each)
        made = Published(
            np.array(ids, np.int64), np.ones(len(ids), np.int64), versions, parents, np.unique(parents)
        )
        self.buffer.publish(ledger, lease, made, where)

    def finish(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(list(ledger.leases))
            if lease.open and lease.node.operation.shape is not Shape.FILTER:
                self.give(ledger, lease, list(lease.open))
                self.seen()
            ledger.finish(lease)
            if lease.node.operation.updates:
                self.seen()
                self.buffer.note("version", self.buffer.notes.get("version", 0) + 1)

    def release(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            ledger.release(self.chance.choice(list(ledger.leases)))

    def wait(self) -> None:
        self.clock[0] += 0.7
        for ledger in self.buffer.ledgers.values():
            ledger.expire()

    def commit(self) -> None:
        end = self.buffer.log.position.offset
        self.buffer.commit()
        self.committed = end

    def checkpoint(self) -> None:
        end = self.buffer.log.position.offset
        self.buffer.checkpoint()
        self.committed = end

    def run_out(self) -> None:
        for _ in range(20_000):
            issued = all(self.buffer.notes.get(name, 0) >= self.prompts for name in self.buffer.ledgers)
            if issued and not any(ledger.live.groups for ledger in self.buffer.ledgers.values()):
                self.buffer.close()
                return
            self.step()
        raise AssertionError("the run does not come to its end")


def state_of(buffer: Any) -> str:
    """Return the complete state of a buffer or a history, which must survive recovery."""
    ledgers = {name: list(save(ledger)) for name, ledger in buffer.ledgers.items()}
    return json.dumps([ledgers, buffer.notes, buffer.ids.next_id, buffer.ids.next_group])


def fine(segment: Segment) -> None:
    """Accept any segment: segments in these runs have no files."""


def start(folder: Path, disk: Disk | None = None, seed: int = 5, **options: Any) -> Driver:
    clock = [0.0]
    buffer = SampleBuffer.create(folder, GRAPHS, sync_interval_s=1.0, disk=disk, clock=lambda: clock[0])
    return Driver(buffer, random.Random(seed), clock, "first", **options)


def go_on(folder: Path, disk: Disk | None = None, name: str = "second", **options: Any) -> Driver:
    clock = [1e6]
    buffer = SampleBuffer.recover(
        folder, GRAPHS, sync_interval_s=1.0, disk=disk, check=fine, clock=lambda: clock[0], **options
    )
    return Driver(buffer, random.Random(name), clock, name)


def conserved(buffer: SampleBuffer) -> None:
    for ledger in buffer.ledgers.values():
        counts = ledger.live.counts()
        assert counts["issued"] == sum(v for k, v in counts.items() if k != "issued")


def consumed_once(folder: Path) -> None:
    """Check from the log alone that each row passes each node once, and ends consumed or
    dropped."""
    leases: dict[tuple[str, int], dict[str, Any]] = {}
    used: Counter[tuple[str, str, int]] = Counter()
    waits_for_the_end = {n.name for g in GRAPHS.values() for n in g.nodes if n.operation.takes_groups}
    reader = LogReader(folder / LOG)
    for record in reader:
        key = record.get("graph", ""), record.get("lease", 0)
        match record["do"]:
            case "claim":
                assert key not in leases, "a token was given out twice"
                leases[key] = {
                    "node": record["node"],
                    "open": dict.fromkeys(record["ids"]),
                    "staged": [],
                }
            case "publish":
                lease = leases[key]
                held = list(dict.fromkeys(record.get("parents", record["ids"])))
                for id in held:
                    del lease["open"][id]
                if lease["node"] in waits_for_the_end:
                    lease["staged"] += held
                else:
                    used.update((key[0], lease["node"], id) for id in held)
            case "finish":
                lease = leases[key]
                used.update((key[0], lease["node"], id) for id in [*lease["staged"], *lease["open"]])
            case _:
                pass
    assert reader.damage is None and set(used.values()) == {1}


def comes_to_its_end(driver: Driver) -> None:
    driver.run_out()
    for ledger in driver.buffer.ledgers.values():
        counts = ledger.live.counts()
        assert (
            counts["waiting"] == counts["leased"] == 0
            and counts["issued"] == counts["done"] + counts["dropped"]
        )
    consumed_once(driver.buffer.folder)
    again = restore(driver.buffer.folder, GRAPHS)
    assert state_of(again) == state_of(driver.buffer) and not again.damage
