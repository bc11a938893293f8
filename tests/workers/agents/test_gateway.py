"""The gateway serves models to harnesses, and gives their exact tokens to the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import uvicorn

from weft.algorithms.sampling import Sampling
from weft.workers.agents.failures import EpisodeFailure, HarnessRaised
from weft.workers.agents.gateway import Gateway
from weft.workers.agents.harness import Function, HarnessPlan
from weft.workers.agents.link import Ended, EpisodeRequest, Hello, Link, Open
from weft.workers.agents.runner import result_of
from weft.workers.agents.serving import EpisodeServer
from weft.workers.rendezvous import GatewayAddress

from .toy_engine import ToyEngine
from .words import WordRenderer

Run = Callable[..., Awaitable[Any]]
DEADLINE_S = 60.0


class HereRunner:
    """Runs episodes in the gateway's own process. Interface of `EpisodeRunner`."""

    def __init__(self, plan: HarnessPlan, run: Run) -> None:
        self.plan, self.function = plan, run

    async def run(self, key: str, row: Mapping[str, Any], *, base_url: str) -> Mapping[str, Any]:
        try:
            result = await self.function(row, base_url=base_url, api_key=key)
        except EpisodeFailure:
            raise
        except Exception as error:
            raise HarnessRaised(f"{type(error).__name__}: {error}") from None
        return result_of(result, self.plan.writes)

    @contextlib.contextmanager
    def sampling(self, key: str) -> Iterator[None]:
        yield

    async def close(self) -> None:
        pass


class Served:
    """A gateway that listens, and ranks that sample for it in threads."""

    def __init__(self, tmp_path: Path) -> None:
        self.notes: list[str] = []
        self.asked: list[str] = []
        """Groups that the gateway asks the driver about."""
        self.renderer = WordRenderer()
        self.function: Run
        self.tmp_path = tmp_path
        self.address: GatewayAddress
        self.ranks: list[Rank] = []

    async def _start(self, plan: HarnessPlan, scratch: Path, log: Path) -> Any:
        return HereRunner(plan, self.function)

    @contextlib.asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[Served]:
        config = uvicorn.Config(
            "", port=port, log_level="warning", lifespan="off", ws="websockets-sansio"
        )
        server = uvicorn.Server(config)
        socket = config.bind_socket()
        port = socket.getsockname()[1]
        base = f"http://127.0.0.1:{port}"
        gateway = Gateway(
            "secret",
            base,
            self.tmp_path,
            self.notes.append,
            self.asked.append,
            load=lambda model: self.renderer,  # pyright: ignore[reportArgumentType]
            start=self._start,
        )
        config.app = gateway.app()
        self.address = GatewayAddress("127.0.0.1", port, "secret")
        serving = asyncio.create_task(server.serve(sockets=[socket]))
        try:
            yield self
        finally:
            for rank in self.ranks:
                await asyncio.to_thread(rank.close)
            server.should_exit = True
            await serving
            await gateway.close()

    def rank(self, answer: Callable[[str], str], number: int = 0, capacity: int = 8) -> Rank:
        self.ranks.append(Rank(self, answer, number, capacity))
        return self.ranks[-1]


class Rank:
    """A rollout rank: an engine and its side of the link, in a thread."""

    def __init__(self, served: Served, answer: Callable[[str], str], number: int, capacity: int) -> None:
        self.engine = ToyEngine(served.renderer, answer)
        hello = Hello("rollout", number, capacity)
        self._links: list[Link] = []

        def connect() -> Link:
            self._links.append(Link(served.address, hello))
            return self._links[-1]

        self.server = EpisodeServer(self.engine, connect)  # pyright: ignore[reportArgumentType]
        self.paused = threading.Event()
        self.ended: dict[int, Ended] = {}
        self._open: set[int] = set()
        self._stop = threading.Event()
        # This thread has the event loop of the gateway, and must not wait for it.
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def open(
        self,
        *ids: int,
        max_context: int = 1000,
        sampling: Sampling = Sampling(max_tokens=50),
        plan: HarnessPlan | None = None,
        row: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        plan = plan or Function(function=_unused).plan()
        episodes = tuple(EpisodeRequest(i, i, {"id": i, **row}) for i in ids)
        opened = Open("model", max_context, sampling, plan, episodes)
        self._open |= {*ids}
        self._actions.put(lambda: self.server.open(opened))

    def give_up(self, *ids: int) -> None:
        self._open -= {*ids}
        self._actions.put(lambda: self.server.close(ids))

    async def outcome(self, episode: int) -> Ended:
        by = time.monotonic() + DEADLINE_S
        while episode not in self.ended:
            assert time.monotonic() < by, f"episode {episode} did not end"
            await asyncio.sleep(0.01)
        return self.ended[episode]

    def die(self) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        for link in self._links:
            link.close()

    def _work(self) -> None:
        while not self._stop.is_set():
            while not self._actions.empty():
                self._actions.get()()
            if self._open and not self.paused.is_set():
                self.server.work(0.01)
            for ended in self.server.take_ended([*self._open]):
                self.ended[ended.episode_id] = ended
                self._open.discard(ended.episode_id)
                if not self._open:
                    self.server.close(())  # as at the end of a call
            time.sleep(0.001)


async def _unused(row: Any, *, base_url: str, api_key: str) -> float:
    return 0.0


def chat(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S)


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    reply = await client.post("/chat/completions", json={"model": "m", "messages": messages, **more})
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


def test_an_episode_of_two_turns_becomes_one_row(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {row['id']}"}]
            messages.append(await ask(client, messages))
            messages.append({"role": "user", "content": "go on"})
            last = await ask(client, messages)
            return float(last["content"] == "second")

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "second" if "go on" in prompt else "first")
            rank.open(7)
            ended = await rank.outcome(7)
            assert (ended.result, ended.turns, ended.retokenised, ended.where) == (
                {"reward": 1.0},
                2,
                0,
                "",
            )
            (row,) = ended.rows
            words = served.renderer.decode
            assert words(row.prompt_ids.tolist()) == "<user> task 7 <end> <assistant>"
            assert words(row.response_ids.tolist()) == (
                "first <end> <user> go on <end> <assistant> second <end>"
            )
            assert row.mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1]
            assert row.logprobs.tolist() == [-1, -2, 0, 0, 0, 0, 0, -1, -2]

    asyncio.run(main())


def test_a_replica_that_dies_loses_only_the_turn_that_it_sampled(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
            for _ in range(3):
                messages += [await ask(client, messages), {"role": "user", "content": "more"}]
        return 1.0

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            first = served.rank(lambda prompt: "one " * (1 + prompt.count("more")), number=0)
            first.open(1)
            while len(first.engine.requests) < 2:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(first.die)
            second = served.rank(lambda prompt: "two", number=1)
            second.open(1)
            ended = await second.outcome(1)
            assert ended.turns == 3
            (row,) = ended.rows
            # The first turn is the dead replica's.
            assert served.renderer.decode(row.response_ids.tolist()).startswith("one <end> <user> more")
            assert len(second.engine.requests) in (1, 2)

    asyncio.run(main())


def test_a_client_that_hangs_up_and_asks_again_gets_the_same_turn(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages = [{"role": "user", "content": "a"}]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask(client, messages), 0.2)
            resumed.set()
            await ask(client, messages)
        return 1.0

    resumed = threading.Event()

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "b")
            rank.open(1)
            rank.paused.set()
            await asyncio.to_thread(resumed.wait, DEADLINE_S)
            rank.paused.clear()
            ended = await rank.outcome(1)
            assert (ended.turns, len(ended.rows), len(rank.engine.requests)) == (1, 1, 1)

    asyncio.run(main())


def test_a_key_of_an_earlier_attempt_is_refused(tmp_path: Path):
    urls: list[str] = []
    codes: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        urls.append(base_url)
        async with chat(urls[0]) as client:
            messages = [{"role": "user", "content": "a"}]
            reply = await client.post("/chat/completions", json={"model": "m", "messages": messages})
            codes.append(reply.status_code)
        if len(urls) == 1:
            raise RuntimeError("a broken tool")
        async with chat(base_url) as client:
            await ask(client, messages)
        return 1.0

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "b")
            rank.open(1)
            ended = await rank.outcome(1)
            assert (ended.result, ended.turns) == ({"reward": 1.0}, 1)
            assert codes == [200, 401] and urls[0] != urls[1]

    asyncio.run(main())


def test_a_harness_that_always_fails_is_dropped_with_its_reason(tmp_path: Path):
    tries: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        tries.append(1)
        raise RuntimeError("no such tool")

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "b")
            rank.open(1)
            ended = await rank.outcome(1)
            assert (ended.scored, ended.where, ended.rows) == (False, "harness", ())
            assert "no such tool" in ended.failure and len(tries) == 3

    asyncio.run(main())


def test_a_full_context_is_the_policys_doing_and_scored(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
            while True:
                messages += [await ask(client, messages), {"role": "user", "content": "more"}]

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "word " * 5)
            rank.open(1, max_context=30)
            ended = await rank.outcome(1)
            assert (ended.scored, ended.where, dict(ended.result)) == (True, "model", {})
            assert ended.turns >= 2 and len(ended.rows) == 1
            total = len(ended.rows[0].prompt_ids) + len(ended.rows[0].response_ids)
            assert total <= 30

    asyncio.run(main())


def test_parameters_that_would_bias_training_are_overridden_and_noted_once(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            for text in ("a", "b"):
                messages = [{"role": "user", "content": text}]
                await ask(client, messages, temperature=0.1, max_tokens=2, stop=["x"])
        return 1.0

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "1 2 3 4 5")
            rank.open(1)
            ended = await rank.outcome(1)
            assert [row.finish_reason for row in ended.rows] == ["length", "length"]
            _, sampling = rank.engine.requests[0]
            assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (1.0, 2, ("x",))
            assert [note for note in served.notes if "temperature" in note] == served.notes
            assert len(served.notes) == 1

    asyncio.run(main())


def test_many_episodes_on_two_replicas_end_once_each(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"n{row['id']}"}]
            for k in range(1 + row["id"] % 3):
                messages += [await ask(client, messages), {"role": "user", "content": f"more {k}"}]
        return float(row["id"])

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            ranks = [served.rank(lambda prompt: "x y", number) for number in range(2)]
            for number, rank in enumerate(ranks):
                rank.open(*range(number * 20, number * 20 + 20))
            for number, rank in enumerate(ranks):
                for episode in range(number * 20, number * 20 + 20):
                    ended = await rank.outcome(episode)
                    assert (ended.result["reward"], ended.turns) == (episode, 1 + episode % 3)
                    assert ended.retokenised == 0
            assert all(rank.engine.requests for rank in ranks)

    asyncio.run(main())


def test_a_rank_that_rests_gives_back_the_turns_of_other_ranks(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        if row["id"] == 2:
            await asyncio.sleep(DEADLINE_S)
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": f"n{row['id']}"}])
        return 1.0

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            first = served.rank(lambda prompt: "x", 0, capacity=1)
            second = served.rank(lambda prompt: "x " * 100, 1)
            first.paused.set()
            first.open(1, 3)
            second.open(2)
            # The first rank has room for one turn, so the other one waits at the second rank.
            while not second.engine.requests:
                await asyncio.sleep(0.001)
            second.give_up(2)
            first.paused.clear()
            assert (await first.outcome(1)).turns == (await first.outcome(3)).turns == 1

    asyncio.run(main())


@pytest.mark.parametrize("how", ("path", "bearer", "x-api-key", "x-session-id"))
def test_a_client_may_show_its_key_in_four_places(how: str, tmp_path: Path):
    codes: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        start = base_url if how == "path" else base_url.partition("/e/")[0] + "/v1"
        headers = {
            "path": {},
            "bearer": {"Authorization": f"Bearer {api_key}"},
            "x-api-key": {"x-api-key": api_key},
            "x-session-id": {"X-Session-ID": api_key},
        }[how]
        async with httpx.AsyncClient(base_url=start, headers=headers, timeout=DEADLINE_S) as client:
            codes.append((await client.get("/models")).status_code)
            await ask(client, [{"role": "user", "content": "a"}])
        async with httpx.AsyncClient(base_url=base_url.partition("/e/")[0] + "/v1") as client:
            codes.append((await client.get("/models")).status_code)
        return 1.0

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            rank = served.rank(lambda prompt: "b")
            rank.open(1)
            assert (await rank.outcome(1)).turns == 1
            assert codes == [200, 401]

    asyncio.run(main())


def test_the_token_route_returns_and_keeps_ids(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with httpx.AsyncClient(
            base_url=base_url.removesuffix("/v1"), timeout=DEADLINE_S
        ) as client:
            ids = [2, 7, 0, 3]
            for _ in range(2):
                body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1}}
                reply = (await client.post("/inference/v1/generate", json=body)).json()
                (choice,) = reply["choices"]
                content = choice["logprobs"]["content"]
                assert [f"token_id:{i}" for i in choice["token_ids"]] == [c["token"] for c in content]
                assert [c["logprob"] for c in content] == [-1.0, -2.0]
                ids = [*ids, *choice["token_ids"], 2, 0, 3]
        return 1.0

    async def main() -> None:
        served = Served(tmp_path)
        served.function = harness
        served.renderer.ids("p q r")
        async with served.listening():
            rank = served.rank(lambda prompt: "q")
            rank.open(1)
            ended = await rank.outcome(1)
            (row,) = ended.rows
            assert row.prompt_ids.tolist() == [2, 7, 0, 3]
            assert row.response_ids.tolist() == [6, 0, 2, 0, 3, 6, 0]
            assert row.mask.tolist() == [1, 1, 0, 0, 0, 1, 1]
            assert ended.retokenised == 0

    asyncio.run(main())
