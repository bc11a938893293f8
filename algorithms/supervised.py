"""Supervised fine-tuning: one node."""

from __future__ import annotations

from typing import Any

from ..dataflow.tracing import graph
from .loss import Loss
from .policy_loss import NegativeLogLikelihood
from .protocols import Trainable


@graph
def supervised(rows: Any, *, actor: Trainable, loss: Loss = NegativeLogLikelihood()) -> Any:
    """Make the given responses (`prompt_ids`, `response_ids`) more likely."""
    return actor.update(rows, loss=loss)
