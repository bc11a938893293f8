"""The tail of synchronous rollouts: how much a few long responses cost, and what shortens them.

    python benchmarks/tail.py                        # fifteen minutes, on an idle machine
    python benchmarks/tail.py --parts simulation     # three minutes

| figure | what it is | wanted |
|---|---|---|
| `sync_speedup_256` | seconds of generation in order of the prompts / with forecasts, rounds and migration; 256 prompts, simulated | 2 |
| `sync_speedup_by_share` | the same by the share of the variance of log lengths that the prompt explains; above: 0.7 | none |
| `longest_first_speedup_256` | the same with forecasts alone | none |
| `migration_speedup_256` | the same with forecasts and migration | none |
| `rounds_speedup_256` | the same with forecasts and rounds | none |
| `longest_alone_speedup_256` | the same with rounds if a step took as long as its longest response alone | none |
| `first_epoch_speedup_256` | the same in the first epoch, when only siblings are known | none |
| `tail_idle_change` | change of the seconds without work of a replica, with all three | -0.7 |
| `migration_idle_change` | the same with forecasts and migration | none |
| `length_bias` | relative difference of the mean lengths of trained and sampled responses: a 95 % interval | contains 0 |
| `real_speedup` | as `sync_speedup_256`, with two vLLM replicas on this machine | 1.3 |
| `real_rounds_speedup` | the same without migration | none |
| `real_speedup_by_steps` | `real_speedup` if every step of the engine took the time that its batch takes on an idle machine | none |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "tail"), str(HERE / "schedules")]
FIGURES = (
    *("sync_speedup_256", "sync_speedup_by_share", "longest_first_speedup_256"),
    *("migration_speedup_256", "rounds_speedup_256", "longest_alone_speedup_256"),
    *("first_epoch_speedup_256", "tail_idle_change", "migration_idle_change", "length_bias"),
    *("real_speedup", "real_rounds_speedup", "real_speedup_by_steps"),
)
PARTS = {"simulation": "simulated_tail", "real": "real_tail"}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
