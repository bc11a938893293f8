"""A gateway that listens, ranks with toy engines, and harnesses in its own process, for tests."""

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
import uvicorn

from weft.algorithms.sampling import Sampling
from weft.workers.agents.failures import EpisodeFailure, HarnessRaised
from weft.workers.agents.gateway import Gateway
from weft.workers.agents.harness import Function, HarnessPlan
from weft.workers.agents.link import Ended, EpisodeRequest, Hello, Link, Open
from weft.workers.agents.live_episodes import LiveEpisodes
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
        self.loaded: list[tuple[str, ...]] = []
        """Models whose renderers were loaded, with the names of their parsers."""
        self.renderer = WordRenderer()
        self.may_load, self.may_start = threading.Event(), threading.Event()
        """Whether the renderer can be loaded, and the harness be started."""
        self.may_load.set()
        self.may_start.set()
        self.function: Run
        self.tmp_path = tmp_path
        self.address: GatewayAddress
        self.episodes: LiveEpisodes
        self.ranks: list[Rank] = []

    def _load(self, *names: str) -> Any:
        assert self.may_load.wait(DEADLINE_S)
        self.loaded.append(names)
        return self.renderer

    async def _start(self, plan: HarnessPlan, scratch: Path, log: Path) -> Any:
        assert await asyncio.to_thread(self.may_start.wait, DEADLINE_S)
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
        episodes = self.episodes = LiveEpisodes(
            "secret",
            base,
            self.tmp_path,
            self.tmp_path / "scratch",
            self.notes.append,
            self.asked.append,
            load=self._load,
            start=self._start,
        )
        config.app = Gateway(episodes).app()
        self.address = GatewayAddress("127.0.0.1", port, "secret")
        serving = asyncio.create_task(server.serve(sockets=[socket]))
        try:
            yield self
        finally:
            for rank in self.ranks:
                await asyncio.to_thread(rank.close)
            await episodes.close()  # ends unfinished episodes; the server would wait for their requests
            server.should_exit = True
            await serving

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
        self._open: dict[int, Open] = {}
        """Episode -> the call that has opened it."""
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
        most_rows: int = 100,
    ) -> None:
        plan = plan or Function(function=_unused).plan()
        episodes = tuple(EpisodeRequest(i, i, {"id": i, **row}) for i in ids)
        opened = Open("model", max_context, sampling, plan, episodes, most_rows)
        self._open |= dict.fromkeys(ids, opened)
        self._actions.put(lambda: self.server.open(opened))

    def give_up(self, *ids: int) -> None:
        opened = [self._open.pop(each) for each in ids]
        self._actions.put(lambda: self.server.close(opened[0], ids))

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
        assert not self._thread.is_alive(), "the rank does not stop"
        for link in self._links:
            link.close()

    def _work(self) -> None:
        while not self._stop.is_set():
            while not self._actions.empty():
                self._actions.get()()
            if self._open and not self.paused.is_set():
                self.server.work()
            for opened in list(self._open.values()):
                for ended in self.server.take_ended(opened):
                    self.ended[ended.episode_id] = ended
                    self._open.pop(ended.episode_id, None)
                    if not self._open:
                        self.server.close(opened, ())  # as at the end of a call
            time.sleep(0.001)


async def _unused(row: Any, *, base_url: str, api_key: str) -> float:
    return 0.0


def chat(base_url: str) -> httpx.AsyncClient:
    # An SSL context, which no URL here needs, takes longer than a request.
    return httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S, verify=False)


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    reply = await client.post("/chat/completions", json={"model": "m", "messages": messages, **more})
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


def serve(tmp_path: Path, harness: Run, main: Callable[[Served], Awaitable[None]]) -> None:
    """Run `main` with a gateway whose episodes run this harness."""

    async def run() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            await main(served)

    asyncio.run(run())
