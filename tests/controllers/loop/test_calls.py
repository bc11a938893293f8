"""Idle times per group follow from the timeline."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from simulated_runs import KNOWN, apart, costs, run

from weft.controllers.loop.calls import busy_s
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.controllers.simulation.backend import Simulated
from weft.dashboard.timeline import load_timeline
from weft.dataflow.runs.tables import CALLS, begin_again, calls_kept, read_timeline


@pytest.mark.parametrize("seed", range(20))
def test_busy_time_is_the_time_with_any_open_call(seed: int):
    draw = random.Random(seed)
    spans: list[tuple[int, int]] = []
    for _ in range(draw.randrange(12)):
        start = draw.randrange(0, 90)
        spans.append((start, start + draw.randrange(0, 30)))
    begun = [draw.randrange(0, 100) for _ in range(draw.randrange(3))]
    since, now = 20, 130
    busy = {
        moment
        for start, end in [*spans, *((b, now) for b in begun)]
        for moment in range(max(start, since), end)
    }
    assert busy_s([*spans, *((b, now) for b in begun)], since) == len(busy)


@pytest.mark.parametrize(
    "schedule",
    [
        Synchronous(steps=3, prompts_per_step=4),
        Asynchronous(steps=4, prompts_per_step=4, max_staleness=1),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_the_idle_share_of_a_step_is_that_of_its_timeline(tmp_path: Path, schedule: Training):
    driver = run(tmp_path, schedule, Simulated(costs(KNOWN)), apart(2, 1))
    rows = driver.directory.metrics
    for before, row in pairwise(rows):
        step = int(row["step"])
        lanes = {lane.name: lane for lane in load_timeline(driver.directory.path).lanes}
        for group in ("rollout", "reward", "actor"):
            start, end = before["time_s"], row["time_s"]
            moments = [start + (end - start) * (k + 0.5) / 2000 for k in range(2000)]
            calls = list(zip(lanes[group].start_s, lanes[group].end_s, strict=True))
            idle = sum(not any(a <= m < b for a, b in calls) for m in moments) / 2000
            assert row[f"{group}/idle_share"] == pytest.approx(idle, abs=0.01), f"{group} in step {step}"
    assert "functions/idle_share" not in rows[1] and "rollout/idle_share" not in rows[0]


def test_the_timeline_has_the_answer_time_of_each_rank(tmp_path: Path):
    driver = run(
        tmp_path, Synchronous(steps=2, prompts_per_step=4), Simulated(costs(KNOWN)), apart(2, 1)
    )
    table = read_timeline(driver.directory.path)
    assert table is not None
    calls = [row for row in table.to_pylist() if row["node"] == "rollout.generate"]
    assert calls
    for call in calls:
        assert {one["rank"] for one in call["by_rank"]} == {0, 1}
        ends = [one["end_s"] for one in call["by_rank"]]
        assert (
            ends == sorted(ends)
            and ends[-1] == pytest.approx(call["end_s"])
            and call["start_s"] < ends[0]
        )
        assert max(one["worker_s"] for one in call["by_rank"]) == pytest.approx(call["worker_s"])
    assert all(row["by_rank"] is None for row in table.to_pylist() if row["group"] == "actor"), (
        "it has one rank"
    )


def test_a_timeline_without_ranks_is_read_and_continued(tmp_path: Path):
    driver = run(
        tmp_path, Synchronous(steps=1, prompts_per_step=4), Simulated(costs(KNOWN)), apart(2, 1)
    )
    table = read_timeline(driver.directory.path)
    assert table is not None
    old = table.drop_columns(["by_rank"])
    begin_again(tmp_path, "timeline", old)
    assert read_timeline(tmp_path) == old
    kept = calls_kept(old, until_s=old["end_s"].to_pylist()[0])
    assert kept.schema == CALLS and len(kept) < len(old) and kept["by_rank"].null_count == len(kept)
