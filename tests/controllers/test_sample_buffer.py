"""The driver with the sample buffer: its log, and recovery after a kill."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_runs import KNOWN, costs
from simulated_runs import run as simulated_run
from toy import ToyActor, ToyReward, ToyRollout, centred, prompts, toy_dapo, toy_grpo

import weft
from weft.algorithms.grpo import first_of_group
from weft.controllers.driver import Driver
from weft.controllers.ranks.row_io import gather
from weft.controllers.ranks.tasks import RowTask
from weft.controllers.schedule import Asynchronous, Synchronous
from weft.controllers.simulation.backend import Simulated
from weft.dataflow.batch import Batch
from weft.dataflow.buffer import recovery, sample_buffer
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.leases import ColumnPiece, column_pieces
from weft.dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from weft.dataflow.buffer.segments import SegmentReader, SegmentWriter
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.operation import Operation
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader
from weft.dataflow.runs.log_archive import start_of


def training(graph: Any = toy_grpo, **rollout: Any) -> Any:
    made = {
        "rollout": group(ToyRollout, **rollout),
        "reward": group(ToyReward),
        "actor": group(ToyActor),
    }
    made["rollout"].follows(made["actor"])
    return graph(prompts(8), **made)


def drive(root: Path, graph: Any, **settings: Any) -> Driver:
    settings = {"root": root, "name": "run", "progress": False, **settings}
    return Driver(graph, schedule=Synchronous(steps=3, prompts_per_step=4), **settings)


def test_every_row_of_a_run_is_in_its_log_and_no_segment_is_left(tmp_path: Path):
    with drive(tmp_path, training()) as driver:
        driver.run()
    folder = tmp_path / "run" / "buffer"
    records = list(LogReader(folder / LOG))
    trained = [r for r in records if r["do"] == "claim" and r["node"] == "actor.update"]
    assert [len(r["ids"]) for r in trained] == [8, 8, 8] and len(
        {i for r in trained for i in r["ids"]}
    ) == 24
    assert {r["key"]: r["value"] for r in records if r["do"] == "note"} == {
        "record_every": 1,
        "version/actor": 3,
        "step": 3,
    }
    assert not (folder / "segments").exists()


def test_rows_that_a_filter_drops_are_counted_and_their_columns_go(tmp_path: Path):
    with drive(tmp_path, training(toy_dapo)) as driver:
        driver.run()
        assert driver.buffer is not None
        ledger = driver.buffer.ledgers["train"]
        counts = ledger.live.counts()
        assert (
            counts["issued"] == counts["done"] + counts["dropped"]
            and ledger.live.dropped["odd_prompts"] > 0
        )
        assert ledger.parts.num_bytes == 0 and len(ledger.live.groups) == 0


@weft.graph
def over_issued(prompts, *, rollout, reward, actor):
    samples = reward.score(rollout.generate(prompts, n=4))
    return actor.update(centred(first_of_group(samples, 3)))


def test_the_first_of_a_group_win_and_the_others_are_counted(tmp_path: Path):
    with drive(tmp_path, training(over_issued)) as driver:
        driver.run()
        assert driver.buffer is not None
        ledger = driver.buffer.ledgers["train"]
    assert ledger.live.dropped == {"over-issued at first_of_group": 12}
    assert ledger.live.counts() == {"issued": 60, "waiting": 0, "leased": 0, "done": 48, "dropped": 12}
    trained = [
        r["ids"] for r in LogReader(tmp_path / "run" / "buffer" / LOG) if r.get("node") == "actor.update"
    ]
    assert [len(ids) for ids in trained] == [12, 12, 12]


def test_a_quorum_of_zero_is_refused():
    with pytest.raises(
        UserError, match="takes the first n=0 rows of a group; n must be an integer of at least 1"
    ):

        @weft.graph
        def empty(prompts, *, rollout, reward, actor):
            samples = first_of_group(reward.score(rollout.generate(prompts)), 0)
            return actor.update(centred(samples))

        training(empty)


def test_sample_ids_do_not_depend_on_who_finishes_first(tmp_path: Path):
    ids = []
    for name in ("one", "two"):
        with drive(tmp_path, training(), name=name) as driver:
            driver.run()
        published = [
            r
            for r in LogReader(tmp_path / name / "buffer" / LOG)
            if r["do"] == "publish" and "parents" in r
        ]
        ids.append([(p, i) for r in published for p, i in zip(r["parents"], r["ids"], strict=True)])
    assert ids[0] == ids[1]


KILLED = """
import os, signal, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_sample_buffer import drive, training
import toy

def score(self, samples):
    if os.environ.get("KILL") and samples["group_id"][0].as_py() >= 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return score.before(self, samples)

score.before = toy.ToyReward.score
score.__declaration__ = toy.ToyReward.score.__declaration__
score.__dict__.update(toy.ToyReward.score.__dict__)
toy.ToyReward.score = score
with drive(Path({root!r}), training()) as driver:
    driver.run()
"""


def test_a_killed_run_can_be_recovered_from_its_log_and_segments(tmp_path: Path):
    program = textwrap.dedent(KILLED).format(here=str(Path(__file__).parent), root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KILL": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    folder = tmp_path / "run" / "buffer"
    node = next((folder / "segments").iterdir()).name
    buffer = SampleBuffer.recover(folder, node=node)
    ledger = buffer.ledgers["train"]
    assert buffer.damage == [] and buffer.notes["step"] == 1 and buffer.notes["version/actor"] == 1
    score = ledger.graph["reward.score"]
    assert ledger.readiness.ready(score) == 8, "what was leased to the reward worker is ready again"
    lease = ledger.claim(score)
    assert lease is not None
    reader = SegmentReader(buffer.segments, node)
    every = range(lease.num_rows)
    [(answers, responses)] = column_pieces(
        ledger.graph, ledger.source, lease, [every], np.arange(len(every))
    )
    operation = score.operation
    rows = gather(
        RowTask(operation, (), lease.ids, lease.group_ids, lease.parent_ids, (answers, responses)),
        reader,
    )
    assert set(rows["group_id"].to_pylist()) == {4, 5, 6, 7} and rows["response_ids"].null_count == 0
    buffer.close()


def test_a_step_that_does_not_fit_into_the_buffer_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"Synchronous\(prompts_per_step=4\) has 12 rows in flight at once \(3 a prompt\), but BufferConfig\(max_rows=11\)",
    ):
        drive(tmp_path, training(), buffer=BufferConfig(max_rows=11))
    with drive(tmp_path, training(), buffer=BufferConfig(max_rows=12)) as driver:
        assert len(driver.run()) == 4


def test_masked_rows_come_with_a_mask_of_zeros(tmp_path: Path):
    writer, reader = SegmentWriter(tmp_path, "here", "writer"), SegmentReader(tmp_path, "here")
    ids = np.array([3, 4])
    segment = writer.append(Batch.of(sample_id=ids, response_ids=[[1, 2], [5]]))
    piece = ColumnPiece(("response_ids",), ids, (segment,))
    rows = gather(
        RowTask(Operation("update"), (), ids, ids, ids, [piece], masked=frozenset([3])), reader
    )
    assert rows["response_mask"].to_pylist() == [[0, 0], [1]]
    writer.close()


def test_the_log_of_a_run_without_checkpoints_stays_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sample_buffer, "CUT_BYTES", 1 << 13)
    schedule = Asynchronous(steps=150, prompts_per_step=2)
    driver = simulated_run(tmp_path, schedule, Simulated(costs(KNOWN)))
    folder = driver.directory.path / "buffer"
    archived = start_of(folder / "ledger.log").offset
    assert archived > 5 << 13 and (folder / "ledger.log").stat().st_size < 6 << 13
    report = check_log(folder)
    assert not report.violations and report.num_bytes > archived


def test_checkpoints_that_shorten_the_log_are_smaller_than_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written: list[int] = []

    def write_checkpoint(path: Path, *arguments: Any, **options: Any) -> None:
        recovery.write_checkpoint(path, *arguments, **options)
        written.append(path.stat().st_size)

    monkeypatch.setattr(sample_buffer, "CUT_BYTES", 1)
    monkeypatch.setattr(sample_buffer, "write_checkpoint", write_checkpoint)
    driver = simulated_run(
        tmp_path, Asynchronous(steps=20, prompts_per_step=32), Simulated(costs(KNOWN))
    )
    log_bytes = check_log(driver.directory.path / "buffer").num_bytes
    assert len(written) > 2 and sum(written) <= log_bytes
