"""Estimates the bytes of weights, gradients and moments in training, from the headers of a model's
files and without torch.

Trained parameters, gradients and moments are float32 in every dtype of forward passes, except for
8-bit moments. Frozen parameters, such as an adapter's base weights, have the dtype of forward
passes. FSDP shards everything evenly over the ranks of a group.
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
from .engine import ModelConfig, TrainingConfig
from .lora import Lora
from .optimizer import OptimizerConfig

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_BYTES = 128 << 20
"""Minimum bytes of logits to compute at once. A CPU uses this value."""
GPU_CHUNK_SHARE = 1 / 64
"""Share of a GPU's memory that may hold the logits computed at once."""
MOMENTS_BYTES = 256 << 20
"""Bytes of offloaded moments to copy to the device at once; two such parts are there at a time."""
KEPT_BYTES = 256 << 20
"""Maximum bytes of logits to keep for the backward pass; larger logits are recomputed."""
BLOCKS = (256, 128, 64)
"""Block sizes of 8-bit moments, one scale each. Weft uses the largest that divides a row."""
SMALL = 4096
"""Tensors with fewer elements keep float32 moments."""
MISSING_TORCHAO = "moments='8bit' needs torchao, which is not installed: pip install 'weft[torchao]'"
LAYERS_AT_ONCE = 4
"""Layerwise gathering holds this number of layers: two, each with an exchange buffer."""
GATHER_ONCE_BYTES = 2 << 30
"""With gather="auto", ranks gather all parameters once a step if they take fewer bytes."""
NODE_SHARE = 1 / 4
"""With gather="auto", each node holds a copy of the state if it takes at most this share of its
GPUs."""
CPU_TOKENS, GPU_TOKENS = 1280, 16384
"""Defaults of `ModelConfig.microbatch_tokens`."""


@dataclass(frozen=True)
class ModelSize:
    shapes: dict[str, tuple[int, ...]]
    """Maps each tensor's name in the model's files to its shape; tied tensors appear once."""
    vocabulary: int
    layers: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        return number_in(self.shapes.values())

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Maps the name of each linear layer in the backbone to its weight's shape."""
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and name.endswith(".weight")
            and "embed" not in name
            and "head" not in name
        }

    def of_stages(self, number: int, chunks: int = 1) -> list[ModelSize]:
        """Return the size of each stage of a pipeline that cuts the layers evenly. The first stage
        has the embeddings. The last has everything else outside the layers, and a copy of tied
        embeddings."""
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
        """Return the shapes of an adapter's tensors: A and B of each layer, and DoRA's row
        norms."""
        found: list[tuple[int, ...]] = []
        for out, into in (shape for name, shape in self.matrices.items() if lora.is_on(name)):
            found += [(lora.rank, into), (out, lora.rank), *([(out,)] if lora.dora else [])]
        return found


@dataclass(frozen=True)
class TrainingMemory:
    """Memory in bytes on one rank. Some fields exist only in a pass or an update."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    """During a pass: weights in the dtype of passes, if the rank stores only a shard or another
    dtype. This is the whole model or, with layerwise gathering, the embeddings and two layers (one
    on a single rank)."""
    exchanged: int
    """During an update: gathered gradients in their reduction dtype, and the exchange's copy of
    them, if the rank keeps only a shard."""
    outer_gradients: int
    """During an update with offload="everything": gradients of embeddings and head, and a copy of
    them, after activations and gathered weights have been freed."""
    visiting: int
    """During an update: offloaded moments on the device."""
    snapshot: int
    """On the host, from the first checkpoint on: the copy that a rank writes its files from."""
    rounding: int = 0
    """On the host of a rank with a GPU: rounding of small pinned blocks."""
    added: int = 0
    """On the host with offload="everything": another copy of one unit's gradients, which is not
    pinned, while FSDP adds them up."""

    def exchanged_beside(self, activations: int) -> int:
        """Return the bytes that gradients in transit add to the peak of an update."""
        return max(self.exchanged, self.outer_gradients - self.gathered - activations)


def model_size(model: str | Path, *, scalar: bool = False) -> ModelSize:
    """Read the sizes of a model's tensors from the headers of its files. `scalar` replaces the head
    with a scalar one. Raises UserError if the model is damaged, and ValueError if it has no
    safetensors files."""
    settings = text_settings(read_model_config(model))
    folder = find_model_config(model).parent
    shapes = {name: entry.shape for name, entry in stored_tensors(model, folder).items()}
    if not shapes:  # training can read other formats too
        raise ValueError(f"model {str(model)!r}: {folder} has no safetensors files")
    layers, vocabulary = int(settings.get("num_hidden_layers") or 1), int(settings.get("vocab_size", 0))
    heads = {name: shape for name, shape in shapes.items() if "head" in name and vocabulary in shape}
    rest = {name: shape for name, shape in shapes.items() if name not in heads}
    tied = bool(settings.get("tie_word_embeddings", not heads))
    # Some files store the tied embedding under the head's name.
    alone = tied and not any(shape in rest.values() for shape in heads.values())
    if not alone and (tied or scalar):
        shapes = rest
    if scalar and SCALAR_HEAD not in shapes:
        widths = (shape[-1] for shape in shapes.values() if len(shape) == 2 and vocabulary in shape)
        shapes = {**shapes, SCALAR_HEAD: (1, next(widths, 0))}
    return ModelSize(shapes, vocabulary, layers, tied and not scalar)


def training_memory(
    size: ModelSize,
    config: ModelConfig,
    *,
    ranks: int,
    trains: bool,
    lora: Lora | None,
    saves: bool,
    nodes: int = 1,
    gpu_bytes: int = 0,
) -> TrainingMemory:
    """Return the memory on one rank of a group that trains the model, an adapter (`lora`), or
    nothing, and may save checkpoints. `gpu_bytes` is the memory of a GPU, or 0 without GPUs."""
    whole, width = size.parameters, BYTES[config.dtype]
    shapes = size.adapter(lora) if lora is not None else list(size.shapes.values())
    adapter = number_in(shapes) if lora is not None else 0
    trained = number_in(shapes) if trains else 0
    moments = _moments(shapes, config, size.vocabulary) if trains else 0
    frozen = width if lora is not None or not trains else FLOAT32
    untrained = whole * width if lora is not None or not trains else 0
    by_node = {"ranks": ranks, "nodes": nodes, "gpu_bytes": gpu_bytes}
    if gathers_in_node(config, frozen=untrained, trained=trained, **by_node):
        ranks //= nodes
    weights = (whole * frozen + adapter * FLOAT32) // ranks
    rounds = config.dtype != "float32" and lora is None and trains
    alone = ranks == 1 and config.offload == "everything"
    gradients = [FLOAT32 * math.prod(shape) // ranks for shape in shapes] if trains else []
    outer, layer = _embeddings(size), (whole - _embeddings(size)) // max(1, size.layers)
    if gathers_once(config, whole):
        at_once = whole
    elif alone:
        at_once = outer + layer
    else:
        at_once = min(whole, outer + LAYERS_AT_ONCE * whole // max(1, size.layers))
    exchanged = outer_gradients = 0
    if trains and lora is None and ranks > 1:
        exchanged = 2 * BYTES[config.gradients] * at_once
    elif trains and lora is None and alone:
        # One layer's gradients, and the previous layer's in the dtype of accumulation.
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
        rounding=_rounding(size, config, ranks, frozen=frozen, gradients=gradients, lora=lora),
        added=_largest_unit(size, shapes, gradients) if config.offload == "everything" else 0,
    )


def _largest_unit(size: ModelSize, trained: Sequence[tuple[int, ...]], gradients: Sequence[int]) -> int:
    """Return the bytes of the gradients of a layer, or of the embeddings if they have more."""
    outer = sum(own for own, shape in zip(gradients, trained, strict=False) if size.vocabulary in shape)
    return max(outer, (sum(gradients) - outer) // max(1, size.layers))


def _rounding(
    size: ModelSize,
    config: ModelConfig,
    ranks: int,
    *,
    frozen: int,
    gradients: Sequence[int],
    lora: Lora | None,
) -> int:
    """Return the host memory that pinning adds to offloaded tensors. `frozen` is the width of the
    model's parameters; `gradients` are the bytes of each gradient, and of each moment."""
    if config.offload == "moments":
        return 2 * sum(pinned_bytes(own) - own for own in gradients)
    if config.offload != "everything":
        return 0
    parameters = [frozen * math.prod(shape) // ranks for shape in size.shapes.values()]
    pinned = [*parameters, *(gradients if lora is not None else ()), *gradients]
    return sum(pinned_bytes(own) - own for own in pinned)


PINNED_MIB = 16
"""[MiB] torch rounds smaller blocks of pinned host memory up to a power of two, and keeps freed
ones (`allocator_settings`)."""


def pinned_bytes(number: int) -> int:
    """Return the size of torch's pinned block for a tensor.

    >>> [pinned_bytes(mib << 20) >> 20 for mib in (3, 48)]
    [4, 48]
    """
    if number > PINNED_MIB << 20:
        return number
    return 1 << (number - 1).bit_length() if number else 0


def settings_that_save_memory(
    config: ModelConfig, training: TrainingConfig | None, *, tokens: int
) -> list[str]:
    """Return settings that lower the peak of device memory, the fastest first. `tokens` is the size of
    a microbatch, or 0 if the peak is not in a pass.

    >>> settings_that_save_memory(ModelConfig(model="m"), None, tokens=16384)
    ['microbatch_tokens=8192 (now 16384)', 'offload="everything"', 'more ranks']
    """
    found = [f"microbatch_tokens={tokens // 2} (now {tokens})"] if tokens > 1 else []
    if training is not None and tokens:
        again = training.activation_checkpointing
        found += ['activation_checkpointing="elementwise"'] * (again is False)
        found += ["activation_checkpointing=True"] * (again in (False, "elementwise") or again > 1)
    muon = training is not None and training.optimizer == "muon"
    if config.offload != "everything" and not muon:
        found.append('offload="everything"')
    if training is not None and training.lora is None:
        if config.offload == "nothing" and training.moments != "8bit" and not muon:
            found.insert(-1, 'offload="moments"')
        found.append("lora=weft.Lora()")
    return [*found, "more ranks"]


def moment_block(shape: tuple[int, ...], own: int) -> int | None:
    """Return the block size of a tensor's 8-bit moments, or None if they stay float32. `own` is the
    length of a row on this rank.

    >>> moment_block((151936, 896), 896), moment_block((896, 4864), 2432), moment_block((8192,), 8192), moment_block((64, 64), 32)
    (128, 128, None, None)
    """
    if len(shape) < 2 or math.prod(shape) < SMALL:
        return None
    return next((block for block in BLOCKS if own % block == 0), None)


def number_in(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _moments(shapes: Sequence[tuple[int, ...]], config: ModelConfig, vocabulary: int) -> int:
    if isinstance(config, OptimizerConfig) and config.optimizer == "muon":
        # One momentum for the matrices of layers.
        single = [shape for shape in shapes if len(shape) == 2 and vocabulary not in shape]
        return FLOAT32 * (2 * number_in(shapes) - number_in(single))
    if not isinstance(config, OptimizerConfig) or config.moments == "float32":
        return 2 * FLOAT32 * number_in(shapes)
    blocks = [(math.prod(shape), moment_block(shape, shape[-1])) for shape in shapes if shape]
    return 2 * sum(
        number * FLOAT32 if block is None else number + number // block * FLOAT32
        for number, block in blocks
    )


def head_chunk_bytes(gpu_bytes: int) -> int:
    """Return the bytes of logits to compute at once. Small chunks would leave a GPU idle."""
    return max(CHUNK_BYTES, int(GPU_CHUNK_SHARE * gpu_bytes))


def gathers_once(config: ModelConfig, parameters: int) -> bool:
    if config.offload == "everything":
        return False
    return config.gather == "once" or (
        config.gather == "auto" and FLOAT32 * parameters < GATHER_ONCE_BYTES
    )


def gathers_in_node(
    config: ModelConfig, *, frozen: int, trained: int, ranks: int, nodes: int, gpu_bytes: int
) -> bool:
    """Return whether each node holds a copy of the model, sharded over the node's ranks.

    Args:
        frozen: bytes of frozen parameters.
        trained: number of trained parameters.
        ranks, nodes: of the group.
        gpu_bytes: memory of a GPU; 0 for a CPU.
    """
    if nodes == 1 or (ranks // nodes) % config.replica_ranks or config.gather != "auto":
        return nodes > 1 and config.gather == "node"
    if gathers_once(config, trained + frozen // BYTES[config.dtype]) or config.offload == "everything":
        return False
    moments = 0 if config.offload == "moments" else 2 * FLOAT32
    state = frozen + trained * (2 * FLOAT32 + moments)
    return state * nodes // ranks <= NODE_SHARE * gpu_bytes


def _embeddings(size: ModelSize) -> int:
    return sum(math.prod(shape) for shape in size.shapes.values() if size.vocabulary in shape)


def folder_bytes(size: ModelSize, config: ModelConfig, lora: Lora | None) -> int:
    """Return the size of the model's folder in a checkpoint, or of the adapter's."""
    if lora is not None:
        return FLOAT32 * number_in(size.adapter(lora))
    return BYTES[config.dtype] * size.parameters


def checkpoint_bytes(size: ModelSize, config: ModelConfig, lora: Lora | None) -> int:
    """Return a checkpoint's size: parameters, moments, and the model's folder."""
    shapes = size.adapter(lora) if lora is not None else list(size.shapes.values())
    state = number_in(shapes) * FLOAT32 + _moments(shapes, config, size.vocabulary)
    return state + folder_bytes(size, config, lora)
