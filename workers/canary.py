"""Canary: compare the log-probabilities of trainer and generator before a rank serves the run.

Checksums show that weights have arrived; the canary shows that both sides compute the same with
them. A rank samples it once, after its first weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT_IDS, RESPONSE_IDS
from ..dataflow.errors import WeightSyncError

NUM_ROWS = 4
PROMPT_TOKENS = 4
RESPONSE_TOKENS = 12

LARGEST_GAP = 1e-3
"""[nats] Limit on the mean gap over tokens if both sides compute in float32; 1e-6 is usual
(docs/benchmarks.md)."""
LARGEST_HALF_GAP = 0.2
"""[nats] The same limit if either side computes in half precision; a few hundredths are usual."""


@dataclass(frozen=True)
class Canary:
    """Samples of a rank, as plain data."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities of each response's tokens, in nats."""
    exact: bool
    """Whether the rank computes in float32."""


def canary_prompts(vocabulary: int | None) -> list[np.ndarray]:
    """Return the prompts that every rank answers, [PROMPT_TOKENS] int32 each.

    >>> len(canary_prompts(100)), int(max(ids.max() for ids in canary_prompts(3))) < 3
    (4, True)
    """
    # If config.json gives no vocabulary size, only the smallest ids are sure to be valid.
    drawn = np.random.default_rng(0).integers(0, vocabulary or 2, (NUM_ROWS, PROMPT_TOKENS))
    return list(drawn.astype(np.int32))


def canary_rows(canary: Canary) -> Batch:
    """Return the canary as rows, for the trainer's log-probabilities."""
    prompts, responses = ([list(ids) for ids in rows] for rows in (canary.prompts, canary.responses))
    return Batch.of(**{str(PROMPT_IDS): prompts, str(RESPONSE_IDS): responses})


def check_canary(
    receiver: str, version: int, canary: Canary, logprobs: np.ndarray, *, exact: bool
) -> None:
    """Compare a rank's log-probabilities with the trainer's, [tokens]. Raises a WeightSyncError if
    the mean difference is too large or nan."""
    own = np.array([value for response in canary.logprobs for value in response])
    gap = float(np.abs(own - logprobs).mean())
    bound = LARGEST_GAP if exact and canary.exact else LARGEST_HALF_GAP
    # Also true for nan.
    if not gap <= bound:
        raise WeightSyncError(
            f"weights version {version}: the log-probabilities of {receiver} for {len(own)} "
            f"tokens are {gap:.3g} nats from the trainer's in the mean, more than "
            f"{bound:g}. It computes something else with the same weights: compare model "
            "folders, dtypes and engine settings of both groups"
        )
