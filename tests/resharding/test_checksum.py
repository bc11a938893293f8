"""The checksum against a sum over elements in Python integers, and against transfer errors."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from weft.resharding import buckets
from weft.resharding.buckets import Entry, box_sum, checksum_of, tensor_factor
from weft.resharding.weights import Box


def splitmix(number: int) -> int:
    """SplitMix64's finaliser in unbounded integers, written independently."""
    mask = (1 << 64) - 1
    z = (number + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def value(element: torch.Tensor) -> int:
    """The bytes of an element as digits from -128 to 127, lowest first, independently."""
    content = element.reshape(1).view(torch.int8).tolist()
    return sum(digit * 256**place for place, digit in enumerate(content))


def slow_sum(tensor: torch.Tensor) -> int:
    total = 0
    leading = tensor.shape[:-1]
    for row, index in enumerate(itertools.product(*map(range, leading))):
        for column in range(tensor.shape[-1]):
            total += (
                value(tensor[(*index, column)])
                * (splitmix(2 * row) | 1)
                * (splitmix(2 * column + 1) | 1)
            )
    return total % (1 << 64)


def sums_by_each_way(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The sum by products of int8 matrices, by a sum over elements, and as on a device."""
    shape = tuple(tensor.shape)
    box = Box.full(shape)
    found = {box_sum(tensor, box, shape)}
    monkeypatch.setattr(buckets, "_FEW_ROWS", 0)
    found.add(box_sum(tensor, box, shape))
    monkeypatch.setattr(buckets, "_multiplies_exactly", lambda: False)
    found.add(box_sum(tensor, box, shape))
    if tensor.numel():
        matrix = tensor.reshape(-1, shape[-1])
        found.add(int(buckets._device_sum(matrix, box, shape)) % 2**64)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64]
)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 4, 5), (2, 0), (1,), (9, 2)])
def test_the_sum_is_that_over_elements(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    tensor = (torch.randn(shape) * 100).to(dtype)
    assert sums_by_each_way(tensor, monkeypatch) == {slow_sum(tensor)}


@pytest.mark.parametrize("value", [-128, -1, 0, 127])
def test_the_sum_is_exact_for_extreme_bytes_in_rows_longer_than_a_product(
    value: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(buckets, "_PRODUCT_BYTES", 512)
    tensor = torch.full((9, 1500), value, dtype=torch.int8).view(torch.bfloat16)
    assert sums_by_each_way(tensor, monkeypatch) == {slow_sum(tensor)}


def test_elements_with_different_bits_have_different_values():
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    assert len({box_sum(one, Box.full((1,)), (1,)) for one in every[:, None]}) == 2**16


def test_this_machine_multiplies_exactly():
    # Otherwise, `test_the_sum_is_that_over_elements` does not test the products.
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no VNNI instructions")
    assert buckets._multiplies_exactly()


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_however_the_tensor_is_cut(seed: int):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
    tensor = torch.randn(shape)
    parts = [Box.full(shape)]
    for _ in range(5):
        box = parts.pop(rng.randrange(len(parts)))
        dim = rng.randrange(len(shape))
        cut = rng.randint(box.starts[dim], box.stops[dim])
        first = Box(box.starts, (*box.stops[:dim], cut, *box.stops[dim + 1 :]))
        parts += [part for part in (first, *box.minus(first)) if part.numel]
    # the same values with other strides
    strided = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    total = sum(box_sum(strided[part.slices], part, shape) for part in parts) % (1 << 64)
    assert total == box_sum(tensor, Box.full(shape), shape)


def test_a_scalar_has_a_sum():
    one, two = (box_sum(torch.tensor(value), Box.full(()), ()) for value in (1.0, 2.0))
    assert one != two


def test_each_mistake_on_the_way_changes_the_sum():
    shape = (6, 8)
    tensor = torch.randn(shape)
    right = box_sum(tensor, Box.full(shape), shape)
    swapped_rows, swapped_columns, shifted, one_bit = (tensor.clone() for _ in range(4))
    swapped_rows[[1, 2]] = tensor[[2, 1]]
    swapped_columns[:, [0, 7]] = tensor[:, [7, 0]]
    shifted[:] = tensor.roll(1)
    one_bit.view(torch.int32)[3, 3] ^= 1
    exchanged = tensor.view(8, 6).t()
    for wrong in (swapped_rows, swapped_columns, shifted, one_bit, exchanged, torch.zeros(shape)):
        assert box_sum(wrong, Box.full(shape), shape) != right


def test_the_sum_of_a_model_knows_names_dtypes_and_shapes():
    kinds = (
        ("a", "float32", (2, 3)),
        ("b", "float32", (2, 3)),
        ("a", "int32", (2, 3)),
        ("a", "float32", (3, 2)),
    )
    factors = [tensor_factor(*of) for of in kinds]
    assert len(set(factors)) == 4
    assert all(factor % 2 for factor in factors)
    entries = [Entry(name, dtype, shape, Box.full(shape), 0, 0) for name, dtype, shape in kinds]
    assert (
        checksum_of(entries[:2], [5, 6])
        == (5 * factors[0] + 6 * factors[1]) % 2**64
        != checksum_of(entries[:2], [6, 5])
    )
    ranks = [checksum_of(entries[:1], [5]), checksum_of(entries[1:], [6, 7, 8])]
    assert sum(ranks) % 2**64 == checksum_of(entries, [5, 6, 7, 8])
