"""Memory of each group and rank of a run, in each phase, as far as it follows from settings and from the files of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...dataflow.handle import Handle
from ...workers.training.engine import ModelConfig
from ...workers.training.memory import BYTES, CPU_TOKENS, GPU_TOKENS, checkpoint_bytes, model_size, training_memory
from ..graph_run import TRAIN
from ..placement import Place
from ..run_spec import RunSpec

GIB = 1 << 30


@dataclass(frozen=True)
class GroupMemory:
    """What each rank of a group holds, in bytes by name; without activations, and without what Python and its libraries take."""

    group: str
    ranks: int
    pool: str
    phases: Mapping[str, Mapping[str, int]]
    """Phase ("at rest", "generate", ...) -> what -> bytes; a phase names what it has beside what is there at rest."""
    checkpoint: int = 0
    """Of the whole group in a checkpoint."""
    unknown: str = ""
    """Why nothing is known of it."""

    @property
    def peak(self) -> int:
        """Of a rank, in its largest phase."""
        rest = self.phases.get("at rest", {})
        return sum(rest.values()) + max(
            (sum(p.values()) for name, p in self.phases.items() if name != "at rest"), default=0
        )


def group_memory(spec: RunSpec, name: str, handle: Handle, place: Place) -> GroupMemory:
    """The memory of a group.

    Args:
        spec: the run.
        name: of the group.
        handle: of the group.
        place: where it runs.
    """
    config: Any = handle.config
    ranks = 1 if spec.backend.in_process else place.ranks
    known = GroupMemory(name, ranks, place.pool.name, {})
    if getattr(config, "model", None) is None:
        return known
    try:
        if isinstance(config, ModelConfig):
            return _trained(spec, known, config, on_gpu=bool(place.pool.gpus))
        return _generating(known, config, on_gpu=bool(place.pool.gpus)) if hasattr(config, "engine") else known
    except (OSError, ValueError) as error:
        return GroupMemory(name, ranks, place.pool.name, {}, unknown=str(error))


def _trained(spec: RunSpec, known: GroupMemory, config: Any, *, on_gpu: bool) -> GroupMemory:
    size = model_size(config.model)
    updates = [n for n in spec.graphs[TRAIN].nodes if n.operation.updates and n.group == known.group]
    tokens = config.microbatch_tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)
    lora, saves, trains = getattr(config, "lora", None), spec.checkpoint.writes, bool(updates)
    made = training_memory(size, config, ranks=known.ranks, trains=trains, lora=lora, tokens=tokens, saves=saves)
    rest = {"weights": made.weights, "gradients": made.gradients, "moments": made.moments}
    in_pass = {"gathered weights": made.gathered, "logits": made.logits}
    phases = {"at rest": _present(rest), "update" if trains else "logprobs": _present(in_pass)}
    if made.snapshot:
        phases["checkpoint"] = {"copy on the host": made.snapshot}
    stored = checkpoint_bytes(size, config, lora) if saves and trains else 0
    return GroupMemory(known.group, known.ranks, known.pool, phases, stored)


def _generating(known: GroupMemory, config: Any, *, on_gpu: bool) -> GroupMemory:
    size = model_size(config.model)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    split = config.tensor_parallel if config.engine == "vllm" else 1
    rest = {"weights": size.parameters * BYTES[dtype] // split}
    if config.engine == "vllm" and not on_gpu:
        arguments = config.engine_arguments(
            str(config.model), max_context=config.max_context, dtype=dtype, seed=0, free_share=None
        )
        rest["key/value cache"] = arguments["kv_cache_memory_bytes"]
    elif config.engine == "vllm" and config.kv_cache_gib is not None:
        rest["key/value cache"] = int(config.kv_cache_gib * GIB)
    return GroupMemory(known.group, known.ranks, known.pool, {"at rest": rest})


def _present(found: Mapping[str, int]) -> dict[str, int]:
    return {what: number for what, number in found.items() if number}
