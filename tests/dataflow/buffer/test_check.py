"""The check of a run: its log, against its checkpoints and samples."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from counting import calls_of
from ledgers import dapo
from played_ledgers import at, drive, publish, report_of
from recorded_run import write_samples

from weft.dataflow.buffer.check import _RecordedSamples, check_log
from weft.dataflow.buffer.queries import history
from weft.dataflow.buffer.recovery import read_checkpoint, restore, save, write_checkpoint
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.errors import FormatError, UserError
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.lock import RunLock
from weft.dataflow.runs.log import Log, LogReader, Position


def test_a_started_run_holds_no_lease_of_the_run_before(tmp_path: Path):
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], step=0)
    for _ in range(2):
        assert ledger.claim(ledger.graph["generate"], max_rows=1)
    buffer.log.close()
    buffer = SampleBuffer.recover(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    buffer.note("step", 1)
    buffer.commit()
    report = check_log(tmp_path / "run")
    assert (report.restarts, report.violations) == (1, [])
    assert report.leases == {"granted": 2, "finished": 0, "released": 2, "open": 0}
    records = list(LogReader(tmp_path / "run" / "ledger.log"))
    del records[at(records, "release")]
    [violation] = map(str, report_of(records, tmp_path).violations)
    assert (
        "the run was started again, but lease 1 of node 'generate' in graph 'train', claimed at byte"
        in violation
    )
    buffer.log.close()


def test_a_checkpoint_that_contradicts_the_log_is_found(tmp_path: Path):
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], step=0)
    position = buffer.checkpoint()
    assert check_log(tmp_path / "run").checkpoints == 1 and not check_log(tmp_path / "run").violations
    [path] = (tmp_path / "run").glob("*.checkpoint")
    _, records = read_checkpoint(path)
    write_checkpoint(path, position, [r for r in records if r.get("id") != 1])
    assert list(map(str, check_log(tmp_path / "run").violations)) == [
        f"{path.name}: row 1 is in flight, which the checkpoint lacks"
    ]
    for foreign in (Position(position.offset, 1), Position(position.offset - 3, position.checksum)):
        write_checkpoint(path, foreign, records)
        report = check_log(tmp_path / "run")
        assert not report.violations and not report.checkpoints and "of another log" in report.damage[0]
    path.write_bytes(path.read_bytes()[:-3])
    report = check_log(tmp_path / "run")
    assert not report.violations and "the last record is torn" in report.damage[0]
    buffer.log.close()


def test_a_torn_tail_and_cut_records_are_reported_without_violation(tmp_path: Path):
    drive(tmp_path / "run", dapo()).log.close()
    log = tmp_path / "run" / "ledger.log"
    log.write_bytes(log.read_bytes()[:-5])
    report = check_log(tmp_path / "run")
    assert not report.violations and "the last record is torn" in report.damage[0]
    assert report.leases["open"] == 1 and report.graphs["train"].leased == 3
    SampleBuffer.recover(tmp_path / "run", {"train": dapo()}, check=lambda segment: None).log.close()
    report = check_log(tmp_path / "run")
    assert (
        not report.violations
        and report.restarts == 1
        and "bytes were cut off the log" in report.damage[0]
    )


@dataclass
class Epoch(RunLock):
    """One writer of the log, without a file."""

    number: int

    def check(self, *, sure: bool = False) -> None: ...

    def record(self) -> dict[str, Any]:
        return {
            "do": "epoch",
            "epoch": self.number,
            "host": "here",
            "pid": 7,
            "since": "2026-11-22 04:20:15 UTC",
        }


def test_epochs_in_a_log_count_restarts_and_show_two_drivers(tmp_path: Path):
    graphs = {"train": dapo()}
    SampleBuffer.create(tmp_path, graphs, fence=Epoch(1)).close()
    for number in (2, 5):
        buffer = SampleBuffer.recover(tmp_path, graphs, fence=Epoch(number), check=lambda segment: None)
        if number == 2:
            buffer.ledgers["train"].issue([0], [2], step=0)
            buffer.ledgers["train"].claim(buffer.ledgers["train"].graph.nodes[0])
        buffer.log.close()
    report = check_log(tmp_path)
    assert not report.violations and report.restarts == 2, "also the one that found no lease"
    SampleBuffer.recover(tmp_path, graphs, fence=Epoch(4)).log.close()
    (violation,) = map(str, check_log(tmp_path).violations)
    assert (
        "epoch 4 (host 'here', process 7, since 2026-11-22 04:20:15 UTC) begins after epoch 5: two drivers"
        in violation
    )


def test_a_log_that_two_drivers_appended_to_is_refuted_with_the_place_where_they_parted(tmp_path: Path):
    buffer = drive(tmp_path / "run", dapo())
    place = buffer.log.position
    buffer.note("step", 1)
    buffer.commit()
    shutil.copy(tmp_path / "run" / "ledger.log", tmp_path / "other")
    other = Log(tmp_path / "other", at=place)
    other.append({"do": "note", "key": "step", "value": 2})
    other.close()
    log = tmp_path / "run" / "ledger.log"
    log.write_bytes(log.read_bytes() + (tmp_path / "other").read_bytes()[place.offset :])
    (violation,) = map(str, check_log(tmp_path / "run").violations)
    assert (
        f"the log continues from byte {place.offset}: two processes appended to this log at the same time"
        in violation
    )


def test_a_folder_without_a_log_is_the_users_mistake(tmp_path: Path):
    with pytest.raises(UserError, match="holds no log of a run"):
        check_log(tmp_path)


def test_the_work_of_checking_an_event_does_not_grow_with_the_length_of_the_log(tmp_path: Path):
    made = {}
    for steps in (2, 10):
        buffer = SampleBuffer.create(tmp_path / str(steps), {"train": dapo()}, clock=lambda: 0.0)
        ledger = buffer.ledgers["train"]
        for step in range(steps):
            ledger.issue(range(125), [2] * 125, step=step)
            for node in ledger.graph.nodes:
                while lease := ledger.claim(node, max_rows=100, max_groups=20):
                    publish(buffer, ledger, lease, 8)
                    ledger.finish(lease)
        buffer.log.close()
        report, calls = calls_of(lambda steps=steps: check_log(tmp_path / str(steps)))
        events = 2 * sum(report.graphs["train"].consumed.values())  # each was claimed and published
        assert not report.violations and events > 4_000 * steps
        made[steps] = calls / events
    assert made[10] < 1.1 * made[2], made


@pytest.mark.parametrize(("number", "which"), [(2, "an earlier"), (7, "a later")])
def test_no_reader_takes_a_log_of_another_format(tmp_path: Path, number: int, which: str):
    drive(tmp_path / "true", dapo()).log.close()
    (tmp_path / "run").mkdir()
    log = Log(tmp_path / "run" / LOG)
    for record in LogReader(tmp_path / "true" / LOG):
        log.append(record | {"format": number} if record["do"] == "graph" else record)
    log.close()
    said = f"graph 'train' is described in format {number}, by {which} version of Weft; this version reads formats 3 to 6"
    for read in (check_log, restore, history):
        with pytest.raises(FormatError, match=said):
            read(tmp_path / "run")


def test_a_log_of_the_format_before_is_read_as_it_is(tmp_path: Path):
    """All rows of one of its records are in one segment, which is still allowed."""
    drive(tmp_path / "true", dapo()).log.close()
    (tmp_path / "run").mkdir()
    log = Log(tmp_path / "run" / LOG)
    for record in LogReader(tmp_path / "true" / LOG):
        log.append(record | {"format": 3} if record["do"] == "graph" else record)
    log.close()
    assert not check_log(tmp_path / "run").violations
    before, after = (restore(tmp_path / name).ledgers["train"] for name in ("true", "run"))
    assert list(save(before)) == list(save(after))


def test_a_file_that_a_live_run_writes_after_the_files_were_listed_is_not_missing(tmp_path: Path):
    samples = _RecordedSamples(tmp_path)
    write_samples(tmp_path)
    samples.compare("train", 1, {1: 1, 2: 1})
    samples.compare("eval", 1, {3: 2, 4: 2})
    samples.compare_late()
    [violation] = map(str, samples.violations)
    assert "lease 1 of graph 'eval' recorded 2 rows; 1 are missing (sample ids [4])" in violation
    assert not samples.notes()
