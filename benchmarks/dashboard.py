"""The dashboard: page times, latency, and cost for a run.

    python benchmarks/dashboard.py                      # minutes; makes a large run first
    python benchmarks/dashboard.py --large DIRECTORY    # use a run of benchmarks/dashboard/large_run.py
    python benchmarks/dashboard.py --only pages live

| figure | what it is | wanted |
|---|---|---|
| `page_p95_ms` | 95th percentile of the data's time over HTTP, slowest page, 10,000 steps and 100,000 samples | 150 |
| `first_paint_ms` | first contentful paint of that run's curves in headless Chromium; null without Playwright and Chromium | 1000 |
| `live_lag_s` | 95th percentile of the time from the end of a step until a client of the event stream has its value | 2 |
| `step_overhead_share` | share of a run's time that the driver spends on state for pages, with ten pages open | 0.01 |
| `wheel_added_mb` | the dashboard's files in the wheel, compressed | 2 |

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "dashboard"), str(HERE), str(HERE.parent)]
FIGURES = ("page_p95_ms", "first_paint_ms", "live_lag_s", "step_overhead_share", "wheel_added_mb")
PARTS = {
    "pages": "page_times",
    "paint": "first_paint",
    "live": "live_lag",
    "overhead": "step_overhead",
    "wheel": "wheel_size",
}
"""Maps a part to its module, whose `measure(large, folder)` returns figures by name."""


def main() -> None:
    from machine import load

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--large", type=Path)
    given = parser.parse_args()
    figures = dict.fromkeys(FIGURES)
    with tempfile.TemporaryDirectory(prefix="weft-dashboard-") as scratch:
        large = given.large
        if large is None and {"pages", "paint"} & {*given.only}:
            print("making a run of 10,000 steps and 100,000 samples ...", flush=True)
            large = importlib.import_module("large_run").make(Path(scratch) / "runs" / "large")
        for part in given.only:
            found = importlib.import_module(PARTS[part]).measure(large, Path(scratch))
            print(f"{part}: {found}; load {load()}", flush=True)
            figures |= found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
