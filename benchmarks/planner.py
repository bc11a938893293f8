"""The planner: costs of models, and placements.

    python benchmarks/planner.py                     # seconds
    python benchmarks/planner.py --parts flops

| figure | what it is | wanted |
|---|---|---|
| `flops_error` | largest relative error of the operations in a forward pass, and in a forward and backward pass, of twelve \
families, computed from `config.json` and counted by torch | 0.02 |
| `parameters_error` | the same for numbers of parameters | 0.02 |
| `real_seeds` | seeds that find the best plan of ReaLHF's GRPO and PPO spaces | 10 of 10 |
| `real_seed_s` | [processor s] of the slowest of these searches | 2 |
| `search_s` | [processor s] to place four models on 128 GPUs, and to choose among 620 options for each of six calls | 5 |
| `search_options` | placements and options of these searches | none |
| `search_worse` | baselines with fewer seconds than these searches | 0 |
| `over_heuristic_small` | speed of the plan over Megatron-LM's heuristic, in ReaLHF's two small spaces | 1.26 |
| `over_heuristic` | the same for PPO with 7B to 70B, in a roofline model | 1.26 |
| `over_heuristic_mean` | the geometric mean of these | 1.26 |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "planner"))
FIGURES = ("flops_error", "parameters_error", "real_seeds", "real_seed_s", "search_s", "search_options")
FIGURES += ("search_worse", "over_heuristic_small", "over_heuristic", "over_heuristic_mean")
PARTS = {"flops": "flops", "searches": "searches"}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
