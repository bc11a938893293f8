"""Training methods and rollout features: how exact and how fast they are.

    python benchmarks/rollouts.py                    # a minute

| figure | what it is | wanted |
|---|---|---|
| `distillation_gap` | largest divergence of a distilled student from the closed-form optimum on a one-token task, nats | 0.01 |
| `distillation_gap_top_4` | the same for the teacher's four likeliest tokens | 0.01 |
| `distillation_gap_before` | the same before the distillation, with all tokens | none |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "rollouts"))
FIGURES = ("distillation_gap", "distillation_gap_top_4", "distillation_gap_before")
PARTS = {"distillation": "distilled"}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
