"""Head log-probabilities: log-probabilities and entropies of tokens, from the hidden states before them.

The logits of a batch (tokens x vocabulary) are by far its largest tensor, so they are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .memory import CHUNK_BYTES, KEPT_BYTES

_CACHED = 2**17
"""Number of logits that stay in the cache of a CPU during a pass over them."""


class HeadLogprobs(torch.autograd.Function):
    """log_softmax(factors * (hidden @ weight.T))[target], for a head without bias; logits are scaled in float32. Where a gradient
    is needed, it also returns the entropies of the distributions, which have none.

    Compared with plain autograd this saves passes over [T, vocabulary], which cost as much as the matrix products: exponentials
    are computed in place, kept, and turned in place into the gradient, p - onehot.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, factors: Tensor | None, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens, vocabulary = len(targets), len(weight)
        ctx.chunk = max(1, CHUNK_BYTES // (4 * vocabulary))
        keep = needs_grad and 4 * num_tokens * vocabulary <= KEPT_BYTES
        out = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        log_sums, entropies = torch.empty_like(out), torch.empty_like(out)
        ctx.kept = []
        for start in range(0, num_tokens, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _scaled_logits(hidden[part], weight, None if factors is None else factors[part])
            chosen = logits.gather(1, targets[part, None])[:, 0]
            largest, sums, means = _exponentiate(logits, means=needs_grad)
            log_sums[part] = largest + sums.log()
            out[part] = chosen - log_sums[part]
            if means is not None:
                entropies[part] = sums.log() - means
            if keep:
                ctx.kept.append((logits, sums))
        if needs_grad:
            ctx.save_for_backward(hidden, weight, targets, factors, log_sums)
        ctx.mark_non_differentiable(entropies)
        return out, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, factors, log_sums = ctx.saved_tensors
        grad = grads[0] if factors is None else grads[0] * factors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not for a frozen head
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for number, start in enumerate(range(0, len(targets), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            if ctx.kept:
                exponentials, sums = ctx.kept[number]
                grad_logits = exponentials.mul_((-grad[part] / sums)[:, None])
                ctx.kept[number] = None
            else:
                logits = _scaled_logits(hidden[part], weight, None if factors is None else factors[part])
                grad_logits = logits.sub_(log_sums[part, None]).exp_().mul_(-grad[part, None])
            grad_logits.scatter_add_(1, targets[part, None], grad[part, None])
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is None:
                continue
            if hidden.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.T, hidden[part])
            else:
                grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, factors: Tensor | None) -> Tensor:
    """[T, vocabulary] float32, a new tensor."""
    logits = (hidden @ weight.T).float()
    return logits if factors is None else logits.mul_(factors[:, None])


def _exponentiate(logits: Tensor, *, means: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Replace logits [T, vocabulary] by exp(z), z = logits - max. Returns the maxima, the sums of exp(z) and, with `means`, the means
    of z under softmax(z), each [T]."""
    largest = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    sums, weighted = torch.empty_like(largest), torch.empty_like(largest)
    rows = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        z = logits[part]
        largest[part] = z.amax(-1)
        z -= largest[part, None]
        if means:
            exponentials = z.exp()
            weighted[part] = z.mul_(exponentials).sum(-1)
            z.copy_(exponentials)
        else:
            z.exp_()
        sums[part] = z.sum(-1)
    return largest, sums, weighted / sums if means else None


def logprobs_of_any_head(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """The general form, by autograd: for heads that are more than a matrix, and entropies that have a gradient.

    Args:
        logits_of: [T, hidden] -> [T, vocabulary].
        hidden, targets, temperatures, entropy: see `ResponseModel.forward`.
    """
    trains = torch.is_grad_enabled()

    def chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits_of(hidden).float()
        if temperatures is not None:
            logits = logits / temperatures[:, None]
        log_p = F.log_softmax(logits, -1)
        chosen = log_p.gather(1, targets[:, None])[:, 0]
        if not (entropy or trains):
            return chosen, chosen
        with torch.set_grad_enabled(entropy and trains):
            return chosen, -(log_p.exp() * log_p).sum(-1)

    vocabulary = logits_of(hidden[:1].detach()).shape[-1]
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    again = trains and 4 * len(targets) * vocabulary > KEPT_BYTES
    parts = []
    for start in range(0, max(1, len(targets)), size):
        part = slice(start, start + size)
        arguments = (hidden[part], targets[part], None if temperatures is None else temperatures[part])
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if again else chunk(*arguments))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy or trains else None
