"""Latency of pages: from the end of a step until a client of the event stream has its value."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from dashboard_process import dashboard_over

STEPS = 30
STEP_S = 0.7


def measure(large: Path | None, folder: Path) -> dict[str, Any]:
    """Return `live_lag_s`."""
    runs = folder / "live"
    program = Path(__file__).with_name("paced_run.py")
    command = [sys.executable, str(program), str(runs), "--steps", str(STEPS), "--step-s", str(STEP_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # wait until it has started
            began_at, seen = _follow(runs)
            ended = dict(json.loads(line) for line in process.stdout if line.startswith("["))
        finally:
            process.terminate()
    # Steps that ended before the dashboard was up only measure its start.
    lags = [at - ended[step] for step, at in seen.items() if ended.get(step, 0.0) > began_at]
    print(f"  {len(lags)} steps: median {np.median(lags):.2f} s, largest {max(lags):.2f} s", flush=True)
    return {"live_lag_s": round(float(np.percentile(lags, 95)), 3)}


def _follow(runs: Path) -> tuple[float, dict[int, float]]:
    """Return the time of the first step, and a mapping from each step to the time of its value."""
    seen: dict[int, float] = {}
    with (
        dashboard_over(runs) as client,
        client.stream("GET", "/api/events", params={"runs": "paced"}) as events,
    ):
        for line in events.iter_lines():
            if not line.startswith("data:") or "metrics" not in line:
                continue
            asked = {"runs": "paced", "names": "rows", "points": 5000}
            said = client.get("/api/curves", params={**asked, "names": "step"}).json()["series"]
            for step in said[0]["x"] if said else ():
                seen.setdefault(int(step), time.time())
            if STEPS - 1 in seen:
                break
    return min(seen.values()), seen
