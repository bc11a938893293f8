"""The dashboard's routes. They read files of runs; `stop` and `stacks` also write requests."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response, StreamingResponse

from ...dataflow.buffer.queries import end_prepared, prepare
from ...dataflow.config import Config
from ...dataflow.errors import NoSuchRunError, UserError, WeftError
from ...dataflow.runs.follow import changed, state_of
from ..reading import run_pages
from ..reading.catalogue import Catalogue, parted
from ..reading.comparison import compare_page
from ..reading.graph_page import buffer_page, graph_page
from ..reading.lanes import timeline_page
from ..reading.metrics import Axis, cards, meaning
from ..reading.run_reader import RunReader
from ..reading.workers_page import log_part, workers_page
from .safety import Access, Guard

# Event stream: server-sent events that tell pages which parts of which run have changed.
#
#     event: hello      data: {"runs": ["a", "b"]}
#     event: changed    data: {"run": "a", "parts": ["metrics", "live"]}
#     event: runs       data: {"runs": ["a", "b", "c"]}        a run was added or removed
#     : beat                                                   every BEAT_S, for proxies
#
# Weft writes the format itself, because packages for it install signal handlers.


LOOK_S = 0.25
"""[s] Shortest time between two checks of the files."""
REST_FACTOR = 10
"""The watcher sleeps this many times the CPU time of its last check, between LOOK_S and
MOST_REST_S, so it takes about a tenth of a core."""
MOST_REST_S = 1.0
BEAT_S = 15.0
MAX_WAITING = 100
"""Maximum number of events queued for a page. A page that falls behind must reload everything."""


def event(kind: str, data: Any) -> bytes:
    """
    >>> event("changed", {"run": "a"})
    b'event: changed\\ndata: {"run": "a"}\\n\\n'
    """
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


class _EventStream:
    """Watches the runs that open pages show."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._pages: dict[asyncio.Queue[bytes], Collection[str]] = {}
        """Maps the queue of each page to the names of its runs, empty for all."""
        self._states: dict[str, dict[str, object]] = {}
        self._first_look: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.over = asyncio.Event()
        """Set at shutdown; ends all streams."""

    async def events(self, runs: Collection[str]) -> AsyncIterator[bytes]:
        """Yield the events of these runs (all if empty) to a page until it disconnects."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._pages[queue] = frozenset(runs)
        if self._first_look is None or self._watcher is None or self._watcher.done():
            self._first_look = asyncio.create_task(asyncio.to_thread(self._look))
            self._watcher = asyncio.create_task(self._watch(self._first_look))
        try:
            # A page reads its runs after `hello`. A first look after that could miss a change.
            await asyncio.shield(self._first_look)
            yield b"retry: 1000\n" + event("hello", {"runs": list(self._catalogue.readers)})
            while not self.over.is_set():
                try:
                    yield await asyncio.wait_for(queue.get(), BEAT_S)
                except TimeoutError:
                    yield b": beat\n\n"
        finally:
            del self._pages[queue]

    async def _watch(self, first_look: asyncio.Task[Any]) -> None:
        await first_look
        while self._pages:
            news, took_s = await asyncio.to_thread(self._look)
            for message, run in news:
                for queue, asked in self._pages.items():
                    if run is None or not asked or run in asked:
                        self._put(queue, message)
            await asyncio.sleep(max(LOOK_S, min(MOST_REST_S, REST_FACTOR * took_s)))
        self._states.clear()

    def _put(self, queue: asyncio.Queue[bytes], message: bytes) -> None:
        # Drop the backlog, and let the page reload everything.
        if queue.full():
            while not queue.empty():
                queue.get_nowait()
            message = event("reload", {})
        queue.put_nowait(message)

    def _look(self) -> tuple[list[tuple[bytes, str | None]], float]:
        """Return (event, run) for each change since the last check, and the CPU seconds of this
        check. Events whose run is None go to all pages."""
        began = time.thread_time()
        found: list[tuple[bytes, str | None]] = []
        readers = self._catalogue.readers
        if self._states and readers.keys() != self._states.keys():
            found.append((event("runs", {"runs": list(readers)}), None))
        # A page without names watches all runs.
        asked = set[str]().union(*self._pages.values()) if all(self._pages.values()) else readers.keys()
        states = {}
        for name, reader in readers.items():
            before = self._states.get(name)
            states[name] = state_of(reader.path) if name in asked or before is None else before
            if before is not None and (parts := changed(before, states[name])):
                found.append((event("changed", {"run": name, "parts": parts}), name))
        self._states = states
        return found, time.thread_time() - began


# JavaScript libraries, served from installed wheels instead of the network or the repository.


FILES = {
    "uPlot.js": ("uplot", "static/uPlot.iife.js"),
    "uPlot.css": ("uplot", "static/uPlot.min.css"),
}
"""Maps names under `/static/vendor/` to (package, path in it)."""


def vendored(name: str) -> Path | None:
    """Return the path of a library file; None if it is unknown or its package is missing."""
    if name not in FILES:
        return None
    package, place = FILES[name]
    spec = find_spec(package)
    roots = spec.submodule_search_locations if spec else None
    path = Path(next(iter(roots))) / place if roots else None
    return path if path is not None and path.is_file() else None


# App

PAGES = Path(__file__).resolve().parent.parent / "pages"


def new_app(catalogue: Catalogue, access: Access) -> FastAPI:
    stream = _EventStream(catalogue)

    @asynccontextmanager
    async def life(_: FastAPI):
        yield
        stream.over.set()
        end_prepared()

    app = FastAPI(title="Weft", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    app.add_middleware(Guard, access=access)
    app.add_exception_handler(WeftError, _refusal("refused", 400))
    app.add_exception_handler(NoSuchRunError, _refusal("gone", 404))
    app.add_exception_handler(404, _unknown)
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(RequestValidationError, _malformed)
    _add_runs(app, catalogue)
    _add_curves(app, catalogue)
    _add_pages(app, catalogue)
    _add_samples(app, catalogue)
    _add_requests(app, catalogue)

    @app.get("/api/events")
    async def events(runs: str = "") -> Response:
        asked = parted(runs)
        # nginx would hold the events back in a buffer.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream.events(asked), media_type="text/event-stream", headers=headers)

    @app.get("/static/vendor/{name}")
    def vendor(name: str) -> Response:
        path = vendored(name)
        if path is None:
            said = f"no package that is installed has the file {name!r}"
            return answer({"error": "unknown", "message": said}, 404)
        return FileResponse(path, headers={"cache-control": "no-cache"})

    app.mount("/static", _Pages(directory=PAGES), name="static")

    @app.get("/favicon.ico")
    def icon() -> Response:
        """Browsers request this address although the pages name another icon."""
        return Response(status_code=204)

    @app.get("/")
    def index() -> Response:
        return FileResponse(PAGES / "index.html", headers={"cache-control": "no-cache"})

    return app


class _Pages(StaticFiles):
    """The pages' files. Browsers revalidate them each time, since Weft may be updated."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def answer(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response; NaN and infinities become null."""
    try:
        # Fast path: nearly all answers have only finite numbers.
        text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), default=str)
    return Response(text, status, {"cache-control": "no-store"}, "application/json")


def _finite(value: Any) -> Any:
    """
    >>> _finite({"loss": [float("nan"), 1.0]})
    {'loss': [None, 1.0]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _refusal(kind: str, status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def refuse(_: Request, error: Exception) -> Response:
        text = error.text if isinstance(error, WeftError) else str(error)
        return answer({"error": kind, "message": text}, status)

    return refuse


async def _unknown(request: Request, _: Exception) -> Response:
    return answer({"error": "unknown", "message": f"there is no address {request.url.path}"}, 404)


async def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return answer({"error": "refused", "message": said}, 400)


async def _failed(_: Request, error: Exception) -> Response:
    message = f"the files of the run cannot be read: {type(error).__name__}: {error}"[:500]
    return answer({"error": "damaged", "message": message}, 500)


def _add_runs(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        found: list[dict[str, Any]] = []
        for reader in catalogue.readers.values():
            try:
                found.append(reader.summary)
            except Exception as error:  # a damaged file can raise anything; the other runs stay intact
                found.append(reader.damaged(f"{type(error).__name__}: {error}"[:500]))
        return answer({"folder": str(catalogue.root), "single": catalogue.single, "runs": found})

    def add(name: str, page: Callable[[RunReader], Any]) -> None:
        @app.get(f"/api/{name}")
        def _(run: str) -> Response:
            return answer(page(catalogue[run]))

    add("run", lambda run: run.described)
    add("alerts", lambda run: {"alerts": run.alerts})
    add("graph", graph_page)
    add("buffer", buffer_page)
    add("workers", workers_page)
    add("weights", run_pages.weights)


def _add_curves(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/metrics")
    def metrics(runs: str) -> Response:
        chosen = catalogue.chosen(runs)
        names = list(dict.fromkeys(name for reader in chosen for name in reader.metric_names))
        evaluations = list(dict.fromkeys(name for reader in chosen for name in reader.evaluations))
        known = [{"name": name, **meaning(name)} for name in names]
        return answer({"cards": cards(names, evaluations), "metrics": known})

    @app.get("/api/curves")
    def curves(
        runs: str,
        names: str,
        axis: Axis = "step",
        points: int = Query(800, ge=4, le=5000),
        start: float = -math.inf,
        end: float = math.inf,
    ) -> Response:
        chosen, wanted = catalogue.chosen(runs), parted(names)
        series = [one for reader in chosen for one in reader.curves(wanted, axis, points, (start, end))]
        marks = [mark for reader in chosen for mark in reader.marks(axis)]
        return answer({"series": series, "marks": marks})


def _add_pages(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/timeline")
    def timeline(
        run: str,
        start: float | None = None,
        end: float | None = None,
        width: int = Query(1200, ge=50, le=10_000),
        ranks: str = "",
        first: float | None = None,
        last: float | None = None,
    ) -> Response:
        steps = None if first is None or last is None else (first, last)
        return answer(timeline_page(catalogue[run], start, end, width, parted(ranks), steps))

    @app.get("/api/log")
    def log(run: str, worker: str, after: int = 0) -> Response:
        return answer(log_part(catalogue[run].path, worker, after))

    @app.get("/api/compare")
    def compare(a: str, b: str) -> Response:
        return answer(compare_page(catalogue[a], catalogue[b]))


def _add_samples(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/samples")
    def samples(asked: Annotated[_Page, Query()]) -> Response:
        return answer(catalogue[asked.run].sample_pages.samples(*asked.part))

    @app.get("/api/groups")
    def groups(asked: Annotated[_Page, Query()]) -> Response:
        return answer(catalogue[asked.run].sample_pages.groups(*asked.part))

    @app.get("/api/group")
    def group(run: str, id: int) -> Response:
        return answer(run_pages.group(catalogue[run], id))

    @app.get("/api/episode")
    def episode(
        run: str,
        id: Annotated[int, Query(ge=-(1 << 63), lt=1 << 63)],
        turn: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
    ) -> Response:
        reader = catalogue[run]
        return answer(reader.episode_pages.episode(id, turn, reader.facts.config))

    @app.get("/api/prompt")
    def prompt(run: str, key: str) -> Response:
        return answer(catalogue[run].sample_pages.prompt(key))


def _add_requests(app: FastAPI, catalogue: Catalogue) -> None:
    """Add routes with a JSON body or a header, which forms on other sites cannot send."""

    @app.post("/api/sql")
    async def sql(asked: _Question) -> Response:
        try:
            return answer(
                await run_in_threadpool(lambda: run_pages.sql(catalogue[asked.run], asked.query))
            )
        finally:
            # Prepare on the server's thread: the helper process ends with the thread that starts
            # it, and pool threads end early.
            prepare()

    @app.post("/api/stop", dependencies=[Depends(_meant)])
    def stop(asked: _Run) -> Response:
        return answer(run_pages.stop(catalogue[asked.run]))

    @app.post("/api/stacks", dependencies=[Depends(_meant)])
    def stacks(asked: _Worker) -> Response:
        return answer(run_pages.stacks(catalogue[asked.run], asked.worker))


class _Page(BaseModel):
    run: str
    filter: str = ""
    search: str = ""
    sort: str = ""
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0
    limit: Annotated[int, Query(ge=1, le=500)] = 50

    @property
    def part(self) -> tuple[str, str, str, int, int]:
        return self.filter, self.search, self.sort, self.offset, self.limit


class _Run(Config):
    run: str
    """Name of the run."""


class _Worker(_Run):
    worker: str
    """Worker, such as `actor[0]`."""


class _Question(_Run):
    query: str
    """Query in SQL."""


def _meant(request: Request) -> None:
    if request.headers.get("x-weft-stop") != "yes":
        raise UserError("this request needs the header x-weft-stop: yes, because it affects a run")
