"""Token advantages from rewards and a critic's predictions, and the critic's loss.

All functions treat the trained tokens of a row as consecutive: they skip masked tokens (such as
tool results and padding), whose results are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from ..dataflow.batch import Batch
from ..dataflow.column import ADVANTAGES, RESPONSE_MASK, RETURNS, TOKEN_REWARDS, VALUES
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.metrics import Metrics
from ..dataflow.operation import node
from .aggregation import AggregatedLoss
from .loss import PackedRows, observed, response_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]

_BLOCK = 32
"""Tokens per matrix product in `_discounted_sums`."""
_PART = 2**18
"""Approximate number of tokens to process at once, so that they fit in the CPU's cache."""


@dataclass(frozen=True)
class LengthAdaptive:
    """lam = 1 - 1 / (alpha l) for a row of l trained tokens, at least 0 (VAPO, arXiv:2504.05118).

    The weights of the terms of an advantage, (1 - lam) lam^k, then reach as far as the row is long:
    the sum of lam^k is alpha l. A fixed lam makes the reward of a long row vanish at its start.

    >>> LengthAdaptive(alpha=0.05)(np.array([10, 40, 200])).tolist()
    [0.0, 0.5, 0.9]
    """

    alpha: float = 0.05
    """Share of a row that its advantages look ahead. Raise it for less bias, and more variance."""

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise UserError(f"LengthAdaptive.alpha must be above 0, not {self.alpha}")

    def __call__(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.maximum(0.0, 1 - 1 / (self.alpha * np.maximum(lengths, 1)))


def generalized_advantages(
    token_rewards: Tensor,
    values: Tensor,
    rows: PackedRows,
    *,
    gamma: float = 1.0,
    lam: float | LengthAdaptive = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16). Returns the advantages and the
    returns, [T] float32 each.

    A_t = delta_t + gamma lam A_t+1, where delta_t = r_t + gamma V_t+1 - V_t. t + 1 is the next
    trained token of the row; after the last one, V and A are 0. The returns are A_t + V_t. Masked
    tokens have 0, whatever their inputs are.

    Args:
        token_rewards: [T] reward of each token, in CPU memory; no gradient.
        values: [T] the critic's prediction before each token; no gradient.
        gamma: discount per token, 0 to 1 (otherwise a UserError, as for `lam`).
        lam: 0 uses one step (least variance); 1 uses all future rewards (no bias from the critic).
            `LengthAdaptive()` sets it for each row, by its length.

    >>> rows = PackedRows.of([3], response_mask=[1, 0, 1])  # the token in the middle is no step
    >>> generalized_advantages(torch.tensor([0.0, 9.0, 1.0]), torch.tensor([0.5, 9.0, 0.25]), rows, gamma=1.0, lam=0.5)
    (tensor([0.1250, 0.0000, 0.7500]), tensor([0.6250, 0.0000, 1.0000]))
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not isinstance(value, LengthAdaptive) and not 0 <= value <= 1:
            raise UserError(f"generalized_advantages: {name} must be between 0 and 1, not {value}")

    def of_part(
        rewards_N: Floats, values_N: Floats, cu_seqlens: NDArray[np.int64]
    ) -> tuple[Floats, ...]:
        # The recursion of the returns has fewer terms: G_t = r_t + gamma (1 - lam) V_t+1 + gamma
        # lam G_t+1.
        steps_N = np.empty_like(values_N)
        if isinstance(lam, LengthAdaptive):
            lam_R = lam(np.diff(cu_seqlens))
            rest = (gamma * (1 - lam_R)).astype(np.float32).repeat(np.diff(cu_seqlens))[:-1]
        else:
            lam_R, rest = lam, np.float32(gamma * (1 - lam))
        np.multiply(values_N[1:], rest, out=steps_N[:-1])
        steps_N[cu_seqlens[1:][np.diff(cu_seqlens) > 0] - 1] = (
            0  # nothing follows the last token of a row
        )
        steps_N += rewards_N
        returns_N = _discounted_sums(steps_N, cu_seqlens, gamma * lam_R)
        return np.subtract(returns_N, values_N, out=steps_N), returns_N

    advantages, returns = _by_parts(of_part, rows, token_rewards, values, num_outputs=2)
    return advantages, returns


def discounted_returns(token_rewards: Tensor, rows: PackedRows, *, gamma: float = 1.0) -> Tensor:
    """Discounted future rewards: G_t = r_t + gamma G_t+1 over the trained tokens of a row; 0 at
    masked tokens.

    Whitened over the batch, and with a KL penalty in the rewards, this is the advantage of
    REINFORCE++ (arXiv:2501.03262). Raises a UserError if gamma is not between 0 and 1.

    >>> discounted_returns(torch.tensor([0.0, 1.0, 2.0]), PackedRows.of([2, 1]), gamma=0.5).tolist()
    [0.5, 1.0, 2.0]
    """
    if not 0 <= gamma <= 1:
        raise UserError(f"discounted_returns: gamma must be between 0 and 1, not {gamma}")

    def of_part(rewards_N: Floats, cu_seqlens: NDArray[np.int64]) -> tuple[Floats, ...]:
        return (_discounted_sums(rewards_N, cu_seqlens, gamma),)

    return _by_parts(of_part, rows, token_rewards, num_outputs=1)[0]


def whitened(values: Tensor, rows: PackedRows, *, shift: bool = True, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over all trained tokens of these rows, with the sample
    variance (division by n - 1). `shift=False` keeps the mean.

    Returns:
        [T] float32; 0 at masked tokens, whatever their values are. Equal values, or a single one,
            give 0, or stay unchanged with `shift=False`.

    >>> whitened(torch.tensor([1.0, 3.0, 99.0]), PackedRows.of([3], response_mask=[1, 1, 0])).tolist()
    [-0.7071..., 0.7071..., 0.0]
    """
    values_N, kept = _float32(values), None
    if RESPONSE_MASK in rows:
        kept = np.flatnonzero(rows[RESPONSE_MASK].numpy() != 0)
        values_N = values_N.take(kept)
    if not len(values_N):
        return torch.zeros_like(values, dtype=torch.float32)
    one = values_N[0]
    centred_N = values_N - one  # equal values give exact zeros
    mean = centred_N.mean()
    centred_N -= mean
    variance = np.dot(centred_N, centred_N) / max(len(centred_N) - 1, 1)
    centred_N *= 1 / np.sqrt(variance + np.float32(epsilon))
    if not shift:
        centred_N += mean + one
    if kept is None:
        return torch.from_numpy(centred_N)
    whitened_T = np.zeros(len(values), dtype=np.float32)
    whitened_T[kept] = centred_N
    return torch.from_numpy(whitened_T)


class ValueLoss(AggregatedLoss):
    """The critic's clipped squared error: l_t = max((V - R)^2, (clip(V, V_old - clip, V_old + clip)
    - R)^2) / 2, then aggregated.

    Clipping keeps V near V_old, the value behind the advantages, as in PPO's released
    implementation (not in its paper, arXiv:1707.06347).

    >>> rows = PackedRows.of([2], values=[0.0, 0.0], returns=[1.0, 1.0])
    >>> loss_sum, metrics = ValueLoss(clip=0.2)(torch.tensor([0.5, -0.5]), rows)  # the first may not earn beyond 0.2
    >>> round(loss_sum.item(), 4), metrics["clip_fraction"].value
    (1.445, 0.5)
    """

    clip: float | None = Field(default=0.2, gt=0)
    """[reward] Clip range around the old value; None disables clipping. Raise it if rewards are
    large or the critic learns too slowly."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(RETURNS),) if self.clip is None else (str(VALUES), str(RETURNS))

    def __call__(self, values: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss of predictions [T] before the engine divides it by the count, and means
        over trained tokens (`docs/metrics.md`). If every token is masked, the loss is 0 with a
        gradient of 0."""
        values, returns = rows.only_trained(values), rows.only_trained(rows[RETURNS])
        losses, watched = (values - returns).square(), {"value": values, "return": returns}
        if self.clip is not None:
            old = rows.only_trained(rows[VALUES])
            bounded = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            watched["clip_fraction"] = bounded > losses
            # Use the larger loss, so that moving beyond the clip range does not pay.
            losses = torch.maximum(losses, bounded)
        return (self.aggregation.weights(rows) * losses).sum() / 2, observed(rows.trained > 0, watched)


@node(reads=(TOKEN_REWARDS, VALUES), may_read=(RESPONSE_MASK,), writes=(ADVANTAGES, RETURNS))
def critic_advantages(
    samples: Batch,
    *,
    gamma: float = 1.0,
    lam: float | LengthAdaptive = 0.95,
    value_lam: float | None = None,
    whiten: bool = True,
) -> Batch:
    """Compute PPO's advantages and returns with `generalized_advantages`.

    Args:
        lam: for the advantages. `LengthAdaptive()` sets it for each row, by its length.
        value_lam: for the returns, the critic's targets; None uses `lam`. VAPO (arXiv:2504.05118)
            uses 1, so that the targets have no bias from the critic, and a `LengthAdaptive()`
            `lam`.
        whiten: normalize the advantages of all trained tokens of one call to mean 0 and standard
            deviation 1. A call covers the whole step under `Synchronous`, or the ready rows under
            other schedules; if `functions` has several ranks, only a rank's own rows.

    >>> samples = Batch.of(response_ids=[[5, 6]], token_rewards=[[0.0, 1.0]], values=[[0.5, 0.5]])
    >>> critic_advantages(samples, lam=1.0, whiten=False).select(("advantages", "returns")).to_rows()
    [{'advantages': [0.5, 0.5], 'returns': [1.0, 1.0]}]
    """
    rows = response_rows(samples, TOKEN_REWARDS, VALUES)
    advantages, returns = generalized_advantages(
        rows[TOKEN_REWARDS], rows[VALUES], rows, gamma=gamma, lam=lam
    )
    if value_lam is not None and value_lam != lam:
        _, returns = generalized_advantages(
            rows[TOKEN_REWARDS], rows[VALUES], rows, gamma=gamma, lam=value_lam
        )
    advantages = whitened(advantages, rows) if whiten else advantages
    cu_seqlens = rows.cu_seqlens
    return samples.with_columns(advantages=(advantages, cu_seqlens), returns=(returns, cu_seqlens))


@node(reads=(TOKEN_REWARDS,), may_read=(RESPONSE_MASK,), writes=(ADVANTAGES,))
def return_advantages(samples: Batch, *, gamma: float = 1.0, whiten: bool = True) -> Batch:
    """Use discounted future rewards as advantages; if whitened, this is REINFORCE++
    (arXiv:2501.03262).

    >>> samples = Batch.of(response_ids=[[5, 6], [7]], token_rewards=[[0.0, 1.0], [0.5]])
    >>> return_advantages(samples, whiten=False)["advantages"].to_pylist()
    [[1.0, 1.0], [0.5]]
    """
    rows = response_rows(samples, TOKEN_REWARDS)
    advantages = discounted_returns(rows[TOKEN_REWARDS], rows, gamma=gamma)
    advantages = whitened(advantages, rows) if whiten else advantages
    return samples.with_columns(advantages=(advantages, rows.cu_seqlens))


def _by_parts(
    of_part: Callable[..., tuple[Floats, ...]], rows: PackedRows, *columns: Tensor, num_outputs: int
) -> tuple[Tensor, ...]:
    """Apply a function to the trained tokens of some rows at a time, so that they fit in the CPU's
    cache.

    `of_part` maps the columns [N] and `cu_seqlens` of some rows, without masked tokens, to outputs
    [N]. Returns each output as [T] float32, with 0 at masked tokens.
    """
    cu_seqlens = rows.cu_seqlens.to(torch.int64).numpy()
    mask = rows[RESPONSE_MASK].numpy() if RESPONSE_MASK in rows else None
    inputs = [_float32(column) for column in columns]
    outputs = [np.empty(len(columns[0]), dtype=np.float32) for _ in range(num_outputs)]
    first = 0
    while first < len(rows):
        # Take at least one row, even if it is longer than a part.
        last = max(first + 1, int(cu_seqlens.searchsorted(cu_seqlens[first] + _PART, side="right")) - 1)
        part = slice(cu_seqlens[first], cu_seqlens[last])
        starts = cu_seqlens[first : last + 1] - cu_seqlens[first]
        columns_N = [column[part] for column in inputs]
        if mask is None:
            for output, made in zip(outputs, of_part(*columns_N, starts), strict=True):
                output[part] = made
        else:
            kept = np.flatnonzero(mask[part] != 0)  # many times faster for bool than for integers
            found = of_part(*(column.take(kept) for column in columns_N), kept.searchsorted(starts))
            for output, made in zip(outputs, found, strict=True):
                target, places = torch.from_numpy(output[part]), torch.from_numpy(kept)
                target.zero_().scatter_(0, places, torch.from_numpy(made))
        first = last
    return tuple(map(torch.from_numpy, outputs))


def _float32(column: Tensor) -> Floats:
    return column.detach().to(torch.float32).numpy()


def _discounted_sums(
    values_N: Floats, cu_seqlens: NDArray[np.int64], c: float | NDArray[np.float64]
) -> Floats:
    """Compute y_t = x_t + c y_t+1 within each row, without a loop over tokens. `c` is one number, or
    one for each row.

    Rows are cut into blocks of `_BLOCK` tokens. The same recursion, with c^_BLOCK, gives the carry
    between blocks. Each block is then a product with a triangular matrix of powers of c.
    """
    if not isinstance(c, float | int):
        ends = zip(cu_seqlens, cu_seqlens[1:], c, strict=False)
        parts = [_discounted_sums(values_N[a:b], np.array([0, b - a]), float(of)) for a, b, of in ends]
        return np.concatenate(parts) if parts else values_N
    lengths = np.diff(cu_seqlens)
    num_blocks = -(-lengths // _BLOCK)
    filled = lengths > 0
    ends = num_blocks.cumsum()  # the last block of a row is ends - 1
    tokens = np.full(ends[-1] if len(ends) else 0, _BLOCK, dtype=np.int8)
    tokens[ends[filled] - 1] = (lengths[filled] - 1) % _BLOCK + 1
    taken = np.arange(_BLOCK, dtype=np.int8) < tokens[:, None]
    blocks = np.empty(taken.shape, dtype=np.float32)
    blocks[ends[filled] - 1] = 0  # last blocks may be partial; all others are full
    blocks[taken] = values_N
    powers = np.float64(c) ** np.arange(_BLOCK)
    if num_blocks.max(initial=0) > 1:
        sums, cuts = blocks @ powers.astype(np.float32), np.concatenate([[0], ends])
        heads = _discounted_sums(sums, cuts, c**_BLOCK)
        handed_on = np.append(heads[1:], np.float32(0))
        handed_on[ends[filled] - 1] = 0
        blocks[:, -1] += np.float32(c) * handed_on
    position = np.arange(_BLOCK)
    steps_on = position[:, None] - position
    matrix = np.where(steps_on >= 0, powers[np.maximum(steps_on, 0)], 0).astype(np.float32)
    return (blocks @ matrix)[taken]
