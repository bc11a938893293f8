"""Does asynchronous training learn as much per sample, in less time? Three seeds of one example.

    python benchmarks/schedules/learning_curves.py                     # half an hour; the picture goes to docs/schedules.png
    python benchmarks/schedules/learning_curves.py --small             # to see that it works: not a measurement

Each run is `examples/grpo_arithmetic.py`, unmodified, one after another. Runs of a seed start from
the same model. The last line printed is one JSON object: for each mode and seed, the final
`accuracy`, and the samples and seconds until 95 % of the synchronous run's final accuracy, relative
to the synchronous run (`samples_to_goal`, `seconds_to_goal`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_arithmetic.py"
MODES = {
    "synchronous": ("synchronous", "colocated"),
    "synchronous_apart": ("synchronous", "apart"),
    "asynchronous": ("asynchronous", "apart"),
}
"""Maps a name to schedule (asynchronous: staleness 1) and placement."""
COLOURS = {"synchronous": "#2a6fdb", "synchronous_apart": "#8a93a6", "asynchronous": "#d9622b"}
SHARE = 0.95
"""The goal: this share of synchronous training's final accuracy."""

Curve = Sequence[tuple[int, float, float]]
"""(samples so far, seconds since the first step began, held-out accuracy) at each evaluation."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", help="seeds of the runs; default: 0,1,2 (--small: 0)")
    parser.add_argument("--steps", type=int, help="updates of each run; default: 250 (--small: 3)")
    parser.add_argument(
        "--picture", type=Path, default=Path("docs/schedules.png"), help="default: docs/schedules.png"
    )
    parser.add_argument("--small", action="store_true", help="three steps, one seed: not a measurement")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in (arguments.seeds or ("0" if arguments.small else "0,1,2")).split(",")]
    steps = arguments.steps or (3 if arguments.small else 250)
    more = ["--steps", str(steps), *(["--small"] if arguments.small else [])]
    curves: dict[str, list[Curve]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory(prefix="weft-curves-") as root:
        run("synchronous", seeds[0], ["--small"], Path(root))  # warm up the file cache
        for seed in seeds:
            for name in MODES if seed % 2 == 0 else reversed(MODES):
                curves[name].append(run(name, seed, more, Path(root)))
                samples, seconds, accuracy = curves[name][-1][-1]
                print(
                    f"  seed {seed} {name}: {accuracy:.3f} after {samples} samples, {seconds:.0f} s",
                    flush=True,
                )
    draw(curves, arguments.picture)
    print(json.dumps(summarize(curves) | {"seeds": seeds, "load": os.getloadavg()[0]}))


def run(name: str, seed: int, more: Sequence[str], root: Path) -> Curve:
    schedule, placement = MODES[name]
    before = set(root.glob("*/metrics.parquet"))
    command = [
        sys.executable,
        str(EXAMPLE),
        "--seed",
        str(seed),
        "--schedule",
        schedule,
        "--placement",
        placement,
    ]
    command += ["--root", str(root), "--checkpoint-every", "0"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    (written,) = set(root.glob("*/metrics.parquet")) - before - set(root.glob("*/warm*/metrics.parquet"))
    return curve(pq.read_table(written).to_pylist())


def curve(rows: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the curve of a run from its metrics.

    >>> first, last = {"time_s": 2.0, "eval/reward/mean": 0.3}, {"time_s": 4.0, "samples": 8.0, "eval/reward/mean": 0.5}
    >>> curve([first, {"time_s": 3.0, "samples": 8.0}, last])
    [(0, 0.0, 0.3), (16, 2.0, 0.5)]
    """
    points, samples = [], 0
    for row in rows:
        samples += int(row.get("samples") or 0)
        if row.get("eval/reward/mean") is not None:
            points.append((samples, row["time_s"] - rows[0]["time_s"], row["eval/reward/mean"]))
    return points


def reached(curve: Curve, accuracy: float) -> tuple[float, float] | None:
    """Return samples and seconds at which a curve first has this accuracy, or None if it never
    does.

    Values between points are interpolated linearly.

    >>> reached([(0, 0.0, 0.0), (100, 10.0, 0.5)], 0.25)
    (50.0, 5.0)
    """
    if curve[0][2] >= accuracy:
        return float(curve[0][0]), curve[0][1]
    for (n, t, a), (m, u, b) in pairwise(curve):
        if b >= accuracy:
            part = (accuracy - a) / (b - a)
            return n + part * (m - n), t + part * (u - t)
    return None


def summarize(curves: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
    """Return final accuracies, and samples and seconds to the goal, per mode.

    Samples and seconds are relative to `synchronous` with the same seed, or None for a missed goal.
    """
    found: dict[str, Any] = {}
    for name, runs in curves.items():
        ratios: list[tuple[float, float] | tuple[None, None]] = []
        for own, base in zip(runs, curves["synchronous"], strict=True):
            goal = SHARE * base[-1][2]
            mine, theirs = reached(own, goal), reached(base, goal)
            there = mine and theirs and theirs[0] > 0
            ratios.append((mine[0] / theirs[0], mine[1] / theirs[1]) if there else (None, None))  # pyright: ignore
        found[name] = {
            "accuracy": [round(run[-1][2], 4) for run in runs],
            "mean_accuracy": round(mean(run[-1][2] for run in runs), 4),
            "seconds": [round(run[-1][1], 1) for run in runs],
            "samples_to_goal": [samples and round(samples, 3) for samples, _ in ratios],
            "seconds_to_goal": [seconds and round(seconds, 3) for _, seconds in ratios],
        }
    return found


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw accuracy by samples and by seconds: a thin line per seed, and a thick one for the mean
    by samples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_samples, by_time) = plt.subplots(
        1, 2, figsize=(10, 4.2), dpi=120, layout="constrained", sharey=True
    )
    for name, runs in curves.items():
        for number, points in enumerate(runs):
            samples, seconds, accuracy = zip(*points, strict=True)
            label = name.replace("_", ", ") if not number else None
            by_samples.plot(
                samples, accuracy, color=COLOURS[name], linewidth=1.4, alpha=0.8, label=label
            )
            by_time.plot(seconds, accuracy, color=COLOURS[name], linewidth=1.4, alpha=0.8)
    by_samples.set_xlabel("samples trained on")
    by_time.set_xlabel("seconds since the first step began")
    by_samples.set_ylabel("held-out accuracy (greedy)")
    by_samples.legend(frameon=False, loc="lower right")
    for axes in (by_samples, by_time):
        axes.grid(True, color="#d8dbe2", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
