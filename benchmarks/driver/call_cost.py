"""The driver's CPU time for a call to every rank of a group."""

from __future__ import annotations

import time

from workload import Timed, Work

CALLS = 50


def call_rank_us(ranks: int) -> float:
    """Return the driver's microseconds per rank of a call without rows, from request to last
    reply."""
    backend = Timed(Work.of(0, ranks).costs)
    with Work.of(0, ranks).driver(1, backend, lambda metrics: True) as driver:
        actor = driver.groups["actor"].handle
        simulated_s, began = backend.own_s, time.process_time()
        for _ in range(CALLS):
            driver.call(actor, "finish_publishing", version=0)
        own_s = time.process_time() - began - (backend.own_s - simulated_s)
        return round(1e6 * own_s / (CALLS * ranks), 2)
