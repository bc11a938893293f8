"""A call that hangs in the driver's process ends the run, with its stack in the message."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
import forked_hang
from ahead import LocalAhead
from toy import ToyReward, ToyRollout, prompts, toy_evaluation
from toy_runs import drive

from weft.controllers.backends import local
from weft.controllers.backends.backend import START_TIMEOUT_S
from weft.controllers.backends.local import _SilenceWatch
from weft.controllers.backends.process_diagnostics import SIGNAL
from weft.controllers.prechecks.checks import CALL_S
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DeadlineError, Silent
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

LIMIT_S = 60.0


class Clock:
    """Replaces the module `time` in the watch."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.readings = 0
        """Times that the watch's thread has read the clock, a few per look."""
        self.until_s = 0.0

    sleep = staticmethod(time.sleep)

    def hang(self, limit_s: float) -> None:
        """Advance one second per reading of that thread, until this limit has passed."""
        self.until_s = self.now_s + limit_s + 1.0

    def monotonic(self) -> float:
        if threading.current_thread().name == "silence":
            self.readings += 1
            if self.now_s < self.until_s:
                self.now_s += 1.0
                # this look interrupts the call, so delay the next one
                if self.now_s >= self.until_s:
                    local.LOOK_S = 30.0
        return self.now_s

    def await_looks(self, number: int = 2) -> None:
        wanted = self.readings + 4 * number
        while self.readings < wanted:
            wait(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(local, "time", made)
    monkeypatch.setattr(local, "LOOK_S", 0.001)  # waited out: the fake clock decides
    Hanging.clock = HangingAtStart.clock = made
    return made


class Hanging(ToyReward):
    """Waits for an event that never comes."""

    clock: Clock

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        return self.waits_for_an_answer(samples)

    def waits_for_an_answer(self, samples: Batch) -> tuple[Batch, Metrics]:
        self.clock.hang(CALL_S)
        wait(60)
        raise AssertionError("it was not interrupted")


class HangingAtStart(ToyReward):
    clock: Clock

    def __init__(self, *given: object) -> None:
        self.clock.hang(START_TIMEOUT_S)
        wait(60)


def hang(root: Path, reward: type[Hanging] | type[HangingAtStart]) -> None:
    backend = LocalAhead(lambda: bool(backend.hanging))
    graph = toy_evaluation(
        prompts(2), rollout=group(ToyRollout, name="rollout"), reward=group(reward, name="reward")
    )
    with drive(graph, root, steps=1, prompts_per_step=2, backend=backend) as driver:
        driver.run()


def test_a_worker_that_hangs_ends_the_run_with_its_stack(tmp_path: Path, clock: Clock):
    before = signal.getsignal(SIGNAL)
    with pytest.raises(DeadlineError) as ended:
        hang(tmp_path, Hanging)
    said = str(ended.value)
    assert said.startswith("no answer for 600 s. Waited for: worker reward[0], node 'reward.score', on ")
    assert "samples " in said and "reward[0]: stack (innermost call first)" in said
    assert "in waits_for_an_answer" in said and "executor.py" not in said
    assert signal.getsignal(SIGNAL) == before


def test_a_worker_that_hangs_while_it_is_made_is_named(tmp_path: Path, clock: Clock):
    with pytest.raises(
        DeadlineError, match=r"worker reward is not up after 300 s \(a larger call_timeout_s"
    ) as ended:
        hang(tmp_path, HangingAtStart)
    assert "in __init__" in str(ended.value)


@pytest.fixture
def watch(clock: Clock):
    made = _SilenceWatch()
    yield made
    made.close()


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_call_that_makes_progress_is_left_alone(watch: _SilenceWatch, clock: Clock):
    with watch.over(LIMIT_S):
        while clock.now_s < 3 * LIMIT_S:
            clock.now_s += 4.0
            watch.advance()
            clock.await_looks()
    with pytest.raises(Silent), watch.over(LIMIT_S):
        clock.hang(LIMIT_S)
        wait(60)


def test_a_call_in_a_debugger_is_left_alone(watch: _SilenceWatch, clock: Clock):
    stands = compile(
        "def stands(is_over):\n    while not is_over(): pass\n", "/usr/lib/python3/pdb.py", "exec"
    )
    names: dict = {}
    exec(stands, names)
    with watch.over(LIMIT_S):
        clock.hang(3 * LIMIT_S)
        names["stands"](lambda: clock.now_s > 3 * LIMIT_S)


def test_in_another_thread_python_code_is_interrupted(clock: Clock):
    ended: list[str] = []

    def spin() -> None:
        watch = _SilenceWatch()
        try:
            with watch.over(LIMIT_S):
                clock.hang(LIMIT_S)
                until = time.monotonic() + 60
                while time.monotonic() < until:
                    wait(0.01)
        except Silent:
            ended.append("silent")
        watch.close()

    thread = threading.Thread(target=spin)
    thread.start()
    thread.join(60)
    assert ended == ["silent"]


@pytest.mark.thorough
def test_a_process_hanging_in_c_is_killed_with_its_stack():
    code, said = forked_hang.hang_holding_the_interpreter()
    assert code == 1 and "Timeout (" in said and "hang_holding_the_interpreter" in said
