"""Episodes in processes: results, failures, deadlines, and what harnesses leave behind."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from agents import odd_harness  # pyright: ignore[reportAttributeAccessIssue]
from agents.rig import Rig, await_end, is_running

from weft.dataflow.errors import UserError
from weft.workers.agents.failures import (
    Discarded,
    EpisodeFailure,
    EpisodeTimedOut,
    HarnessDied,
    HarnessRaised,
    InvalidResult,
    NoSandbox,
    SetupTimedOut,
    TurnTimedOut,
)
from weft.workers.agents.harness import Function, HarnessPlan
from weft.workers.agents.harness_process import children_by_parent
from weft.workers.agents.runner import Clock, EpisodeRunner, result_of


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A rig with generous deadlines."""
    rig = Rig(Function(function=odd_harness.run), tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


def rig_with(folder: Path, **settings: Any) -> Rig:
    return Rig(Function(**{"function": odd_harness.run, **settings}), folder)


# Results


def test_episodes_run_side_by_side_and_each_gets_its_own_row_and_key(rig: Rig):
    rows = [{"does": "return", "value": at, "turns": 2} for at in range(6)]
    before = len(rig.requests)
    assert rig.run(*rows) == [{"reward": float(at)} for at in range(6)]
    assert len(rig.requests) - before == 12


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.5", "must be a finite number, not '0.5'"),
        ([1.0], "must be a finite number"),
        ({"score": 1.0}, "returned {'score': 1.0} without 'reward'"),
        ({"reward": None}, "must be a finite number"),
        ({"reward": 1, "extra": 2}, r"writes=('reward',) does not declare 'extra'"),
        (10**400, "must be a finite number"),
    ],
)
def test_a_result_that_is_no_reward_is_refused_and_not_scored_zero(rig: Rig, value: Any, said: str):
    [failure] = rig.run({"does": "return", "value": value})
    assert isinstance(failure, InvalidResult) and said in str(failure)
    assert not failure.scored and not failure.retried and failure.where == "grader"


@pytest.mark.parametrize("does", ["return_nan", "return_object"])
def test_a_result_that_is_not_a_number_names_it(rig: Rig, does: str):
    [failure] = rig.run({"does": does})
    assert isinstance(failure, InvalidResult) and ("nan" in str(failure) or "object" in str(failure))


def test_a_column_keeps_its_kind_over_episodes(tmp_path: Path):
    rig = rig_with(tmp_path, writes=("reward", "note"))
    notes = ["a", None, 3, "b"]
    found = [rig.run({"does": "return", "value": {"reward": 1, "note": note}})[0] for note in notes]
    rig.close()
    assert [isinstance(each, dict) for each in found] == [True, True, False, True]
    assert "column 'note' has a number, 3, and had a text in an earlier episode" in str(found[2])


def test_half_a_character_in_a_result_becomes_one_that_columns_can_hold(tmp_path: Path):
    rig = rig_with(tmp_path, writes=("reward", "note"))
    [found] = rig.run({"does": "return", "value": {"reward": 1, "note": "a\ud800"}})
    rig.close()
    assert found == {"reward": 1.0, "note": "a\ufffd"}


@pytest.mark.pitfall(13)
def test_none_discards_the_episode(rig: Rig):
    [failure] = rig.run({"does": "return", "value": None})
    assert isinstance(failure, Discarded) and not failure.scored and not failure.retried


def test_results_may_be_of_numpy_and_forks_draw_different_random_numbers(tmp_path: Path):
    rig = rig_with(tmp_path, writes=("reward", "drawn"))
    first, second = rig.run({"does": "numbers"}, {"does": "numbers"})
    rig.close()
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["reward"] == 0.5
    assert len({*first["drawn"], *second["drawn"]}) == 4


def test_the_harness_runs_on_a_main_thread_so_graders_may_set_signal_handlers(rig: Rig):
    assert rig.run({"does": "threads"}) == [{"reward": 1.0}]


# Failures


@pytest.mark.pitfall(12)
@pytest.mark.parametrize(
    ("does", "kind", "said"),
    [
        ("raise", HarnessRaised, "KeyError: 'no such tool'"),
        ("raise_no_sandbox", NoSandbox, "the sandbox does not start"),
        ("lose_its_sandbox", NoSandbox, "it was ended from outside"),
        ("find_no_sandbox", NoSandbox, "none works on this machine"),
        ("raise_another", HarnessRaised, "OutOfStock: no shop is open"),
        ("sys_exit", HarnessRaised, "SystemExit: 3"),
        ("os_exit", HarnessDied, "before it returned: exit code 0"),
        ("kill_itself", HarnessDied, "before it returned: signal 9 (out of memory"),
        ("close_all_descriptors", HarnessDied, "before it returned"),
    ],
)
def test_a_harness_that_fails_is_run_again_and_not_scored_zero(
    rig: Rig, does: str, kind: type[EpisodeFailure], said: str
):
    """An exception, in grading or elsewhere, gives no reward."""
    failure, other = rig.run({"does": does}, {"does": "return", "value": 1})
    assert isinstance(failure, EpisodeFailure) and not failure.scored and failure.retried
    assert type(failure) is kind and said in str(failure)
    assert other == {"reward": 1.0}, "other episodes go on"


def test_an_error_shows_the_traceback_and_the_log_has_it(rig: Rig):
    [failure] = rig.run({"does": "raise"})
    assert "in throw" in str(failure) and str(rig.log) in str(failure)
    assert "in throw" in rig.log.read_text()


@pytest.mark.parametrize("does", ["close_output", "leave_a_thread", "raise_in_a_fork"])
def test_odd_but_harmless_harnesses_have_their_result(rig: Rig, does: str):
    assert rig.run({"does": does}) == [{"reward": 1.0}]


def test_a_flood_of_output_fills_neither_memory_nor_disk(rig: Rig):
    assert rig.run({"does": "flood", "mib": 64}) == [{"reward": 1.0}]
    written = rig.log.read_text()
    assert "the last words" in written and len(written) < 1 << 20


# Processes


@pytest.mark.parametrize("then", ["", "os_exit", "raise"])
def test_processes_that_an_episode_leaves_behind_are_killed(rig: Rig, tmp_path: Path, then: str):
    rig.run({"does": "leave_children", "file": str(tmp_path / "pids"), "then": then})
    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) == 3
    await_end(pids)
    assert not list((rig.folder / "scratch").glob("*/*/*")), "and so are its files"


def test_a_process_that_changes_its_number_is_killed(rig: Rig, tmp_path: Path):
    file = tmp_path / "hops"
    assert rig.run({"does": "leave_a_hopping_process", "file": str(file)}) == [{"reward": 1.0}]
    until, sizes = time.monotonic() + 30, [-1, -2, -3]
    while len(set(sizes[-3:])) > 1:  # it grows with every hop
        assert time.monotonic() < until
        time.sleep(0.1)
        sizes.append(file.stat().st_size if file.exists() else 0)
    assert sizes[-1] < 50_000, "it would have ended by itself at 100,000"


def test_a_cancelled_episode_is_killed_with_its_processes(rig: Rig, tmp_path: Path):
    file = tmp_path / "pids"

    async def start_and_cancel() -> None:
        episode = asyncio.ensure_future(
            rig.episode("key", does="leave_children", file=str(file), then="busy_loop")
        )
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    rig.wait(start_and_cancel())
    await_end(json.loads(file.read_text()))


def test_an_attempt_may_follow_a_cancelled_one_with_the_same_key(rig: Rig):
    async def cancel_and_repeat() -> Any:
        first = asyncio.ensure_future(rig.episode("key", does="hang", turns=1))
        await asyncio.sleep(0)
        first.cancel()
        return await rig.episode("key", does="return", value=2, turns=1)

    for _ in range(5):
        assert rig.wait(cancel_and_repeat()) == {"reward": 2.0}


def test_the_harness_sees_only_the_variables_that_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("SEARCH_KEY", "allowed")
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    rig = rig_with(tmp_path, variables=("SEARCH_KEY",), writes=("reward", "seen", "loaded_in"))
    [result] = rig.run({"does": "variables"})
    rig.close()
    assert isinstance(result, dict)
    seen = json.loads(result["seen"])
    assert "a secret" not in seen.values() and seen["SEARCH_KEY"] == "allowed"
    assert seen["OPENAI_BASE_URL"] == f"{rig.address}/e/key0/v1" and seen["OPENAI_API_KEY"] == "key0"
    assert seen["ANTHROPIC_BASE_URL"] == f"{rig.address}/e/key0"
    assert seen["HOME"].startswith(str(tmp_path)) and seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["PATH"] == os.environ["PATH"] and seen["NO_PROXY"] == "127.0.0.1"


def test_the_kernel_kills_an_episode_before_the_trainer_if_memory_is_short(rig: Rig):
    assert rig.run({"does": "memory_priority"}) == [{"reward": 500.0}]


def test_the_harness_is_loaded_once_for_all_episodes(tmp_path: Path):
    rig = rig_with(tmp_path, writes=("reward", "seen", "loaded_in"))
    results = rig.run(*[{"does": "variables"}] * 3)
    rig.close()
    places = {result["loaded_in"] for result in results if isinstance(result, dict)}
    assert len(places) == 1 and os.getpid() not in places


def test_more_episodes_than_places_wait_for_one(tmp_path: Path):
    rig = rig_with(tmp_path, concurrency=2, setup_deadline_s=60)
    rows = [{"does": "return", "value": at, "turns": 1} for at in range(5)]
    assert rig.run(*rows) == [{"reward": float(at)} for at in range(5)]
    rig.close()


def test_if_the_fork_server_dies_its_episodes_fail_and_the_next_ones_get_another(rig: Rig):
    hanging, killing = rig.run({"does": "hang"}, {"does": "kill_the_fork_server"})
    assert isinstance(hanging, HarnessDied) and "signal 9" in str(hanging)
    assert isinstance(killing, HarnessDied) and killing.retried
    assert rig.run({"does": "return", "value": 1}) == [{"reward": 1.0}]


def test_if_the_guard_dies_no_process_of_an_episode_stays(rig: Rig, tmp_path: Path):
    file = tmp_path / "pids"

    async def kill_the_guard() -> Any:
        hanging = asyncio.ensure_future(
            rig.episode("key", does="leave_children", file=str(file), then="busy_loop")
        )
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
        server = rig.runner._server
        assert server is not None
        os.kill(server._process.pid, signal.SIGKILL)
        return await hanging

    died = rig.wait(kill_the_guard())
    assert isinstance(died, HarnessDied) and died.retried
    await_end(json.loads(file.read_text()))
    assert rig.run({"does": "return", "value": 1}) == [{"reward": 1.0}]


@pytest.mark.thorough
def test_an_episode_that_begins_while_dead_processes_are_cleared_away_gets_new_ones(tmp_path: Path):
    rig = rig_with(tmp_path)
    server = rig.runner._server
    assert server is not None
    guard = server._process.pid

    async def begin_meanwhile() -> list[Any]:
        hanging = asyncio.ensure_future(rig.episode("first", does="hang"))
        while not server._ends:
            await asyncio.sleep(0.01)
        os.kill(guard, signal.SIGSTOP)  # it takes its time
        [fork_server] = children_by_parent()[guard]
        os.kill(fork_server, signal.SIGKILL)
        while not (server._reader.at_eof() or server._reader.exception()):
            await asyncio.sleep(0.01)
        beginning = asyncio.ensure_future(rig.episode("second", does="return", value=1))
        for _ in range(100):  # it waits for the guard
            await asyncio.sleep(0.001)
        os.kill(guard, signal.SIGCONT)
        return list(await asyncio.gather(hanging, beginning))

    died, second = rig.wait(begin_meanwhile())
    rig.close()
    assert isinstance(died, HarnessDied)
    assert second == {"reward": 1.0}, "it does not lose an attempt for what happened before"


# Deadlines


@pytest.mark.parametrize("does", ["hang", "busy_loop", "hold_the_interpreter"])
def test_of_episodes_side_by_side_only_the_one_that_never_returns_is_late(tmp_path: Path, does: str):
    rig = rig_with(tmp_path, turn_deadline_s=0.3)  # waited out
    rows = [{"does": "return", "value": at} for at in range(4)]
    late, *others = rig.run({"does": does, "turns": 1}, *rows)
    rig.close()
    assert isinstance(late, TurnTimedOut) and late.scored and not late.retried
    assert "turn_deadline_s=0.3 after turn 1" in str(late)
    assert others == [{"reward": float(at)} for at in range(4)]


def test_a_set_up_that_hangs_is_run_again_and_not_scored(tmp_path: Path):
    rig = rig_with(tmp_path, setup_deadline_s=10.0)
    rig.runner._plan = dataclasses.replace(rig.runner._plan, setup_deadline_s=0.2)  # waited out
    [late] = rig.run({"does": "busy_loop"})
    rig.close()
    assert isinstance(late, SetupTimedOut) and not late.scored and late.retried
    assert "asked for no turn within setup_deadline_s=0.2" in str(late)


@pytest.mark.thorough
def test_a_stopped_fork_server_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.workers.agents.runner.KILL_S", 1.0)  # waited out
    rig = rig_with(tmp_path, setup_deadline_s=10.0)
    rig.runner._plan = dataclasses.replace(rig.runner._plan, setup_deadline_s=2.0)  # waited out
    [late] = rig.run({"does": "stop_the_fork_server", "turns": 0})
    assert isinstance(late, SetupTimedOut | HarnessDied)
    rig.runner._plan = dataclasses.replace(rig.runner._plan, setup_deadline_s=60.0)
    assert rig.run({"does": "return", "value": 1}) == [{"reward": 1.0}]
    rig.close()


@pytest.mark.thorough
def test_random_kills_of_any_process_lose_no_episode(tmp_path: Path):
    rig = rig_with(tmp_path)
    seen: set[int] = set()

    def below(pid: int) -> list[int]:
        tree = children_by_parent()
        found = [pid]
        for each in found:  # grows
            found += tree.get(each, [])
        return found

    async def attempt_until_done(number: int) -> float:
        while True:
            row = {"does": "return", "value": number, "turns": 3}
            result = await rig.episode(f"key{number}", **row)
            if isinstance(result, dict):
                return result["reward"]
            assert isinstance(result, HarnessDied | HarnessRaised | SetupTimedOut), result

    async def kill_at_random(random: Random) -> int:
        kills = 0
        while kills < 30:
            await asyncio.sleep(random.uniform(0.01, 0.1))
            server = rig.runner._server
            processes = [] if server is None else below(server._process.pid)
            seen.update(processes)
            if processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(random.choice(processes), signal.SIGKILL)
                    kills += 1
        return kills

    async def both() -> list[float]:
        killing = asyncio.ensure_future(kill_at_random(Random(0)))
        done: list[float] = []
        while not killing.done():
            done += await asyncio.gather(*[attempt_until_done(at) for at in range(12)])
        await killing
        return done

    done = rig.wait(both())
    rig.close()
    assert len(done) % 12 == 0 and set(done) == set(map(float, range(12)))
    await_end([*seen])


class FakeLoop:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Any] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> Any:
        return asyncio.Future(loop=asyncio.new_event_loop())

    def call_later(self, delay: float, callback: Any) -> Any:
        timer = FakeTimer(self, self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now]:
            self.timers.remove(timer)
            timer.callback()


@dataclasses.dataclass(eq=False)
class FakeTimer:
    loop: FakeLoop
    at: float
    callback: Any

    def cancel(self) -> None:
        if self in self.loop.timers:
            self.loop.timers.remove(self)


@pytest.fixture
def clock() -> Iterator[tuple[Clock, FakeLoop]]:
    """The clock of an episode with 100 s for its set-up, 50 s per turn and 120 s in all."""
    fake = FakeLoop()
    plan = HarnessPlan("test", {}, "", (), ("reward",), (), 120.0, 50.0, 100.0, 1)
    clock = Clock(plan, fake)  # pyright: ignore[reportArgumentType]
    yield clock, fake
    clock.late.get_loop().close()


def test_sampling_does_not_count_and_turns_add_up(clock: tuple[Clock, FakeLoop]):
    episode, time_of = clock
    time_of.pass_time(99)
    for _ in range(3):
        episode.stop()
        time_of.pass_time(10_000)  # the model samples
        episode.go_on()
        time_of.pass_time(39)
        assert not episode.late.done()
    time_of.pass_time(4)  # 3 * 39 + 4 > 120
    assert isinstance(episode.late.result(), EpisodeTimedOut)
    assert "deadline_s=120 over 3 turns" in str(episode.late.result())


def test_turns_that_are_sampled_at_the_same_time_stop_the_clock_once(clock: tuple[Clock, FakeLoop]):
    episode, time_of = clock
    episode.stop()
    episode.stop()
    episode.go_on()
    time_of.pass_time(10_000)
    assert not episode.late.done()
    episode.go_on()
    time_of.pass_time(51)
    assert isinstance(episode.late.result(), TurnTimedOut)


def test_a_turn_that_ends_after_the_episode_changes_nothing(clock: tuple[Clock, FakeLoop]):
    episode, time_of = clock
    episode.stop()
    episode.close()
    episode.go_on()
    assert not time_of.timers


# Loading


def test_a_closure_is_sent_by_value(tmp_path: Path):
    secret_number = 7

    def run(row: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
        return secret_number + row["x"]

    rig = Rig(Function(function=run), tmp_path)
    assert rig.run({"x": 1}) == [{"reward": 8.0}]
    rig.close()


def test_a_function_may_be_named_by_its_place(tmp_path: Path):
    (tmp_path / "agent.py").write_text(
        "async def run(row, *, base_url, api_key):\n    return row['x'] + 1\n"
    )
    rig = Rig(Function(function=f"{tmp_path}/agent.py:run", python=Path(sys.executable)), tmp_path)
    assert rig.run({"x": 1}) == [{"reward": 2.0}]
    rig.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os._exit(4)", "its process ended with exit code 4"),
        ("import time; time.sleep(3600)", "it did not load within setup_deadline_s=1"),
        ("run = 1; raise SystemExit(5)", "SystemExit: 5"),
    ],
)
def test_a_harness_that_cannot_be_loaded_ends_the_run_before_its_start(
    tmp_path: Path, source: str, said: str
):
    (tmp_path / "agent.py").write_text(source)
    late_s = 1.0 if "sleep" in source else 60.0
    plan = Function(function=f"{tmp_path}/agent.py:run", setup_deadline_s=late_s).plan()

    async def start() -> None:
        runner = EpisodeRunner(plan, tmp_path / "scratch", tmp_path / "log")
        try:
            await runner.start()
        finally:
            await runner.close()

    with pytest.raises(UserError) as caught:
        asyncio.run(start())
    assert said in str(caught.value) and f"{tmp_path}/agent.py:run cannot be loaded" in str(caught.value)


def test_a_harness_that_is_killed_while_it_is_loaded_is_loaded_again(tmp_path: Path):
    (tmp_path / "agent.py").write_text(f"""
import os
from pathlib import Path

if not (there := Path({str(tmp_path / "killed")!r})).exists():
    there.touch()
    os.kill(os.getpid(), 9)

def run(row, *, base_url, api_key):
    return 1.0
""")
    rig = Rig(Function(function=f"{tmp_path}/agent.py:run"), tmp_path)
    assert rig.run({}) == [{"reward": 1.0}]
    rig.close()


@pytest.mark.thorough
def test_a_function_of_a_script_needs_no_guard_and_dies_with_its_parent(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"""
import asyncio, json, os, subprocess, sys
from pathlib import Path
from weft.workers.agents.harness_process import children_by_parent
from weft.workers.agents.harness import Function
from weft.workers.agents.runner import EpisodeRunner

def run(row, *, base_url, api_key):
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    Path({str(tmp_path / "pids")!r}).write_text(json.dumps([os.getpid(), os.getppid(), child.pid]))
    while True:
        pass

async def main():
    runner = EpisodeRunner(Function(function=run).plan(), Path({str(tmp_path)!r}), Path({str(tmp_path / "log")!r}))
    await runner.run("key", {{}}, base_url="http://127.0.0.1:1/v1")

asyncio.run(main())
""")
    parent = subprocess.Popen([sys.executable, str(script)])
    file, until = tmp_path / "pids", time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.01)
    pids = json.loads(file.read_text())
    assert all(map(is_running, pids))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    await_end(pids)


def test_a_result_needs_every_declared_column():
    assert result_of({"reward": 2, "steps": 3}, ("reward", "steps")) == {"reward": 2.0, "steps": 3}
    with pytest.raises(InvalidResult, match="without 'steps'; did you mean 'step'"):
        result_of({"reward": 2, "step": 3}, ("reward", "steps"))
