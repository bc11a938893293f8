"""Memory of each group and rank of a run, from settings, model files, and a pass on fake
tensors."""

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
from ...workers.models.model_folder import complete_text_settings, find_model_config
from ...workers.models.transformer import Transformer
from ...workers.training.engine import Head, ModelConfig
from ...workers.training.lora import Lora
from ...workers.training.memory import (
    BYTES,
    FLOAT32,
    ModelSize,
    TrainingMemory,
    checkpoint_bytes,
    folder_bytes,
    model_size,
    training_memory,
)
from ..placement import Place
from ..planner.phase_memory import (
    ASLEEP,
    CUDA,
    ENGINES,
    HELD_FREE,
    ON_GPU,
    ON_GPU_TRAINING,
    TRAINING,
    placed,
    with_activations,
)
from ..run_spec import RunSpec
from .plan_sizes import StepSizes, UpdateSizes, schedule_of, update_sizes

# Memory of other processes without tensors (`planner/phase_memory.py` has the measurement)

WITH_TORCH = 350 * MIB
"""A rank for the functions of graphs if one of them uses torch, as advantages do."""
PLAIN = 200 * MIB
"""A rank without torch: rewards, samples, other functions. Grows with rows, from 140 MiB."""
DRIVER = 240 * MIB
TORCH = 405 * MIB
"""Extra memory of a driver whose script has imported torch, for example to prepare a model."""
ONE_PROCESS = 540 * MIB
"""Driver and all groups together, under `Local`."""


def _resident_bytes(
    name: str, handle: Handle, functions: Iterable[Callable[..., Any]], *, on_gpu: bool
) -> int:
    """Return the host memory of a rank before it holds a tensor."""
    engine = getattr(handle.config, "engine", None)
    if on_gpu and getattr(handle.config, "model", None) is not None:
        return ON_GPU.get(str(engine), ON_GPU_TRAINING)
    if isinstance(handle.config, ModelConfig):
        return TRAINING
    if engine is not None:
        return ENGINES.get(engine, ENGINES["transformers"])
    modules = (sys.modules.get(function.__module__) for function in functions)
    uses_torch = name == FUNCTIONS and any(hasattr(module, "torch") for module in modules)
    return WITH_TORCH if uses_torch else PLAIN


def driver_bytes(*, in_process: bool) -> int:
    """Return the memory of the driver. Call it before the planner imports torch."""
    return ONE_PROCESS if in_process else DRIVER + TORCH * ("torch" in sys.modules)


# Memory of a group

WAYS: tuple[Mapping[str, Any], ...] = (
    {},
    {"activation_checkpointing": "elementwise"},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "offload": "moments"},
    {"activation_checkpointing": True, "offload": "everything"},
)
"""Ways of training on GPUs, from the fastest to the most frugal."""
REST = "at rest"
CACHE = "key/value cache"
CONTEXT = "CUDA"


@dataclass(frozen=True)
class _StageMemory:
    layers: int
    """Number of the model's layers on this stage."""
    in_flight: float
    """Number of microbatches whose activations the stage keeps; a fraction with chunks."""
    made: TrainingMemory
    activations: int
    """[bytes] Activations of all microbatches in flight."""

    @property
    def peak(self) -> int:
        """Peak bytes of an update, including activations."""
        made = self.made
        exchanged = made.exchanged_beside(self.activations)
        return (
            made.weights + made.gradients + made.moments + made.gathered + exchanged + self.activations
        )


def stage_memory(
    size: ModelSize,
    config: ModelConfig,
    passes: UpdateSizes,
    *,
    chunks: int,
    ranks: int,
    activations: int,
    trains: bool,
    lora: Lora | None,
    saves: bool,
) -> tuple[_StageMemory, ...]:
    """Return the memory of a rank of each pipeline stage. Divides layers evenly among the stages,
    and a stage's memory among its ranks.

    Args:
        activations: bytes of one microbatch's activations in the whole model, including logits.
        trains: whether the group is updated. Otherwise, a stage keeps one microbatch's activations.
    """
    number = config.pipeline_parallel
    schedule = schedule_of(config, passes, chunks)
    found: list[_StageMemory] = []
    for stage, own in enumerate(size.of_stages(number, chunks)):
        of_stage = max(1, ranks // number)
        made = training_memory(own, config, ranks=of_stage, trains=trains, lora=lora, saves=saves)
        in_flight = schedule.in_flight(stage) / chunks if trains else 1.0
        kept = round(activations * in_flight * own.layers / size.layers)
        found.append(_StageMemory(own.layers, in_flight, made, kept))
    return tuple(found)


@dataclass(frozen=True)
class GroupMemory:
    """Memory of each rank of a group, in bytes."""

    group: str
    ranks: int
    pool: str
    on_gpu: bool
    """Whether its tensors are on a GPU, except for those in `on_host`."""
    libraries: int
    """Host memory of a rank before it holds a tensor, or 0 if it is not a separate process."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Phase ("at rest", "generate", ...) -> part -> bytes. Other phases add to "at rest"."""
    on_host: Mapping[str, int] = field(default_factory=dict)
    """Name of a part -> bytes of tensors that are always in host memory, from the first step on."""
    moves: int = 0
    """Bytes of a rank that host memory also holds while another group has its turn on the GPU."""
    idle: int = 0
    """Bytes of a rank that stay on the GPU while another group has its turn."""
    folder: int = 0
    """Host memory of rank 0 alone while it writes the model's folder of a checkpoint."""
    checkpoint: int = 0
    """Bytes of the whole group in a checkpoint."""
    stages: tuple[_StageMemory, ...] = ()
    """Stages of a pipeline. `phases` describes the largest one."""
    unknown: str = ""
    """Why some of its memory is unknown."""

    @property
    def peak(self) -> int:
        """Bytes of a rank's tensors in its largest phase, without tensors on the host."""
        of_phase = {name: sum(found.values()) for name, found in self.phases.items()}
        return of_phase.pop(REST, 0) + max(of_phase.values(), default=0)

    @property
    def host(self) -> int:
        return self.libraries + sum(self.on_host.values()) + (0 if self.on_gpu else self.peak)

    @property
    def device(self) -> int:
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
    """Return the memory of a group. `gpu_bytes` is the memory of a GPU, or 0 without GPUs. Raises a
    `UserError` if its model's files are damaged, or do not fit its settings."""
    config: Any = handle.config
    alone = spec.backend.in_process
    functions = (n.function for graph in spec.graphs.values() for n in graph.nodes if n.group is None)
    on_gpu = bool(place.pool.gpus)
    libraries = 0 if alone else _resident_bytes(name, handle, functions, on_gpu=on_gpu)
    ranks = 1 if alone else place.ranks
    known = GroupMemory(name, ranks, place.pool.name, on_gpu, libraries)
    if getattr(config, "model", None) is None:
        # A worker without a model holds no tensors to plan for.
        return replace(known, on_gpu=False)
    try:
        if isinstance(config, ModelConfig):
            return _trained(spec, known, config, sizes, gpu_bytes, chunks)
        if hasattr(config, "engine"):
            return _generating(known, config, sizes, gpu_bytes)
        return known
    except (OSError, ValueError) as error:
        if isinstance(error, UserError) and Path(config.model).expanduser().is_dir():
            raise  # the run would fail, too; a model that is not downloaded yet is no error
        return replace(known, unknown=str(error))


def _trained(
    spec: RunSpec, known: GroupMemory, config: Any, sizes: StepSizes, gpu_bytes: int, chunks: int
) -> GroupMemory:
    head: Head = getattr(config, "head", "logprobs")
    size = model_size(config.model, scalar=head != "logprobs")
    nodes = [n for n in spec.graphs[TRAIN].nodes if n.group == known.group]
    updates = [n for n in nodes if n.operation.updates]
    lora, saves, trains = getattr(config, "lora", None), spec.checkpoint.writes, bool(updates)
    node = next(iter([*updates, *nodes]), None)
    passes = update_sizes(spec, node, sizes) if node is not None else None
    unknown, found = "", 0
    if passes is not None and passes.rows_per_microbatch and sizes.tokens_a_row:
        on_gpu_bytes = gpu_bytes * known.on_gpu
        try:
            found = _activations(config, sizes, passes, size, trains=trains, gpu_bytes=on_gpu_bytes)
        except ValueError as error:
            if isinstance(error, UserError) and config.engine is None:
                raise
            unknown = f"activations: {error}"
    about: dict[str, Any] = {"ranks": known.ranks, "trains": trains, "lora": lora, "saves": saves}
    stages: tuple[_StageMemory, ...] = ()
    if config.pipeline_parallel > 1 and passes is not None:
        stages = stage_memory(size, config, passes, chunks=chunks, activations=found, **about)
        largest = max(stages, key=lambda stage: stage.peak)
        made, found = largest.made, largest.activations
    else:
        about |= {"nodes": spec.placement[known.group].pool.nodes or 1, "gpu_bytes": gpu_bytes}
        made = training_memory(size, config, **about)
    if config.engine is not None:
        unknown = unknown or "counted as FsdpEngine holds it"
    rest, in_pass, host = placed(made, config, on_gpu=known.on_gpu)
    averaged = FLOAT32 * size.parameters if getattr(config, "mix", None) is not None else 0
    host["moving average"] = averaged // known.ranks
    host["copy for a checkpoint"] += saves * averaged // known.ranks
    saved = (
        checkpoint_bytes(size, config, lora)
        if trains
        else averaged and averaged + folder_bytes(size, config, None)
    )
    moves = sum(rest.values())
    if found:
        in_pass = with_activations(in_pass, found, made)
    if known.on_gpu:
        rest[CONTEXT] = CUDA
    else:
        in_pass["heap"] = round(HELD_FREE * sum(in_pass.values()))
    return replace(
        known,
        phases={REST: _present(rest), "update" if trains else "logprobs": _present(in_pass)},
        on_host=_present(host),
        moves=moves * known.on_gpu,
        idle=CUDA * known.on_gpu,
        folder=folder_bytes(size, config, lora) if saves and (trains or averaged) else 0,
        checkpoint=saved if saves else 0,
        stages=stages,
        unknown=unknown,
    )


def _activations(
    config: Any, sizes: StepSizes, passes: UpdateSizes, size: ModelSize, *, trains: bool, gpu_bytes: int
) -> int:
    """Return the bytes of a microbatch's activations, including logits, without gradients."""
    from ...workers.training.activations import pass_bytes

    several = passes.microbatches_per_replica > passes.optimizer_steps
    lora = getattr(config, "lora", None)
    found = pass_bytes(
        config.model,
        find_model_config(config.model).parent,
        rows=passes.rows_per_microbatch,
        length=max(2, round(sizes.tokens_a_row)),
        predicted=max(1, round(sizes.response_tokens)),
        head=getattr(config, "head", "logprobs"),
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
    # `found` counts complete gradients, but a rank's own gradients are counted separately.
    return max(0, found - 4 * size.parameters)


def _generating(known: GroupMemory, config: Any, sizes: StepSizes, gpu_bytes: int) -> GroupMemory:
    size = model_size(config.model)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if known.on_gpu else "float32"
    rest = {"weights": size.parameters * BYTES[dtype]}
    if config.engine != "vllm":
        at_once, cache = min(config.max_num_seqs, sizes.rows), 0
        try:
            model = Transformer.of(complete_text_settings(config.model).to_dict())
            cache = round(at_once * model.kv_bytes(sizes.tokens_a_row, BYTES[dtype], windows=False))
        except ValueError as error:
            known = replace(known, unknown=f"keys and values: {error}")
        made = {CACHE: cache, "logits": 2 * 4 * at_once * size.vocabulary}
        if known.on_gpu:
            known = replace(known, moves=rest["weights"], idle=CUDA)
            rest[CONTEXT] = CUDA
        return replace(known, phases={REST: _present(rest), "generate": _present(made)})
    rest["weights"] //= config.tensor_parallel

    def chosen(name: str, free_share: float | None) -> Any:
        settings = {"max_context": config.max_context, "dtype": dtype, "seed": 0}
        return config.engine_arguments(str(config.model), **settings, free_share=free_share)[name]

    if not known.on_gpu:
        rest[CACHE] = chosen("kv_cache_memory_bytes", None)
        return replace(known, phases={REST: _present(rest)})
    # A run starts with all groups asleep, and weights that do not arrive again before the engine
    # generates are kept, so there is a time when the host has them.
    kept = rest["weights"]
    rest[CONTEXT] = CUDA
    if config.kv_cache_gib is not None:
        rest[CACHE] = int(config.kv_cache_gib * GIB)
    else:
        share = config.gpu_memory_utilization or chosen("gpu_memory_utilization", 1.0)
        # vLLM's share covers the weights and CUDA as well as the cache.
        rest[CACHE] = max(0, int(share * gpu_bytes) - sum(rest.values()))
    return replace(known, phases={REST: _present(rest)}, moves=kept, idle=ASLEEP)


def _present(found: Mapping[str, int]) -> dict[str, int]:
    return {what: number for what, number in found.items() if number}
