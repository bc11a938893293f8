"""The planner: costs of models, and placements.

    python benchmarks/planner.py                     # seconds
    python benchmarks/planner.py --parts flops

| figure | what it is | wanted |
|---|---|---|
| `flops_error` | largest relative error of the operations in a forward pass, and in a forward and backward pass, of twelve \
families, computed from `config.json` and counted by torch | 0.02 |
| `parameters_error` | the same for numbers of parameters | 0.02 |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "planner"))
FIGURES = ("flops_error", "parameters_error")
PARTS = {"flops": "flops"}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
