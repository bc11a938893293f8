"""Vision: how a model of `transformers` that sees reads a prompt with images.

Its own forward pass puts what its vision tower makes of the images into the places of all tokens that are an image's, those of a response
among them, which a policy may sample. Here the places are given, and everything else is the model's own: tower, embeddings, positions
(`get_rope_index`, where it has any of its own), layers. `training/agreement.py` compares the result with the model's own forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dataflow.lazy import torch
from .images import SeenImage
from .model_folder import sees_images

if TYPE_CHECKING:
    from torch import Tensor, nn

LANGUAGE = "language_model"
"""What backbones that see call the model of the text."""


@dataclass(frozen=True)
class Shown:
    """The images of the rows of a pass."""

    places: Tensor
    """[B, L] bool, or [T] of packed rows: where the model puts what it sees in the place of a token."""
    inputs: Mapping[str, Tensor]
    """Arguments of the vision tower by name, those of all images, in the order of their places."""

    @classmethod
    def of(cls, places: Tensor, images: Sequence[SeenImage]) -> Shown:
        """On the device of `places`."""
        names = images[0].inputs
        return cls(
            places, {name: torch.cat([image.inputs[name] for image in images]).to(places.device) for name in names}
        )


def is_type_that_sees(settings: Any) -> bool:
    """Whether settings of `transformers` are those of a model for images and text (`sees_images`)."""
    return sees_images({"model_type": settings.model_type})


def embed(backbone: Any, input_ids: Tensor, shown: Shown) -> Tensor:
    """[B, L, hidden] what the layers of the text get: embeddings of tokens [B, L], and what is seen in the places of images."""
    embedded = backbone.get_input_embeddings()(input_ids)
    features = backbone.get_image_features(**shown.inputs, return_dict=True).pooler_output
    if not isinstance(features, torch.Tensor):
        features = torch.cat([*features])
    return embedded.masked_scatter(shown.places[..., None], features.flatten(0, -2).to(embedded.dtype))


def positions(backbone: Any, input_ids: Tensor, shown: Shown, inside: Tensor | None = None) -> Tensor | None:
    """Positions of the tokens [B, L] by the model's own rule, such as [3, B, L] for time, height and width (m-rope, arXiv:2409.12191).

    Args:
        inside: [B, L] bool, what is no padding; None: there is none, or it is on the right.

    Returns:
        None: the model counts the positions of images as those of all tokens.
    """
    rule = getattr(backbone, "get_rope_index", None)
    if rule is None:
        return None
    takes = inspect.signature(rule).parameters
    grids = {name: value for name, value in shown.inputs.items() if name in takes}
    mask = None if inside is None else inside.to(torch.int64)
    return rule(input_ids, mm_token_type_ids=shown.places.to(torch.int32), attention_mask=mask, **grids)[0]


def tower_parameters(backbone: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that rows without images do not reach, and rows with images not always all of."""
    for name, parameter in backbone.named_parameters():
        if not name.startswith(f"{LANGUAGE}."):
            yield parameter
