"""Weft under one schedule, from start to end, with one report of its measurements (turns.py).

python benchmarks/schedules/weft_run.py FOLDER '{"schedule": "asynchronous_1", ...}'       # schedules.py fills in the rest
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from long_tailed import graph_of, groups, schedule_of
from machine import cpu_s, machine_cpu_s
from records import busy_s, idle, lane
from turns import Turns
from work import APART, SCHEDULES, Work

import weft
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.log_rules import Rule


def main(work: Work, name: str, folder: Path) -> None:
    turns = Turns()
    # run the exit of the driver's `with` block
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    setting = SCHEDULES[name]
    rollout, actor, reward = groups(work, name, folder)
    if setting.apart:
        placement = {
            group: weft.Place(weft.ResourcePool(f"the core of {group}", cpus=1)) for group in APART
        }
    else:
        pool = weft.ResourcePool("both cores", cpus=2)
        placement = {group: weft.Place(pool, ranks=2) for group in APART}
    usage = Usage()

    with weft.Driver(
        graph_of(work, folder, rollout=rollout, actor=actor, reward=reward),
        placement=placement,
        schedule=schedule_of(work, name),
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
        stop=usage.after_step,
    ) as driver:
        usage.processes |= {
            "rollout": driver.call(rollout, "process"),
            "actor": driver.call(actor, "process"),
        }
        metrics = driver.run()
        steps_s = driver.call(rollout, "steps_s")[0]
        timeline, buffer = driver.directory.timeline, driver.directory.path / "buffer"
    start, end = work.warm_up, work.warm_up + work.counted
    closed = [row["time_s"] for row in metrics]
    window = closed[start], closed[end]
    staleness = [row.get("actor/max_staleness", 0.0) for row in metrics]
    violations = check_log(buffer).violations
    too_old = [each for each in violations if each.rule is Rule.STALENESS]
    lanes = {group: lane(timeline, window, group=group) for group in APART}
    turns.say(
        schedule=name,
        step_s=[after - before for before, after in pairwise(closed[start : end + 1])],
        busy_s={group: busy_s(own) / work.counted for group, own in lanes.items()},
        idle={group: idle(own) for group, own in lanes.items()},
        ranks=1 if setting.apart else 2,
        all_tokens=sum(row.get("actor/tokens", 0.0) for row in metrics),
        **usage.between(start, end, work.counted),
        max_staleness=max(staleness),
        violations=[str(violation) for violation in violations[:5]],
        staleness_violations=len(too_old) + sum(s > setting.max_staleness for s in staleness),
        decode_step_s=steps_s,
        timeline=[c for c in timeline if c["end_s"] >= closed[0]],
        window=window,
    )


class Usage:
    """CPU time of the driver, the ranks and the machine at the end of each step."""

    def __init__(self) -> None:
        self.processes: dict[str, list[int]] = {"driver": [os.getpid()]}
        self._core_s: dict[str, list[float]] = {"driver": [], "rollout": [], "actor": []}
        self._machine: list[tuple[float, float]] = []

    def after_step(self, metrics: Mapping[str, float]) -> bool:
        for who, so_far in self._core_s.items():
            so_far.append(sum(map(cpu_s, self.processes[who])))
        self._machine.append(machine_cpu_s())
        return False

    def between(self, start: int, end: int, steps: int) -> dict[str, Any]:
        busy, total = (b - a for a, b in zip(self._machine[start], self._machine[end], strict=True))
        core_s = {who: (so_far[end] - so_far[start]) / steps for who, so_far in self._core_s.items()}
        return {"core_s": core_s, "machine_busy": busy / total}


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    chosen = given.pop("schedule")
    main(Work(**given), chosen, Path(sys.argv[1]))
