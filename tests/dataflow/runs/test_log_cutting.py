"""A log is cut at its kept checkpoints: older records are archived, and readers notice nothing."""

import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from buffer_graphs import GRAPHS  # pyright: ignore[reportMissingImports]
from fragile_disk import Crash, FragileDisk  # pyright: ignore[reportMissingImports]
from played_buffers import (  # pyright: ignore[reportMissingImports]
    Driver,
    comes_to_its_end,
    go_on,
    start,
    state_of,
)

from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.queries import history
from weft.dataflow.buffer.recovery import ledger_checkpoints, restore
from weft.dataflow.errors import TakenOverError, UserError
from weft.dataflow.runs.files import LOG, Disk
from weft.dataflow.runs.log import (
    Log,
    LogCutting,
    LogReader,
    Position,
    Work,
    _PreparedCut,
    damage_before,
    has_position,
)
from weft.dataflow.runs.log_archive import HISTORY, start_of

RECORDS = [{"do": "note", "key": f"k{i}", "value": [i] * (i % 4)} for i in range(12)]


def at_once(work: Work) -> Future[_PreparedCut]:
    """Run the work before returning its future."""
    done: Future[_PreparedCut] = Future()
    done.set_result(work())
    return done


def cut_eagerly(driver: Driver) -> Driver:
    """Cut the log as often as possible, synchronously."""
    driver.buffer.cutting = LogCutting(driver.buffer.log, 1, at_once)
    return driver


def played(folder: Path, steps: int = 330, disk: Disk | None = None) -> Driver:
    driver = cut_eagerly(start(folder, disk))
    for _ in range(steps):
        driver.step()
    return driver


def cut_log(path: Path) -> list[Position]:
    """Write a log with two cuts, and return the position of each record and of the end."""
    log = Log(path)
    cutting = LogCutting(log, 1, at_once)
    places = [log.position]
    for number, record in enumerate(RECORDS, 1):
        log.append(record)
        places.append(log.position)
        if number in (6, 10):
            log.commit()
            cutting.begin(places[number - 3])
            log.append({"do": "note", "key": "meanwhile"})
            places.append(log.position)
            log.commit()
            cutting.finish()
    log.close()
    return places


def test_a_cut_log_reads_like_the_original(tmp_path: Path):
    path = tmp_path / LOG
    places = cut_log(path)
    assert start_of(path).offset > 0 and len(list((tmp_path / HISTORY).iterdir())) == 2
    reader = LogReader(path)
    whole = list(reader)
    assert [r for r in whole if r["key"] != "meanwhile"] == RECORDS
    assert reader.end == places[-1] and reader.damage is None
    for place in places:
        reader = LogReader(path, place)
        assert list(reader) == whole[places.index(place) :] and reader.end == places[-1]
        assert has_position(path, place)
    assert damage_before(path, places[-1]) is None
    assert not has_position(path, Position(places[-1].offset, 1))


def test_a_run_with_a_cut_log_finishes_with_a_valid_log(tmp_path: Path):
    driver = played(tmp_path / "run")
    before = state_of(driver.buffer)
    driver.buffer.log.close()
    assert start_of(tmp_path / "run" / LOG).offset > 0
    found = restore(tmp_path / "run", GRAPHS)
    assert state_of(found) == before and not found.damage
    driver = cut_eagerly(go_on(tmp_path / "run"))
    comes_to_its_end(driver)
    report = check_log(tmp_path / "run")
    assert not report.violations and sum(g.issued for g in report.graphs.values()) == len(
        history(tmp_path / "run")
    )


def test_the_file_holds_no_more_than_the_checkpoints_that_are_kept_need(tmp_path: Path):
    driver = played(tmp_path / "run")
    sizes: list[int] = []
    for _ in range(12):
        for _ in range(40):
            driver.step()
        driver.buffer.checkpoint()
        driver.buffer.commit()
        kept = ledger_checkpoints(tmp_path / "run")
        assert start_of(tmp_path / "run" / LOG).offset == int(kept[-1].stem.split("-")[1])
        sizes.append((tmp_path / "run" / LOG).stat().st_size)
    assert max(sizes) < driver.buffer.log.position.offset / 3
    driver.buffer.close()


def test_a_run_goes_back_to_an_archived_checkpoint(tmp_path: Path):
    driver = played(tmp_path / "run", 60)
    position = driver.buffer.checkpoint()
    then = state_of(driver.buffer)
    for _ in range(150):
        driver.step()
    driver.buffer.checkpoint([position])
    for _ in range(30):
        driver.step()
    driver.buffer.checkpoint([position])
    driver.buffer.commit()
    driver.buffer.log.close()
    whole = list(LogReader(tmp_path / "run" / LOG))
    assert start_of(tmp_path / "run" / LOG).offset > position.offset
    assert state_of(restore(tmp_path / "run", GRAPHS, at=position)) == then
    for path in ledger_checkpoints(tmp_path / "run"):  # the archive alone is enough
        path.unlink()
    assert state_of(restore(tmp_path / "run", GRAPHS, at=position)) == then
    driver = cut_eagerly(go_on(tmp_path / "run", at=position))
    log = LogReader(tmp_path / "run" / LOG)
    kept = [record for record in log if log.end.offset <= position.offset]
    assert kept == whole[: len(kept)] and len(kept) > 10
    comes_to_its_end(driver)
    assert not check_log(tmp_path / "run").violations


def test_a_run_without_its_archive_continues_without_older_records(tmp_path: Path):
    driver = played(tmp_path / "run")
    driver.buffer.checkpoint()
    before = state_of(driver.buffer)
    driver.buffer.log.close()
    shutil.rmtree(tmp_path / "run" / HISTORY)
    assert state_of(restore(tmp_path / "run", GRAPHS)) == before
    with pytest.raises(
        UserError, match=r"the part of its history that ends at byte .* is not in .*history"
    ):
        check_log(tmp_path / "run")
    driver = go_on(tmp_path / "run")
    driver.run_out()
    for path in ledger_checkpoints(tmp_path / "run"):
        path.unlink()
    with pytest.raises(UserError, match="A run can resume without it"):
        restore(tmp_path / "run", GRAPHS)


def test_a_damaged_part_refutes_the_log(tmp_path: Path):
    played(tmp_path / "run").buffer.close()
    part = sorted((tmp_path / "run" / HISTORY).iterdir())[1]
    other = sorted((tmp_path / "run" / HISTORY).iterdir())[0].read_bytes()
    part.write_bytes(other)
    assert [v for v in check_log(tmp_path / "run").violations if "checksum" in str(v)]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("every", [47, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_of_a_cut_can_be_resumed(tmp_path: Path, every: int, power: bool):
    chance, disk = random.Random(7), FragileDisk()
    played(tmp_path / "whole", 200, disk).buffer.close()
    moments = [(n, when) for n in range(len(disk.operations)) for when in ("before", 0.5, "after")]
    for number, when in moments[1::every]:
        folder, driver = tmp_path / "run", None
        shutil.rmtree(folder, ignore_errors=True)
        disk = FragileDisk(number, when)
        with pytest.raises(Crash):
            driver = cut_eagerly(start(folder, disk))
            for _ in range(200):
                driver.step()
            driver.buffer.close()
        committed = driver.committed if driver else 0
        disk.lose_power(chance) if power else disk.bury()
        if (folder / LOG).exists():
            assert power or restore(folder, GRAPHS).end.offset >= committed
            comes_to_its_end(cut_eagerly(go_on(folder)))
            assert not check_log(folder).violations


def test_a_driver_that_was_replaced_while_it_cut_does_not_replace_the_log(tmp_path: Path):
    path = tmp_path / LOG
    log = Log(path)
    for record in RECORDS:
        log.append(record)
    log.commit()
    cutting = LogCutting(log, 1, at_once)
    cutting.begin(log.position)
    successor = Log(path, at=log.position)
    successor.append({"do": "note", "key": "mine"})
    successor.commit()
    with pytest.raises(TakenOverError):
        cutting.finish()
    assert [r["key"] for r in LogReader(path)][-1] == "mine" and not list(tmp_path.glob("*.cutting"))
    successor.close()


def test_a_cut_that_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    driver = played(tmp_path / "run", 100)
    (tmp_path / "run" / HISTORY).rename(tmp_path / "aside")
    (tmp_path / "run" / HISTORY).write_text("in the way")
    driver.buffer.cutting = LogCutting(driver.buffer.log, 1)
    for _ in range(3):
        driver.step()
        driver.buffer.checkpoint()
    driver.buffer.cutting.finish(wait=True)
    assert "cannot be cut for now" in caplog.text
    (tmp_path / "run" / HISTORY).unlink()
    (tmp_path / "aside").rename(tmp_path / "run" / HISTORY)
    before = start_of(tmp_path / "run" / LOG).offset
    driver.buffer.checkpoint()
    driver.buffer.cutting.finish(wait=True)
    assert start_of(tmp_path / "run" / LOG).offset > before
    comes_to_its_end(driver)


def open_files() -> set[str]:
    descriptors = Path("/proc/self/fd")
    return {os.readlink(one) for one in descriptors.iterdir() if one.exists()}


def half_cut(folder: Path, run: Callable[[Work], Future[_PreparedCut]]) -> tuple[Log, LogCutting]:
    """Return a log with an unfinished cut."""
    log = Log(folder / LOG)
    for record in RECORDS:
        log.append(record)
    log.commit()
    cutting = LogCutting(log, 1, run, timeout_s=0.0)
    cutting.begin(log.position)
    return log, cutting


def test_a_cut_that_the_log_never_took_leaves_no_open_file(tmp_path: Path):
    log, cutting = half_cut(tmp_path, at_once)
    assert (tmp_path / f"{LOG}.cutting").exists()
    cutting.close()
    log.close()
    assert not list(tmp_path.glob("*.cutting"))
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


@pytest.mark.parametrize("end", ["finish", "close"])
def test_an_archive_that_does_not_finish_hits_a_deadline_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
):
    works: list[tuple[Work, Future[_PreparedCut]]] = []

    def never(work: Work) -> Future[_PreparedCut]:
        works.append((work, Future()))
        return works[-1][1]

    log, cutting = half_cut(tmp_path, never)
    cutting.finish(wait=True) if end == "finish" else cutting.close()
    cutting.close()
    log.close()
    assert f"archives it in {tmp_path / HISTORY} did not end within 0 s" in caplog.text
    [(work, future)] = works  # the thread ends after all
    future.set_result(work())
    assert not list(tmp_path.glob("*.cutting"))
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]
    assert [*LogReader(tmp_path / LOG)] == RECORDS
