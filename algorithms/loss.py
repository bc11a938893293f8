"""Loss: the interface between losses and a training engine, and their input, packed rows.

A loss returns a *sum* over tokens, and the number to divide it by (tokens or sequences). The engine
adds these counts over all rows and ranks, and divides once. So the gradient does not depend on
microbatches or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pyarrow as pa
from pydantic import model_validator

from ..dataflow.batch import Batch
from ..dataflow.column import LOG_COLLISIONS as _LOG_COLLISIONS
from ..dataflow.column import RESPONSE_MASK
from ..dataflow.config import Config
from ..dataflow.errors import UserError, nearest
from ..dataflow.lazy import torch
from ..dataflow.metrics import Max, Mean, Metric, Metrics, Sum
from ..dataflow.tracing import refusing_rows

if TYPE_CHECKING:
    from torch import Tensor


CANDIDATE_LOGPROBS = "candidate_logprobs"
"""Column that an engine adds if the loss reads `teacher_ids`: [T, k] nats, the log-probabilities of
these tokens under the policy, with a gradient."""
LOG_COLLISIONS = str(_LOG_COLLISIONS)
"""Column that an engine adds if the loss may read it: [T] nats, log sum_v p_v^2 at each position,
without a gradient. It is the log-probability that two samples of the policy are the same token."""


@dataclass(frozen=True)
class PackedRows:
    """Response tokens of B rows, laid end to end, with the columns that a loss reads.

    >>> rows = PackedRows.of([2, 1], advantages=[1.0, 1.0, -1.0], response_mask=[1, 0, 1])
    >>> len(rows), rows.num_tokens, rows.row_of_token.tolist()
    (2, 3, [0, 0, 1])
    >>> rows.trained.tolist(), rows.sums(rows.trained).tolist()
    ([1.0, 0.0, 1.0], [1.0, 1.0])
    """

    cu_seqlens: Tensor
    """[B + 1] int64; row i has the tokens `cu_seqlens[i]:cu_seqlens[i + 1]`."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns by name: [T] with one value per token ([T, k] with k values), or [B] with one value
    per row."""
    counted_tokens: int | None = None
    """T, if the host knows it; None reads it from the device."""

    @classmethod
    def of(cls, lengths: Iterable[int] | Tensor, **columns: object) -> PackedRows:
        """Create rows from their lengths and columns."""
        given = lengths if hasattr(lengths, "dtype") else list(lengths)
        lengths_B = torch.as_tensor(given, dtype=torch.int64)
        cu_seqlens = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))
        return cls(cu_seqlens, {name: torch.as_tensor(values) for name, values in columns.items()})

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __contains__(self, column: object) -> bool:
        return str(column) in self.columns

    def __getitem__(self, column: object) -> Tensor:
        name = str(column)
        if name not in self.columns:
            hint = nearest(name, self.columns) or f"; there are {', '.join(self.columns) or 'none'}"
            raise UserError(f"the loss reads column {name!r}, which its rows do not have{hint}")
        return self.columns[name]

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1]) if self.counted_tokens is None else self.counted_tokens

    @cached_property
    def lengths(self) -> Tensor:
        """[B] int64 lengths, including masked tokens."""
        return self.cu_seqlens.diff()

    @cached_property
    def row_of_token(self) -> Tensor:
        """[T] int64: index of each token's row."""
        rows = torch.arange(len(self), device=self.cu_seqlens.device)
        # Without `output_size`, torch would wait for the device to compute it.
        return torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)

    @cached_property
    def trained(self) -> Tensor:
        """[T] float32, 1 for trained tokens, otherwise 0: `response_mask`, or all ones without that
        column."""
        if RESPONSE_MASK in self:
            return self[RESPONSE_MASK].to(torch.float32)
        return torch.ones(self.num_tokens, dtype=torch.float32, device=self.cu_seqlens.device)

    @cached_property
    def trained_lengths(self) -> Tensor:
        """[B] float32: trained tokens of each row."""
        return self.sums(self.trained)

    @cached_property
    def counted(self) -> Tensor:
        """[B] bool: rows with at least one trained token. Losses ignore the other rows."""
        return self.trained_lengths > 0

    def only_trained(self, values_T: Tensor) -> Tensor:
        """Replace the values of masked tokens, which may be NaN, with 0: [T] or [T, k].
        Differentiable."""
        # Multiplication would give 0 * NaN = NaN, in the forward and the backward pass.
        trained = self.trained > 0
        return torch.where(trained if values_T.ndim == 1 else trained[:, None], values_T, 0.0)

    def sums(self, values_T: Tensor) -> Tensor:
        """Return the sum over the tokens of each row, [B]; 0 for an empty row. Differentiable."""
        zeros = torch.zeros(len(self), dtype=values_T.dtype, device=values_T.device)
        return zeros.index_add(0, self.row_of_token, values_T)

    def per_token(self, values_B: Tensor) -> Tensor:
        """Repeat each row's value over its tokens, [T]. Differentiable."""
        return values_B[self.row_of_token]


def response_rows(samples: Batch, ragged: object, *columns: object) -> PackedRows:
    """Pack columns of a batch, and its `response_mask` if it has one. The column `ragged` sets the
    lengths of rows; other columns have these lengths, or one value per row. Do not write to the
    result: it shares memory with the batch.

    >>> rows = response_rows(Batch.of(response_ids=[[5, 6], [7]], reward=[1.0, 0.0]), "response_ids", "reward")
    >>> rows.lengths.tolist(), rows["reward"].tolist()
    ([2, 1], [1.0, 0.0])
    """
    values, cu_seqlens = samples.ragged(ragged)
    found = {str(ragged): values}
    for name in (*map(str, columns), *([str(RESPONSE_MASK)] if RESPONSE_MASK in samples else [])):
        is_ragged = pa.types.is_list(samples[name].type)
        found[name] = samples.ragged(name)[0] if is_ragged else samples.tensor(name)
    return PackedRows(cu_seqlens.long(), found)


@runtime_checkable
class Loss(Protocol):
    """A loss over response tokens. Losses with equal settings compare equal. `FrozenLoss` has
    defaults, but a custom loss need not inherit from it."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the loss requires, besides the tokens. With `teacher_ids`, rows also have
        `candidate_logprobs`."""
        ...

    @property
    def may_read(self) -> tuple[str, ...]:
        """Columns that the loss uses if they exist."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the engine must compute `rows["entropy"]` ([T] nats) with a gradient. If not,
        rows may still have it without a gradient."""
        ...

    @property
    def whole_groups(self) -> bool:
        """Whether the loss compares the rows of a group. Groups then stay together in ranks,
        microbatches and minibatches."""
        ...

    def count(self, rows: PackedRows) -> float:
        """Return the divisor for these rows. The engine adds the divisors of all microbatches and
        ranks."""
        ...

    def __call__(self, logprobs: Tensor, rows: PackedRows, /) -> tuple[Tensor, Metrics]:
        """Return the loss of these rows (a scalar) before the engine divides it by the count, and
        metrics.

        Args:
            logprobs: [T] nats, of the response tokens under the policy; with a gradient.
            rows: rows with the columns of `reads`; no gradient.
        """
        ...


class FrozenLoss(Config):
    """A loss with defaults: it reads only the mask, and treats rows independently.

    Subclasses define `count` and `__call__`, and override the properties that differ.

    >>> class Brevity(FrozenLoss):
    ...     weight: float = 0.5
    ...
    ...     def count(self, rows):
    ...         return float(rows.counted.sum())
    ...
    ...     def __call__(self, logprobs, rows):
    ...         return self.weight * rows.only_trained(logprobs).sum(), {}
    >>> isinstance(Brevity(), Loss), Brevity().reads, Brevity()(torch.tensor([-1.0, -3.0]), PackedRows.of([2]))[0].item()
    (True, (), -2.0)
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        refusing_rows(cls)

    @model_validator(mode="after")
    def _parts_are_values(self) -> FrozenLoss:
        for name in type(self).model_fields:
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, type):
                    raise ValueError(
                        f"{name}={part.__name__} is a class; make a value of it: {part.__name__}()"
                    )
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def may_read(self) -> tuple[str, ...]:
        return (str(RESPONSE_MASK),)

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def whole_groups(self) -> bool:
        return False


class _Observed(Mapping[str, Metric]):
    """Metrics that stay on the device until their first read, so that the backward pass does not
    wait.

    >>> both = observed(torch.tensor([True]), {"gap": torch.tensor([0.5])}) | observed(torch.tensor([False]), {"kl": torch.tensor([1.0])})
    >>> dict(both)
    {'gap': Mean(total=0.5, weight=1.0), 'kl': Mean(total=0.0, weight=0.0)}
    """

    def __init__(self, *pieces: tuple[Tensor, Mapping[str, type[Mean | Max | Sum]]]) -> None:
        # Each piece has a tensor [1 + names], which holds the number of things that count and one
        # number per name, and the kind of each metric by name.
        self._pieces = pieces

    @cached_property
    def _read(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for tensor, kinds in self._pieces:
            weight, *numbers = tensor.tolist()
            for (name, kind), number in zip(kinds.items(), numbers, strict=True):
                found[name] = Mean(number, weight) if kind is Mean else kind(number)
        return found

    def __getitem__(self, name: str) -> Metric:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for _, kinds in self._pieces for name in kinds))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, other: _Observed) -> _Observed:
        return _Observed(*self._pieces, *other._pieces)

    def __repr__(self) -> str:
        return repr(self._read)


def observed(
    over: Tensor,
    means: Mapping[str, Tensor],
    *,
    largest: Mapping[str, Tensor] | None = None,
    counts: Mapping[str, Tensor] | None = None,
) -> _Observed:
    """Create the metrics of a loss over N things (tokens, rows or pairs), without a gradient.

    Args:
        over: [N] bool: which things count. The values of the others may be NaN.
        means: [N] by name: averaged over the things that count, with weight 0 if none do.
        largest: [N] by name: the largest value among the things that count, but at least 0. Left
            out if N is 0.
        counts: bool tensors of any shape, by name: the number of true elements.

    >>> observed(torch.tensor([True, False]), {"gap": torch.tensor([0.5, float("nan")])})
    {'gap': Mean(total=0.5, weight=1.0)}
    """
    largest, counts = (largest or {}) if len(over) else {}, counts or {}
    with torch.no_grad():
        tensors = [torch.where(over, values, 0.0).sum() for values in means.values()]
        tensors += [torch.where(over, values, 0.0).amax() for values in largest.values()]
        tensors += [values.sum() for values in counts.values()]
        # With a single tensor, reading all metrics takes only one transfer.
        numbers = torch.stack([over.sum(), *tensors])
    kinds = {**dict.fromkeys(means, Mean), **dict.fromkeys(largest, Max), **dict.fromkeys(counts, Sum)}
    return _Observed((numbers, kinds))
