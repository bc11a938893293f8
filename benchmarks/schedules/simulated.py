"""The graph of `schedules.py` on a fake clock.

One simulation repeats the measured runs, to judge the simulator's accuracy; others have 8 to 1,024
devices. A device is a core of this machine, with its measured costs of calls.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from long_tailed import graph_of, groups, lengths_of, schedule_of
from work import APART, SCHEDULES, Measured, Work, mean

import weft
from weft.controllers.simulation.costs import (
    CostModel,
    Generation,
    LogNormal,
    bound,
    calibrate,
)

PROMPTS_PER_DEVICE = 16
"""Prompts per step and device, as measured."""
DEVICES_PER_REWARD = 16
"""Devices per reward process, which has its core besides them."""
DISPATCH_S = 0.0015
"""[s] Dispatch per rank of a call, as measured."""
STEPS = 3
"""Counted steps of a run on many devices."""
MOST_DEVICES = 256
FEW = ("synchronous", "asynchronous_1")
"""Only these schedules are simulated on more than MOST_DEVICES, to save time."""


@dataclass(frozen=True)
class Timed:
    step_s: float
    """Mean of the counted steps."""
    bound_s: float


def simulated(work: Work, folder: Path, measured: Measured, devices: Sequence[int]) -> dict[str, Any]:
    """Return what `schedules.py`, which explains the keys, adds to its results.

    Args:
        measured: runs to fit the costs of calls to.
        devices: numbers of devices to simulate, with the costs of the synchronous runs.
    """
    seconds = {name: median(mean(facts["step_s"]) for facts in runs) for name, runs in measured.items()}
    own = {name: _as_measured(work, folder, name, runs) for name, runs in measured.items()}
    errors = {name: timed.step_s / seconds[name] - 1 for name, timed in own.items()}
    found: dict[str, Any] = {
        "simulated_error": _largest(errors),
        "simulated_errors": {name: round(error, 4) for name, error in errors.items()},
    }
    print(
        "  simulated as measured: "
        + ", ".join(f"{n} {t.step_s:.2f} s ({errors[n]:+.1%})" for n, t in own.items())
    )
    synchronous = measured.get("synchronous")
    if not synchronous:
        return {**found, "simulated_256_speedup": None}
    other = {
        name: _as_measured(work, folder, name, synchronous).step_s / seconds[name] - 1
        for name, setting in SCHEDULES.items()
        if setting.apart and name in measured
    }
    found["simulated_error_from_synchronous"] = _largest(other)
    tokens = work.median * math.exp(work.sigma**2 / 2)
    lengths = LogNormal(mean=tokens, sigma=work.sigma, max_tokens=work.longest)
    costs = _costs(synchronous, lengths)
    many = {number: _many(work, folder, costs, number) for number in devices}
    for number, timed in many.items():
        said = ", ".join(f"{name} {t.step_s:.2f}" for name, t in timed.items())
        print(f"  {number:>5} devices, s a step: {said}; bound {timed['synchronous'].bound_s:.2f}")
    at = many.get(256)
    return {
        **found,
        "simulated": {d: {name: asdict(t) for name, t in timed.items()} for d, timed in many.items()},
        "simulated_256_speedup": at and round(at["synchronous"].step_s / at["asynchronous_1"].step_s, 4),
        "simulated_256_over_colocated": at
        and round(at["colocated"].step_s / at["asynchronous_1"].step_s, 4),
        "simulated_256_share_of_bound": at
        and round(at["asynchronous_1"].bound_s / at["asynchronous_1"].step_s, 4),
    }


def _as_measured(work: Work, folder: Path, name: str, runs: Sequence[Mapping[str, Any]]) -> Timed:
    lengths = tuple(map(tuple, lengths_of(work, folder)))
    return _run(work, folder, name, _costs(runs, lengths), devices=2)


def _costs(
    runs: Sequence[Mapping[str, Any]], lengths: LogNormal | tuple[tuple[int, ...], ...]
) -> CostModel:
    """Fit the costs of calls to all runs together, without their first steps."""
    calls = [call for facts in runs for call in facts["timeline"] if call["end_s"] >= facts["window"][0]]
    ranks = {call["group"]: runs[0]["ranks"] for call in calls if call["group"] in APART}
    tables = [facts["decode_step_s"] for facts in runs]
    steps = {
        int(number): median(table[number] for table in tables if number in table)
        for number in {n for table in tables for n in table}
    }
    generation = Generation(lengths=lengths, decode_step_s=tuple(sorted(steps.items())))
    # Simulated runs record nothing.
    fitted = [c for c in calls if c["node"] != "rollout.generate" and c["group"] != "recorder"]
    timeline = pa.Table.from_pylist(fitted)
    return calibrate(
        timeline, replicas=ranks, nodes={"rollout.generate": generation}, dispatch_s=DISPATCH_S
    )


def _many(work: Work, folder: Path, costs: CostModel, devices: int) -> dict[str, Timed]:
    """Simulate each schedule on this many devices: half generate and half train, or all
    alternate."""
    prompts = PROMPTS_PER_DEVICE * devices
    parts = prompts * work.groups_per_part // work.groups
    large = replace(work, groups=prompts, groups_per_part=parts, warm_up=1, counted=STEPS, tail=3)
    names = FEW if devices > MOST_DEVICES else SCHEDULES
    return {name: _run(large, folder, name, costs, devices) for name in names}


def _run(work: Work, folder: Path, name: str, costs: CostModel, devices: int) -> Timed:
    rollout, actor, reward = groups(work, name, folder)
    graph = graph_of(work, folder, rollout=rollout, reward=reward, actor=actor)
    half, shared = devices // 2, weft.ResourcePool("shared", cpus=devices)
    if SCHEDULES[name].apart:
        placement = {each: weft.Place(weft.ResourcePool(each, cpus=half), half) for each in APART}
    else:
        placement = {each: weft.Place(shared, devices) for each in APART}
    beside = max(1, devices // DEVICES_PER_REWARD)
    placement["reward"] = weft.Place(weft.ResourcePool("beside", cpus=beside), beside)
    with (
        tempfile.TemporaryDirectory() as root,
        weft.Driver(
            graph,
            schedule=schedule_of(work, name),
            placement=placement,
            backend=weft.Simulated(costs),
            root=root,
            record_every=0,
            progress=False,
        ) as driver,
    ):
        closed = [row["time_s"] for row in driver.run()]
    step_s = (closed[work.warm_up + work.counted] - closed[work.warm_up]) / work.counted
    at_best = bound(
        costs, graph, placement, prompts_per_step=work.groups, steps=work.steps, shuffle=False
    )
    return Timed(step_s, at_best.seconds)


def _largest(errors: Mapping[str, float]) -> float | None:
    return round(max(map(abs, errors.values())), 4) if errors else None
