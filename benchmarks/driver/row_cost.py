"""The driver's CPU time per row, from prompt to update, by rows in flight and by age of the run."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workload import Timed, Work

ANSWERED = 40_000
"""[rows] Minimum number of trained rows in the counted steps."""
GROWS = 0.25
"""Growth of the rows in flight per uncounted step, as a share of a step's rows."""
EQUAL_RANKS, EQUAL_ROWS = 16, 320
"""Ranks and rows per step when only the rows in flight differ."""


@dataclass(frozen=True)
class Mark:
    """Sums at the end of a step."""

    cpu_s: float
    simulator_s: float
    calls: int
    tasks: int


@dataclass(frozen=True)
class Cost:
    """Cost of the counted steps of a run."""

    rows_in_flight: int
    work: Work
    marks: Sequence[Mark]
    """Marks of the counted steps, and of the one before."""

    def row_us(self, first: int = 0, last: int = -1) -> float:
        """Return the driver's microseconds per row between two marks."""
        began, ended = self.marks[first], self.marks[last]
        own_s = ended.cpu_s - began.cpu_s - (ended.simulator_s - began.simulator_s)
        steps = range(len(self.marks))[last] - first
        return 1e6 * own_s / (steps * self.work.step_rows)

    @property
    def figures(self) -> dict[str, float]:
        began, ended, steps = self.marks[0], self.marks[-1], len(self.marks) - 1
        half = steps // 2
        return {
            "row_us": round(self.row_us(), 2),
            "rows_in_flight": self.rows_in_flight,
            "step_rows": self.work.step_rows,
            "steps": steps,
            "calls_per_step": round((ended.calls - began.calls) / steps, 1),
            "tasks_per_step": round((ended.tasks - began.tasks) / steps, 1),
            "second_half_over_first": round(self.row_us(half) / self.row_us(0, half), 3),
            "simulator_row_us": round(
                1e6 * (ended.simulator_s - began.simulator_s) / (steps * self.work.step_rows), 1
            ),
        }


def measure(work: Work, profile: cProfile.Profile | None = None) -> Cost:
    """Run the work. The first steps, while the rows in flight grow, do not count."""
    longest = work.staleness + 2
    counted = max(4, -(-ANSWERED // work.step_rows))
    backend = Timed(work.costs)
    most = before = 0
    marks: list[Mark] = []

    def look(metrics: Any) -> bool:
        nonlocal most, before
        assert driver.buffer is not None
        rows = len(driver.buffer.ledgers["train"].live.rows)
        grows, before = rows - before > GROWS * work.step_rows, rows
        if not marks and metrics["step"] < (longest if grows else 2):
            return False
        if not marks and profile is not None:
            profile.enable()
        most = max(most, rows)
        marks.append(Mark(time.process_time(), backend.own_s, backend.calls, backend.tasks))
        return len(marks) > counted

    with work.driver(
        longest + counted + work.staleness + 1, backend, look
    ) as driver:  # the run stops before
        driver.run()
    if profile is not None:
        profile.disable()
    gc.collect()
    return Cost(most, work, marks)


def row_us(rows: Sequence[int], ranks: int, profiled: int = 0) -> dict[str, Any]:
    """Return a row's cost at the largest number of rows in flight, and the figures of each run.

    Args:
        rows: rows in flight, for each run.
        ranks: generating ranks, and as many training ranks.
        profiled: number of functions to show.
    """
    found: dict[int, dict[str, float]] = {}
    for number in rows:
        profile = cProfile.Profile() if profiled else None
        found[number] = measure(Work.of(number, ranks), profile).figures
        print(f"{number:>9,} rows in flight: {found[number]}", flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(profiled)
    return {"row_us": found[max(rows)]["row_us"], "by_rows_in_flight": found}


def growth(rows: tuple[int, int]) -> dict[str, Any]:
    """Return a row's cost with many rows in flight over that with few, `rows` = (few, many), with
    equal steps and ranks."""
    found = [measure(Work.of(number, EQUAL_RANKS, EQUAL_ROWS)).figures for number in rows]
    for figures in found:
        print(f"steps of {EQUAL_ROWS} rows on {EQUAL_RANKS} ranks: {figures}", flush=True)
    few, many = (figures["row_us"] for figures in found)
    return {"growth_1e3_to_1e6": round(many / few, 3), "equal_steps_row_us": [few, many]}
