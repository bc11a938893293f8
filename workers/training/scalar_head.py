"""Scalar head: one number for each position of a causal language model, in the place of its logits.

Names and settings are those of the `transformers` classes for sequence classification with one label: such a model's folder is
loaded with its head (public reward models are of that kind), and what is saved here is loaded by `AutoModelForSequenceClassification`
where the architecture has that class. The folder of a causal language model has no such head: a new one is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...dataflow.errors import UserError
from ..model_folder import SCALAR_HEAD as WEIGHT
from ..weight_files import find_tensor

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
        raise UserError(f"{model}: {WEIGHT!r} has shape {list(stored.shape)}; a scalar head has [1, {hidden}]")
    return stored


def scalar_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that replace those of the language model in the `config.json` of a folder with a scalar head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    said: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if settings.get("model_type") in KNOWN:
        said["architectures"] = [KNOWN[settings["model_type"]]]
    return said
