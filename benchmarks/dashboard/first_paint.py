"""The first contentful paint of the curves of a large run, in headless Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Any

from dashboard_process import TOKEN, dashboard_over, until_indexed

VISITS = 5
PAINT = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"


def measure(large: Path, folder: Path) -> dict[str, Any]:
    """`first_paint_ms`: median of several visits, each of a new browser context."""
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
            page = browser.new_context(extra_http_headers={"authorization": f"Bearer {TOKEN}"}).new_page()
            page.goto(f"{client.base_url}#/curves?run={run}")
            page.wait_for_function(f"{PAINT} !== undefined")
            paints.append(float(page.evaluate(PAINT)))
            page.context.close()
        browser.close()
    return {"first_paint_ms": round(median(paints), 1)}
