"""Causal language models of `transformers`, and those that see images as well, without weights: the modules and their computed buffers,
and nothing random.

Parameters and saved buffers are on the meta device: `stored_weights.py` knows their values, and `sharded_model.py` gives each rank its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from ...dataflow.errors import UserError
from ..models.images import is_type_that_sees
from ..models.model_folder import CONFIG_FILE, SCALAR_HEAD, check_scalar_head, refusals_named
from ..models.model_folder import SCALAR_HEAD as WEIGHT
from ..models.weight_files import check_weights, find_tensor
from .engine import Head, Recomputed

# Scalar head
#
# Scalar head: one number for each position of a causal language model, in the place of its logits.
#
# Names and settings are those of the `transformers` classes for sequence classification with one
# label: such a model's folder is loaded with its head (public reward models are of that kind), and
# what is saved here is loaded by `AutoModelForSequenceClassification` where the architecture has
# that class. The folder of a causal language model has no such head: a new one is made.


_DEVIATION = 0.1
"""Approximate standard deviation of a new head's outputs: a normalised hidden state has a norm of sqrt(hidden)."""


def put_scalar_head(causal_lm: Any) -> frozenset[str]:
    """Replace the head of a language model by a scalar one, without a weight.

    Args:
        causal_lm: a `transformers` causal language model on the meta device; changed in place.

    Returns:
        Names of the tensors that the model has no longer.
    """
    hidden = causal_lm.get_input_embeddings().weight.shape[1]
    before = set(causal_lm.state_dict())
    causal_lm.set_output_embeddings(None)  # [vocabulary, hidden] parameters that nothing would train
    dropped = frozenset(before - set(causal_lm.state_dict()))
    causal_lm.add_module(WEIGHT.removesuffix(".weight"), nn.Linear(hidden, 1, bias=False, device="meta"))
    return dropped


def new_scalar_head(model: str | Path, hidden: int, seed: int) -> Tensor:
    """[1, hidden] weight of a scalar head: that of the folder, or, where it has none, a new one.

    Args:
        model: the folder of the language model.
        seed: of a new head; on all ranks the same.

    Raises:
        UserError: the folder's head gives several numbers.
    """
    file = find_tensor(model, WEIGHT)
    if file is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(1, hidden).normal_(std=_DEVIATION / math.sqrt(hidden), generator=generator)
    with safe_open(file, "pt") as tensors:
        stored = tensors.get_tensor(WEIGHT)
    if stored.shape != (1, hidden):
        raise UserError(
            f"{model}: {WEIGHT!r} has shape {list(stored.shape)}; a scalar head has [1, {hidden}]"
        )
    return stored


def scalar_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that replace those of the language model in the `config.json` of a folder with a scalar head."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    said: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if settings.get("model_type") in KNOWN:
        said["architectures"] = [KNOWN[settings["model_type"]]]
    return said


_PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
]  # fmt: skip
"""What takes the time of a layer."""


@dataclass(frozen=True)
class Skeleton:
    """A model without weights."""

    causal_lm: Any
    """In evaluation mode; parameters in float32 on the meta device, buffers that no file holds on the host."""
    made: Mapping[str, Tensor]
    """Tensors that are not read by the name that they have in the model: the scalar head."""
    dropped: frozenset[str]
    """Names of tensors that the files of a language model hold, and this model does not: those of its own head."""


def build_causal_lm(
    model: str | Path,
    folder: Path,
    head: Head,
    seed: int,
    *,
    activation_checkpointing: Recomputed = False,
) -> Skeleton:
    """The model of a folder, without weights.

    Args:
        model: what the user calls it.
        head: with "values" or "rewards" a scalar head takes the place of the model's own.
        seed: of a scalar head that the folder does not have.
        activation_checkpointing: which activations are computed a second time in the backward pass.

    Raises:
        UserError: `transformers` refuses the model, or to checkpoint its activations, or the model gets no scalar head.
    """
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
    """Move the buffers that have values to the device where those without values will be."""
    for module in causal_lm.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def load_complete(model: str | Path, folder: Path) -> Any:
    """The model with all of its weights in float32 on the host, as `from_pretrained` loads it.

    Raises:
        UserError: `transformers` refuses the model.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports what it does not use, which `stored_weights.py` judges
    settings = training_settings(model, folder)
    try:
        check_weights(model, trained=True)
        files = ", ".join(sorted(file.name for file in folder.glob("*.bin*"))) or "no weights"
        with refusals_named(model, f"cannot be loaded from its folder {folder}, which has {files}"):
            return auto_class(settings).from_pretrained(
                folder,
                config=settings,
                dtype=torch.float32,
                local_files_only=True,
            )
    finally:
        logging.set_verbosity(verbosity)


def auto_class(settings: Any) -> Any:
    """The class of `transformers` that makes a model of these settings."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_type_that_sees(settings) else AutoModelForCausalLM


def training_settings(model: str | Path, folder: Path) -> Any:
    """The settings of a model, without dropout.

    Raises:
        UserError: `transformers` does not know the model.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # one per rank would garble the terminal
    with refusals_named(model, "cannot be trained", folder / CONFIG_FILE):
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    settings.name_or_path = str(model)
    _switch_off_dropout(settings)
    return settings


def _forget_values(causal_lm: Any) -> None:
    """Put every tensor that files hold on the meta device.

    Some constructors draw values on the host in spite of `torch.device("meta")` (DiffLlama's `torch.normal`). A tensor with values
    would count as loaded, and keep the values that were drawn.
    """
    stored = {
        id(tensor): tensor
        for tensor in causal_lm.state_dict(keep_vars=True).values()
        if not tensor.is_meta
    }
    empty: dict[int, Tensor] = {}
    for number, tensor in stored.items():
        made = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        empty[number] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    for module in causal_lm.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):  # tied tensors have several names
            held |= {name: empty[id(tensor)] for name, tensor in held.items() if id(tensor) in empty}


def _compute_buffers(model: str | Path, causal_lm: Any) -> None:
    """Give buffers that no file holds (frequencies of rope, masks) the values that `from_pretrained` gives them.

    On the meta device a constructor computes nothing. The initialization of `transformers` computes these buffers and skips tensors that
    are marked as loaded.

    Raises:
        UserError: the initialization leaves one out.
    """
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
    """Set every dropout setting to zero.

    A policy with dropout is not the policy that sampled. Evaluation mode switches it off, but layers whose activations are computed a
    second time must be in training mode, and some apply dropout by themselves.
    """
    for name, value in vars(settings).items():
        if hasattr(value, "to_dict"):
            _switch_off_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(settings, name, 0.0)


def _checkpoint_activations(causal_lm: Any, which: Recomputed) -> None:
    settings: dict[str, Any] = {"use_reentrant": False}
    if which == "elementwise":
        settings["context_fn"] = _keep_products
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
    for module in causal_lm.modules():
        module.training = bool(
            getattr(module, "gradient_checkpointing", False)
        )  # only checkpointing looks at `training`


def _keep_products() -> Any:
    """Keeps what matrix products and attention give, and computes all else a second time (Megatron's selective recomputation keeps and
    drops the other way round, arXiv:2205.05198: its attention was the cheap part)."""
    return create_selective_checkpoint_contexts(_PRODUCTS)
