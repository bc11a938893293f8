"""What `make bench` measures with: the workloads, and the arithmetic of its summary. No system is started."""

from __future__ import annotations

import doctest
import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def grpo_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("grpo_step")


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("workloads")


@pytest.mark.parametrize("name", ["turns", "grpo_step", "algorithm_steps"])
def test_examples_in_docstrings_are_true(grpo_step: ModuleType, name: str):
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.failed == 0 and tried.attempted > 0


def test_workloads_are_those_that_are_promised(workloads: ModuleType):
    a, b, c = (workloads.WORKLOADS[name] for name in "abc")
    assert (a.num_prompts, a.num_samples, a.max_tokens) == (32, 8, 64)
    assert (b.num_prompts, b.num_samples, b.max_tokens, b.vocabulary) == (8, 8, 64, 32_000)
    assert (c.num_prompts, c.num_samples, c.max_tokens, c.mean_tokens) == (8, 8, 256, 48)
    assert replace(c, name="b", max_tokens=64, mean_tokens=None) == b
    for workload in (a, b, c):
        assert workload.rows % workload.trl_microbatch == 0
        assert len(set(workloads.prompts_of(workload))) == workload.num_prompts


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_model_stops_as_often_as_its_workload_says(workloads: ModuleType, name: str, tmp_path: Path):
    workload = workloads.WORKLOADS[name].small()
    wanted = 1 / workload.mean_tokens if workload.mean_tokens else 0.0
    assert math.isclose(workloads.make_model(workload, tmp_path), wanted, abs_tol=1e-3)


def test_prompts_have_one_length_and_responses_come_back_as_words(workloads: ModuleType, tmp_path: Path):
    from tokenizers import Tokenizer

    workload = workloads.WORKLOADS["b"].small()
    workloads.make_tokenizer(workload, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lengths = {len(ids.ids) for ids in tokenizer.encode_batch(workloads.prompts_of(workload))}
    assert lengths == {workloads.PROMPT_TOKENS}
    text = tokenizer.decode([7, 20, 17, workloads.STOP])
    assert text == "w7 w20 w17"
    assert workloads.reward(text) == pytest.approx(2 / 3)
    assert workloads.reward("") == 0.0


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("parity")


def test_parity_draws_groups_of_one_and_bounds_that_tell_a_ratio_from_its_reciprocal(parity: ModuleType):
    inputs = parity.draw(0)
    sizes = np.bincount(inputs["groups"])
    several, rewards, mask = sizes[inputs["groups"]] > 1, inputs["rewards"], inputs["mask"] > 0
    assert sizes.min() == 1 and len(set(sizes)) > 2 and set(parity.ON_PURPOSE) <= set(parity.WEFT)
    found = parity.evaluate({k: f for k, f in parity.WEFT.items() if "rloo" in k or "rejection token" in k}, inputs)
    others = np.array(
        [rewards[(inputs["groups"] == g) & (np.arange(24) != k)].sum() for k, g in enumerate(inputs["groups"])]
    )
    expected = np.where(several, rewards - others / np.maximum(sizes[inputs["groups"]] - 1, 1), 0)
    for name in ("verl rloo", "verl rloo_vectorized"):
        np.testing.assert_allclose(found[f"{name}/value"][:, 0], expected, atol=1e-6)
    assert not found["verl rloo, groups of one row/value"].any(), "a row without others has no advantage"
    low, high = parity.BOUNDS
    generator_over_trainer = np.exp(inputs["reference"] - inputs["old"])
    kept = (generator_over_trainer >= low) & (generator_over_trainer <= high)
    assert (found["verl rejection token_k1/value"] == kept)[mask].all()
    assert not (found["verl rejection token_k1, the same bounds/value"] == kept)[mask].all()


def call(node: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"node": node, "start_s": start_s, "end_s": end_s, "worker_s": 0.75 * (end_s - start_s)}


def step(seconds: float, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"step_s": seconds, "tokens": 100, "lengths": [50, 50], "calls": list(calls)}


def test_shares_count_every_moment_once(grpo_step: ModuleType):
    steps = [
        # publish_weights of the start, before the step, does not count
        step(
            4.0, call("publish_weights", 0.0, 1.0), call("rollout.generate", 1.0, 3.0), call("actor.update", 3.0, 5.0)
        ),
        step(
            4.0, call("rollout.generate", 6.0, 7.0), call("recorder.record", 7.0, 9.0), call("actor.update", 8.0, 10.0)
        ),
    ]
    shares = grpo_step.shares(steps)
    assert sum(shares.values()) == pytest.approx(1)
    assert {k: v for k, v in shares.items() if v} == {"generate": 0.375, "update": 0.5, "record": 0.125}
    assert grpo_step.outside_workers(steps) == pytest.approx(0.25 * 10 / 8)


def test_summary_compares_medians_with_the_bound_and_the_better_peer(grpo_step: ModuleType, workloads: ModuleType):
    def others(*seconds: float, tokens: int = 100) -> list[dict[str, Any]]:
        return [{"step_s": s, "generate_s": s / 4, "train_s": 3 * s / 4, "tokens": tokens} for s in seconds]

    weft = [step(s, call("actor.update", 0.0, s)) for s in (2.0, 1.0, 9.0)]
    measured = {
        "weft": weft,
        "bound": others(1.6, 1.5, 30.0),
        "trl": others(8.0, 8.0),
        "trl_vllm": others(5.0, tokens=50),
    }
    result = grpo_step.summarize(workloads.WORKLOADS["b"], measured)
    assert (result["step_s"], result["bound_s"], result["trl_s"], result["trl_vllm_s"]) == (2.0, 1.6, 8.0, 5.0)
    assert (result["bound_generate_s"], result["bound_train_s"]) == (0.4, 1.2)
    assert (result["ratio_to_bound"], result["ratio_to_trl"]) == (0.8, 2.5)
    assert result["ratio_to_trl_per_token"] == 2.0  # 0.08 s a token for TRL without vLLM, 0.04 for Weft
    assert (result["samples_per_s"], result["tokens_per_s"]) == (32.0, 50.0)


def test_without_peers_their_ratios_are_null(grpo_step: ModuleType, workloads: ModuleType):
    result = grpo_step.summarize(workloads.WORKLOADS["a"], {"weft": [step(1.0, call("actor.update", 0.0, 1.0))]})
    assert (
        result["ratio_to_bound"]
        is result["ratio_to_trl"]
        is result["ratio_to_trl_per_token"]
        is result["trl_s"]
        is None
    )
    assert "ratio_to_trl None" in grpo_step.table({**result, "placement": {"actor": 2, "rollout": 2}})


@pytest.fixture
def buffer_work(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("buffer_work")


def test_any_process_makes_the_same_groups_of_about_2000_tokens_a_row(buffer_work: ModuleType):
    assert doctest.testmod(buffer_work).failed == 0
    groups = buffer_work.ragged(1024, seed=7)
    again = buffer_work.group(7, 5)
    assert [*map(buffer_work.content_hash, groups[5].rows())] == [*map(buffer_work.content_hash, again.rows())]
    assert len({buffer_work.content_hash(row) for group in groups for row in group.rows()}) == 1024
    assert sum(group.num_tokens for group in groups) / 1024 == pytest.approx(2000, rel=0.05)
    with pytest.raises(ValueError, match="no whole groups"):
        buffer_work.ragged(12)


def test_groups_are_the_same_rows_joined_and_in_arrow(buffer_work: ModuleType):
    groups = buffer_work.ragged(24)
    joined = buffer_work.joined(groups)
    expected = [buffer_work.content_hash(row) for group in groups for row in group.rows()]
    assert [buffer_work.content_hash(row) for row in joined.rows()] == expected
    arrow = joined.to_arrow()
    assert arrow.schema.names == list(buffer_work.DTYPES)
    assert arrow["response_ids"][17].as_py() == joined["response_ids"][17].tolist()
    assert arrow["reward"].to_pylist() == joined.scalars["reward"].tolist()


@pytest.mark.slow
def test_transfer_queue_does_all_its_work_in_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = BENCHMARKS.parent / ".venv-peers" / "bin" / "python"
    if not python.exists():
        pytest.skip("no peers: `make bench-peers`")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    system = importlib.import_module("turns").System(
        [python, BENCHMARKS / "transfer_queue.py", "--small"], tmp_path / "log"
    )
    try:
        for work in system.facts["works"]:
            [answer] = system.run(1, work=work)
            assert answer["work"] == work
            assert answer["verified"], answer
            if work == "failures":
                assert answer["lost_rows"] == answer["claimed_rows"] == 8
                assert {answer["group_of"][row] for row in answer["sampled_group"]} == {0, 1}
    finally:
        system.close()


@pytest.fixture
def buffer_kills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("buffer_kills")


def test_nothing_is_lost_when_simulated_processes_die(buffer_kills: ModuleType):
    answer = buffer_kills.simulated(kills=200, rows=4_000, seed=1)
    assert (answer["kills"], answer["rows"], answer["violations"]) == (200, 4_000, [])
    assert (answer["lost"], answer["duplicated"], answer["mixed_groups"]) == (0, 0, 0)
    assert 0 < answer["longest_stall_s"] <= buffer_kills.DEADLINE_S + buffer_kills.TICK_S
    assert answer["late_refused"] > 0
    assert answer["restarts"] > 0


def test_nothing_is_lost_when_real_processes_are_killed(buffer_kills: ModuleType):
    answer = buffer_kills.real(kills=4, seed=1)
    assert (answer["kills"], answer["restarts"], answer["violations"]) == (4, 1, [])
    assert (answer["lost"], answer["duplicated"], answer["mixed_groups"]) == (0, 0, 0)
    assert answer["verified"] >= answer["rows"] > 0  # an update may be done again when its driver died before it heard
    assert (answer["wrong"], answer["lost_segments"], answer["left_behind"]) == (0, 0, [])
    assert answer["longest_stall_s"] < 10


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ("none", (0, 0, 0)),
        ("an update is not finished", (8, 0, 0)),
        ("a row is scored twice", (0, 1, 0)),
        ("an update takes seven rows", (1, 0, 1)),
        ("a prompt is issued twice", (0, 8, 0)),
        ("a prompt is not issued", (8, 0, 0)),
    ],
)
def test_the_reader_of_the_log_finds_what_is_wrong(
    buffer_kills: ModuleType, tmp_path: Path, change: str, wrong: tuple[int, int, int]
):
    from weft.dataflow.buffer.log import Log
    from weft.dataflow.buffer.sample_buffer import LOG

    def group(k: int, position: int) -> list[dict[str, Any]]:
        root, lease, ids = 100 * k, 10 * k, list(range(100 * k + 1, 100 * k + 9))
        own = ids[:7] if change == "an update takes seven rows" and k == 1 else ids
        records: list[dict[str, Any]] = [{"do": "issue", "first": root, "positions": [position]}]
        for node, rows in (("generate", [root]), ("score", ids), ("advantages", ids), ("actor.update", own)):
            lease += 1
            publish = {"do": "publish", "lease": lease, "ids": ids if node == "generate" else rows}
            publish |= {"parents": [root] * 8} if node == "generate" else {}
            again = {"do": "publish", "lease": lease, "ids": ids[3:4]}
            records += [{"do": "claim", "lease": lease, "node": node, "ids": rows}, publish]
            records += [again] if change == "a row is scored twice" and node == "score" and k == 1 else []
            records += [{"do": "finish", "lease": lease}]
        if change == "an update is not finished" and k == 1:
            records[-1] = {"do": "release", "lease": lease, "why": ""}
        return records

    positions = {"a prompt is issued twice": [0, 1, 1], "a prompt is not issued": [0]}.get(change, [0, 1])
    log = Log(tmp_path / LOG)
    for k, position in enumerate(positions):
        for record in group(k, position):
            log.append(record)
    log.close()
    found = buffer_kills.proof_of(tmp_path, 2)
    assert (found["lost"], found["duplicated"], found["mixed_groups"]) == wrong


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("schedules")


@pytest.fixture
def schedules_weft(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("schedules_weft")


def test_examples_of_the_schedules_are_true(schedules: ModuleType, schedules_weft: ModuleType):
    assert doctest.testmod(schedules).failed == doctest.testmod(schedules_weft).failed == 0


def test_examples_of_the_learning_curves_are_true(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert doctest.testmod(importlib.import_module("learning_curves")).failed == 0


def test_costs_of_the_simulator_are_those_of_measured_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    simulated_schedules = importlib.import_module("simulated_schedules")
    calls = [
        {"group": "actor", "node": "actor.update", "worker_s": 0.5 * last + 0.01 * tokens, "rows": 8, "tokens": tokens}
        | {"last": last, "end_s": 5.0 + tokens}
        for tokens, last in ((100, False), (200, True), (150, False), (400, True))
    ]
    calls.append({**calls[0], "worker_s": 99.0, "end_s": 1.0})  # before the window
    run = {"timeline": calls, "window": (2.0, 9.0), "decode_step_s": {"1": 0.1, "4": 0.2}, "ranks": 1}
    costs = simulated_schedules._costs([run], simulated_schedules.Known(lengths=((1,),)), slots=4)
    update = costs.linear("actor.update")
    assert (update.fixed_s, update.per_token_s) == pytest.approx((0.5, 0.01))
    assert costs.nodes["rollout.generate"].seconds_by_batch[1:].tolist() == pytest.approx([0.1, 0.4 / 3, 0.5 / 3, 0.2])


def test_a_prompt_has_the_same_lengths_under_every_schedule_and_they_have_a_long_tail(schedules_weft: ModuleType):
    lengths = [schedules_weft.response_length(seed, 48.0, 0.8, 256) for seed in range(2000)]
    assert lengths == [schedules_weft.response_length(seed, 48.0, 0.8, 256) for seed in range(2000)]
    ordered = sorted(lengths)
    assert ordered[1000] == pytest.approx(48, rel=0.1)
    assert ordered[0] >= 1 and ordered[-1] == 256
    assert sum(lengths) / 2000 > 60, "a few long ones"


def test_no_two_prompts_of_a_run_are_alike(schedules: ModuleType, workloads: ModuleType):
    for work in (schedules.Work(), schedules.Work().small()):
        prompts = workloads.prompts_of(work.workload())
        assert len(set(prompts)) == len(prompts) == work.groups * work.steps
        assert work.tail > max(bound for _, bound, _ in schedules.SCHEDULES.values()), "nobody runs out of prompts"


def test_a_row_that_is_too_old_is_found_in_the_log(schedules_weft: ModuleType, tmp_path: Path):
    from weft.dataflow.buffer.log import Log
    from weft.dataflow.buffer.sample_buffer import LOG

    log = Log(tmp_path / LOG)
    for record in (
        {"do": "publish", "lease": 1, "ids": [1, 2, 3], "parents": [0, 0, 0], "versions": [0, 1, 3]},
        {"do": "claim", "lease": 2, "node": "reward.score", "ids": [1, 2, 3]},
        {"do": "claim", "lease": 3, "node": "actor.update", "ids": [1, 2, 3], "stale": [3, 1, "wait"]},
    ):
        log.append(record)
    log.close()
    assert [schedules_weft.rows_too_old(tmp_path, bound) for bound in (0, 1, 2, 3)] == [2, 2, 1, 0]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_schedules_do_the_same_work_on_real_workers(schedules: ModuleType, workloads: ModuleType, tmp_path: Path):
    work = schedules.Work().small()
    folder = workloads.prepare(work.workload(), tmp_path)
    runs = {name: schedules.run(work, name, folder, name) for name in ("synchronous", "asynchronous_1")}
    for facts in runs.values():
        assert len(facts["step_s"]) == work.counted
        assert (facts["stale_rows"], facts["violations"]) == (0, [])
    assert runs["synchronous"]["max_staleness"] == 0 < runs["asynchronous_1"]["max_staleness"] <= 1
    lengths = [facts["all_tokens"] for facts in runs.values()]
    assert lengths[0] == lengths[1]


@pytest.mark.slow
@pytest.mark.ray
def test_a_dispatched_microbatch_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    dispatch = importlib.import_module("dispatch")
    row = dispatch.measure("copied", 2, dispatch.MIB, steps=3)
    assert (row["workers"], row["mib"]) == (2, 1.0)
    assert 0 < row["ms"] < row["wall_ms"] and row["cpu_ms"] > 0


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recovery")


def test_examples_of_the_pause_are_true(recovery: ModuleType):
    assert doctest.testmod(importlib.import_module("recovery_pause")).failed == 0


def test_damage_is_found_and_what_is_lost_is_counted(recovery: ModuleType, tmp_path: Path):
    from weft.dataflow.buffer.log import Log, LogReader
    from weft.dataflow.buffer.sample_buffer import LOG

    recovery_log = importlib.import_module("recovery_log")
    (tmp_path / "root").mkdir()
    work = recovery.prepare_work(tmp_path / "work")
    run = recovery.finished_run(work, tmp_path / "root", 3)
    outcomes = recovery.damage_all(run.path, tmp_path / "damaged", seed=1)
    assert [(o.file, o.kind) for o in outcomes if not o.found] == [("ledger checkpoint", "missing")]
    assert all(o.same_rows for o in outcomes if o.goes_on_after == 3)

    rows, steps = {"samples": recovery.SAMPLES, "source": recovery.SOURCE, "seed": 0}, 3
    found = recovery_log.account(run.path / "buffer", **rows)
    assert (found.prompts, found.trained, found.in_flight) == (12, 48, 0)
    assert (found.lost, found.duplicated, found.violations) == (0, 0, [])
    assert recovery_log.account(run.path / "buffer", **{**rows, "seed": 1}).lost > 0, "other prompts than were drawn"
    assert recovery_log.incomplete_steps(run.path, steps, 16) == []
    assert recovery_log.incomplete_steps(run.path, steps, 15) and recovery_log.incomplete_steps(run.path, steps + 1, 16)

    records = list(LogReader(run.path / "buffer" / LOG))
    update = next(r["lease"] for r in reversed(records) if r.get("node") == "actor.update")
    for change, (lost, duplicated) in {"lost": (1, 0), "twice": (0, 16)}.items():
        (tmp_path / change).mkdir()
        log = Log(tmp_path / change / LOG)
        for record in records:
            of_update = record.get("lease") == update and record.get("graph") == "train"
            if change == "lost" and of_update and record["do"] == "claim":
                record = {**record, "ids": record["ids"][:-1]}
            log.append(record)
            if change == "twice" and of_update and record["do"] == "claim":
                log.append({**record, "lease": update + 1})
                log.append({"do": "finish", "graph": "train", "lease": update + 1})
        log.close()
        again = recovery_log.account(tmp_path / change, **rows)
        assert (again.lost, again.duplicated) == (lost, duplicated), change


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_loses_nothing_when_its_processes_are_killed(recovery: ModuleType, tmp_path: Path):
    (tmp_path / "root").mkdir()
    work = recovery.prepare_work(tmp_path / "work")
    found = recovery.kills(work, tmp_path / "root", recovery.SMALL, seed=0)
    assert found["kills"] == sum(found["kills_by"].values()) == 3
    assert (found["lost"], found["duplicated"], found["kills_wrong"]) == (0, 0, [])


def test_the_bound_of_an_algorithm_does_the_work_of_the_real_step(workloads: ModuleType, tmp_path: Path):
    """Its microbatches hold each row once, what it computes of their tokens is what an actor computes, and no update is left out."""
    import torch

    from weft.dataflow.batch import Batch
    from weft.workers.reference import ReferenceConfig, ReferenceWorker

    algorithms, bound = (importlib.import_module(name) for name in ("algorithm_workloads", "algorithm_bound"))
    folder = algorithms.prepare(algorithms.ALGORITHM_WORKLOADS["1m"].small(), tmp_path)
    given = algorithms.read(folder / "rows.jsonl")
    rows = bound.by_length((row["prompt"], row["given"]) for row in given)
    parts = bound.cut(rows, 256)
    assert sum(len(part.ids) for part in parts) == len(given)
    assert algorithms.num_tokens(given) == sum(len(prompt) + len(response) for prompt, response in rows)
    with torch.no_grad():
        found = torch.cat([bound.Model(folder / "model")(part) for part in parts])
    samples = Batch.of(prompt_ids=[prompt for prompt, _ in rows], response_ids=[response for _, response in rows])
    actor = ReferenceWorker(ReferenceConfig(model=str(folder / "model")))
    wanted = torch.tensor(actor.logprobs(samples, into="logprobs").ragged_numpy("logprobs")[0])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)

    ppo, dpo = bound.PpoStep(folder), bound.DpoStep(folder)
    for step in (ppo, dpo):
        step.prepare(256)
        step()
    trained = {model: model._optimizer.state_dict()["state"] for model in (ppo._actor, ppo._critic, dpo._actor)}
    assert [{int(one["step"]) for one in state.values()} for state in trained.values()] == [{4}, {4}, {1}]
    assert (
        sorted(len(part.ids) for parts in ppo._minibatches for part in parts)
        and [sum(len(part.ids) for part in parts) for parts in ppo._minibatches] == [len(given) // 2] * 2
    )
    assert sum(len(part.ids) for part in dpo.parts) == len(given), "both responses of half as many pairs"
