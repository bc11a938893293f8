"""One graph under every schedule: equal updates where required, and rows within the staleness
bound."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import (
    PartsActor,
    SlowRollout,
    ToyReward,
    centred,
    odd_prompts,
    prompts,
    toy_dapo,
    toy_evaluation,
    toy_grpo,
)

from weft.controllers.driver import Driver
from weft.controllers.loop import admission
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.run_spec import Evaluation
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.dashboard.reading.graph_page import staleness
from weft.dashboard.reading.run_reader import RunReader
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.staleness import row_versions
from weft.dataflow.errors import StalledError, UserError
from weft.dataflow.graph import group
from weft.dataflow.metric_names import untimed
from weft.dataflow.operation import GROUPS, Shape, node
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader
from weft.dataflow.runs.samples import samples
from weft.dataflow.tracing import graph as weft_graph


@node(shape=Shape.FILTER, takes=GROUPS, reads=("reward",))
def none_at_all(samples: Batch) -> Batch:
    return samples.slice(0, 0)


def groups(**rollout: Any) -> dict[str, Any]:
    made = {
        "rollout": group(SlowRollout, **rollout),
        "reward": group(ToyReward),
        "actor": group(PartsActor),
    }
    made["rollout"].follows(made["actor"])
    return made


def run(
    root: Path,
    schedule: Training,
    graph: Any = toy_grpo,
    stop_on: tuple[str, ...] = ("no_signal",),
    **rollout: Any,
) -> tuple[list[Any], list[dict[str, float]], Driver]:
    made = groups(**rollout)
    name = f"run-{len(list(root.iterdir()))}"
    more: Any = {"root": root, "name": name, "stop_on": stop_on, "progress": False}
    with Driver(graph(prompts(40), **made), schedule=schedule, **more) as driver:
        metrics = driver.run()
        parts = driver.call(made["actor"], "seen_parts")[0]
    return parts, metrics, driver


def steps_of(parts: list[tuple[list[int], bool]]) -> list[list[int]]:
    """Join the parts of each update."""
    steps: list[list[int]] = [[]]
    for ids, last in parts:
        steps[-1] += ids
        if last:
            steps.append([])
    return [sorted(set(ids)) for ids in steps[:-1]]


def test_pipelined_makes_the_updates_of_synchronous_and_begins_them_earlier(tmp_path: Path):
    whole, expected, _ = run(tmp_path, Synchronous(steps=4, prompts_per_step=6))
    parts, found, driver = run(tmp_path, Pipelined(steps=4, prompts_per_step=6))
    assert [last for _, last in whole] == [True] * 4 and len(parts) > 8
    assert steps_of(parts) == steps_of(whole)
    assert [untimed(row) for row in found] == [untimed(row) for row in expected]
    first = {
        node: min(c["start_s"] for c in driver.directory.timeline if c["node"] == node)
        for node in ("reward.score", "actor.update")
    }
    generated = min(c["end_s"] for c in driver.directory.timeline if c["node"] == "rollout.generate")
    assert first["reward.score"] < generated and first["actor.update"] < generated


def test_parts_of_an_update_can_have_a_least_size(tmp_path: Path):
    parts, _, _ = run(tmp_path, Pipelined(steps=3, prompts_per_step=6, groups_per_part=3))
    sizes = [len(set(ids)) for ids, _ in parts]
    assert (
        all(size >= 3 for size, (_, last) in zip(sizes, parts, strict=True) if not last)
        and sum(sizes) == 18
    )


@pytest.mark.thorough
@pytest.mark.parametrize("partial_rollouts", ["continue", "finish", "requeue"])
@settings(max_examples=6, deadline=None)
@given(
    staleness=st.integers(1, 3),
    size=st.integers(1, 5),
    slowest=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_no_row_is_older_than_the_bound_and_every_prompt_is_trained_once(
    tmp_path_factory: pytest.TempPathFactory,
    partial_rollouts: Any,
    staleness: int,
    size: int,
    slowest: int,
    seed: int,
):
    root = tmp_path_factory.mktemp("runs")
    schedule = Asynchronous(
        steps=10, prompts_per_step=size, max_staleness=staleness, partial_rollouts=partial_rollouts
    )
    parts, metrics, driver = run(root, schedule, slowest=slowest, seed=seed)
    steps = steps_of(parts)
    assert [len(step) for step in steps] == [size] * 10
    assert sorted(g for step in steps for g in step) == list(range(10 * size)), (
        "admission paces, nothing is discarded"
    )
    assert max(row.get("actor/lag", 0) for row in metrics) <= staleness
    folder = driver.directory.path / "buffer"
    report = check_log(folder)
    assert not report.violations
    versions = [
        v for r in LogReader(folder / LOG) if r["do"] == "publish" for v in r.get("versions", ())
    ]
    assert len(set(versions)) > 1
    recorded = {
        i for r in LogReader(folder / LOG) if r.get("node") == "recorder.record" for i in r["ids"]
    }
    trained = {i for r in LogReader(folder / LOG) if r.get("node") == "actor.update" for i in r["ids"]}
    assert trained <= recorded


@pytest.mark.thorough
@pytest.mark.parametrize("share", [None, 0.5])
def test_what_counts_for_the_staleness_of_an_episode_can_be_chosen(tmp_path: Path, share: float | None):
    counts: dict[str, Any] = {"staleness_of": "share", "stale_share": share} if share else {}
    schedule = Asynchronous(steps=12, prompts_per_step=3, max_staleness=1, **counts)
    _, metrics, driver = run(tmp_path, schedule, slowest=40)
    lag = max(row.get("actor/lag", 0) for row in metrics)
    assert lag > 1 if share else lag <= 1, "rows may have a smaller share of older tokens"
    folder = driver.directory.path / "buffer"
    report = check_log(folder)
    assert not report.violations
    noted = {
        id: version
        for r in LogReader(folder / LOG)
        if r["do"] == "publish"
        for id, version in zip(r["ids"], r.get("versions", ()), strict=False)
    }
    table = samples(driver.directory.path)
    assert table is not None
    rows = Batch.of_table(table.select(["sample_id", "response_versions"]))
    expected = row_versions(rows, share or "oldest_token").tolist()
    assert [noted[id] for id in rows["sample_id"].to_pylist()] == expected
    # The dashboard counts by the same rule.
    reader = RunReader("run", driver.directory.path)
    assert reader.samples.wait(10.0)
    shown = staleness(reader.samples.table())
    assert max(int(lag) for step in shown for lag in step["counts"]) <= 1


def test_generation_continues_during_an_update(tmp_path: Path):
    _, metrics, driver = run(
        tmp_path, Asynchronous(steps=6, prompts_per_step=3, max_staleness=2), slowest=9
    )
    calls = driver.directory.timeline
    updates = [c for c in calls if c["node"] == "actor.update"]
    generating = [c for c in calls if c["node"] == "rollout.generate"]
    assert any(
        g["start_s"] < u["start_s"] and u["end_s"] < g["end_s"] for u in updates for g in generating
    )
    assert max(row.get("actor/lag", 0) for row in metrics) >= 1, "it ran ahead"


def test_a_staleness_of_nothing_is_synchronous(tmp_path: Path):
    whole, expected, _ = run(tmp_path, Synchronous(steps=3, prompts_per_step=4))
    parts, found, _ = run(tmp_path, Asynchronous(steps=3, prompts_per_step=4, max_staleness=0))
    assert parts == whole
    assert [untimed(row) for row in found] == [untimed(row) for row in expected]


@pytest.mark.parametrize(
    "schedule", [Pipelined(steps=3, prompts_per_step=4), Asynchronous(steps=3, prompts_per_step=4)]
)
def test_filtered_groups_are_replaced(tmp_path: Path, schedule: Training):
    parts, _, driver = run(tmp_path, schedule, toy_dapo)
    assert [len(step) for step in steps_of(parts)] == [4, 4, 4]
    assert driver.directory.metrics[-1]["step"] == 3


def test_evaluations_run_during_asynchronous_training(tmp_path: Path):
    made = groups()
    held_out = toy_evaluation(prompts(5, "held_out"), rollout=made["rollout"], reward=made["reward"])
    schedule = Asynchronous(steps=8, prompts_per_step=3, max_staleness=3)
    driver = Driver(
        toy_grpo(prompts(20), **made),
        schedule=schedule,
        evaluations=[Evaluation(held_out, every=2)],
        root=tmp_path,
        progress=False,
    )
    with driver:
        metrics = driver.run()
    made = {int(row["step"]): row for row in metrics if "eval/reward/mean" in row}
    assert list(made) == [0, 2, 4, 6, 8]
    assert all(row["eval/rollout/tokens"] > 0 for row in made.values())
    records = LogReader(driver.directory.path / "buffer" / LOG)
    generated = [r for r in records if r["do"] == "publish" and r["graph"] == "eval" and "versions" in r]
    oldest = {v for r in generated for v in r["versions"]}
    assert {row["eval/oldest_version"] for row in made.values()} <= oldest
    for step, row in made.items():
        assert step <= row["eval/oldest_version"] <= row["eval/newest_version"], (
            "none begins before its weights are there"
        )


def test_a_run_stopped_early_leaves_rows_generated_ahead(tmp_path: Path):
    made = groups()
    schedule = Asynchronous(steps=50, prompts_per_step=3, max_staleness=2)
    with Driver(
        toy_grpo(prompts(20), **made),
        schedule=schedule,
        root=tmp_path,
        progress=False,
        stop=lambda row: row["step"] >= 2,
    ) as driver:
        assert driver.run()[-1]["step"] == 2
        folder = driver.directory.path / "buffer"
    assert not check_log(folder).violations
    records = list(LogReader(folder / LOG))
    trained = {i for r in records if r.get("node") == "actor.update" for i in r["ids"]}
    assert trained and trained <= {
        i for r in records if r.get("node") == "recorder.record" for i in r["ids"]
    }


def test_a_filter_that_lets_nothing_through_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def nothing(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        samples = reward.score(rollout.generate(prompts))
        return actor.update(centred(none_at_all(samples)))

    monkeypatch.setattr(admission, "MAX_REFILLS", 3)
    with pytest.raises(
        StalledError,
        match="step 1 lacks 2 of its 2 groups: 0 of the 11 prompts issued for it have passed the filters",
    ):
        run(tmp_path, Asynchronous(steps=3, prompts_per_step=2), weft_graph(nothing))


@node(shape=Shape.FILTER, takes=GROUPS, reads=("reward",))
def one_in_seven(samples: Batch) -> Batch:
    return samples.take(np.flatnonzero(samples.numpy("group_id") % 7 == 0))


def few_pass(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    return actor.update(centred(one_in_seven(reward.score(rollout.generate(prompts)))))


@pytest.mark.parametrize("kind", [Synchronous, Pipelined, Asynchronous])
def test_a_step_is_trained_on_the_groups_that_pass_if_few_do(
    kind: type[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(admission, "MAX_REFILLS", 2)
    schedule = kind(steps=3, prompts_per_step=8)
    parts, metrics, driver = run(tmp_path, schedule, weft_graph(few_pass))
    steps = steps_of(parts)
    assert (
        len(metrics) == 4
        and len(steps) == 3
        and all(1 <= len(step) <= 8 for step in steps)
        and len(steps[0]) < 8
    )
    alerts = [alert for alert in read_alerts(driver.directory.path) if alert.name == "short_step"]
    assert len(alerts) == 1, "it is said once"
    assert "step 1 lacks " in alerts[0].text and "It is trained on " in alerts[0].text
    assert not check_log(driver.directory.path / "buffer").violations


@pytest.mark.parametrize("kind", [Synchronous, Pipelined, Asynchronous])
def test_a_step_with_few_groups_may_stop_the_run(
    kind: type[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(admission, "MAX_REFILLS", 2)
    with pytest.raises(
        StalledError,
        match=r"step 1 lacks \d of its 8 groups: [1-9] of .* Without 'short_step' in Driver\(stop_on",
    ):
        schedule = kind(steps=3, prompts_per_step=8)
        run(tmp_path, schedule, weft_graph(few_pass), stop_on=("short_step",))
    with pytest.raises(UserError, match=r"no setting 'short_steps' .*; Driver\(stop_on="):
        kind(short_steps="stop")  # pyright: ignore[reportCallIssue]


def test_updates_behind_different_filters_are_refused_but_by_synchronous(tmp_path: Path):
    def two(prompts: Any, *, rollout: Any, reward: Any, actor: Any, critic: Any) -> Any:
        samples = centred(reward.score(rollout.generate(prompts)))
        return critic.update(samples), actor.update(odd_prompts(samples))

    made = {**groups(), "critic": group(PartsActor)}
    graph = weft_graph(two)(prompts(8), **made)
    with pytest.raises(UserError, match="come after different filters"):
        Driver(graph, schedule=Pipelined(steps=1), root=tmp_path)
    Driver(graph, schedule=Synchronous(steps=1), root=tmp_path)


def test_overlapping_groups_need_separate_pools(tmp_path: Path):
    made = groups()
    pool = ResourcePool("everything", cpus=2)
    with pytest.raises(
        UserError, match="'rollout' and 'actor' take turns on pool 'everything': give each"
    ):
        Driver(
            toy_grpo(prompts(8), **made),
            schedule=Asynchronous(),
            placement={name: Place(pool) for name in ("rollout", "actor")},
            root=tmp_path,
        )
