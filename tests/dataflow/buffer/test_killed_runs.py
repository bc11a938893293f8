"""A run that is killed or loses power at any moment can be resumed."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from buffer_graphs import GRAPHS
from fragile_disk import Crash, FragileDisk
from played_buffers import Driver, comes_to_its_end, conserved, go_on, start, state_of

from weft.dataflow.buffer.recovery import ledger_checkpoints, restore
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.runs.files import LOG, Disk
from weft.dataflow.runs.log import LogReader

STEPS = 330


@dataclass
class Reference:
    """The run without interruption."""

    folder: Path
    log: bytes
    states: dict[int, str]
    operations: list[str]
    recovery: int = 0

    def points(self, chance: random.Random) -> Iterator[tuple[int, str | float]]:
        for number, what in enumerate(self.operations):
            yield number, "before"
            yield number, "after"
            if what == "write":
                yield number, chance.random()
                yield number, chance.random()

    def crash(self, folder: Path, number: int, when: str | float) -> tuple[FragileDisk, int]:
        """Crash the run there; return its disk and the committed bytes of its log."""
        disk, driver = FragileDisk(number, when), None
        with pytest.raises(Crash):
            driver = start(folder, disk)
            for _ in range(STEPS):
                driver.step()
            driver.buffer.close()
        return disk, driver.committed if driver else 0

    def check(self, folder: Path, at_least: int) -> None:
        """Check that the disk holds a state of the run, no older than its last committed one."""
        if not (folder / LOG).exists():
            assert at_least == 0
            return
        history = restore(folder, GRAPHS)
        end = history.end.offset
        assert end >= at_least and (folder / LOG).read_bytes()[:end] == self.log[:end]
        if end in self.states:
            assert state_of(history) == self.states[end]
        else:
            assert end < min(self.states) or not self.between(end)

    def between(self, end: int) -> bool:
        """Check for states inside `expire`, the only ones that the reference did not record."""
        reader = LogReader(self.folder / LOG)
        record = next(r for r in reader if reader.end.offset >= end)
        return record["do"] not in ("offer", "release", "graph")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder, disk = tmp_path_factory.mktemp("runs") / "reference", FragileDisk()
    states: dict[int, str] = {}
    driver = start(folder, disk, snapshots=states)
    for _ in range(STEPS):
        driver.step()
    driver.buffer.close()
    assert Counter(disk.operations)["rename"] >= 3
    done = [r["do"] for r in LogReader(folder / LOG)]
    assert {"issue", "claim", "publish", "finish", "release", "note"} <= set(done)
    return Reference(folder, (folder / LOG).read_bytes(), states, disk.operations)


def recovered(folder: Path, disk: Disk | None = None, name: str = "second") -> Driver:
    """Resume the run if it had begun, otherwise start it."""
    if not (folder / LOG).exists():
        clock = [1e6]
        return Driver(
            SampleBuffer.create(folder, GRAPHS, disk=disk, clock=lambda: clock[0]),
            random.Random(0),
            clock,
            name,
        )
    driver = go_on(folder, disk, name)
    conserved(driver.buffer)
    assert not any(ledger.leases for ledger in driver.buffer.ledgers.values())
    return driver


every_moment = pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
"""Test one moment in this many. Even 1 in 23 hits each kind of operation many times."""


@every_moment
def test_a_run_killed_at_any_moment_can_be_resumed(tmp_path: Path, reference: Reference, every: int):
    for k, (number, when) in enumerate(list(reference.points(random.Random(1)))[::every]):
        folder = tmp_path / str(k)
        disk, committed = reference.crash(folder, number, when)
        disk.bury()
        reference.check(folder, committed)
        comes_to_its_end(recovered(folder, FragileDisk()))
        shutil.rmtree(folder)


@every_moment
def test_a_run_that_loses_power_at_any_moment_can_be_resumed(
    tmp_path: Path, reference: Reference, every: int
):
    chance = random.Random(2)
    for k, (number, when) in enumerate(list(reference.points(chance))[::every]):
        folder = tmp_path / str(k)
        disk, _ = reference.crash(folder, number, when)
        safe = disk.synced.get(folder / LOG, 0)
        disk.lose_power(chance)
        reference.check(folder, safe)
        comes_to_its_end(recovered(folder, FragileDisk()))
        shutil.rmtree(folder)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("every", [311, pytest.param(13, marks=pytest.mark.slow)])
def test_a_run_killed_during_recovery_can_be_resumed(
    tmp_path: Path, reference: Reference, every: int, power: bool
):
    chance, crashes = random.Random(3), 0
    for number, when in list(reference.points(chance))[3::every]:
        shutil.rmtree(tmp_path / "once", ignore_errors=True)
        disk, committed = reference.crash(tmp_path / "once", number, when)
        safe = disk.synced.get(tmp_path / "once" / LOG, 0) if power else committed
        if power:
            disk.lose_power(chance)
        disk.bury()
        for again in range(40):
            folder = tmp_path / "twice"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / "once", folder)
            second = FragileDisk(again // 3, ("before", 0.5, "after")[again % 3])
            try:
                recovered(folder, second).buffer.log.close()
            except Crash:
                crashes += 1
            else:
                break
            if power:
                second.lose_power(chance)
            second.bury()
            # Recovery may have returned leases and named graphs, but committed data must be intact.
            assert not (folder / LOG).exists() or restore(folder, GRAPHS).end.offset >= safe
            third = recovered(folder, FragileDisk())
            assert all(
                third.buffer.notes.get(k, 0) >= v
                for k, v in json.loads(notes_at(reference, safe)).items()
            )
            comes_to_its_end(third)
    assert crashes > 2600 / every


def notes_at(reference: Reference, offset: int) -> str:
    known = [at for at in reference.states if at <= offset]
    return json.dumps(json.loads(reference.states[max(known)])[1]) if known else "{}"


def test_records_of_a_killed_process_survive_power_loss_once_recovered(
    tmp_path: Path, reference: Reference
):
    writes = [k for k, what in enumerate(reference.operations) if what == "write"]
    for number in writes[1:]:
        folder = tmp_path / str(number)
        disk, _ = reference.crash(folder, number, "after")
        disk.bury()
        disk.crash_at, disk.dead = None, False  # same machine: unsynced data is still there
        driver = go_on(folder, disk)
        position, size = driver.buffer.checkpoint(), (folder / LOG).stat().st_size
        disk.lose_power(random.Random(number))
        assert (folder / LOG).stat().st_size == size == position.offset
        history = restore(folder, GRAPHS)
        assert (
            history.end == position
            and len(history.checkpoints) == len(ledger_checkpoints(folder))
            and not history.damage
        )
