"""Log-probabilities and entropies of tokens, computed from hidden states.

The logits of a batch (tokens x vocabulary) are by far its largest tensor. This module computes them
in chunks of tokens (`memory.py` sets their size), in the forward pass and again in the backward
pass (StreamBP, arXiv:2506.03077), and accumulates each chunk's gradients before the next. Under
tensor parallelism, each rank holds the head's rows for some of the token ids. Ranks exchange only
four numbers per token in the forward pass (or three, and one per target), and the gradient of the
hidden states in the backward pass (Vocabulary Parallelism, arXiv:2411.05288).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..kept_sets import KeptSets
from .memory import KEPT_BYTES, head_chunk_bytes
from .packed_sequences import to_device
from .sharding import box_of

_CACHED = 2**17
"""Number of logits that fit into a CPU's cache for several operations in a row."""
_EXCLUDED = -1e9
"""Logit outside a kept set while the largest kept logit is unknown."""
_BELOW = 80.0
"""Distance of logits outside a kept set from its largest one. Their sum is too small to change a sum of
probabilities, but exp is fast: with results below 1e-38, it takes ten times as long on a CPU."""


@dataclass(frozen=True)
class HeadForm:
    """How logits z follow from x, the products of hidden states and the head's matrix (plus its
    bias): z = factor * x, or with a soft cap z = softcap * tanh(factor * x / softcap) (Gemma 2,
    arXiv:2408.00118, section 2)."""

    factor: float = 1.0
    softcap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Turn products into logits, in place.

        >>> HeadForm(2.0).logits(torch.ones(2)).tolist(), HeadForm(softcap=1.0).logits(torch.tensor([1e9])).tolist()
        ([2.0, 2.0], [1.0])
        """
        if self.softcap is not None:
            return products.mul_(self.factor / self.softcap).tanh_().mul_(self.softcap)
        return products if self.factor == 1 else products.mul_(self.factor)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    form: HeadForm = HeadForm(),
    *,
    kept_sets: KeptSets | None = None,
    entropy: bool = False,
    collisions: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities and entropies of softmax(z / temperature), one chunk at a time.

    With kept sets K, probabilities are exp(z_v / temperature) / sum over u in K, and 0 outside K,
    where logits get no gradient ("keep sampling mask", DeepSeek-V3.2, arXiv:2512.02556).

    Soft cap, scaling and sums use float32 (float64 for float64 hidden states). Half-precision
    products accumulate in float32; a CPU then rounds them to half precision, a GPU does not.

    Args:
        hidden: [T, hidden], with a gradient.
        weight: [vocabulary, hidden], in the dtype of `hidden`, with a gradient. If ranks share the
            vocabulary: a `DTensor` on a one-dimensional mesh, split over rows. All ranks then pass
            the same tokens and get the same result.
        bias: [vocabulary], with a gradient and split like `weight`, or None.
        targets: [T] int64, or [T, m] for m tokens at each position.
        temperatures: [T] float32 without a gradient, or None for 1.
        kept_sets: the kept sets of the T tokens, which have the targets; None for the whole vocabulary.
        entropy: whether entropies get a gradient. If not, only passes with gradients return them,
            because they cost little there.
        collisions: whether to return log sum_v p_v^2 as well, without a gradient.
        chunk: bytes of logits to compute at once; None selects a default for the device.

    Returns:
        (nats in the shape of `targets`, the log-probability of each target; [T] nats, the entropy
        -sum_v p_v log p_v, or None). Both are empty if there are no tokens. With `collisions`, the
        second is [T, 2]: entropies, and log sum_v p_v^2.
    """
    weight, bias, shards = _own_part(weight, bias)
    trains = torch.is_grad_enabled()
    scales = None if temperatures is None else temperatures.reciprocal()
    chunk = chunk_bytes(hidden.device) if chunk is None else chunk
    wanted = trains or entropy or collisions
    how = _How(form, shards, trains, wanted, trains and entropy, chunk, kept_sets, collisions)
    logprobs, entropies, collided = _HeadLogprobs.apply(hidden, weight, bias, targets, scales, how)
    if collisions:
        entropies = torch.stack([entropies, collided], 1)
    return logprobs, entropies if how.entropies else None


@torch.no_grad()
def head_top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    temperatures: Tensor | None,
    form: HeadForm = HeadForm(),
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the k likeliest tokens of softmax(z / temperature), one chunk at a time and without a
    gradient. The arguments are those of `head_logprobs`.

    Returns:
        ([T, k] nats, their log-probabilities, largest first; [T, k] int64, their ids). k is at most
        the size of the vocabulary.
    """
    weight, bias, shards = _own_part(weight, bias)
    scales = None if temperatures is None else temperatures.reciprocal()
    chunk = chunk_bytes(hidden.device) if chunk is None else chunk
    chunks = _Chunks(hidden, weight, bias, scales, _How(form, shards, False, False, False, chunk))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in chunks.parts():
        logits = chunks.logits(part)
        largest, ids = logits.topk(min(k, len(weight)))
        no_targets = ids[:, :0]
        found.append((largest, ids, _statistics(logits, no_targets, means=False, replace=False)))
    if not found:
        empty = hidden.new_zeros((0, k), dtype=chunks.dtype)
        return empty, empty.long()
    largest, ids, own = (torch.cat(each) for each in zip(*found, strict=True))
    if shards is not None:
        own = _joined(own, shards)
        largest, ids = _likeliest_of_ranks(largest, ids + shards.first, k, shards)
    return largest - own[:, :1] - own[:, 1:2].log(), ids


@dataclass(frozen=True)
class _Shards:
    """This rank's rows of a split head, from token id `first`."""

    group: dist.ProcessGroup
    first: int


def _own_part(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, _Shards | None]:
    """Return this rank's part of a head."""
    if not isinstance(weight, DTensor):
        return weight, bias, None
    if weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(
            "a head must be split over its rows, on one dimension of the mesh; its "
            f"placements are {weight.placements}"
        )
    bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return weight.to_local(), bias, _Shards(weight.device_mesh.get_group(), box_of(weight).starts[0])


@dataclass(frozen=True)
class _How:
    form: HeadForm
    shards: _Shards | None
    trains: bool
    entropies: bool
    entropy: bool
    chunk: int
    """[bytes] Logits to compute at once."""
    kept_sets: KeptSets | None = None
    collisions: bool = False

    @property
    def keeps_exponentials(self) -> bool:
        """Whether the backward pass needs only the forward pass's exponentials."""
        return self.trains and not self.entropy and self.form.softcap is None


class _HeadLogprobs(torch.autograd.Function):
    """Autograd function for `head_logprobs`. With p = softmax(z / temperature) and H its entropy,

    d log p_y / dz_v = 1[v = y] - p_v            d H / dz_v = -p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scales: Tensor | None,
        how: _How,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks = _Chunks(hidden, weight, bias, scales, how)
        several = targets if targets.ndim == 2 else targets[:, None]
        parts, kept = [], None
        for part in chunks.parts():
            logits = chunks.logits(part)
            replace = chunks.kept and how.keeps_exponentials
            ids = _own_ids(several[part], how.shards)
            wanted = {"means": how.entropies, "collisions": how.collisions}
            parts.append(_statistics(logits, ids, **wanted, replace=replace))
            kept = logits if chunks.kept else None
        last = 3 + several.shape[1]
        width = last + how.collisions
        own = torch.cat(parts) if parts else hidden.new_zeros((0, width), dtype=chunks.dtype)
        everyones = own if how.shards is None else _joined(own, how.shards, collisions=how.collisions)
        largest, sums, weighted = everyones[:, :3].unbind(1)
        entropies = sums.log() - weighted / sums
        collided = everyones[:, -1].log() - 2 * sums.log() if how.collisions else sums.new_zeros(0)
        ctx.mark_non_differentiable(*([collided] if how.entropy else [entropies, collided]))
        if how.trains:
            ctx.how, ctx.kept, ctx.below = how, kept, own[:, 0] - largest
            ctx.save_for_backward(hidden, weight, bias, several, scales, largest, sums, entropies)
        # Subtracting in this order avoids rounding errors with large logits.
        if targets.ndim == 1:  # a view of [T, 1] would make FSDP warn
            return everyones[:, 3] - largest - sums.log(), entropies, collided
        return everyones[:, 3:last] - largest[:, None] - sums.log()[:, None], entropies, collided

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, scales, largest, sums, entropies = ctx.saved_tensors
        how: _How = ctx.how
        chunks, kept = _Chunks(hidden, weight, bias, scales, how), ctx.kept
        # This pass overwrites the kept logits, so a second backward pass must recompute them.
        ctx.kept = None
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        of_targets = grads[0] if grads[0].ndim == 2 else grads[0][:, None]
        of_all = of_targets.sum(1)
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = bias.new_zeros(bias.shape, dtype=chunks.dtype) if of_bias else None
        for part in chunks.parts():
            logits = chunks.logits(part) if kept is None else kept
            slopes = chunks.slopes(logits, part)
            ids = _own_ids(targets[part], how.shards)
            if kept is not None and how.keeps_exponentials:
                # Turn exponentials into -grad * p.
                logits *= (ctx.below.exp() / sums * -of_all)[:, None]
            else:
                to_entropy = (grads[1][part], entropies[part]) if how.entropy else None
                _differentiate(logits, largest[part], sums[part], of_all[part], to_entropy)
            _add_to_chosen(logits, ids, of_targets[part])
            chunks.through_form(logits, slopes, part)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            grad_weight = chunks.add_gradients(logits, part, grad_hidden, grad_weight, of_weight)
        if how.shards is not None and grad_hidden is not None:
            total = grad_hidden.to(chunks.dtype)  # accumulate in the same order as a single rank
            dist.all_reduce(total, group=how.shards.group)
            grad_hidden = total.to(hidden.dtype)
        if of_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight
            grad_weight = grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Chunks:
    """The chunks of one pass through the head. They share buffers, because newly allocated pages
    are slow. Kept logits are one chunk; other chunks have even sizes, because small products are
    slow."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, how: _How
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.scales, self.form, self._sets = scales, how.form, how.kept_sets
        self._first = 0 if how.shards is None else how.shards.first
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        row = self.dtype.itemsize * max(1, len(weight))
        self.kept = how.trains and row * len(hidden) <= KEPT_BYTES
        """Whether the backward pass reuses the forward pass's logits."""
        number = 1 if self.kept else -(-len(hidden) // max(1, how.chunk // row))
        self._size = max(1, -(-len(hidden) // max(1, number)))
        self._buffers: dict[str, Tensor] = {}

    def parts(self) -> Iterator[slice]:
        for start in range(0, len(self.hidden), self._size):
            yield slice(start, min(start + self._size, len(self.hidden)))

    def logits(self, part: slice) -> Tensor:
        """Return [t, vocabulary] logits divided by the temperatures, far below the others outside kept
        sets; the next call overwrites them."""
        hidden, number = self.hidden[part], part.stop - part.start
        out = self._buffer("logits", number, self.dtype)
        if hidden.dtype == self.dtype:
            torch.mm(hidden, self.weight.T, out=out)
        elif hidden.is_cuda:
            torch.mm(hidden, self.weight.T, out_dtype=self.dtype, out=out)
        else:
            # On a CPU torch.mm cannot return float32 for half-precision inputs.
            out.copy_(torch.mm(hidden, self.weight.T, out=self._buffer("rounded", number, hidden.dtype)))
        if self.bias is not None:
            out += self.bias
        self.form.logits(out)
        if self.scales is not None:
            out.mul_(self.scales[part, None])
        if self._sets is not None and len(self.weight):
            _exclude_others(out, self._sets[part], self._first)
        return out

    def slopes(self, logits: Tensor, part: slice) -> Tensor | None:
        """Return the soft cap's derivative, 1 - tanh^2, [t, vocabulary]; None without a cap."""
        cap = self.form.softcap
        if cap is None:
            return None
        slopes = self._buffer("slopes", len(logits), self.dtype).copy_(logits)
        if self.scales is not None:
            slopes /= self.scales[part, None]
        return slopes.mul_(1 / cap).square_().neg_().add_(1)

    def through_form(self, gradient: Tensor, slopes: Tensor | None, part: slice) -> None:
        """Turn the gradient of the scaled logits into the gradient of the products, in place."""
        if slopes is not None:
            gradient *= slopes
        if self.form.factor != 1:
            gradient *= self.form.factor
        if self.scales is not None:
            gradient *= self.scales[part, None]
        if self._sets is not None:
            _Places.of(self._sets[part], self._first, gradient).fill(gradient, gradient.new_zeros(()))

    def add_gradients(
        self,
        gradient: Tensor,
        part: slice,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        of_weight: bool,
    ) -> Tensor | None:
        """Compute the gradient of these hidden states from the gradient of their products, and
        store it. Return the float32 gradient of the weight, summed over the chunks so far."""
        hidden = self.hidden[part]
        if hidden.dtype != self.dtype:
            gradient = self._buffer("rounded", len(gradient), hidden.dtype).copy_(gradient)
        if grad_hidden is not None:
            torch.mm(gradient, self.weight, out=grad_hidden[part])
        if not of_weight:
            return None
        if hidden.dtype == self.dtype:
            return gradient.T @ hidden if grad_weight is None else grad_weight.addmm_(gradient.T, hidden)
        if "weight" not in self._buffers:
            self._buffers["weight"] = torch.empty_like(self.weight)
        rounded = torch.mm(gradient.T, hidden, out=self._buffers["weight"])
        if len(hidden) == len(self.hidden):
            return rounded
        return rounded.to(self.dtype) if grad_weight is None else grad_weight.add_(rounded)

    def _buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = self.hidden.new_empty(self._size, len(self.weight), dtype=dtype)
        return self._buffers[name][:rows]


def chunk_bytes(device: torch.device) -> int:
    return head_chunk_bytes(
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    )


@dataclass(frozen=True)
class _Places:
    """Where to find the ids of T kept sets in a tensor with a column for each token id of this rank."""

    listed: Tensor
    """[sets] int64 rows of the sets that are stored as the ids of their tokens."""
    rows: Tensor
    """[ids] int64."""
    columns: Tensor
    """[ids] int64."""
    keeps: Tensor
    """[ids] bool: whether the token is in the set."""

    @classmethod
    def of(cls, sets: KeptSets, first: int, like: Tensor) -> _Places:
        """Find the places in [T, size] `like`, whose columns are the token ids from `first`."""
        lists_kept = sets.counts > 0
        rows, ids = np.repeat(np.arange(len(sets.counts)), np.abs(sets.counts)), sets.ids - first
        here = (ids >= 0) & (ids < like.shape[1])
        rows, ids = rows[here], ids[here].astype(np.int64)
        found = np.flatnonzero(lists_kept), rows, ids, lists_kept[rows]
        return cls(*(to_device(each, like.device) for each in found))

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        """Overwrite the elements outside the kept sets with the row's value, [T] or []."""
        values = values.expand(len(tensor))
        kept = tensor[self.rows, self.columns]
        tensor[self.listed] = values[self.listed, None]
        tensor[self.rows, self.columns] = torch.where(self.keeps, kept, values[self.rows])


def _exclude_others(logits: Tensor, sets: KeptSets, first: int = 0) -> None:
    """Lower the logits [T, size] outside kept sets, in place, so that their probability is below 1e-34.
    The columns are the token ids from `first`."""
    places = _Places.of(sets, first, logits)
    places.fill(logits, logits.new_full((), _EXCLUDED))
    places.fill(logits, logits.detach().amax(1) - _BELOW)


def _own_ids(targets: Tensor, shards: _Shards | None) -> Tensor:
    """Return targets as row numbers of this rank's part of the head; ids of other ranks are out of
    range."""
    return targets if shards is None else targets - shards.first


def _statistics(
    logits: Tensor, ids: Tensor, *, means: bool, replace: bool, collisions: bool = False
) -> Tensor:
    """Return [T, 3 + m] statistics of logits z [T, vocabulary]: the largest z, with y = z - largest
    the sum of exp(y) and (if `means`) of y exp(y), and the z of each target `ids` [T, m] (0 on ranks
    without it). `collisions` adds a column, the sum of exp(2 y). `replace` overwrites z with
    exp(y)."""
    last = 3 + ids.shape[1]
    out = logits.new_zeros(len(logits), last + collisions)
    if not logits.shape[1]:
        out[:, 0] = -torch.inf
        return out
    here = (ids >= 0) & (ids < logits.shape[1])
    out[:, 3:last] = torch.where(here, logits.gather(1, ids.clamp(0, logits.shape[1] - 1)), 0)
    for rows in _cached_rows(logits):
        part, of = logits[rows], out[rows]
        torch.amax(part, -1, out=of[:, 0])
        above = part - of[:, 0, None]
        exponentials = torch.exp(above, out=part) if replace else above.exp() if means else above.exp_()
        of[:, 1] = exponentials.sum(-1)
        if collisions:
            of[:, last] = exponentials.square().sum(-1)
        if means:
            of[:, 2] = above.mul_(exponentials).sum(-1)
    return out


def _joined(own: Tensor, shards: _Shards, *, collisions: bool = False) -> Tensor:
    """Combine the statistics of all ranks in one exchange."""
    ranks = dist.get_world_size(shards.group)
    everyones = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyones, own, group=shards.group)
    of_ranks = torch.stack(everyones)
    largest, sums, weighted = of_ranks[..., :3].unbind(2)
    most = largest.amax(0)
    below = largest - most  # -inf for a rank without rows, whose sums are 0
    share = below.exp()
    weighted = weighted + torch.where(share > 0, below, 0) * sums
    joined = torch.stack([most, (sums * share).sum(0), (weighted * share).sum(0)], 1)
    if collisions:
        of_ranks[..., -1] *= share.square()
    return torch.cat([joined, of_ranks[..., 3:].sum(0)], 1)


def _likeliest_of_ranks(logits: Tensor, ids: Tensor, k: int, shards: _Shards) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of all ranks, [T, k], and their ids. Each rank gives at most k,
    with their ids in the whole vocabulary."""
    ranks, missing = dist.get_world_size(shards.group), k - logits.shape[1]
    logits = F.pad(logits, (0, missing), value=-torch.inf).contiguous()
    ids = F.pad(ids, (0, missing)).contiguous()
    everyones = [torch.empty_like(logits) for _ in range(ranks)]
    of_ids = [torch.empty_like(ids) for _ in range(ranks)]
    dist.all_gather(everyones, logits, group=shards.group)
    dist.all_gather(of_ids, ids, group=shards.group)
    largest, positions = torch.cat(everyones, 1).topk(k)
    return largest, torch.cat(of_ids, 1).gather(1, positions)


def _differentiate(
    logits: Tensor, largest: Tensor, sums: Tensor, grad: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> None:
    """Replace logits z [T, vocabulary] with the gradient of sum_t grad_t log p_t (+ sum_t e_t H_t
    if `entropy` = (e, H)), without the term of each target's own logit. `largest` and `sums` ([T])
    are the maximum of z and the sum of exp(z - largest) over the whole vocabulary."""
    if not logits.shape[1]:
        return
    for rows in _cached_rows(logits):
        above, of_all = logits[rows].sub_(largest[rows, None]), sums[rows, None]
        if entropy is None:
            above.exp_().mul_(-grad[rows, None] / of_all)
        else:
            grads, entropies = entropy[0][rows, None] / of_all, entropy[1][rows, None]
            exponentials = above.exp()
            above.add_(entropies - of_all.log()).mul_(grads).add_(grad[rows, None] / of_all).mul_(
                exponentials
            ).neg_()


def _add_to_chosen(logits: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Add the term of each target's own logit, `grad` [T, m], for targets on this rank."""
    if logits.shape[1]:
        here = (ids >= 0) & (ids < logits.shape[1])
        logits.scatter_add_(1, ids.clamp(0, logits.shape[1] - 1), torch.where(here, grad, 0))


def _cached_rows(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows that fit into a CPU's cache. On other devices, yield sixteenths of the
    rows, to keep temporaries small."""
    rows = max(1, _CACHED // logits.shape[1])
    if logits.device.type != "cpu" or isinstance(logits, FakeTensor):
        rows = -(-len(logits) // 16)
    for start in range(0, len(logits), max(1, rows)):
        yield slice(start, start + rows)


def logprobs_of_any_head(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    entropy: bool,
    kept_sets: KeptSets | None = None,
    collisions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same by autograd, for heads that do more than multiply, scale and soft-cap:
    `logits_of` maps [T, hidden] to [T, vocabulary]."""
    trains = torch.is_grad_enabled()

    def chunk(
        hidden: Tensor, targets: Tensor, temperatures: Tensor | None, sets: KeptSets | None
    ) -> tuple[Tensor, Tensor]:
        logits = logits_of(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperatures is not None:
            logits = logits / temperatures[:, None]
        if sets is not None:
            logits = logits.clone()
            _exclude_others(logits, sets)
        log_p = F.log_softmax(logits, -1)
        several = targets if targets.ndim == 2 else targets[:, None]
        chosen = log_p.gather(1, several).view(targets.shape)
        if not (entropy or trains or collisions):
            return chosen, chosen
        with torch.set_grad_enabled(entropy and trains):
            entropies = -(log_p.exp() * log_p).sum(-1)
        if collisions:
            entropies = torch.stack([entropies, (2 * log_p.detach()).logsumexp(-1)], 1)
        return chosen, entropies

    vocabulary = logits_of(hidden[:1].detach()).shape[-1]
    size = max(1, chunk_bytes(hidden.device) // (4 * vocabulary))
    # Recompute chunks in the backward pass if their logits take too much memory.
    again = trains and 4 * len(targets) * vocabulary > KEPT_BYTES
    parts = []
    # Run one chunk even without targets, because torch.cat needs a tensor.
    for start in range(0, max(1, len(targets)), size):
        part = slice(start, start + size)
        own_temperatures = None if temperatures is None else temperatures[part]
        sets = None if kept_sets is None else kept_sets[part]
        arguments = (hidden[part], targets[part], own_temperatures, sets)
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if again else chunk(*arguments))
    logprobs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, entropies if entropy or trains or collisions else None


@torch.no_grad()
def top_logprobs_of_any_head(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, k: int, temperatures: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `head_top_logprobs` for heads that do more than multiply, scale and soft-cap."""
    size = max(1, chunk_bytes(hidden.device) // (4 * logits_of(hidden[:1]).shape[-1]))
    parts = []
    for start in range(0, max(1, len(hidden)), size):
        part = slice(start, start + size)
        logits = logits_of(hidden[part])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperatures is not None:
            logits = logits / temperatures[part, None]
        parts.append(F.log_softmax(logits, -1).topk(k))
    logprobs, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, ids
