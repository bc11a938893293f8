"""Views as boxes, against torch's own views of a tensor of indices."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.resharding.weights import View, contiguous_strides, paired_boxes


def view_of(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def check(source: torch.Tensor, view: torch.Tensor, target: torch.Tensor) -> int:
    """Copy box by box, compare with a single copy, and return the number of boxes."""
    memory = target._base if target._base is not None else target
    pairs = paired_boxes(tuple(source.shape), view_of(view), view_of(target))
    assert sum(box.numel for box, _ in pairs) == view.numel()
    for box, there in pairs:
        memory.view(-1).as_strided(box.shape, there.strides, there.offset).copy_(source[box.slices])
    assert torch.equal(target, view)
    return len(pairs)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_views_of_loaders_are_one_box():
    weight = numbered(6, 4, 5)
    for view in (
        weight.narrow(0, 2, 3),
        weight[1, :, 2:4],
        weight.transpose(0, 2),
        weight.permute(2, 0, 1)[1:3, :2],
        weight.chunk(2, dim=1)[1].unbind()[3].unsqueeze(0),
        weight.view(2, 3, 4, 5).flatten(0, 1),
        weight.flatten(),
        weight.view(6, 20)[2:5],
        weight.view(24, 5)[:, 1:2],
    ):
        assert check(weight, view, torch.zeros(view.shape, dtype=torch.long)) == 1


def test_a_view_with_separated_parts_becomes_several_boxes():
    weight = numbered(6, 4)
    heads = weight.view(3, 2, 4)  # like a loader that interleaves rows of several projections
    target = torch.zeros(3, 5, 4, dtype=torch.long)[:, 1:3]
    assert check(weight, heads, target) == 3
    assert check(weight, weight[::2], torch.zeros(3, 4, dtype=torch.long)) == 3
    assert check(weight, weight[1::3, 1::2], torch.zeros(2, 2, dtype=torch.long)) == 4


def test_a_scalar_and_an_empty_view():
    scalar = torch.tensor(7)
    assert check(scalar, scalar, torch.zeros((), dtype=torch.long)) == 1
    assert check(scalar, scalar.reshape(1), torch.zeros(1, dtype=torch.long)) == 1
    assert check(numbered(4, 2), numbered(4, 2)[4:], torch.zeros(0, 2, dtype=torch.long)) == 0


@pytest.mark.parametrize(
    ("weight", "view", "message"),
    [
        (numbered(4, 3), lambda weight: weight.flatten()[:7], "ends inside of"),
        (numbered(4, 3), lambda weight: weight.flatten()[1:4], "wraps around"),
        (numbered(4, 3), lambda weight: weight[:1].expand(4, 3), "several times"),
        (numbered(4, 3), lambda weight: weight.as_strided((2, 2), (4, 1)), "runs along no dimension"),
        (numbered(1 << 18), lambda weight: weight[::2], "falls into 131072 boxes"),
    ],
)
def test_a_view_that_is_no_box_is_refused(
    weight: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], message: str
):
    seen = view_of(view(weight))
    with pytest.raises(ValueError, match=message):
        paired_boxes(tuple(weight.shape), seen, View(0, seen.shape, contiguous_strides(seen.shape)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_chain_of_views_is_copied_right_or_refused(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    weight = numbered(*shape)
    view, flattened = weight, False
    for _ in range(data.draw(st.integers(0, 4))):
        dim = data.draw(st.integers(0, view.ndim - 1))
        start = data.draw(st.integers(0, view.shape[dim] - 1))
        length = data.draw(st.integers(1, view.shape[dim] - start))
        match data.draw(st.sampled_from(["narrow", "transpose", "step", "split", "flatten"])):
            case "narrow":
                view = view.narrow(dim, start, length)
            case "transpose":
                view = view.transpose(0, dim)
            case "step":
                view = view[tuple([slice(None)] * dim + [slice(start, None, 2)])]
            case "split" if view.shape[dim] % length == 0:
                view = view.unflatten(dim, (length, -1))
            case "flatten" if view.is_contiguous():
                view, flattened = view.flatten(), True
            case _:
                pass
    room = torch.zeros([extent + 1 for extent in view.shape], dtype=torch.long)
    target = room[tuple(slice(1, None) for _ in view.shape)]
    try:
        check(weight, view, target)
    except ValueError:
        assert (
            flattened
            # a part of several rows in one dimension may not be a box; everything else is one or more
        )
