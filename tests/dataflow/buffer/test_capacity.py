"""Capacity for new groups: all bounds hold, and the run never stalls."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from buffer_graphs import train_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.buffer.leases import Lease, Published
from weft.dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer, expected_rows
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.buffer.staleness import Staleness


@dataclass
class Stream:
    """A producer that issues all it may, workers, and a trainer.

    The trainer takes the oldest groups, several at a time.
    """

    folder: Path
    chance: random.Random
    config: BufferConfig
    staleness: int | None
    groups_per_update: int
    samples: int
    group_bytes: int
    shared: int
    """Number of prompts that are generated together, into one segment."""
    prompts: int
    version: int = 0
    issued: int = 0
    trained: int = 0
    blind: int = -1
    """Last group that was admitted before the size of any group was known."""
    training: Lease | None = None
    oldest: int = 0

    def __post_init__(self) -> None:
        graph = train_graph(self.samples, quorum=False)
        self.buffer = SampleBuffer.create(
            self.folder, {"train": graph}, config=self.config, clock=lambda: 0.0
        )
        self.ledger = self.buffer.ledgers["train"]
        self.generate, self.score, self.advantages, self.update = graph.nodes
        self.at_work: list[tuple[Lease, int]] = []
        """Leases with the policy version of their claim."""

    def run(self) -> None:
        idle = 0
        while self.trained < self.prompts:
            moves = [self.produce, self.claim, self.complete, self.complete, self.train]
            self.chance.shuffle(moves)
            moved = [move() for move in moves]
            idle = 0 if any(moved) else idle + 1
            assert idle < 3, (
                f"nobody can go on: {self.buffer.capacity('train')}, {self.ledger.live.counts()}"
            )
            self.check()
        self.buffer.log.close()

    def produce(self) -> bool:
        room, _ = self.buffer.capacity(
            "train", staleness=self.staleness, groups_per_update=self.groups_per_update
        )
        number = min(room, self.prompts - self.issued)
        if number:
            self.ledger.issue(range(number), [1] * number, step=0)
            self.issued += number
        if not self.ledger.parts.largest_group_bytes:
            self.blind = self.issued
        return number > 0

    def claim(self) -> bool:
        n = self.chance.choice([self.generate, self.generate, self.score, self.advantages])
        lease = self.ledger.claim(n, max_rows=self.chance.randint(1, self.shared), max_groups=1)
        if lease is not None:
            self.at_work.append((lease, self.version))
        return lease is not None or self.claim_any()

    def claim_any(self) -> bool:
        leases = (
            self.ledger.claim(n, max_rows=self.shared, max_groups=1)
            for n in (self.generate, self.score, self.advantages)
        )
        lease = next((lease for lease in leases if lease), None)
        self.at_work += [(lease, self.version)] if lease else []
        return lease is not None

    def complete(self) -> bool:
        if not self.at_work:
            return False
        lease, version = self.at_work.pop(self.chance.randrange(len(self.at_work)))
        ids, parents, versions, num_bytes = lease.ids, None, None, 0
        if lease.node is self.generate:
            parents = np.repeat(lease.ids, self.samples)
            ids = np.add.outer(lease.first_children, np.arange(self.samples)).ravel()
            versions = np.full(len(ids), version)
            num_bytes = self.group_bytes * len(lease.rows)
        offset = self.buffer.log.position.offset
        into = Segment("driver", "w.0.000001.arrows", offset, num_bytes, 0)
        published = Published(ids, np.ones(len(ids), np.int64), versions, parents)
        self.buffer.publish(self.ledger, lease, published, into)
        self.ledger.finish(lease)
        return True

    def train(self) -> bool:
        if self.training is not None:
            self.end_update(self.training)
            return True
        waiting = self.prompts - self.trained
        number = min(self.groups_per_update, waiting)
        first = [g for g in self.ledger.live.groups if g >= self.trained][:number]
        advantages = self.ledger.live.wiring.index["advantages"]
        done = [self.ledger.live.groups[g].levels[1].done[advantages] for g in first]
        if len(first) < number or not all(done):
            return False
        staleness = None if self.staleness is None else Staleness(self.version, self.staleness, "wait")
        self.training = self.ledger.claim(self.update, max_groups=number, staleness=staleness)
        assert self.training is not None and not self.ledger.stale, "a group is too old"
        assert sorted(set(self.training.group_ids.tolist())) == first
        self.oldest = max(
            self.oldest, self.version - min(row.version or 0 for row in self.training.rows)
        )
        return True

    def end_update(self, lease: Lease) -> None:
        number = len(set(lease.group_ids.tolist()))
        self.ledger.publish(lease, Published(lease.ids, np.ones(len(lease.ids), np.int64)), None)
        self.ledger.finish(lease)
        self.version, self.trained, self.training = self.version + 1, self.trained + number, None

    def check(self) -> None:
        if self.config.max_rows is not None:
            assert len(self.ledger.live.rows) <= self.config.max_rows
        if self.config.max_bytes is not None and self.trained >= self.blind >= 0:
            fits = self.ledger.parts.num_bytes <= self.config.max_bytes
            assert fits or len(self.ledger.live.groups) <= self.groups_per_update, (
                "but what one update takes is let in"
            )
            if self.shared == 1:
                least = self.group_bytes * self.groups_per_update
                assert self.ledger.parts.num_bytes <= max(self.config.max_bytes, least)
        if self.staleness is not None:
            assert self.oldest <= self.staleness


@pytest.mark.parametrize(("runs", "prompts"), [(25, 30), pytest.param(200, 60, marks=pytest.mark.slow)])
def test_admission_keeps_every_bound_and_the_run_never_stalls(
    tmp_path_factory: pytest.TempPathFactory, runs: int, prompts: int
):
    @settings(max_examples=runs, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def goes_on(seed: int) -> None:
        random_stream(tmp_path_factory.mktemp("run") / "buffer", random.Random(seed), prompts).run()

    goes_on()


def random_stream(folder: Path, chance: random.Random, prompts: int) -> Stream:
    per_update, samples = chance.randint(1, 5), chance.randint(1, 4)
    each = expected_rows(train_graph(samples, quorum=False))
    assert each == 1 + samples
    group_bytes = chance.choice([10, 100])
    config = BufferConfig(
        max_rows=chance.choice([None, each * per_update, each * per_update + chance.randint(0, 60)]),
        max_bytes=chance.choice(
            [None, 1, group_bytes * per_update, group_bytes * chance.randint(1, 20)]
        ),
    )
    staleness, shared = chance.choice([None, 0, 0, 1, 2, 5]), chance.choice([1, 3])
    return Stream(folder, chance, config, staleness, per_update, samples, group_bytes, shared, prompts)


def test_a_capacity_names_the_bound_that_allows_no_more(tmp_path: Path):
    config = BufferConfig(max_rows=9, max_bytes=10_000)
    buffer = SampleBuffer.create(tmp_path, {"train": train_graph(2, quorum=False)}, config=config)
    assert buffer.capacity("train")[0] == 3
    buffer.ledgers["train"].issue([0, 1], [1, 1], step=0)
    assert buffer.capacity("train") == (1, "2 rows in flight, max_rows=9, 3 a group")
    capacity = buffer.capacity("train", staleness=0, groups_per_update=2)
    assert capacity == (0, "2 groups wait to be trained on, max_staleness=0")
    buffer.log.close()
