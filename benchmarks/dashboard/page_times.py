"""Times of the data of each page of a large run, requested in the order of a person's visit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from dashboard_process import dashboard_over, until_indexed

TIMES = 30
"""Requests per page."""
READ_S = 1.0
"""[s] Pause of a person between two queries."""
AT_ONCE = "sql at once"
"""Queries without a pause: printed with the pages, but not counted."""
SQL = "select step, avg(reward) from samples where step > {step} group by step order by step"


def measure(large: Path, folder: Path) -> dict[str, Any]:
    """Return `page_p95_ms`."""
    with dashboard_over(large) as client:
        run = client.get("/api/runs").json()["runs"][0]["run"]
        print(f"  the samples are indexed after {until_indexed(client, run):.1f} s", flush=True)
        names = [
            name
            for card in client.get("/api/metrics", params={"runs": run}).json()["cards"]
            for name in card["names"]
        ]
        slowest = 0.0
        for page, questions in _pages(client, run, names).items():
            took = [
                _timed(client, *question, after_s=READ_S if page == "sql" else 0.0)
                for question in questions
            ]
            p50, p95 = np.percentile(took, (50, 95))
            if page != AT_ONCE:
                slowest = max(slowest, float(p95))
            print(f"  {page:12} p50 {p50:6.1f} ms  p95 {p95:6.1f} ms  of {len(took)}", flush=True)
    return {"page_p95_ms": round(slowest, 1)}


def _timed(client: httpx.Client, address: str, asked: dict[str, Any], after_s: float = 0.0) -> float:
    time.sleep(after_s)
    began = time.monotonic()
    said = (
        client.post(address, json=asked) if address == "/api/sql" else client.get(address, params=asked)
    )
    said.raise_for_status()
    return 1000 * (time.monotonic() - began)


def _pages(
    client: httpx.Client, run: str, names: list[str]
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return a mapping from each page to its requests, in many variants."""
    one = {"run": run}
    groups = client.get("/api/groups", params={**one, "limit": 50}).json()["groups"]
    timeline = client.get("/api/timeline", params=one).json()["total_s"]
    windows = [
        {**one, "start": timeline * k / 40, "end": timeline * (k + 1 + k % 7) / 40}
        for k in range(TIMES - 5)
    ]
    words = ("answer", "carry one", "Problem 7", "nothing like it", "four")
    filters = (
        "reward > 0.9",
        "step >= 9000 and length > 100",
        "finish_reason = length",
        "response ~ gives",
        "",
    )
    found = {
        "runs": [("/api/runs", {})] * TIMES,
        "run": [("/api/run", one)] * TIMES,
        "curves": [("/api/curves", {"runs": run, "names": ",".join(names), **way}) for way in _curves()],
        "graph": [("/api/graph", one)] * TIMES,
        "timeline": [("/api/timeline", asked) for asked in ([one] * 5 + windows)],
        "groups": [
            ("/api/groups", {**one, "sort": sort, **way})
            for sort in ("-step", "-mean", "spread")
            for way in _ways(words, filters)
        ],
        "samples": [
            ("/api/samples", {**one, "sort": sort, **way})
            for sort in ("-reward", "length", "id")
            for way in _ways(words, filters)
        ],
        "group": [("/api/group", {**one, "id": group["group"]}) for group in groups[:TIMES]],
        "prompt": [("/api/prompt", {**one, "key": group["prompt_key"]}) for group in groups[:TIMES]],
        "buffer": [("/api/buffer", one)] * TIMES,
        "workers": [("/api/workers", one)] * TIMES,
        "weights": [("/api/weights", one)] * TIMES,
        "alerts": [("/api/alerts", one)] * TIMES,
        "sql": [("/api/sql", {**one, "query": SQL.format(step=k)}) for k in range(TIMES)],
        AT_ONCE: [("/api/sql", {**one, "query": SQL.format(step=k)}) for k in range(TIMES)],
    }
    return found


def _curves() -> Iterator[dict[str, Any]]:
    for k in range(TIMES // 3):
        yield from (
            {"axis": axis, "points": 800, **({"start": 300 * k, "end": 300 * k + 4000} if k % 2 else {})}
            for axis in ("step", "time_s", "samples")
        )


def _ways(words: tuple[str, ...], filters: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    yield from ({"search": word} for word in words)
    yield from ({"filter": condition} for condition in filters)
