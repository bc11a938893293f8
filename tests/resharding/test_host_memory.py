"""Copies in host memory by a single thread."""

from __future__ import annotations

import pytest
import torch

from weft.resharding.buckets import copy_elements


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.float64]
)
def test_the_bits_of_strided_views_are_copied_and_other_elements_stay(dtype: torch.dtype):
    source = (torch.arange(60).view(6, 10) % 3 == 1).to(dtype).t()
    target = torch.zeros(12, 10).to(dtype)
    copy_elements(target[1:11:2, :6], source[:5])
    assert torch.equal(target[1:11:2, :6].float(), source[:5].float())
    assert not target[::2].float().any() and not target[:, 6:].float().any()


def test_elements_are_cast_where_the_dtype_differs():
    target = torch.zeros(2, dtype=torch.bfloat16)
    copy_elements(target, torch.tensor([1.0, 1 + 2**-12]))
    assert target.tolist() == [1.0, 1.0]
    scalar = torch.zeros(())
    copy_elements(scalar, torch.tensor(2.5))
    assert scalar.item() == 2.5
