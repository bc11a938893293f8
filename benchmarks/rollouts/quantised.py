"""The demo with int8 rollouts and truncated importance sampling, compared with the demo in float32.

Each run is `examples/grpo_arithmetic.py` in one process with vLLM. Both runs of a seed start from the same
model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_arithmetic.py"
SEEDS = (0, 1, 2)
STEPS = 400
EVALUATIONS = 4
"""Number of last evaluations, of 512 sums each, whose mean is a run's accuracy."""

Rows = Sequence[Mapping[str, Any]]


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="weft-int8-") as root:
        plain = [run(Path(root), seed, "float32") for seed in SEEDS]
        int8 = [run(Path(root), seed, "int8", "--quantization", "int8") for seed in SEEDS]
    rows = [row for each in int8 for row in each if row.get("actor/mean_logprob_gap") is not None]
    accuracies = [mean(map(accuracy, runs)) for runs in (int8, plain)]
    return {
        "int8_gap": round(mean(row["actor/mean_logprob_gap"] for row in rows), 4),
        "int8_gap_largest": round(max(row["actor/max_logprob_gap"] for row in rows), 2),
        "int8_kl": float(f"{mean(row['actor/generator_kl_k3'] for row in rows):.2g}"),
        "int8_truncated": round(mean(row["actor/truncated_fraction"] for row in rows), 4),
        "int8_accuracy": round(accuracies[0], 3),
        "float32_accuracy": round(accuracies[1], 3),
        "int8_accuracy_lost": round(accuracies[1] - accuracies[0], 3),
    }


def accuracy(rows: Rows) -> float:
    found = [row["eval/reward/mean"] for row in rows if row.get("eval/reward/mean") is not None]
    return mean(found[-EVALUATIONS:])


def run(root: Path, seed: int, name: str, *more: str) -> Rows:
    """Run the example, and return its metrics."""
    command = [sys.executable, str(EXAMPLE), "--backend", "local", "--engine", "vllm"]
    command += ["--root", str(root), "--name", f"{name}-{seed}", "--seed", str(seed)]
    command += ["--steps", str(STEPS), "--checkpoint-every", "0", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    rows = pq.read_table(root / f"{name}-{seed}" / "metrics.parquet").to_pylist()
    print(f"  seed {seed}, {name}: {accuracy(rows):.3f}", flush=True)
    return rows
