"""Build causal language models of `transformers` without weights, including models that read
images.

Parameters and saved buffers are on the meta device; computed buffers, such as rope frequencies,
have values. `stored_weights.py` reads the stored values, and `sharded_model.py` gives each rank its
part.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from ...dataflow.errors import UserError
from ..models.images import is_type_that_sees
from ..models.model_folder import CONFIG_FILE, SCALAR_HEAD, check_scalar_head, refusals_named
from ..models.weight_files import check_weights, find_tensor
from .engine import Head, Recomputed

# Scalar head: one number per position in place of logits. Names and settings follow the
# `transformers` classes for sequence classification with one label, so folders that have such a
# head (public reward models) load with it. Saved models load with
# `AutoModelForSequenceClassification` if the architecture has that class. Folders of language
# models get a new head.


_DEVIATION = 0.1
"""Approximate standard deviation of a new head's outputs, if hidden states have norm
sqrt(hidden)."""


def put_scalar_head(causal_lm: Any) -> frozenset[str]:
    """Replace a model's head by a scalar head without values. Return the names of the removed
    tensors."""
    hidden = causal_lm.get_input_embeddings().weight.shape[1]
    before = set(causal_lm.state_dict())
    causal_lm.set_output_embeddings(None)  # else its [vocabulary, hidden] parameters would stay
    dropped = frozenset(before - set(causal_lm.state_dict()))
    causal_lm.add_module(
        SCALAR_HEAD.removesuffix(".weight"), nn.Linear(hidden, 1, bias=False, device="meta")
    )
    return dropped


def new_scalar_head(model: str | Path, hidden: int, seed: int) -> Tensor:
    """Return the [1, hidden] weight of the folder's scalar head. If it has none, return a new one;
    all ranks must pass the same `seed`. Raises UserError if the folder's head has several
    outputs."""
    file = find_tensor(model, SCALAR_HEAD)
    if file is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(1, hidden).normal_(std=_DEVIATION / math.sqrt(hidden), generator=generator)
    with safe_open(file, "pt") as tensors:
        stored = tensors.get_tensor(SCALAR_HEAD)
    if stored.shape != (1, hidden):
        raise UserError(
            f"{model}: {SCALAR_HEAD!r} has shape {list(stored.shape)}; a scalar head has [1, {hidden}]"
        )
    return stored


def scalar_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to `config.json` for a model with a scalar head."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    said: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if settings.get("model_type") in KNOWN:
        said["architectures"] = [KNOWN[settings["model_type"]]]
    return said


with suppress(ImportError):  # early torch releases lack it
    import torch.nn.attention.varlen  # defines its operation

_PRODUCTS = frozenset(
    getattr(library, name).default
    for library, name in itertools.product((torch.ops.aten, torch.ops.torch_attn), (
        "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_varlen_attn",
    ))
    if hasattr(library, name)
)  # fmt: skip
"""The operations that take most of a layer's time."""


@dataclass(frozen=True)
class Skeleton:
    causal_lm: Any
    """The model in evaluation mode, with float32 parameters on the meta device and computed buffers
    on the host."""
    made: Mapping[str, Tensor]
    """Tensors by name that do not come from the model's files: the scalar head."""
    dropped: frozenset[str]
    """Names of tensors that are in the files but not in this model: its original head."""


def build_causal_lm(
    model: str | Path,
    folder: Path,
    head: Head,
    seed: int,
    *,
    activation_checkpointing: Recomputed = False,
) -> Skeleton:
    """Build the model in a folder without weights. `model` is the user's name for it. For the heads
    "values" and "rewards", a scalar head replaces the model's own; `seed` initializes it if the
    folder has none. Raises UserError if `transformers` rejects the model or its activation
    checkpointing, or if the model cannot have a scalar head."""
    settings = training_settings(model, folder)
    if head != "logprobs":
        check_scalar_head(model, {"model_type": settings.model_type})
    with refusals_named(model, "cannot be trained", folder / CONFIG_FILE), torch.device("meta"):
        causal_lm = auto_class(settings).from_config(settings, dtype=torch.float32)
    causal_lm.eval()
    _forget_values(causal_lm)
    _compute_buffers(model, causal_lm)
    made: dict[str, Tensor] = {}
    dropped: frozenset[str] = frozenset()
    if head != "logprobs":
        dropped = put_scalar_head(causal_lm)
        hidden = causal_lm.get_input_embeddings().weight.shape[1]
        made[SCALAR_HEAD] = new_scalar_head(folder, hidden, seed)
    if activation_checkpointing:
        _checkpoint_activations(causal_lm, activation_checkpointing)
    return Skeleton(causal_lm, made, dropped)


def move_buffers(causal_lm: Any, device: torch.device) -> None:
    for module in causal_lm.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def load_complete(model: str | Path, folder: Path) -> Any:
    """Load the model with all weights in float32 on the host, like `from_pretrained`."""
    with quiet_transformers():  # `stored_weights.py` reports unused tensors itself
        settings = training_settings(model, folder)
        check_weights(model, trained=True)
        files = ", ".join(sorted(file.name for file in folder.glob("*.bin*"))) or "no weights"
        with refusals_named(model, f"cannot be loaded from its folder {folder}, which has {files}"):
            return auto_class(settings).from_pretrained(
                folder, config=settings, dtype=torch.float32, local_files_only=True
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def auto_class(settings: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_type_that_sees(settings) else AutoModelForCausalLM


def training_settings(model: str | Path, folder: Path) -> Any:
    """Return a model's settings with dropout disabled. Raises UserError if the model type is
    unknown."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # progress bars of several ranks would overlap
    with refusals_named(model, "cannot be trained", folder / CONFIG_FILE):
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    settings.name_or_path = str(model)
    _switch_off_dropout(settings)
    return settings


def _forget_values(causal_lm: Any) -> None:
    """Move all parameters and saved buffers to the meta device: values that some constructors
    create despite `torch.device("meta")` would count as loaded."""
    empty: dict[int, Tensor] = {}
    for tensor in causal_lm.state_dict(keep_vars=True).values():
        if not tensor.is_meta and id(tensor) not in empty:
            made = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            empty[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    for module in causal_lm.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):  # a tied tensor has several names
            held |= {name: empty[id(tensor)] for name, tensor in held.items() if id(tensor) in empty}


def _compute_buffers(model: str | Path, causal_lm: Any) -> None:
    """Compute buffers that no file contains (rope frequencies, masks), like `from_pretrained`,
    which skips tensors that are marked as loaded."""
    for tensor in (*causal_lm.parameters(), *causal_lm.buffers()):
        tensor._is_hf_initialized = True
    unknown: list[tuple[str, torch.nn.Module, str]] = []
    for name, buffer in list(causal_lm.named_non_persistent_buffers()):
        path, _, last = name.rpartition(".")
        module = causal_lm.get_submodule(path)
        if not buffer.is_meta:
            module._buffers[last] = buffer.clone()
            continue
        module._buffers[last] = made = torch.empty_like(buffer, device="cpu")
        if made.is_floating_point() and made.numel():
            # nan reveals buffers that the initialization does not set.
            made.fill_(torch.nan)
            unknown.append((name, module, last))
    causal_lm.initialize_weights()
    for name, module, last in unknown:
        buffer = module._buffers[last]
        if buffer is not None and bool(buffer.isnan().all()):
            raise UserError(
                f"model {str(model)!r} cannot be trained: no file holds its buffer {name!r}, and transformers does not compute it"
            )


def _switch_off_dropout(settings: Any) -> None:
    """Set every dropout setting to zero, so that the trained policy equals the one that generated
    the rows. Evaluation mode is not enough: recomputed layers run in training mode, and some layers
    always apply dropout."""
    for name, value in vars(settings).items():
        if hasattr(value, "to_dict"):
            _switch_off_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(settings, name, 0.0)


def _checkpoint_activations(causal_lm: Any, which: Recomputed) -> None:
    settings: dict[str, Any] = {"use_reentrant": False}
    if which == "elementwise":
        # A weak reference, because the model keeps the function.
        settings["context_fn"] = partial(_keep_products, weakref.ref(causal_lm))
    try:
        causal_lm.gradient_checkpointing_enable(settings)
    except ValueError as error:
        raise UserError(
            f"activation_checkpointing={which!r}: transformers refuses it ({error})"
        ) from error
    layers = [m for m in causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)]
    if which not in (True, "elementwise"):
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % which == 0
    for module in causal_lm.modules():  # only activation checkpointing reads `training`
        module.training = bool(getattr(module, "gradient_checkpointing", False))


def _keep_products(model: weakref.ref[Any]) -> Any:
    """Return a checkpointing context that keeps the results of matrix products and attention, and
    recomputes the rest. Megatron (arXiv:2205.05198) instead recomputes attention, which is cheap
    there. An adapter's products are cheap, and as large as their layer's, so recompute them."""
    ranks = {adapter.r for adapter in getattr(model(), "peft_config", {}).values()}

    def policy(_: Any, operation: Any, *given: Any, **__: Any) -> CheckpointPolicy:
        keeps = operation in _PRODUCTS
        if keeps and ranks and operation is torch.ops.aten.mm.default:
            left, right = given
            keeps = ranks.isdisjoint((left.shape[1], right.shape[1]))
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
