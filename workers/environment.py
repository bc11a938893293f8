"""EnvWorker: simulators that play episodes with the model, turn by turn.

    part 1   reset ── generate ── step ── generate ── step ── ...
    part 2            reset ───── generate ── step ── generate ── ...

A rank has `num_envs` environments in `parts` parts. All environments of a part make their turns
together. While one part waits for the model, the simulator steps the next, as in RLinf
(arXiv:2509.15965).

- One thread makes and calls all simulators, because many work on one thread only.
- An episode that ends leaves its environment unused until all of its part have ended.
- A call that exceeds `deadline_s` ends the process, whose episodes are played again. The driver
  replaces it. In the driver's own process (`Local`), the episodes fail instead.
- After a lost connection, the rank gives up its episodes: the gateway plays them again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pydantic

from ..dataflow.column import REWARD, TURN_REWARDS
from ..dataflow.config import Config
from ..dataflow.errors import GatewayLost, UserError
from .agents.failures import (
    EpisodeFailure,
    HarnessDied,
    HarnessRaised,
    InvalidResult,
    ModelUnreachable,
)
from .agents.link import AGAIN_S, Hello, Link, Play, Played, Stop
from .agents.runner import is_reward
from .dispatch import Dispatch
from .rendezvous import GatewayAddress
from .worker import Context, Worker, remote

if TYPE_CHECKING:
    import httpx

    from ..dataflow.graph import Node

GATHER_S = 0.05
"""[s] Wait for more episodes before a part starts without being full."""
REPLY_S = 3600.0
"""[s] Longest wait for a turn. The gateway gives up earlier."""
END_S = 5.0
"""[s] Grace period after `deadline_s`. A rank that has not ended itself by then is ended by a timer that
does not need Python."""


class VectorEnv(Protocol):
    """Several environments with texts, as in Gymnasium's vector protocol.

    Observations and actions are sequences with one text for each environment. An environment may
    also have `onload()` and `offload()`, which claim and free device memory between steps of the run
    and keep its state, and `close()`.
    """

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Start an episode in each environment. `options["rows"]` has the prompt's columns for each,
        as a dictionary. Return observations and infos."""
        ...

    def step(
        self, actions: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[float], Sequence[bool], Sequence[bool], Mapping[str, Any]]:
        """Return observations, rewards, terminations, truncations and infos. Environments whose
        episode has ended get the action "", and their results do not count."""
        ...


class EnvConfig(Config):
    """Environments of an EnvWorker."""

    make: Callable[[int], Any]
    """Required. Set it to a function from a number of environments to a vector environment of that
    many, such as its class."""
    num_envs: int = pydantic.Field(default=8, ge=1, le=100_000)
    """[environments] Number of a rank. Raise it if the model waits for simulators."""
    parts: int = pydantic.Field(default=1, ge=1, le=1000)
    """[parts] Number of parts that alternate between simulator and model. Set it to 2 if both take similar
    time. `make` is called once for each part."""
    max_turns: int = pydantic.Field(default=32, ge=1, le=1_000_000)
    """[actions] Maximum number in an episode. Raise it for long tasks."""
    deadline_s: float = pydantic.Field(default=60.0, gt=0, le=1e6)
    """[s] Time limit of each `reset` and `step`. After it, the driver replaces the process, and its
    episodes are played again. Raise it for slow simulators."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(("num_envs", "parts", "deadline_s"))

    @pydantic.model_validator(mode="after")
    def _has_equal_parts(self) -> EnvConfig:
        if self.num_envs % self.parts:
            fits = max(p for p in range(1, self.parts) if self.num_envs % p == 0)
            raise ValueError(
                f"parts={self.parts} does not divide num_envs={self.num_envs} evenly; the nearest smaller number that does is {fits}"
            )
        return self


# Play


@dataclass(eq=False)
class Episode:
    """The episode of one environment."""

    key: str
    """Its key at the gateway."""
    row: Mapping[str, Any]
    """Columns of its prompt."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rewards: list[float] = field(default_factory=list[float])
    """Reward of each turn."""
    failure: EpisodeFailure | None = None
    ended: bool = False
    """Whether it has its last reward, so that later failures of the simulator do not concern it."""
    stopped: bool = False
    """Whether its result is no longer needed."""


Generate = Callable[[Sequence[Episode]], Awaitable[Sequence[str | None]]]
"""Returns the model's next action in each episode, and adds its message to the episode. None ends an
episode."""
Simulate = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function of the simulator. Calls run one at a time."""


async def play(
    env: VectorEnv,
    episodes: Sequence[Episode],
    width: int,
    max_turns: int,
    generate: Generate,
    simulate: Simulate,
) -> None:
    """Play one episode in each of the first environments. Fill in their messages and rewards.

    Args:
        width: number of environments, at least as many as episodes. The others get the last row.

    Raises:
        InvalidResult: the simulator does not follow the protocol.
    """
    rows = [episode.row for episode in episodes]
    rows += [rows[-1]] * (width - len(rows))
    began = await simulate(partial(env.reset, options={"rows": rows}))
    (observations,) = _values("reset", began, ("observations",), width)
    live = dict(enumerate(episodes))
    for k, episode in live.items():
        episode.messages.append(_seen("reset", observations[k]))
    for turn in range(max_turns):
        asked = zip(live, await generate([*live.values()]), strict=True)
        actions = {k: action for k, action in asked if action is not None}
        for k in [*live]:
            if k not in actions:
                live.pop(k).ended = True
        if not live:
            return
        texts = [actions.get(k, "") for k in range(width)]
        stepped = await simulate(partial(env.step, texts))
        names = ("observations", "rewards", "terminations", "truncations")
        observations, rewards, *ends = _values("step", stepped, names, width)
        for k, episode in [*live.items()]:
            try:
                episode.rewards.append(_reward(rewards[k]))
                episode.ended = any(ended[k] for ended in ends) or turn == max_turns - 1
                if not episode.ended:
                    episode.messages.append(_seen("step", observations[k]))
            except InvalidResult as error:
                episode.failure = error
            if episode.ended or episode.failure is not None:
                del live[k]


def _values(method: str, result: Any, names: tuple[str, ...], width: int) -> Sequence[Sequence[Any]]:
    """Return the parts of a simulator's result, each with a value for each environment."""
    if not isinstance(result, tuple) or len(result) != len(names) + 1:
        raise InvalidResult(f"{method}() must return ({', '.join(names)}, infos), not {result!r:.200}")
    for name, values in zip(names, result, strict=False):
        number = (
            "text" if isinstance(values, str) else len(values) if hasattr(values, "__len__") else values
        )
        if number != width:
            raise InvalidResult(
                f"{method}() must return {width} {name}, one for each environment, not {number}: {values!r:.200}"
            )
    return result[:-1]


def _seen(method: str, observation: Any) -> dict[str, Any]:
    if not isinstance(observation, str):
        raise InvalidResult(f"{method}() must return texts as observations, not {observation!r:.200}")
    return {"role": "user", "content": observation}


def _reward(value: Any) -> float:
    with suppress(TypeError, ValueError):
        if is_reward(reward := float(value)):
            return reward
    raise InvalidResult(f"step() must return finite numbers as rewards, not {value!r:.200}")


class _Simulator:
    """The thread that makes and calls the simulators."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], float | None, Future[Any]]]
        self._calls = queue.SimpleQueue()
        # A daemon, because a call that hangs must not keep the process alive.
        threading.Thread(target=self._work, name="simulator", daemon=True).start()

    def call(self, function: Callable[[], Any], ends_after_s: float | None = None) -> Future[Any]:
        """Call a function after the earlier ones.

        Args:
            ends_after_s: end the process if the call takes longer, even if it blocks Python.
        """
        result: Future[Any] = Future()
        self._calls.put((function, ends_after_s, result))
        return result

    def _work(self) -> None:
        while True:
            function, ends_after_s, result = self._calls.get()
            if not result.set_running_or_notify_cancel():
                continue
            if ends_after_s is not None:
                faulthandler.dump_traceback_later(ends_after_s, exit=True, file=2)
            try:
                result.set_result(function())
            except BaseException as error:  # of the user's code
                if not isinstance(error, Exception) or isinstance(error, StopIteration):
                    # asyncio would end its loop, or refuse it
                    said = RuntimeError(f"{type(error).__name__}: {error}")
                    error = said.with_traceback(error.__traceback__)
                result.set_exception(error)
            finally:
                if ends_after_s is not None:
                    faulthandler.cancel_dump_traceback_later()


# Worker


class EnvWorker(Worker):
    """A rank with simulators. Give its handle to `rollout.interact(prompts, env=env, n=8)`.

    env = weft.group(weft.EnvWorker, make=GridWorlds, num_envs=16, parts=2, max_turns=12)
    """

    Config = EnvConfig
    replaceable = True
    config: EnvConfig

    def __init__(self, config: EnvConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        if context.gateway is None:
            raise UserError(
                f"worker group {context.name!r} has environments, but no node plays with them: use rollout.interact(prompts, env=...)"
            )
        self._address: GatewayAddress = context.gateway
        self._width = config.num_envs // config.parts
        self._simulator = _Simulator()
        self._envs = self._simulator.call(
            lambda: [config.make(self._width) for _ in range(config.parts)]
        ).result()
        self._link: Link | None = None
        self._known: dict[str, Episode] = {}
        """Key -> unfinished episode."""
        self._hung = ""
        """How a call of the simulator hung."""
        self._closed = False
        self._wake: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    @classmethod
    def needs_gateway(cls, nodes: Sequence[Node]) -> bool:
        return True

    def onload(self) -> None:
        self._simulator.call(partial(self._tell, "onload")).result()

    def offload(self) -> None:
        self._simulator.call(partial(self._tell, "offload")).result()

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def answer(self) -> None:
        """Do nothing. The driver calls this to find ranks that have died, because it makes no other
        calls."""

    def close(self) -> None:
        self._closed = True
        with suppress(RuntimeError):  # its loop has ended
            self._wake()
        self._thread.join(END_S)
        with suppress(TimeoutError):
            self._simulator.call(partial(self._tell, "close")).result(END_S)

    def _tell(self, method: str) -> None:
        for env in self._envs:
            if (function := getattr(env, method, None)) is not None:
                function()

    # On the thread of the event loop

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException:
            traceback.print_exc()
            if self.context.watched:  # the driver replaces the process
                os._exit(1)

    async def _serve(self) -> None:
        """Play episodes until the worker is closed."""
        import httpx

        came, waiting = asyncio.Event(), asyncio.Queue[Episode]()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, came.set)
        turn = asyncio.Lock()
        async with httpx.AsyncClient(
            base_url=self._address.url("http", ""),
            verify=self._address.ssl_context(),
            trust_env=False,  # no proxy is between them
            timeout=REPLY_S,
            limits=httpx.Limits(max_connections=None),
        ) as client:
            tasks = [asyncio.create_task(self._receive(came, waiting))]
            for env in self._envs:
                tasks.append(asyncio.create_task(self._play_part(env, waiting, client, turn)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended

    async def _receive(self, came: asyncio.Event, waiting: asyncio.Queue[Episode]) -> None:
        """Take the gateway's records until the worker is closed."""
        hello = Hello(self.context.name, self.context.rank, self.config.num_envs, plays=True)
        try:
            while not self._closed:
                try:
                    if self._link is None:
                        self._link = await asyncio.to_thread(Link, self._address, hello, self._wake)
                    await came.wait()
                    came.clear()
                    while records := self._link.take():
                        for record in records:
                            self._take(record, waiting)
                except GatewayLost:
                    self._link = None
                    for episode in self._known.values():
                        episode.stopped = True
                    await asyncio.sleep(AGAIN_S)
        finally:
            if self._link is not None:
                self._link.close()

    def _take(self, record: Play | Stop, waiting: asyncio.Queue[Episode]) -> None:
        if isinstance(record, Play):
            episode = self._known[record.key] = Episode(record.key, record.row)
            if self._hung:
                self._report(episode, HarnessDied(self._hung))
            else:
                waiting.put_nowait(episode)
        elif (known := self._known.get(record.key)) is not None:
            known.stopped = True

    async def _play_part(
        self,
        env: VectorEnv,
        waiting: asyncio.Queue[Episode],
        client: httpx.AsyncClient,
        turn: asyncio.Lock,
    ) -> None:
        """Play episodes in the environments of one part, again and again."""

        async def generate(episodes: Sequence[Episode]) -> list[str | None]:
            return await asyncio.gather(*(self._ask(client, episode) for episode in episodes))

        while True:
            episodes = [await waiting.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    while len(episodes) < self._width:
                        episodes.append(await waiting.get())
            failure: EpisodeFailure | None = None
            try:
                if any(not episode.stopped for episode in episodes):
                    simulate = partial(self._simulate, turn)
                    width, max_turns = self._width, self.config.max_turns
                    await play(env, episodes, width, max_turns, generate, simulate)
            except EpisodeFailure as error:
                failure = error
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
                failure = HarnessRaised(
                    f"a simulator of {self._name} raised {type(error).__name__}: {error}{at}"
                )
            for episode in episodes:
                self._report(episode, episode.failure or (None if episode.ended else failure))
            if self._hung and self.context.watched:
                faulthandler.dump_traceback(file=2)
                os._exit(1)

    async def _simulate(self, turn: asyncio.Lock, function: Callable[[], Any]) -> Any:
        async with turn:
            limit_s = self.config.deadline_s
            if not self._hung:
                call = self._simulator.call(function, limit_s + END_S if self.context.watched else None)
                work = asyncio.wrap_future(call)
                await asyncio.wait([work], timeout=limit_s)
                if work.done():
                    return work.result()
                self._hung = f"a simulator of {self._name} worked for longer than EnvWorker(deadline_s={limit_s:g})"
            raise HarnessDied(self._hung)

    async def _ask(self, client: httpx.AsyncClient, episode: Episode) -> str | None:
        """Return the model's next action; None if the context is full or the episode has ended."""
        import httpx

        if episode.stopped:
            return None
        url, body = f"/e/{episode.key}/v1/chat/completions", {"model": "policy"}
        try:
            reply = await client.post(url, json={**body, "messages": episode.messages})
            if reply.status_code != 200:
                if not _is_full(reply):
                    said = f"the gateway answered {reply.status_code}: {reply.text[:500]}"
                    episode.failure = ModelUnreachable(said)
                return None
            message = reply.json()["choices"][0]["message"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            episode.failure = ModelUnreachable(f"the gateway gave no answer: {error!r}")
            return None
        episode.messages.append(message)
        return message["content"] or ""

    def _report(self, episode: Episode, failure: EpisodeFailure | None) -> None:
        del self._known[episode.key]
        if self._link is None or episode.stopped:
            return
        result = {str(REWARD): math.fsum(episode.rewards), str(TURN_REWARDS): episode.rewards}
        played = Played(episode.key, result)
        if failure is not None:
            played = Played(episode.key, {}, failure.to_json())
        with suppress(GatewayLost):  # `_receive` connects again
            self._link.send(played)

    @property
    def _name(self) -> str:
        return f"{self.context.name}[{self.context.rank}]"


def _is_full(reply: httpx.Response) -> bool:
    """Whether the gateway refuses a conversation because it is too long for the model."""
    with suppress(ValueError, LookupError, TypeError):
        error = reply.json()["error"]
        return "context_length_exceeded" in (error.get("type"), error.get("code"))
    return False
