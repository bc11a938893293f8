"""The tail of synchronous rollouts: how much a few long responses cost, and what shortens them.

    python benchmarks/tail.py                        # ten minutes
    python benchmarks/tail.py --parts simulation     # a minute

| figure | what it is | wanted |
|---|---|---|
| `sync_speedup_256` | seconds of generation per step in order of the prompts / with forecasts and rounds, 256 prompts, simulated | 2 |
| `longest_first_speedup_256` | the same with forecasts alone | none |
| `first_epoch_speedup_256` | the same in the first epoch, when only siblings are known | none |
| `tail_idle_change` | change of the share of slots that are idle while others generate | -0.7 |
| `length_bias` | mean length of trained over that of sampled responses, minus 1: a 95 % interval | contains 0 |
| `real_speedup` | as `longest_first_speedup_256`, with two vLLM replicas on this machine | 1.3 |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "tail"), str(HERE / "schedules")]
FIGURES = (
    *("sync_speedup_256", "longest_first_speedup_256", "first_epoch_speedup_256"),
    *("tail_idle_change", "length_bias", "real_speedup"),
)
PARTS = {"simulation": "simulated_tail", "real": "real_tail"}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
