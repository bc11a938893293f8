"""The command line's speed and clarity, and the accuracy of plans.

    python benchmarks/operate.py                  # minutes
    python benchmarks/operate.py --parts help plan

| figure | what it is | wanted |
|---|---|---|
| `help_ms` | milliseconds of `weft --help`, fastest of several; `help_median_ms` is their median | 500 |
| `bad_settings_clear` | share of `tests/controllers/mistakes.py` that ends with exit code 2, the place, and no traceback | 1 |
| `bad_settings_max_s` | seconds of the slowest of them, each in a separate process | 2 |
| `plan_memory_error` | largest relative error of planned bytes, against tensors (also within a pass) and files of one rank | 0.1 |
| `plan_resident_error` | the same for host memory of small examples under Ray: per rank with a model, and in total | 0.1 |
| `submit_overhead_s` | seconds of `weft submit` beyond `ray job submit` of the same script | 5 |
| `tracker_overhead_share` | share of the driver's time that trackers take | 0.01 |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "operate"))
FIGURES = (
    "help_ms", "bad_settings_clear", "bad_settings_max_s", "plan_memory_error", "plan_resident_error", "submit_overhead_s",
    "tracker_overhead_share",
)  # fmt: skip
PARTS = {
    "help": "help_time",
    "bad_settings": "bad_settings",
    "plan": "plan_memory",
    "plan_runs": "plan_runs",
    "submit": "submit",
    "trackers": "tracker_overhead",
}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
