"""Agreement: a model's rows share a forward pass only in a way that answers as the model itself does with each row alone.

The other side of the comparison is nothing of ours: `causal_lm(...).logits` of `transformers` with eager attention, one row at a time.
Against it stands what training will call, in the mode that it will be called in. The fastest way that agrees is taken, of these:

    packed           rows one behind the other (`packed_attention.py`)
    padded           rows on top of each other, with the attention that the model was loaded with
    padded, eager    the same with the attention that it is compared with

A model that agrees in none of them is refused: it would learn from wrong log-probabilities, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.errors import UserError
from .packed_attention import NAME as PACKED
from .packed_attention import Rows, may_pack, windows_reached_attention
from .rope import follows_length, put_rope_by_row

if TYPE_CHECKING:
    from .response_model import ResponseModel

_LENGTHS = (5, 3)
"""Tokens of the rows that are compared: few, so that a large model answers soon."""
_FIRST_ID = 3
"""Of their tokens; smaller ones often mean padding."""
_SPREAD = 1.0
"""Standard deviation of logits below which a mistake hardly shows: the model has just been made."""
_LARGEST_FACTOR = 16
"""By which the parameters of such a model are multiplied at most."""
_TOLERANCE = 1e-3
"""Nats, or units of a hidden state. Rounding is about 1e-5; what is wrong is off by 1e-2 and more."""


@dataclass(frozen=True)
class _Probe:
    """Some rows, and what the model itself says of each alone."""

    ids: Tensor
    """[N] int64, row after row."""
    rows: Rows
    predicting: Tensor
    """[T] int64 indexes into the N: all tokens but the last of each row."""
    targets: Tensor
    """[T] int64, the token behind each of them."""
    expected: Tensor
    """[T] nats; of a model with a scalar head [N, hidden]."""
    hidden: Tensor
    """[N, hidden] states that the head reads."""
    outputs: Any
    """What the backbone returned for one of the rows."""
    spread: float
    """Standard deviation of the logits of a token."""


def find_agreeing_way(model: ResponseModel) -> None:
    """Set how a model computes its rows: `packs`, `logit_factor`, and the attention of its `transformers` model.

    It takes forward passes of about ten tokens: one of each row alone, and two of each way that is tried.

    Raises:
        UserError: no way agrees with the model itself.
    """
    causal_lm = model.causal_lm
    loaded_with = causal_lm.config.get_text_config()._attn_implementation
    off = torch.inf
    with torch.no_grad(), _quiet_transformers():
        _set_attention(causal_lm, "eager")
        with _amplified(model) as probe:
            put_rope_by_row(causal_lm)
            if not model.scalar:
                model.logit_factor = _logit_factor(model, probe)
            ways = [(True, PACKED)] if may_pack(causal_lm) else []
            for packs, attention in (*ways, *((False, name) for name in dict.fromkeys((loaded_with, "eager")))):
                model.packs = packs
                _set_attention(causal_lm, attention)
                off = _difference(model, probe)
                if off <= _TOLERANCE:
                    return
    raise UserError(
        f"model {causal_lm.name_or_path!r} ({type(causal_lm).__name__}) cannot be trained: what it says of rows that share a "
        f"forward pass is {off:.2g} off from what transformers says of each row alone, and rounding is at most {_TOLERANCE:g}"
    )


def _difference(model: ResponseModel, probe: _Probe) -> float:
    """Largest difference from what the model itself said, in two passes: noise, as of dropout or a router, is not the same twice."""
    largest = 0.0
    for _ in range(2):
        try:
            outputs, hidden = model.run_backbone(probe.ids, probe.rows)
            found = hidden
            if not model.scalar:
                found, _ = model.logprobs_of(outputs, hidden[probe.predicting], probe.targets, None, entropy=False)
        except Exception:  # code that comes with a model may do anything with what it does not know
            if not model.packs:
                raise
            return torch.inf
        largest = max(largest, float((found - probe.expected).abs().nan_to_num(torch.inf).max()))
        if largest > _TOLERANCE:
            break
    # Rows here are shorter than a window: one that is in the mask alone, which packed attention is not given, would not show.
    return largest if not model.packs or windows_reached_attention(model.causal_lm, probe.rows) else torch.inf


def _ask(model: ResponseModel) -> _Probe:
    """What the model itself says: by its own forward pass, of one row at a time."""
    causal_lm, settings = model.causal_lm, model.causal_lm.config.get_text_config()
    lengths, first = list(_LENGTHS), [0 for _ in _LENGTHS]
    if follows_length(causal_lm):
        lengths.append(_LENGTHS[-1])
        first.append(2 * settings.max_position_embeddings)  # the end of a row that is far longer than the others
    ids = (torch.arange(sum(lengths), device=causal_lm.device) + _FIRST_ID) % settings.vocab_size
    alone = [_ask_alone(model, row, start) for row, start in zip(ids.split(lengths), first, strict=True)]
    hidden = torch.cat([outputs.last_hidden_state[0] for outputs, _ in alone])
    rows = Rows(torch.tensor(lengths, device=ids.device), max(lengths), torch.tensor(first, device=ids.device))
    starts = rows.lengths.cumsum(0) - rows.lengths
    targets = torch.ones_like(ids, dtype=torch.bool).index_fill(0, starts, False).nonzero()[:, 0]
    said, spread = hidden, torch.inf
    if not model.scalar:
        logits = torch.cat([logits for _, logits in alone])
        spread = float(logits.std(-1).mean())
        said = F.log_softmax(logits[targets - 1], -1).gather(1, ids[targets, None])[:, 0]
    return _Probe(ids, rows, targets - 1, ids[targets], said, hidden, alone[0][0], spread)


def _ask_alone(model: ResponseModel, row: Tensor, start: int) -> tuple[Any, Tensor]:
    """(What the backbone returns, [L, vocabulary] float32 logits; with a scalar head there are none)."""
    inputs: dict[str, Any] = {"input_ids": row[None], "use_cache": False}
    if start:
        inputs["position_ids"] = torch.arange(start, start + len(row), device=row.device)[None]
    if model.scalar:
        return model.backbone(**inputs), torch.empty(0)
    seen: list[Any] = []
    hook = model.backbone.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs))
    try:
        logits = model.causal_lm(**inputs).logits[0].float()
    finally:
        hook.remove()
    return seen[-1] if seen else model.backbone(**inputs), logits  # some call but a part of their backbone


def _logit_factor(model: ResponseModel, probe: _Probe) -> float | None:
    """What the model multiplies the products of its head by; None: its logits are not these products alone.

    Hidden states far larger than its own show a soft cap.
    """
    causal_lm = model.causal_lm
    weight = causal_lm.get_output_embeddings().weight
    outside = [p for name, p in causal_lm.named_parameters() if not name.startswith(f"{model.backbone_name}.")]
    if any(parameter is not weight for parameter in outside):  # what it multiplies by may be trained
        return None
    hidden = torch.cat([probe.hidden * size for size in (1, 30, 1000)]).to(weight.dtype)
    own, products = model.own_logits(probe.outputs, hidden).double(), F.linear(hidden, weight).double()
    factor = float((own * products).sum() / products.square().sum())
    rounding = 1e-5 * products.abs().amax(-1, keepdim=True) * abs(factor)
    if not ((own - factor * products).abs() <= rounding).all():
        return None
    return 1.0 if abs(factor - 1) < 1e-6 else factor


@contextmanager
def _amplified(model: ResponseModel) -> Iterator[_Probe]:
    """What the model says, its parameters multiplied by a power of two where it says next to nothing; restored to the bit."""
    factor, probe = 1, _ask(model)
    try:
        while probe.spread < _SPREAD and factor < _LARGEST_FACTOR:
            factor *= 2
            _multiply(model, 2)
            probe = _ask(model)
        yield probe
    finally:
        _multiply(model, 1 / factor)


def _multiply(model: ResponseModel, factor: float) -> None:
    for parameter in model.parameters() if factor != 1 else ():
        if parameter.is_floating_point():
            parameter.mul_(factor)


def _set_attention(causal_lm: Any, name: str) -> None:
    if causal_lm.config.get_text_config()._attn_implementation != name:
        causal_lm.set_attn_implementation(name)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without what `transformers` says of attention that cannot be set: it is then compared as it is."""
    from transformers.utils import logging

    said = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(said)
