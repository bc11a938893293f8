"""Planned host memory against runs: small examples under Ray, two ranks per group with a model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("grpo_arithmetic", "dpo_preferences")
TIMEOUT_S = 400


def measure(names: tuple[str, ...] = EXAMPLES) -> dict[str, float]:
    """Return the largest relative error, per rank with a model, and over all processes."""
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as root:
        for name in names:
            errors |= _errors(name, Path(root))
    print("\n".join(f"  {name:<28} {error:+7.2%}" for name, error in errors.items()), flush=True)
    return {"plan_resident_error": round(max(abs(error) for error in errors.values()), 4)}


def _errors(name: str, root: Path) -> dict[str, float]:
    """Return relative errors of the plan; positive means too much."""
    words = [str(ROOT / "examples" / f"{name}.py"), "--small", "--root", str(root), "--name", name]
    planned: dict[str, Any] = json.loads(_said(["-m", "weft", "plan", "--json", *words], root))
    _said(words, root)
    metrics = pq.read_table(root / name / "metrics.parquet")
    together, errors = _largest(metrics, "driver"), dict[str, float]()
    for group, memory in planned["groups"].items():
        measured = _largest(metrics, group)
        together += measured
        if memory["phases"]:
            errors[f"{name}: {group}"] = memory["ranks"] * memory["host"] / measured - 1
    return errors | {f"{name}: together": planned["host_bytes"] / together - 1}


def _largest(metrics: Any, group: str) -> float:
    return max(found for found in metrics[f"{group}/resident_bytes"].to_pylist() if found is not None)


def _said(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
