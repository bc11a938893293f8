"""The example, killed at a random moment and resumed: does it end with the bits of a run that was not?"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from recovery_processes import HERE, Run

from weft.dataflow.buffer.samples import recorded

EXAMPLE = HERE.parent / "examples" / "grpo_arithmetic.py"
TIMES = frozenset({"time_s", "step_s", "tokens_per_s", "checkpoint_pause_s"})
STEPS = 8


@dataclass(frozen=True)
class Resumed:
    """One run that was killed and resumed."""

    killed_after_s: float
    """After its first checkpoint was there."""
    went_on_after: int
    """Step."""
    differs: tuple[str, ...]
    """What is not as in the run that was not killed: weights, metrics, samples."""


def example(root: Path, name: str, engine: str, small: bool) -> Run:
    size = ["--small"] if small else ["--steps", str(STEPS), "--prompts", "8"]
    settings = ["--backend", "local", "--engine", engine, "--checkpoint-every", "1", *size]
    return Run(root, name, *settings, program=EXAMPLE)


def finished(run: Run) -> Run:
    if code := run.finish(1200):
        raise RuntimeError(f"{run.path.name} ended with {code}:\n{run.said[-3000:]}")
    return run


def resumed_runs(root: Path, engine: str, number: int, seed: int, small: bool) -> Sequence[Resumed]:
    """Kill so many runs, each somewhere between its first checkpoint and the end of its training, and resume them."""
    with example(root, f"{engine}-whole", engine, small) as whole:
        whole.start()
        window = seconds_of_training(whole, 3 if small else STEPS)
        expected = outcome(finished(whole).path)
    print(
        f"{engine}: {window:.1f} s from the first checkpoint to the end of training where nothing is killed", flush=True
    )
    rng = random.Random(seed)
    found: list[Resumed] = []
    for k in range(number):
        moment = rng.uniform(0, window)
        with example(root, f"{engine}-{k}", engine, small) as run:
            run.start()
            run.wait(lambda run=run: has_checkpoint(run), 600)
            time.sleep(moment)
            run.signal_all(signal.SIGKILL)
            run.finish()
            run.start("--resume", "latest")
            mine = outcome(finished(run).path)
        differs = tuple(what for what in expected if mine[what] != expected[what])
        step = int(run.said.rpartition("goes on after step ")[2].split(",")[0])
        found.append(Resumed(moment, step, differs))
        print(
            f"  killed {moment:5.2f} s after its first checkpoint, went on after step {step}: "
            f"{'other ' + ', '.join(differs) if differs else 'identical'}",
            flush=True,
        )
    return found


def has_checkpoint(run: Run) -> bool:
    return any((run.path / "checkpoints").glob("step_*"))


def seconds_of_training(run: Run, steps: int) -> float:
    """From its first checkpoint until its last step is over: the evaluation and the end of the program come after it."""
    run.wait(lambda: has_checkpoint(run), 1200)
    return run.wait(lambda: run.step >= steps, 600)


def outcome(run: Path) -> Mapping[str, Any]:
    """What a run ended with, apart from times."""
    rows = [
        {k: v for k, v in row.items() if k not in TIMES} for row in pq.read_table(run / "metrics.parquet").to_pylist()
    ]
    samples = [row for part in recorded(run) for row in part.read().to_pylist()]  # by graph and step
    return {
        "weights": (run / "model" / "model.safetensors").read_bytes(),
        "metrics": json.dumps(rows),
        "samples": json.dumps(samples, sort_keys=True, default=str),
    }
