"""A dashboard in a separate process, and a client for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

TOKEN = "measured"


@contextmanager
def dashboard_over(folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of a dashboard on this folder; the dashboard ends with the block."""
    command = [sys.executable, "-m", "weft", "dashboard", str(folder), "--token", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.rpartition(" ")[2].partition("?")[0]
            headers = {"authorization": f"Bearer {TOKEN}"}
            with httpx.Client(base_url=address, headers=headers, timeout=60, trust_env=False) as client:
                yield client
        finally:
            process.terminate()


def until_indexed(client: httpx.Client, run: str) -> float:
    """Return the seconds until all samples of a run are indexed."""
    began = time.monotonic()
    while True:
        indexed = client.get("/api/groups", params={"run": run}).json()["indexed"]
        if indexed["read"] == indexed["files"]:
            return time.monotonic() - began
        time.sleep(0.1)
