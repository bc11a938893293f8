"""A mixture-of-experts run in which the trainer replays the generator's routes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from families import make

import weft
from weft.algorithms.grpo import grpo
from weft.dataflow.batch import Batch

SETTINGS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 100}


@weft.node(reads=("response_ids",), writes=("reward",))
def even(batch: Batch) -> Batch:
    return batch.with_columns(reward=[float(sum(ids) % 2) for ids in batch["response_ids"].to_pylist()])


class Even:
    """Stands in for a group of reward workers."""

    score = staticmethod(even)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    make("qwen3_moe", SETTINGS).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def test_schedules_give_the_same_numbers_with_routes_and_a_loss_of_routers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    prompts = weft.TableSource(
        "prompts", pa.table({"prompt_ids": [[5, 6, 7], [8, 9], [10, 11], [12, 13, 14]]})
    )
    found = []
    for schedule in (weft.Synchronous, weft.Pipelined):
        actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-3, router_loss=0.01)
        rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers", routes=True)
        rollout.follows(actor)
        graph = grpo(
            prompts,
            rollout=rollout,
            reward=Even(),
            actor=actor,
            reference=weft.group(weft.ReferenceWorker, model=model),
            n=4,
            sampling=weft.Sampling(max_tokens=8),
        )
        when = schedule(steps=2, prompts_per_step=4)
        with weft.Driver(
            graph, schedule=when, backend=weft.Local(), name=schedule.__name__, progress=False
        ) as driver:
            found.append(driver.run()[1:])
    for own, other in zip(*found, strict=True):
        assert own["actor/moved_routes"] == 0 and own["actor/mean_logprob_gap"] < 1e-5
        assert own["actor/max_expert_load"] >= 1
        for name in ("loss", "grad_norm", "router_loss", "router_entropy", "expert_load"):
            assert own[f"actor/{name}"] == pytest.approx(other[f"actor/{name}"], rel=1e-4, abs=1e-6)
