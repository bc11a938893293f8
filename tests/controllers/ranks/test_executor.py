"""The executor of a rank: the order of its calls, and its replies."""

import collections.abc as steps
import queue
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import ToyConfig

from weft.controllers.backends.backend import Files
from weft.controllers.ranks.executor import IDLE_S, KEEPALIVE_S, Executor, ExecutorThread
from weft.controllers.ranks.tasks import FailureKind, Reply, RowTask, Task
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Max, Metrics
from weft.dataflow.operation import Shape, declaration_of
from weft.workers.dispatch import Dispatch
from weft.workers.worker import IDLE, Children, Worker, remote


class Generator(Worker):
    """Notes its steps; a call of `generate` takes three."""

    Config = ToyConfig

    def __init__(self) -> None:
        super().__init__(ToyConfig())
        self.steps: list[str] = []

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=(),
        writes=("response_ids",),
    )
    def generate(self, prompts: Batch, *, who: str) -> Iterator[None]:
        for _ in range(3):
            self.steps.append(who)
            yield None

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, who: str) -> str:
        self.steps.append(who)
        return who

    @remote(dispatch=Dispatch.ONE_TO_ALL, interruptible=True)
    def stage_weights(self, who: str) -> steps.Generator[None, None, tuple[str, Metrics]]:
        for _ in range(2):
            self.steps.append(who)
            yield
        return who, {"pause_s": Max(0.5)}


def generating(number: int) -> Task:
    declaration = declaration_of(Generator.generate)
    assert declaration is not None
    nobody = np.zeros(0, np.int64)
    rows = RowTask(declaration.called_with({}), (), nobody, nobody, nobody)
    return Task("generate", {"who": f"generate {number}"}, rows, number=number)


def receiving(number: int) -> Task:
    return Task("receive_weights", {"who": f"receive {number}"}, number=number)


def test_weights_go_in_between_two_steps_of_generation(tmp_path: Path):
    worker = Generator()
    executor, replies, started = Executor(worker, Files(tmp_path).access("here", "executor")), [], []
    for task in (generating(0), generating(1)):
        executor.add_task(task, replies.append, partial(started.append, task.number))
    executor.take_turn()
    executor.add_task(receiving(2), replies.append, partial(started.append, 2))
    while executor.busy:
        executor.take_turn()
    rounds = ["generate 1", "generate 0", "generate 1", "generate 0", "generate 1"]
    assert worker.steps == ["generate 0", "receive 2", *rounds]
    assert started == [0, 2, 1], "a call starts when it has its first turn, not when it comes"
    assert [(r.value, r.done) for r in replies] == [("receive 2", True), (None, True), (None, True)]


def test_a_method_without_rows_may_give_way_and_returns_its_metrics(tmp_path: Path):
    worker = Generator()
    executor, replies = Executor(worker, Files(tmp_path).access("here", "executor")), []
    executor.add_task(generating(0), lambda reply: None)
    executor.add_task(Task("stage_weights", {"who": "stage 1"}, number=1), replies.append)
    while executor.busy:
        executor.take_turn()
    assert worker.steps == ["generate 0", "stage 1", "generate 0", "stage 1", "generate 0"]
    (reply,) = replies
    assert reply.done and reply.value == "stage 1" and reply.metrics["pause_s"].value == 0.5


def test_a_cancelled_call_ends_at_its_current_step_or_never_starts(tmp_path: Path):
    worker = Generator()
    executor = Executor(worker, Files(tmp_path).access("here", "executor"))
    replies: dict[int, list[Any]] = {1: [], 2: []}
    executor.add_task(generating(1), replies[1].append)
    executor.take_turn()
    executor.cancel_call(1)
    executor.cancel_call(2)
    executor.add_task(generating(2), replies[2].append)
    assert replies == {1: [Reply(done=True)], 2: [Reply(done=True)]}
    assert worker.steps == ["generate 1"] and not executor.busy


def test_a_failure_is_replied_with_the_traceback_of_the_worker_alone(tmp_path: Path):
    executor, replies = Executor(Generator(), Files(tmp_path).access("here", "executor")), []
    executor.add_task(replace(receiving(1), arguments={}), replies.append)
    executor.take_turn()
    (reply,) = replies
    assert reply.is_last and not reply.done and reply.failure.message.startswith("TypeError: ")
    assert not executor.busy and reply.failure.kind is FailureKind.EXCEPTION


def test_a_call_that_makes_steps_reports_progress_after_a_silence(tmp_path: Path):
    now, replies = [100.0], []
    executor = Executor(Generator(), Files(tmp_path).access("here", "executor"), clock=lambda: now[0])
    executor.add_task(generating(0), replies.append)
    now[0] += KEEPALIVE_S
    executor.take_turn()
    assert not replies
    now[0] += 0.5
    executor.take_turn()
    assert replies == [Reply()], "it goes on"
    now[0] += KEEPALIVE_S
    executor.take_turn()
    assert replies == [Reply()], "it has replied since"


class Waiting(Worker):
    """Waits for an event. Notes the calls that got a turn."""

    Config = ToyConfig

    def __init__(self) -> None:
        super().__init__(ToyConfig())
        self.turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.goes_on = False

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=(),
        writes=("length",),
    )
    def generate(self, prompts: Batch, *, who: str) -> Iterator[Children | str | None]:
        if len(prompts):
            rows = Batch.of(parent_id=prompts.numpy("sample_id"), length=np.zeros(1))
            yield Children(rows, np.zeros(1, np.int64), np.zeros(0, np.int64))
        while not self.goes_on:
            self.turns.put(who)
            yield IDLE


def test_a_rank_sleeps_only_while_all_of_its_calls_are_idle(tmp_path: Path):
    now = [100.0]
    executor = Executor(Waiting(), Files(tmp_path).access("here", "executor"), clock=lambda: now[0])
    assert executor.idle_s == 0, "there is no call"
    for number in (0, 1):
        executor.add_task(generating(number), lambda reply: None)
        assert executor.idle_s == 0, "the new call has had no turn"
        executor.take_turn()
    executor.take_turn()
    assert executor.idle_s == IDLE_S
    now[0] += IDLE_S / 2
    assert executor.idle_s == IDLE_S / 2
    executor.rouse()
    for _ in range(2):
        assert executor.idle_s == 0, "each call looks whether it may go on"
        executor.take_turn()
    assert executor.idle_s == IDLE_S
    executor.give_up_rows(1, [7])
    assert executor.idle_s == 0
    executor.take_turn()
    executor.take_turn()
    executor.add_task(receiving(2), lambda reply: None)
    assert executor.idle_s == 0, "weights do not wait"


def test_rows_that_are_held_back_for_others_limit_the_sleep(tmp_path: Path):
    declaration = declaration_of(Waiting.generate)
    assert declaration is not None
    one = np.array([5])
    rows = RowTask(declaration.called_with({}), ("length",), one, one, one, first_children=one)
    executor = Executor(Waiting(), Files(tmp_path).access("here", "executor"), clock=lambda: 100.0)
    task = Task("generate", {"who": "me"}, rows, number=1, gather_s=IDLE_S / 2)
    executor.add_task(task, lambda reply: None)
    executor.take_turn()
    assert executor.idle_s <= IDLE_S / 2 + 1e-9


def test_a_sleeping_rank_wakes_for_its_calls_for_new_calls_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weft.controllers.ranks.executor.IDLE_S", 3600.0)
    thread = ExecutorThread(Files(tmp_path).access("here", "executor"))
    worker = thread.begin(Waiting)
    assert isinstance(worker, Waiting)
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    thread.between_turns(lambda executor: executor.add_task(generating(0), replies.put))
    worker.turns.get(timeout=60)
    thread.between_turns(lambda executor: executor.add_task(generating(1), replies.put))
    while worker.turns.get(timeout=60) != "generate 1":
        pass
    worker.goes_on = True
    thread.wake()
    assert replies.get(timeout=60).done and replies.get(timeout=60).done
    worker.goes_on = False
    thread.between_turns(lambda executor: executor.add_task(generating(2), replies.put))
    while worker.turns.get(timeout=60) != "generate 2":
        pass
    thread.close()


class Answering(Worker):
    """Yields part of its answer in each of three steps, then fails."""

    Config = ToyConfig

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=(),
        writes=("length",),
    )
    def generate(self, prompts: Batch, *, who: str) -> Iterator[Children | None]:
        for number in range(3):
            rows = Batch.of(parent_id=prompts.numpy("sample_id"), length=np.array([number]))
            yield Children(rows, np.array([number]), np.zeros(0, np.int64))
            yield None
        raise ValueError(who)


@pytest.mark.parametrize("gather_s", [0.0, 60.0])
@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_finished_rows_are_published_however_the_call_ends(tmp_path: Path, gather_s: float, ends: str):
    declaration = declaration_of(Answering.generate)
    assert declaration is not None
    one = np.array([5])
    rows = RowTask(
        declaration.called_with({}), ("length",), one, one, one, first_children=np.array([100])
    )
    executor, replies = (
        Executor(Answering(ToyConfig()), Files(tmp_path).access("here", "executor")),
        list[Reply](),
    )
    executor.add_task(Task("generate", {"who": "me"}, rows, number=1, gather_s=gather_s), replies.append)
    steps = 2 if ends == "cancelled" else 4
    for _ in range(steps if gather_s else 2 * steps):  # both a reply and a step end a turn
        executor.take_turn()
    executor.take_turn() if ends == "failed" else executor.cancel_call(1)
    published = [reply.published.ids.tolist() for reply in replies if reply.published is not None]
    made = [100, 101] if ends == "cancelled" else [100, 101, 102]
    assert published == ([made] if gather_s else [[id] for id in made])
    assert replies[-1].done == (ends == "cancelled") and bool(replies[-1].failure) == (ends == "failed")
