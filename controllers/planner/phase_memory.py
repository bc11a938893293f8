"""Memory of a rank by phase: at work on its devices, and asleep while another group has its turn.

    size = ModelSize(model.shapes(), model.vocabulary, len(model.layers), model.tied)
    trained_memory(size, config, ranks=8, activations=activation_bytes(model, config, tokens=16384))

No function here needs torch, or weights: `Transformer` reads a `config.json`. If a model's files are
there, `workers/training/memory.py` reads exact sizes from their headers, and
`workers/training/activations.py` measures activations on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...dataflow.byte_units import GIB, MIB
from ...workers.models.transformer import Transformer
from ...workers.training.engine import ModelConfig
from ...workers.training.memory import (
    BYTES,
    FLOAT32,
    ModelSize,
    TrainingMemory,
    head_chunk_bytes,
    training_memory,
)

# Memory of a process without tensors: the interpreter, torch, transformers, vLLM.
#
# Measured: `resident_bytes` of each group in runs of the examples (docs/metrics.md), minus the
# memory planned for their tensors. Linux, Python 3.11, torch 2.13 for CPUs, transformers 5.19, vLLM
# 0.32, Ray 2.60; `benchmarks/operate.py --parts plan` repeats the comparison. Each process counts
# mapped files, mostly libraries, that it shares with others. The figures for GPUs are estimates.

TRAINING = 600 * MIB
"""A rank with a training engine, or one that only computes log-probabilities."""
ENGINES = {"vllm": 785 * MIB, "transformers": 570 * MIB}
"""A rollout rank: name of its engine -> bytes."""
ON_GPU = {"vllm": round(3.5 * GIB)}
"""A rank with a GPU: name of its engine -> bytes of host memory."""
ON_GPU_TRAINING = round(2.5 * GIB)
"""Host memory of any other rank with a GPU: CUDA's libraries and the driver's mappings."""
CUDA = round(1.5 * GIB)
"""Device memory of a process: CUDA's context, NCCL, and workspaces of libraries."""
ASLEEP = round(2.5 * GIB)
"""Device memory of vLLM while it sleeps: its context, and kernels and workspaces outside its pool."""
HELD_FREE = 0.15
"""Heap overhead on a CPU, as a share of the memory that a pass allocates and frees. Two FSDP2 ranks
of a model with 84M parameters held 11 to 15 % more than their tensors at peak."""


@dataclass(frozen=True)
class Bytes:
    device: int
    host: int


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of one rank, with its process."""

    working: Bytes
    """At the peak of the group's work."""
    asleep: Bytes
    """While another group has its turn on the devices. A CPU has no turns, so this is `working`."""


def trained_memory(
    size: ModelSize,
    config: ModelConfig,
    *,
    ranks: int,
    activations: int,
    trains: bool = True,
    saves: bool = True,
    nodes: int = 1,
    gpu_bytes: int = 0,
) -> PhaseMemory:
    """Return the memory of a rank that trains the model or its adapter, or computes log-probabilities.

    Args:
        ranks, nodes: size of the group.
        activations: peak bytes of a pass, from `activation_bytes` or `pass_bytes`.
        trains: whether the model is trained; otherwise, it is frozen.
        saves: whether the run writes checkpoints.
        gpu_bytes: memory of a GPU, or 0 for ranks on CPUs.
    """
    lora = getattr(config, "lora", None)
    made = training_memory(
        size,
        config,
        ranks=ranks,
        trains=trains,
        lora=lora,
        saves=saves,
        nodes=nodes,
        gpu_bytes=gpu_bytes,
    )
    rest, in_pass, on_host = placed(made, config, on_gpu=gpu_bytes > 0)
    moves, peak = sum(rest.values()), sum(with_activations(in_pass, activations, made).values())
    host = sum(on_host.values())
    if not gpu_bytes:
        whole = Bytes(0, TRAINING + host + moves + round((1 + HELD_FREE) * peak))
        return PhaseMemory(whole, whole)
    host += ON_GPU_TRAINING
    return PhaseMemory(Bytes(CUDA + moves + peak, host), Bytes(CUDA, host + moves))


def generating_memory(weights: int, cache: int, *, on_gpu: bool = True) -> PhaseMemory:
    """Return the memory of a rank of vLLM.

    Args:
        weights: [bytes] the rank's part of the model.
        cache: [bytes] its keys and values.
    """
    if not on_gpu:
        whole = Bytes(0, ENGINES["vllm"] + weights + cache)
        return PhaseMemory(whole, whole)
    host = ON_GPU["vllm"]
    return PhaseMemory(Bytes(CUDA + weights + cache, host), Bytes(ASLEEP, host + weights))


def placed(
    made: TrainingMemory, config: ModelConfig, *, on_gpu: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return three mappings of name -> bytes: at rest, additional in a pass, and on the host."""
    rest = {"weights": made.weights, "moments": made.moments}
    in_pass = {
        "gradients": made.gradients,
        "gathered weights": made.gathered,
        "gathered gradients": made.exchanged,
    }
    host = {"copy for a checkpoint": made.snapshot}
    if on_gpu and config.offload == "moments":
        host["moments"] = rest.pop("moments")
        in_pass["visiting moments"] = made.visiting
    if on_gpu and config.offload == "everything":
        host |= {**rest, "gradients": in_pass.pop("gradients")}
        rest = {}
    if on_gpu:
        host |= {"pinned blocks": made.rounding, "gradients added": made.added}
    return rest, in_pass, host


def with_activations(
    in_pass: Mapping[str, int], activations: int, made: TrainingMemory
) -> dict[str, int]:
    gathered = made.exchanged_beside(activations)
    return {**in_pass, "gathered gradients": gathered, "activations": activations}


# Activations without torch

# Elements that a layer keeps of each token, in multiples of the MLP's inner size, the hidden size, and
# the sizes of queries, keys and values together. Fitted to `pass_bytes` for the models of docs/gpu.md,
# which the estimate meets within a sixth.
_KEPT = 3, 10, 3
"""For the backward pass."""
_WORKING = 4, 12, 3
"""While a layer is recomputed and goes backward."""
_PRODUCTS = 2, 2, 2
"""For the backward pass, if elementwise operations are recomputed: inputs of matrix products."""


def activation_bytes(
    model: Transformer, config: ModelConfig, *, tokens: int, trains: bool = True, gpu_bytes: int = 0
) -> int:
    """Estimate the peak bytes of a pass over a microbatch, without parameters and their gradients.

    Args:
        tokens: tokens of the microbatch. Ranks of a sequence-parallel replica share them.
        trains: whether a backward pass follows.
        gpu_bytes: memory of the GPU, which determines how many logits exist at once; 0 for a CPU.
    """
    width = BYTES[config.dtype]
    held = tokens / config.sequence_parallel * width
    attended = (model.heads + 2 * model.kv_heads) * model.head_dim
    inner = [
        sum(m.used * m.rows for m in layer.matrices if m.name.endswith("up_proj"))
        for layer in model.layers
    ]

    def of_layers(weights: tuple[int, int, int]) -> list[float]:
        each, hidden, attention = weights
        return [held * (each * n + hidden * model.hidden + attention * attended) for n in inner]

    logits = 2 * head_chunk_bytes(gpu_bytes)
    working = max(of_layers(_WORKING))
    if not trains:
        return round(max(logits, working))
    again = getattr(config, "activation_checkpointing", False)
    kept, each = sum(of_layers(_KEPT)), held * model.hidden * len(model.layers)
    if again == "elementwise":
        kept = sum(of_layers(_PRODUCTS))
    elif again:  # all layers, or every n-th one
        kept = each + (kept - each) * (1 - 1 / int(again))
    else:
        working = 0.0
    # The head's gradient, in the dtype of passes and in float32, until it is added up.
    outer = model.head_products * (1 + model.tied) * (getattr(config, "lora", None) is None)
    return round(kept + max(logits + (width + FLOAT32) * outer, working + FLOAT32 * outer))


def realhf_bytes(
    parameters: int, *, data: int, tensor: int, pipeline: int, trains: bool, kv_bytes: float = 0.0
) -> float:
    """Return ReaLHF's estimate of static bytes per GPU (arXiv:2406.14088), with its slack of 2: weights
    and gradients in 16 bits, and the optimizer's float32 state sharded over data-parallel ranks.

    Args:
        kv_bytes: keys and values of all sequences that are generated at once.

    >>> realhf_bytes(10, data=2, tensor=1, pipeline=1, trains=True)
    140.0
    """
    model = 4 * parameters / (pipeline * tensor)
    if trains:
        return model + 20 * parameters / (pipeline * tensor * data)
    return model + 2 * kv_bytes / (pipeline * tensor * data)
