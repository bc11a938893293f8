"""Images: process a row's images with the model's own processor.

A row stores its images encoded, and one placeholder for each in `prompt_ids`. The processor in the
model's folder expands a placeholder to the image's tokens. All workers use this module, so models
with the same folder read the same tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dataflow.column import IMAGES, PROMPT_IDS
from ...dataflow.errors import UserError
from ...dataflow.lazy import torch
from ...dataflow.prompts.answers import PROGRAM
from ...dataflow.source import file_columns
from .model_folder import causal_lm_types, read_model_config, refusals_named, sees_images

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataflow.source import Source

_CACHED_BYTES = 256 << 20
"""[bytes] Size of the cache for processed images. A prompt's samples share its images."""


def check_images(model: str | Path, source: Source) -> None:
    """Check the images of a source. Raises a UserError if the model cannot read images, or if a
    prompt has more or fewer placeholders than images."""
    # A file's column never stands for Weft's column with the same name.
    made = {*source.columns} - file_columns(source)
    if not {str(IMAGES), str(PROMPT_IDS)} <= made:
        return
    lengths = [
        c.value_lengths().fill_null(0).to_numpy() for c in source.table.column(str(IMAGES)).chunks
    ]
    counts = np.concatenate([np.empty(0, np.int64), *lengths])
    if not counts.any():
        return
    settings = read_model_config(model)
    if not sees_images(settings):
        kind = settings.get("model_type")
        is_known = kind in causal_lm_types()
        known = ", which is trained on text alone, even if it could read images" if is_known else ""
        raise UserError(
            f"{source.name}: column {str(IMAGES)!r} holds images, but the model in {model} "
            f"reads text alone (type {kind!r}{known}); leave the column out, or rename it "
            "if only a reward function needs it"
        )
    token = image_token(settings)
    if token is None:
        return
    chunks = source.table.column(str(PROMPT_IDS)).chunks
    places = np.concatenate([_counts_of(chunk, token) for chunk in chunks])
    wrong = np.flatnonzero(places != counts)
    if len(wrong):
        row = int(wrong[0])
        raise UserError(f"{source.name}: row {row} {_misplaced(counts[row], places[row], token, model)}")


def image_token(settings: Mapping[str, Any]) -> int | None:
    """Return the token id of image placeholders in a model's settings, or None.

    >>> image_token({"image_token_id": 5}), image_token({"image_token_index": 7}), image_token({})
    (5, 7, None)
    """
    token = settings.get("image_token_id")
    return settings.get("image_token_index") if token is None else token


def _misplaced(images: int, places: int, token: int, model: str | Path) -> str:
    return (
        f"has {images} images, and its prompt has {places} placeholders (token id {token} "
        f"of the model in {model}); each image needs one, which the chat template writes"
    )


def _counts_of(chunk: Any, token: int) -> np.ndarray:
    found = np.concatenate([[0], np.cumsum(chunk.flatten().to_numpy() == token)])
    ends = np.concatenate([[0], np.cumsum(chunk.value_lengths().fill_null(0).to_numpy())])
    return np.diff(found[ends])


@dataclass(frozen=True)
class _SeenImage:
    """An image in the form that a model reads."""

    tokens: np.ndarray
    """[tokens] int32, in place of the placeholder."""
    inputs: Mapping[str, Tensor]
    """Maps names to the model's arguments, such as `pixel_values` [patches, values]."""


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt in the form that a model reads."""

    ids: np.ndarray
    """[P] int32, with all tokens of the images."""
    is_image: np.ndarray
    """[P] bool: where an image feature replaces the token embedding."""
    images: tuple[_SeenImage, ...] = ()


class ImageReader:
    """Reads images with the processor in a model's folder. `model` names the model in messages.
    Raises a UserError if the folder has no processor that `transformers` can load."""

    def __init__(self, model: str | Path, folder: Path) -> None:
        self._model = model
        with refusals_named(model, "cannot be shown images"):
            self._processor = _load_processor(folder)
        token = image_token(read_model_config(folder))
        self.token = int(self._processor.image_token_id if token is None else token)
        """Token id of an image placeholder."""
        self._seen: OrderedDict[bytes, _SeenImage] = OrderedDict()
        self._bytes = 0

    def read(self, prompt_ids: np.ndarray, images: Sequence[Any]) -> SeenPrompt:
        """Return a prompt with the tokens of its images. `prompt_ids` ([P] int32) has one
        placeholder for each encoded image. Raises a UserError if the numbers of placeholders and
        images differ, or an image is unreadable."""
        places = np.flatnonzero(prompt_ids == self.token)
        if not len(images):  # without images, the placeholder is an ordinary token
            return SeenPrompt(prompt_ids, np.zeros(len(prompt_ids), bool))
        if len(places) != len(images):
            raise UserError(f"it {_misplaced(len(images), len(places), self.token, self._model)}")
        seen = tuple(self.see(image) for image in images)
        pieces: list[np.ndarray] = []
        end = 0
        for place, image in zip(places.tolist(), seen, strict=True):
            pieces += [prompt_ids[end:place], image.tokens]
            end = place + 1
        ids = np.concatenate([*pieces, prompt_ids[end:]]).astype(np.int32)
        return SeenPrompt(ids, ids == self.token, seen)

    def see(self, encoded: Any) -> _SeenImage:
        """Process an encoded image (bytes or a buffer), or return a cached result."""
        encoded = memoryview(encoded)
        key = hashlib.blake2b(encoded, digest_size=16).digest()
        if key in self._seen:
            self._seen.move_to_end(key)
            return self._seen[key]
        found = self._process(encoded)
        self._seen[key] = found
        self._bytes += _num_bytes(found)
        # Keep the newest image even if it alone exceeds the limit.
        while self._bytes > _CACHED_BYTES and len(self._seen) > 1:
            self._bytes -= _num_bytes(self._seen.popitem(last=False)[1])
        return found

    def _process(self, encoded: memoryview) -> _SeenImage:
        processor = self._processor
        try:
            made = processor.image_processor(images=[open_image(encoded)], return_tensors="pt")
            text = processor.replace_image_token(made, 0)
        except Exception as error:  # decoders and processors can raise anything
            raise UserError(
                f"an image of {len(encoded):,} bytes cannot be read ({type(error).__name__}: {error})"
            ) from error
        tokens = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        return _SeenImage(np.asarray(tokens, np.int32), inputs)


def open_image(encoded: Any) -> Any:
    """Decode an image to RGB with Pillow, and rotate it upright by its EXIF data."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(encoded)) as image:
        # PostScript is a program, which must not run.
        if image.format == "EPS":
            raise ValueError(PROGRAM)
        return ImageOps.exif_transpose(image).convert("RGB")


def probe_images() -> list[bytes]:
    """Return two images of different sizes, to check models with."""
    from PIL import Image

    files: list[bytes] = []
    for size in ((64, 40), (40, 96)):
        file = io.BytesIO()
        colors = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(colors).save(file, "PNG")
        files.append(file.getvalue())
    return files


def _num_bytes(image: _SeenImage) -> int:
    return sum(tensor.nbytes for tensor in image.inputs.values())


def _load_processor(folder: Path) -> Any:
    """Load a model's processor: image processor, tokenizer, and expansion of placeholders. Without
    torchvision, leave out the video processor, which needs it."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():
        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder, local_files_only=True))]
    if "video_processor" not in kind.get_attributes():
        return AutoProcessor.from_pretrained(folder, local_files_only=True)

    class _WithoutVideos(kind):  # pyright: ignore[reportGeneralTypeIssues]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    made = dict.fromkeys(kind.get_attributes())
    for name, part in (("image_processor", AutoImageProcessor), ("tokenizer", AutoTokenizer)):
        made[name] = part.from_pretrained(folder, local_files_only=True)
    return _WithoutVideos(**made)


# Vision: how a `transformers` model reads a prompt with images. The model's own forward pass
# replaces all image tokens, even those that a policy sampled in its response. This code replaces
# only the given positions; all modules are the model's own. `training/agreement.py` compares the
# result with the model's forward pass.


LANGUAGE = "language_model"
"""Attribute of the text model in backbones that read images."""


@dataclass(frozen=True)
class ImageInputs:
    """The images in a forward pass."""

    places: Tensor
    """[B, L] bool, or [T] for packed rows: where image features replace token embeddings."""
    inputs: Mapping[str, Tensor]
    """Maps names to arguments of the vision tower, for all images in order."""

    @classmethod
    def of(cls, places: Tensor, images: Sequence[_SeenImage]) -> ImageInputs:
        inputs = {
            n: torch.cat([i.inputs[n] for i in images]).to(places.device) for n in images[0].inputs
        }
        return cls(places, inputs)


def is_type_that_sees(settings: Any) -> bool:
    """Like `sees_images`, for settings loaded by `transformers`."""
    return sees_images({"model_type": settings.model_type})


def embed(backbone: Any, input_ids: Tensor, shown: ImageInputs) -> Tensor:
    """Return the inputs of the text layers, [B, L, hidden]: token embeddings, and image features in
    the places of images."""
    embedded = backbone.get_input_embeddings()(input_ids)
    features = backbone.get_image_features(**shown.inputs, return_dict=True).pooler_output
    if not isinstance(features, torch.Tensor):
        features = torch.cat([*features])
    return embedded.masked_scatter(shown.places[..., None], features.flatten(0, -2).to(embedded.dtype))


def positions(
    backbone: Any, input_ids: Tensor, shown: ImageInputs, inside: Tensor | None = None
) -> Tensor | None:
    """Return the positions of tokens [B, L] by the model's own rule, such as [3, B, L] for time,
    height and width (m-rope, arXiv:2409.12191); None if the model numbers image tokens like all
    others. `inside` ([B, L] bool) is False for padding; None if there is no padding on the left."""
    rule = getattr(backbone, "get_rope_index", None)
    if rule is None:
        return None
    takes = inspect.signature(rule).parameters
    grids = {name: value for name, value in shown.inputs.items() if name in takes}
    mask = None if inside is None else inside.to(torch.int64)
    kinds = shown.places.to(torch.int32)
    return rule(input_ids, mm_token_type_ids=kinds, attention_mask=mask, **grids)[0]


def tower_parameters(backbone: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the vision tower's parameters. Rows without images use none; others may not use all."""
    for name, parameter in backbone.named_parameters():
        if not name.startswith(f"{LANGUAGE}."):
            yield parameter
