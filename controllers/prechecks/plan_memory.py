"""Memory of each group and rank of a run, in each phase: from settings, the files of models, and a pass without memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...dataflow.config import GIB, MIB
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

# Resident
#
# Resident memory of a process before it holds a tensor: the interpreter, torch, transformers,
# vLLM, and what they allocate for themselves.
#
# Measured, not computed: `resident_bytes` of each group in runs of the examples (docs/metrics.md),
# less what is planned for their tensors, on Linux with Python 3.11, torch 2.13 for CPUs,
# transformers 5.19, vLLM 0.32 and Ray 2.60; `benchmarks/operate.py --only plan` compares them
# anew. Files that several processes have mapped (libraries, above all) are counted in each. A
# torch for CUDA takes more.


TRAINING = 600 * MIB
"""A rank with an engine that trains, or that only computes log-probabilities."""
VLLM = 785 * MIB
TRANSFORMERS = 570 * MIB
"""A rollout with the engine of `transformers`."""
WITH_TORCH = 350 * MIB
"""A rank for the functions of graphs, where one of them uses torch (advantages do)."""
PLAIN = 200 * MIB
"""A rank without torch: rewards, samples, other functions. It begins with 140, and grows to this with the first rows and texts."""
DRIVER = 240 * MIB
"""The driver, with Ray."""
TORCH = 405 * MIB
"""More of a driver whose script has imported torch, to prepare a model, say."""
ONE_PROCESS = 540 * MIB
"""Driver and all groups together, under `Local`, without Ray."""
HELD_FREE = 0.15
"""Of what a pass makes and gives back, on a CPU: the share by which the heap is larger than what is in use. Two FSDP2 ranks of a model of
84M parameters held 11 to 15 % more than their tensors took at most."""


def resident_bytes(name: str, handle: Handle, functions: Iterable[Callable[..., Any]]) -> int:
    """What a rank of a group takes before it holds a tensor.

    Args:
        name: of the group.
        handle: of the group.
        functions: that the graphs of the run are made of.
    """
    if isinstance(handle.config, ModelConfig):
        return TRAINING
    engine = getattr(handle.config, "engine", None)
    if engine is not None:
        return VLLM if engine == "vllm" else TRANSFORMERS
    return WITH_TORCH if name == FUNCTIONS and any(map(_uses_torch, functions)) else PLAIN


def driver_bytes(*, in_process: bool) -> int:
    """What the driver takes: to be asked before the planner itself imports torch."""
    return ONE_PROCESS if in_process else DRIVER + TORCH * ("torch" in sys.modules)


def _uses_torch(function: Callable[..., Any]) -> bool:
    return "torch" in vars(sys.modules.get(function.__module__, object()))


REST = "at rest"
CACHE = "key/value cache"


@dataclass(frozen=True)
class GroupMemory:
    """What each rank of a group holds, in bytes by name."""

    group: str
    ranks: int
    pool: str
    on_gpu: bool
    """Its tensors are on a GPU, but for those that are said to be on the host."""
    libraries: int
    """Host memory of a rank before it holds a tensor; 0: it is no process of its own."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Phase ("at rest", "generate", ...) -> what -> bytes; a phase names what it has beside what is there at rest."""
    on_host: Mapping[str, int] = field(default_factory=dict)
    """What -> bytes of tensors that are in host memory in any case, from the first step on."""
    checkpoint: int = 0
    """Of the whole group in a checkpoint."""
    stages: tuple[StageMemory, ...] = ()
    """Of a pipeline; the phases are those of its largest one."""
    unknown: str = ""
    """Why something is not known of it."""

    @property
    def moves(self) -> int:
        """Tensors of a rank that go to the host while another group has its turn on the GPU: not a cache, which is dropped."""
        return sum(number for what, number in self.phases.get(REST, {}).items() if what != CACHE)

    @property
    def peak(self) -> int:
        """Tensors of a rank in its largest phase, without those on the host."""
        rest = self.phases.get(REST, {})
        return sum(rest.values()) + max(
            (sum(p.values()) for name, p in self.phases.items() if name != REST), default=0
        )

    @property
    def host(self) -> int:
        """Host memory of a rank, at most."""
        return self.libraries + sum(self.on_host.values()) + (0 if self.on_gpu else self.peak)

    @property
    def device(self) -> int:
        """Memory of a rank on its GPU, at most."""
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
    """The memory of a group.

    Args:
        spec: the run.
        name: of the group.
        handle: of the group.
        place: where it runs.
        sizes: of a step of training.
        gpu_bytes: memory of a GPU of this machine; 0: it has none.
        chunks: of each stage, if the group is a pipeline.

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
        return replace(known, on_gpu=False)
    try:
        if isinstance(config, ModelConfig):
            return _trained(spec, known, config, sizes, gpu_bytes, chunks)
        return _generating(known, config, sizes, gpu_bytes) if hasattr(config, "engine") else known
    except (OSError, ValueError) as error:
        if isinstance(error, UserError) and Path(config.model).expanduser().is_dir():
            raise  # a run would say the same; what is still to be downloaded, it would not
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
    """What a rank holds at rest, what comes in a pass, and what lies on the host in any case, without activations."""
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
    """What comes in a pass, with its activations."""
    return {
        **in_pass,
        "gathered gradients": made.exchanged_beside(activations),
        "activations": activations,
    }


def _head(config: Any) -> Head:
    """What the model of a group says of each token."""
    return "rewards" if isinstance(config, RewardModelConfig) else getattr(config, "head", "logprobs")


def _activations(
    config: Any, sizes: StepSizes, passes: UpdateSizes, size: ModelSize, *, trains: bool, gpu_bytes: int
) -> int:
    """Of a microbatch, logits included: what lives in a pass, without gradients."""
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
    # The pass counts complete gradients, as they come; what a rank keeps of them stands beside.
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
