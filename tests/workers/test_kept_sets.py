"""Kept sets: compact storage, and the conversions between masks, lists and columns."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weft.dataflow.batch import Batch
from weft.workers.kept_sets import KeptSets, KeptSetsRecord, kept_columns, record_kept_sets

masks = arrays.arrays(bool, st.tuples(st.integers(1, 5), st.integers(1, 9))).map(
    lambda mask: mask | (np.arange(mask.shape[1]) == 0)  # a set has at least the sampled token
)


def mask_of(sets: KeptSets, vocabulary: int) -> list[list[bool]]:
    """Return the sets as masks, by the definition of the columns."""
    found, start = [], 0
    for count in sets.counts.tolist():
        ids = {*sets.ids[start : start + abs(count)].tolist()}
        assert len(ids) == abs(count)
        start += abs(count)
        found.append([(token in ids) == (count > 0) for token in range(vocabulary)])
    return found


@given(masks)
def test_a_mask_is_stored_as_its_smaller_side(mask: np.ndarray):
    sets, vocabulary = KeptSets.of_mask(torch.from_numpy(mask)), mask.shape[1]
    assert mask_of(sets, vocabulary) == mask.tolist()
    assert (2 * np.abs(sets.counts) <= vocabulary).all()
    assert (sets.counts == 0).tolist() == mask.all(1).tolist(), "a full set needs no ids"
    assert sets.ids.nbytes == 4 * np.minimum(mask.sum(1), (~mask).sum(1)).sum()


@given(masks)
def test_lists_of_kept_ids_give_the_sets_of_the_mask(mask: np.ndarray):
    lists = [np.flatnonzero(row)[::-1].tolist() for row in mask]
    assert mask_of(KeptSets.of_lists(lists, mask.shape[1]), mask.shape[1]) == mask.tolist()


@given(st.lists(masks, min_size=1, max_size=4), st.data())
def test_parts_and_sums_of_sets_are_those_of_their_tokens(
    several: list[np.ndarray], data: st.DataObject
):
    parts = [KeptSets.of_mask(torch.from_numpy(mask)) for mask in several]
    whole = KeptSets.concat(parts)
    each = [row for mask in several for row in mask]
    start = data.draw(st.integers(0, len(each)))
    stop = data.draw(st.integers(start, len(each)))
    cut = whole[start:stop]
    for token, row in enumerate(each[start:stop]):
        assert mask_of(cut[token : token + 1], len(row)) == [row.tolist()]


@given(st.lists(masks.filter(lambda mask: len(mask) == 2), min_size=1, max_size=4))
def test_a_record_grows_by_a_token_in_each_step(steps: list[np.ndarray]):
    records = [KeptSetsRecord() for _ in range(2)]
    for mask in steps:
        record_kept_sets(torch.from_numpy(mask), records)
    for row, record in enumerate(records):
        for step, mask in enumerate(steps):
            assert mask_of(record.sets[step : step + 1], mask.shape[1]) == [mask[row].tolist()]


def test_columns_of_rows_survive_a_batch_and_its_slices():
    rows = [
        KeptSets(np.array([2, 0, -1], np.int32), np.array([5, 6, 9], np.int32)),
        KeptSets.whole(2),
        KeptSets(np.array([1], np.int32), np.array([3], np.int32)),
    ]
    batch = Batch.of(**kept_columns(rows)).take([2, 0, 1]).slice(1, 2)
    assert batch["kept_counts"].to_pylist() == [[2, 0, -1], [0, 0]]
    assert batch["kept_ids"].to_pylist() == [[5, 6, 9], []]
    assert len(Batch.of(**kept_columns([]))) == 0
