"""Checkpointing is a state machine: states, deadlines and full disks, without workers, on a fake
clock."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saved_runs import SavingActor
from worker_groups import Asked, answer

from weft.controllers.backends.backend import Event
from weft.controllers.group import CallRequest
from weft.controllers.placement import ResourcePool
from weft.controllers.ranks.tasks import Failure, FailureKind, Reply
from weft.controllers.recovery.checkpoints import (
    CheckpointConfig,
    CheckpointFolder,
    RunState,
    Values,
    complete_checkpoints,
)
from weft.controllers.recovery.saving import ASK_S, Saving, _Phase, _Progressed
from weft.dataflow.errors import DeadlineError, RunError, TakenOverError
from weft.dataflow.runs.directory import RunDirectory
from weft.dataflow.runs.log import Position

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "manifest.json")


class Failing(CheckpointFolder):
    """Fails to complete a checkpoint while `error` is set."""

    error: Exception | None = None

    def complete(self, step: int, values: Values, advance: Callable[[], None]) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().complete(step, values, advance)


made: list[Saving] = []


@pytest.fixture(autouse=True)
def all_are_closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


class Saved:
    """A run with checkpoints: two groups with state, and a fake clock."""

    def __init__(self, root: Path, every: int, every_s: float | None = None) -> None:
        self.now = 100.0
        asked = Asked()
        self.groups = [asked.group(name, ResourcePool(), SavingActor) for name in ("actor", "critic")]
        config = CheckpointConfig(every=every, every_s=every_s, keep=2)
        self.folder = Failing(RunDirectory(root), config)
        self.saving = Saving(self.folder, config, self.groups, 60.0, lambda: self.now)
        made.append(self.saving)
        self.asked: list[CallRequest] = []

    def begin(self, step: int) -> list[CallRequest]:
        return self.saving.begin_checkpoint(RunState(step, 0, 0.0, {}, Position(offset=step)))

    def advance(self) -> _Progressed:
        progressed = self.saving.advance(lambda metric: {})
        self.asked = list(progressed.requests)
        return progressed

    def name(self) -> _Progressed:
        """Advance until the thread that completes the checkpoint is done."""
        deadline = time.monotonic() + 30
        progressed = self.advance()
        while self.saving.phase is _Phase.NAMING and time.monotonic() < deadline:
            progressed = self.advance()
        return progressed

    def copy(self, requests: list[CallRequest]) -> None:
        for request in requests:
            over(request, 0.5)

    def write(self) -> None:
        """Report from every group that its part is on disk."""
        self.now += ASK_S
        self.advance()
        for request in self.asked:
            over(request, True)

    def save(self, step: int) -> _Progressed:
        self.copy(self.begin(step))
        self.write()
        return self.name()

    @property
    def steps(self) -> list[str]:
        return [path.name for path in complete_checkpoints(self.folder.path)]


def over(request: CallRequest, value: Any) -> None:
    assert not list(request.then(answer(request.make(), value)))


def full(request: CallRequest) -> Event:
    return Event(request.make(), 0, Reply(failure=Failure("no room", kind=FailureKind.DISK_FULL)))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Saved]:
    saved = Saved(tmp_path, every=3)
    yield saved
    saved.saving.close()


def test_a_checkpoint_is_copied_written_and_named(run: Saved):
    saving = run.saving
    requests = run.begin(3)
    assert [(r.group.name, r.method, r.arguments["path"].name) for r in requests] == [
        ("actor", "save_checkpoint", "actor"),
        ("critic", "save_checkpoint", "critic"),
    ]
    assert saving.phase is _Phase.COPYING and not run.advance().requests
    over(requests[0], 0.25)
    assert saving.phase is _Phase.COPYING
    over(requests[1], 0.5)
    assert saving.phase is _Phase.WRITING and (saving.take_pause_s(), saving.take_pause_s()) == (
        0.5,
        0.0,
    )
    run.groups[1].watch(busy := run.groups[1].call("checkpoint_written"))
    run.advance()
    assert [(r.group.name, r.method) for r in run.asked] == [("actor", "checkpoint_written")], (
        "a busy group is not asked"
    )
    over(run.asked[0], True)
    run.groups[1].forget(busy)
    assert not run.advance().requests, "not so soon again"
    run.now += ASK_S
    run.advance()
    over(run.asked[0], False)
    run.now += ASK_S
    run.advance()
    over(run.asked[0], True)
    assert run.name() == _Progressed() and saving.phase is _Phase.IDLE and run.steps == ["step_000003"]


def test_one_is_written_at_a_time_and_the_run_waits_for_the_next_to_begin(run: Saved):
    saving = run.saving
    for step in (0, 1, 2):
        saving.step_over(step, last=False)
    assert not saving.due
    saving.step_over(3, last=False)
    assert saving.may_begin and saving.holds_up
    run.copy(run.begin(3))
    assert not saving.holds_up, "the run goes on while a checkpoint is written"
    saving.step_over(6, last=False)
    assert saving.holds_up and not saving.may_begin
    run.write()
    run.name()
    assert saving.may_begin
    run.save(6)
    assert run.steps == ["step_000006", "step_000003"]
    saving.step_over(7, last=True)
    assert saving.due


def test_checkpoints_by_time_are_due_at_the_first_step_that_is_over_when_the_time_is(tmp_path: Path):
    saved = Saved(tmp_path, every=0, every_s=100.0)
    due = {}
    for step, now in ((1, 150.0), (2, 199.0), (3, 200.0), (4, 250.0), (5, 299.0), (6, 301.0)):
        saved.now = now
        saved.saving.step_over(step, last=False)
        due[step] = saved.saving.due
        if saved.saving.may_begin:
            saved.save(step)  # takes ASK_S seconds of the clock
    assert due == {1: False, 2: False, 3: True, 4: False, 5: False, 6: True}
    saved.saving.step_over(7, last=True)
    assert saved.saving.due, "the last step has a checkpoint whatever the time"


def test_a_run_at_its_end_waits_for_the_checkpoint_of_its_last_step(run: Saved):
    saving = run.saving
    run.copy(run.begin(3))
    saving.require(3)
    assert saving.holds_up and not saving.due, "it is being written"
    run.write()
    run.name()
    assert not saving.holds_up
    saving.require(3, again=True)
    assert saving.may_begin
    run.save(3)
    assert not saving.holds_up and run.steps == ["step_000003"]
    assert [path.name for path in run.folder.path.iterdir()] == run.steps, (
        "the one that was replaced is gone"
    )


def test_a_rank_without_room_gives_the_checkpoint_up_and_it_is_due_after_the_next_step(run: Saved):
    run.copy(run.begin(3))
    run.now += ASK_S
    run.advance()
    actor, critic = run.asked
    over(critic, True)
    event = full(actor)
    assert run.saving.failed(event) and event.call.done
    actor.then(event.call)
    given_up = run.advance().given_up
    assert given_up is not None and given_up[0] == Position(offset=3) and "no room" in given_up[1]
    assert run.saving.phase is _Phase.IDLE and not run.saving.due and not list(run.folder.path.iterdir())
    run.saving.step_over(4, last=False)
    assert run.saving.due
    run.save(4)
    run.saving.step_over(5, last=False)
    assert not run.saving.due, "step 4 is saved"
    assert not run.saving.failed(full(CallRequest(run.groups[0], "load_checkpoint"))), (
        "that is no part of a checkpoint"
    )


def test_a_driver_without_room_at_the_end_of_a_run_saves_at_once_again(run: Saved):
    run.folder.error = FULL
    run.saving.require(5)
    given_up = run.save(5).given_up
    assert given_up is not None and "manifest.json" in given_up[1]
    assert run.saving.may_begin
    assert not run.save(5).given_up and run.steps == ["step_000005"] and not run.saving.holds_up


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TakenOverError("another driver goes on"), r"^another driver"),
        (
            OSError(errno.EIO, "no such luck"),
            r"checkpoint .*step_000003 could not be completed: .*no such luck",
        ),
    ],
)
def test_other_errors_while_a_checkpoint_completes_end_the_run(run: Saved, error: Exception, said: str):
    run.folder.error = error
    with pytest.raises(RunError, match=said):
        run.save(3)


def test_a_checkpoint_that_stops_growing_hits_a_deadline_that_names_the_ranks(run: Saved):
    requests = run.begin(3)
    run.now += 1000
    run.advance()  # copying has the deadline of its call
    run.copy(requests)
    (file := run.folder.unfinished(3) / "big").write_bytes(b"1")
    for size in range(2, 20):
        run.now += 50
        run.advance()
        file.write_bytes(bytes(size))
    run.now += 1000  # the driver itself was delayed
    run.advance()
    run.now += 50
    run.advance()
    run.now += 50
    with pytest.raises(
        DeadlineError, match=r"step_000003: nothing more was written for 60 s .*: actor, .*; critic, "
    ):
        run.advance()


def test_a_resumed_run_removes_later_and_unfinished_checkpoints(run: Saved):
    for step in (3, 6):
        run.save(step)
    run.begin(9)
    run.saving.resume(3)
    assert [path.name for path in run.folder.path.iterdir()] == ["step_000003"]
    run.saving.require(3)
    assert not run.saving.due


def test_later_checkpoints_are_kept_until_the_run_has_its_own_of_their_steps(run: Saved):
    for step in (3, 6, 9):
        run.save(step)
    assert [path.name for path in sorted(run.saving.resume(3))] == ["step_000006", "step_000009"]
    run.save(6)
    assert [path.name for path in run.folder.later.iterdir()] == ["step_000009"]
    run.saving.resume(3)
    assert sorted(path.name for path in run.folder.later.iterdir()) == ["step_000006", "step_000009"]
    run.save(9)
    assert not run.folder.later.exists()
