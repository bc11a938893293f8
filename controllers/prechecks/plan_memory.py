"""Memory of each group and rank of a run in each phase.

It comes from settings, model files, and a pass with fake tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...dataflow.byte_units import GIB, MIB
from ...dataflow.errors import UserError
from ...dataflow.graph import TRAIN, Handle
from ...dataflow.metric_names import FUNCTIONS
from ...workers.models.model_folder import complete_text_settings, find_model_config, head_dim, num_heads
from ...workers.reward_model import RewardModelConfig
from ...workers.training.engine import Head, ModelConfig
from ...workers.training.memory import (
    BYTES,
    ModelSize,
    TrainingMemory,
    checkpoint_bytes,
    model_size,
    training_memory,
)
from ..placement import Place
from ..run_spec import RunSpec
from .plan_sizes import StageMemory, StepSizes, UpdateSizes, stage_memory, update_sizes

# Resident memory of a process without tensors: the interpreter, torch, transformers, vLLM.
#
# Measured, not computed: `resident_bytes` of each group in runs of the examples (docs/metrics.md),
# minus the memory planned for their tensors. Linux, Python 3.11, torch 2.13 for CPUs, transformers
# 5.19, vLLM 0.32, Ray 2.60; `benchmarks/operate.py --only plan` repeats the comparison. Mapped files
# that processes share, mostly libraries, are counted in each process. torch for CUDA takes more.


TRAINING = 600 * MIB
"""A rank with a training engine, or one that only computes log-probabilities."""
VLLM = 785 * MIB
TRANSFORMERS = 570 * MIB
"""A rollout with the engine of `transformers`."""
WITH_TORCH = 350 * MIB
"""A rank for the functions of graphs if one uses torch, as advantages do."""
PLAIN = 200 * MIB
"""A rank without torch: rewards, samples, other functions. It starts at 140 MiB and grows with rows."""
DRIVER = 240 * MIB
"""The driver, with Ray."""
TORCH = 405 * MIB
"""Extra memory of a driver whose script has imported torch, for example to prepare a model."""
ONE_PROCESS = 540 * MIB
"""Driver and all groups together, under `Local`, without Ray."""
HELD_FREE = 0.15
"""Heap overhead on a CPU, as a share of the memory that a pass allocates and frees. Two FSDP2 ranks
of a model with 84M parameters held 11 to 15 % more than their tensors at peak."""


def resident_bytes(name: str, handle: Handle, functions: Iterable[Callable[..., Any]]) -> int:
    """Return the memory of a rank before it holds a tensor.

    Args:
        functions: the functions in the graphs of the run.
    """
    if isinstance(handle.config, ModelConfig):
        return TRAINING
    engine = getattr(handle.config, "engine", None)
    if engine is not None:
        return VLLM if engine == "vllm" else TRANSFORMERS
    return WITH_TORCH if name == FUNCTIONS and any(map(_uses_torch, functions)) else PLAIN


def driver_bytes(*, in_process: bool) -> int:
    """Return the memory of the driver. Call it before the planner imports torch."""
    return ONE_PROCESS if in_process else DRIVER + TORCH * ("torch" in sys.modules)


def _uses_torch(function: Callable[..., Any]) -> bool:
    return "torch" in vars(sys.modules.get(function.__module__, object()))


# Plan memory

REST = "at rest"
CACHE = "key/value cache"


@dataclass(frozen=True)
class GroupMemory:
    """Memory of each rank of a group: bytes by name."""

    group: str
    ranks: int
    pool: str
    on_gpu: bool
    """Whether its tensors are on a GPU, except for those listed in `on_host`."""
    libraries: int
    """Host memory of a rank before it holds a tensor, or 0 if it is not a separate process."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Phase ("at rest", "generate", ...) -> name -> bytes. Other phases add to the memory at rest."""
    on_host: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes of tensors that are always in host memory, from the first step on."""
    checkpoint: int = 0
    """Bytes of the whole group in a checkpoint."""
    stages: tuple[StageMemory, ...] = ()
    """Stages of a pipeline. `phases` describes the largest one."""
    unknown: str = ""
    """Reason why some of its memory is unknown."""

    @property
    def moves(self) -> int:
        """Bytes of a rank that move to the host while another group has its turn on the GPU.

        A cache is dropped instead of moved.
        """
        return sum(number for what, number in self.phases.get(REST, {}).items() if what != CACHE)

    @property
    def peak(self) -> int:
        """Bytes of a rank's tensors in its largest phase, without those on the host."""
        rest = self.phases.get(REST, {})
        return sum(rest.values()) + max(
            (sum(p.values()) for name, p in self.phases.items() if name != REST), default=0
        )

    @property
    def host(self) -> int:
        """Upper bound of a rank's host memory."""
        return self.libraries + sum(self.on_host.values()) + (0 if self.on_gpu else self.peak)

    @property
    def device(self) -> int:
        """Upper bound of a rank's GPU memory."""
        return self.peak if self.on_gpu else 0


def group_memory(
    spec: RunSpec,
    name: str,
    handle: Handle,
    place: Place,
    sizes: StepSizes,
    gpu_bytes: int,
    chunks: int = 1,
) -> GroupMemory:
    """Return the memory of a group.

    Args:
        gpu_bytes: memory of a GPU of this machine, or 0 without GPUs.
        chunks: chunks of each stage, if the group is a pipeline.

    Raises:
        UserError: the files of its model are damaged, or do not fit its settings.
    """
    config: Any = handle.config
    alone = spec.backend.in_process
    functions = (n.function for graph in spec.graphs.values() for n in graph.nodes if n.group is None)
    libraries = 0 if alone else resident_bytes(name, handle, functions)
    known = GroupMemory(
        name, 1 if alone else place.ranks, place.pool.name, bool(place.pool.gpus), libraries
    )
    if getattr(config, "model", None) is None:
        # A worker without a model holds no tensors that need planning.
        return replace(known, on_gpu=False)
    try:
        if isinstance(config, ModelConfig):
            return _trained(spec, known, config, sizes, gpu_bytes, chunks)
        return _generating(known, config, sizes, gpu_bytes) if hasattr(config, "engine") else known
    except (OSError, ValueError) as error:
        if isinstance(error, UserError) and Path(config.model).expanduser().is_dir():
            raise  # the run would fail, too; a model that is not downloaded yet would not fail
        return replace(known, unknown=str(error))


def _trained(
    spec: RunSpec, known: GroupMemory, config: Any, sizes: StepSizes, gpu_bytes: int, chunks: int
) -> GroupMemory:
    head = _head(config)
    size = model_size(config.model, scalar=head != "logprobs")
    nodes = [n for n in spec.graphs[TRAIN].nodes if n.group == known.group]
    updates = [n for n in nodes if n.operation.updates]
    lora, saves, trains = getattr(config, "lora", None), spec.checkpoint.writes, bool(updates)
    node = next(iter([*updates, *nodes]), None)
    passes = update_sizes(spec, node, sizes) if node is not None else None
    unknown, found = "", 0
    if passes is not None and passes.rows_per_microbatch and sizes.tokens_a_row:
        try:
            found = _activations(
                config, sizes, passes, size, trains=trains, gpu_bytes=gpu_bytes * known.on_gpu
            )
        except ValueError as error:
            if isinstance(error, UserError) and config.engine is None:
                raise
            unknown = f"activations: {error}"
    stages: tuple[StageMemory, ...] = ()
    if config.pipeline_parallel > 1 and passes is not None:
        stages = stage_memory(
            size,
            config,
            passes,
            chunks=chunks,
            ranks=known.ranks,
            activations=found,
            trains=trains,
            lora=lora,
            saves=saves,
        )
        largest = max(stages, key=lambda stage: stage.peak)
        made, found = largest.made, largest.activations
    else:
        made = training_memory(size, config, ranks=known.ranks, trains=trains, lora=lora, saves=saves)
    if config.engine is not None:
        unknown = unknown or "counted as FsdpEngine holds it"
    rest, in_pass, host = placed(made, config, on_gpu=known.on_gpu)
    if found:
        in_pass = with_activations(in_pass, found, made)
    if not known.on_gpu:
        in_pass["heap"] = round(HELD_FREE * sum(in_pass.values()))
    phases = {REST: _present(rest), "update" if trains else "logprobs": _present(in_pass)}
    stored = checkpoint_bytes(size, config, lora) if saves and trains else 0
    return replace(
        known, phases=phases, on_host=_present(host), checkpoint=stored, stages=stages, unknown=unknown
    )


def placed(
    made: TrainingMemory, config: ModelConfig, *, on_gpu: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the tensors at rest, the extra ones in a pass, and those on the host, by name."""
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
    return rest, in_pass, host


def with_activations(
    in_pass: Mapping[str, int], activations: int, made: TrainingMemory
) -> dict[str, int]:
    """Return the extra tensors in a pass, including its activations."""
    return {
        **in_pass,
        "gathered gradients": made.exchanged_beside(activations),
        "activations": activations,
    }


def _head(config: Any) -> Head:
    """Return the kind of a model's output for each token."""
    return "rewards" if isinstance(config, RewardModelConfig) else getattr(config, "head", "logprobs")


def _activations(
    config: Any, sizes: StepSizes, passes: UpdateSizes, size: ModelSize, *, trains: bool, gpu_bytes: int
) -> int:
    """Return the bytes of a microbatch's activations, including logits, without gradients."""
    from ...workers.training.activations import PassShape, pass_bytes

    response = max(1, round(sizes.response_tokens))
    shape = PassShape(passes.rows_per_microbatch, max(2, round(sizes.tokens_a_row)), response)
    several = passes.microbatches_per_replica > passes.optimizer_steps
    lora = getattr(config, "lora", None)
    found = pass_bytes(
        config.model,
        find_model_config(config.model).parent,
        shape,
        head=_head(config),
        dtype=config.dtype,
        trains=trains,
        gradients_stay=several,
        lora=lora,
        checkpointing=getattr(config, "activation_checkpointing", False),
        gpu_bytes=gpu_bytes,
    )
    found //= getattr(config, "sequence_parallel", 1)
    if not trains or lora is not None:
        return found
    # `found` counts complete gradients as they appear; a rank's own gradients are counted separately.
    return max(0, found - 4 * size.parameters)


def _generating(known: GroupMemory, config: Any, sizes: StepSizes, gpu_bytes: int) -> GroupMemory:
    size = model_size(config.model)
    on_gpu = known.on_gpu
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    rest = {"weights": size.parameters * BYTES[dtype]}
    if config.engine != "vllm":
        settings = complete_text_settings(config.model)
        at_once = min(config.max_num_seqs, sizes.rows)
        heads, of_head = (
            settings.num_key_value_heads or num_heads(settings.to_dict()),
            head_dim(settings.to_dict()),
        )
        # keys and values of one token in all layers
        token = 2 * settings.num_hidden_layers * (heads or 0) * (of_head or 0) * BYTES[dtype]
        cache = round(at_once * sizes.tokens_a_row * token)
        made = {CACHE: cache, "logits": 2 * 4 * at_once * size.vocabulary}
        return replace(known, phases={REST: _present(rest), "generate": _present(made)})
    rest["weights"] //= config.tensor_parallel
    if on_gpu:
        share = (
            config.gpu_memory_utilization
            or config.engine_arguments(
                str(config.model), max_context=config.max_context, dtype=dtype, seed=0, free_share=1.0
            )["gpu_memory_utilization"]
        )
        left = int(share * gpu_bytes) - rest["weights"]
        cache = int(config.kv_cache_gib * GIB) if config.kv_cache_gib is not None else max(0, left)
    else:
        cache = config.engine_arguments(
            str(config.model), max_context=config.max_context, dtype=dtype, seed=0, free_share=None
        )["kv_cache_memory_bytes"]
    rest[CACHE] = cache
    return replace(known, phases={REST: _present(rest)})


def _present(found: Mapping[str, int]) -> dict[str, int]:
    return {what: number for what, number in found.items() if number}
