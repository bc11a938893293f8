"""Messages between transfer backends survive a round trip through JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.resharding.vllm_control import decoded, encoded

HANDLE = (
    torch.Tensor, torch.Size([1 << 20]), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"\x00\xff" * 32, 1 << 20, 0, False,
    b"counter", 3, b"event", True,
)  # fmt: skip
"""CUDA memory in the form of `torch.multiprocessing.reductions.reduce_tensor`."""


@pytest.mark.parametrize(
    "value",
    [
        {"ipc_handles": {"GPU-1": HANDLE}, "names": ["a"], "shapes": [[2, 3]], "tensor_sizes": None},
        {"map": {"tuple": [1]}, "class": "torch.Tensor"},
        {"bytes": "AAAA"},
        [1.5, True, None, ["x"], (), {}],
        (torch.bfloat16, torch.nn.Parameter, torch.storage.TypedStorage),
    ],
)
def test_values_come_as_they_went(value: Any) -> None:
    found = decoded(encoded(value))
    assert found == value and str(found).replace("torch.Size([1048576])", "(1048576,)") == str(
        value
    ).replace("torch.Size([1048576])", "(1048576,)")


@pytest.mark.parametrize("value", [torch.zeros(1), {1: 2}, {"a": object()}, int])
def test_values_that_are_not_plain_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot encode"):
        encoded(value)


@pytest.mark.parametrize(
    "said",
    [
        '{"class": "os.system"}',
        '{"dtype": "load"}',
        '{"map": [1]}',
        '{"a": 1}',
        '{"bytes": 1}',
        '{"tuple": {}}',
    ],
)
def test_text_that_is_not_an_encoded_value_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="is not a payload of a transfer backend"):
        decoded(said)
