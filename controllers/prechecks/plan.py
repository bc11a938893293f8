"""The plan of a run: sizes of a step, groups, memory, disk space and time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...dataflow.byte_units import gib
from ...dataflow.errors import UserError
from ...dataflow.graph import TRAIN
from ...dataflow.metric_names import FUNCTIONS
from ...workers.dispatch import RowCost, balance
from ...workers.node_memory import node_memory
from ...workers.training.engine import ModelConfig
from ...workers.training.microbatch_plan import OptimizerSteps
from ..node_layout import (
    OTHER,
    THIS_MACHINE,
    Nodes,
    machine_cpus,
    machine_gpus,
    with_default_ranks,
)
from ..run_spec import RunSpec
from ..schedule import Synchronous
from ..simulation.backend import Simulated
from ..simulation.costs import CostModel, Generation, SequenceParallelCost, bound, calibrate
from .plan_memory import WAYS, GroupMemory, driver_bytes, group_memory
from .plan_sizes import (
    PipelinePlan,
    StepSizes,
    UpdateSizes,
    pipeline_plan,
    sample_bytes,
    step_sizes,
    update_sizes,
)

# Groups of ranks that share long rows


@dataclass(frozen=True)
class _SequencePlan:
    """Sequence-parallel groups of an update, for the rows of one step."""

    node: str
    degrees: tuple[int, ...]
    """Number of ranks of each group, in the slowest optimizer step."""
    seconds: float
    """[s] Time of the slowest group, summed over the optimizer steps."""
    gap: float
    """Excess of `seconds` over the lower bound of any plan, as a share of that bound."""
    equal_degree: int
    """The smallest uniform group size that holds the longest row."""
    equal_s: float
    """[s] Time with groups of that size."""
    optimizer_steps: int
    """Number of optimizer steps of the update, each with its own groups."""


def sequence_plan(
    update: UpdateSizes, sizes: StepSizes, costs: CostModel | None, ranks: int, seed: int = 0
) -> _SequencePlan | None:
    """Choose groups for each optimizer step of the replica with the longest row. Return None if the
    cost is not a `SequenceParallelCost`. Raises a `UserError` if a replica has no room for the
    longest row."""
    cost = costs.linear(update.node) if costs is not None else None
    if costs is None or not isinstance(cost, SequenceParallelCost):
        return None
    lengths = _lengths(sizes, costs, seed)
    lengths = lengths[balance(RowCost(cost.attention_length)(lengths), max(1, ranks // cost.ranks))[0]]
    # the same optimizer steps as in a simulation
    cuts = update.steps.cut(np.arange(len(lengths)), (seed, 0))
    needed = -(-int(lengths.max()) // cost.memory_tokens)
    plans = [cost.groups(lengths[cut]) for cut in cuts]  # refuses a row that does not fit
    equal = next(d for d in range(max(1, needed), cost.ranks + 1) if cost.ranks % d == 0)
    seconds, bound_s = sum(plan.seconds for plan in plans), sum(plan.bound_s for plan in plans)
    return _SequencePlan(
        update.node,
        max(plans, key=lambda plan: plan.seconds).degrees,
        seconds,
        seconds / bound_s - 1 if bound_s else 0.0,
        equal,
        sum(cost.groups(lengths[cut], equal).seconds for cut in cuts),
        len(plans),
    )


def _lengths(sizes: StepSizes, costs: CostModel, seed: int) -> np.ndarray:
    """Return each row's number of tokens: drawn as in a simulation, or else the expected number."""
    for cost in costs.nodes.values():
        if isinstance(cost, Generation):
            each = max(1, sizes.rows // max(1, sizes.prompts))
            prompts = range(sizes.prompts)
            drawn = [cost.draw_lengths((seed, prompt), prompt, each) for prompt in prompts]
            return np.concatenate(drawn) + round(sizes.prompt_tokens)
    return np.full(sizes.rows, max(1, round(sizes.tokens_a_row)))


# Time of a step, from the costs of a simulation or of an earlier run


@dataclass(frozen=True)
class _StepTime:
    """Time of a training step, without the driver, evaluations and checkpoints."""

    seconds: float
    nodes: Mapping[str, float]
    """[s] Time by node, or by group and method outside the graph; empty if unknown."""
    of: str
    """Source of the costs, in words."""
    at_best: bool
    """Whether `seconds` is a lower bound, with all possible overlap."""


def _step_time(spec: RunSpec, sizes: StepSizes, costs: CostModel, of: str) -> _StepTime:
    graph, places = spec.graphs[TRAIN], spec.placement
    # Response lengths vary, so only a bound is known without a simulation.
    if any(isinstance(cost, Generation) for cost in costs.nodes.values()):
        placed = {n: place for n, place in places.items() if n == FUNCTIONS or n in graph.handles}
        found = bound(costs, graph, placed, prompts_per_step=sizes.prompts, seed=spec.seed)
        return _StepTime(found.seconds, {}, of, at_best=True)
    nodes: dict[str, float] = {}
    for node in graph.nodes:
        group = node.group or FUNCTIONS
        config: Any = spec.handles[group].config
        ranks = 1 if spec.backend.in_process else places[group].ranks
        replicas = max(1, ranks // costs.replica_ranks(group, config))
        level = node.level if node.makes_level is None else node.makes_level
        rows = sizes.rows_of_level[level] / replicas
        tokens, steps = rows * sizes.tokens(level), OptimizerSteps.of_node(node)
        nodes[node.name] = costs.linear(node.name).seconds(rows, tokens, steps)
    # A step makes one of each of these calls outside the graph.
    methods = ("publish_weights", "receive_weights", "onload", "offload")
    beside = (f"{group}.{method}" for group in spec.handles for method in methods)
    nodes |= {name: costs.linear(name).fixed_s for name in beside if name in costs.nodes}
    nodes = {name: seconds for name, seconds in nodes.items() if seconds}
    if isinstance(spec.schedule, Synchronous):
        return _StepTime(sum(nodes.values()), nodes, of, at_best=False)
    # In other schedules, pools work in parallel, while calls on one pool take turns.
    pools: dict[str, float] = {}
    for name, seconds in nodes.items():
        group = name.partition(".")[0]
        pool = places[group if group in places else FUNCTIONS].pool.name
        pools[pool] = pools.get(pool, 0.0) + seconds
    return _StepTime(max(pools.values(), default=0.0), nodes, of, at_best=True)


# Plan


@dataclass(frozen=True)
class _Machine:
    cpus: int
    gpus: int
    memory_bytes: int
    """Host memory, within the container's limit."""
    memory_free: int
    gpu_bytes: int
    """Memory of one GPU, or 0 without GPUs."""
    disk_free: int
    """Free space on the disk of the current directory."""
    planned_for: bool = False
    """Whether the GPUs belong to another machine, whose host memory is unknown."""


@dataclass(frozen=True)
class Plan:
    spec: RunSpec
    sizes: StepSizes
    updates: tuple[UpdateSizes, ...]
    groups: tuple[GroupMemory, ...]
    machine: _Machine
    time: _StepTime | None
    """Time of a step, or None if no costs are known."""
    driver_bytes: int
    """Host memory of the driver's process; with `Local`, including the libraries of all groups."""
    pipelines: tuple[PipelinePlan, ...] = ()
    sequences: tuple[_SequencePlan, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Upper bound on the host memory of all processes, as if all groups peaked at once.

        A group's GPU tensors move to the host while another group has its turn on the GPU, and their
        memory there stays allocated.
        """
        away = sum(
            group.ranks * group.moves for of in self._turns.values() if len(of) > 1 for group in of
        )
        rest = sum(group.ranks * group.host + group.folder for group in self.groups)
        return self.driver_bytes + away + rest

    @property
    def device_bytes(self) -> Mapping[str, int]:
        """Pool with GPUs -> upper bound on the bytes on each GPU, while its largest group has its turn
        and the others are offloaded."""
        return {pool: max(self.on_device(pool).values()) for pool in self._turns}

    def on_device(self, pool: str) -> Mapping[str, int]:
        """Group on a pool -> bytes on each GPU while the group has its turn."""
        turns = self._turns[pool]
        gpus = max(1, self.spec.placement[turns[0].group].pool.gpus)
        each = {group.group: max(1, round(group.ranks / gpus)) for group in turns}
        idle = sum(group.idle * each[group.group] for group in turns)
        return {g.group: (g.device - g.idle) * each[g.group] + idle for g in turns}

    @property
    def _turns(self) -> Mapping[str, list[GroupMemory]]:
        """Pool with GPUs -> the groups on it."""
        found: dict[str, list[GroupMemory]] = {}
        for group in self.groups:
            if group.on_gpu:
                found.setdefault(group.pool, []).append(group)
        return found

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: models and optimizers, without rows in flight."""
        return sum(group.checkpoint for group in self.groups)

    @property
    def checkpoints(self) -> int:
        """Most checkpoints on disk at once: those kept, the one being written, and the best one."""
        config = self.spec.checkpoint
        return config.keep + 1 + (config.best is not None) if config.writes else 0

    @property
    def sample_bytes(self) -> int:
        """Upper bound on the bytes of a run's samples, without evaluations."""
        every = self.spec.record_every
        steps = self.spec.schedule.steps // every if every else 0
        return sample_bytes(self.spec.graphs[TRAIN], self.sizes) * steps

    @property
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints + self.sample_bytes


def plan_of(spec: RunSpec, like: Path | None = None) -> Plan:
    """Plan a run. If `like` is the directory of an earlier run, estimate times from that run's
    calls. Raises a `UserError` if that run has no timeline."""
    # Planning imports torch, so look first whether the script has.
    driver = driver_bytes(in_process=spec.backend.in_process)
    train, machine = spec.graphs[TRAIN], this_machine()
    sizes = step_sizes(train, spec.schedule.prompts_per_step)
    costs, of = None, "the costs of the simulation"
    if like is not None:
        costs, of = calibrate(like), f"the calls of {like}"
    elif isinstance(spec.backend, Simulated):
        costs = spec.backend.costs
    nodes = [node for node in train.nodes if node.operation.updates]
    updates = tuple(update_sizes(spec, node, sizes) for node in nodes)
    pipelines: list[PipelinePlan] = []
    sequences: list[_SequencePlan] = []
    chunks: dict[str, int] = {}
    for node, update in zip(nodes, updates, strict=True):
        name = str(node.group)
        config = spec.handles[name].config
        if isinstance(config, ModelConfig) and (pipeline := pipeline_plan(config, update, costs)):
            pipelines.append(pipeline)
            chunks[name] = pipeline.chunks
        if shared := sequence_plan(update, sizes, costs, spec.placement[name].ranks, spec.seed):
            sequences.append(shared)
    gpu = machine.gpu_bytes
    places = spec.placement
    if spec.backend.cluster is not None:  # it starts groups without a place with several ranks
        nodes_here = Nodes([(machine.cpus, machine.gpus)], THIS_MACHINE)
        places = with_default_ranks(places, spec.handles, nodes_here)
    groups = tuple(
        group_memory(spec, name, handle, places[name], sizes, gpu, chunks.get(name, 1))
        for name, handle in spec.handles.items()
    )
    time = _step_time(spec, sizes, costs, of) if costs is not None else None
    plans = tuple(pipelines), tuple(sequences)
    return Plan(spec, sizes, updates, groups, machine, time, driver, *plans)


def this_machine() -> _Machine:
    """Return this machine's resources, with the GPUs of the machine to plan for."""
    memory = node_memory()
    total, used = (memory.limit_bytes, memory.used_bytes) if memory else (0, 0)
    gpus, gpu_bytes = machine_gpus(), 0
    if (other := OTHER.get()) is not None:
        gpu_bytes = other.gpu_bytes
    elif gpus:
        gpu_bytes = _gpu_bytes()
    free, planned_for = shutil.disk_usage(".").free, other is not None
    return _Machine(machine_cpus(), gpus, total, total - used, gpu_bytes, free, planned_for)


def _gpu_bytes() -> int:
    """Return the memory of the smallest GPU, or 0 if the driver does not answer. torch would create a
    CUDA context in this process."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10.0, check=False).stdout
        return min((int(line) << 20 for line in said.splitlines()), default=0)
    return 0


# Alerts before a start

ROOM = 0.95
"""[share] Usable memory of a GPU; fragmentation takes the rest."""


def gpu_memory_alerts(spec: RunSpec) -> list[str]:
    """Return a message for each group whose plan exceeds the GPUs of this machine. Return none if the
    plan is unknown, for example on a driver's node without GPUs."""
    try:
        plan = plan_of(spec)
    except UserError:  # the workers report it
        return []
    return list(_too_large(plan))


def _too_large(plan: Plan) -> Iterator[str]:
    limit = ROOM * plan.machine.gpu_bytes
    for pool in plan.device_bytes if limit else ():
        for group, needed in plan.on_device(pool).items():
            if needed > limit:
                yield (
                    f"worker group {group!r} needs about {gib(needed)} of each GPU of pool {pool!r}, and a GPU has "
                    f"{gib(plan.machine.gpu_bytes)}. {_remedy(plan, pool, group, limit)}; `weft plan` lists what it needs"
                )


def _remedy(plan: Plan, pool: str, name: str, limit: float) -> str:
    """Return the fastest way of training that fits, or what to change instead."""
    handle, place = plan.spec.handles[name], plan.spec.placement[name]
    if isinstance(handle.config, ModelConfig):
        for way in WAYS:
            if not all(hasattr(handle.config, setting) for setting in way):
                continue
            other = copy(handle)
            other.config = handle.config.model_copy(update=way)
            made = group_memory(plan.spec, name, other, place, plan.sizes, plan.machine.gpu_bytes)
            groups = tuple(made if group.group == name else group for group in plan.groups)
            needed = replace(plan, groups=groups).on_device(pool)[name]
            if needed <= limit:
                chosen = " and ".join(f"{setting}={value!r}" for setting, value in way.items())
                return f"Set {chosen}, which needs {gib(needed)}"
        adapter = ", or train an adapter (lora=weft.Lora())" * hasattr(handle.config, "lora")
        return f"Set offload='everything' and a smaller microbatch_tokens{adapter}, or use more GPUs"
    return "Set a smaller gpu_memory_utilization or kv_cache_gib, or a larger tensor_parallel"
