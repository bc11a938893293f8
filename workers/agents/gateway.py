"""Gateway: the process of a run that serves models to harnesses and keeps their exact tokens.

    harness ──HTTP──> session ──turn──> waiting ──> replica (a rollout rank) ──> reply
                        ^                  ^              │
                        │                  └── the rank has died
                 rows of the episode

- Each attempt at an episode has its own key and session. A late request of an earlier attempt never
  reaches a later one.
- A replica that dies loses only the turns that it was sampling (`replicas.py`).
- An episode belongs to the rank that has leased its prompt. If that rank dies, the episode goes on,
  and the next rank that opens it joins it. A rank that has lost its lease may not know it yet, so an
  episode ends for all ranks that have opened it, and is dropped when the last of them gives it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import time
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

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as Reply
from starlette.routing import Route, WebSocketRoute
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
    MOST_BYTES,
    PATH,
    Close,
    Ended,
    EpisodeRequest,
    Open,
    Rest,
    Sample,
    Sampled,
)
from .messages import Completion
from .players import Player, Players
from .protocol import PROTOCOLS, HttpProtocol
from .protocol_fields import MOST_CHOICES, Fields, read_json
from .rendering import Renderer
from .replicas import AskedTurn, Replica, Replicas, records_of, send
from .runner import EpisodeRunner, is_reward
from .sessions import Session, Turn

K = TypeVar("K")
T = TypeVar("T")

ATTEMPTS = 3
"""Attempts at an episode whose failures the policy does not cause."""
REJOIN_S = 120.0
"""[s] How long an episode goes on after the rank that leased it has died."""
ABANDONED_S = 30.0
"""[s] How long a turn is sampled on after its client has hung up. The client may repeat its request."""
SAMPLE_S = 1800.0
"""[s] Longest wait of a request for its reply, while ranks may be replaced and weights updated."""
KEEP_ALIVE_S = 24 * 3600
"""[s] How long an idle connection stays open. If a tool takes longer, a harness without retries fails."""
CLIENT_GONE = 499
FILES = 1 << 16
"""Limit on open files of the gateway's process."""
BODY_BYTES = 64 << 20
"""[bytes] Largest body of a request."""
SHOWN = 4000
"""[characters] Length of a failure in messages."""
_LOG = logging.getLogger("weft.gateway")
"""Writes to the run's `logs/gateway.log`."""


@dataclass(eq=False)
class _Episode:
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


class Gateway:
    """The state of the gateway's process. All methods run on its event loop.

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
        self._episodes: dict[int, _Episode] = {}
        self._by_key: dict[str, _Episode] = {}
        self._renderers: dict[tuple[str, str, str], asyncio.Future[Renderer]] = {}
        self._runners: dict[str, asyncio.Future[EpisodeRunner]] = {}
        self._players: dict[str, Players] = {}
        """Name of a group of environments -> its ranks."""
        self._numbers = itertools.count()
        self._noted: set[str] = set()
        self._tasks: set[asyncio.Future[None]] = set()

    def app(self) -> Starlette:
        routes: list[Any] = [WebSocketRoute(PATH, self._serve_replica)]
        for start in ("", "/e/{key}"):
            for protocol in PROTOCOLS:
                routes.append(
                    Route(f"{start}/v1{protocol.path}", self._handler(protocol), methods=["POST"])
                )
            routes.append(Route(f"{start}/v1/models", self._models))
            for version in ("", "/v1"):
                routes.append(
                    Route(f"{start}{version}/inference/v1/generate", self._generate, methods=["POST"])
                )
        return Starlette(
            routes=routes,
            exception_handlers={404: _no_route, 405: _no_route, Exception: _broken},
        )

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

    async def _serve_replica(self, websocket: WebSocket) -> None:
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

    def _expire(self, episode: _Episode, lost: int) -> None:
        """Drop an episode that no rank has joined since it lost its last owner."""
        alone = not episode.owners and episode.lost == lost
        if alone and self._episodes.get(episode.request.episode_id) is episode:
            self._keep(self._drop_episode(episode.request.episode_id))

    # Episodes

    async def _open(self, replica: Replica, opened: Open, request: EpisodeRequest) -> None:
        episode = self._episodes.get(request.episode_id)
        if episode is None:
            episode = _Episode(request, opened, replica.hello.group, {replica})
            self._episodes[request.episode_id] = episode
            episode.task = asyncio.create_task(self._carry_out(episode))
        episode.owners.add(replica)
        if episode.outcome is not None:
            await self._report(episode)

    async def _carry_out(self, episode: _Episode) -> None:
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

    async def _attempts(self, episode: _Episode) -> Ended:
        opened, episode_id = episode.opened, episode.request.episode_id
        try:
            renderer = await self._renderer(opened)
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
                # A harness that cannot go on because the context is full has failed by the policy's doing.
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

    async def _end_session(self, episode: _Episode) -> None:
        """Refuse further requests of an attempt, and abort its turns."""
        self._by_key.pop(episode.key, None)
        for turn in list(episode.asked):
            await self._abort(episode, turn)

    async def _report(self, episode: _Episode) -> None:
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

    async def _renderer(self, opened: Open) -> Renderer:
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

    async def _sample(self, episode: _Episode, turn: Turn) -> Response:
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
            sample = Sample(next(self._numbers), ids, seed, sampling, turn.stop_token_ids)
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

    async def _abort(self, episode: _Episode, turn: Turn) -> None:
        asked = episode.asked.pop(turn, None)
        if asked is None:  # it has just ended
            return
        if episode.session is not None:
            episode.session.drop(turn)
        await self._replicas.abort(asked)

    async def _abandon(self, episode: _Episode, turns: Iterable[Turn]) -> None:
        """Abort turns whose client has hung up, unless it asks for them again."""
        for turn in turns:
            turn.abandoned = True
        await asyncio.sleep(ABANDONED_S)
        for turn in turns:
            if turn.abandoned and turn in episode.asked:
                await self._abort(episode, turn)

    # Requests of harnesses

    def _handler(self, protocol: HttpProtocol) -> Any:
        async def handle(request: Request) -> Reply:
            try:
                return await self._converse(request, protocol)
            except RequestError as error:
                return JSONResponse(protocol.error(error.status, error.kind, str(error)), error.status)
            except ClientDisconnect:
                return Reply(status_code=CLIENT_GONE)

        return handle

    async def _converse(self, request: Request, protocol: HttpProtocol) -> Reply:
        episode, body = await self._asked(request)
        asked = protocol.read(body)
        self._note_overridden(asked.overridden)
        turns = await self._turns(episode, request, lambda s, retry: s.begin(asked, retry=retry))
        if turns is None:
            return Reply(status_code=CLIENT_GONE)
        renderer = await self._renderer(episode.opened)
        completions = [_completion(turn, renderer) for turn in turns]
        known: dict[str, Any] = {
            "id": f"weft-{secrets.token_hex(12)}",
            "model": asked.model or "policy",
            "prompt_tokens": turns[0].length,
            "created": int(time.time()),
        }
        if asked.stream:
            events = protocol.events(asked, completions, **known)
            return StreamingResponse(iter(events), media_type="text/event-stream")
        return JSONResponse(protocol.write(asked, completions, **known))

    async def _turns(
        self, episode: _Episode, request: Request, begin: Callable[[Session, bool], list[Turn]]
    ) -> list[Turn] | None:
        """Return the sampled turns of a request; None if its client has hung up. `begin` adds them to
        a session; it is told whether the client repeats a request."""
        session = episode.session
        assert session is not None
        retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        try:
            turns = begin(session, retry)
        except ContextFull as error:
            episode.full = True
            raise RequestError(400, "context_length_exceeded", str(error)) from None
        except UserError as error:  # the chat template refuses the conversation
            raise RequestError(400, "invalid_request_error", str(error)) from None
        sampling = asyncio.gather(*(self._sample(episode, turn) for turn in turns))
        gone = asyncio.ensure_future(_hangs_up(request))
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

    def _sampling(self, episode: _Episode) -> contextlib.AbstractContextManager[None]:
        """Stop the harness's clock in the block."""
        runner = episode.runner
        return contextlib.nullcontext() if runner is None else runner.sampling(episode.key)

    async def _generate(self, request: Request) -> Reply:
        """vLLM's token route."""
        try:
            episode, given_body = await self._asked(request)
            body = Fields(given_body)
            ids = _token_ids(body.require("token_ids", list), "token_ids")
            if not ids:
                raise body.wrong("token_ids", "are empty; send at least one")
            given = body.inner("sampling_params")
            stops = _token_ids(given.get("stop_token_ids", list) or [], "stop_token_ids")
            self._note_overridden({*given.overridden()} - {"stop_token_ids"})
            n, most = given.count("n", highest=MOST_CHOICES) or 1, given.count("max_tokens")

            def begin(session: Session, retry: bool) -> list[Turn]:
                return session.begin_tokens(
                    ids, n=n, max_tokens=most, stop_token_ids=tuple(stops), retry=retry
                )

            turns = await self._turns(episode, request, begin)
        except ClientDisconnect:
            return Reply(status_code=CLIENT_GONE)
        except RequestError as error:
            body = {"error": {"message": str(error), "type": error.kind, "code": error.status}}
            return JSONResponse(body, error.status)
        if turns is None:
            return Reply(status_code=CLIENT_GONE)
        choices: list[dict[str, Any]] = []
        for index, turn in enumerate(turns):
            response = turn.response
            assert response is not None
            pairs = zip(response.token_ids.tolist(), response.logprobs.tolist(), strict=True)
            content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
            choices.append(
                {
                    "index": index,
                    "token_ids": response.token_ids.tolist(),
                    "finish_reason": response.finish_reason,
                    "logprobs": {"content": content},
                }
            )
        return JSONResponse({"request_id": f"weft-{secrets.token_hex(12)}", "choices": choices})

    async def _models(self, request: Request) -> Reply:
        try:
            episode = self._episode_of(request)
        except RequestError as error:
            return JSONResponse({"error": {"message": str(error)}}, error.status)
        card = {
            "id": "policy",
            "object": "model",
            "created": 0,
            "owned_by": "weft",
            "max_model_len": episode.opened.max_context,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def _asked(self, request: Request) -> tuple[_Episode, Mapping[str, Any]]:
        """Return the episode and the body of a request."""
        # A wrong key is refused before the body is read.
        body = await _body(request, self._episode_of(request))
        return self._episode_of(request), body  # the attempt may have just ended

    def _episode_of(self, request: Request) -> _Episode:
        headers = request.headers
        given = (
            request.path_params.get("key", ""),
            headers.get("x-session-id", ""),
            headers.get("authorization", "").removeprefix("Bearer "),
            headers.get("x-api-key", ""),
        )
        for key in given:
            if key in self._by_key:
                return self._by_key[key]
        raise RequestError(
            401,
            "authentication_error",
            "no episode has this key; use the base_url or api_key that the harness was given",
        )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work in the background. The loop itself keeps only weak references to tasks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note_overridden(self, names: Iterable[str]) -> None:
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


def _completion(turn: Turn, renderer: Renderer) -> Completion:
    response, message = turn.response, turn.message
    assert response is not None and message is not None
    ids = response.token_ids.tolist()
    texts = renderer.token_texts(ids) if turn.request and turn.request.logprobs else []
    logprobs, reason = response.logprobs.tolist(), response.finish_reason
    return Completion(message, ids, logprobs, texts, reason, turn.stop_string)


def _sampling_of(turn: Turn, sampling: Sampling, session: Session) -> Sampling:
    """Return the trainer's sampling with the limits that a client may set."""
    stop = sampling.stop
    if stop is not None and turn.request is not None:
        stop = (*stop, *(text for text in turn.request.stop if text not in stop))
    most = session.room(turn, sampling.max_tokens)
    limits = {"max_tokens": most, "min_tokens": min(sampling.min_tokens, most)}
    return sampling.model_copy(update={"stop": stop, **limits})


def _token_ids(values: list[Any], place: str) -> list[int]:
    for number, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 1 << 31:
            said = f"{place}[{number}]: {value!r} is not a token id"
            raise RequestError(400, "invalid_request_error", said)
    return values


async def _body(request: Request, episode: _Episode) -> Mapping[str, Any]:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > BODY_BYTES:
            episode.full = True
            said = f"the body has more than {BODY_BYTES} bytes; send a shorter conversation"
            raise RequestError(400, "context_length_exceeded", said)
    try:
        body = read_json(bytes(content))
    except ValueError as error:
        raise RequestError(400, "invalid_request_error", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, "invalid_request_error", "the body must be a JSON object")
    return body


async def _hangs_up(request: Request) -> None:
    """Return when the client of a request has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_route(request: Request, error: Exception) -> Reply:
    said = (
        f"{request.method} of this address is not served; the base URL ends with /v1 (Anthropic's clients add it), and below it are "
        "POST chat/completions, responses and messages, and GET models"
    )
    status = getattr(error, "status_code", 404)
    return JSONResponse({"error": {"message": said, "type": "not_found_error"}}, status)


async def _broken(request: Request, error: Exception) -> Reply:
    said = f"Weft's gateway failed, see logs/gateway.log: {type(error).__name__}: {error}"
    return JSONResponse({"error": {"message": cut(said, SHOWN), "type": "server_error"}}, 500)


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


# The process


async def _serve(settings: Mapping[str, Any]) -> None:
    import uvicorn

    # Clients keep their connections open, and usual limits are for interactive programs.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if most == resource.RLIM_INFINITY else min(most, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))

    def note(text: str) -> None:
        print(json.dumps({"note": text}), flush=True)

    def ask(group: str) -> None:
        print(json.dumps({"ask": group}), flush=True)

    logs, scratch = Path(settings["logs"]), Path(settings["scratch"])
    gateway = Gateway(settings["key"], settings["address"], logs, scratch, note, ask)
    app = gateway.app()
    servers: list[tuple[uvicorn.Server, socket.socket]] = []
    for descriptor in settings["descriptors"]:
        listening = socket.socket(fileno=descriptor)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="websockets-sansio",
            ws_max_size=MOST_BYTES,
            ws_per_message_deflate=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        if servers:  # the second one is for ranks on other nodes
            with tempfile.NamedTemporaryFile("w") as file:  # readable by this user only
                file.write(settings["certificate"] + settings["private_key"])
                file.flush()
                config.ssl_certfile = file.name
                config.load()
        servers.append((uvicorn.Server(config), listening))
    # The driver holds the other end of standard input. It closes when the driver ends.
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def until_driver_ends() -> None:
        while await reader.read(1 << 16):
            pass
        for server, _ in servers:
            server.should_exit = True

    watch = asyncio.create_task(until_driver_ends())
    print(json.dumps({"ready": os.getpid()}), flush=True)
    try:
        await asyncio.gather(*(server.serve(sockets=[listening]) for server, listening in servers))
    finally:
        watch.cancel()
        await gateway.close()


def main() -> None:
    asyncio.run(_serve(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
