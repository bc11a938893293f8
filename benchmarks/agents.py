"""Agents: exact tokens, speed, failures and containment.

    python benchmarks/agents.py                     # minutes
    python benchmarks/agents.py --parts contained

| figure | what it is | wanted |
|---|---|---|
| `contained` | attacks of `tests/workers/attacks.py` that fail to leave the sandbox, of 12 | 12 |
| `sandbox_start_ms` | milliseconds from a new sandbox to the end of `true` in it, median of 20 | none |
| `sandbox_run_ms` | milliseconds of another `true` in the same sandbox, median of 20 | none |
| `embodied` | seconds of 80 steps of environments with one part and with two, on a fake clock | 320, 161 |
| `endpoint_overhead` | tokens/s of the bare engine over the gateway's with 64 sessions, median of 5 | at most 1.1 |
| `bare_tokens_per_s` | tokens per second of the bare engine, median of 5 | none |
| `idle_share` | share of time in which the engine has no request, with slow tools in 64 sessions | at most 0.15 |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "agents"), str(HERE)]
FIGURES = (
    "contained",
    "sandbox_start_ms",
    "sandbox_run_ms",
    "embodied",
    "endpoint_overhead",
    "bare_tokens_per_s",
    "idle_share",
)
PARTS = {"contained": "contained", "embodied": "embodied", "throughput": "throughput"}
"""Maps a part to its module, whose `measure()` returns figures by name."""


def main() -> None:
    from machine import load

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    figures = dict.fromkeys(FIGURES)
    for part in parser.parse_args().parts:
        found = importlib.import_module(PARTS[part]).measure()
        print(f"{part}: {found}; load {load()}", flush=True)
        figures |= found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
