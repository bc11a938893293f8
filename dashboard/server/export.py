"""Export: one run as a single HTML file that needs no server, network or other files.

The page modules become one inline script. The file's content security policy allows only its own
scripts and styles, by hash.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from fastapi import FastAPI

from ...dataflow.errors import UserError
from ...dataflow.runs.files import replacing
from ...dataflow.untrusted_text import without_secrets
from ..reading.catalogue import Catalogue, joined
from .app import PAGES, new_app, vendored
from .safety import Access

GROUPS = 50
"""Sample groups per list, as the pages request them."""
MAX_SAMPLES_BYTES = 24 << 20
"""[bytes] Maximum size of the exported samples with their tokens."""
MOST_UNFOLDED = 8
"""Maximum number of timelines with the ranks of one worker group; one more has the ranks of all."""
ENTRY = "app.js"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";?[ \t]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function\*?|function\*?|const|class) +([\w$]+))", re.MULTILINE)


def export_run(run: Path, file: Path) -> dict[str, Any]:
    """Write one run as a single HTML file. Return the file, its bytes, and the numbers of exported
    and of all sample groups. Raises UserError if there is no such run or the file cannot be
    written."""
    catalogue = Catalogue(run)
    if not catalogue.single:
        raise UserError(f"{run} is not the directory of a run; an export takes one run")
    [name] = catalogue.readers
    catalogue[name].samples.wait(math.inf)
    with ThreadPoolExecutor(1) as thread:  # a notebook already runs an event loop in this thread
        # The requests stay in this process, so they need no token.
        asked = thread.submit(lambda: asyncio.run(_answers(new_app(catalogue, Access("")), name)))
        answers, groups, total = asked.result()
    page = _page({each: without_secrets(found, by_name=False) for each, found in answers.items()})
    try:
        with replacing(file) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the export cannot be written to {file}: {error}") from None
    return {"file": str(file), "bytes": len(page.encode()), "groups": groups, "of_groups": total}


# The answers to the pages' requests


async def _answers(app: FastAPI, run: str) -> tuple[dict[str, Any], int, int]:
    """Map the addresses that a run's pages request to answers. Also return the exported and the
    total number of sample groups."""
    answers: dict[str, Any] = {}

    async def add(page: str, **values: Any) -> Any:
        target = address(page, values)
        answers[target] = await ask(app, target)
        return answers[target]

    await add("runs")
    for page in ("run", "alerts", "graph", "buffer", "workers", "weights"):
        await add(page, run=run)
    timeline = await add("timeline", run=run, width=1200)
    for unfolded in unfoldings(list(timeline["ranks"])):
        await add("timeline", run=run, width=1200, ranks=unfolded)
    one = joined([run])
    names = _curves_of((await add("metrics", runs=one))["cards"])
    for axis in ("step", "time_s", "samples") if names else ():
        await add("curves", runs=one, names=joined(names), axis=axis, points=600)
    await add("samples", run=run, limit=GROUPS)
    listed = await add("groups", run=run, limit=GROUPS)
    size, groups = 0, 0
    for group in listed["groups"]:
        target = address("group", {"run": run, "id": group["group"]})
        found = await ask(app, target)
        size += len(json.dumps(found))
        if size > MAX_SAMPLES_BYTES:
            break
        answers[target], groups = found, groups + 1
        # The first page of each episode; the sizes of later groups count it.
        for episode in dict.fromkeys(one["episode"] for one in found["samples"] if one["episode"]):
            size += len(json.dumps(await add("episode", run=run, id=episode)))
    return answers, groups, listed["total"]


def unfoldings(groups: Sequence[str]) -> list[str]:
    """Return which groups show their ranks in each exported timeline: one of the first, or all.

    >>> unfoldings(["actor"]), unfoldings(["actor", "rollout"]), unfoldings([])
    (['actor'], ['actor', 'rollout', 'actor,rollout'], [])
    >>> unfoldings("abcdefghi")[-2:]
    ['h', 'a,b,c,d,e,f,g,h,i']
    """
    alone = [joined([group]) for group in groups[:MOST_UNFOLDED]]
    return list(dict.fromkeys([*alone, joined(groups)])) if groups else []


def _curves_of(cards: list[dict[str, Any]]) -> list[str]:
    found: list[str | None] = []
    for card in cards:
        bands = [name for pair in card["bands"].values() for name in pair]
        found += [*card["names"], card["spread"], card["beside"], *card["lost"], *bands]
    return list(dict.fromkeys(name for name in found if name))


def address(name: str, values: Mapping[str, Any]) -> str:
    """Return an address like the pages' `api.js`, with sorted, form-encoded parameters.

    >>> address("curves", {"runs": "a b", "names": "reward/mean,x"})
    '/api/curves?names=reward%2Fmean%2Cx&runs=a+b'
    """
    parts = [
        f"{quote_plus(key, safe='*')}={quote_plus(str(values[key]), safe='*')}" for key in sorted(values)
    ]
    # Unlike `quote_plus`, the pages' URLSearchParams keeps * and escapes ~.
    return f"/api/{name}" + (f"?{'&'.join(parts)}" if parts else "").replace("~", "%7E")


async def ask(app: FastAPI, target: str) -> Any:
    """Return the dashboard's answer at an address. Raises UserError if the answer is an error."""
    # Call the app directly: thousands of metric names exceed HTTP clients' limits on addresses.
    path, _, query = target.partition("?")
    body, status = bytearray(), [0]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        status[0] = message.get("status", status[0])
        body.extend(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost")],
        "scheme": "http",
        "server": ("localhost", 80),
        "http_version": "1.1",
        "root_path": "",
        "client": ("localhost", 1),
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    if status[0] != 200:
        raise UserError(f"{target} cannot be exported: {body.decode()}")
    return json.loads(body)


# The file


def _page(answers: Mapping[str, Any]) -> str:
    """Return `index.html` with scripts, styles and data inline."""
    html = (PAGES / "index.html").read_text(encoding="utf-8")
    scripts: list[str] = []
    styles: list[str] = []

    def script(found: re.Match[str]) -> str:
        text = linked(PAGES) if found[1] == f"/static/{ENTRY}" else _static(found[1])
        if "</script" in text.lower():
            raise UserError(f"{found[1]} cannot be embedded in a page: it contains </script")
        scripts.append(text)
        kind = ' type="module"' if found[1] == f"/static/{ENTRY}" else ""
        return f"<script{kind}>{text}</script>"

    def style(found: re.Match[str]) -> str:
        styles.append(_static(found[1]))
        return f"<style>{styles[-1]}</style>"

    def icon(found: re.Match[str]) -> str:
        data = base64.b64encode(_static(found[1]).encode()).decode()
        return f'<link rel="icon" type="image/svg+xml" href="data:image/svg+xml;base64,{data}">'

    html = re.sub(r'<link rel="icon" href="([^"]+)"[^>]*>', icon, html)
    html = re.sub(r'<link rel="stylesheet" href="([^"]+)">', style, html)
    html = re.sub(r'<script src="([^"]+)"[^>]*></script>', script, html)
    # Escape "<", which could end the script element.
    data = json.dumps(answers, separators=(",", ":")).replace("<", "\\u003c")
    html = html.replace(
        "</body>", f'<script type="application/json" id="exported">{data}</script>\n</body>'
    )
    allowed = f"script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1)


def _hashes(texts: list[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{each}'" for each in found) or "'none'"


def _static(target: str) -> str:
    """Return the text of a file under `/static/`; empty if its package is not installed."""
    name = target.removeprefix("/static/")
    path = vendored(name.removeprefix("vendor/")) if name.startswith("vendor/") else PAGES / name
    return "" if path is None else path.read_text(encoding="utf-8")


def linked(folder: Path) -> str:
    """Return a module and its imports as one script.

    Each module becomes a function that returns its exports. Imports must be lines `import { a, b }
    from "./NAME.js";` without cycles, and exports functions, constants or classes that are exported
    at their declaration (otherwise a UserError).
    """
    # Browsers do not load modules into a page from a file.
    parts = [_as_function(folder / name) for name in dict.fromkeys(_order(folder, ENTRY, ()))]
    return '"use strict";\n' + "\n".join(parts)


def _order(folder: Path, name: str, above: tuple[str, ...]) -> Iterator[str]:
    """Yield modules after their imports."""
    if name in above:
        raise UserError(f"modules import each other in a cycle: {' -> '.join((*above, name))}")
    for found in _IMPORT.finditer((folder / name).read_text(encoding="utf-8")):
        yield from _order(folder, found[2], (*above, name))
    yield name


def _as_function(path: Path) -> str:
    text = path.read_text(encoding="utf-8")

    def imported(found: re.Match[str]) -> str:
        parts = (part.strip() for part in found[1].split(","))
        names = ", ".join(part.replace(" as ", ": ") for part in parts if part)
        return f"const {{ {names} }} = {_variable(found[2])};"

    body = _IMPORT.sub(imported, text)
    names = [found[2] for found in _EXPORT.finditer(body)]
    body = _EXPORT.sub(r"\1", body)
    if left := re.search(r"^(import|export)\b.*$", body, re.MULTILINE):
        raise UserError(f"{path.name} cannot be exported: it has {left[0]!r}")
    return f"const {_variable(path.name)} = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();"


def _variable(name: str) -> str:
    """
    >>> _variable("sample-list.js")
    'module_sample_list'
    """
    return f"module_{re.sub(r'[^a-zA-Z0-9]', '_', name.removesuffix('.js'))}"
