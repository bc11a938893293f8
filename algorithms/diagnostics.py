"""Diagnostics: numbers about what a step was trained on, beside those of its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..dataflow.metrics import Mean, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def length_bias(trained_lengths: ArrayLike, finished_lengths: ArrayLike) -> dict[str, Metric]:
    """Whether what was trained on is shorter or longer than what was sampled: the ratio of their mean lengths.

    Short responses finish first. A run that trains on the first that are ready, cancels the slowest, or drops what has become too
    old trains on short ones more often than they are sampled, and the policy learns to be short for no reason of the task.

    `length_ratio` is tokens trained on over tokens expected, had as many responses been drawn evenly from the finished ones.
    Kept as these two sums, it merges over windows and ranks without mixing one window's long prompts with another's short
    ones (an observed-to-expected ratio, as in indirect standardisation).

    Args:
        trained_lengths: [B] tokens of each response that was trained on in a window (a step, say).
        finished_lengths: [N] tokens of each response that was finished in it (or issued, where that is the question),
            the trained ones among them.

    Returns:
        `length_ratio` (1: no bias; below 1: short ones were favoured), `mean_trained_length` and `mean_finished_length`
        (tokens). Each has weight 0, and the value NaN, where its window is empty; it then changes nothing when merged.

    Raises:
        ValueError: for a negative length.

    >>> {name: metric.value for name, metric in length_bias([2, 4], [2, 4, 6, 12]).items()}
    {'length_ratio': 0.5, 'mean_trained_length': 3.0, 'mean_finished_length': 6.0}
    """
    trained, finished = (
        np.asarray(lengths, dtype=np.float64).ravel() for lengths in (trained_lengths, finished_lengths)
    )
    if min(trained.min(initial=0), finished.min(initial=0)) < 0:
        raise ValueError("a response has a negative length")
    total, number = float(trained.sum()), len(trained)
    expected = number * float(finished.mean()) if len(finished) else 0.0
    return {
        "length_ratio": Mean(total if expected else 0.0, expected),
        "mean_trained_length": Mean(total, number),
        "mean_finished_length": Mean(float(finished.sum()), len(finished)),
    }
