"""Parts of `make bench`: workloads, summary and bound. No system is started."""

import doctest
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.dataflow.batch import Batch
from weft.workers.reference import ReferenceConfig, ReferenceWorker

WITH_EXAMPLES = [
    "records",
    "steps/algorithm_steps",
    "buffer/rows",
    "schedules/schedules",
    "schedules/learning_curves",
    "recovery/pause",
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(load: Any, name: str):
    tried = doctest.testmod(load(name))
    assert tried.failed == 0 and tried.attempted > 0


def test_workloads_are_those_that_are_promised(load: Any):
    workloads = load("workloads")
    a, b, c = (workloads.WORKLOADS[name] for name in "abc")
    assert (a.num_prompts, a.num_samples, a.max_tokens) == (32, 8, 64)
    assert (b.num_prompts, b.num_samples, b.max_tokens, b.vocabulary) == (8, 8, 64, 32_000)
    assert (c.num_prompts, c.num_samples, c.max_tokens, c.mean_tokens) == (8, 8, 256, 48)
    assert replace(c, name="b", max_tokens=64, mean_tokens=None) == b
    for workload in (a, b, c):
        assert workload.rows % workload.trl_microbatch == 0
        assert len(set(workloads.prompts_of(workload))) == workload.num_prompts
        assert workloads.Workload.of(asdict(workload)) == workload


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_model_stops_as_often_as_its_workload_asks(load: Any, name: str, tmp_path: Path):
    workloads = load("workloads")
    workload = workloads.WORKLOADS[name].small()
    wanted = 1 / workload.mean_tokens if workload.mean_tokens else 0.0
    assert math.isclose(workloads.make_model(workload, tmp_path), wanted, abs_tol=1e-3)


def test_prompts_have_one_length_and_responses_come_back_as_words(load: Any, tmp_path: Path):
    from tokenizers import Tokenizer

    workloads = load("workloads")
    workload = workloads.WORKLOADS["b"].small()
    workloads.make_tokenizer(workload, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lengths = {len(ids.ids) for ids in tokenizer.encode_batch(workloads.prompts_of(workload))}
    assert lengths == {workloads.PROMPT_TOKENS}
    text = tokenizer.decode([7, 20, 17, workloads.STOP])
    assert text == "w7 w20 w17"
    assert workloads.reward(text) == pytest.approx(2 / 3) and workloads.reward("") == 0.0


def call(node: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"node": node, "start_s": start_s, "end_s": end_s, "worker_s": 0.75 * (end_s - start_s)}


def step(seconds: float, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"step_s": seconds, "tokens": 100, "lengths": [50, 50], "calls": list(calls)}


def test_shares_count_every_moment_once(load: Any):
    steps = [
        # publish_weights at the start, before the step, does not count
        step(
            4.0,
            call("publish_weights", 0.0, 1.0),
            call("rollout.generate", 1.0, 3.0),
            call("actor.update", 3.0, 5.0),
        ),
        step(
            4.0,
            call("rollout.generate", 6.0, 7.0),
            call("recorder.record", 7.0, 9.0),
            call("actor.update", 8.0, 10.0),
        ),
    ]
    records, parts = load("records"), load("steps/grpo_step").PARTS
    shares = records.shares(steps, parts)
    assert sum(shares.values()) == pytest.approx(1)
    assert {k: v for k, v in shares.items() if v} == {"generate": 0.375, "update": 0.5, "record": 0.125}
    assert records.outside_workers(steps) == pytest.approx(0.25 * 10 / 8)


def test_summary_compares_medians_with_the_bound_and_the_better_peer(load: Any):
    def others(*seconds: float, tokens: int = 100) -> list[dict[str, Any]]:
        return [
            {"step_s": s, "generate_s": s / 4, "train_s": 3 * s / 4, "tokens": tokens} for s in seconds
        ]

    weft = [step(s, call("actor.update", 0.0, s)) for s in (2.0, 1.0, 9.0)]
    peers = {"trl": others(8.0, 8.0), "trl_vllm": others(5.0, tokens=50)}
    measured = {"weft": weft, "bound": others(1.6, 1.5, 30.0), **peers}
    result = load("steps/grpo_step").summarize(load("workloads").WORKLOADS["b"], measured)
    assert (result["step_s"], result["bound_s"], result["trl_s"], result["trl_vllm_s"]) == (
        2.0,
        1.6,
        8.0,
        5.0,
    )
    assert (result["bound_generate_s"], result["bound_train_s"]) == (0.4, 1.2)
    assert (result["ratio_to_bound"], result["ratio_to_trl"]) == (0.8, 2.5)
    # 0.08 s per token for TRL without vLLM, 0.04 for Weft
    assert result["ratio_to_trl_per_token"] == 2.0
    assert (result["samples_per_s"], result["tokens_per_s"]) == (32.0, 50.0)


def test_without_peers_their_ratios_are_null(load: Any):
    grpo_step = load("steps/grpo_step")
    alone = {"weft": [step(1.0, call("actor.update", 0.0, 1.0))]}
    result = grpo_step.summarize(load("workloads").WORKLOADS["a"], alone)
    assert {
        result[key] for key in ("ratio_to_bound", "ratio_to_trl", "ratio_to_trl_per_token", "trl_s")
    } == {None}


@pytest.mark.parametrize("wrong", [["--workloads", "a,z"], ["--steps", "-1"]])
def test_wrong_requests_are_refused(
    load: Any, wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["grpo_step.py", *wrong])
    with pytest.raises(SystemExit, match="2"):
        load("steps/grpo_step").parse_arguments()
    assert wrong[0] in capsys.readouterr().err


def test_the_bound_of_an_algorithm_does_the_work_of_the_real_step(load: Any, tmp_path: Path):
    """Its microbatches hold each row once, its results equal an actor's, and it makes every
    update."""
    workloads, bound = load("steps/algorithm_workloads"), load("steps/algorithm_bound")
    folder = workloads.prepare(workloads.ALGORITHM_WORKLOADS["1m"].small(), tmp_path)
    given = workloads.read(folder / "rows.jsonl")
    rows = bound.by_length((row["prompt"], row["given"]) for row in given)
    parts = bound.cut(rows, 256)
    assert sum(len(part.ids) for part in parts) == len(given)
    assert workloads.num_tokens(given) == sum(len(prompt) + len(response) for prompt, response in rows)
    with torch.no_grad():
        found = torch.cat([bound.Model(folder / "model")(part) for part in parts])
    samples = Batch.of(
        prompt_ids=[prompt for prompt, _ in rows], response_ids=[response for _, response in rows]
    )
    actor = ReferenceWorker(ReferenceConfig(model=str(folder / "model")))
    wanted = torch.tensor(actor.logprobs(samples, into="logprobs").ragged_numpy("logprobs")[0])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)

    ppo, dpo = bound.PpoStep(folder), bound.DpoStep(folder)
    for each in (ppo, dpo):
        each.prepare(256)
        each()
    trained = {
        model: model._optimizer.state_dict()["state"] for model in (ppo._actor, ppo._critic, dpo._actor)
    }
    assert [{int(one["step"]) for one in state.values()} for state in trained.values()] == [
        {4},
        {4},
        {1},
    ]
    assert [sum(len(part.ids) for part in parts) for parts in ppo._minibatches] == [len(given) // 2] * 2
    assert sum(len(part.ids) for part in dpo.parts) == len(given), "both responses of half as many pairs"


def test_bfloat16_is_measured_and_is_off_by_its_rounding(load: Any):
    found = load("steps/bfloat16").measure(small=True, rounds=1)
    assert found["bfloat16_speedup"] > 0 and 0 < found["difference"] < 0.05


def test_shared_prompts_are_measured_and_change_no_gradient(load: Any):
    found = load("steps/shared_prompts").measure(small=True, rounds=1, vocabulary=1024)
    assert found["difference"] < 1e-4 and all(
        found[f"{name}_speedup"] > 0 for name in ("dpo", "grpo", "grpo_logprobs")
    )
