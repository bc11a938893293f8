"""Weight sync: bytes against the minimum, and times against copies and other methods.

    python benchmarks/resharding.py              # some minutes, half of them for the plans
    python benchmarks/resharding.py --only wire --rounds 7

| figure | what it is | wanted |
|---|---|---|
| `plan_equals_bound` | whether each rank receives only bytes that its device lacks; else the share of layout pairs where it does | true |
| `wire_equals_plan` | whether vLLM reads from each rank's memory exactly the planned bytes | true |
| `wire_over_memcpy` | seconds to move bytes once, from the trainer's parameters into vLLM, over a plain copy | 1.5 |
| `wire_over_memcpy_cpu` | the same in CPU time: in wall time, concurrent senders and receivers also wait for cores | |
| `speedup_over_object_store` | seconds to gather the full state into Ray's object store and `load_weights`, over Weft's | 3 |
| `speedup_over_disk` | the same with safetensors on disk and vLLM's `reload_weights` | 3 |
| `speedup_over_gather` | the same with a gather on every rank, CRC-32 on rank 0, shared memory, another CRC-32, and `load_weights` | 4 |
| `gloo_over_mapped` | seconds with `transport="gloo"`, over mapped memory | |
| `plan_70b_s` | seconds to plan 70B parameters from 64 FSDP ranks to 64 ranks of TP 8 | 5 |
| `checksum_gelements_s` | billions of bfloat16 elements whose checksum one core computes in a second of CPU time, bucket by bucket | 1.5 |
| `delta_bytes_share` | share of all bytes that a delta sends after a step that changed 1 % of the elements | 0.03 |
| `bytes_over_sharded_rdt` | bytes that an engine's ranks receive, over vLLM's sharded_rdt for the same loaders | 1 |
| `trainer_bytes_over_sharded_rdt` | bytes that the trainer's ranks send and gather, over sharded_rdt | 1 |
| `pause_share` | time without generation in vLLM with a double buffer, over a transfer without one | 0.5 |
| `pause_share_without` | the same, without a double buffer | |
| `real_layouts_ok` | pairs of layouts, of `real_layouts_tried`, that compute the same in trainer and vLLM | all |

Two ranks (FSDP2 over gloo) send 125 million float32 parameters to one vLLM engine on the CPUs of
this machine. Methods take turns, and seconds are medians. A table projects plans of large models at
link rates, without measurements. The last line printed is one JSON object, with null for figures
that were not requested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "resharding"), str(HERE)]
FIGURES = (
    "plan_equals_bound", "wire_equals_plan", "wire_over_memcpy", "wire_over_memcpy_cpu", "speedup_over_object_store",
    "speedup_over_disk", "speedup_over_gather", "gloo_over_mapped", "plan_70b_s", "pause_share", "pause_share_without", "delta_bytes_share",
    "checksum_gelements_s", "real_layouts_ok", "real_layouts_tried", "bytes_over_sharded_rdt", "trainer_bytes_over_sharded_rdt",
)  # fmt: skip


PARTS = ("plans", "wire", "checksum", "deltas", "layouts", "rdt")


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


def checksum(rounds: int) -> float:
    """Return the slowest of several shapes of weights, each in a bucket of 16 MiB."""
    import torch

    from weft.resharding.buckets import BUCKET_BYTES, box_sum
    from weft.resharding.weights import Box

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates: list[float] = []
    for columns in (1024, 4096, 14336):
        tensor = torch.randn(BUCKET_BYTES // 2 // columns, columns).bfloat16()
        box, shape, seconds = Box.full(tensor.shape), tuple(tensor.shape), list[float]()
        for _ in range(rounds + 1):  # the first computes the factors
            before = time.thread_time()
            box_sum(tensor, box, shape)
            seconds.append(time.thread_time() - before)
        rates.append(tensor.numel() / statistics.median(seconds[1:]) / 1e9)
    torch.set_num_threads(threads)
    return round(min(rates), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="counted transfers per method")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and few layouts, to see that it works"
    )
    asked = parser.parse_args()
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    if "wire" in asked.only:
        figures |= wire(asked.small, asked.rounds)
    if "checksum" in asked.only:
        figures["checksum_gelements_s"] = checksum(asked.rounds)
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
