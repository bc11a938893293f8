"""Another engine in place of FsdpEngine: a pipeline over two processes computes the same."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pipeline_ranks import main, played
from ranks import run_processes
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import Coordinates, Dispatch
from weft.workers.training.engine import EngineFactory
from weft.workers.training.fsdp import FsdpEngine
from weft.workers.worker import Context


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference, relative to the norm of `other`."""
    assert one.keys() == other.keys()
    squares = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    return (squares / sum(float(tensor.double().square().sum()) for tensor in other.values())) ** 0.5


def model_of(folder: Path, *, tied: bool) -> Path:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        tie_word_embeddings=tied,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def settings(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "microbatch_tokens": 60,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_two_stages_compute_the_same_as_fsdp_engine(tmp_path: Path, rows: Batch, tied: bool):
    model = model_of(tmp_path / "model", tied=tied)
    with pa.ipc.new_file(tmp_path / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    case = {"folder": str(tmp_path), "ranks": 2, "config": settings(model)}
    (tmp_path / "case.json").write_text(json.dumps(case))
    run_processes(main, tmp_path / "case.json", 2)
    stages = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    worker = ActorWorker(ActorConfig(**settings(model)))
    alone = played(worker, rows, tmp_path / "alone", worker.engine.model.causal_lm.named_parameters)  # pyright: ignore
    worker.close()
    for stage in stages:  # every rank has the metrics, and the driver keeps those of the last one
        for name in ("logprobs", "entropies", "after"):
            mine, its = (np.concatenate(each) for each in (stage[name], alone[name]))
            assert np.abs(mine - its).max() < 1e-5
        assert np.allclose(stage["losses"], alone["losses"], atol=1e-5)
    for step in range(2):
        both = stages[1]["gradients"][step] | stages[0]["gradients"][step]
        assert difference(both, alone["gradients"][step]) < 1e-5
    assert stages[0]["gradients"][0].keys() & stages[1]["gradients"][0].keys() == (
        {"model.embed_tokens.weight"} if tied else set()
    )
    for name in ("loss", "tokens", "grad_norm", "learning_rate", "skipped_steps", "bad_steps", "ratio"):
        if name in alone["metrics"]:
            assert stages[1]["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-5), name
    mesh = [stage["coordinates"] for stage in stages]
    assert mesh == [Coordinates(pp=0), Coordinates(pp=1)]
    assert Dispatch.SPLIT_BY_DP.collect(mesh) == [1], "the last stage answers"
    parts = [set(stage["published"]) for stage in stages]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(alone["published"])
    assert difference(stages[0]["published"] | stages[1]["published"], alone["weights"]) < 1e-5
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stages[0]["weights"].items())


def test_a_wrong_engine_or_one_without_a_pipeline_is_refused(tiny_model: Path):
    with pytest.raises(UserError, match="engine"):
        ActorConfig(model="m", engine="torchtitan")  # pyright: ignore[reportArgumentType]
    assert isinstance(FsdpEngine, EngineFactory)
    for wrong, said in (
        (
            lambda config, context: None,
            r"takes no argument 'head' .*; it takes config, context\. It is called with",
        ),
        (
            lambda config, *, head, context, training: None,
            r"too many positional arguments; .* It is called with",
        ),
        (
            partial(FsdpEngine, nothing=1),  # pyright: ignore[reportCallIssue]
            r"engine=.*It is called with \(config, context, training, head=...\)",
        ),
    ):
        with pytest.raises(UserError, match=said):
            ActorConfig(model=str(tiny_model), engine=wrong).check()  # pyright: ignore[reportArgumentType]
    nothing = ActorConfig(model=str(tiny_model), engine=lambda config, context, training, head: None)  # pyright: ignore[reportArgumentType]
    nothing.check()
    with pytest.raises(
        UserError,
        match="made a NoneType, which is not a TrainingEngine: it has no coordinates, logprobs",
    ):
        ActorWorker(nothing, Context("actor"))
    with pytest.raises(UserError, match="pipeline_parallel=2: FsdpEngine has no pipeline"):
        ActorConfig(model=str(tiny_model), pipeline_parallel=2).check()
