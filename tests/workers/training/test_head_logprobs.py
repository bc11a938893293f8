"""The chunked head against full logits in float64."""

from pathlib import Path
from typing import Any

import head_ranks
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_processes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.workers.kept_sets import KeptSets
from weft.workers.training import head_logprobs as module
from weft.workers.training import memory
from weft.workers.training.head_logprobs import (
    HeadForm,
    head_logprobs,
    head_top_logprobs,
    logprobs_of_any_head,
    top_logprobs_of_any_head,
)

V, H = 23, 5


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    form: HeadForm,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = (
        hidden @ weight.T * form.factor if bias is None else (hidden @ weight.T + bias) * form.factor
    )
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    several = targets if targets.ndim == 2 else targets[:, None]
    if kept is not None:  # compute with the kept logits alone
        logprobs, entropies = [], []
        for own, mask, ids in zip(logits, kept, several, strict=True):
            left = own[mask].log_softmax(-1)
            places = mask.cumsum(0)[ids] - 1
            logprobs.append(left[places])
            entropies.append(-(left.exp() * left).sum())
        return torch.stack(logprobs).view(targets.shape), torch.stack(entropies)
    distribution = torch.distributions.Categorical(logits=logits)
    logprobs = distribution.logits.gather(1, several)  # pyright: ignore[reportAttributeAccessIssue]
    return logprobs.view(targets.shape), distribution.entropy()


def kept_with(targets: Tensor, made: torch.Generator) -> Tensor:
    """Draw kept sets of all sizes that have the targets: [T, V] bool."""
    shares = torch.rand(len(targets), 1, generator=made)
    kept = torch.rand(len(targets), V, generator=made) < shares
    return kept.scatter(1, targets if targets.ndim == 2 else targets[:, None], True)


@given(
    tokens=st.integers(1, 9),
    form=st.builds(HeadForm, st.sampled_from((1.0, 0.3)), st.sampled_from((None, 2.0))),
    biased=st.booleans(),
    tempered=st.booleans(),
    entropy=st.booleans(),
    at_once=st.integers(1, 10),
    keeps=st.booleans(),
    several=st.sampled_from(((), (1,), (3,))),
    truncated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_gradients_are_those_of_logits_made_at_once(
    tokens: int,
    form: HeadForm,
    biased: bool,
    tempered: bool,
    entropy: bool,
    at_once: int,
    keeps: bool,
    several: tuple[int, ...],
    truncated: bool,
    seed: int,
):
    made = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=made)

    leaves = [drawn(tokens, H), drawn(V, H), *([drawn(V)] if biased else [])]
    targets = torch.randint(V, (tokens, *several), generator=made)
    upstream, of_entropy = drawn(tokens, *several), drawn(tokens)
    temperatures = drawn(tokens).abs() + 0.2 if tempered else None
    kept = kept_with(targets, made) if truncated else None

    def outputs(ours: bool) -> list[Tensor]:
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        bias = own[2] if biased else None
        if ours:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "KEPT_BYTES", 2**20 if keeps else 0)
                found = head_logprobs(
                    own[0],
                    own[1],
                    bias,
                    targets,
                    temperatures,
                    form,
                    kept_sets=None if kept is None else KeptSets.of_mask(kept),
                    entropy=entropy,
                    chunk=at_once * V * 8,
                )
        else:
            found = plain(own[0], own[1], bias, targets, temperatures, form, kept)
        logprobs, entropies = found
        assert entropies is not None and (entropies.requires_grad == entropy or not ours)
        loss = (logprobs * upstream).sum() + ((entropies * of_entropy).sum() if entropy else 0)
        return [logprobs, entropies, *torch.autograd.grad(loss, own)]

    for ours, expected in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kept_bytes", [2**20, 0])
def test_a_token_outside_the_kept_sets_gets_no_gradient_at_all(
    kept_bytes: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    kept = torch.zeros(4, V, dtype=torch.bool)
    kept[:, ::3] = True
    targets = torch.tensor([0, 3, 6, 9])
    form, sets = HeadForm(softcap=softcap), KeptSets.of_mask(kept)
    logprobs, entropies = head_logprobs(
        hidden, weight, None, targets, None, form, kept_sets=sets, entropy=True
    )
    assert entropies is not None
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad is not None and hidden.grad is not None and hidden.grad.isfinite().all()
    touched = weight.grad.abs().sum(1) > 0
    assert touched.tolist() == kept[0].tolist()


def test_a_set_of_one_token_has_probability_one_and_no_gradient():
    hidden, weight = torch.randn(2, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    sets = KeptSets(np.array([1, 1], np.int32), np.array([4, 7], np.int32))
    logprobs, entropies = head_logprobs(
        hidden, weight, None, torch.tensor([4, 7]), None, kept_sets=sets, entropy=True
    )
    assert entropies is not None and logprobs.tolist() == [0, 0] and entropies.abs().max() < 1e-30
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


@given(
    tokens=st.integers(1, 9),
    form=st.builds(HeadForm, st.sampled_from((1.0, 0.3)), st.sampled_from((None, 2.0))),
    k=st.integers(1, V),
    tempered=st.booleans(),
    at_once=st.integers(1, 10),
    seed=st.integers(0, 2**31),
)
def test_the_likeliest_tokens_are_those_of_logits_made_at_once(
    tokens: int, form: HeadForm, k: int, tempered: bool, at_once: int, seed: int
):
    made = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=made) for shape in ((tokens, H), (V, H), (V,))
    )
    temperatures = torch.rand(tokens, dtype=torch.float64, generator=made) + 0.2 if tempered else None
    logprobs, ids = head_top_logprobs(hidden, weight, bias, k, temperatures, form, chunk=at_once * V * 8)
    everything = torch.arange(V).expand(tokens, V)
    expected = plain(hidden, weight, bias, everything, temperatures, form)[0].topk(k)
    torch.testing.assert_close(logprobs, expected.values)
    assert ids.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("truncated", [False, True])
def test_a_head_that_is_run_by_the_models_own_code_gives_the_same(
    truncated: bool, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    hidden, weight, targets, upstream = (
        torch.randn(37, 8),
        torch.randn(V, 8),
        torch.randint(V, (37,)),
        torch.randn(37),
    )
    temperatures = torch.linspace(0.5, 2, 37)
    made = torch.Generator().manual_seed(0)
    sets = KeptSets.of_mask(kept_with(targets, made)) if truncated else None
    monkeypatch.setattr(memory, "CHUNK_BYTES", 5 * 4 * V)
    found = []
    for kept_bytes in (2**20, 0):
        monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
        for ours in (True, False):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            if ours:
                logprobs, entropies = head_logprobs(h, w, None, targets, temperatures, kept_sets=sets)
            else:
                logprobs, entropies = logprobs_of_any_head(
                    lambda x, w=w: x @ w.T, h, targets, temperatures, False, sets
                )
            assert entropies is not None
            found.append(
                [logprobs, entropies.detach(), *torch.autograd.grad(logprobs, (h, w), upstream)]
            )
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-5)
    ours = head_top_logprobs(hidden, weight, None, 4, temperatures)
    theirs = top_logprobs_of_any_head(lambda x: x @ weight.T, hidden, 4, temperatures)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [7 * 4 * V, 10**9])
def test_collisions_are_the_sums_of_squared_probabilities(chunk: int, entropy: bool):
    made = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, H, dtype=torch.float64, generator=made) for n in (20, V))
    targets = torch.randint(V, (20,), generator=made)
    temperatures = torch.rand(20, dtype=torch.float64, generator=made) + 0.5
    expected = ((hidden @ weight.T / temperatures[:, None]).softmax(-1) ** 2).sum(-1).log()

    def gradients(collisions: bool, own: bool) -> tuple[torch.Tensor, ...]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        how: Any = {"entropy": entropy, "collisions": collisions}
        if own:
            found = head_logprobs(h, w, None, targets, temperatures, **how, chunk=chunk)
        else:
            found = logprobs_of_any_head(lambda x: x @ w.T, h, targets, temperatures, **how)
        logprobs, entropies = found
        assert entropies is not None
        if collisions:
            assert entropies.shape == (20, 2)
            torch.testing.assert_close(entropies[:, 1].detach(), expected)
        total = logprobs.sum() + ((entropies[:, 0] if collisions else entropies).sum() if entropy else 0)
        return torch.autograd.grad(total, (h, w))

    for own in (True, False):
        torch.testing.assert_close(gradients(True, own), gradients(False, own))
        with torch.no_grad():
            frozen = head_logprobs(hidden, weight, None, targets, temperatures, collisions=True)[1]
        assert frozen is not None
        torch.testing.assert_close(frozen[:, 1], expected)


def test_no_tokens_have_no_logprobs_and_a_gradient_of_zero():
    hidden, weight = torch.zeros(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    logprobs, entropies = head_logprobs(
        hidden, weight, None, torch.zeros(0, dtype=torch.long), None, entropy=True
    )
    assert entropies is not None and logprobs.shape == entropies.shape == (0,)
    assert [found.shape for found in head_top_logprobs(hidden, weight, None, 2, None)] == [(0, 2)] * 2
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_without_gradients_nothing_is_kept_and_a_frozen_head_gets_none():
    hidden, weight, targets = (
        torch.randn(3, H, requires_grad=True),
        torch.randn(V, H),
        torch.tensor([0, 1, V - 1]),
    )
    with torch.no_grad():
        logprobs, entropies = head_logprobs(hidden, weight, None, targets, None)
        asked = head_logprobs(hidden, weight, None, targets, None, entropy=True)[1]
    assert entropies is None and not logprobs.requires_grad
    expected = plain(hidden, weight, None, targets, None, HeadForm())
    torch.testing.assert_close((logprobs, asked), expected)
    head_logprobs(hidden, weight, None, targets, None)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("kept_bytes", [2**20, 0])
def test_half_precision_is_off_by_the_rounding_of_its_products_alone(
    kept_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(64, 32).bfloat16().requires_grad_(),
        torch.randn(V, 32).bfloat16().requires_grad_(),
    )
    targets = torch.randint(V, (64,))
    logprobs, _ = head_logprobs(hidden, weight, None, targets, None, chunk=7 * 4 * V)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected, _ = plain(exact[0], exact[1], None, targets, None, HeadForm())
    assert logprobs.dtype == torch.float32 and (logprobs - expected).abs().max() < 0.1
    logprobs.sum().backward()
    expected.sum().backward()
    for ours, right in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None and right.grad is not None and ours.grad.dtype == torch.bfloat16
        assert (ours.grad - right.grad).norm() < 0.01 * right.grad.norm()


@pytest.mark.parametrize("kept_bytes", [2**20, 0])
@pytest.mark.parametrize("entropy", [False, True])
def test_probabilities_of_large_logits_are_not_rounded_as_these_are(
    kept_bytes: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
):
    """At a logit of 5000, float32 resolves 2e-4. Logits and logsumexp must not round separately."""
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    hidden, targets = torch.full((2, 1), 1024.0), torch.tensor([0, 1])
    weight = torch.cat([5 - torch.tensor([0, 1, 2, 4]) / 2048, torch.linspace(-1, 1, V)])[:, None]
    own, exact = weight.requires_grad_(), weight.detach().double().requires_grad_()
    ours = head_logprobs(hidden, own, None, targets, None, entropy=entropy)
    right = plain(hidden.double(), exact, None, targets, None, HeadForm())
    for found in (ours, right):
        assert found[1] is not None
        (found[0].sum() + (found[1].sum() if entropy else 0)).backward()
    for one, other in zip((*ours, own.grad), (*right, exact.grad), strict=True):
        assert one is not None and other is not None and (one - other).norm() < 1e-6 * other.norm()


def test_logits_that_are_kept_are_one_chunk_and_others_are_cut_evenly(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, targets = (
        torch.randn(9, H, requires_grad=True),
        torch.randn(V, H),
        torch.randint(V, (9,)),
    )
    for kept_bytes, expected in ((2**20, [(9, V)]), (0, [(5, V), (4, V)] * 2)):
        monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
        with Products() as products:
            head_logprobs(hidden, weight, None, targets, None, chunk=8 * 4 * V)[0].sum().backward()
        assert [shape for shape in products.shapes if shape[1] == V] == expected


class Products(TorchDispatchMode):
    """Records the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.shapes.append(tuple(out.shape))
        return out


def test_ranks_with_a_sharded_vocabulary_publish_the_same_as_one_rank(tmp_path: Path):
    run_processes(head_ranks.main, tmp_path, 3)
    for rank in range(3):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        for case in head_ranks.CASES:
            torch.testing.assert_close(
                found[case], head_ranks.outputs(case, mesh=None), rtol=1e-9, atol=1e-11
            )
