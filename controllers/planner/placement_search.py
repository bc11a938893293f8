"""Placement search: which models share GPUs, how many GPUs each set of models gets, and how each
model is parallel (HybridFlow's mapper, arXiv:2409.19256, algorithms 1 and 2).

    search = PlacementSearch(models, seconds=..., held_bytes=..., node_gpus=8, gpu_bytes=80e9)
    best, *others = search.placements(gpus=64, step=8)     the best of each set partition

The models of a set take turns on its GPUs; sets work at the same time. So a stage takes as long as
the slowest set, and a set as long as all its models together. Each GPU holds what all models of its
set keep between their turns, and what one of them needs during its turn.

The search is exhaustive over set partitions, allocations and strategies. It stays fast because it
keeps only strategies that no other one beats in memory and in the seconds of every stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from ...dataflow.errors import UserError
from .options import Strategy, strategies

T = TypeVar("T")
Vector = TypeVar("Vector", bound=tuple[float, ...])


class _Way(NamedTuple):
    """Strategies of the models of a set."""

    held_bytes: float = 0.0
    active_bytes: float = 0.0
    stage_s: tuple[float, ...] = ()
    strategies: tuple[Strategy, ...] = ()

    @property
    def memory_bytes(self) -> float:
        return self.held_bytes + self.active_bytes

    def joined(self, other: _Way) -> _Way:
        return _Way(
            self.held_bytes + other.held_bytes,
            max(self.active_bytes, other.active_bytes),
            tuple(a + b for a, b in zip_longest(self.stage_s, other.stage_s, fillvalue=0.0)),
            self.strategies + other.strategies,
        )


@dataclass(frozen=True)
class ModelSet:
    """Models that take turns on the same GPUs."""

    gpus: int
    strategies: Mapping[str, Strategy]
    """Model -> its strategy."""
    stage_s: tuple[float, ...]
    """[s] Seconds of the set in each stage of a step."""
    memory_bytes: float
    """Largest memory of a GPU."""


@dataclass(frozen=True)
class FoundPlacement:
    seconds: float
    """[s] Seconds of a step: the slowest set of each stage."""
    sets: tuple[ModelSet, ...]


class PlacementSearch:
    """Searches placements of models on equal GPUs.

    >>> search = PlacementSearch(
    ...     ("actor", "critic"), seconds=lambda model, way: (8 / way.gpus,), held_bytes=lambda model, way: 1,
    ...     node_gpus=4, gpu_bytes=2,
    ... )
    >>> [(found.seconds, [list(each.strategies) for each in found.sets]) for found in search.placements(gpus=4)]
    [(4.0, [['actor', 'critic']]), (4.0, [['actor'], ['critic']])]

    Args:
        models: names of the models.
        seconds: returns the seconds of a model in each stage of a step, such as generation,
            preparation and training; infinite if it cannot run so.
        held_bytes: returns the memory that a model keeps on each of its GPUs.
        active_bytes: returns the additional memory that a model needs there during its turn.
        node_gpus: number of GPUs of a node, the limit of tensor parallelism.
        gpu_bytes: usable memory of a GPU.
        pipelines: allowed numbers of pipeline stages; all by default.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        seconds: Callable[[str, Strategy], Sequence[float]],
        held_bytes: Callable[[str, Strategy], float],
        active_bytes: Callable[[str, Strategy], float] = lambda model, strategy: 0.0,
        node_gpus: int,
        gpu_bytes: float,
        pipelines: Collection[int] | None = None,
    ) -> None:
        self._models = tuple(models)
        self._seconds, self._held_bytes, self._active_bytes = seconds, held_bytes, active_bytes
        self._node_gpus, self._gpu_bytes, self._pipelines = node_gpus, gpu_bytes, pipelines
        # Models and sets recur with the same number of GPUs in many placements.
        self._of_model: dict[tuple[str, int], tuple[_Way, ...]] = {}
        self._of_set: dict[tuple[tuple[str, ...], int], tuple[_Way, ...]] = {}

    def placements(self, gpus: int, step: int = 1) -> list[FoundPlacement]:
        """Return the best placement of each set partition that fits, fastest first. Sets get
        multiples of `step` GPUs, and all GPUs are in use. Raises a `UserError` if nothing fits."""
        found: list[FoundPlacement] = []
        for partition in set_partitions(self._models):
            needed = [self.min_gpus(models, gpus) for models in partition]
            if None not in needed:
                least = [number or 0 for number in needed]
                made = [self.best(partition, split) for split in allocations(gpus, least, step)]
                fit = [each for each in made if each is not None]
                found += [min(fit, key=lambda each: each.seconds)] if fit else []
        if not found:
            size = f" of {self._gpu_bytes:,.0f} bytes" if math.isfinite(self._gpu_bytes) else ""
            raise UserError(
                f"no placement of {', '.join(self._models)} fits on {gpus} devices{size}; use more or larger ones, or smaller models"
            )
        return sorted(found, key=lambda each: (each.seconds, len(each.sets)))

    def min_gpus(self, models: Sequence[str], limit: int) -> int | None:
        """Return the smallest number of GPUs whose memory holds all these models, or None if it
        exceeds `limit`."""
        return next((gpus for gpus in range(1, limit + 1) if self._fits(models, gpus)), None)

    def _fits(self, models: Sequence[str], gpus: int) -> bool:
        needed = [(0.0, 0.0)]  # bytes held and active, of the strategies of the models so far
        for model in models:
            own = {way[:2] for way in self._ways_of_model(model, gpus)}
            needed = _minimal((a + c, max(b, d)) for a, b in needed for c, d in own)
        return any(held + active <= self._gpu_bytes for held, active in needed)

    def _ways_of_model(self, model: str, gpus: int) -> tuple[_Way, ...]:
        if (model, gpus) not in self._of_model:
            made: list[_Way] = []
            for each in strategies(gpus, self._node_gpus, self._pipelines):
                stage_s = tuple(self._seconds(model, each))
                if all(map(math.isfinite, stage_s)):
                    held, active = self._held_bytes(model, each), self._active_bytes(model, each)
                    made.append(_Way(held, active, stage_s, (each,)))
            self._of_model[model, gpus] = _unbeaten(made)
        return self._of_model[model, gpus]

    def _ways(self, models: tuple[str, ...], gpus: int) -> tuple[_Way, ...]:
        """Return the strategies of a set that fit and that no others beat."""
        if (models, gpus) not in self._of_set:
            *others, last = models
            before = self._ways(tuple(others), gpus) if others else (_Way(),)
            joined = (a.joined(b) for a in before for b in self._ways_of_model(last, gpus))
            self._of_set[models, gpus] = _unbeaten(
                w for w in joined if w.memory_bytes <= self._gpu_bytes
            )
        return self._of_set[models, gpus]

    def best(self, partition: Sequence[tuple[str, ...]], split: Sequence[int]) -> FoundPlacement | None:
        """Return the best strategies for sets of models on `split[k]` GPUs each, or None if they do
        not fit."""
        # The ways of the sets so far: each stage's slowest set, and the way of each set.
        chosen: list[tuple[tuple[float, ...], tuple[_Way, ...]]] = [((), ())]
        for models, gpus in zip(partition, split, strict=True):
            made: dict[tuple[float, ...], tuple[_Way, ...]] = {}
            for slowest, before in chosen:
                for way in self._ways(models, gpus):
                    stages = tuple(map(max, slowest, way.stage_s)) if slowest else way.stage_s
                    made.setdefault(stages, (*before, way))
            chosen = [(stages, made[stages]) for stages in _minimal(made)]
        if not chosen:
            return None
        stages, ways = min(chosen, key=lambda each: sum(each[0]))
        sets: list[ModelSet] = []
        for models, gpus, way in zip(partition, split, ways, strict=True):
            chosen_ways = dict(zip(models, way.strategies, strict=True))
            sets.append(ModelSet(gpus, chosen_ways, way.stage_s, way.memory_bytes))
        return FoundPlacement(sum(stages), tuple(sets))


def set_partitions(items: Sequence[T]) -> Iterator[list[tuple[T, ...]]]:
    """Yield every way to divide items into sets.

    >>> list(set_partitions("ab"))
    [[('a', 'b')], [('a',), ('b',)]]
    """
    if not items:
        yield []
        return
    *others, last = items
    for partition in set_partitions(others):
        for k, own in enumerate(partition):
            yield [*partition[:k], (*own, last), *partition[k + 1 :]]
        yield [*partition, (last,)]


def allocations(gpus: int, least: Sequence[int], step: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every way to give all GPUs to sets in multiples of `step`, at least `least[k]` to set
    k.

    >>> list(allocations(4, [2, 1]))
    [(2, 2), (3, 1)]
    """
    first, *others = (max(step, -(-number // step) * step) for number in least)
    if not others:
        if gpus >= first and gpus % step == 0:
            yield (gpus,)
        return
    for number in range(first, gpus - sum(others) + 1, step):
        for rest in allocations(gpus - number, others, step):
            yield (number, *rest)


def _unbeaten(ways: Iterable[_Way]) -> tuple[_Way, ...]:
    """Keep the ways that no other way beats in memory and in the seconds of all stages."""
    made: dict[tuple[float, ...], _Way] = {}
    for way in ways:
        made.setdefault((*way[:2], *way.stage_s), way)
    return tuple(made[key] for key in _minimal(made))


def _minimal(vectors: Iterable[Vector]) -> list[Vector]:
    """Return the distinct vectors that no other vector is below or equal to."""
    ordered = sorted(set(vectors))
    table, rest = np.array(ordered), np.arange(len(ordered))
    kept: list[Vector] = []
    while len(rest):
        first = rest[0]  # a vector can only be beaten by an earlier one
        kept.append(ordered[first])
        rest = rest[(table[rest] < table[first]).any(axis=1)]
    return kept


def generation_tensor_parallel(
    trained: int, *, weight_bytes: float, cache_bytes: float, gpus: int, free_bytes: float
) -> int | None:
    """Return the smallest degree of tensor parallelism for generation that fits in the memory
    that training leaves, or None (HybridFlow, section 5). Each GPU holds its shard of the weights and an equal share of the
    keys and values of all responses.

    >>> generation_tensor_parallel(8, weight_bytes=16, cache_bytes=64, gpus=16, free_bytes=8)
    4

    Args:
        trained: degree of tensor parallelism in training, which the result divides.
        weight_bytes: bytes of all weights.
        cache_bytes: bytes of all keys and values.
        gpus: number of GPUs.
        free_bytes: memory of each GPU that training leaves.
    """
    for degree in (number for number in range(1, trained + 1) if trained % number == 0):
        if weight_bytes / degree + cache_bytes / gpus <= free_bytes:
            return degree
    return None
