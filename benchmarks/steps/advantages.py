"""What advantages and balancing cost, beside loops in C that do the same: one thread each, medians.

    python benchmarks/steps/advantages.py [--small]

- `gae` times `generalized_advantages` on packed rows: all of one length, of uniformly drawn lengths, and with a mask that leaves out
  a fifth of the tokens in between. The loop goes backwards over the tokens.
- `group_advantages` times each estimator on 32,768 rows in groups of 8, in no order. The loop (of the normalised ones) goes over
  the rows three times.
- `balance` times 100,000 lengths (log-normal, up to 16,384 tokens) over 64 ranks, and says how far the fullest rank is above the mean.

Times are CPU times of the thread, so that what else the machine does counts less. The loops are compiled here by `cc`, and left out
where there is none. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from weft.algorithms.advantages import (
    Outcomes,
    best_of_group,
    group_centred,
    group_normalized,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
)
from weft.algorithms.loss import PackedRows
from weft.algorithms.values import generalized_advantages, whitened
from weft.workers.dispatch import balance

GAMMA, LAM = 0.99, 0.95
ESTIMATORS = (group_normalized, group_centred, leave_one_out, length_weighted, valid_groups_centred, best_of_group)
LOOPS = """
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

void gae(const float *r, const float *v, const uint8_t *mask, const int64_t *cu, int64_t rows, float gamma, float lam,
         float *advantages, float *returns) {
    for (int64_t i = 0; i < rows; i++) {
        float next = 0, after = 0;
        for (int64_t t = cu[i + 1] - 1; t >= cu[i]; t--) {
            if (mask && !mask[t]) { advantages[t] = returns[t] = 0; continue; }
            after = r[t] + gamma * next - v[t] + gamma * lam * after;
            next = v[t];
            advantages[t] = after;
            returns[t] = after + v[t];
        }
    }
}

void grouped(const float *r, const int64_t *group, int64_t rows, int64_t groups, float *out) {
    double *sums = calloc(groups, 8), *squares = calloc(groups, 8), *sizes = calloc(groups, 8);
    for (int64_t i = 0; i < rows; i++) { sums[group[i]] += r[i]; sizes[group[i]] += 1; }
    for (int64_t i = 0; i < rows; i++) { double d = r[i] - sums[group[i]] / sizes[group[i]]; squares[group[i]] += d * d; }
    for (int64_t g = 0; g < groups; g++) squares[g] = sqrt(squares[g] / (sizes[g] > 1 ? sizes[g] - 1 : 1)) + 1e-6;
    for (int64_t i = 0; i < rows; i++) out[i] = (r[i] - sums[group[i]] / sizes[group[i]]) / squares[group[i]];
    free(sums); free(squares); free(sizes);
}
"""


def compiled(folder: Path) -> Any:
    """The loops as a library; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(LOOPS)
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def cpu_ms(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - begun))
    return round(median(times[1:]), 3)


def ratio(ours: float, loop: float | None) -> float | None:
    return round(ours / loop, 2) if loop else None


def of_gae(loops: Any, rows: int, tokens: int, kind: str, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * tokens, rows) if kind == "drawn" else np.full(rows, tokens)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    rewards, values = rng.normal(size=(2, cu_seqlens[-1])).astype(np.float32)
    mask = (rng.random(len(rewards)) < 0.8).astype(np.uint8) if kind == "masked" else None
    columns = {} if mask is None else {"response_mask": torch.from_numpy(mask)}
    packed = PackedRows(torch.from_numpy(cu_seqlens), columns)
    given = torch.from_numpy(rewards), torch.from_numpy(values)
    made = generalized_advantages(*given, packed, gamma=GAMMA, lam=LAM)
    ours = cpu_ms(lambda: generalized_advantages(*given, packed, gamma=GAMMA, lam=LAM), repeats)
    loop = difference = None
    if loops:
        pointers = [pointer(array) for array in (rewards, values, mask, cu_seqlens)]
        settings = ctypes.c_int64(rows), ctypes.c_float(GAMMA), ctypes.c_float(LAM)

        def of_loop() -> list[np.ndarray]:
            out = [np.empty_like(rewards), np.empty_like(rewards)]
            loops.gae(*pointers, *settings, *(pointer(array) for array in out))
            return out

        difference = max(float(np.abs(a - b.numpy()).max()) for a, b in zip(of_loop(), made, strict=True))
        loop = cpu_ms(of_loop, repeats)
    times = {"ms": ours, "loop_ms": loop, "ratio": ratio(ours, loop)}
    whiten_ms = cpu_ms(lambda: whitened(made[0], packed), repeats)
    case = {"rows": rows, "tokens": tokens, "lengths": kind}
    return {**case, **times, "whiten_ms": whiten_ms, "largest_difference": difference}


def of_groups(loops: Any, num_rows: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=num_rows).astype(np.float32), rng.permutation(np.arange(num_rows) // 8)
    outcomes = Outcomes.of(torch.from_numpy(rewards), torch.from_numpy(groups), rng.integers(1, 1000, num_rows))
    times = {each.__name__: cpu_ms(lambda each=each: each(outcomes), repeats) for each in ESTIMATORS}
    loop = difference = None
    if loops:
        numbers = ctypes.c_int64(num_rows), ctypes.c_int64(int(groups.max()) + 1)

        def of_loop() -> np.ndarray:
            out = np.empty_like(rewards)
            loops.grouped(pointer(rewards), pointer(groups), *numbers, pointer(out))
            return out

        difference = float(np.abs(of_loop() - group_normalized(outcomes).numpy()).max())
        loop = cpu_ms(of_loop, repeats)
    slowest = ratio(times["group_normalized"], loop)
    return {"rows": num_rows, "ms": times, "loop_ms": loop, "ratio": slowest, "largest_difference": difference}


def of_balance(num_rows: int, parts: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.5, 1.0, num_rows), 16_384).astype(np.int64)
    loads = np.array([lengths[part].sum() for part in balance(lengths, parts)])
    above = float(loads.max() / loads.mean() - 1)
    ms = cpu_ms(lambda: balance(lengths, parts), repeats)
    return {"rows": num_rows, "ranks": parts, "ms": ms, "above_mean": above}


def run(small: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes, repeats = (((64, 128),), 3) if small else (((256, 512), (512, 8192)), 15)
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="weft-loops-") as folder:
        loops = compiled(Path(folder))
        cases = [(rows, tokens, kind) for rows, tokens in sizes for kind in ("equal", "drawn", "masked")]
        results = {
            "gae": [of_gae(loops, *case, repeats) for case in cases],
            "group_advantages": [of_groups(loops, 1024 if small else 32_768, 4 * repeats)],
            "balance": [of_balance(1000 if small else 100_000, 64, 5)],
        }
    for name, rows in results.items():
        for row in rows:
            print(f"  {name} {row}", flush=True)
    return results | {"load": [*load, os.getloadavg()[0]]}


if __name__ == "__main__":
    # BLAS reads this when it is imported; the products of the block scan would otherwise take every core.
    if os.environ.get("OMP_NUM_THREADS") != "1":
        one = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], one)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few and small: not a measurement")
    print(json.dumps(run(parser.parse_args().small)))
