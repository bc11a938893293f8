"""The driver's cost per row, call, resume and start.

    python benchmarks/driver.py                                              # all figures; 1e6 rows in flight take minutes
    python benchmarks/driver.py --only row_us --rows 100000 --profile 40     # the slowest functions; profiling adds time

| figure | what it is | wanted |
|---|---|---|
| `row_us` | total driver CPU time per row, in microseconds, at the largest requested number of rows in flight | 20 |
| `by_rows_in_flight` | the same for each number of rows, with the simulator's time, and the second half's cost over the first's | |
| `call_rank_us` | the same per call and rank | 200 |
| `growth_1e3_to_1e6` | a row's cost with 1e6 rows in flight over that with 1e3, with equal steps and ranks | 1.3 |
| `dispatch_tokens` | tokens that 8 training ranks compute for 64 prompts x 8 samples, over the minimum (`dispatch_tokens.py`) | 1.05 |
| `dispatch_imbalance` | highest cost of a rank over the mean, minus 1, for the same | 0.01 |
| `dispatch_by_case` | both, and the time to deal a row, also for 2 and 32 ranks | |
| `resume_mb_s` | MB/s of log and ledgers that a resume reads after a kill (`recovery/resume.py`) | 500 |
| `start_bytes_per_rank_ratio` | bytes that a rank reads or holds to load a model, over its shard (`model_loading.py`) | near 1 |

Each figure is a function in a module of `driver/` or in the named program. The last line printed is
one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "driver"), str(HERE / "recovery"), str(HERE)]


def _figure(module: str, function: str, *arguments: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments)


FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "row_us": lambda asked: _figure("row_cost", "row_us", asked.rows, asked.ranks, asked.profile),
    "call_rank_us": lambda asked: {"call_rank_us": _figure("call_cost", "call_rank_us", asked.ranks)},
    "growth_1e3_to_1e6": lambda _: _figure("row_cost", "growth", (1_000, 1_000_000)),
    "dispatch_tokens": lambda _: _figure("dispatch_tokens", "dispatch_tokens"),
    "resume_mb_s": lambda _: {"resume_mb_s": _figure("resume", "resume_mb_s")},
    "start_bytes_per_rank_ratio": lambda _: {
        "start_bytes_per_rank_ratio": _figure("model_loading", "start_bytes_per_rank_ratio")
    },
}
"""Maps a figure to a function that returns it, along with details."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), metavar="FIGURE"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=(1_000, 10_000, 100_000, 1_000_000),
        help="rows in flight for row_us; one run per number",
    )
    parser.add_argument("--ranks", type=int, default=512, help="generating ranks; as many ranks train")
    parser.add_argument("--profile", type=int, default=0, help="show this many of the slowest functions")
    asked = parser.parse_args()
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    for name in asked.only:
        figures |= FIGURES[name](asked)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
