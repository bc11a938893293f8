"""Parts are cut into buckets: no element is lost or repeated, and no bucket exceeds its limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.errors import WeightSyncError
from weft.resharding.buckets import Cutter, Entry, described, layout_of, read_description
from weft.resharding.weights import Box, TensorPart, whole


def cut(parts: Iterable[TensorPart], bucket_bytes: int) -> list[tuple[Entry, torch.Tensor]]:
    return Cutter(bucket_bytes).cut(parts)


shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(4, 400))
def test_every_element_is_in_one_bucket_and_no_bucket_is_too_large(
    shapes: list[tuple[int, ...]], bucket_bytes: int
):
    tensors = {
        f"t{n}": torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
        for n, shape in enumerate(shapes)
    }
    entries = cut(whole(tensors), bucket_bytes)
    found = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    for entry, elements in entries:
        target = found[entry.name][entry.box.slices]
        assert (target == -1).all(), "an element is in two entries"
        target.copy_(elements)
        assert entry.offset + entry.num_bytes <= bucket_bytes
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert [entry.bucket for entry, _ in entries] == sorted(entry.bucket for entry, _ in entries)
    for (one, _), (two, _) in itertools.pairwise(entries):
        assert two.bucket == one.bucket + 1 or two.offset >= one.offset + one.num_bytes


def test_equal_parts_are_cut_alike_so_that_they_share_a_plan():
    entries = cut(whole({"a": torch.zeros(10, 4), "first": torch.zeros(3), "b": torch.zeros(10, 4)}), 64)
    boxes = {name: [entry.box for entry, _ in entries if entry.name == name] for name in ("a", "b")}
    assert boxes["a"] == boxes["b"] == [Box((s, 0), (min(s + 4, 10), 4)) for s in (0, 4, 8)]


def test_a_cast_part_counts_with_the_bytes_that_travel():
    part = TensorPart("a", (8,), Box.full((8,)), torch.zeros(8), torch.bfloat16)
    ((entry, _),) = cut([part], 16)
    assert (entry.dtype, entry.num_bytes) == ("bfloat16", 16)


def test_a_description_is_read_unchanged_and_once():
    entries = [entry for entry, _ in cut(whole({"a": torch.zeros(10, 4), "b": torch.tensor(1.0)}), 128)]
    read = read_description(described(entries))
    assert list(read.entries) == entries and read is read_description(described(entries))
    assert read.numbers == {"a": [0, 1], "b": [2]} and read.buckets == ((0,), (1, 2))


def test_a_part_that_occurs_twice_is_refused():
    with pytest.raises(WeightSyncError, match=r"Box\(\[0:1\]\) of tensor 'a' was published twice"):
        cut([*whole({"a": torch.ones(1)}), *whole({"a": torch.ones(1)})], 64)


def test_parts_that_do_not_make_up_a_tensor_are_refused():
    parts = [
        TensorPart("a", (4,), Box((start,), (stop,)), torch.ones(stop - start))
        for start, stop in ((0, 2), (2, 3))
    ]
    ranks = tuple(read_description(described(entry for entry, _ in cut([part], 64))) for part in parts)
    with pytest.raises(WeightSyncError, match="the ranks publish 3 elements of tensor 'a', which has 4"):
        layout_of(ranks)


def test_a_version_of_the_same_parts_has_the_same_entries_and_its_own_elements():
    cutter = Cutter(64)
    first, second = (
        {"a": torch.full((10, 4), value), "b": torch.full((3,), value)} for value in (1.0, 2.0)
    )
    one, description = cutter.cut(whole(first)), cutter.description
    two = cutter.cut(whole(second))
    assert (
        all(a is b for (a, _), (b, _) in zip(one, two, strict=True))
        and cutter.description is description
    )
    assert {float(elements.unique()) for _, elements in two} == {2.0}
    other = cutter.cut(whole({"a": torch.zeros(10, 4).bfloat16(), "b": torch.zeros(3)}))
    assert {entry.dtype for entry, _ in other} == {
        "bfloat16",
        "float32",
    } and cutter.description != description
    with pytest.raises(WeightSyncError, match="twice"):
        cutter.cut([*whole(first), *whole(first)])
    assert [entry for entry, _ in cutter.cut(whole(first))] == [entry for entry, _ in one]
