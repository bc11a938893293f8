"""Metrics: numbers that know how to be merged over microbatches, ranks and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import TypeAlias

from .errors import UserError


@dataclass(frozen=True)
class Mean:
    """A weighted mean, kept as its two sums so that merging is exact.

    >>> (Mean(6.0, 3.0) + Mean(0.0, 1.0)).value
    1.5
    """

    total: float
    weight: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Max:
    """The largest value seen; NaN when any was."""

    value: float

    def __add__(self, other: Max) -> Max:
        return self if isnan(self.value) else other if isnan(other.value) else Max(max(self.value, other.value))


@dataclass(frozen=True)
class Sum:
    """A count or an amount."""

    value: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


Metric: TypeAlias = Mean | Max | Sum
Metrics: TypeAlias = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """All parts as one: means by weight, maxima, sums.

    >>> merge([{"rows": Sum(2)}, {"rows": Sum(3), "gap": Max(0.5)}])
    {'rows': Sum(value=5), 'gap': Max(value=0.5)}

    Raises:
        UserError: for a name that is a Mean in one part and a Max in another, say.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = merged.get(name)
            if before is not None and type(before) is not type(metric):
                kinds = f"{type(before).__name__} in one part and a {type(metric).__name__}"
                raise UserError(f"metric {name!r} is a {kinds} in another")
            merged[name] = metric if before is None else before + metric  # pyright: ignore[reportOperatorIssue]
    return merged
