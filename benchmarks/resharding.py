"""Weights from a trainer to an engine: what moves beside what must, and the time beside a copy and beside other ways.

    python benchmarks/resharding.py              # some minutes, half of them for the plans
    python benchmarks/resharding.py --only wire --rounds 7

| figure | what it is | wanted |
|---|---|---|
| `plan_equals_bound` | whether each rank receives what it needs and its device lacks, for all pairs of layouts; else their share | true |
| `wire_equals_plan` | whether vLLM reads of each rank's memory the bytes that the plan says | true |
| `wire_over_memcpy` | seconds that move bytes (once, from the trainer's parameters into vLLM) over those of one plain copy | 1.5 |
| `wire_over_memcpy_cpu` | the same of the processor: on the clock, whoever gives and takes at once waits for a core, too | |
| `speedup_over_object_store` | seconds by gathering the full state for Ray's object store and `load_weights`, over Weft's | 3 |
| `speedup_over_disk` | the same, by safetensors on disk and vLLM's `reload_weights` | 3 |
| `speedup_over_gather` | the same, by gathering on every rank, a CRC-32 by rank 0, shared memory, another CRC-32, and `load_weights` | 4 |
| `gloo_over_mapped` | seconds with `transport="gloo"`, over those of memory that is mapped | |
| `plan_70b_s` | seconds to plan 70B parameters from 64 FSDP ranks to 64 ranks of TP 8 | 5 |
| `delta_bytes_share` | bytes that travel after a step that has changed one published element in a hundred, over all bytes | 0.03 |
| `bytes_over_sharded_rdt` | bytes that the ranks of an engine receive, over those that vLLM's sharded_rdt plans for the same loaders | 1 |
| `trainer_bytes_over_sharded_rdt` | bytes that the ranks of the trainer send and gather, over those of sharded_rdt | 1 |
| `pause_share` | seconds in which vLLM cannot generate, with a double buffer, over those of a transfer without one | 0.5 |
| `pause_share_without` | the same, without a double buffer | |
| `real_layouts_ok` | pairs of layouts, of `real_layouts_tried`, over which trainers and engines of vLLM compute the same | all |

Two ranks (FSDP2 over gloo) give 125 million float32 parameters to one engine of vLLM on the CPUs of this machine; ways take turns, and
seconds are medians. A table projects the plans of large models at the rates of
links; it is no measurement. The last line printed is one JSON object; a figure that was not asked for is null.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "resharding"), str(HERE)]
FIGURES = (
    "plan_equals_bound", "wire_equals_plan", "wire_over_memcpy", "wire_over_memcpy_cpu", "speedup_over_object_store",
    "speedup_over_disk", "speedup_over_gather", "gloo_over_mapped", "plan_70b_s", "pause_share", "pause_share_without", "delta_bytes_share",
    "real_layouts_ok", "real_layouts_tried", "bytes_over_sharded_rdt", "trainer_bytes_over_sharded_rdt",
)  # fmt: skip


PARTS = ("plans", "wire", "deltas", "layouts", "rdt")


def plans(small: bool) -> dict[str, Any]:
    module = importlib.import_module("plans")
    print(module.projection({"8B": (8,)} if small else module.PROJECTED), flush=True)
    seconds = module.plan_70b_s(8 if small else 64)
    return {
        "plan_70b_s": round(seconds, 3),
        **module.plan_equals_bound((1, 2) if small else (1, 2, 4, 8)),
    }


def wire(small: bool, rounds: int) -> dict[str, Any]:
    found = importlib.import_module("transfer").measure(rounds, small=small)
    print(
        "\n".join(f"{name:<28} {seconds:8.4f} s" for name, seconds in found["seconds"].items()),
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="transfers in each way that count")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and few layouts, to see that it works"
    )
    asked = parser.parse_args()
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    if "wire" in asked.only:
        figures |= wire(asked.small, asked.rounds)
    if "deltas" in asked.only:
        figures |= importlib.import_module("deltas").measure(asked.rounds, small=asked.small)
    if "layouts" in asked.only:
        figures |= importlib.import_module("real_layouts").measure(small=asked.small)
    if "rdt" in asked.only:
        figures |= importlib.import_module("beside_rdt").measure()
    if "plans" in asked.only:
        figures |= plans(asked.small)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
