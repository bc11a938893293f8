"""ResponseModel: a causal language model that computes one number for each response token: its log-probability, or the output of a
scalar head.

The head sees only the positions that predict response tokens, because logits (tokens x vocabulary) are by far the largest tensor.
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

from ...dataflow.errors import UserError
from ..models.images import LANGUAGE, embed, is_type_that_sees, positions, tower_parameters
from .head_logprobs import HeadForm, head_logprobs, logprobs_of_any_head
from .packed_sequences import PackedSequences, to_device

if TYPE_CHECKING:
    from .routers import Routers
    from .sequence_parallel import Stretches


# Rope
#
# Rope whose frequencies follow the length of a sequence (longrope, dynamic NTK), for rows that
# share a forward pass.
#
# `transformers` takes the longest position of all rows for the length, and asks the device for it.
# Here a copy of the model's own module gets each row by itself, on the host, which knows its
# length: a row has the frequencies that it has alone, and no device is waited for.


def follows_length(model: nn.Module) -> bool:
    """Whether the frequencies of the model's rope depend on the length of a sequence."""
    return any(_follows_length(module) for module in model.modules())


class RopesByRow:
    """The ropes of such a model, told before each pass of its rows; they are padded, `[B, L]` tokens, or packed, `[1, T]`.

    Args:
        causal_lm: the forward methods of its ropes are replaced.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        self._rows: PackedSequences | None = None
        for module in causal_lm.modules():
            if _follows_length(module):
                module.forward = partial(self._forward, copy.deepcopy(module).cpu())

    def begin(self, rows: PackedSequences) -> None:
        """A pass of these rows begins."""
        self._rows = rows

    def _forward(
        self, rope: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        assert self._rows is not None
        like = torch.empty((), dtype=x.dtype).expand(x.shape)  # a rope looks at its type and where it is
        across = len(position_ids) == 1
        parts = []
        for row in self._rows.positions_by_row(padded=not across):
            # Frequencies of a longer sequence are kept until a short one comes: the one before must not matter.
            rope(like, torch.zeros_like(row[:, :1]), *args, **kwargs)
            parts.append(rope(like, row, *args, **kwargs))
        found = (torch.cat(each, dim=1 if across else 0) for each in zip(*parts, strict=True))
        return tuple(to_device(each, x.device) for each in found)


def _follows_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # of each kind of layer, in some models
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(name, str) and (name == "longrope" or "dynamic" in name) for name in names)


class ResponseModel(nn.Module):
    """Backbone, then head, of a `transformers` causal language model.

    Packed rows (`packs`) stand one behind the other. Others are padded on the right: attention is causal, so no real token sees
    padding, no mask is needed, and the fastest attention kernel can be used. `agreement.py` finds out what a model allows.

    Args:
        causal_lm: on any device.
        scalar: it has a scalar head (`scalar_head.py`).

    Raises:
        UserError: the model has no backbone that is known.
    """

    def __init__(self, causal_lm: Any, *, scalar: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.scalar = scalar
        self.sees = is_type_that_sees(causal_lm.config)
        """Whether rows may have images."""
        self.backbone_name = _find_backbone(causal_lm)
        # Of padding without a mask, which is no mistake here; it would ask the device for the first and last tokens.
        self.backbone.warn_if_padding_and_no_attention_mask = _warn_of_nothing
        self.packs = False
        """Whether a microbatch costs its tokens, and not its rows times the longest."""
        self.shares_prompts = False
        """Whether rows can share the tokens of a prompt."""
        self.stretches: Stretches | None = None
        """How several ranks share the tokens of a microbatch; None: each has all of its own."""
        self.head_form: HeadForm | None = None
        """How logits follow from the products of hidden states and the head; None: the model computes them in another way."""
        self.routers: Routers | None = None
        """Those of a mixture of experts; None: it is none, or its choices cannot be seen."""
        self.ropes: RopesByRow | None = None
        """Those that follow the length of a row; None: there are none, or they see all rows at once."""
        self.chunk_bytes: int | None = None
        """Bytes of logits at once; None: what suits the device."""

    @property
    def backbone(self) -> Any:
        """The model without its head."""
        return getattr(self.causal_lm, self.backbone_name)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the backbone (of its text model, where it has several); empty if they have an uncommon name."""
        return list(getattr(getattr(self.backbone, LANGUAGE, self.backbone), "layers", ()))

    @property
    def scalar_head(self) -> nn.Module | None:
        """The scalar head; None: the model has its own head."""
        return self.causal_lm.score if self.scalar else None

    def put_ropes_by_row(self) -> None:
        """Change the model in place, once, where its rope follows the length of a row: then it sees one row at a time."""
        if self.ropes is None and follows_length(self.causal_lm):
            self.ropes = RopesByRow(self.causal_lm)

    def forward(
        self,
        input_ids: Tensor,
        rows: PackedSequences,
        predicting: np.ndarray,
        targets: Tensor,
        temperatures: Tensor | None,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the target tokens; or the outputs of a scalar head, which ignores targets and temperatures.

        Args:
            input_ids: [N] int64, row after row.
            rows: how the N tokens belong to rows.
            predicting: [T] int64 indexes into the N: of the token *before* each target, or of the positions that a scalar head reads.
                On the host; they ascend where ranks share tokens.
            targets: [T] int64.
            temperatures: [T] float32, divides the logits; None: 1.
            entropy: return the entropy of each predicting distribution with a gradient. Otherwise it is returned without one,
                and only where gradients are computed, because the logits are there then.

        Returns:
            ([T] float32 nats or outputs of the scalar head; [T] float32 nats, -sum_v p_v log p_v at the temperature, or None).
        """
        if self.stretches is not None:
            return self._in_stretches(
                self.stretches, input_ids, rows, predicting, targets, temperatures, entropy
            )
        outputs, hidden = self.run_backbone(input_ids, rows)
        hidden = hidden.index_select(0, to_device(predicting, hidden.device))
        if self.scalar:
            return self.causal_lm.score(hidden.float())[
                :, 0
            ], None  # half precision is too coarse for values
        return self.logprobs_of(outputs, hidden, targets, temperatures, entropy=entropy)

    def _in_stretches(
        self,
        stretches: Stretches,
        input_ids: Tensor,
        rows: PackedSequences,
        predicting: np.ndarray,
        targets: Tensor,
        temperatures: Tensor | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` of this rank's tokens, and what all ranks say of theirs."""
        input_ids, rows = stretches.share(input_ids, rows)
        outputs, hidden = self.run_backbone(input_ids, rows)
        upto = [0, *np.searchsorted(predicting, np.arange(1, stretches.ranks + 1) * len(hidden)).tolist()]
        mine = slice(upto[stretches.rank], upto[stretches.rank + 1])
        counts = [end - begin for begin, end in itertools.pairwise(upto)]
        own = to_device(predicting[mine] - stretches.rank * len(hidden), hidden.device)
        hidden_states = hidden.index_select(0, own)
        if self.scalar:
            values, entropies = self.causal_lm.score(hidden_states.float())[:, 0], None
        else:
            own_temperatures = None if temperatures is None else temperatures[mine]
            values, entropies = self.logprobs_of(
                outputs, hidden_states, targets[mine], own_temperatures, entropy=entropy
            )
        values = stretches.gather(values, counts)
        if values.requires_grad and not counts[stretches.rank]:
            values = (
                values + 0.0 * hidden[0, 0]
            )  # its layers take part in the exchanges of the backward pass
        return values, None if entropies is None else stretches.gather(entropies, counts)

    def run_backbone(self, input_ids: Tensor, rows: PackedSequences) -> tuple[Any, Tensor]:
        """Run the model without its head.

        Args:
            input_ids: [N] int64, row after row.
            rows: how the N tokens belong to rows.

        Returns:
            (outputs of the backbone, [N, hidden] states of the tokens, row after row)
        """
        if self.routers is not None:
            routing = rows.routing
            if routing is not None and not self.packs:
                routing = routing.spread(rows.slots, math.prod(rows.shape))
            self.routers.begin(routing)
        if self.ropes is not None:
            self.ropes.begin(rows)
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
            # On all ranks the same parameters have gradients, whoever has rows with images: LLaVA leaves out the last layer of the tower.
            tower = [p.sum() for p in tower_parameters(self.backbone) if p.requires_grad]
            hidden = hidden + 0.0 * sum(tower) if tower else hidden
        return outputs, hidden if self.packs else hidden[rows.slots]

    def _with_images(self, inputs: dict[str, Any], rows: PackedSequences) -> dict[str, Any]:
        """Padded rows with what is seen in the places of images, and the model's own positions."""
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
        self, outputs: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of targets, and entropies, from the [T, hidden] states before them (see `forward`)."""
        if self.head_form is None:
            return logprobs_of_any_head(
                lambda states: self.own_logits(outputs, states), hidden, targets, temperatures, entropy
            )
        head = self.causal_lm.get_output_embeddings()
        return head_logprobs(
            hidden.to(head.weight.dtype),
            head.weight,
            getattr(head, "bias", None),
            targets,
            temperatures,
            self.head_form,
            entropy=entropy,
            chunk=self.chunk_bytes,
        )

    def own_logits(self, outputs: Any, hidden: Tensor) -> Tensor:
        """[T, vocabulary] logits of [T, hidden] states, by everything that the model's own forward pass does after its backbone.

        Args:
            outputs: of the backbone; only its hidden states are exchanged.
        """
        given = replace(outputs, last_hidden_state=hidden[None])
        # A copy that shares everything but the backbone; the model itself stays as it is for other threads.
        headed = object.__new__(type(self.causal_lm))
        headed.__dict__ = {
            **self.causal_lm.__dict__,
            "_modules": {**self.causal_lm._modules, self.backbone_name: _Answered(self.backbone, given)},
        }
        nobody = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return headed(input_ids=nobody, use_cache=False).logits[0]


def _warn_of_nothing(*_: object) -> None:
    pass


class _Answered:
    """A backbone that returns outputs that it computed before."""

    def __init__(self, backbone: Any, answer: Any) -> None:
        self._backbone, self._answer = backbone, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backbone, name)  # a multiplier, or (OPT) a part of the backbone
        return _Answered(found, self._answer) if isinstance(found, nn.Module) else found


def _find_backbone(causal_lm: Any) -> str:
    """The name of the module that a causal language model puts its head on.

    Raises:
        UserError: no such module was found, so the input of the head is unknown.
    """
    for name in (
        causal_lm.base_model_prefix,
        "model",
    ):  # Llama 4's text model does not have the one that it names
        if name in causal_lm._modules:
            return name
    parts = ", ".join(causal_lm._modules)
    raise UserError(
        f"model {causal_lm.name_or_path!r} ({type(causal_lm).__name__}) cannot be trained: none of its parts ({parts}) is its backbone"
    )
