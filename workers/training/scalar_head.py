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
from torch import nn

from ...dataflow.errors import UserError
from ..model_folder import find_tensor
from .engine import SCALAR_HEAD as WEIGHT

_DEVIATION = 0.1
"""Approximate standard deviation of a new head's outputs: a normalised hidden state has a norm of sqrt(hidden)."""


def put_scalar_head(causal_lm: Any, model: str | Path, seed: int) -> None:
    """Replace the head of a language model by a scalar one: that of the folder, or, where it has none, a new one.

    Args:
        causal_lm: a `transformers` causal language model on the host; changed in place.
        model: the folder that it was loaded from.
        seed: of a new head; on all ranks the same.

    Raises:
        UserError: the folder's head gives several numbers.
    """
    hidden = causal_lm.get_input_embeddings().weight.shape[1]
    file, stored = find_tensor(model, WEIGHT), None
    if file is not None:
        with safe_open(file, "pt") as tensors:
            stored = tensors.get_tensor(WEIGHT)
        if stored.shape != (1, hidden):
            raise UserError(f"{model}: {WEIGHT!r} has shape {list(stored.shape)}; a scalar head has [1, {hidden}]")
    head = nn.Linear(hidden, 1, bias=False)
    with torch.no_grad():
        if stored is None:
            head.weight.normal_(std=_DEVIATION / math.sqrt(hidden), generator=torch.Generator().manual_seed(seed))
        else:
            head.weight.copy_(stored)
    causal_lm.set_output_embeddings(None)  # [vocabulary, hidden] parameters that nothing would train
    causal_lm.add_module(WEIGHT.removesuffix(".weight"), head)


def scalar_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that replace those of the language model in the `config.json` of a folder with a scalar head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    said: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if settings.get("model_type") in KNOWN:
        said["architectures"] = [KNOWN[settings["model_type"]]]
    return said
