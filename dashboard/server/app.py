"""The addresses of the dashboard, and what each answers. All of them read files of runs; `stop` and `stacks` write a request that the
driver looks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.responses import FileResponse, Response, StreamingResponse

from ...dataflow.errors import NoSuchRunError, WeftError
from ..reading.cards import cards, meaning
from ..reading.catalogue import Catalogue
from ..reading.curves import Axis
from .event_stream import EventStream
from .safety import Access, Guard
from .vendored import vendored

PAGES = Path(__file__).resolve().parent.parent / "pages"


def new_app(catalogue: Catalogue, access: Access) -> FastAPI:
    """The dashboard over these runs.

    Args:
        catalogue: of the runs.
        access: who may ask.
    """
    stream = EventStream(catalogue)

    @asynccontextmanager
    async def life(_: FastAPI):
        yield
        stream.over.set()

    app = FastAPI(title="Weft", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    app.add_middleware(Guard, access=access)
    app.add_exception_handler(WeftError, _refused)
    app.add_exception_handler(NoSuchRunError, _gone)
    app.add_exception_handler(404, _unknown)
    app.add_exception_handler(RequestValidationError, _malformed)
    _add_runs(app, catalogue)
    _add_curves(app, catalogue)

    @app.get("/api/events")
    async def events(runs: str = "") -> Response:
        asked = [name for name in runs.split(",") if name]
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream.events(asked), media_type="text/event-stream", headers=headers)

    @app.get("/static/vendor/{name}")
    def vendor(name: str) -> Response:
        path = vendored(name)
        if path is None:
            return answer({"error": "unknown", "message": f"no package that is installed has the file {name!r}"}, 404)
        return FileResponse(path, headers={"cache-control": "no-cache"})

    app.mount("/static", Pages(directory=PAGES), name="static")

    @app.get("/")
    def index() -> Response:
        return FileResponse(PAGES / "index.html", headers={"cache-control": "no-cache"})

    return app


class Pages(StaticFiles):
    """The files of the pages. Browsers ask each time whether they have changed: another version of Weft may listen here tomorrow."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def answer(value: Any, status: int = 200) -> Response:
    """A value as JSON; numbers that are not finite are null."""
    try:
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


async def _refused(_: Request, error: Exception) -> Response:
    text = error.text if isinstance(error, WeftError) else str(error)
    return answer({"error": "refused", "message": text}, 400)


async def _gone(_: Request, error: Exception) -> Response:
    return answer({"error": "gone", "message": error.text if isinstance(error, WeftError) else str(error)}, 404)


async def _unknown(request: Request, _: Exception) -> Response:
    return answer({"error": "unknown", "message": f"there is no address {request.url.path}"}, 404)


async def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return answer({"error": "refused", "message": said}, 400)


def _add_runs(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        found = [reader.summary for reader in catalogue.readers.values()]
        return answer({"folder": str(catalogue.root), "single": catalogue.single, "runs": found})

    @app.get("/api/run")
    def run(run: str) -> Response:
        return answer(catalogue[run].described)

    @app.get("/api/alerts")
    def alerts(run: str) -> Response:
        return answer({"run": run, "alerts": catalogue[run].alerts})


def _add_curves(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/metrics")
    def metrics(runs: str) -> Response:
        chosen = catalogue.chosen(runs)
        measured = {reader.name: reader.metric_names for reader in chosen}
        names = list(dict.fromkeys(name for own in measured.values() for name in own))
        evaluations = list(dict.fromkeys(name for reader in chosen for name in reader.evaluations))
        known = [
            {"name": name, **meaning(name), "runs": [run for run, own in measured.items() if name in own]}
            for name in names
        ]
        return answer({"cards": cards(names, evaluations), "metrics": known})

    @app.get("/api/curves")
    def curves(
        runs: str,
        names: str,
        axis: Axis = "step",
        points: int = Query(800, ge=4, le=5000),
        start: float | None = None,
        end: float | None = None,
    ) -> Response:
        window = None if start is None and end is None else (_or(start, -math.inf), _or(end, math.inf))
        chosen, wanted = catalogue.chosen(runs), names.split(",")
        series = [one for reader in chosen for one in reader.curves(wanted, axis, points, window)]
        marks = [mark for reader in chosen for mark in reader.marks(axis)]
        return answer({"axis": axis, "series": series, "marks": marks})


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
