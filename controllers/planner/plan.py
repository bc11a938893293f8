"""Plan: what a run will be, from its checked description: sizes of a step, groups, memory, bytes on the disk, time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...dataflow.graph import TRAIN
from ...workers.node_memory import node_memory
from ...workers.training.engine import ModelConfig
from ..placement import OTHER, machine_cpus, machine_gpus
from ..run_spec import RunSpec
from ..simulation.calibrate import calibrate
from ..simulation.simulated import Simulated
from .memory import GroupMemory, group_memory
from .resident import driver_bytes
from .sequences import SequencePlan, sequence_plan
from .sizes import StepSizes, UpdateSizes, sample_bytes, step_sizes, update_sizes
from .stages import PipelinePlan, chunks_of, pipeline_plan
from .step_time import StepTime, step_time


@dataclass(frozen=True)
class Machine:
    """What this machine has."""

    cpus: int
    gpus: int
    memory_bytes: int
    """Of the host, under the limit of a container."""
    memory_free: int
    gpu_bytes: int
    """Of one GPU; 0 where there is none."""
    disk_free: int
    """Where this directory lies."""
    planned_for: bool = False
    """Its GPUs are those of another machine, whose host memory is not known."""


@dataclass(frozen=True)
class Plan:
    """A run before it starts."""

    spec: RunSpec
    sizes: StepSizes
    updates: tuple[UpdateSizes, ...]
    groups: tuple[GroupMemory, ...]
    machine: Machine
    time: StepTime | None
    """Of a step; None: no costs are known."""
    driver_bytes: int
    """Host memory of the driver's process; under `Local` with the libraries of all groups."""
    pipelines: tuple[PipelinePlan, ...] = ()
    """Of updates whose group is a pipeline."""
    sequences: tuple[SequencePlan, ...] = ()
    """Of updates whose ranks share long rows, where their costs are known."""

    @property
    def host_bytes(self) -> int:
        """Host memory of all processes, at most: if all groups are at their peak at once. What a group keeps on GPUs goes to the host while
        another one has its turn there."""
        away = 0
        for turns in self._turns.values():
            moves = [group.ranks * group.moves for group in turns]
            away += sum(moves) - min(moves)
        return self.driver_bytes + away + sum(group.ranks * group.host for group in self.groups)

    @property
    def device_bytes(self) -> Mapping[str, int]:
        """Pool with GPUs -> bytes on each of its GPUs, at most: those of the largest of its groups, which take turns."""
        found: dict[str, int] = {}
        for pool, turns in self._turns.items():
            gpus = max(1, self.spec.placement[turns[0].group].pool.gpus)
            found[pool] = max(group.device * max(1, round(group.ranks / gpus)) for group in turns)
        return found

    @property
    def _turns(self) -> Mapping[str, list[GroupMemory]]:
        """Pool with GPUs -> the groups that are on them."""
        found: dict[str, list[GroupMemory]] = {}
        for group in self.groups:
            if group.on_gpu:
                found.setdefault(group.pool, []).append(group)
        return found

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: models, optimizers, without rows in flight."""
        return sum(group.checkpoint for group in self.groups)

    @property
    def checkpoints(self) -> int:
        """How many lie on the disk at once: those that are kept, the one that is being written, and the best one if that is kept."""
        config = self.spec.checkpoint
        return config.keep + 1 + (config.best is not None) if config.writes else 0

    @property
    def sample_bytes(self) -> int:
        """Of the samples of a run, at most, without those of evaluations."""
        every = self.spec.record_every
        return sample_bytes(self.spec.graphs[TRAIN], self.sizes) * (self.spec.schedule.steps // every) if every else 0

    @property
    def disk_bytes(self) -> int:
        """Of a run, at most."""
        return self.checkpoint_bytes * self.checkpoints + self.sample_bytes


def plan_of(spec: RunSpec, like: Path | None = None) -> Plan:
    """Plan a run.

    Args:
        spec: as the driver has checked it.
        like: directory of an earlier run, whose timeline says what calls cost; None: there is none.

    Raises:
        UserError: that run has no timeline.
    """
    driver = driver_bytes(in_process=spec.backend.in_process)
    train, machine = spec.graphs[TRAIN], this_machine()
    sizes = step_sizes(train, spec.schedule.prompts_per_step)
    costs, of = None, "the costs of the simulation"
    if like is not None:
        costs, of = calibrate(like), f"the calls of {like}"
    elif isinstance(spec.backend, Simulated):
        costs = spec.backend.costs
    updating = {node.group: node for node in train.nodes if node.operation.updates and node.group is not None}
    configs = {n: h.config for n, h in spec.handles.items() if isinstance(h.config, ModelConfig)}
    chunks = {n: chunks_of(configs[n], node.name, costs) for n, node in updating.items() if n in configs}
    groups = tuple(
        group_memory(spec, n, h, spec.placement[n], sizes, machine.gpu_bytes, chunks.get(n, 1))
        for n, h in spec.handles.items()
    )
    updates = tuple(update_sizes(spec, node, sizes) for node in train.nodes if node.operation.updates)
    of_groups = list(zip(updates, (str(n.group) for n in train.nodes if n.operation.updates), strict=True))
    pipelines = [pipeline_plan(configs[g], update, costs) for update, g in of_groups if g in configs]
    time = step_time(spec, sizes, costs, of) if costs is not None else None
    shared = [sequence_plan(update, sizes, costs, spec.placement[g].ranks) for update, g in of_groups]
    parts = tuple(filter(None, pipelines)), tuple(filter(None, shared))
    return Plan(spec, sizes, updates, groups, machine, time, driver, *parts)


def this_machine() -> Machine:
    """What this machine has now; with the GPUs of another one, if that is planned for."""
    memory = node_memory()
    total, used = (memory.limit_bytes, memory.used_bytes) if memory else (0, 0)
    gpus, gpu_bytes = machine_gpus(), 0
    if (other := OTHER.get()) is not None:
        gpu_bytes = other.gpu_bytes
    elif gpus:
        import torch

        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    return Machine(machine_cpus(), gpus, total, total - used, gpu_bytes, shutil.disk_usage(".").free, other is not None)
