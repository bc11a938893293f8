"""ResponseModel: a causal language model that computes one number per response token: its
log-probability, or the output of a scalar head.

The head runs only on positions that predict response tokens, because the logits (tokens x
vocabulary) are by far the largest tensor.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...algorithms.loss import CANDIDATE_LOGPROBS, LOG_COLLISIONS
from ...dataflow.errors import UserError
from ..kept_sets import KeptSets
from ..models.images import LANGUAGE, embed, is_type_that_sees, positions, tower_parameters
from .head_logprobs import (
    HeadForm,
    head_logprobs,
    head_top_logprobs,
    logprobs_of_any_head,
    top_logprobs_of_any_head,
)
from .packed_sequences import PackedSequences, to_device

if TYPE_CHECKING:
    from .packed_sequences import Stretches
    from .routers import Routers


# Ropes whose frequencies depend on the length of a sequence (longrope, dynamic NTK). `transformers`
# uses the longest position of all rows, which it reads from the device. Weft calls a copy of the
# model's module on the host for each row, so that every row gets its own frequencies and nothing
# waits for the device.


def follows_length(model: nn.Module) -> bool:
    """Return whether the frequencies of the model's rope depend on a sequence's length."""
    return any(_follows_length(module) for module in model.modules())


class _RopesByRow:
    """Computes such ropes one row at a time, by replacing their forward methods."""

    def __init__(self, causal_lm: nn.Module) -> None:
        self.rows: PackedSequences | None = None
        for module in causal_lm.modules():
            if _follows_length(module):
                module.forward = partial(self._forward, copy.deepcopy(module).cpu())

    def _forward(
        self, rope: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        assert self.rows is not None
        like = torch.empty((), dtype=x.dtype).expand(x.shape)  # the rope reads only its dtype and device
        across = len(position_ids) == 1
        parts = []
        for row in self.rows.positions_by_row(padded=not across):
            # The rope keeps a long row's frequencies until it gets a short one; this call resets
            # it.
            rope(like, torch.zeros_like(row[:, :1]), *args, **kwargs)
            parts.append(rope(like, row, *args, **kwargs))
        found = (torch.cat(each, dim=1 if across else 0) for each in zip(*parts, strict=True))
        return tuple(to_device(each, x.device) for each in found)


def _follows_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # some models have a mapping by kind of layer
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(name, str) and (name == "longrope" or "dynamic" in name) for name in names)


class ResponseModel(nn.Module):
    """Backbone and head of a `transformers` causal language model.

    With `packs`, rows lie end to end; otherwise the model pads them on the right. Attention is
    causal, so no real token sees padding. Rows need no mask, and the fastest attention kernel
    applies. `agreement.py` finds out what a model supports. Raises UserError if Weft cannot find
    the model's backbone.
    """

    def __init__(self, causal_lm: Any, *, scalar: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scalar = scalar
        self.sees = is_type_that_sees(causal_lm.config)
        self.backbone_name = _find_backbone(causal_lm)
        # Padding needs no mask here, and this check of `transformers` would read tokens from the
        # device.
        self.backbone.warn_if_padding_and_no_attention_mask = lambda *_: None
        self.packs = False
        """Whether a microbatch costs its tokens, rather than rows times the longest row."""
        self.shares_prompts = False
        """Whether rows can share the tokens of a prompt."""
        self.stretches: Stretches | None = None
        """How ranks share the tokens of a microbatch; None if each has its own."""
        self.head_form: HeadForm | None = None
        """How logits follow from the products of hidden states and head; None if in some other
        way."""
        self.routers: Routers | None = None
        """Routers of a mixture of experts; None if Weft cannot access any."""
        self.ropes: _RopesByRow | None = None
        """Length-dependent ropes; None without any, or if they see all rows together."""
        self.chunk_bytes: int | None = None
        """Bytes of logits to compute at once; None selects a default for the device."""

    @property
    def backbone(self) -> Any:
        return getattr(self.causal_lm, self.backbone_name)

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of the backbone or of its text model; empty if they do not have a usual name."""
        return list(getattr(getattr(self.backbone, LANGUAGE, self.backbone), "layers", ()))

    @property
    def scalar_head(self) -> nn.Module | None:
        """The scalar head, or None if the model has its own head."""
        return self.causal_lm.score if self.scalar else None

    def put_ropes_by_row(self) -> None:
        """Make length-dependent ropes compute one row at a time, in place."""
        if self.ropes is None and follows_length(self.causal_lm):
            self.ropes = _RopesByRow(self.causal_lm)

    def forward(
        self,
        input_ids: Tensor,
        rows: PackedSequences,
        predicting: np.ndarray,
        targets: Tensor,
        temperatures: Tensor | None,
        kept_sets: KeptSets | None = None,
        *,
        entropy: bool = False,
        top: int = 0,
        collisions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of target tokens, or the outputs of a scalar head, which
        ignores targets and temperatures.

        Args:
            input_ids: [N] int64, row after row.
            rows: assignment of the N tokens to rows.
            predicting: [T] int64 indexes into the N tokens: the token *before* each target, or the
                positions that a scalar head reads. On the host; ascending if ranks share tokens.
            targets: [T] int64, or [T, m] for m tokens at each position.
            temperatures: [T] float32: divisors of the logits; None for 1.
            kept_sets: the tokens of each position that have a probability; None for all.
            entropy: whether to return entropies of the predicting distributions with a gradient. If
                not, passes with gradients return them without one, because they compute the logits
                anyway.
            collisions: whether to return log sum_v p_v^2 as well, without a gradient.
            top: if above 0, return the likeliest `top` tokens instead, without a gradient.

        Returns:
            (float32 log-probabilities in nats in the shape of `targets`, or [T] outputs of the
            scalar head; [T] float32 entropies in nats, -sum_v p_v log p_v at the temperature, or
            None; with `collisions`, [T, 2]: entropies, and log sum_v p_v^2). With `top`: ([T, top]
            float32 log-probabilities, largest first; [T, top] int64 token ids).
        """
        if self.stretches is not None:
            return self._in_stretches(
                *(self.stretches, input_ids, rows, predicting, targets, temperatures, kept_sets),
                *(entropy, top, collisions),
            )
        outputs, hidden = self.run_backbone(input_ids, rows)
        hidden = hidden.index_select(0, to_device(predicting, hidden.device))
        if self.scalar:
            return self._values(hidden), None
        how = {"entropy": entropy, "top": top, "collisions": collisions}
        return self.logprobs_of(outputs, hidden, targets, temperatures, kept_sets, **how)

    def _in_stretches(
        self,
        stretches: Stretches,
        input_ids: Tensor,
        rows: PackedSequences,
        predicting: np.ndarray,
        targets: Tensor,
        temperatures: Tensor | None,
        kept_sets: KeptSets | None,
        entropy: bool,
        top: int,
        collisions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` on this rank's tokens, and gather the results of all ranks."""
        input_ids, rows = stretches.share(input_ids, rows)
        outputs, hidden = self.run_backbone(input_ids, rows)
        upto = [
            0,
            *np.searchsorted(predicting, np.arange(1, stretches.ranks + 1) * len(hidden)).tolist(),
        ]
        mine = slice(upto[stretches.rank], upto[stretches.rank + 1])
        counts = [end - begin for begin, end in itertools.pairwise(upto)]
        own = to_device(predicting[mine] - stretches.rank * len(hidden), hidden.device)
        hidden_states = hidden.index_select(0, own)
        if self.scalar:
            values, entropies = self._values(hidden_states), None
        else:
            own_temperatures = None if temperatures is None else temperatures[mine]
            how = {"entropy": entropy, "top": top, "collisions": collisions}
            values, entropies = self.logprobs_of(
                *(outputs, hidden_states, targets[mine], own_temperatures),
                kept_sets and kept_sets[mine],
                **how,
            )
        values = stretches.gather(values, counts)
        if values.requires_grad and not counts[stretches.rank]:
            # Other ranks wait for this rank in the backward pass's exchanges.
            values = values + 0.0 * hidden[0, 0]
        return values, None if entropies is None else stretches.gather(entropies, counts)

    def _values(self, hidden: Tensor) -> Tensor:
        return self.causal_lm.score(hidden.float())[:, 0]  # half precision is too coarse for values

    def run_backbone(self, input_ids: Tensor, rows: PackedSequences) -> tuple[Any, Tensor]:
        """Run the model without its head on [N] int64 tokens, row after row. Return the backbone's
        outputs, and the [N, hidden] states of the tokens."""
        if self.routers is not None:
            routing = rows.routing
            if routing is not None and not self.packs:
                routing = routing.spread(rows.slots, math.prod(rows.shape))
            self.routers.begin_pass(routing)
        if self.ropes is not None:
            self.ropes.rows = rows
        if self.packs:
            positions = rows.positions if rows.exchange is None else rows.exchange.own(rows.positions)
            inputs = {"input_ids": input_ids[None], "position_ids": positions[None], "rows": rows}
        else:
            padded = input_ids.new_zeros(math.prod(rows.shape))
            padded[rows.slots] = input_ids
            inputs = {"input_ids": padded.view(rows.shape)}
            if self.ropes is not None:
                inputs["position_ids"] = rows.padded_positions
            if rows.shown is not None:
                inputs = self._with_images(inputs, rows)
        outputs = self.backbone(**inputs, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        if self.sees and torch.is_grad_enabled():
            # All ranks need gradients for the same parameters, even ranks without images. LLaVA
            # does not use the last layer of the tower.
            tower = [p.sum() for p in tower_parameters(self.backbone) if p.requires_grad]
            hidden = hidden + 0.0 * sum(tower) if tower else hidden
        return outputs, hidden if self.packs else hidden[rows.slots]

    def _with_images(self, inputs: dict[str, Any], rows: PackedSequences) -> dict[str, Any]:
        assert rows.shown is not None
        input_ids = inputs.pop("input_ids")
        places = torch.zeros(math.prod(rows.shape), dtype=torch.bool, device=input_ids.device)
        places[rows.slots] = rows.shown.places
        shown = replace(rows.shown, places=places.view(rows.shape))
        own = positions(self.backbone, input_ids, shown)
        return {
            **inputs,
            "inputs_embeds": embed(self.backbone, input_ids, shown),
            **({} if own is None else {"position_ids": own}),
        }

    def logprobs_of(
        self,
        outputs: Any,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        kept_sets: KeptSets | None = None,
        *,
        entropy: bool,
        top: int = 0,
        collisions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies from the [T, hidden] states before targets, or the
        likeliest tokens of the whole vocabulary."""
        if self.head_form is None:

            def logits_of(states: Tensor) -> Tensor:
                return self.own_logits(outputs, states)

            if top:
                return top_logprobs_of_any_head(logits_of, hidden, top, temperatures)
            how = {"kept_sets": kept_sets, "collisions": collisions}
            return logprobs_of_any_head(logits_of, hidden, targets, temperatures, entropy, **how)
        head = self.causal_lm.get_output_embeddings()
        own = (hidden.to(head.weight.dtype), head.weight, getattr(head, "bias", None))
        form, chunk = self.head_form, self.chunk_bytes
        if top:
            return head_top_logprobs(*own, top, temperatures, form, chunk=chunk)
        how = {"kept_sets": kept_sets, "entropy": entropy, "collisions": collisions, "chunk": chunk}
        return head_logprobs(*own, targets, temperatures, form, **how)

    def own_logits(self, outputs: Any, hidden: Tensor) -> Tensor:
        """Return [T, vocabulary] logits for [T, hidden] states, as the model computes them after
        its backbone. Replaces the hidden states of `outputs`, a result of the backbone."""
        given = replace(outputs, last_hidden_state=hidden[None])
        # Copy the model, sharing all but the backbone, so that other threads see it unchanged.
        headed = object.__new__(type(self.causal_lm))
        headed.__dict__ = {
            **self.causal_lm.__dict__,
            "_modules": {**self.causal_lm._modules, self.backbone_name: _Answered(self.backbone, given)},
        }
        nobody = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return headed(input_ids=nobody, use_cache=False).logits[0]


def with_computed(outputs: Tensor, entropies: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a model's results as losses take them: the outputs of the response tokens, [T], and the
    columns that the model computed besides."""
    computed = {} if entropies is None else {"entropy": entropies}
    if entropies is not None and entropies.ndim == 2:
        computed = {"entropy": entropies[:, 0], LOG_COLLISIONS: entropies[:, 1]}
    if outputs.ndim == 2:
        outputs, computed[CANDIDATE_LOGPROBS] = outputs[:, 0], outputs[:, 1:]
    return outputs, computed


class _Answered:  # stands in for the backbone, and returns stored outputs
    def __init__(self, backbone: Any, answer: Any) -> None:
        self._backbone, self._answer = backbone, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backbone, name)  # a multiplier or, in OPT, a part of the backbone
        return _Answered(found, self._answer) if isinstance(found, nn.Module) else found


def _find_backbone(causal_lm: Any) -> str:
    # Llama 4's text model has a prefix that names no module.
    for name in (causal_lm.base_model_prefix, "model"):
        if name in causal_lm._modules:
            return name
    parts = ", ".join(causal_lm._modules)
    raise UserError(
        f"model {causal_lm.name_or_path!r} ({type(causal_lm).__name__}) cannot be trained: none of its parts ({parts}) is its backbone"
    )
