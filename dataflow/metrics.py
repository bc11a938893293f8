"""Metrics: numbers that know how to be merged over microbatches, ranks and replicas."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import isnan, sqrt
from typing import Any, TypeAlias, cast

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


@dataclass(frozen=True)
class Std:
    """The standard deviation of all values, kept as number, mean and sum of squared differences from it, so that merging is exact
    (Chan, Golub and LeVeque, 1979).

    >>> (Std.of([0.0, 2.0]) + Std.of([4.0])).value == Std.of([0.0, 2.0, 4.0]).value
    True
    """

    number: float
    mean: float
    squares: float
    """Sum of squared differences from the mean."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Std:
        """The deviation of these values, each with weight 1."""
        number = len(values)
        mean = sum(values) / number if number else 0.0
        return cls(float(number), mean, sum((value - mean) ** 2 for value in values))

    def __add__(self, other: Std) -> Std:
        number = self.number + other.number
        if not number:
            return self
        apart, share = other.mean - self.mean, other.number / number
        squares = self.squares + other.squares + apart**2 * self.number * share
        return replace(self, number=number, mean=self.mean + apart * share, squares=squares)

    @property
    def value(self) -> float:
        """The deviation of these values themselves (divided by their number, not by one less); NaN if there are none."""
        return sqrt(self.squares / self.number) if self.number else float("nan")


@dataclass(frozen=True)
class Estimate(Std):
    """The mean of values that are independent of each other, such as one for each prompt, which knows how they scatter: a run writes its
    95 % interval beside it.

    >>> estimate = Estimate.of([0.0, 1.0]) + Estimate.of([1.0, 1.0])
    >>> estimate.value, estimate.number, round(estimate.std, 3)
    (0.75, 4.0, 0.433)
    """

    @property
    def value(self) -> float:
        """The mean; NaN if there are no values."""
        return self.mean if self.number else float("nan")

    @property
    def std(self) -> float:
        """Their standard deviation."""
        return super().value


Metric: TypeAlias = Mean | Max | Sum | Std
Metrics: TypeAlias = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of all parts: means by weight, maxima, sums.

    >>> merge([{"rows": Sum(2)}, {"rows": Sum(3), "gap": Max(0.5)}])
    {'rows': Sum(value=5), 'gap': Max(value=0.5)}

    Raises:
        UserError: a metric has different types in two parts, such as Mean and Max.
    """
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            if name in found:
                found[name].append(metric)
            else:
                found[name] = [metric]
    return {name: _total(name, metrics) for name, metrics in found.items()}


def _total(name: str, metrics: list[Metric]) -> Metric:
    """One metric of all parts."""
    kind = type(metrics[0])
    for metric in metrics:
        if type(metric) is not kind:
            kinds = f"{kind.__name__} in one part and a {type(metric).__name__}"
            raise UserError(f"metric {name!r} is a {kinds} in another")
    if len(metrics) == 1:
        return metrics[0]
    if kind is Sum:  # by far the most are sums and means
        return Sum(_added([m.value for m in cast(list[Sum], metrics)]))
    if kind is Mean:
        means = cast(list[Mean], metrics)
        return Mean(_added([m.total for m in means]), _added([m.weight for m in means]))
    total: Any = metrics[0]
    for metric in metrics[1:]:
        total = total + metric
    return cast(Metric, total)


def _added(numbers: list[float]) -> float:
    """Their sum, added one after the other."""
    return reduce(operator.add, numbers)
