"""A run whose buffer advances as far as a test needs, for tests of inspection commands."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.leases import Lease, Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.segments import SegmentWriter
from weft.dataflow.graph import Graph
from weft.dataflow.operation import Shape, node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph

PROMPTS = TableSource("prompts", pa.table({"prompt": ["one", "two"]}))


@node(shape=Shape.EXPAND, reads=("prompt",), writes=("response",))
def generate(batch: Batch) -> Batch:
    return batch


@node(reads=("response",), writes=("reward",))
def score(batch: Batch) -> Batch:
    return batch


@node(shape=Shape.FILTER, reads=("reward",))
def keep(batch: Batch) -> Batch:
    return batch


@node(shape=Shape.GROUP, reads=("reward",), writes=("centred",))
def advantages(batch: Batch) -> Batch:
    return batch


@graph
def train(prompts, learn=advantages):
    learn(keep(score(generate(prompts))))


class Run:
    """A run with two prompts and two samples per prompt."""

    def __init__(self, path: Path, recorded: Graph) -> None:
        self.path = path
        self.buffer = SampleBuffer.create(
            path / "buffer", {"train": recorded}, node="here", clock=lambda: 0.0
        )
        self.writer = SegmentWriter(self.buffer.segments, "here", "w")
        self.ledger: Ledger = self.buffer.ledgers["train"]
        self.ledger.set_source(self.writer.append(Batch.of(prompt=["one", "two"])))
        self.ledger.issue([0, 1], [1, 1], step=3)
        self.commit()

    def commit(self) -> None:
        self.buffer.commit()

    def claim(self, name: str, max_rows: int | None = None) -> Lease:
        lease = self.ledger.claim(self.ledger.graph[name], max_rows=max_rows)
        assert lease is not None
        return lease

    def generate(self) -> None:
        lease = self.claim("generate")
        ids = np.add.outer(lease.first_children, np.arange(2)).ravel()
        texts = Batch.of(sample_id=ids, response=[f"answer {k}" for k in range(len(ids))])
        made = Published(ids, np.full(len(ids), 4), np.full(len(ids), 7), np.repeat(lease.ids, 2))
        self.buffer.publish(self.ledger, lease, made, self.writer.append(texts))
        self.ledger.finish(lease)
        self.commit()

    def map(self, name: str, column: str) -> None:
        lease = self.claim(name)
        values = Batch.of(sample_id=lease.ids, **{column: np.arange(len(lease.ids), dtype=np.float32)})
        none = np.zeros(len(lease.ids), np.int64)
        self.buffer.publish(self.ledger, lease, Published(lease.ids, none), self.writer.append(values))
        self.ledger.finish(lease)
        self.commit()

    def keep(self, number: int) -> None:
        lease = self.claim("keep")
        self.buffer.publish(
            self.ledger, lease, Published(lease.ids[:number], np.zeros(number, np.int64)), None
        )
        self.ledger.finish(lease)
        self.commit()

    def close(self) -> None:
        self.writer.close()
        self.buffer.close()


def write_samples(run: Path) -> None:
    (run / "samples").mkdir(parents=True)
    for name, table in {
        "train_000001": pa.table({"sample_id": [1, 2], "reward": pa.array([0.5, 1.0], pa.float32())}),
        "eval_000002": pa.table({"sample_id": [3], "response": ["yes"]}),
    }.items():
        with pa.ipc.new_file(run / "samples" / f"{name}.1.0.arrow", table.schema) as writer:
            writer.write_table(table)
