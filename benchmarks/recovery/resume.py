"""How fast a killed run reads its log and ledgers on resume.

    python benchmarks/recovery/resume.py                 # a minute
    python benchmarks/recovery/resume.py --steps 50      # to see that it works: not a measurement

A sample buffer plays a run of GRPO's shape (64 prompts of 8 samples per step, no workers or
columns) and stops in the middle. The benchmark times a driver with `resume="latest"` before it
starts workers: it finds an intact checkpoint, locks the run, and opens its directory and its
buffer. `resume_mb_s` counts the bytes of the log file and of the ledgers' checkpoint; the driver
parses only the latter. The run has no weights, and the driver does not read its history. The last
line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import weft
from weft.controllers.backends.local import Local
from weft.controllers.loop.start import open_buffer
from weft.controllers.recovery.checkpoints import CheckpointConfig, CheckpointFolder, RunState
from weft.controllers.recovery.resume import find_checkpoint
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.recovery import ledger_checkpoints
from weft.dataflow.buffer.sample_buffer import BufferConfig, SampleBuffer
from weft.dataflow.graph import Graph
from weft.dataflow.runs.directory import RunDirectory, hold
from weft.dataflow.runs.files import BUFFER, LOG
from weft.dataflow.runs.log_archive import HISTORY, start_of

STEPS = 600
PROMPTS = 64
"""Prompts per step."""
SAMPLES = 8
"""Samples per prompt."""
EVERY = 25
"""Steps between checkpoints."""
OPENED: dict[str, Any] = {"config": BufferConfig(), "backend": Local(), "keep_checkpoints": 2}
"""Arguments of a driver for opening the buffer."""


@weft.node(shape=weft.Shape.EXPAND, reads=("prompt",), writes=("response",))
def generate(prompts: Any) -> Any: ...


@weft.node(reads=("response",), writes=("reward",))
def score(samples: Any) -> Any: ...


@weft.node(shape=weft.Shape.GROUP, reads=("reward",), writes=("advantages",))
def center(samples: Any) -> Any: ...


@weft.node(reads=("advantages",))
def update(samples: Any) -> Any: ...


@weft.graph
def train(prompts: Any) -> Any:
    update(center(score(generate(prompts))))


def graphs() -> dict[str, Graph]:
    return {"train": train(weft.TableSource("prompts", pa.table({"prompt": ["2 + 2?"] * PROMPTS})))}


def play(buffer: SampleBuffer, step: int, *, until: str | None = None) -> None:
    """Play a step: each node claims all rows, publishes and finishes them. Stop after the node
    `until`."""
    ledger = buffer.ledgers["train"]
    ledger.issue(list(range(PROMPTS)), [200] * PROMPTS, step=step)
    for node in ledger.graph.nodes:
        lease = ledger.claim(node, holder=f"{node.name} 0")
        assert lease is not None
        ids, parents, finished = lease.ids, None, None
        if node.makes_level is not None:
            parents, finished = np.repeat(lease.ids, SAMPLES), lease.ids
            ids = (lease.first_children[:, None] + np.arange(SAMPLES)).ravel()
        tokens = np.full(len(ids), 700)
        versions = np.full(len(ids), step) if parents is not None else None
        buffer.publish(ledger, lease, Published(ids, tokens, versions, parents, finished), None)
        ledger.finish(lease)
        buffer.commit()
        if node.name == until:
            return
    buffer.note("step", step)


def killed_run(root: Path, steps: int) -> Path:
    """Play a run, leave it with two steps of samples in flight, and return its directory."""
    directory = RunDirectory.create(root, "run")
    folder = CheckpointFolder(directory, CheckpointConfig(every=EVERY))
    buffer = open_buffer(directory, None, graphs(), **OPENED)
    directory.add_metrics({"step": 0})
    for step in range(1, steps + 1):
        play(buffer, step)
        directory.add_metrics({"step": step, "samples": PROMPTS * SAMPLES})
        if step % EVERY == 0 or step == steps:
            play(buffer, step, until="generate")
            play(buffer, step, until="score")
            directory.flush()
            state = RunState(step, 0, 0.0, {}, buffer.checkpoint(folder.positions))
            folder.make_unfinished(state)
            folder.complete(step, lambda _: {}, lambda: None)
            play(buffer, step, until="center")
    buffer.close(going_on=True)
    directory.close()
    assert directory.lock is not None
    directory.lock.release()
    return directory.path


def measure(root: Path, steps: int) -> dict[str, Any]:
    run = killed_run(root, steps)
    log, history = run / BUFFER / LOG, run / BUFFER / HISTORY
    of_log, of_ledgers = log.stat().st_size, ledger_checkpoints(run / BUFFER)[0].stat().st_size
    archived = start_of(log).offset
    packed = sum(part.stat().st_size for part in history.iterdir()) if history.exists() else 0
    began = time.perf_counter()
    lock = hold(run)
    point = find_checkpoint(run)
    assert point is not None
    directory = point.reopen(lock)
    buffer = open_buffer(directory, point, graphs(), **OPENED)
    seconds = time.perf_counter() - began
    rows = sum(len(ledger.live.rows) for ledger in buffer.ledgers.values())
    buffer.close()
    lock.release()
    return {
        "resume_mb_s": round((of_log + of_ledgers) / 1e6 / seconds, 1),
        "resume_s": round(seconds, 4),
        "log_mb": round(of_log / 1e6, 3),
        "ledgers_mb": round(of_ledgers / 1e6, 3),
        "rows_in_flight": rows,
        "history_mb": round(archived / 1e6, 3),
        "history_packed_mb": round(packed / 1e6, 3),
        "steps": steps,
    }


def resume_mb_s() -> float:
    """Return MB/s of log and ledger checkpoint, from `resume="latest"` to an open buffer."""
    with tempfile.TemporaryDirectory(prefix="weft-r") as folder:
        return measure(Path(folder), STEPS)["resume_mb_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"steps of the killed run; default: {STEPS}"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-r") as folder:
        print(json.dumps(measure(Path(folder), arguments.steps)))


if __name__ == "__main__":
    main()
