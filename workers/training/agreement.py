"""Agreement: find the fastest way to batch rows in a forward pass that still matches
`transformers`.

The reference contains no Weft code: `causal_lm(...).logits` with eager attention, one row at a
time. The check runs each candidate with the same calls as training, in training mode. Weft uses the
first of these that agrees:

    packed, varlen   rows end to end, with torch's variable-length attention kernel
    packed           rows end to end, padded for attention (`packed_attention.py`)
    padded           a rectangle of rows, with the attention that the model was loaded with
    padded, eager    a rectangle of rows, with the attention of the reference

If none agrees, Weft rejects the model: it would silently learn from wrong log-probabilities. No
rank gathers a complete model: the check runs the model as `transformers` built it, without weights,
and lends it the trained model's weights one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...dataflow.errors import UserError
from ..models.images import ImageInputs, ImageReader, probe_images
from .causal_lm import quiet_transformers
from .head_logprobs import HeadForm
from .packed_attention import NAME as PACKED
from .packed_attention import VARLEN, find_kernel, may_pack, windows_reached_attention
from .packed_sequences import PackedSequences, SharedPrompts
from .response_model import ResponseModel, follows_length
from .routers import Router, Routers, Routing, find_routers

# Lent weights: run forward passes of a model without weights, with the weights of a sharded model.
# Ranks gather a layer's weights only while it runs, and those outside the layers (embeddings, last
# norm, head) for the whole check. A single rank lends all weights for the whole check.


class _LentWeights:
    """A context that lends weights to a model for forward passes without a gradient, and then
    restores the model's own tensors. For the arguments see `find_agreement`."""

    def __init__(
        self,
        model: ResponseModel,
        full: Callable[[str], Tensor] | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        self._model, self._by_layer = model, by_layer
        self._hooks: list[Any] = []
        tensors: dict[str, Tensor] = model.causal_lm.state_dict(keep_vars=True)
        self._names: dict[Tensor, str] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(tensor, name)
        self._full = full or (lambda name: tensors[name])
        self._own = {
            module: (dict(module._parameters), dict(module._buffers))
            for module in model.causal_lm.modules()
        }
        layers = model.layers if by_layer else ()
        self._inside = {module for layer in layers for module in layer.modules()}
        self.factor = 1

    def __enter__(self) -> Self:
        self._lend_outside()
        for layer in self._model.layers if self._by_layer else ():
            self._hooks.append(layer.register_forward_pre_hook(self._lend_layer))
            self._hooks.append(layer.register_forward_hook(self._restore, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._restore(self._model.causal_lm)

    def multiply(self, factor: int) -> None:
        self.factor *= factor
        self._lend_outside()

    def _lend_outside(self) -> None:
        self._lend([module for module in self._own if module not in self._inside])

    def _lend_layer(self, layer: nn.Module, *_: Any) -> None:
        self._lend(list(layer.modules()))

    def _restore(self, layer: nn.Module, *_: Any) -> None:
        for module in layer.modules():
            if module not in self._own:  # BigBird replaces modules during a pass
                continue
            parameters, buffers = self._own[module]
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    def _lend(self, modules: list[nn.Module]) -> None:
        lent: dict[Tensor, Tensor] = {}
        for module in modules:
            if module not in self._own:
                continue
            for held, own in zip((module._parameters, module._buffers), self._own[module], strict=True):
                for key, tensor in own.items():
                    if tensor is not None and tensor in self._names:
                        if tensor not in lent:
                            lent[tensor] = self._multiplied(tensor)
                        held[key] = lent[tensor]  # pyright: ignore[reportArgumentType]

    def _multiplied(self, tensor: Tensor) -> Tensor:
        full = self._full(self._names[tensor]).to(tensor.dtype)
        grows = self.factor != 1 and isinstance(tensor, nn.Parameter) and full.is_floating_point()
        return full * self.factor if grows else full


_LENGTHS = (5, 3)
"""Tokens per compared row; few, so that the check is quick for large models."""
_FIRST_ID = 3
"""First token id of the rows; smaller ids are often padding or special tokens."""
_SPREAD = 1.0
"""The check amplifies the parameters of a model whose logits have a smaller standard deviation, as
in an untrained model, because small logits would hide mistakes."""
_LARGEST_FACTOR = 16
"""Upper limit on this amplification."""
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_OF_ROUNDING = 3.0
"""Limit on a kernel's error, as a multiple of the error from rounding its inputs."""
_TOLERANCE = 1e-3
"""[nats], or units of a hidden state: largest difference that counts as agreement. Rounding causes
about 1e-5, mistakes 1e-2 or more."""


@dataclass(frozen=True)
class _Probe:
    """Test rows, and the model's own results for each row alone."""

    ids: Tensor
    rows: PackedSequences
    predicting: Tensor
    """[T] int64: indexes of the tokens that predict another: all but the last of each row."""
    targets: Tensor
    """[T] int64: the token that follows each."""
    expected: Tensor
    """[T] log-probabilities in nats, or [N, hidden] for a model with a scalar head."""
    hidden: Tensor
    """[N, hidden]: the states that the head reads."""
    outputs: Any
    spread: float


@dataclass(frozen=True)
class Agreement:
    """The fastest way to batch rows in a model's forward pass, and what it supports."""

    packs: bool
    shares_prompts: bool
    """Whether rows with equal prompts compute the prompt's tokens only once."""
    attention: str
    """Name of the attention implementation in the registry of `transformers`."""
    head_form: HeadForm | None
    routers: tuple[Router, ...]
    """Routers that can replay routes; empty without a mixture of experts."""

    def put_on(self, model: ResponseModel) -> None:
        """Configure a model to run this way, with length-dependent ropes that compute one row at a
        time."""
        model.put_ropes_by_row()
        with quiet_transformers():
            _set_attention(model.causal_lm, self.attention)
        model.packs, model.shares_prompts = self.packs, self.shares_prompts
        model.head_form = self.head_form
        model.routers = Routers(model.causal_lm, self.routers) if self.routers else None


def find_agreement(
    model: ResponseModel,
    full: Callable[[str], Tensor] | None = None,
    *,
    by_layer: bool = False,
    images: ImageReader | None = None,
) -> Agreement:
    """Find the fastest way that agrees with `transformers`. The check runs forward passes of about
    ten tokens: one for each row alone, and two for each candidate.

    Args:
        model: changed in place: its attention, and a rope that depends on sequence length.
        full: returns the full tensor for a name in `model.causal_lm`; needed if that model has no
            values. All ranks must call it for the same names in the same order.
        by_layer: whether to hold a layer's full tensors only while the layer runs.
        images: processor of a model that reads images, to check rows with images too.

    Raises:
        UserError: the model is not causal, its forward pass in `transformers` fails, or no way to
        batch rows agrees with that pass.
    """
    causal_lm = model.causal_lm
    loaded_with = causal_lm.config.get_text_config()._attn_implementation
    off = torch.inf
    with torch.no_grad(), quiet_transformers():
        _set_attention(causal_lm, "eager")
        with _LentWeights(model, full, by_layer=by_layer) as lent:
            _check_causal(model)
            probe = _amplified_probe(model, lent)
            model.put_ropes_by_row()
            model.head_form = None if model.scalar else _head_form(model, probe)
            # Only padded rows support images (`ResponseModel.run_backbone`).
            ways = [(True, PACKED)] if may_pack(causal_lm) and not model.sees else []
            ways += [(False, name) for name in dict.fromkeys((loaded_with, "eager"))]
            for packs, attention in ways:
                model.packs = packs
                _set_attention(causal_lm, attention)
                off = _difference(model, probe)
                if off <= _TOLERANCE and images is not None:
                    off = _image_difference(model, images, attention)
                if off <= _TOLERANCE:
                    if packs and _kernel_agrees(model, probe):
                        attention = VARLEN
                    _set_attention(causal_lm, attention)
                    shares = packs and not follows_length(causal_lm)
                    shares = shares and _shared_difference(model, probe) <= _TOLERANCE
                    return Agreement(packs, shares, attention, model.head_form, _routers(model, probe))
    raise UserError(
        f"model {causal_lm.name_or_path!r} ({type(causal_lm).__name__}) cannot be trained: "
        f"for rows that share a forward pass its results are {off:.2g} off from those of "
        f"transformers for each row alone, and rounding is at most {_TOLERANCE:g}"
    )


def _check_causal(model: ResponseModel) -> None:
    causal_lm, settings = model.causal_lm, model.causal_lm.config.get_text_config()
    who = f"model {causal_lm.name_or_path!r} ({type(causal_lm).__name__}) cannot be trained"
    row = torch.arange(_LENGTHS[0], device=causal_lm.get_input_embeddings().weight.device) + _FIRST_ID
    other = row.clone()
    other[-1] = _FIRST_ID + len(row)
    try:
        first, second = (
            _run_alone(model, ids % settings.vocab_size, 0)[0].last_hidden_state[0]
            for ids in (row, other)
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if getattr(settings, "attention_type", None) == "block_sparse":
            reason = "its attention is block-sparse, and its layers replace each other during a pass"
        raise UserError(
            f"{who}: its own forward pass fails on a row of {len(row)} tokens ({reason})"
        ) from error
    if float((first - second)[:-1].abs().max()) <= _TOLERANCE * float(first.std()):
        return
    off = [name for name in ("causal", "is_decoder") if getattr(settings, name, True) is False]
    hint = f" (by its settings, {off[0]} is False)" if off else ""
    raise UserError(
        f"{who}: it is not causal, its predictions depend on the tokens that follow{hint}; take a causal language model"
    )


def _shared_difference(model: ResponseModel, probe: _Probe, *, rounded: bool = False) -> float:
    """Return the largest difference in hidden states for two rows that share a prefix."""
    length = _LENGTHS[0]
    row, hidden = probe.ids[:length], probe.hidden[:length]
    rest = np.array([length - 2] * 2)
    nothing = np.zeros(0, np.int64)
    rows = SharedPrompts.among(np.array([2]), nothing, rest, np.zeros(2, np.int64), probe.ids.device)
    try:
        _, found = model.run_backbone(torch.cat([row, row[2:]]), replace(rows, rounded=rounded))
    except Exception:  # a model's remote code can raise anything
        return torch.inf
    return float((found - torch.cat([hidden, hidden[2:]])).abs().nan_to_num(torch.inf).max())


def _image_difference(model: ResponseModel, reader: ImageReader, attention: str) -> float:
    """Return the largest difference in nats between two rows with images and the model's own
    results."""
    causal_lm, device = model.causal_lm, model.causal_lm.get_input_embeddings().weight.device
    seen = [
        reader.read(
            np.array([_FIRST_ID, reader.token, *range(_FIRST_ID, _FIRST_ID + after)], np.int32), [image]
        )
        for image, after in zip(probe_images(), _LENGTHS, strict=True)
    ]
    ids = [torch.from_numpy(row.ids.astype(np.int64)).to(device) for row in seen]
    places = [torch.from_numpy(row.is_image).to(device) for row in seen]
    after = [
        int(of_image.nonzero()[-1]) for of_image in places
    ]  # compare only positions after the image
    expected: list[Tensor] = []
    _set_attention(causal_lm, "eager")
    for row, of_image, prompt, last in zip(ids, places, seen, after, strict=True):
        inputs = ImageInputs.of(of_image, prompt.images).inputs
        logits = causal_lm(
            input_ids=row[None], mm_token_type_ids=of_image[None].int(), **inputs, use_cache=False
        ).logits[0]
        expected.append(
            F.log_softmax(logits[last:-1].float(), -1).gather(1, row[last + 1 :, None])[:, 0]
        )
    _set_attention(causal_lm, attention)
    shown = ImageInputs.of(torch.cat(places), [image for prompt in seen for image in prompt.images])
    rows = replace(PackedSequences(np.array([len(row) for row in ids]), device), shown=shown)
    outputs, hidden = model.run_backbone(torch.cat(ids), rows)
    begins = np.cumsum([0, *rows.lengths])
    spans = [(b + last, b + len(row) - 1) for b, last, row in zip(begins, after, ids, strict=False)]
    read = torch.cat([torch.arange(start, stop) for start, stop in spans])
    targets = torch.cat([row[last + 1 :] for row, last in zip(ids, after, strict=True)])
    found, _ = model.logprobs_of(outputs, hidden[read.to(device)], targets, None, entropy=False)
    return float((found - torch.cat(expected)).abs().nan_to_num(torch.inf).max())


def _routers(model: ResponseModel, probe: _Probe) -> tuple[Router, ...]:
    """Return the routers of a mixture of experts that follows replayed experts: replaying the first
    row's own experts must not change its results, and replaying other experts (the next numbers)
    for other tokens must change theirs."""
    causal_lm, rows = model.causal_lm, probe.rows
    found, routes = find_routers(causal_lm, lambda: model.run_backbone(probe.ids, rows))
    if not found:
        return ()
    routers = Routers(causal_lm, found)
    first = int(rows.lengths[0])
    routes = routes if model.packs else routes[rows.slots]
    routes[first:] = (routes[first:] + 1) % routers.experts
    model.routers = routers
    try:
        routing = Routing(torch.ones(len(probe.ids), device=probe.ids.device), routes)
        _, hidden = model.run_backbone(probe.ids, replace(rows, routing=routing))
    finally:
        model.routers = None
        routers.remove()
    off = (hidden - probe.hidden).abs().nan_to_num(torch.inf).amax(-1)
    return found if off[:first].max() <= _TOLERANCE < off[first:].min() else ()


def _kernel_agrees(model: ResponseModel, probe: _Probe) -> bool:
    """Return whether, in bfloat16, torch's variable-length kernel is as close to the reference as
    padded attention, on separate rows and on rows that share a prompt."""
    if find_kernel(probe.ids.device) is None:
        return False
    rounded = replace(probe, rows=replace(probe.rows, rounded=True))
    off: list[tuple[float, float]] = []
    for attention in (PACKED, VARLEN):
        _set_attention(model.causal_lm, attention)
        off.append((_difference(model, rounded), _shared_difference(model, probe, rounded=True)))
    padded, found = off
    return all(
        own <= _OF_ROUNDING * other + _TOLERANCE for own, other in zip(found, padded, strict=True)
    )


def _difference(model: ResponseModel, probe: _Probe) -> float:
    """Return the largest difference over two passes, because kernels are not deterministic."""
    largest = 0.0
    for _ in range(2):
        try:
            outputs, hidden = model.run_backbone(probe.ids, probe.rows)
            found = hidden
            if not model.scalar:
                found, _ = model.logprobs_of(
                    outputs, hidden[probe.predicting], probe.targets, None, entropy=False
                )
        except Exception:  # a model's remote code can raise anything
            if not model.packs:
                raise
            return torch.inf
        largest = max(largest, float((found - probe.expected).abs().nan_to_num(torch.inf).max()))
        if largest > _TOLERANCE:
            break
    # The test rows are too short to show whether a window works. Packed attention gets no mask, so
    # a model that applies its window only through the mask would lose it.
    seen = not model.packs or windows_reached_attention(model.causal_lm, probe.rows)
    return largest if seen else torch.inf


def _probe(model: ResponseModel) -> _Probe:
    causal_lm, settings = model.causal_lm, model.causal_lm.config.get_text_config()
    lengths, first = list(_LENGTHS), [0 for _ in _LENGTHS]
    if follows_length(causal_lm):
        lengths.append(_LENGTHS[-1])
        first.append(2 * settings.max_position_embeddings)  # as at the end of a much longer row
    device = causal_lm.get_input_embeddings().weight.device
    ids = (torch.arange(sum(lengths), device=device) + _FIRST_ID) % settings.vocab_size
    alone = [_run_alone(model, row, start) for row, start in zip(ids.split(lengths), first, strict=True)]
    hidden = torch.cat([outputs.last_hidden_state[0] for outputs, _ in alone])
    rows = PackedSequences(np.array(lengths), ids.device, np.array(first))
    starts = torch.from_numpy(np.cumsum(lengths) - lengths).to(device)
    targets = torch.ones_like(ids, dtype=torch.bool).index_fill(0, starts, False).nonzero()[:, 0]
    expected, spread = hidden, torch.inf
    if not model.scalar:
        logits = torch.cat([logits for _, logits in alone])
        spread = float(logits.std(-1).mean())
        expected = F.log_softmax(logits[targets - 1], -1).gather(1, ids[targets, None])[:, 0]
    return _Probe(ids, rows, targets - 1, ids[targets], expected, hidden, alone[0][0], spread)


def _run_alone(model: ResponseModel, row: Tensor, start: int) -> tuple[Any, Tensor]:
    """Return the backbone's outputs, and [L, vocabulary] float32 logits (empty if scalar)."""
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
    # Some models call only parts of their backbone.
    return seen[-1] if seen else model.backbone(**inputs), logits


def _head_form(model: ResponseModel, probe: _Probe) -> HeadForm | None:
    """Return how the model computes logits from the head's products, or None if it does more than
    scale and soft-cap them. Large hidden states expose undeclared soft caps."""
    causal_lm = model.causal_lm
    head = causal_lm.get_output_embeddings()
    own_parameters = (
        set(head.parameters(recurse=False)) if isinstance(head, nn.Linear) else {head.weight}
    )
    outside = [
        p for name, p in causal_lm.named_parameters() if not name.startswith(f"{model.backbone_name}.")
    ]
    if any(parameter not in own_parameters for parameter in outside):  # the factor may be trained
        return None
    settings = causal_lm.config.get_text_config()
    cap = next((value for name in _SOFT_CAPS if (value := getattr(settings, name, None))), None)
    hidden = torch.cat([probe.hidden * size for size in (1, 30, 1000)]).to(head.weight.dtype)
    own = model.own_logits(probe.outputs, hidden).double()
    products = F.linear(hidden, head.weight, getattr(head, "bias", None)).double()
    factor = 1.0 if cap else float((own * products).sum() / products.square().sum())
    # A factor of exactly 1 saves a pass over the logits.
    form = HeadForm(1.0 if abs(factor - 1) < 1e-6 else factor, cap)
    found = form.logits(products.clone())
    rounding = 1e-5 * found.abs().amax(-1, keepdim=True)
    return form if ((own - found).abs() <= rounding).all() else None


def _amplified_probe(model: ResponseModel, lent: _LentWeights) -> _Probe:
    """Return the probe, after amplifying the parameters of a model whose logits hardly differ."""
    probe = _probe(model)
    while probe.spread < _SPREAD and lent.factor < _LARGEST_FACTOR:
        lent.multiply(2)
        probe = _probe(model)
    return probe


def _set_attention(causal_lm: Any, name: str) -> None:
    if causal_lm.config.get_text_config()._attn_implementation != name:
        causal_lm.set_attn_implementation(name)
