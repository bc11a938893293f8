"""The folder of a model on this node: given by its path, or of a Hugging Face id, downloaded once on each node."""

from __future__ import annotations

from pathlib import Path

from ..dataflow.model_location import find_model_folder
from .model_folder import CONFIG_FILE


def node_folder(model: str | Path) -> Path:
    return find_model_folder(model, CONFIG_FILE)
