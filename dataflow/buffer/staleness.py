"""Staleness: the policy version of an episode, and the fate of groups that are too old.

The rank that publishes a row computes its version (`row_versions`). The ledger, its log and the
checker compare only these numbers with the bound, so they hold for any `VersionOf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..batch import Batch
from ..column import EPISODE_ID, RESPONSE_MASK, RESPONSE_VERSIONS, TURN_ENDS
from .rows import LevelRows, places_in

VersionOf: TypeAlias = Literal["oldest_token", "newest_turn"] | float
"""The part of an episode whose policy version counts.

- oldest_token: its oldest sampled token.
- newest_turn: the oldest sampled token of its newest turn. A row without `turn_ends` is one turn.
- a share s from 0 to 1: the newest version v such that at most this share of its sampled tokens is
  older than v. So the episode is too old if more than this share is. 0 is its oldest token.
"""

Fate = Literal["wait", "mask", "requeue", "drop"]
"""How to handle a group that is too old for an update (see `Ledger._set_aside`).

- wait: keep the group until the bound is larger.
- mask: train on it, but mask all tokens of its stale rows.
- requeue: drop it and issue its prompt again.
- drop: drop it.
"""


@dataclass(frozen=True)
class Staleness:
    """Staleness bound of an update, checked when it claims rows."""

    version: int
    """Policy version of the weights to train."""
    bound: int
    """Maximum allowed difference between `version` and the version of a row."""
    fate: Fate = "wait"

    def too_old(self, rows: LevelRows, mask: int) -> list[int]:
        """Return the places of the rows in `mask` that are too old. Rows that no policy generated
        never become too old."""
        versions, oldest = rows.versions, self.version - self.bound
        return [
            place for place in places_in(mask) if (v := versions[place]) is not None and 0 <= v < oldest
        ]


def row_versions(samples: Batch, version_of: VersionOf = "oldest_token") -> np.ndarray:
    """Return the policy version of each row, `[rows]` int64. Rows of an episode have the same
    version; -1 if the episode has no sampled token.

    Args:
        samples: whole episodes. Reads `response_versions` and, if they exist, `response_mask` (0 for
            tokens that the policy did not sample), `turn_ends` and `episode_id`.

    >>> samples = Batch.of(response_versions=[[1, 2, 2, 4, 3]], turn_ends=[[1, 3, 5]])
    >>> [int(row_versions(samples, of)[0]) for of in ("oldest_token", "newest_turn", 0.5)]
    [1, 3, 2]
    """
    versions, offsets = samples.ragged_numpy(RESPONSE_VERSIONS)
    places = np.arange(len(versions))
    if RESPONSE_MASK in samples:
        places = np.flatnonzero(samples.ragged_numpy(RESPONSE_MASK)[0])
    episode_of_row = np.arange(len(samples))
    if EPISODE_ID in samples:
        episode_of_row = np.unique(samples.numpy(EPISODE_ID), return_inverse=True)[1]
    found = np.full(len(samples), -1, np.int64)  # of each episode; there are at most as many as rows
    if not len(places):
        return found
    sampled = versions[places]
    episodes = episode_of_row[np.searchsorted(offsets, places, side="right") - 1]
    if isinstance(version_of, str):
        ends = offsets[1:]
        if version_of == "newest_turn" and TURN_ENDS in samples:
            within, cu_turns = samples.ragged_numpy(TURN_ENDS)
            ends = np.union1d(ends, np.repeat(offsets[:-1], np.diff(cu_turns)) + within)
        first = np.flatnonzero(np.diff(np.searchsorted(ends, places, side="right"), prepend=-1))
        oldest = np.minimum.reduceat(sampled, first)  # of each turn or row
        found[episodes[first]] = oldest
        combine = np.maximum if version_of == "newest_turn" else np.minimum
        combine.at(found, episodes[first], oldest)
    else:
        order = np.lexsort((sampled, episodes))
        numbers = np.bincount(episodes, minlength=len(samples))
        begins = np.cumsum(numbers) - numbers
        chosen = np.minimum((version_of * numbers).astype(np.int64), numbers - 1)
        there = numbers > 0
        found[there] = sampled[order][(begins + chosen)[there]]
    return found[episode_of_row]
