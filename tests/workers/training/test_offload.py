"""Offload: equal results from host memory, and foreign process groups stay untouched."""

from pathlib import Path
from typing import Any

import pytest
import spmd
import torch
import torch.distributed as dist
from forked import program

from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.training import moments as offload
from weft.workers.training.moments import _HostMoments

CPU = torch.device("cpu")


def actor(model: Path, **settings: Any) -> ActorWorker:
    return ActorWorker(ActorConfig(model=str(model), learning_rate=1e-3, **settings))


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> bool:
    """Check that tensors are close, relative to their common norm."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    return squares <= tolerance**2 * sum(float(t.double().square().sum()) for t in expected.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["moments", "everything"])
def test_a_step_from_host_memory_is_the_same_step(
    tiny_model: Path, rows: Batch, where: Any, dtype: Any, tmp_path: Path
):
    before = dist.is_initialized()  # vLLM may have initialized it in this process
    plain, offloaded = (actor(tiny_model, dtype=dtype, offload=each) for each in ("nothing", where))
    try:
        (mine, _), (theirs, _) = (spmd.one_step(worker, rows) for worker in (offloaded, plain))
        assert close(mine, theirs, 1e-6 if dtype == "float32" else 1e-2)
        offloaded.save_checkpoint(tmp_path / "saved")
        offloaded.checkpoint_written(wait=True)
        weights = {name: tensor.clone() for name, tensor in offloaded.engine.named_tensors()}
        assert close(weights, dict(plain.engine.named_tensors()), 1e-4 if dtype == "float32" else 1e-2)
        next_step, _ = spmd.one_step(offloaded, rows)
        offloaded.load_checkpoint(tmp_path / "saved")
        assert close(dict(offloaded.engine.named_tensors()), weights, 0)
        assert close(spmd.one_step(offloaded, rows)[0], next_step, 0)
    finally:
        offloaded.close()
    assert dist.is_initialized() == before


def test_a_frozen_model_in_host_memory_gives_the_same(tiny_model: Path, rows: Batch):
    plain, streamed = (
        ReferenceWorker(ReferenceConfig(model=str(tiny_model), offload=where))
        for where in ("nothing", "everything")
    )
    try:
        found, expected = (
            worker.logprobs(rows).ragged("reference_logprobs")[0] for worker in (streamed, plain)
        )
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        spmd.take_over(
            streamed.engine, {name: 2 * tensor for name, tensor in plain.engine.named_tensors()}
        )
        twice = dict(streamed.engine.named_tensors())
        assert all(torch.equal(twice[name], 2 * tensor) for name, tensor in plain.engine.named_tensors())
    finally:
        streamed.close()


def test_what_lies_in_host_memory_is_not_gathered_once():
    with pytest.raises(UserError, match='gather="once" all of them'):
        ReferenceConfig(model="m", offload="everything", gather="once")


def test_moments_are_updated_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "MOMENTS_BYTES", 100)

    def trained(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in (3, 40, 5, 6, 1)]
        groups = [
            {"params": parameters[:2], "weight_decay": 0.1},
            {"params": parameters[2:], "weight_decay": 0.0},
        ]
        optimizer = make(groups)
        for step in range(3):
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.randn_like(parameter) if number != 3 or step else None
            optimizer.step()
            assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
        return [
            *(p.detach() for p in parameters),
            *(optimizer.state[p]["exp_avg_sq"] for p in parameters),
        ]

    mine = trained(lambda groups: _HostMoments(groups, CPU, lr=0.1, fused=True))
    assert all(
        map(torch.equal, mine, trained(lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True)))
    )


def test_process_groups_of_others_stay(tiny_model: Path, tmp_path: Path):
    """Run in a separate process, without process groups of vLLM."""
    program(tmp_path / "said", Path(__file__).with_name("groups_of_one.py"), str(tiny_model)).finish()
