"""8-bit moments: error against exact ones, learning, and exact checkpoints."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import checkpoint_ranks as program
import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoint_ranks import actor, equal, full, state, train
from ranks import run_processes
from training_rows import make_rows

from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training import moments as eight_bit
from weft.workers.training.memory import checkpoint_bytes, model_size, training_memory
from weft.workers.training.moments import CODES, SCALES, _EightBitMoments

CPU = torch.device("cpu")
NO_ROWS = TableSource("no rows", pa.table({"x": []}))
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao: requirements/torchao.txt"
)
MATRICES = [(96, 256), (40, 128), (80, 64), (3, 40, 192)]
FLOAT = [(300,), (70, 60), (8, 64)]
"""A vector, a tensor with rows of partial blocks, and a small tensor."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(eight_bit._PIECE, "cpu", 1024)
    yield


def stepped(make: Any, dtype: torch.dtype = torch.float32, steps: int = 1) -> tuple[list[Any], Any]:
    """Return (parameters, optimizer) after steps with random gradients."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in MATRICES + FLOAT]
    optimizer = make(
        [
            {"params": parameters[:2], "weight_decay": 0.1},
            {"params": parameters[2:], "weight_decay": 0.0},
        ]
    )
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape) * torch.logspace(-3, 0, parameter.shape[-1])
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameters, optimizer


@needs_torchao
@pytest.mark.usefixtures("small_pieces")
def test_moments_are_exact_ones_to_the_spacing_of_codes_and_the_first_step_is_exact():
    settings = {"lr": 0.1, "betas": (0.9, 0.95)}
    mine, optimizer = stepped(lambda groups: _EightBitMoments(groups, CPU, fused=True, **settings))
    exact, reference = stepped(lambda groups: torch.optim.AdamW(groups, **settings), torch.float64)
    for parameter, theirs in zip(mine, exact, strict=True):
        torch.testing.assert_close(parameter.double(), theirs, rtol=2e-6, atol=2e-6)
        state = optimizer.state[parameter]
        assert float(state["step"]) == 1
        if tuple(parameter.shape) in FLOAT:
            torch.testing.assert_close(
                state["exp_avg_sq"].double(), reference.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=0
            )
            continue
        for name, signed in eight_bit.SIGNED.items():
            codes, scales = state[name + CODES], state[name + SCALES]
            values = (
                eight_bit._load_library(CPU)[0](codes.view(-1), scales.view(-1), signed)
                .qmap.double()
                .numpy()
            )
            block = parameter.shape[-1] // scales.shape[-1]
            assert block == max(b for b in (64, 128, 256) if parameter.shape[-1] % b == 0)
            wanted = reference.state[theirs][name].view(-1, block).numpy()
            largest = np.abs(wanted).max(-1, keepdims=True)
            np.testing.assert_allclose(scales.view(-1, 1).numpy(), largest, rtol=1e-6)
            held = values[codes.view(-1, block).numpy()]
            nearest = np.abs(wanted[..., None] / largest[..., None] - values).min(-1)
            assert (np.abs(held - wanted / largest) <= nearest + 1e-6).all()


@needs_torchao
def test_updates_in_pieces_are_those_of_whole_parameters(monkeypatch: pytest.MonkeyPatch):
    def make(groups: Any) -> _EightBitMoments:
        return _EightBitMoments(groups, CPU, lr=0.1, fused=True)

    whole, _ = stepped(make, steps=3)
    monkeypatch.setitem(eight_bit._PIECE, "cpu", 1024)
    pieces, _ = stepped(make, steps=3)
    assert all(map(torch.equal, whole, pieces))


@needs_torchao
def test_a_model_learns_as_it_does_with_float32(tiny_model: Path):
    """Train 60 steps on 40 rows: the loss falls by more than half, and ends within 3 % of
    float32."""
    rows, losses = make_rows(40), {}
    for moments in ("float32", "8bit"):
        worker = ActorWorker(ActorConfig(model=str(tiny_model), learning_rate=3e-3, moments=moments))  # pyright: ignore
        losses[moments] = [
            worker.update(rows, loss=NegativeLogLikelihood())["loss"].value for _ in range(60)
        ]
    exact, mine = losses["float32"], losses["8bit"]
    assert mine[0] == exact[0] and exact[-1] < exact[0] / 2 and mine != exact
    assert abs(mine[-1] / exact[-1] - 1) < 0.03, (mine[-1], exact[-1])


@needs_torchao
def test_the_plan_counts_their_bytes(tiny_model: Path, rows: Batch, tmp_path: Path):
    config = ActorConfig(model=str(tiny_model), moments="8bit")
    worker = ActorWorker(config)
    engine: Any = worker.engine
    worker.update(rows, loss=PolicyLoss(old="old_logprobs"))
    moments = [
        m for state in engine.optimizer.state.values() for name, m in state.items() if name != "step"
    ]
    size = model_size(tiny_model)
    planned = training_memory(size, config, ranks=1, trains=True, lora=None, saves=True)
    assert planned.moments == sum(m.nbytes for m in moments) < 0.35 * 8 * size.parameters
    worker.save_checkpoint(tmp_path / "actor")
    worker.checkpoint_written(wait=True)
    files = (tmp_path / "actor").rglob("*.safetensors")
    assert abs(checkpoint_bytes(size, config, None) / sum(f.stat().st_size for f in files) - 1) < 0.1
    copied = sum(copy.nbytes for copy in engine._snapshots._copies.values())
    assert abs(planned.snapshot / copied - 1) < 0.1
    worker.close()


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of one rank after three steps, and its state."""
    folder = tmp_path_factory.mktemp("alone") / "actor"
    worker = actor(tiny_model, moments="8bit")
    train(worker, [make_rows(9, seed) for seed in range(3)])
    worker.save_checkpoint(folder)
    assert worker.checkpoint_written(wait=True)
    return folder, full(worker)


@needs_torchao
def test_one_rank_resumes_exactly_and_other_moments_are_refused(
    tiny_model: Path, alone: tuple[Path, Any]
):
    folder, at_three = alone
    worker = actor(tiny_model, moments="8bit")
    worker.load_checkpoint(folder)
    assert equal(state(worker), at_three)
    with pytest.raises(UserError, match="has moments='8bit', but moments='float32' is set"):
        actor(tiny_model).load_checkpoint(folder)


@needs_torchao
def test_two_ranks_resume_the_checkpoint_of_one_rank_exactly(
    tiny_model: Path, alone: tuple[Path, Any], tmp_path: Path
):
    folder, at_three = alone
    steps = [make_rows(9, seed) for seed in range(3)]  # read before the checkpoint restores the state
    with pa.ipc.new_file(tmp_path / "rows.arrow", steps[0].record.schema) as file:
        for rows in steps:
            file.write_batch(rows.record)
    eight = {"moments": "8bit"}
    case = {"folder": str(tmp_path), "model": str(tiny_model), "ranks": 2, "settings": {"eight": eight}}
    (tmp_path / "case.json").write_text(
        json.dumps({**case, "restores": {"of one": [str(folder), eight]}})
    )
    run_processes(program.main, tmp_path / "case.json", 2)
    results = torch.load(tmp_path / "results.pt")
    assert equal(results["of one"], at_three)
    again = actor(tiny_model, moments="8bit")
    again.load_checkpoint(tmp_path / "eight")
    assert equal(full(again), results["eight, never stopped"])
    assert any(name.endswith(CODES) for name in at_three)


def test_conflicting_and_missing_arguments_are_reported(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    for offload in ("moments", "everything"):
        with pytest.raises(
            UserError, match=f'moments="8bit" cannot be combined with offload="{offload}"'
        ):
            ActorConfig(model="m", moments="8bit", offload=offload)  # pyright: ignore[reportArgumentType]
    for name in ("torchao", "torchao.optim", "torchao.optim.adam"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=r"needs torchao, which is not installed: pip install 'weft\[torchao\]'"
    ):
        _EightBitMoments([{"params": [torch.nn.Parameter(torch.zeros(2))]}], CPU)
    config = ActorConfig(model=str(tiny_model), moments="8bit")
    with pytest.raises(UserError, match="needs torchao"):
        ActorWorker.check(config, [], NO_ROWS)
