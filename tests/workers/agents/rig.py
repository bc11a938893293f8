"""A runner of episodes with a gateway that answers every turn."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weft.workers.agents.failures import EpisodeFailure
from weft.workers.agents.harness import Harness
from weft.workers.agents.runner import EpisodeRunner

T = TypeVar("T")
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""A request's body -> status and body of the reply."""


def say_hello(_: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": "Hello"}}]}


class Rig:
    """A runner, its event loop, and a gateway whose model is a function."""

    def __init__(self, harness: Harness, folder: Path, answer: Answer = say_hello) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.loop = asyncio.Runner()
        self.folder = folder
        self.log = folder / "logs" / "harness.log"
        self.runner = self.loop.run(self._open(harness))

    async def _open(self, harness: Harness) -> EpisodeRunner:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        runner = EpisodeRunner(harness.plan(), self.folder / "scratch", self.log)
        await runner.start()
        return runner

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        request = json.loads(await reader.readexactly(length))
        with self.runner.sampling(head.split("/e/")[1].split("/")[0]):
            self.requests.append(request)
            status, reply = self.answer(request)
        body, kind = json.dumps(reply), "application/json"
        if request.get("stream") and status == 200:  # all in one event
            [choice] = reply["choices"]
            chunk = {"index": 0, "delta": choice["message"], "finish_reason": "stop"}
            named = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
            body = f"data: {json.dumps({**named, 'choices': [chunk]})}\n\ndata: [DONE]\n\n"
            kind = "text/event-stream"
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()

    async def episode(self, key: str, **row: Any) -> Mapping[str, Any] | EpisodeFailure:
        try:
            return await self.runner.run(key, row, base_url=f"{self.address}/e/{key}/v1")
        except EpisodeFailure as failure:
            return failure

    def run(self, *rows: Mapping[str, Any]) -> list[Mapping[str, Any] | EpisodeFailure]:
        async def all_episodes() -> list[Any]:
            episodes = [self.episode(f"key{at}", **row) for at, row in enumerate(rows)]
            return await asyncio.gather(*episodes)

        return self.wait(all_episodes())

    def wait(self, value: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(value)

    def close(self) -> None:
        async def end() -> None:
            await self.runner.close()
            self.server.close()
            await self.server.wait_closed()

        self.wait(end())
        self.loop.close()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def await_end(pids: list[int]) -> None:
    """Wait until all processes have ended."""
    until = time.monotonic() + 30
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, f"these processes still run: {running}"
        time.sleep(0.01)
