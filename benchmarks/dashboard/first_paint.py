"""The first contentful paint of the curves of a large run, in headless Chromium."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

from dashboard_process import TOKEN, dashboard_over, until_indexed

VISITS = 5
DEADLINE_S = 30.0
PAINT = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"


def measure(large: Path, folder: Path) -> dict[str, Any]:
    """Return `first_paint_ms`: the median of several visits, each in a new browser context."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or chromium is None:
        print("  not measured: it needs Playwright and Chromium", flush=True)
        return {"first_paint_ms": None}
    with dashboard_over(large) as client, sync_playwright() as playwright:
        run = client.get("/api/runs").json()["runs"][0]["run"]
        until_indexed(client, run)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        paints: list[float] = []
        for _ in range(VISITS):
            page = browser.new_context(
                extra_http_headers={"authorization": f"Bearer {TOKEN}"}
            ).new_page()
            page.goto(f"{client.base_url}#/curves?run={run}")
            deadline = time.monotonic() + DEADLINE_S
            while (
                paint := page.evaluate(PAINT)
            ) is None:  # the page's content policy forbids waiting in a function of ours
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing was painted in {DEADLINE_S:.0f} s at {page.url}")
                time.sleep(0.01)
            paints.append(float(paint))
            page.context.close()
        browser.close()
    return {"first_paint_ms": round(median(paints), 1)}
