"""Flow schedules: which stages of a step take turns on all GPUs, which work side by side, and how
many items they hand on at a time (RLinf, arXiv:2509.15965).

    found = flow_schedule(edges, gpus=8, items=64, seconds=..., switch_s=0.5)
    print(found)        rollout (8 GPUs, 64 items), then actor (8 GPUs, 64 items)

    pipelined_s, streamed_s     seconds of stages that work side by side
    split_gpus                  GPUs for generation and for training, for a maximum lag (AsyncFlow)

Stages in a circle, such as a policy and its environment, count as one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from ...dataflow.errors import UserError

Stage: TypeAlias = tuple[str, ...]
"""Names of nodes that run as one: a node, or the nodes of a circle."""


@dataclass(frozen=True)
class Alone:
    """A stage on a number of GPUs."""

    stage: Stage
    gpus: int
    items: int
    seconds: float

    def __str__(self) -> str:
        return f"{' + '.join(self.stage)} ({self.gpus} GPUs, {self.items} items)"


@dataclass(frozen=True)
class InTurns:
    """Two parts that use the same GPUs, one after the other."""

    first: FlowSchedule
    second: FlowSchedule
    seconds: float

    def __str__(self) -> str:
        return f"{self.first}, then {self.second}"


@dataclass(frozen=True)
class SideBySide:
    """Two parts on different GPUs. The first hands on `items` items at a time."""

    first: FlowSchedule
    second: FlowSchedule
    items: int
    seconds: float

    def __str__(self) -> str:
        return f"[{self.first}] beside [{self.second}]"


FlowSchedule: TypeAlias = Alone | InTurns | SideBySide


def flow_schedule(
    edges: Collection[tuple[str, str]],
    *,
    gpus: int,
    items: int,
    seconds: Callable[[Stage, int, int], float],
    switch_s: float = 0.0,
    nodes: Collection[str] = (),
    step: int = 1,
) -> FlowSchedule:
    """Return the fastest schedule of a step.

    The search is exhaustive: it cuts the stages in two wherever no edge leads back. The two parts
    take turns on all GPUs, or work side by side on a share of the GPUs each, handing on items in
    equal portions. It then cuts each part in the same way.

    Args:
        edges: (node, node that needs its items).
        gpus: number of GPUs.
        items: items of a step, such as prompts.
        seconds: returns the seconds of a stage for a number of GPUs and items; infinite if the
            stage does not fit on them.
        switch_s: [s] time to hand all GPUs from one stage to the next.
        nodes: nodes without edges.
        step: parts that work side by side get multiples of this number of GPUs.

    Raises:
        UserError: the flow is empty, or no schedule fits.
    """
    stages, follows = _stages(edges, nodes)
    if not stages:
        raise UserError("a flow schedule needs at least one node; give edges or nodes")
    portions = [number for number in range(1, items + 1) if items % number == 0]

    @cache
    def best(chosen: frozenset[int], own_gpus: int, own_items: int) -> FlowSchedule:
        if len(chosen) == 1:
            stage = stages[next(iter(chosen))]
            return Alone(stage, own_gpus, own_items, seconds(stage, own_gpus, own_items))
        return min(made(chosen, own_gpus, own_items), key=lambda each: each.seconds)

    def made(chosen: frozenset[int], own_gpus: int, own_items: int) -> Iterator[FlowSchedule]:
        for before, after in _cuts(chosen, follows):
            first, second = best(before, own_gpus, own_items), best(after, own_gpus, own_items)
            yield InTurns(first, second, first.seconds + switch_s + second.seconds)
            for portion in (number for number in portions if own_items % number == 0):
                for number in range(step, own_gpus, step):
                    first, second = (
                        best(before, number, portion),
                        best(after, own_gpus - number, portion),
                    )
                    both = pipelined_s((first.seconds, second.seconds), own_items // portion)
                    yield SideBySide(first, second, portion, both)

    found = best(frozenset(range(len(stages))), gpus, items)
    if math.isinf(found.seconds):
        raise UserError(f"no schedule of {items} items fits on {gpus} GPUs; use more GPUs")
    return found


def _stages(
    edges: Collection[tuple[str, str]], nodes: Collection[str]
) -> tuple[list[Stage], list[set[int]]]:
    """Return the stages, and for each the stages that directly follow it. Nodes that reach each other
    are one stage."""
    names = list(dict.fromkeys([*nodes, *(name for edge in edges for name in edge)]))
    reached = {name: {b for a, b in edges if a == name} for name in names}
    for middle in names:
        for name in names:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    stages: list[Stage] = []
    for name in names:
        circle = tuple(other for other in names if other in reached[name] and name in reached[other])
        if (stage := circle or (name,)) not in stages:
            stages.append(stage)
    of = {name: k for k, stage in enumerate(stages) for name in stage}
    follows = [{of[b] for a, b in edges if of[a] == k} - {k} for k in range(len(stages))]
    return stages, follows


def _cuts(
    chosen: frozenset[int], follows: Sequence[Collection[int]]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yield the ways to divide stages into two nonempty parts without an edge from the second to the
    first."""
    ordered = sorted(chosen)
    for mask in range(1, (1 << len(ordered)) - 1):
        before = frozenset(stage for k, stage in enumerate(ordered) if mask >> k & 1)
        after = chosen - before
        if all(before.isdisjoint(follows[stage]) for stage in after):
            yield before, after


# Stages that work side by side


def pipelined_s(stage_s: Sequence[float], items: int) -> float:
    """Return the seconds of equal items that pass through stages one after the other (a flow shop): all
    stages for the first item, and the slowest stage for each other item.

    >>> pipelined_s((4, 3), items=4)
    19
    """
    return sum(stage_s) + (items - 1) * max(stage_s)


def streamed_s(stage_s: Sequence[float], *, chunks: int, steps: int, lag: int) -> float:
    """Return the seconds of steps whose rows stream through stages in equal chunks (AsyncFlow,
    arXiv:2507.01663).

    >>> streamed_s((6, 4), chunks=4, steps=10, lag=0), streamed_s((6, 4), chunks=4, steps=10, lag=2)
    (70.0, 61.0)

    Args:
        stage_s: [s] seconds of each stage for a whole step, on its own GPUs. The last one trains.
        chunks: number of chunks of a step.
        steps: number of steps.
        lag: a step begins once the step `lag + 1` before it has ended. 0 is on-policy.
    """
    ends = [0.0] * steps
    free = [0.0] * len(stage_s)
    for step in range(steps):
        begin = ends[step - lag - 1] if step > lag else 0.0
        for _ in range(chunks):
            at = begin
            for k, seconds in enumerate(stage_s):
                at = free[k] = max(at, free[k]) + seconds / chunks
        ends[step] = free[-1]
    return ends[-1] if steps else 0.0


@dataclass(frozen=True)
class GpuSplit:
    rollout_gpus: int
    train_gpus: int
    seconds: float
    """[s] Seconds of a step, once the pipeline is full."""
    in_turns_s: float
    """[s] Seconds of a step if both take turns on all GPUs."""


def split_gpus(
    gpus: int, *, rollout_gpu_s: float, train_gpu_s: float, lag: int, chunks: int = 1
) -> GpuSplit:
    """Split GPUs between generation and training so that a step is fastest.

    >>> split_gpus(16, rollout_gpu_s=60, train_gpu_s=36, lag=1)
    GpuSplit(rollout_gpus=10, train_gpus=6, seconds=6.0, in_turns_s=6.0)

    Args:
        gpus: number of GPUs, at least 2.
        rollout_gpu_s: GPU-seconds of the generation of a step.
        train_gpu_s: GPU-seconds of the training of a step.
        lag: maximum staleness, as in `Asynchronous(max_staleness=lag)`. 0 is on-policy, where a
            step streams in chunks.
        chunks: number of chunks of a step.

    Raises:
        UserError: there are fewer than 2 GPUs.
    """
    if gpus < 2:
        raise UserError(f"gpus={gpus} cannot be split between generation and training; use at least 2")

    def step_s(number: int) -> float:
        both = rollout_gpu_s / number, train_gpu_s / (gpus - number)
        return max(both) if lag else streamed_s(both, chunks=chunks, steps=1, lag=0)

    number = min(range(1, gpus), key=step_s)
    in_turns = (rollout_gpu_s + train_gpu_s) / gpus
    return GpuSplit(number, gpus - number, step_s(number), in_turns)
