"""Episodes that run: their attempts, sessions and turns, in the gateway's process.

    request ──> session ──turn──> waiting ──> replica (a rollout rank) ──> reply
                  ^                  ^              │
                  │                  └── the rank has died
           rows of the episode

- Each attempt at an episode has its own key and session. A late request of an earlier attempt never
  reaches a later one.
- A replica that dies loses only the turns that it was sampling (`replicas.py`).
- An episode belongs to the rank that has leased its prompt. If that rank dies, the episode continues,
  and the next rank that opens it joins it. A rank that has lost its lease may not know it yet, so an
  episode ends for all ranks that have opened it, and is dropped when the last of them gives it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import shutil
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.websockets import WebSocket

from ...algorithms.sampling import Sampling
from ...dataflow.column import REWARD, TURN_REWARDS
from ...dataflow.errors import RequestError, UserError
from ...dataflow.untrusted_text import cut
from ..generation.engine import Response, stable_hash
from .failures import (
    ContextFull,
    EpisodeFailure,
    HarnessDied,
    HarnessRaised,
    InvalidResult,
    ModelUnreachable,
)
from .harness import HarnessPlan
from .link import (
    Close,
    Ended,
    EpisodeRequest,
    Open,
    Rest,
    Sample,
    Sampled,
)
from .players import Player, Players
from .rendering import Renderer
from .replicas import AskedTurn, Replica, Replicas, records_of, send
from .runner import EpisodeRunner, is_reward
from .sessions import Session, Turn

K = TypeVar("K")
T = TypeVar("T")

ATTEMPTS = 3
"""Attempts at an episode whose failures the policy does not cause."""
REJOIN_S = 120.0
"""[s] How long an episode continues after the rank that leased it has died."""
ABANDONED_S = 30.0
"""[s] How long a turn is sampled on after its client has hung up. The client may repeat its request."""
SAMPLE_S = 1800.0
"""[s] Longest wait of a request for its reply, while ranks may be replaced and weights updated."""
SHOWN = 4000
"""[characters] Length of a failure in messages."""
_LOG = logging.getLogger("weft.gateway")
"""Writes to the run's `logs/gateway.log`."""


@dataclass(eq=False)
class LiveEpisode:
    """An episode from its first request until its ranks know how it has ended."""

    request: EpisodeRequest
    opened: Open
    group: str
    owners: set[Replica]
    """The ranks that have opened the episode."""
    key: str = ""
    session: Session | None = None
    asked: dict[Turn, AskedTurn] = field(default_factory=dict[Turn, AskedTurn])
    last: Replica | None = None
    """The replica that sampled the session's last turn."""
    runner: EpisodeRunner | Players | None = None
    full: bool = False
    """Whether a request had no room for a response."""
    task: asyncio.Task[None] | None = None
    outcome: Ended | None = None
    lost: int = 0
    """How often the last owner has died."""


class LiveEpisodes:
    """The episodes that run, the ranks that sample their turns, and the processes of their harnesses. All
    methods run on the event loop of the gateway.

    Args:
        key: secret of the run, for its ranks.
        address: base of the URLs that harnesses get: `http://host:port`.
        logs: folder for the output of harnesses.
        scratch: folder for the files of episodes; `close` removes it.
        note: tells the driver a line.
        ask: asks the driver to look after the ranks of a group.
        load: makes a renderer for a model and the names of its parsers.
        start: makes what runs the episodes of a harness.
    """

    def __init__(
        self,
        key: str,
        address: str,
        logs: Path,
        scratch: Path,
        note: Callable[[str], None],
        ask: Callable[[str], None] = lambda group: None,
        load: Callable[[str, str, str], Renderer] = Renderer.load,
        start: Callable[[HarnessPlan, Path, Path], Awaitable[EpisodeRunner]] | None = None,
    ) -> None:
        self._load, self._start, self._ask = load, start or _started, ask
        self._key, self._address, self._logs, self._note = key, address, logs, note
        self._scratch = scratch
        self._replicas = Replicas()
        self._episodes: dict[int, LiveEpisode] = {}
        self._by_key: dict[str, LiveEpisode] = {}
        self._renderers: dict[tuple[str, str, str], asyncio.Future[Renderer]] = {}
        self._runners: dict[str, asyncio.Future[EpisodeRunner]] = {}
        self._players: dict[str, Players] = {}
        """Name of a group of environments -> its ranks."""
        self._numbers = itertools.count()
        self._noted: set[str] = set()
        self._tasks: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        for episode in self._episodes.values():
            if episode.task is not None:
                episode.task.cancel()
        for runner in self._runners.values():
            runner.cancel()  # if it is still starting
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await (await runner).close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # Replicas

    async def serve_rank(self, websocket: WebSocket) -> None:
        """Serve the link of a rank until it ends. A rank without the run's key is refused."""
        given = websocket.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self._key.encode()):
            await websocket.close(4401)
            return
        await websocket.accept()
        records = records_of(websocket)
        if (hello := await anext(records, None)) is None:
            return
        if hello.plays:
            await self._serve_player(Player(websocket, hello), records)
            return
        replica = Replica(websocket, hello)
        self._replicas.add(replica)
        try:
            async for record in records:
                await self._take(replica, record)
        finally:
            await self._lose(replica)

    async def _serve_player(self, player: Player, records: AsyncIterator[Any]) -> None:
        players = self._players_of(player.hello.group)
        players.add(player)
        try:
            async for record in records:
                players.take(player, record)
        finally:
            players.remove(player)

    def _players_of(self, group: str) -> Players:
        if group not in self._players:
            self._players[group] = Players(group, lambda: self._ask(group))
        return self._players[group]

    async def _take(self, replica: Replica, record: Any) -> None:
        if isinstance(record, Sampled):
            await self._replicas.take(replica, record)
        elif isinstance(record, Open):
            await self._replicas.serve(replica)
            for request in record.episodes:
                await self._open(replica, record, request)
        elif isinstance(record, Close):
            for episode_id in record.episode_ids:
                await self._give_up(replica, episode_id)
        elif isinstance(record, Rest):
            await self._replicas.rest(replica)

    async def _lose(self, replica: Replica) -> None:
        """Keep the episodes of a rank that is gone, until another rank joins them."""
        for episode in list(self._episodes.values()):
            if episode.owners == {replica}:
                episode.lost += 1
                asyncio.get_running_loop().call_later(REJOIN_S, self._expire, episode, episode.lost)
            episode.owners.discard(replica)
        await self._replicas.remove(replica)

    def _expire(self, episode: LiveEpisode, lost: int) -> None:
        """Drop an episode that no rank has joined since it lost its last owner."""
        alone = not episode.owners and episode.lost == lost
        if alone and self._episodes.get(episode.request.episode_id) is episode:
            self._keep(self._drop_episode(episode.request.episode_id))

    # Episodes

    async def _open(self, replica: Replica, opened: Open, request: EpisodeRequest) -> None:
        episode = self._episodes.get(request.episode_id)
        if episode is None:
            episode = LiveEpisode(request, opened, replica.hello.group, {replica})
            self._episodes[request.episode_id] = episode
            episode.task = asyncio.create_task(self._carry_out(episode))
        episode.owners.add(replica)
        if episode.outcome is not None:
            await self._report(episode)

    async def _carry_out(self, episode: LiveEpisode) -> None:
        """Run an episode until it has an outcome, and report it."""
        try:
            outcome = await self._attempts(episode)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _LOG.exception("episode %d", episode.request.episode_id)
            text = cut(f"{type(error).__name__}: {error}", SHOWN)
            outcome = Ended(episode.request.episode_id, where="harness", failure=text, scored=False)
        finally:
            await self._end_session(episode)
        episode.outcome = outcome
        await self._report(episode)

    async def _attempts(self, episode: LiveEpisode) -> Ended:
        opened, episode_id = episode.opened, episode.request.episode_id
        try:
            renderer = await self.renderer(opened)
            runner = episode.runner = await self._runner(opened.plan)
        except UserError as error:  # the model has no chat template, or the harness cannot be loaded
            return Ended(episode_id, where="harness", failure=str(error), scored=False, fatal=True)
        for attempt in range(ATTEMPTS):
            session = episode.session = Session(renderer, opened.max_context, opened.most_rows)
            episode.key = f"weft-{secrets.token_urlsafe(24)}"
            episode.full = False
            self._by_key[episode.key] = episode
            base_url = f"{self._address}/e/{episode.key}/v1"
            result: Mapping[str, Any] = {}
            failure: EpisodeFailure | None = None
            try:
                result = await runner.run(episode.key, episode.request.row, base_url=base_url)
                _check_rewards(result, session)
            except EpisodeFailure as error:
                # A harness that cannot continue because the context is full has failed by the policy's doing.
                stopped = episode.full and isinstance(
                    error, HarnessRaised | HarnessDied | ModelUnreachable
                )
                failure = (ContextFull if stopped else type(error))(cut(str(error), SHOWN))
            await self._end_session(episode)
            if failure is not None and not failure.scored:
                said = cut(f"{type(failure).__name__}: {failure}", SHOWN // 4)
                _LOG.warning("episode %d, attempt %d: %s", episode_id, attempt + 1, said)
            if failure is None or failure.scored:
                return Ended(
                    episode_id,
                    tuple(session.rows()),
                    result,
                    session.num_turns,
                    session.retokenised,
                    where=failure.where if failure else "",
                    failure=str(failure) if failure else "",
                )
            if attempt == ATTEMPTS - 1 or not failure.retried:
                return Ended(episode_id, where=failure.where, failure=str(failure), scored=False)
        raise AssertionError("the last attempt returns")

    async def _end_session(self, episode: LiveEpisode) -> None:
        """Refuse further requests of an attempt, and abort its turns."""
        self._by_key.pop(episode.key, None)
        for turn in list(episode.asked):
            await self._abort(episode, turn)

    async def _report(self, episode: LiveEpisode) -> None:
        """Tell all owners how an episode has ended. If they are gone, the next one gets to know it."""
        for owner in list(episode.owners):
            if episode.outcome is not None and await send(owner.socket, episode.outcome):
                self._episodes.pop(episode.request.episode_id, None)

    async def _give_up(self, replica: Replica, episode_id: int) -> None:
        """Drop an episode, unless another rank has opened it too."""
        episode = self._episodes.get(episode_id)
        if episode is not None:
            episode.owners.discard(replica)
            if not episode.owners:
                await self._drop_episode(episode_id)

    async def _drop_episode(self, episode_id: int) -> None:
        episode = self._episodes.pop(episode_id, None)
        if episode is not None and episode.task is not None:
            episode.task.cancel()
            await self._end_session(episode)

    async def renderer(self, opened: Open) -> Renderer:
        """Return the renderer of a model. Raises a UserError if it cannot be loaded."""
        key = opened.model, opened.tool_parser, opened.reasoning_parser
        return await _once(self._renderers, key, lambda: asyncio.to_thread(self._load, *key))

    async def _runner(self, plan: HarnessPlan) -> EpisodeRunner | Players:
        """Return what runs the episodes of a harness. Raises a UserError if it cannot be loaded."""
        if "env" in plan.program:
            return self._players_of(plan.program["env"])
        log = self._logs / f"harness_{len(self._runners)}.log"
        key = json.dumps(asdict(plan), sort_keys=True)
        return await _once(self._runners, key, lambda: self._start(plan, self._scratch, log))

    # Turns

    async def _sample(self, episode: LiveEpisode, turn: Turn) -> Response:
        """Sample a turn, or wait for it if it is being sampled already."""
        if turn.response is not None:
            return turn.response
        asked = episode.asked.get(turn)
        if asked is None:
            assert episode.session is not None
            ids = turn.prompt_ids()
            sampling = _sampling_of(turn, episode.opened.sampling, episode.session)
            seed = episode.request.seed
            if seed is not None:  # it must not depend on the order of requests
                seed = stable_hash(seed, turn.number, content=ids.tobytes())
            policy = episode.opened.policy
            sample = Sample(next(self._numbers), ids, seed, sampling, turn.stop_token_ids, policy)
            done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
            asked = episode.asked[turn] = AskedTurn(episode.group, sample, episode.last, done)
            await self._replicas.ask(asked)
        try:
            response = await asyncio.shield(asked.done)
        except RuntimeError:  # the engine refuses the turn
            if episode.asked.pop(turn, None) is not None and episode.session is not None:
                episode.session.drop(turn)
            raise
        if episode.asked.pop(turn, None) is not None:
            episode.last = asked.replica
            session = episode.session
            assert session is not None
            if turn.request is None:
                session.end_tokens(turn, response)
            else:
                session.end(turn, response)
        return response

    async def sampled(
        self,
        episode: LiveEpisode,
        begin: Callable[[Session], list[Turn]],
        hangs_up: Callable[[], Awaitable[None]],
    ) -> list[Turn] | None:
        """Return the sampled turns of a request, or None if its client hangs up before that.

        Args:
            episode: the request's episode.
            begin: adds the turns to its session.
            hangs_up: returns when the client has hung up.
        """
        session = episode.session
        assert session is not None
        try:
            turns = begin(session)
        except ContextFull as error:
            episode.full = True
            raise RequestError(400, "context_length_exceeded", str(error)) from None
        except UserError as error:  # the chat template refuses the conversation
            raise RequestError(400, "invalid_request_error", str(error)) from None
        sampling = asyncio.gather(*(self._sample(episode, turn) for turn in turns))
        gone = asyncio.ensure_future(hangs_up())
        try:
            with self._sampling(episode):
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait([sampling, gone], timeout=SAMPLE_S, return_when=first)
            if not sampling.done():
                if gone.done():
                    self._keep(self._abandon(episode, turns))
                    return None
                names = {one.waits_for for turn in turns if (one := episode.asked.get(turn))}
                self._keep(self._abandon(episode, turns))
                raise RequestError(
                    504,
                    "turn_timed_out",
                    f"no reply within {SAMPLE_S:g} s; waiting for {', '.join(sorted(names))}",
                )
            sampling.result()
        except asyncio.CancelledError:
            raise RequestError(410, "episode_ended", "the episode has ended") from None
        except RuntimeError as error:
            raise RequestError(400, "refused", f"the engine refuses the request: {error}") from None
        finally:
            gone.cancel()
            if not sampling.done():
                sampling.add_done_callback(lambda one: one.cancelled() or one.exception())
        return turns

    def _sampling(self, episode: LiveEpisode) -> contextlib.AbstractContextManager[None]:
        """Stop the harness's clock in the block."""
        runner = episode.runner
        return contextlib.nullcontext() if runner is None else runner.sampling(episode.key)

    async def _abort(self, episode: LiveEpisode, turn: Turn) -> None:
        asked = episode.asked.pop(turn, None)
        if asked is None:  # it has just ended
            return
        if episode.session is not None:
            episode.session.drop(turn)
        await self._replicas.abort(asked)

    async def _abandon(self, episode: LiveEpisode, turns: Iterable[Turn]) -> None:
        """Abort turns whose client has hung up, unless it asks for them again."""
        for turn in turns:
            turn.abandoned = True
        await asyncio.sleep(ABANDONED_S)
        for turn in turns:
            if turn.abandoned and turn in episode.asked:
                await self._abort(episode, turn)

    def with_key(self, key: str) -> LiveEpisode | None:
        """Return the episode whose running attempt has a key."""
        return self._by_key.get(key)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work in the background. The loop itself keeps only weak references to tasks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note_overridden(self, names: Iterable[str]) -> None:
        """Tell the driver once of parameters that a harness sends and the trainer sets."""
        for name in sorted({*names} - self._noted):
            self._noted.add(name)
            self._note(f"Weft ignores {name} of a harness: the run's Sampling decides how to sample")


async def _started(plan: HarnessPlan, scratch: Path, log: Path) -> EpisodeRunner:
    runner = EpisodeRunner(plan, scratch, log)
    await runner.start()
    return runner


def _check_rewards(result: Mapping[str, Any], session: Session) -> None:
    """Raise an InvalidResult for a reward that is not a finite number, or if a harness does not give one
    reward for each sampled turn."""
    rewards = result.get(str(TURN_REWARDS))
    turns = sum(len(row.turn_ends) for row in session.rows())
    for value in (result.get(str(REWARD)), *(rewards if isinstance(rewards, list) else ())):
        if not is_reward(value):
            raise InvalidResult(f"a reward must be a finite number of float32, not {value!r:.100}")
    if rewards is not None and (not isinstance(rewards, list) or len(rewards) != turns):
        shown = len(rewards) if isinstance(rewards, list) else repr(rewards)
        raise InvalidResult(
            f"turn_rewards must have a number for each of the {turns} sampled turns, not {shown}"
        )


def _sampling_of(turn: Turn, sampling: Sampling, session: Session) -> Sampling:
    """Return the trainer's sampling with the limits that a client may set."""
    stop = sampling.stop
    if stop is not None and turn.request is not None:
        stop = (*stop, *(text for text in turn.request.stop if text not in stop))
    most = session.room(turn, sampling.max_tokens)
    limits = {"max_tokens": most, "min_tokens": min(sampling.min_tokens, most)}
    return sampling.model_copy(update={"stop": stop, **limits})


async def _once(made: dict[K, asyncio.Future[T]], key: K, make: Callable[[], Awaitable[T]]) -> T:
    """Return what the first caller has made. Callers that are cancelled harm no others, and errors that
    the user cannot fix are not kept."""
    if key not in made:
        made[key] = asyncio.ensure_future(make())
    try:
        return await asyncio.shield(made[key])
    except UserError:
        raise
    except Exception:
        made.pop(key, None)
        raise
