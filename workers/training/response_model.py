"""ResponseModel: a causal language model that answers with one number for each response token, and nothing else: its
log-probability, or what a scalar head says.

The logits of a batch are by far its largest tensor (tokens x vocabulary). So the head sees only the positions that predict
response tokens, and works through them in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...dataflow.errors import UserError
from .agreement import find_agreeing_way
from .packed_attention import Rows
from .rope import follows_length

_CHUNK_BYTES = 128 * 2**20
"""Logits computed at once."""
_KEPT_BYTES = 2**30
"""Logits kept for the backward pass; where there are more, they are computed a second time."""
_CACHED = 2**17
"""Logits that stay in the cache of a CPU while they are gone over."""


class ResponseModel(nn.Module):
    """Backbone, then head, of a `transformers` causal language model.

    Where the model lets us (`packs`), rows stand one behind the other. Else they are padded on the right: attention is causal, no
    real token sees padding, so no mask is needed, and the fastest attention kernel can be used.

    Raises:
        UserError: of a model whose rows can be computed in neither way (`agreement.py`).
    """

    def __init__(self, causal_lm: Any, *, scalar: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scalar = scalar
        """It has a scalar head (`scalar_head.py`)."""
        self.backbone_name = _find_backbone(causal_lm)
        self.packs = False
        """Whether a microbatch costs its tokens, or its rows times the longest."""
        self.logit_factor: float | None = None
        """Logits are the products of hidden states and the head's weight, times this; None: the model does more to them."""
        find_agreeing_way(self)

    @property
    def backbone(self) -> Any:
        """The model without its head."""
        return getattr(self.causal_lm, self.backbone_name)

    @property
    def layers(self) -> list[nn.Module]:
        """Of the text, where the backbone has others beside them; empty if they have an uncommon name."""
        return list(getattr(getattr(self.backbone, "language_model", self.backbone), "layers", ()))

    @property
    def scalar_head(self) -> nn.Module | None:
        return self.causal_lm.score if self.scalar else None

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
            temperatures: [T] float32, divides the logits; None: 1.
            entropy: give the entropy of each predicting distribution with gradient. Without, it is given where gradients are
                computed, since the logits are there: no gradient flows through it then.

        Returns:
            ([T] float32 nats, or what the scalar head says; [T] float32 nats, -sum_v p_v log p_v at the temperature, or None).
        """
        outputs, hidden = self.run_backbone(input_ids, Rows(lengths, int(lengths.max())))
        hidden = hidden.index_select(0, predicting)
        if self.scalar:
            return self.causal_lm.score(hidden.float())[:, 0], None  # half precision is too coarse for values
        return self.logprobs_of(outputs, hidden, targets, temperatures, entropy=entropy)

    def run_backbone(self, input_ids: Tensor, rows: Rows) -> tuple[Any, Tensor]:
        """(What the backbone returns, [N, hidden] states of the tokens, row after row)."""
        if self.packs:
            inputs = {"input_ids": input_ids[None], "position_ids": rows.positions[None], "rows": rows}
        else:
            padded = input_ids.new_zeros(math.prod(rows.shape))
            padded[rows.slots] = input_ids
            inputs = {"input_ids": padded.view(rows.shape)}
            if follows_length(self.causal_lm):
                inputs["position_ids"] = rows.padded_positions
        outputs = self.backbone(**inputs, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        return outputs, hidden if self.packs else hidden[rows.slots]

    def logprobs_of(
        self, outputs: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of targets (and entropies), of the [T, hidden] states before them. Logits are scaled in float32."""
        if self.logit_factor is None or entropy:
            return _any_head(lambda states: self.own_logits(outputs, states), hidden, targets, temperatures, entropy)
        factors = None if self.logit_factor == 1 else torch.full_like(targets, self.logit_factor, dtype=torch.float32)
        if temperatures is not None:
            factors = self.logit_factor / temperatures
        weight = self.causal_lm.get_output_embeddings().weight
        trains = torch.is_grad_enabled()
        logprobs, entropies = _HeadLogprobs.apply(hidden.to(weight.dtype), weight, targets, factors, trains)
        return logprobs, entropies if trains else None

    def own_logits(self, outputs: Any, hidden: Tensor) -> Tensor:
        """[T, vocabulary] logits of [T, hidden] states by all that the model's own forward pass does after its backbone.

        Args:
            outputs: what the backbone returned; of it only the hidden states are exchanged.
        """
        given = replace(outputs, last_hidden_state=hidden[None])
        # The same model but for its backbone: a copy shares all else, and the model itself may be looked at by other threads.
        headed = object.__new__(type(self.causal_lm))
        headed.__dict__ = {
            **self.causal_lm.__dict__,
            "_modules": {**self.causal_lm._modules, self.backbone_name: _Answered(self.backbone, given)},
        }
        nobody = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return headed(input_ids=nobody, use_cache=False).logits[0]


class _Answered:
    """A backbone that has answered already."""

    def __init__(self, backbone: Any, answer: Any) -> None:
        self._backbone, self._answer = backbone, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backbone, name)  # a multiplier, or (OPT) what the backbone consists of
        return _Answered(found, self._answer) if isinstance(found, nn.Module) else found


def _find_backbone(causal_lm: Any) -> str:
    """The name of the module that a causal language model puts its head on.

    Raises:
        UserError: there is none, so nothing is known of what stands before the head.
    """
    for name in (causal_lm.base_model_prefix, "model"):  # Llama 4's text model has not what it says that it has
        if name in causal_lm._modules:
            return name
    parts = ", ".join(causal_lm._modules)
    raise UserError(
        f"model {causal_lm.name_or_path!r} ({type(causal_lm).__name__}) cannot be trained: of its parts ({parts}) none is its backbone"
    )


class _HeadLogprobs(torch.autograd.Function):
    """log_softmax(factors * (hidden @ weight.T))[target], for a head without bias; logits are scaled in float32. And, where a
    gradient is needed, the entropies of the distributions, without one.

    Against plain autograd this saves passes over [T, vocabulary], which cost as much as the matrix products: exponentials
    are taken in place, kept, and turned in place into the gradient, p - onehot.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, factors: Tensor | None, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens, vocabulary = len(targets), len(weight)
        ctx.chunk = max(1, _CHUNK_BYTES // (4 * vocabulary))
        keep = needs_grad and 4 * num_tokens * vocabulary <= _KEPT_BYTES
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
        if ctx.needs_input_grad[1]:  # not of a head that stands still
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
    """[T, vocabulary] float32, a tensor of its own."""
    logits = (hidden @ weight.T).float()
    return logits if factors is None else logits.mul_(factors[:, None])


def _exponentiate(logits: Tensor, *, means: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put exp(z), z = logits - max, in place of logits [T, vocabulary]; returns the maxima, the sums of exp(z), and, if asked for, the
    means of z under softmax(z), each [T]."""
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


def _any_head(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """The general form, by autograd: heads that are more than a matrix, and entropies that have a gradient."""
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
    size = max(1, _CHUNK_BYTES // (4 * vocabulary))
    again = trains and 4 * len(targets) * vocabulary > _KEPT_BYTES
    parts = []
    for start in range(0, max(1, len(targets)), size):
        part = slice(start, start + size)
        arguments = (hidden[part], targets[part], None if temperatures is None else temperatures[part])
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if again else chunk(*arguments))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy or trains else None
