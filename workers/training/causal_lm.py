"""Causal language models of `transformers`, loaded for training: in float32, and without anything random."""

from __future__ import annotations

from typing import Any

import torch

from ...dataflow.errors import UserError
from ..model_folder import refusals_named
from .engine import Head
from .scalar_head import put_scalar_head


def load_causal_lm(model: str, head: Head, seed: int, *, activation_checkpointing: bool = False) -> Any:
    """The model in float32 on the host, in evaluation mode.

    Args:
        head: with "values" or "rewards" a scalar head takes the place of the model's own.
        seed: of a scalar head that the folder does not have.
        activation_checkpointing: compute the activations of each layer a second time in the backward pass.

    Raises:
        UserError: `transformers` refuses the model, or to checkpoint its activations.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one per rank would garble the terminal
    verbosity = logging.get_verbosity()
    if (
        head != "logprobs"
    ):  # transformers would warn that it has no weight for one head, and does not use that of the other
        logging.set_verbosity_error()
    try:
        with refusals_named(model, "cannot be trained"):
            settings = AutoConfig.from_pretrained(model, local_files_only=True)
            _switch_off_dropout(settings)
            causal_lm = AutoModelForCausalLM.from_pretrained(
                model, config=settings, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
    finally:
        logging.set_verbosity(verbosity)
    if head != "logprobs":
        put_scalar_head(causal_lm, model, seed)
    if activation_checkpointing:
        _checkpoint_activations(causal_lm)
    return causal_lm


def _switch_off_dropout(settings: Any) -> None:
    """Set dropout to zero wherever it stands among the settings.

    A policy with dropout is not the policy that sampled. Evaluation mode switches it off, but layers whose activations are computed a
    second time must be in training mode, and some apply dropout by themselves.
    """
    for name, value in vars(settings).items():
        if hasattr(value, "to_dict"):
            _switch_off_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(settings, name, 0.0)


def _checkpoint_activations(causal_lm: Any) -> None:
    try:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"activation_checkpointing=True: transformers refuses it ({error})") from error
    for module in causal_lm.modules():
        module.training = bool(
            getattr(module, "gradient_checkpointing", False)
        )  # only checkpointing looks at `training`
