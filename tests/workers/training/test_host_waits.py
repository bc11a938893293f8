"""A microbatch avoids host-device syncs.

The device is "meta". Its tensors have no values, so reading one fails. These modes also refuse
operations that would sync silently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import agreeing_model, make_family
from loss_ranks import LOSSES
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_rows import make_pairs, make_rows, with_kept_sets

from weft.algorithms.loss import LOG_COLLISIONS
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.workers.training.causal_lm import put_scalar_head
from weft.workers.training.microbatch_plan import SharingCost
from weft.workers.training.microbatches import Microbatches
from weft.workers.training.packed_sequences import SharedPrompts, Stretches, to_device
from weft.workers.training.response_model import ResponseModel, with_computed
from weft.workers.training.routers import Balance

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
PAIRS = make_pairs(make_rows(23))
PUTS = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
"""With a mask as index, they count its elements, which syncs."""


class NoWaits(TorchDispatchMode):
    """Refuses blocking copies, and masks as write indexes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].device == HOST
            and kwargs.get("device") == DEVICE
        ):
            assert kwargs.get("non_blocking"), "a copy from the host that waits"
        if func is torch.ops.aten.copy_.default:
            assert args[0].device == args[1].device, "a copy in place that waits"
        if func in PUTS:
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), (
                "a mask as an index"
            )
        return func(*args, **kwargs)


class NoNumbers(TorchFunctionMode):
    """Refuses device tensors made from Python numbers, which need a copy to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_there = (
            func in (torch.tensor, torch.as_tensor)
            and torch.device((kwargs or {}).get("device") or HOST) == DEVICE
        )
        assert not made_there, "numbers of the host that are copied, and waited for"
        return func(*args, **(kwargs or {}))


def take_to_device(model: ResponseModel) -> ResponseModel:
    # the dtype that grouped matrix products take there
    model.to(DEVICE, torch.bfloat16 if model.routers else None)
    model.chunk_bytes = 2**20
    return model


@cache
def on_device(name: str, *, scalar: bool = False) -> ResponseModel:
    causal_lm = make_family(name)
    if scalar:
        put_scalar_head(causal_lm)
    return take_to_device(agreeing_model(causal_lm, scalar=scalar))


def microbatch(
    model: ResponseModel, rows: Batch, loss: Any, *, reads_last: bool = False, balance: bool = False
) -> Any:
    """Run one forward and backward pass as an engine does; return the model's description of its
    rows."""
    columns = [c for c in (*loss.reads, *loss.may_read) if c in rows]
    replays = model.routers if "routes" in rows else None
    cut = Microbatches.from_batch(
        rows,
        columns,
        DEVICE,
        vocabulary=97,
        owner="m",
        reads_last=reads_last,
        sharing=SharingCost() if model.shares_prompts else None,
        routers=replays,
    )
    part, routers = np.arange(len(rows)), model.routers
    for parameter in model.parameters():
        parameter.grad = None
    even = Balance(0.1, torch.ones(routers.experts, device=DEVICE)) if routers and balance else None
    with nullcontext() if routers is None else routers.watched(DEVICE, even), NoWaits(), NoNumbers():
        inputs = cut.inputs(part)
        wanted = {"entropy": loss.needs_entropy, "collisions": LOG_COLLISIONS in loss.may_read}
        logprobs, computed = with_computed(*model(*inputs, **wanted))
        loss_sum, metrics = loss(logprobs, cut.packed(part, computed))
        loss_sum.backward()
    assert list(metrics)
    if even is not None:
        assert even.reached
    assert all(p.grad is not None and p.grad.device == DEVICE for p in model.parameters())
    return inputs[1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, x[:1].expand(4)),
        lambda x: bool((x > 0).all()),
        lambda x: x.int().unique(),
        lambda x: x.cpu(),
        lambda x: torch.ones(4).to(DEVICE),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.tensor([1.0], device=DEVICE),
    ],
)
def test_operations_that_sync_are_refused(wait: Callable[[torch.Tensor], object]):
    with pytest.raises((RuntimeError, AssertionError)), NoWaits(), NoNumbers():
        wait(torch.ones(4, device=DEVICE))


def test_host_values_are_copied_without_waiting():
    with NoWaits():
        assert to_device(np.arange(3), DEVICE).device == DEVICE


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_waits(name: str):
    case = LOSSES[name]
    model = on_device("Qwen3", scalar=case.head != "logprobs")
    microbatch(model, PAIRS, case.loss, reads_last=case.reads_last)


@pytest.mark.parametrize("name", ["Gemma 2", "GPT-2", "Phi-3 longrope", "dynamic NTK"])
def test_no_attention_and_no_rope_syncs(name: str):
    """Covers windows and soft caps, learned positions, padding checks, and rope scaling by
    length."""
    microbatch(on_device(name), PAIRS, PolicyLoss())


def with_one_prompt(rows: Batch) -> Batch:
    return rows.with_columns(prompt_ids=[[*range(5, 17)] for _ in range(len(rows))])


def with_routes(rows: Batch, layers: int = 2, chosen: int = 2) -> Batch:
    lengths = rows.lengths("prompt_ids") + rows.lengths("response_ids") - 1
    return rows.with_columns(routes=[np.tile(np.arange(chosen), n * layers) for n in lengths])


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2"])
def test_a_shared_prompt_does_not_wait(name: str):
    assert isinstance(microbatch(on_device(name), with_one_prompt(PAIRS), PolicyLoss()), SharedPrompts)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2"])
def test_no_kept_set_waits(name: str):
    microbatch(on_device(name), with_kept_sets(PAIRS), PolicyLoss(entropy_coefficient=0.1))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3 MoE", "GPT-OSS"])
@pytest.mark.parametrize("rows", [PAIRS, with_routes(PAIRS), with_routes(with_one_prompt(PAIRS))])
def test_no_router_waits(name: str, rows: Batch):
    microbatch(on_device(name), rows, PolicyLoss(entropy_coefficient=0.1), balance=True)


class Together(Stretches):
    """One of two ranks; the other one sends the same tensors."""

    def __init__(self) -> None:
        self.group, self.ranks, self.rank = None, 2, 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Qwen3", "Mixtral"])
def test_ranks_that_share_tokens_do_not_wait(name: str, monkeypatch: pytest.MonkeyPatch):
    def all_gather(come: list[torch.Tensor], sent: torch.Tensor, group: Any) -> None:
        for each in come:
            each.copy_(sent)

    monkeypatch.setattr(dist, "all_to_all_single", lambda come, sent, group: come.copy_(sent))
    monkeypatch.setattr(dist, "all_gather", all_gather)
    model = take_to_device(agreeing_model(make_family(name)))
    model.shares_prompts, model.stretches = False, Together()
    rows = with_routes(PAIRS) if name == "Mixtral" else PAIRS
    microbatch(model, rows, PolicyLoss(entropy_coefficient=0.1), balance=True)
