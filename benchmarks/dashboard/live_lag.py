"""How late a page is: from the end of a step until a client that follows the events has the step's value."""

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
    """`live_lag_s`."""
    runs = folder / "live"
    program = Path(__file__).with_name("paced_run.py")
    command = [sys.executable, str(program), str(runs), "--steps", str(STEPS), "--step-s", str(STEP_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            seen = _follow(runs)
            ended = dict(json.loads(line) for line in process.stdout if line.startswith("["))
        finally:
            process.terminate()
    lags = [at - ended[step] for step, at in seen.items() if step in ended]
    print(f"  {len(lags)} steps: median {np.median(lags):.2f} s, largest {max(lags):.2f} s", flush=True)
    return {"live_lag_s": round(float(np.percentile(lags, 95)), 3)}


def _follow(runs: Path) -> dict[int, float]:
    """Step -> when its value was there."""
    seen: dict[int, float] = {}
    with dashboard_over(runs) as client, client.stream("GET", "/api/events", params={"runs": "paced"}) as events:
        for line in events.iter_lines():
            if not line.startswith("data:") or "metrics" not in line:
                continue
            asked = {"runs": "paced", "names": "rows", "points": 5000}
            said = client.get("/api/curves", params={**asked, "names": "step"}).json()["series"]
            for step in said[0]["x"] if said else ():
                seen.setdefault(int(step), time.time())
            if STEPS - 1 in seen:
                return {step: at for step, at in seen.items() if step >= 3}
    return seen
