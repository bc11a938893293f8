"""Updates in bfloat16 against float32.

    python benchmarks/steps/bfloat16.py            # three minutes
    python benchmarks/steps/bfloat16.py --small    # to see that it works: not a measurement

| figure | what it is | wanted |
|---|---|---|
| `bfloat16_speedup` | core-seconds of an update in float32 over those in bfloat16 | 1.5 with `avx512_bf16` |
| `bfloat16_wall_speedup` | the same in wall time, which depends on the load | |
| `float32_core_s`, `bfloat16_core_s` | core-seconds of an update | |
| `difference` | relative difference of the gradient norms | |
| `avx512_bf16` | whether the CPU has bfloat16 multiplication | |

An update is forward, backward, clipping and AdamW, in one process with a thread per core. Its rows
are those of workload (b) in `benchmarks/workloads.py`: 25 million parameters, 64 rows of 8 and 64
tokens. Both dtypes take turns; seconds are medians. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]


def measure(*, small: bool, rounds: int) -> dict[str, Any]:
    import torch
    from shared_prompts import rows_of
    from workloads import PROMPT_TOKENS, WORKLOADS, make_model, make_tokenizer

    from weft.workers.actor import ActorConfig, ActorWorker

    workload = WORKLOADS["b"].small() if small else WORKLOADS["b"]
    size = (workload.num_prompts, workload.num_samples, PROMPT_TOKENS, workload.max_tokens)
    rows = rows_of(*size, workload.vocabulary, pairs=False)
    with tempfile.TemporaryDirectory(prefix="weft-bfloat16-") as scratch:
        folder = Path(scratch) / "model"
        make_tokenizer(workload, folder)
        make_model(workload, folder)
        dtypes = ("float32", "bfloat16")
        workers = {
            dtype: ActorWorker(
                ActorConfig.model_validate({"model": folder, "dtype": dtype, "learning_rate": 1e-12})
            )
            for dtype in dtypes
        }
        core_s: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        wall_s: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        norms: dict[str, float] = {}
        for number in range(rounds + 1):
            for dtype, worker in workers.items():
                cores, start = time.process_time(), time.perf_counter()
                found: Any = worker.update(rows)
                if number:  # the first update allocates memory and moments
                    core_s[dtype].append(time.process_time() - cores)
                    wall_s[dtype].append(time.perf_counter() - start)
                norms[dtype] = found["grad_norm"].value
    exact, half = (median(core_s[dtype]) for dtype in dtypes)
    flags = Path("/proc/cpuinfo")
    return {
        "bfloat16_speedup": round(exact / half, 2),
        "bfloat16_wall_speedup": round(median(wall_s["float32"]) / median(wall_s["bfloat16"]), 2),
        "float32_core_s": round(exact, 2),
        "bfloat16_core_s": round(half, 2),
        "difference": float(f"{abs(norms['bfloat16'] / norms['float32'] - 1):.1e}"),
        "avx512_bf16": flags.exists() and " avx512_bf16" in flags.read_text(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows")
    parser.add_argument("--rounds", type=int, default=5, help="counted updates per dtype")
    asked = parser.parse_args()
    print(json.dumps(measure(small=asked.small, rounds=asked.rounds)))


if __name__ == "__main__":
    main()
