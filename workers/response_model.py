"""ResponseModel: a causal language model that answers with one number for each response token, and nothing else: its
log-probability, or what a scalar head says.

The logits of a batch are by far its largest tensor (tokens x vocabulary). So the head sees only the positions that predict
response tokens, and works through them in chunks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .packed_attention import NAME as PACKED
from .packed_attention import Rows, can_pack

_CHUNK_BYTES = 128 * 2**20
"""Logits computed at once."""
_KEPT_BYTES = 2**30
"""Logits kept for the backward pass; where there are more, they are computed a second time."""


class ResponseModel(nn.Module):
    """Backbone, then head, of a `transformers` causal language model.

    Where the model lets us (`packs`), rows stand one behind the other. Else they are padded on the right: attention is causal, no
    real token sees padding, so no mask is needed, and the fastest attention kernel can be used.
    """

    def __init__(self, causal_lm: Any, *, scalar: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scalar = scalar
        """It has a scalar head (`scalar_head.py`)."""
        self.packs = can_pack(causal_lm)
        """Whether a microbatch costs its tokens, or its rows times the longest."""
        if self.packs:
            causal_lm.set_attn_implementation(PACKED)

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        predicting: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of chosen tokens; with a scalar head its outputs, whatever the targets and temperatures.

        Args:
            input_ids: [N] int64, row after row.
            lengths: [B] int64 tokens of each row, at least 1.
            predicting: [T] int64, index into the N of the token *before* each target; of the positions that a scalar head reads.
            targets: [T] int64.
            temperatures: [T] divides the logits; None: 1.
            entropy: also give the entropy of each predicting distribution, with gradient.

        Returns:
            ([T] float32 nats, or what the scalar head says; [T] float32 nats or None).
        """
        rows = Rows(lengths, int(lengths.max()))
        if self.packs:
            inputs = {"input_ids": input_ids[None], "position_ids": rows.positions[None], "rows": rows}
        else:
            padded = input_ids.new_zeros(math.prod(rows.shape))
            padded[rows.slots] = input_ids
            inputs = {"input_ids": padded.view(rows.shape)}
            predicting = rows.slots[predicting]
        hidden = self.causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, predicting)
        if self.scalar:
            with torch.autocast(hidden.device.type, enabled=False):  # half precision is too coarse for values
                return F.linear(hidden.float(), self.causal_lm.score.weight.float())[:, 0], None
        head = self.causal_lm.get_output_embeddings()
        scale, softcap = _logit_scale(self.causal_lm.config)
        if head.bias is None and not softcap:
            if temperatures is not None:  # a linear head: cheaper on [T, hidden] than on [T, vocabulary]
                hidden = hidden / temperatures[:, None].to(hidden.dtype)
            if not entropy:
                dtype = (
                    torch.get_autocast_dtype(hidden.device.type)
                    if torch.is_autocast_enabled(hidden.device.type)
                    else hidden.dtype
                )
                hidden, weight = (hidden * scale).to(dtype), head.weight.to(dtype)
                return _HeadLogprobs.apply(hidden, weight, targets, torch.is_grad_enabled()), None
            temperatures = None
        return _any_head(head, hidden, targets, temperatures, entropy, scale, softcap)


class _HeadLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T)[target], for a head without bias.

    Against plain autograd this saves passes over [T, vocabulary], which cost as much as the matrix products: exponentials
    are taken in place, kept, and turned in place into the gradient, p - onehot.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
        num_tokens, vocabulary = len(targets), len(weight)
        ctx.chunk = max(1, _CHUNK_BYTES // (4 * vocabulary))
        keep = needs_grad and 4 * num_tokens * vocabulary <= _KEPT_BYTES
        out = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(out)
        ctx.kept = []
        for start in range(0, num_tokens, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = (hidden[part] @ weight.T).float()
            chosen = logits.gather(1, targets[part, None])[:, 0]
            largest = logits.amax(-1)
            exponentials = logits.sub_(largest[:, None]).exp_()
            sums = exponentials.sum(-1)
            log_sums[part] = largest + sums.log()
            out[part] = chosen - log_sums[part]
            if keep:
                ctx.kept.append((exponentials, sums))
        if needs_grad:
            ctx.save_for_backward(hidden, weight, targets, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not of a head that stands still
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for number, start in enumerate(range(0, len(targets), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            if ctx.kept:
                exponentials, sums = ctx.kept[number]
                grad_logits = exponentials.mul_((-grad[part] / sums)[:, None])
                ctx.kept[number] = None
            else:
                logits = (hidden[part] @ weight.T).float()
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
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _any_head(
    head: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, entropy: bool, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """The general form, by autograd: heads with a bias or a soft cap, and entropies."""

    def chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float() * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if temperatures is not None:
            logits = logits / temperatures[:, None]
        log_p = F.log_softmax(logits, -1)
        chosen = log_p.gather(1, targets[:, None])[:, 0]
        return chosen, -(log_p.exp() * log_p).sum(-1) if entropy else chosen

    vocabulary = head.weight.shape[0]
    size = max(1, _CHUNK_BYTES // (4 * vocabulary))
    again = torch.is_grad_enabled() and 4 * len(targets) * vocabulary > _KEPT_BYTES
    parts = []
    for start in range(0, max(1, len(targets)), size):
        part = slice(start, start + size)
        arguments = (hidden[part], targets[part], None if temperatures is None else temperatures[part])
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if again else chunk(*arguments))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy else None


def _logit_scale(config: Any) -> tuple[float, float]:
    """What some architectures do to their logits after the head: (factor, soft cap or 0)."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)  # Gemma
