"""The sample buffer and its columns: recovered, pinned by checkpoints, freed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from buffer_graphs import eval_graph, train_graph

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from weft.dataflow.errors import DamagedSegment


@dataclass
class Columns:
    """A run of one graph that writes real columns, one file per segment."""

    folder: Path
    buffer: SampleBuffer
    writer: SegmentWriter
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = self.buffer.ledgers["train"]

    @classmethod
    def start(cls, folder: Path) -> "Columns":
        buffer = SampleBuffer.create(folder, {"train": train_graph(quorum=False)}, clock=lambda: 0.0)
        return cls(folder, buffer, SegmentWriter(buffer.segments, "driver", "w", file_bytes=1 << 10))

    def recover(self, name: str, **options: Any) -> "Columns":
        graphs = {"train": train_graph(quorum=False)}
        buffer = SampleBuffer.recover(self.folder, graphs, clock=lambda: 0.0, **options)
        return Columns(
            self.folder, buffer, SegmentWriter(buffer.segments, "driver", name, file_bytes=1 << 10)
        )

    def segment(self, ids: list[int]) -> Segment:
        text = [f"{id} " + "x" * 900 for id in ids]
        return self.writer.append(Batch(pa.record_batch({"sample_id": ids, "text": text})))

    def do(self, name: str) -> list[Segment]:
        """Process all ready rows of a node, with one segment per group."""
        segments: list[Segment] = []
        n = next(n for n in self.ledger.graph.nodes if n.name.endswith(name))
        while lease := self.ledger.claim(n, max_rows=1, max_groups=1):
            ids = lease.ids.tolist()
            parents = None
            if n.makes_level is not None:
                ids = [lease.first_children[0] + k for k in range(2)]
                parents = np.array([lease.ids[0]] * 2)
            segment = self.segment(ids) if n.writes else None
            segments += [segment] if segment else []
            published = Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), None, parents)
            self.buffer.publish(self.ledger, lease, published, segment)
            self.ledger.finish(lease)
        self.buffer.commit()
        return segments

    def close(self) -> None:
        self.writer.close()
        self.buffer.commit(sync=True)
        self.buffer.log.close()

    def readable(self, segments: list[Segment]) -> list[bool]:
        reader, found = SegmentReader(self.buffer.segments, "driver"), list[bool]()
        for segment in segments:
            try:
                found.append(len(reader.read(segment)) > 0)
            except DamagedSegment:
                found.append(False)
        reader.close()
        return found


def test_a_group_with_damaged_or_lost_columns_is_reissued_and_named(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([7, 8, 9], [1, 1, 1], step=0)
    gone, damaged, sound = run.do("generate")
    run.close()
    (run.buffer.segments / gone.file).unlink()
    path = run.buffer.segments / damaged.file
    data = bytearray(path.read_bytes())
    data[damaged.offset + 300] ^= 1
    path.write_bytes(data)
    run = run.recover("w2")
    assert run.readable([gone, damaged, sound]) == [False, False, True]
    first, second = run.buffer.damage
    assert first.startswith("group 0 of graph 'train' is issued again") and f"{gone.file}" in first
    assert second.startswith("group 1 of graph 'train' is issued again") and "checksum" in second
    assert list(run.ledger.live.groups) == [2, 3, 4] and run.ledger.live.dropped == {"lost": 6}
    assert [r.tokens for r in run.ledger.live.rows.values() if r.group.id in (3, 4)] == [1, 1]
    lease = run.ledger.claim(run.ledger.graph.nodes[0])
    assert lease is not None and [r.position for r in lease.rows] == [7, 8]
    run.close()


def test_groups_on_a_lost_node_are_reissued_unless_an_update_has_begun(
    tmp_path: Path,
):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([7, 8, 9], [1, 1, 1], step=0)
    run.do("generate")
    run.do("score")
    run.do("advantages")
    update = run.ledger.graph.nodes[-1]
    lease = run.ledger.claim(update, max_groups=1)
    assert lease is not None and run.buffer.unreachable(["driver"]) == {}
    live, recovered = (
        run.buffer.unreachable(["another"]),
        run.buffer.unreachable(["another"], live=False),
    )
    assert [list(found["train"]) for found in (live, recovered)] == [[1, 2], [0, 1, 2]]
    assert run.buffer.drop_unreachable(["another"]) == [("train", 1), ("train", 2)]
    run.buffer.publish(run.ledger, lease, Published(lease.ids, np.zeros(2, np.int64)), None)
    run.ledger.finish(lease, step=1)
    assert list(run.ledger.live.groups) == [3, 4] and run.ledger.live.dropped == {"lost": 6}
    run.close()


def test_segments_of_a_checkpoint_outlive_their_rows_as_long_as_it_is_kept(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([0, 1], [1, 1], step=0)
    segments = run.do("generate")
    position = run.buffer.checkpoint()
    for name in ("score", "advantages", "update"):
        segments += run.do(name)
    assert len(run.ledger.live.groups) == 0
    assert run.readable(segments)[:2] == [True, True] and not any(run.readable(segments)[2:-1])
    run.close()
    for name in ("w2", "w3"):  # recovery may be repeated, and going back still works
        run = run.recover(name)
        run.ledger.issue([5], [1], step=1)
        run.do("generate")
        assert run.readable(segments)[:2] == [True, True] and run.buffer.damage == []
        run.close()
    for name in ("w4", "w5"):
        run = run.recover(name, at=position)
        assert run.buffer.damage == [] and len(run.ledger.live.groups) == 2
        for node in ("score", "advantages", "update"):
            run.do(node)
        assert run.readable(segments)[:2] == [True, True]
        run.close()
    run = run.recover("w6")
    for kept in (True, False):  # two checkpoints are kept
        run.ledger.issue([6], [1], step=2)
        run.buffer.checkpoint()
        assert run.readable(segments)[:2] == [kept, kept]
    run.close()


def test_the_source_is_kept_until_it_is_replaced(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    first = run.segment([1, 2, 3])
    run.buffer.set_source("train", first)
    run.close()
    run = run.recover("w2")
    assert run.ledger.source == first and run.readable([first]) == [True]
    run.buffer.set_source("train", second := run.segment([1, 2]))
    run.buffer.set_source("train", second)
    assert run.readable([first, second]) == [True, True], "the log may be cut in front of the change"
    run.buffer.checkpoint()
    assert run.readable([first, second]) == [False, True]
    run.close()
    (run.buffer.segments / second.file).unlink()
    run = run.recover("w3")
    assert not run.buffer.damage and run.ledger.source is None
    run.close()


def test_the_segments_of_a_run_that_is_through_go(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([0, 1], [1, 1], step=0)
    for name in ("generate", "score", "advantages", "update"):
        run.do(name)
    run.writer.close()
    run.buffer.close()
    run.buffer.close()
    assert not run.buffer.segments.exists()
    assert (
        SampleBuffer.recover(run.folder, {"train": train_graph(quorum=False)})
        .ledgers["train"]
        .live.counts()["done"]
        == 6
    )


def test_a_checkpoint_with_a_lease_whose_first_groups_are_finished_can_be_loaded(tmp_path: Path):
    run = SampleBuffer.create(tmp_path, {"eval": eval_graph()}, clock=lambda: 0.0)
    ledger = run.ledgers["eval"]
    ledger.issue([0, 1], [1, 1], step=0)
    lease = ledger.claim(ledger.graph.nodes[0])
    assert lease is not None
    ids, parents = lease.first_children, lease.ids
    ledger.publish(lease, Published(ids, np.ones(2, int), None, parents), None)
    ledger.finish(lease)
    lease = ledger.claim(ledger.graph.nodes[1])
    assert lease is not None
    ledger.publish(lease, Published(ids[:1], np.ones(1, int)), None)
    assert list(ledger.live.groups) == [1]
    run.checkpoint()
    run.log.close()
    again = SampleBuffer.recover(tmp_path, {"eval": eval_graph()}).ledgers["eval"]
    lease = again.claim(again.graph.nodes[1])
    assert lease is not None and lease.ids.tolist() == ids[1:].tolist()
