"""Pipeline schedules as data: the order of the forward and backward passes of each stage.

A model has `stages * chunks` pieces of consecutive layers. Piece k is chunk `k // stages` of stage
`k % stages`. Each microbatch passes forward through all pieces, then backward.

    gpipe                      all forward passes, then all backward ones (arXiv:1811.06965)
    one_forward_one_backward   after a warm-up, alternate forward and backward passes
                               (arXiv:2104.04473, section 2.2.1)
    interleaved                the same with several chunks per stage (section 2.2.2)

This module needs neither torch nor a process group.

>>> print(one_forward_one_backward(stages=2, microbatches=3))
stage 0: F0 F1 B0 F2 B1 B2
stage 1: F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...dataflow.errors import UserError


class Pass(NamedTuple):
    """A forward or backward pass of a microbatch through a chunk of a stage."""

    microbatch: int
    chunk: int = 0
    backward: bool = False

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{'B' if self.backward else 'F'}{self.microbatch}{chunk}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The passes of every stage, in order. Raises UserError if a stage does not run each pass once,
    or if stages deadlock."""

    stages: int
    microbatches: int
    chunks: int
    passes: tuple[tuple[Pass, ...], ...]

    def __post_init__(self) -> None:
        wanted = {
            Pass(microbatch, chunk, backward)
            for microbatch in range(self.microbatches)
            for chunk in range(self.chunks)
            for backward in (False, True)
        }
        if len(self.passes) != self.stages:
            raise UserError(f"a pipeline of {self.stages} stages has passes for {len(self.passes)}")
        for stage, own in enumerate(self.passes):
            repeated = {one for one, times in Counter(own).items() if times > 1}
            wrong = wanted.symmetric_difference(own) or repeated
            if wrong:
                raise UserError(
                    f"stage {stage} does not compute each pass once: {', '.join(map(str, sorted(wrong)))}"
                )
        run(self)

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage}: {' '.join(map(str, own))}" for stage, own in enumerate(self.passes)
        )

    @property
    def bubble(self) -> float:
        """Idle time of a stage divided by its computing time, if all passes take equally long and
        transfers are free: (p - 1) / (v m) of Megatron-LM (arXiv:2104.04473, sections 2.2.1 and
        2.2.2)."""
        return (self.stages - 1) / (self.chunks * self.microbatches)

    def in_flight(self, stage: int) -> int:
        """Return the most activations that a stage holds at the same time. Each forward pass of a
        microbatch through a chunk leaves one activation for the backward pass."""
        kept = np.cumsum([-1 if one.backward else 1 for one in self.passes[stage]])
        return int(kept.max(initial=0))


def gpipe(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the GPipe schedule: all forward passes, then all backward passes in the same order. A
    stage holds the activations of all microbatches at the same time."""
    _check_sizes(stages, microbatches)
    order = [Pass(microbatch) for microbatch in range(microbatches)]
    own = (*order, *(one._replace(backward=True) for one in order))
    return PipelineSchedule(stages, microbatches, 1, (own,) * stages)


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the 1F1B schedule of PipeDream-Flush and Megatron-LM. Stage i holds at most min(p - i,
    m) activations.

    >>> [one_forward_one_backward(4, 8).in_flight(stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    _check_sizes(stages, microbatches)
    order = [Pass(microbatch) for microbatch in range(microbatches)]
    back = [one._replace(backward=True) for one in order]
    warm_up = [min(stages - stage - 1, microbatches) for stage in range(stages)]
    passes = tuple(_warmed_up(order, back, first) for first in warm_up)
    return PipelineSchedule(stages, microbatches, 1, passes)


def interleaved(stages: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """Return the interleaved 1F1B schedule of Megatron-LM. It divides the bubble by the number of
    chunks, and multiplies the number of transfers by it.

    Microbatches go through the first chunk of every stage in rounds of p, then through the second
    chunk, and so on. Stage i warms up with 2 (p - i - 1) + (v - 1) p forward passes, and holds one
    more activation than that (arXiv:2205.05198, appendix).

    Args:
        microbatches: number of microbatches; must be a multiple of `stages`.
        chunks: chunks per stage; 1 returns `one_forward_one_backward`.

    >>> interleaved(2, 2, 2).passes[1][:6]
    (Pass(microbatch=0, chunk=0, backward=False), Pass(microbatch=1, chunk=0, backward=False), Pass(microbatch=0, chunk=1, backward=False),\
 Pass(microbatch=0, chunk=1, backward=True), Pass(microbatch=1, chunk=1, backward=False), Pass(microbatch=1, chunk=1, backward=True))
    """
    if chunks == 1:
        return one_forward_one_backward(stages, microbatches)
    _check_sizes(stages, microbatches)
    if chunks < 1 or microbatches % stages:
        raise UserError(
            f"{microbatches} microbatches in {chunks} chunks on {stages} stages: use at "
            "least 1 chunk, and a multiple of the stages for interleaved microbatches"
        )
    rounds = range(0, microbatches, stages)
    forth = [
        Pass(first + k, chunk) for first in rounds for chunk in range(chunks) for k in range(stages)
    ]
    back = [
        Pass(first + k, chunk, True)
        for first in rounds
        for chunk in reversed(range(chunks))
        for k in range(stages)
    ]
    # With fewer forward passes, later stages would idle before the first backward pass.
    least = (chunks - 1) * stages
    warm_up = [min(2 * (stages - stage - 1) + least, len(forth)) for stage in range(stages)]
    passes = tuple(_warmed_up(forth, back, first) for first in warm_up)
    return PipelineSchedule(stages, microbatches, chunks, passes)


@dataclass(frozen=True)
class PipelineRun:
    seconds: float
    """From the first pass to the end of the last one."""
    busy_s: tuple[float, ...]
    ends_s: tuple[dict[Pass, float], ...]
    """Maps each pass to its end time, one mapping per stage."""

    @property
    def bubble(self) -> float:
        """Idle time of the busiest stage divided by its computing time."""
        busiest = max(self.busy_s)
        return self.seconds / busiest - 1 if busiest else 0.0


def run(
    schedule: PipelineSchedule,
    forward_s: ArrayLike = 1.0,
    backward_s: ArrayLike = 2.0,
    transfer_s: ArrayLike = 0.0,
) -> PipelineRun:
    """Simulate a schedule. Each stage runs its passes in order, each as soon as its input has
    arrived.

    A forward pass needs the output of the previous piece; a backward pass needs the gradient of the
    next piece. Transfers overlap with computation; data that stays on a stage arrives at once.

    Args:
        forward_s, backward_s: [pieces, microbatches] seconds per pass, or broadcastable to that
            shape.
        transfer_s: [microbatches] seconds to send an activation or its gradient to another stage.

    Raises:
        UserError: the stages deadlock.
    """
    p, pieces = schedule.stages, schedule.stages * schedule.chunks
    shape = (pieces, schedule.microbatches)
    seconds = [
        np.broadcast_to(np.asarray(each, float), shape).tolist() for each in (forward_s, backward_s)
    ]
    on_its_way = np.broadcast_to(np.asarray(transfer_s if p > 1 else 0.0, float), shape[1:]).tolist()
    ends: list[dict[Pass, float]] = [{} for _ in range(p)]
    position, clock, busy = [0] * p, [0.0] * p, [0.0] * p
    waiting = set(range(p))
    while waiting:
        stage = waiting.pop()
        own, before = schedule.passes[stage], position[stage]
        while position[stage] < len(own):
            one = own[position[stage]]
            piece = one.chunk * p + stage
            arrives = 0.0
            for needed in _needed(one, piece, pieces):
                of = one._replace(chunk=needed // p, backward=one.backward and needed != piece)
                if of not in ends[needed % p]:
                    break
                travels = on_its_way[one.microbatch] if needed != piece else 0.0
                arrives = max(arrives, ends[needed % p][of] + travels)
            else:
                takes = seconds[one.backward][piece][one.microbatch]
                clock[stage] = ends[stage][one] = max(clock[stage], arrives) + takes
                busy[stage] += takes
                position[stage] += 1
                continue
            break
        if position[stage] > before:
            waiting.update(((stage + 1) % p, (stage - 1) % p))
    # No stage can progress, so any stage with passes left is in a deadlock.
    for stage, at in enumerate(position):
        if at < len(schedule.passes[stage]):
            raise UserError(f"stage {stage} waits forever to compute {schedule.passes[stage][at]}")
    return PipelineRun(max(clock), tuple(busy), tuple(ends))


def _needed(one: Pass, piece: int, pieces: int) -> Iterable[int]:
    """Return the pieces that must process the microbatch first. A backward pass needs the forward
    pass of its own piece too."""
    if not one.backward:
        return (piece - 1,) if piece else ()
    return (piece, piece + 1) if piece + 1 < pieces else (piece,)


def _warmed_up(forth: list[Pass], back: list[Pass], warm_up: int) -> tuple[Pass, ...]:
    """Return the passes of a stage: warm-up forward passes, alternating passes, backward passes."""
    steady = [one for pair in zip(forth[warm_up:], back, strict=False) for one in pair]
    return (*forth[:warm_up], *steady, *back[len(forth) - warm_up :])


def _check_sizes(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise UserError(
            f"a pipeline of {stages} stages and {microbatches} microbatches: both must be at least 1"
        )
