"""Memory of a model: how many bytes its weights, gradients and moments take, from its files, without torch.

Parameters that are trained, gradients and (unless they are kept in 8 bits) moments are float32, whatever a pass computes in; a frozen
model, also one with an adapter, is of the dtype of passes. FSDP shares all of it evenly over the ranks of a group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...resharding.formulas import PipelineStages
from ..models.model_folder import SCALAR_HEAD, find_model_config, read_model_config, text_settings
from ..models.weight_files import stored_tensors
from .engine import ModelConfig, OptimizerConfig
from .lora import Lora

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_BYTES = 128 << 20
"""Bytes of logits computed at once, at least; on a CPU as many."""
GPU_CHUNK_SHARE = 1 / 64
"""Of a GPU's memory, for logits computed at once."""
MOMENTS_BYTES = 256 << 20
"""Bytes of moments that are brought to a device at once, where they lie in host memory; two such parts are there at any time."""
KEPT_BYTES = 256 << 20
"""Bytes of logits kept for the backward pass; if there are more, they are computed a second time."""
BLOCKS = (256, 128, 64)
"""Elements that have one scale, of moments in 8 bits: the largest number that rows are made of."""
SMALL = 4096
"""Elements of a tensor below which its moments are float32 in any case."""
MISSING_TORCHAO = "moments='8bit' needs torchao, which is not installed: pip install 'weft[torchao]'"
LAYERS_AT_ONCE = 4
"""Layers whose parameters are gathered at once where they are gathered one by one: one is computed with, the next is on its way, and each
has a buffer of the exchange beside it."""
GATHER_ONCE_BYTES = 2 << 30
"""Bytes of parameters below which ranks gather all of them once a step, unless `ModelConfig.gather` says otherwise."""
CPU_TOKENS, GPU_TOKENS = 1280, 16384
"""Tokens of a pass where a group does not say how many (`ModelConfig.microbatch_tokens`)."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that its memory follows from."""

    shapes: dict[str, tuple[int, ...]]
    """Name of each tensor in its files -> shape; tied ones once."""
    vocabulary: int
    layers: int
    tied: bool = False
    """Whether the head is the embedding."""

    @property
    def parameters(self) -> int:
        """Number of all of them."""
        return number_in(self.shapes.values())

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Linear layers of the backbone."""
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.shapes.items()
            if len(shape) == 2 and name.endswith(".weight") and "embed" not in name and "head" not in name
        }

    def of_stages(self, number: int, chunks: int = 1) -> list[ModelSize]:
        """What each stage of a pipeline holds, whose layers are cut evenly: its layers; that of the first layer the embeddings; that of
        the last one everything else, and of tied embeddings a copy."""
        cut = PipelineStages.equal(self.layers, number, chunks)
        return [self._of_stage(cut, stage) for stage in range(number)]

    def _of_stage(self, stages: PipelineStages, stage: int) -> ModelSize:
        last = self.layers - 1
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            numbered = re.search(r"\.(\d+)\.", name)
            first = "embed" in name and numbered is None
            holders = {int(numbered[1]) if numbered else 0 if first else last}
            if first and self.tied:
                holders.add(last)
            if any(stages.stage_of(layer) == stage for layer in holders):
                shapes[name] = shape
        own = sum(stages.stage_of(layer) == stage for layer in range(self.layers))
        return ModelSize(shapes, self.vocabulary, own, self.tied)

    def adapter(self, lora: Lora) -> list[tuple[int, ...]]:
        """Shapes of an adapter: A [rank, in] and B [out, rank] of each layer, with DoRA the length of each row."""
        chosen = [shape for name, shape in self.matrices.items() if lora.is_on(name)]
        vectors = [(out,) for out, _ in chosen if lora.dora]
        return [
            shape for out, into in chosen for shape in ((lora.rank, into), (out, lora.rank))
        ] + vectors


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank; those of a pass are there while it goes on."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    """Of a pass: weights in the dtype of passes, where the rank holds a part of them, or another dtype: of the whole model, or of two
    layers (one, where a rank is alone) and the embeddings where they are gathered layer by layer."""
    exchanged: int
    """Of an update: as much of the gradients, in their own dtype, and their copy in the exchange, where the rank keeps a part of them."""
    outer_gradients: int
    """Of an update: gradients of embeddings and head and their copy, where layers visit the device one by one. They come when activations
    and gathered weights are gone."""
    visiting: int
    """Of an update: moments that are on the device for a while, where they lie in host memory."""
    snapshot: int
    """On the host, from the first checkpoint on: a copy of what a rank writes of it."""

    def exchanged_beside(self, activations: int) -> int:
        """What gradients on their way add to the largest moment of an update with so many bytes of activations."""
        return max(self.exchanged, self.outer_gradients - self.gathered - activations)


def model_size(model: str | Path, *, scalar: bool = False) -> ModelSize:
    """Read the sizes of a model from the headers of its files.

    Args:
        model: folder, or id.
        scalar: it has a scalar head in the place of its own, as critics and reward models have.

    Raises:
        UserError: there is no such model, or one of its files is damaged.
        ValueError: it has no safetensors files.
    """
    settings = text_settings(read_model_config(model))
    folder = find_model_config(model).parent
    shapes = {name: entry.shape for name, entry in stored_tensors(model, folder).items()}
    if not shapes:
        raise ValueError(
            f"model {str(model)!r}: {folder} has no safetensors files"
        )  # a run reads others, too
    layers, vocabulary = int(settings.get("num_hidden_layers") or 1), int(settings.get("vocab_size", 0))
    heads = {name: shape for name, shape in shapes.items() if "head" in name and vocabulary in shape}
    rest = {name: shape for name, shape in shapes.items() if name not in heads}
    tied = bool(settings.get("tie_word_embeddings", not heads))
    alone = tied and not any(
        shape in rest.values() for shape in heads.values()
    )  # it is stored by the name of the head
    if not alone and (tied or scalar):
        shapes = rest
    if scalar and SCALAR_HEAD not in shapes:
        hidden = next(
            (shape[-1] for shape in shapes.values() if len(shape) == 2 and vocabulary in shape), 0
        )
        shapes = {**shapes, SCALAR_HEAD: (1, hidden)}
    return ModelSize(shapes, vocabulary, layers, tied and not scalar)


def training_memory(
    size: ModelSize,
    config: ModelConfig,
    *,
    ranks: int,
    trains: bool,
    lora: Lora | None,
    saves: bool,
) -> TrainingMemory:
    """What a rank of a training group holds.

    Args:
        size: of the model.
        config: of the group.
        ranks: of the group.
        trains: whether the group is updated.
        lora: the adapter that is trained in the model's place.
        saves: whether the run makes checkpoints.
    """
    whole, width = size.parameters, BYTES[config.dtype]
    shapes = size.adapter(lora) if lora is not None else list(size.shapes.values())
    adapter = number_in(shapes) if lora is not None else 0
    trained = number_in(shapes) if trains else 0
    moments = _moments(shapes, config) if trains else 0
    frozen = width if lora is not None or not trains else FLOAT32
    weights = (whole * frozen + adapter * FLOAT32) // ranks
    rounds = config.dtype != "float32" and lora is None and trains
    alone = ranks == 1 and config.offload == "everything"
    outer, layer = _embeddings(size), (whole - _embeddings(size)) // max(1, size.layers)
    at_once = (
        whole
        if gathers_once(config, whole)
        else outer + layer
        if alone
        else min(whole, outer + LAYERS_AT_ONCE * whole // max(1, size.layers))
    )
    exchanged = outer_gradients = 0
    if trains and lora is None and ranks > 1:
        exchanged = 2 * BYTES[config.gradients] * at_once
    elif (
        trains and lora is None and alone
    ):  # a layer's gradients, and those of the layer before in the dtype in which they are added up
        exchanged = (width + BYTES[config.gradients]) * layer
        outer_gradients = 2 * FLOAT32 * outer
    return TrainingMemory(
        weights=weights,
        gradients=FLOAT32 * trained // ranks,
        moments=moments // ranks,
        gathered=at_once * width if ranks > 1 or alone else whole * width if rounds else 0,
        exchanged=exchanged,
        outer_gradients=outer_gradients,
        visiting=min(2 * MOMENTS_BYTES, moments // ranks) if config.offload == "moments" else 0,
        snapshot=(FLOAT32 * trained + moments) // ranks if saves and trains else 0,
    )


def moment_block(shape: tuple[int, ...], own: int) -> int | None:
    """Elements of a block of moments in 8 bits; None: those of this tensor are float32.

    Args:
        shape: of the full tensor.
        own: elements of a row that a rank has.

    >>> moment_block((151936, 896), 896), moment_block((896, 4864), 2432), moment_block((8192,), 8192), moment_block((64, 64), 32)
    (128, 128, None, None)
    """
    if len(shape) < 2 or math.prod(shape) < SMALL:
        return None
    return next((block for block in BLOCKS if own % block == 0), None)


def number_in(shapes: Iterable[tuple[int, ...]]) -> int:
    """Elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def _moments(shapes: Sequence[tuple[int, ...]], config: ModelConfig) -> int:
    """Bytes of the moments of parameters of these shapes."""
    if not isinstance(config, OptimizerConfig) or config.moments == "float32":
        return 2 * FLOAT32 * number_in(shapes)
    blocks = [(math.prod(shape), moment_block(shape, shape[-1])) for shape in shapes if shape]
    return 2 * sum(
        number * FLOAT32 if block is None else number + number // block * FLOAT32
        for number, block in blocks
    )


def head_chunk_bytes(gpu_bytes: int) -> int:
    """Bytes of logits that are made at once: on a GPU a share of its memory, since short chunks leave it idle.

    Args:
        gpu_bytes: memory of the GPU; 0 for a CPU.
    """
    return max(CHUNK_BYTES, int(GPU_CHUNK_SHARE * gpu_bytes))


def gathers_once(config: ModelConfig, parameters: int) -> bool:
    """Whether ranks gather all parameters of a model at once, and not layer by layer."""
    if config.offload == "everything":
        return False
    return config.gather == "once" or (
        config.gather == "auto" and FLOAT32 * parameters < GATHER_ONCE_BYTES
    )


def _embeddings(size: ModelSize) -> int:
    """Parameters outside of layers, the largest ones: embeddings and head."""
    return sum(math.prod(shape) for shape in size.shapes.values() if size.vocabulary in shape)


def checkpoint_bytes(size: ModelSize, config: ModelConfig, lora: Lora | None) -> int:
    """Bytes of a group in a checkpoint: parameters in float32, moments, and the model's folder (of an adapter, its own)."""
    shapes = size.adapter(lora) if lora is not None else list(size.shapes.values())
    folder = FLOAT32 if lora is not None else BYTES[config.dtype]
    return number_in(shapes) * (FLOAT32 + folder) + _moments(shapes, config)
