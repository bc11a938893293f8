"""The schedules benchmark: the work of every schedule, and its reading of a run's records."""

from pathlib import Path
from typing import Any

import pytest


def test_costs_of_the_simulator_are_those_of_measured_calls(load: Any):
    simulated = load("schedules/simulated")
    calls = [
        {
            "group": "actor",
            "node": "actor.update",
            "worker_s": 0.5 * last + 0.01 * tokens,
            "rows": 8,
            "tokens": tokens,
        }
        | {"last": last, "end_s": 5.0 + tokens}
        for tokens, last in ((100, False), (200, True), (150, False), (400, True))
    ]
    calls.append({**calls[0], "worker_s": 99.0, "end_s": 1.0})  # before the window
    run = {"timeline": calls, "window": (2.0, 9.0), "decode_step_s": {"1": 0.1, "4": 0.2}, "ranks": 1}
    costs = simulated._costs([run], ((1,),))
    update = costs.linear("actor.update")
    assert (update.fixed_s, update.per_token_s) == pytest.approx((0.5, 0.01))
    assert costs.nodes["rollout.generate"].seconds_by_batch(4)[1:].tolist() == pytest.approx(
        [0.1, 0.4 / 3, 0.5 / 3, 0.2]
    )


def test_a_prompt_has_the_same_lengths_under_every_schedule_and_they_have_a_long_tail(load: Any):
    response_length = load("schedules/long_tailed").response_length
    lengths = [response_length(seed, 48.0, 0.8, 256) for seed in range(2000)]
    assert lengths == [response_length(seed, 48.0, 0.8, 256) for seed in range(2000)]
    ordered = sorted(lengths)
    assert ordered[1000] == pytest.approx(48, rel=0.1)
    assert ordered[0] >= 1 and ordered[-1] == 256
    assert sum(lengths) / 2000 > 60, "a few long ones"


def test_no_two_prompts_of_a_run_are_alike(load: Any):
    module, workloads = load("schedules/work"), load("workloads")
    for work in (module.Work(), module.Work().small()):
        prompts = workloads.prompts_of(work.workload())
        assert len(set(prompts)) == len(prompts) == work.groups * work.steps
        assert work.tail > max(setting.max_staleness for setting in module.SCHEDULES.values()), (
            "prompts suffice"
        )


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_schedules_do_the_same_work_on_real_workers(load: Any, tmp_path: Path):
    schedules = load("schedules/schedules")
    work = schedules.Work().small()
    folder = schedules.prepare(work.workload(), tmp_path)
    runs = {name: schedules.run(work, name, folder, name) for name in ("synchronous", "asynchronous_1")}
    for facts in runs.values():
        assert len(facts["step_s"]) == work.counted
        assert (facts["staleness_violations"], facts["violations"]) == (0, [])
    assert runs["synchronous"]["max_staleness"] == 0 < runs["asynchronous_1"]["max_staleness"] <= 1
    assert runs["synchronous"]["all_tokens"] == runs["asynchronous_1"]["all_tokens"]
