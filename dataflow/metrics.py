"""Metrics that can be merged across microbatches, ranks and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import fsum, isfinite, isnan, sqrt
from typing import Any, Self, TypeAlias, cast

from .errors import UserError

Parts: TypeAlias = tuple[float, ...]
"""An exact sum of floats, stored as several floats: the sum rounded to a float, then the remainder
rounded to a float, and so on until nothing remains."""


def exact_sum(numbers: Iterable[float]) -> Parts:
    """Return the exact sum of floats, independent of order and grouping.

    >>> exact_sum([1e16, 1.0, 1.0]), exact_sum([0.5, -0.5]), exact_sum([1e300, 1.0])
    ((1.0000000000000002e+16,), (0.0,), (1e+300, 1.0))
    """
    numbers = [float(number) for number in numbers]
    try:
        # `fsum` rounds its result, so sum the remainder until it is 0.
        parts = [fsum(numbers)]
        while (
            isfinite(parts[-1]) and parts[-1] and (rest := fsum([*numbers, *(-part for part in parts)]))
        ):
            parts.append(rest)
        return tuple(parts)
    except (OverflowError, ValueError):  # overflow, or infinities of both signs
        return (sum(numbers),)


@dataclass(frozen=True)
class Mean:
    """A weighted mean, stored as the weighted sum of values and the sum of weights.

    >>> (Mean(6.0, 3.0) + Mean(0.0, 1.0)).value
    1.5
    """

    total: float
    weight: float = 1.0
    rest: Parts = field(default=(), repr=False)
    """Rounding error of `total`. It makes merging independent of order and grouping."""

    @classmethod
    def of(cls, values: Iterable[float], weights: Sequence[float] | None = None) -> Mean:
        """Return the mean of these values; without weights, all count equally."""
        values = list(values)
        if weights is None:
            total, *rest = exact_sum(values)
            return cls(total, float(len(values)), tuple(rest))
        total, *rest = exact_sum(_products(weights, values))
        return cls(total, exact_sum(weights)[0], tuple(rest))

    def __add__(self, other: Mean) -> Mean:
        return _mean([self, other])

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Max:
    """The largest value; NaN if any value is NaN."""

    value: float

    def __add__(self, other: Max) -> Max:
        # `max` may lose a NaN, depending on the order of its arguments.
        if isnan(self.value):
            return self
        return other if isnan(other.value) else Max(max(self.value, other.value))


@dataclass(frozen=True)
class Sum:
    """A count or an amount. Merging adds the values."""

    value: float
    rest: Parts = field(default=(), repr=False)
    """Rounding error of `value`."""

    def __add__(self, other: Sum) -> Sum:
        return _sum([self, other])


@dataclass(frozen=True)
class Std:
    """The standard deviation of all values, stored as exact sums of the values and their squares,
    each times its weight.

    >>> (Std.of([0.0, 2.0]) + Std.of([4.0])) == Std.of([0.0, 2.0, 4.0])
    True
    """

    number: float
    """Number of values, or the sum of their weights."""
    total: Parts = (0.0,)
    squares: Parts = (0.0,)
    rest: Parts = field(default=(), repr=False)
    """Rounding error of `number`."""

    @classmethod
    def of(cls, values: Sequence[float], weights: Sequence[float] | None = None) -> Self:
        """Without weights, all values count equally."""
        values = [float(value) for value in values]
        if weights is None:
            squares = exact_sum(part for value in values for part in _products([value], [value]))
            return cls(float(len(values)), exact_sum(values), squares)
        number, *rest = exact_sum(weights)
        total = [*_products(weights, values)]  # two numbers for each value
        squares = _products(total, [value for value in values for _ in range(2)])
        return cls(number, exact_sum(total), exact_sum(squares), tuple(rest))

    def __add__(self, other: Std) -> Self:
        return cast(Self, _total("", [self, other]))

    @property
    def mean(self) -> float:
        """Mean of the values, or 0 without values."""
        return self.total[0] / self.number if self.number else 0.0

    @property
    def value(self) -> float:
        """Population standard deviation of the values, or NaN without values."""
        if not self.number:
            return float("nan")
        if not all(map(isfinite, self.total + self.squares)):
            return self.squares[0] - self.squares[0] if isfinite(self.total[0]) else float("nan")
        # Exact arithmetic: in floats, the difference of two large sums would lose all digits.
        total, squares = (sum(map(Fraction, parts)) for parts in (self.total, self.squares))
        number = sum(map(Fraction, self.rest), Fraction(self.number))
        return sqrt(max((squares - total * total / number) / number, 0))


def _products(factors: Sequence[float], values: Sequence[float]) -> Iterator[float]:
    """Yield the product of each pair, and the product's rounding error."""
    for factor, value in zip(factors, values, strict=True):
        product = factor * value
        yield product
        # The rounding error of a product of floats is itself a float.
        if isfinite(product):
            yield float(Fraction(factor) * Fraction(value) - Fraction(product))


@dataclass(frozen=True)
class Estimate(Std):
    """The mean of independent values, such as one per prompt, with a 95 % confidence interval.

    >>> estimate = Estimate.of([0.0, 1.0]) + Estimate.of([1.0, 1.0])
    >>> estimate.value, estimate.number, round(estimate.std, 3)
    (0.75, 4.0, 0.433)
    """

    @property
    def value(self) -> float:
        """The mean, or NaN without values."""
        return self.mean if self.number else float("nan")

    @property
    def std(self) -> float:
        return super().value


@dataclass(frozen=True)
class GroupCounts:
    """Two counts for each group, such as (solved, votes). The run uses them, and does not show
    them. Merging unites the groups.

    >>> GroupCounts({7: (1, 2)}) + GroupCounts({8: (0, 2)})
    GroupCounts(counts={7: (1, 2), 8: (0, 2)})
    """

    counts: Mapping[int, tuple[int, int]]

    def __add__(self, other: GroupCounts) -> GroupCounts:
        return GroupCounts({**self.counts, **other.counts})

    @property
    def value(self) -> float:
        return float(len(self.counts))


Metric: TypeAlias = Mean | Max | Sum | Std | GroupCounts
Metrics: TypeAlias = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of several parts by name.

    >>> merge([{"rows": Sum(2)}, {"rows": Sum(3), "gap": Max(0.5)}])
    {'rows': Sum(value=5.0), 'gap': Max(value=0.5)}

    Raises:
        UserError: a metric has different types in two parts, such as Mean and Max.
    """
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            found.setdefault(name, []).append(metric)
    return {name: _total(name, metrics) for name, metrics in found.items()}


def _total(name: str, metrics: list[Metric]) -> Metric:
    kind = type(metrics[0])
    for metric in metrics:
        if type(metric) is not kind:
            kinds = f"{kind.__name__} in one part and a {type(metric).__name__}"
            raise UserError(f"metric {name!r} is a {kinds} in another")
    if len(metrics) == 1:
        return metrics[0]
    if kind is Sum:  # fast paths for the most common kinds, sums and means
        return _sum(cast(list[Sum], metrics))
    if kind is Mean:
        return _mean(cast(list[Mean], metrics))
    if issubclass(kind, Std):
        stds = cast(list[Std], metrics)
        number, *rest = exact_sum([part for std in stds for part in (std.number, *std.rest)])
        return replace(
            stds[0],
            number=number,
            rest=tuple(rest),
            total=exact_sum([part for std in stds for part in std.total]),
            squares=exact_sum([part for std in stds for part in std.squares]),
        )
    total: Any = metrics[0]
    for metric in metrics[1:]:
        total = total + metric
    return cast(Metric, total)


def _sum(sums: list[Sum]) -> Sum:
    value, *rest = exact_sum([part for each in sums for part in (each.value, *each.rest)])
    return Sum(value, tuple(rest))


def _mean(means: list[Mean]) -> Mean:
    total, *rest = exact_sum([part for mean in means for part in (mean.total, *mean.rest)])
    return Mean(total, exact_sum([mean.weight for mean in means])[0], tuple(rest))
