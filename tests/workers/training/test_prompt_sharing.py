"""Sharing prompt tokens between rows changes neither values nor gradients, for any model and
order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spmd
import torch
from families import agreeing_model, amplify, make_family
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import RowCost
from weft.workers.training.microbatch_plan import SharingCost, equal_prompts, plan_shared
from weft.workers.training.microbatches import Microbatches, _Placement
from weft.workers.training.packed_sequences import SharedPrompts

CPU = torch.device("cpu")
SHARED = (
    "Qwen2",
    "Qwen3",
    "Llama",
    "Mistral",
    "Mixtral",
    "Gemma 2",
    "Gemma 3",
    "Phi-3",
    "OLMo 2",
    "GPT-2",
    "GPT-OSS",
)
NOT_SHARED = ("Phi-3 longrope", "Jamba", "StableLM")
"""Frequencies that depend on the row's length; state; attention that cannot be replaced."""


def of_prompts(responses: dict[tuple[int, ...], list[int]], seed: int = 0) -> Batch:
    """Return rows with these prompts, each with responses of these lengths."""
    rng = np.random.default_rng(seed)
    prompts = [list(prompt) for prompt, lengths in responses.items() for _ in lengths]
    lengths = np.array([length for of_one in responses.values() for length in of_one])
    order = rng.permutation(len(prompts))
    lengths = lengths[order]
    cu_seqlens, tokens = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum())
    return Batch.of(
        sample_id=np.arange(len(prompts)),
        prompt_ids=[prompts[row] for row in order],
        response_ids=(rng.integers(3, 97, tokens), cu_seqlens),
        response_mask=(np.ones(tokens, np.uint8), cu_seqlens),
        temperature=np.where(rng.random(len(prompts)) < 0.5, 1.0, 0.7),
        advantages=(rng.normal(size=tokens), cu_seqlens),
        old_logprobs=(-4.5 + 0.3 * rng.normal(size=tokens), cu_seqlens),
        reference_logprobs=(-4.5 + 0.3 * rng.normal(size=tokens), cu_seqlens),
    )


ROWS = {
    tuple(range(3, 12)): [5, 1, 3, 8],
    tuple(range(3, 9)): [2, 2],
    (7,): [6],
    (9, 9): [1, 1],
    tuple(range(20, 27)): [4],
}


@pytest.mark.parametrize("reads_last", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_shared_prompts_change_no_value_and_no_gradient(name: str, reads_last: bool):
    exact = name == "GPT-2"  # others compute norms in float32 for any dtype
    model = amplify(agreeing_model(make_family(name).double() if exact else make_family(name)))
    assert model.packs and model.shares_prompts
    found = []
    for may_share in (True, False):
        sharing = SharingCost() if may_share else None
        rows = Microbatches.from_batch(
            of_prompts(ROWS), (), CPU, vocabulary=97, owner="m", reads_last=reads_last, sharing=sharing
        )
        values, gradients = [], [torch.zeros_like(p) for p in model.parameters()]
        for part in (np.arange(10)[::-1].copy(), np.array([3])):
            inputs = rows.inputs(part)
            assert isinstance(inputs[1], SharedPrompts) == (may_share and len(part) > 1)
            of_tokens, _ = model(*inputs)
            weights = torch.linspace(-1, 1, len(of_tokens), dtype=of_tokens.dtype)
            got = torch.autograd.grad(
                (of_tokens * weights).sum(), [*model.parameters()], allow_unused=True
            )
            gradients = [
                total + (0 if new is None else new) for total, new in zip(gradients, got, strict=True)
            ]
            values.append(of_tokens.detach())
        found.append((torch.cat(values), gradients))
    (mine, my_gradients), (theirs, their_gradients) = found
    tolerance = 1e-10 if exact else 1e-4
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    for one, other in zip(my_gradients, their_gradients, strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * largest + 1e-12)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_models_that_cannot_share_prompts_do_not(name: str):
    assert not agreeing_model(make_family(name)).shares_prompts


def test_a_step_with_shared_prompts_is_the_step_without(tiny_model: Path):
    """This holds even if the rows of a prompt do not fit in one microbatch."""
    rows = of_prompts({tuple(range(3, 23)): [9] * 8, tuple(range(30, 38)): [3, 12]})
    steps = []
    for may_share, tokens in ((False, None), (True, None), (True, 50)):
        worker = ActorWorker(
            ActorConfig(
                model=str(tiny_model), learning_rate=1e-3, max_grad_norm=None, microbatch_tokens=tokens
            )
        )
        engine: Any = worker.engine
        assert engine.model.shares_prompts
        engine.model.shares_prompts = may_share
        said = worker.logprobs(rows, into="said").ragged("said")[0]
        steps.append((said, *spmd.one_step(worker, rows)))
    (said, gradient, metrics), *others = steps
    norm = torch.stack([g.norm() for g in gradient.values()]).norm()
    for mine, own_gradient, own_metrics in others:
        torch.testing.assert_close(mine, said, rtol=1e-5, atol=1e-5)
        for name, expected in gradient.items():
            assert (own_gradient[name] - expected).norm() / norm < 1e-5
        assert own_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-4)


def test_ranks_in_lockstep_have_level_microbatches_that_count_a_shared_prompt_once():
    batch = of_prompts({tuple(range(3, 23)): [9] * 8})
    rows = Microbatches.from_batch(batch, (), CPU, vocabulary=97, owner="m", sharing=SharingCost())
    full = rows.plan(70, packed=True)
    level = rows.plan_in_lockstep(3, 70, RowCost(100), packed=True, pads=True)
    assert [len(part) for part in full] == [6, 2] and [len(part) for part in level] == [3, 3, 2]
    assert sorted(np.concatenate(level).tolist()) == list(range(8))
    # The model reads 28 tokens per row: the last response token is only predicted.
    of_prompt, of_row = 20 * 1.2, 28 * 1.28
    seen = SharingCost(RowCost(100), masked=False)
    assert rows._cost_of(level[0], seen) == pytest.approx(of_prompt + 3 * (of_row - of_prompt))


def test_rows_that_share_little_are_computed_as_they_are():
    prompts, cu_seqlens, cost = (
        np.array([1, 2, 1, 2, 3], np.int32),
        np.array([0, 2, 4, 5]),
        SharingCost(),
    )
    # shares 2 of 32 tokens
    assert equal_prompts(prompts, cu_seqlens, np.array([1, 1, 25]), cost) is not None
    # shares 2 of 33 tokens
    assert equal_prompts(prompts, cu_seqlens, np.array([1, 1, 26]), cost) is None
    assert (
        equal_prompts(prompts, cu_seqlens, np.array([1, 0, 1]), cost) is None
    )  # the second row is not computed


def test_a_row_without_a_shared_prompt_costs_the_same_as_alone():
    cost, prompts, after = SharingCost(RowCost(100)), np.array([50, 20]), np.array([500, 30])
    assert cost.shared(prompts, after, np.array([0, 1])) == pytest.approx(
        RowCost(100)(prompts + after).sum()
    )


def test_rows_share_prompts_only_where_their_attention_costs_less_than_is_left_out():
    """Eight responses of 4,096 tokens to a prompt of 1,024.

    With a mask, each response token attends to all 5,120 keys; without, to half of the response's
    keys.
    """
    prompts, counts, same = np.full(8, 1024), np.full(8, 4096), np.zeros(8, np.int64)
    rows = RowCost(attention_length=10_000)
    alone = rows(prompts + counts).sum()
    for masked, pairs in ((True, 4096 * 5120), (False, 4096 * 1024 + 4096**2 / 2)):
        shared = rows(np.array([1024])).sum() + 8 * (4096 + 2 * pairs / 10_000)
        assert (
            SharingCost(rows, masked).pays(prompts, counts, same)
            == (shared < alone * 15 / 16)
            == (not masked)
        )


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_each_row_is_in_one_microbatch_that_holds_its_tokens(data: st.DataObject):
    count = data.draw(st.integers(1, 20))
    same = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    lengths = np.array(data.draw(st.lists(st.integers(1, 30), min_size=5, max_size=5)))
    prompts = lengths[same]
    after = np.array(data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)))
    groups = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    groups = data.draw(st.sampled_from([None, groups, same]))
    most = data.draw(st.integers(1, 200))
    plan = plan_shared(prompts, after, same, most, groups=groups)
    assert sorted(np.concatenate(plan).tolist()) == list(range(count))
    of_part = np.empty(count, np.int64)
    for number, part in enumerate(plan):
        of_part[part] = number
        tokens = after[part].sum() + sum(lengths[one] for one in set(same[part].tolist()))
        units = len(part) if groups is None else len(set(groups[part].tolist()))
        assert tokens <= most or units == 1
        place = _Placement.of_rows(prompts[part], after[part], same[part])
        taken = [
            *(
                range(place.begins[row], place.begins[row] + after[part][row])
                for row in range(len(part))
            ),
            *(
                range(place.last[row] - prompts[part][row] + 1, place.last[row] + 1)
                for row in place.alone
            ),
            *(
                range(place.last[row] - prompts[part][row] + 1, place.last[row] + 1)
                for row in [
                    int(np.flatnonzero(place.prompt_of == p)[0]) for p in range(len(place.prompts))
                ]
                for row in [int(place.shared[row])]
            ),
        ]
        assert sorted(token for tokens_of_row in taken for token in tokens_of_row) == list(
            range(tokens)
        ), "each once"
    if groups is not None:
        assert all(len(set(of_part[groups == group].tolist())) == 1 for group in set(groups.tolist()))


def test_windows_and_lengths_limit_the_context_of_a_response():
    rows = SharedPrompts.among(np.array([3, 1]), np.array([2]), np.array([2, 1]), np.array([0, 1]), CPU)
    assert rows.positions.tolist() == [0, 1, 2, 0, 0, 1, 3, 4, 1]
    seen = rows.sees(3).int().tolist()
    assert seen == [[[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], [[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]]
