"""The driver's cost of a watchable run with ten open pages: copies in its loop, and a thread."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dashboard_process import dashboard_over

from weft.controllers.loop.live_state import LiveState

PAGES = (
    "graph",
    "timeline",
    "buffer",
    "workers",
    "weights",
    "alerts",
    "groups",
    "samples",
    "run",
    "graph",
)
STEPS = 400


def measure(large: Path | None, folder: Path) -> dict[str, Any]:
    """Return `step_overhead_share`."""
    from paced_run import paced

    spent = {"loop": 0.0, "thread": 0.0}
    note, write = LiveState.note, LiveState._write

    def timed_note(self: LiveState) -> None:
        began = time.perf_counter()
        note(self)
        spent["loop"] += time.perf_counter() - began

    def timed_write(self: LiveState) -> None:
        began = time.thread_time()
        write(self)
        spent["thread"] += time.thread_time() - began

    over = threading.Event()
    with ExitStack() as stack, paced(folder / "overhead", STEPS, 0.02, tell=False) as driver:
        client = stack.enter_context(dashboard_over(folder / "overhead"))

        def watch(page: str) -> None:
            while not over.is_set():
                client.get(f"/api/{page}", params={"run": "paced"})
                over.wait(1.0)

        pages = [threading.Thread(target=watch, args=(page,)) for page in PAGES]
        for page in pages:
            page.start()
        try:
            LiveState.note, LiveState._write = timed_note, timed_write
            began = time.perf_counter()
            driver.run()
            seconds = time.perf_counter() - began
        finally:
            LiveState.note, LiveState._write = note, write
            over.set()
            for page in pages:
                page.join()
    shares = {name: round(value / seconds, 5) for name, value in spent.items()}
    print(f"  {STEPS} steps in {seconds:.1f} s: {shares}", flush=True)
    return {"step_overhead_share": round(sum(spent.values()) / seconds, 5)}
