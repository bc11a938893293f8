"""A call that hangs in the driver's own process ends the run, and says where it stood."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
import forked_hang
from toy import ToyReward, ToyRollout, prompts, toy_evaluation
from toy_runs import drive

from weft.controllers.backends.local import Local
from weft.controllers.backends.silence_watch import SilenceWatch
from weft.controllers.backends.witness.stacks import SIGNAL
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DeadlineError, Silent
from weft.dataflow.handle import group
from weft.dataflow.metrics import Metrics
from weft.workers.dispatch import Dispatch
from weft.workers.remote import remote


class Hanging(ToyReward):
    """Waits for what never comes."""

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        return self.waits_for_an_answer(samples)

    def waits_for_an_answer(self, samples: Batch) -> tuple[Batch, Metrics]:
        threading.Event().wait(60)
        raise AssertionError("it was not interrupted")


class HangingAtStart(ToyReward):
    def __init__(self, *given: object) -> None:
        threading.Event().wait(60)


def hang(root: Path, reward: type, **settings: float) -> None:
    graph = toy_evaluation(prompts(2), rollout=group(ToyRollout, name="rollout"), reward=group(reward, name="reward"))
    with drive(graph, root, steps=1, prompts_per_step=2, backend=Local(), **settings) as driver:
        driver.run()


def test_a_worker_that_hangs_ends_the_run_with_its_stack(tmp_path: Path):
    before, begun = signal.getsignal(SIGNAL), time.monotonic()
    with pytest.raises(DeadlineError) as ended:
        hang(tmp_path, Hanging, call_timeout_s=1.5)
    said = str(ended.value)
    assert said.startswith("nobody answered for 2 s. Waited for: worker reward[0], node 'reward.score', on ")
    assert "samples " in said and "reward[0]: it stands at (the innermost call first)" in said
    assert "in waits_for_an_answer" in said and "executor.py" not in said
    assert time.monotonic() - begun < 50 and signal.getsignal(SIGNAL) == before


def test_a_worker_that_hangs_while_it_is_made_is_named(tmp_path: Path):
    with pytest.raises(DeadlineError, match=r"worker reward is not up after 0\.4 s \(start_timeout_s\)") as ended:
        hang(tmp_path, HangingAtStart, start_timeout_s=0.4)
    assert "in __init__" in str(ended.value)


@pytest.fixture
def watch():
    made = SilenceWatch()
    yield made
    made.close()


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_call_that_goes_on_is_left_alone(watch: SilenceWatch):
    begun = time.monotonic()
    with watch.over(0.5):
        while time.monotonic() - begun < 1.0:
            wait(0.01)
            watch.advance()
    with pytest.raises(Silent), watch.over(0.2):
        wait(20)


def test_a_call_in_a_debugger_is_left_alone(watch: SilenceWatch):
    stands = compile("def stands(wait):\n    wait(1.0)\n", "/usr/lib/python3/pdb.py", "exec")
    names: dict = {}
    exec(stands, names)
    with watch.over(0.2):
        names["stands"](wait)


def test_in_another_thread_python_code_is_interrupted():
    ended: list[str] = []

    def spin() -> None:
        watch = SilenceWatch()
        try:
            with watch.over(0.2):
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    wait(0.01)
        except Silent:
            ended.append("silent")
        watch.close()

    thread = threading.Thread(target=spin)
    thread.start()
    thread.join(20)
    assert ended == ["silent"]


def test_a_process_that_hangs_outside_of_python_ends_and_says_where():
    code, said = forked_hang.hang_holding_the_interpreter()
    assert code == 1 and "Timeout (" in said and "hang_holding_the_interpreter" in said
