"""The policy version of an episode, and the bound on it."""

import random
from typing import Any

import numpy as np
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.staleness import VersionOf, row_versions

ALL: tuple[VersionOf, ...] = ("oldest_token", "newest_turn", 0.25, 0.5)


def test_the_versions_of_an_episode_by_hand():
    # A turn of versions 1 and 2, a tool's answer, a turn of versions 4 and 5, and a user's message.
    row: dict[str, Any] = {"response_versions": [[1, 2, 4, 4, 5, 5]]}
    row |= {"response_mask": [[1, 1, 0, 1, 1, 0]], "turn_ends": [[2, 5]]}
    samples = Batch.of(**row)
    assert [row_versions(samples, of)[0] for of in ALL] == [1, 4, 2, 4]
    assert row_versions(samples.select(["response_versions"]), "newest_turn")[0] == 1, "it is one turn"


def test_rows_of_an_episode_share_their_version_and_rows_without_a_sampled_token_have_none():
    samples = Batch.of(
        response_versions=[[3, 3], [], [1, 7], [0, 0]],
        response_mask=[[1, 1], [], [0, 1], [0, 0]],
        turn_ends=[[1, 2], [], [2], []],
        episode_id=[9, 5, 9, 7],
    )
    assert [row_versions(samples, of).tolist() for of in ALL] == [
        [3, -1, 3, -1],
        [7, -1, 7, -1],
        [3, -1, 3, -1],
        [3, -1, 3, -1],
    ]


def is_too_old(turns: list[list[list[int]]], of: VersionOf, oldest: int) -> bool:
    """Apply the definition. `turns` has the versions of the sampled tokens, by row and turn."""
    tokens = [version for row in turns for turn in row for version in turn]
    if of == "oldest_token":
        return any(version < oldest for version in tokens)
    if of == "newest_turn":
        return all(any(version < oldest for version in turn) for row in turns for turn in row if turn)
    return sum(version < oldest for version in tokens) > of * len(tokens)


@pytest.mark.parametrize("of", ALL)
def test_an_episode_is_too_old_exactly_if_its_definition_says_so(of: VersionOf):
    for seed in range(200):
        chance = random.Random(seed)
        rows: list[dict[str, Any]] = []
        turns: dict[int, list[list[list[int]]]] = {}
        for _ in range(chance.randint(1, 6)):
            episode = chance.randint(0, 3)
            row: dict[str, Any] = {"episode_id": episode, "response_versions": [], "response_mask": []}
            row["turn_ends"] = []
            sampled: list[list[int]] = []
            for _ in range(chance.randint(0, 3)):
                given = chance.randint(0, 2)
                turn = [chance.randint(0, 5) for _ in range(chance.randint(1, 4))]
                row["response_versions"] += [chance.randint(0, 5) for _ in range(given)] + turn
                row["response_mask"] += [0] * given + [1] * len(turn)
                row["turn_ends"].append(len(row["response_versions"]))
                sampled.append(turn)
            trailing = chance.randint(0, 2)
            row["response_versions"] += [0] * trailing
            row["response_mask"] += [0] * trailing
            rows.append(row)
            turns.setdefault(episode, []).append(sampled)
        samples = Batch.of(
            episode_id=[row["episode_id"] for row in rows],
            response_versions=ragged(rows, "response_versions", np.int32),
            response_mask=ragged(rows, "response_mask", np.uint8),
            turn_ends=ragged(rows, "turn_ends", np.int32),
        )
        versions = row_versions(samples, of)
        for row, version in zip(rows, versions.tolist(), strict=True):
            own = turns[row["episode_id"]]
            if not any(turn for each in own for turn in each):
                assert version == -1
                continue
            for oldest in range(7):
                assert (version < oldest) == is_too_old(own, of, oldest), (seed, row, oldest)


def ragged(rows: list[dict[str, Any]], name: str, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    values = [value for row in rows for value in row[name]]
    return np.array(values, dtype), np.cumsum([0, *(len(row[name]) for row in rows)], dtype=np.int32)
