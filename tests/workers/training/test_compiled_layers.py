"""Compiled layers: equal gradients, one compilation for all layers and lengths, or a refusal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import spmd
import torch
from families import make
from ranks import run_processes
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from training_rows import make_rows

from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training import fsdp as loading

# Dynamo inspects tensors that are not leaves, which makes torch warn.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def gradients(
    model: Path, rows: list[Batch], loss: Any = NegativeLogLikelihood(), **settings: Any
) -> list[dict[str, torch.Tensor]]:
    worker = ActorWorker(
        ActorConfig(model=str(model), learning_rate=1e-5, microbatch_tokens=100, **settings)
    )
    try:
        return [spmd.one_step(worker, each, loss=loss)[0] for each in rows]
    finally:
        worker.close()


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to their norm."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    return (squares / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5


def check(model: Path, **settings: Any) -> None:
    rows = [make_rows(23, seed) for seed in range(2)]
    plain, compiled = (gradients(model, rows, compile=compile, **settings) for compile in (False, True))
    assert max(map(off, compiled, plain)) < (1e-5 if settings.get("dtype") != "bfloat16" else 1e-2)
    # Before attention, after it, and the attention module itself: for both layers and all
    # microbatches.
    assert 0 < counters["stats"]["unique_graphs"] <= 4


@pytest.mark.thorough
def test_gradients_are_the_same_without_recompilation(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "_BACKEND", "eager")  # the same graphs, without slow compilation
    check(tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "elementwise"},
        {"offload": "everything"},
    ],
)
def test_gradients_are_the_same_by_the_compiler(tiny_model: Path, settings: dict[str, Any]):
    check(tiny_model, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"gather": "layerwise"}, {"sequence_parallel": 2, "microbatch_tokens": 60}]
)
def test_two_ranks(tiny_model: Path, rows: Batch, tmp_path: Path, settings: dict[str, Any]):
    everyone = list(range(len(rows)))
    shares = [everyone, everyone] if "sequence_parallel" in settings else [everyone[::2], everyone[1::2]]
    with pa.ipc.new_file(tmp_path / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    config = {
        "model": str(tiny_model),
        "learning_rate": 1e-3,
        "max_grad_norm": None,
        "compile": True,
        **settings,
    }
    (tmp_path / "case.json").write_text(
        json.dumps({"folder": str(tmp_path), "shares": shares, "config": config, "parts": ()})
    )
    run_processes(spmd.main, tmp_path / "case.json", 2)
    result = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert (
        off(result["gradient"], gradients(tiny_model, [rows], spmd.LOSS, max_grad_norm=None)[0]) < 1e-5
    )


def test_layers_that_cannot_be_compiled_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="compile=True and tensor_parallel=2: torch fails to compile"):
        ActorConfig(model=str(tiny_model), compile=True, tensor_parallel=2)

    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(
        UserError,
        match=r"compile=True needs a C\+\+ compiler on a CPU, but there is none .*: No working",
    ):
        ActorWorker(ActorConfig(model=str(tiny_model), compile=True))


def test_a_mixture_is_refused(tmp_path: Path):
    make("qwen3_moe", {}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a mixture of experts"):
        ActorWorker(ActorConfig(model=str(tmp_path), learning_rate=1e-5, compile=True))
