"""Ranks with environments play episodes through a real gateway, and survive simulators that fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.workers.agents.harness import Interact
from weft.workers.environment import EnvConfig, EnvWorker
from weft.workers.rendezvous import GatewayAddress
from weft.workers.worker import Context

from .served import DEADLINE_S, Served

PLAN = Interact(env="env").plan()


class Counters:
    """Environments that count up to 3, and return 1 for each turn."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.ids: list[int] = []
        self.turns: list[int] = []
        self.closed = False

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[list[str], dict[str, Any]]:
        self.ids, self.turns = [row["id"] for row in options["rows"]], [0] * self.width
        return [f"start {id}" for id in self.ids], {}

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        self.turns = [turn + 1 for turn in self.turns]
        texts = [f"{id} at {turn}" for id, turn in zip(self.ids, self.turns, strict=True)]
        ended = [turn == 3 for turn in self.turns]
        return texts, [1.0] * self.width, ended, [False] * self.width, {}

    def close(self) -> None:
        self.closed = True


class Group:
    """Ranks with environments, in threads of this process."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.workers: list[EnvWorker] = []

    async def start(self, make: Callable[[int], Any] = Counters, **settings: Any) -> EnvWorker:
        context = Context(name="env", rank=len(self.workers), gateway=self.served.address)
        config = EnvConfig(make=make, **settings)
        self.workers.append(await asyncio.to_thread(EnvWorker, config, context))
        return self.workers[-1]

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(self, *error: object) -> None:
        for worker in self.workers:
            await asyncio.to_thread(worker.close)


async def until(condition: Callable[[], object]) -> None:
    by = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < by
        await asyncio.sleep(0.005)


def test_more_episodes_than_environments_become_rows_with_a_reward_for_each_turn(tmp_path: Path):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            worker = await group.start(num_envs=4, parts=2)
            rank = served.rank(lambda prompt: "go")
            rank.open(*range(10), plan=PLAN)
            for id in range(10):
                ended = await rank.outcome(id)
                assert ended.result == {"reward": 3.0, "turn_rewards": [1.0, 1.0, 1.0]}
                assert (ended.turns, ended.retokenised, ended.failure) == (3, 0, "")
                (row,) = ended.rows
                assert len(row.turn_ends) == 3
                words = served.renderer.decode
                assert words(row.prompt_ids.tolist()) == f"<user> start {id} <end> <assistant>"
                assert f"<user> {id} at 2 <end>" in words(row.response_ids.tolist())
            assert set(served.asked) == {"env"}
            worker.answer()
        assert all(env.closed for env in worker._envs)

    asyncio.run(main())


def test_an_episode_with_a_full_context_ends_with_its_rewards_so_far(tmp_path: Path):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            await group.start(num_envs=2)
            rank = served.rank(lambda prompt: "go on")
            rank.open(1, plan=PLAN, max_context=16)
            ended = await rank.outcome(1)
            assert (ended.scored, ended.failure, ended.turns) == (True, "", 2)
            assert ended.result == {"reward": 2.0, "turn_rewards": [1.0, 1.0]}

    asyncio.run(main())


class Broken(Counters):
    error: BaseException

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        raise self.error


@pytest.mark.parametrize("kind", [OSError, SystemExit, StopIteration])
def test_a_simulator_that_raises_drops_its_episodes_with_the_place(
    kind: type[BaseException], tmp_path: Path
):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            made = type("Odd", (Broken,), {"error": kind("the physics engine has no license")})
            await group.start(made, num_envs=2)
            rank = served.rank(lambda prompt: "go")
            rank.open(1, plan=PLAN)
            ended = await rank.outcome(1)
            assert (ended.scored, ended.where, ended.rows) == (False, "harness", ())
            assert "env[0] raised" in ended.failure
            assert f"{kind.__name__}: the physics engine has no license" in ended.failure
            assert Path(__file__).name in ended.failure
            assert len(rank.engine.requests) == 3, "three attempts"

    asyncio.run(main())


class BreaksLate(Counters):
    """The first environment ends after a turn, and the second one's next turn fails."""

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        if self.turns[0] == 1:
            raise OSError("the physics engine has crashed")
        texts, rewards, _, cut, infos = super().step(actions)
        return texts, rewards, [True, False], cut, infos


def test_an_episode_that_has_ended_keeps_its_result_if_the_simulator_fails_later(tmp_path: Path):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            await group.start(BreaksLate, num_envs=2)
            rank = served.rank(lambda prompt: "go")
            # The environments seldom take the first episode before the second has come. Each then
            # needs one turn.
            before = 0
            for first in range(1, 100, 2):
                before = len(rank.engine.requests)
                rank.open(first, first + 1, plan=PLAN)
                for episode in (first, first + 1):
                    ended = await rank.outcome(episode)
                    assert ended.result == {"reward": 1.0, "turn_rewards": [1.0]} and not ended.failure
                if len(rank.engine.requests) - before == 4:
                    break
            # The second episode's next attempt is alone, in the first environment.
            assert len(rank.engine.requests) - before == 4

    asyncio.run(main())


@pytest.mark.slow
def test_a_simulator_that_hangs_in_the_drivers_process_fails_its_episodes(tmp_path: Path):
    """A busy loop of Python code lets the other threads of the process run."""
    ended_loop = threading.Event()

    class Busy(Counters):
        def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
            while not ended_loop.is_set():
                pass
            return super().step(actions)

    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            await group.start(Busy, num_envs=2, parts=2, deadline_s=0.3)
            rank = served.rank(lambda prompt: "go")
            rank.open(1, 2, 3, plan=PLAN)
            for id in (1, 2, 3):
                ended = await rank.outcome(id)
                assert (ended.scored, ended.rows) == (False, ())
                assert "env[0] worked for longer than EnvWorker(deadline_s=0.3)" in ended.failure
            ended_loop.set()

    asyncio.run(main())


def test_episodes_of_a_rank_that_dies_are_played_by_another(tmp_path: Path):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            first = await group.start(num_envs=4)
            rank = served.rank(lambda prompt: "go")
            await until(lambda: served.asked)
            rank.paused.set()
            rank.open(1, 2, plan=PLAN)
            await until(lambda: len(first._known) == 2)
            await asyncio.to_thread(first.close)
            await until(lambda: len(served.asked) >= 2)
            await group.start(num_envs=4)
            rank.paused.clear()
            for id in (1, 2):
                ended = await rank.outcome(id)
                assert (ended.result["reward"], ended.turns, len(ended.rows)) == (3.0, 3, 1)

    asyncio.run(main())


def test_an_episode_that_is_given_up_leaves_its_environment_to_others(tmp_path: Path):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            worker = await group.start(num_envs=1)
            rank = served.rank(lambda prompt: "go")
            rank.paused.set()
            rank.open(1, plan=PLAN)
            await until(lambda: worker._known)
            rank.give_up(1)
            rank.open(2, plan=PLAN)
            rank.paused.clear()
            assert (await rank.outcome(2)).result["reward"] == 3.0
            assert 1 not in rank.ended and not worker._known

    asyncio.run(main())


def test_a_new_gateway_plays_the_episodes_again_and_gets_no_old_ones(tmp_path: Path):
    async def main() -> None:
        served = Served(tmp_path)
        async with Group(served) as group:
            async with served.listening():
                worker = await group.start(num_envs=2)
                rank = served.rank(lambda prompt: "go")
                rank.paused.set()
                rank.open(1, 2, 3, plan=PLAN)
                await until(lambda: len(worker._known) == 2)
                old = {*worker._known}
                port = served.address.port
                served.ranks.clear()  # it lives on
            async with served.listening(port):
                served.ranks.append(rank)
                rank.paused.clear()
                for id in (1, 2, 3):
                    ended = await rank.outcome(id)
                    assert (ended.result["reward"], ended.turns, len(ended.rows)) == (3.0, 3, 1)
                await until(lambda: not worker._known)
                assert not old & {*worker._known} and sorted(rank.ended) == [1, 2, 3]

    asyncio.run(main())


RANK = """
import sys, time
from weft.workers.rendezvous import GatewayAddress
from weft.workers.environment import EnvConfig, EnvWorker
from weft.workers.worker import Context

class Busy:
    def __init__(self, width):
        self.width = width

    def reset(self, *, seed=None, options=None):
        return ["start"] * self.width, {{}}

    def step(self, actions):
        {loop}

context = Context(name="env", gateway=GatewayAddress("127.0.0.1", {port}, "secret"), watched=True)
worker = EnvWorker(EnvConfig(make=Busy, num_envs=2, deadline_s=0.5), context)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loop",
    ["while True: pass", "sum(range(10**15))"],
    ids=["in Python", "in C, which stops all threads"],
)
def test_a_rank_whose_simulator_hangs_ends_itself_and_another_plays_on(tmp_path: Path, loop: str):
    async def main() -> None:
        served = Served(tmp_path)
        async with served.listening(), Group(served) as group:
            program = RANK.format(loop=loop, port=served.address.port)
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            child = subprocess.Popen([sys.executable, "-c", program], **pipes)
            try:
                rank = served.rank(lambda prompt: "go")
                rank.open(1, plan=PLAN)
                said = await asyncio.to_thread(child.communicate, timeout=DEADLINE_S)
            finally:
                child.kill()
            assert child.returncode == 1, said
            assert " in step\n" in said[1], "its log has the place"
            await group.start(num_envs=2)  # as the driver does
            ended = await rank.outcome(1)
            assert ended.result["reward"] == 3.0

    asyncio.run(main())


def test_a_rank_waits_for_its_gateway(tmp_path: Path):
    """A rank that starts while the driver starts the gateway again connects later."""
    address = GatewayAddress("127.0.0.1", 1, "secret")
    worker = EnvWorker(EnvConfig(make=Counters), Context(name="env", gateway=address))
    worker.answer()
    worker.close()
    assert all(env.closed for env in worker._envs)
