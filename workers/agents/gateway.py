"""Gateway: the process of a run that serves models to harnesses and keeps their exact tokens.

    harness ──HTTP──> Gateway ──turn──> LiveEpisodes ──link──> rollout rank

Each attempt at an episode has its own address and key. `live_episodes.py` follows its turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as Reply
from starlette.routing import Route, WebSocketRoute

from ...dataflow.errors import RequestError
from ...dataflow.untrusted_text import cut
from .link import MOST_BYTES, PATH
from .live_episodes import SHOWN, LiveEpisode, LiveEpisodes
from .messages import Completion
from .protocol import PROTOCOLS, HttpProtocol
from .protocol_fields import MOST_CHOICES, Fields, read_json
from .rendering import Renderer
from .sessions import Session, Turn

KEEP_ALIVE_S = 24 * 3600
"""[s] How long an idle connection stays open. If a tool takes longer, a harness without retries fails."""
CLIENT_GONE = 499
FILES = 1 << 16
"""Limit on open files of the gateway's process."""
BODY_BYTES = 64 << 20
"""[bytes] Largest body of a request."""


class Gateway:
    """Serves HTTP requests of harnesses, and the links of ranks.

    Args:
        episodes: the run's episodes.
    """

    def __init__(self, episodes: LiveEpisodes) -> None:
        self._episodes = episodes

    def app(self) -> Starlette:
        routes: list[Any] = [WebSocketRoute(PATH, self._episodes.serve_rank)]
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
        self._episodes.note_overridden(asked.overridden)
        retry = _is_repeated(request)
        turns = await self._episodes.sampled(
            episode, lambda session: session.begin(asked, retry=retry), lambda: _hangs_up(request)
        )
        if turns is None:
            return Reply(status_code=CLIENT_GONE)
        renderer = await self._episodes.renderer(episode.opened)
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
            self._episodes.note_overridden({*given.overridden()} - {"stop_token_ids"})
            n, most = given.count("n", highest=MOST_CHOICES) or 1, given.count("max_tokens")

            def begin(session: Session) -> list[Turn]:
                return session.begin_tokens(
                    ids,
                    n=n,
                    max_tokens=most,
                    stop_token_ids=tuple(stops),
                    retry=_is_repeated(request),
                )

            turns = await self._episodes.sampled(episode, begin, lambda: _hangs_up(request))
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

    async def _asked(self, request: Request) -> tuple[LiveEpisode, Mapping[str, Any]]:
        """Return the episode and the body of a request."""
        # A wrong key is refused before the body is read.
        body = await _body(request, self._episode_of(request))
        return self._episode_of(request), body  # the attempt may have just ended

    def _episode_of(self, request: Request) -> LiveEpisode:
        headers = request.headers
        given = (
            request.path_params.get("key", ""),
            headers.get("x-session-id", ""),
            headers.get("authorization", "").removeprefix("Bearer "),
            headers.get("x-api-key", ""),
        )
        for key in given:
            if (episode := self._episodes.with_key(key)) is not None:
                return episode
        raise RequestError(
            401,
            "authentication_error",
            "no episode has this key; use the base_url or api_key that the harness was given",
        )


def _completion(turn: Turn, renderer: Renderer) -> Completion:
    response, message = turn.response, turn.message
    assert response is not None and message is not None
    ids = response.token_ids.tolist()
    texts = renderer.token_texts(ids) if turn.request and turn.request.logprobs else []
    logprobs, reason = response.logprobs.tolist(), response.finish_reason
    assert reason != "unfinished"
    return Completion(message, ids, logprobs, texts, reason, turn.stop_string)


def _token_ids(values: list[Any], place: str) -> list[int]:
    for number, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 1 << 31:
            said = f"{place}[{number}]: {value!r} is not a token id"
            raise RequestError(400, "invalid_request_error", said)
    return values


async def _body(request: Request, episode: LiveEpisode) -> Mapping[str, Any]:
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


def _is_repeated(request: Request) -> bool:
    """Whether a client of OpenAI or Anthropic says that it sends a request again."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


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
    episodes = LiveEpisodes(settings["key"], settings["address"], logs, scratch, note, ask)
    app = Gateway(episodes).app()
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
        await episodes.close()


def main() -> None:
    asyncio.run(_serve(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
