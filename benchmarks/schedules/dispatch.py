"""What the driver takes to give out one microbatch and take back its result, beside verl's `RayWorkerGroup`.

    python benchmarks/schedules/dispatch.py [--small] [--no-peers]

Rows lie in segments. A step gives a microbatch to each worker of a group that does nothing, and takes one number for each row back:
claim, call, reply, publish, finish, and the end of the step. There are two ways:

- `mapped`: the node reads a small column of the rows; their bytes lie beside it in the segment that the workers map, unread;
- `copied`: the node reads the bytes, so each worker gathers its rows into memory of its own.

verl gets the same bytes as a `DataProto` through `DP_COMPUTE_PROTO` (`verl_dispatch.py`, in an environment of its own).

`ms` is the driver's time for a microbatch: wall time in which it did not wait for replies. `wall_ms` includes the waiting; with few
workers that is one round trip. `cpu_ms` is the CPU time of the driver's process, Ray's threads included. All of verl's wall time
counts, for its driver does nothing else meanwhile. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.append(str(Path(__file__).resolve().parents[1]))
from machine import PEERS, cores, has_peers, load
from turns import System

import weft
from weft.controllers.backends.backend import Event
from weft.dataflow.batch import Batch
from weft.dataflow.config import Config
from weft.workers.dispatch import Coordinates, Dispatch
from weft.workers.remote import remote
from weft.workers.worker import Worker

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
BYTES = (MIB, 16 * MIB, 128 * MIB, 1024 * MIB)
WORKERS = (2, 8, 32, 64)
USUAL_BYTES, USUAL_WORKERS = 16 * MIB, 2
"""Where the other of the two is varied."""
VERL = ((2, MIB), (2, 16 * MIB), (2, 128 * MIB), (8, 16 * MIB))
"""Workers and bytes of verl: each of its workers imports torch, and its driver carries the bytes."""
ROWS = 4
"""Rows of a microbatch."""
WARM_UP = 3


class Timed(weft.RayBackend):
    """Counts the seconds in which the driver waited with nothing to do."""

    waited_s = 0.0

    def wait(self, timeout_s: float) -> Sequence[Event]:
        import ray

        begun = time.perf_counter()
        ray.wait(list(self._streams), num_returns=1, timeout=timeout_s, fetch_local=False)
        self.waited_s += time.perf_counter() - begun
        return super().wait(timeout_s)


class Idle(Worker):
    """Returns a number for each row."""

    Config = Config

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(dp=self.context.rank)

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("number",), writes=("seen",))
    def mapped(self, rows: Batch) -> Batch:
        return rows.with_columns(seen=np.zeros(len(rows), np.float32))

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("payload",), writes=("seen",))
    def copied(self, rows: Batch) -> Batch:
        return rows.with_columns(seen=np.zeros(len(rows), np.float32))


@weft.graph
def mapped(rows: Any, *, workers: Any) -> Any:
    return workers.mapped(rows)


@weft.graph
def copied(rows: Any, *, workers: Any) -> Any:
    return workers.copied(rows)


def rows_of(num_rows: int, num_bytes: int) -> weft.TableSource:
    """Rows with so many bytes in all."""
    each = num_bytes // num_rows // 4
    values = pa.array(np.zeros(each * num_rows, np.float32))
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * each)
    payload = pa.ListArray.from_arrays(offsets, values)
    return weft.TableSource("rows", pa.table({"payload": payload, "number": np.arange(num_rows)}))


def measure(way: str, workers: int, num_bytes: int, steps: int) -> dict[str, Any]:
    """Medians over steps of one run."""
    pool = weft.ResourcePool("everything", cpus=cores())
    group = weft.group(Idle, name="workers")
    graph = {"mapped": mapped, "copied": copied}[way](rows_of(ROWS * workers, num_bytes), workers=group)
    walls: list[float] = []
    waits: list[float] = []
    cpus: list[float] = []
    backend = Timed()

    def after_step(_: Mapping[str, float]) -> bool:
        walls.append(time.perf_counter())
        waits.append(backend.waited_s)
        cpus.append(time.process_time())
        return False

    with (
        tempfile.TemporaryDirectory(prefix="weft-dispatch-") as folder,
        weft.Driver(
            graph,
            placement={"workers": weft.Place(pool, ranks=workers)},
            schedule=weft.Synchronous(steps=WARM_UP + steps, prompts_per_step=ROWS * workers, shuffle=False),
            backend=backend,
            root=folder,
            progress=False,
            record_every=0,
            stop=after_step,
        ) as driver,
    ):
        driver.run()
        calls = [c for c in driver.directory.timeline if c["group"] == "workers"][WARM_UP:]
    wall, wait, cpu = (np.diff(times)[WARM_UP:] / workers * 1e3 for times in (walls, waits, cpus))
    return {
        "workers": workers,
        "mib": round(num_bytes / MIB, 3),
        "ms": round(float(np.median(wall - wait)), 3),
        "p90_ms": round(float(np.quantile(wall - wait, 0.9)), 3),
        "wall_ms": round(float(np.median(wall)), 3),
        "cpu_ms": round(float(np.median(cpu)), 3),
        "slowest_worker_ms": round(1e3 * median(c["worker_s"] for c in calls), 2),
    }


def verl(cases: Sequence[tuple[int, int]], steps: int, folder: Path) -> list[dict[str, Any]]:
    """The same for verl, all cases in one process."""
    given = json.dumps({"cases": cases, "steps": steps, "rows": ROWS})
    system = System(HERE / "verl_dispatch.py", given, log=folder / "verl.log", python=PEERS)
    system.close()
    return system.facts["results"]


def run(small: bool, peers: bool = True) -> dict[str, Any]:
    """All cases. `dispatch_ms` is the largest of them, and the ratio is of wall times at 16 MB and two workers that copy."""
    steps = 5 if small else 40
    sizes, workers = (BYTES[:2], WORKERS[:1]) if small else (BYTES, WORKERS)
    cases = [("mapped", USUAL_WORKERS, size) for size in sizes]
    cases += [("copied", USUAL_WORKERS, size) for size in sizes[1 - len(sizes) :]]
    cases += [("mapped", number, USUAL_BYTES) for number in workers if number != USUAL_WORKERS]
    results: dict[str, list[dict[str, Any]]] = {"mapped": [], "copied": [], "verl": []}
    loads = [load()]
    for way, number, size in cases:
        row = measure(way, number, size, min(steps, 8) if size > 128 * MIB else steps)
        results[way].append(row)
        print(f"  {way} {row}", flush=True)
    if has_peers(peers, "verl"):
        with tempfile.TemporaryDirectory(prefix="weft-verl-") as folder:
            results["verl"] = verl(VERL[:2] if small else VERL, steps, Path(folder))
    for row in results["verl"]:
        print(f"  verl {row}", flush=True)

    def at(way: str) -> float | None:
        usual = (r["wall_ms"] for r in results[way] if (r["workers"], r["mib"]) == (USUAL_WORKERS, USUAL_BYTES / MIB))
        return next(usual, None)

    ours, theirs = at("copied"), at("verl")
    return {
        "dispatch_ms": max(row["ms"] for way in ("mapped", "copied") for row in results[way]),
        "dispatch_ratio_to_verl": round(theirs / ours, 2) if ours and theirs else None,
        "dispatch": results,
        "dispatch_load": [*loads, load()],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few and small: not a measurement")
    parser.add_argument("--no-peers", action="store_true", help="leave verl out")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.small, not arguments.no_peers)))
