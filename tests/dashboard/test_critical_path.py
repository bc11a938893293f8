"""What the steps of a run waited for: calls, causes, and the times between calls."""

from typing import Any

import numpy as np
import pytest

from weft.dashboard.critical_path import CriticalPaths, Limit
from weft.dashboard.timeline import CallLog

GRAPHS = {
    "train": {
        "nodes": [
            {"name": "rollout.generate", "after": []},
            {"name": "reward.score", "after": ["rollout.generate"]},
            {"name": "actor.update", "after": ["reward.score"]},
        ]
    }
}


def call(group: str, node: str, start_s: float, end_s: float, **rest: Any) -> dict[str, Any]:
    """Return a row of the timeline, whose ranks worked all the time."""
    own = {"step": 1, "graph": "train", "group": group, "node": node, "rows": 8}
    return {**own, "start_s": start_s, "end_s": end_s, "worker_s": end_s - start_s, **rest}


def limits(*calls: dict[str, Any], steps: tuple[int, ...] = (1,)) -> list[Limit]:
    return CriticalPaths(CallLog.of_rows(calls), GRAPHS).limits(steps)


def test_each_second_of_a_step_has_one_cause():
    ranks = [{"rank": rank, "end_s": end, "worker_s": end - 1.0} for rank, end in ((0, 3.0), (1, 5.0))]
    found = limits(
        call("actor", "publish_weights", 0.0, 1.0, graph=""),
        call("rollout", "rollout.generate", 1.0, 5.5, worker_s=4.0, by_rank=ranks),
        call("reward", "reward.score", 5.5, 6.0),
        call("actor", "actor.update", 6.25, 8.25),
        call("actor", "save_checkpoint", 8.25, 8.5, graph=""),
    )
    assert found == [
        Limit("train", "rollout", "rollout.generate", "compute", 3.0),
        Limit("train", "actor", "actor.update", "compute", 2.0),
        Limit("", "actor", "publish_weights", "weights", 1.0),
        Limit("train", "rollout", "rollout.generate", "tail", 1.0),
        Limit("train", "rollout", "rollout.generate", "host", 0.5),
        Limit("train", "reward", "reward.score", "compute", 0.5),
        Limit("", "", "", "driver", 0.25),
        Limit("", "actor", "save_checkpoint", "checkpoint", 0.25),
    ]
    assert sum(limit.seconds for limit in found) == 8.5


def test_calls_beside_the_path_cost_nothing():
    found = limits(
        call("rollout", "rollout.generate", 0, 4),
        call("reward", "reward.score", 1, 3),
        call("reward", "reward.score", 4, 5),
        call("recorder", "recorder.record", 0, 6),
        call("actor", "actor.update", 5, 6),
    )
    assert {limit.node: limit.seconds for limit in found} == {
        "rollout.generate": 4,
        "reward.score": 1,
        "actor.update": 1,
    }


def test_a_call_whose_rows_streamed_on_has_no_tail_yet():
    ranks = [{"rank": 0, "end_s": 2.0, "worker_s": 2.0}, {"rank": 1, "end_s": 4.0, "worker_s": 4.0}]
    found = limits(
        call("rollout", "rollout.generate", 0, 4, by_rank=ranks),
        call("reward", "reward.score", 3, 5),
    )
    assert found == [
        Limit("train", "rollout", "rollout.generate", "compute", 3.0),
        Limit("train", "reward", "reward.score", "compute", 2.0),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_causes_of_random_runs_add_up_to_the_time_of_their_steps(seed: int):
    rng = np.random.default_rng(seed)
    names = [
        ("rollout", "rollout.generate", "train"),
        ("reward", "reward.score", "train"),
        ("actor", "actor.update", "train"),
        ("actor", "publish_weights", ""),
        ("rollout", "receive_weights", ""),
        ("actor", "save_checkpoint", ""),
        ("rollout", "offload", ""),
    ]
    calls = list[dict[str, Any]]()
    for _ in range(60):
        group, node, graph = names[rng.integers(len(names))]
        start, seconds = rng.uniform(0, 20), rng.exponential(1.0)
        ends = start + seconds * rng.uniform(0, 1, 3)
        ranks = [
            {"rank": k, "end_s": end, "worker_s": end - start} for k, end in enumerate(sorted(ends))
        ]
        worker = {"worker_s": seconds * rng.uniform(), "by_rank": ranks if rng.random() < 0.5 else None}
        calls.append(call(group, node, start, start + seconds, graph=graph, **worker))
    calls.sort(key=lambda one: one["end_s"])
    for number, one in enumerate(calls):
        one["step"] = number // 20
    log = CallLog.of_rows(calls)
    found = CriticalPaths(log, GRAPHS).limits([0, 1, 2])
    window = log.of_steps(0, 2)
    assert window is not None and all(limit.seconds > 0 for limit in found)
    assert sum(limit.seconds for limit in found) == pytest.approx(window.seconds, abs=60 * 3 * 1e-4)
