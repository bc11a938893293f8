"""Weights published by ranks arrive in another process, or in the same, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import open_weights as open_weights_module
from weft.resharding.box import Box
from weft.resharding.open_weights import open_weights
from weft.resharding.publisher import WeightPublisher
from weft.resharding.tensor_receiver import receive_parts
from weft.resharding.weights import Part, RankWeights, Weights, whole


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(33, 7),
        "model.norm.weight": torch.randn(7, dtype=torch.bfloat16),
        "transposed": torch.randn(5, 3).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "steps": torch.arange(9),
    }


Publish = Callable[..., Weights]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Publishes parts, by a publisher of its own each time, until the test is over."""
    publishers: list[WeightPublisher] = []

    def publish(parts: Iterable[Part], version: int = 1) -> Weights:
        publishers.append(WeightPublisher())
        return publishers[-1].publish(parts, version)

    yield publish
    for publisher in publishers:
        publisher.close()


def _empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}


def _received(weights: Weights, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = _empty_like(like)
    receive_parts(open_weights(weights), list(whole(found)))
    return found


def _equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(found[n].dtype == wanted[n].dtype and torch.equal(found[n], wanted[n]) for n in wanted)


def _rows(tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> list[Part]:
    """What one of several ranks gives: a share of the rows of each tensor; what has no rows is the first rank's."""
    parts: list[Part] = []
    for part in whole(tensors):
        if not part.shape:
            parts += [part] * (rank == 0)
            continue
        start, stop = part.shape[0] * rank // ranks, part.shape[0] * (rank + 1) // ranks
        parts.append(part._replace(box=Box.along(part.shape, 0, start, stop), tensor=part.tensor[start:stop]))
    return parts


def test_every_kind_of_tensor_comes_back_in_the_same_process() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish(whole(_tensors()), version=3)
    assert weights.version == 3
    assert _equal(_received(weights, _tensors()), _tensors())
    publisher.close()


def test_ranks_publish_their_own_parts_and_receivers_put_them_together(publish: Publish) -> None:
    first, second, third = (publish(_rows(_tensors(), rank, 3)) for rank in range(3))
    weights = first + second + third
    assert len(weights.ranks) == 3
    assert weights.checksum == publish(whole(_tensors()), version=1).checksum, "however it is cut"
    assert _equal(_received(weights, _tensors()), _tensors())


def test_receivers_that_hold_parts_add_up_what_arrived(publish: Publish) -> None:
    tensors = {name: tensor for name, tensor in _tensors().items() if tensor.ndim}
    weights = publish(whole(tensors))
    sums: list[np.ndarray] = []
    for rank in range(2):
        with pytest.raises(WeightSyncError, match="another rank of its group has something else"):
            receive_parts(
                open_weights(weights),
                _rows(_empty_like(tensors), rank, 2),
                None,
                lambda own: sums.append(own.copy()) or own,
            )
    for rank in range(2):
        parts = _rows(_empty_like(tensors), rank, 2)
        receive_parts(open_weights(weights), parts, None, lambda own: sums[0] + sums[1])
        assert all(torch.equal(part.tensor, tensors[part.name][part.box.slices]) for part in parts)


def test_of_ranks_that_hold_equal_parts_one_is_counted(publish: Publish) -> None:
    weights = publish(whole(_tensors()))
    found = _empty_like(_tensors())
    receive_parts(open_weights(weights), list(whole(found)), [False] * len(found), lambda own: own + _sums(weights))
    assert _equal(found, _tensors())


def _sums(weights: Weights) -> np.ndarray:
    opened = open_weights(weights)
    return np.array([opened.published_sum(name) for name in opened.layout.tensors], np.uint64).view(np.int64)


def test_the_next_version_reuses_the_memory_and_has_another_checksum() -> None:
    publisher = WeightPublisher()
    first = publisher.publish(whole(_tensors()), version=1)
    layout = open_weights(first).layout
    changed = _tensors() | {"steps": torch.arange(9) + 1}
    second = publisher.publish(whole(changed), version=2)
    assert first.ranks == second.ranks
    assert first.checksum != second.checksum
    assert open_weights(second).layout is layout, "so that plans are used again"
    assert _equal(_received(second, changed), changed)


def test_memory_grows_with_the_weights() -> None:
    publisher = WeightPublisher()
    for version, size in enumerate((10, 5_000, 3, 100_000)):
        tensors = {"a": torch.randn(size), "b": torch.randn(size, 2)}
        assert _equal(_received(publisher.publish(whole(tensors), version), tensors), tensors)


@pytest.mark.parametrize("into", ["weights", "sums", "description"])
def test_changed_bytes_are_found_and_named(into: str) -> None:
    publisher = WeightPublisher()
    weights = publisher.publish(whole(_tensors()), version=7)
    (rank,) = weights.ranks
    place = {"weights": 40, "description": -10, "sums": -rank.header_bytes - 4}[into]
    with open(rank.location, "r+b") as file:
        file.seek(place if place > 0 else rank.num_bytes + place)
        file.write(b"\xa5")
    message = {
        "weights": r"tensor 'model.embed_tokens.weight' did not arrive .*Box\(\[0:33, 0:7\]\) has changed in the memory of rank 0",
        "sums": rf"version 7: checksum {weights.checksum} was published, [0-9a-f]{{16}} was",
        "description": "the description of its parts is not the one that was published",
    }[into]
    with pytest.raises(WeightSyncError, match=message):
        _received(weights, _tensors())


def test_what_changes_on_its_way_is_named_with_both_ranks(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = publish(whole({"a": torch.ones(4, 2)}), version=1)
    real = open_weights_module._Mapped.read
    seen: list[int] = []

    def once_wrong(*arguments: object) -> torch.Tensor:
        found = real(*arguments)  # pyright: ignore[reportArgumentType]
        seen.append(1)
        return found + 1 if len(seen) == 1 else found

    monkeypatch.setattr(open_weights_module._Mapped, "read", once_wrong)
    with pytest.raises(
        WeightSyncError, match=r"'a' did not arrive .*Box\(\[0:4, 0:2\]\) from rank 0 differs at rank 0"
    ):
        _received(weights, {"a": torch.zeros(4, 2)})


def test_a_receiver_of_an_older_version_is_told() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish(whole(_tensors()), version=1)
    publisher.publish(whole(_tensors()), version=2)
    with pytest.raises(WeightSyncError, match=r"version 1, rank 0 .*: version 2 was published before"):
        open_weights(weights)
    publisher.publish(whole({"other": torch.zeros(9_000)}), version=3)
    with pytest.raises(WeightSyncError, match=r"version 1, rank 0 .*: the description of its parts is not the one"):
        open_weights(weights)


def test_ranks_whose_parts_do_not_make_up_a_tensor_are_refused(publish: Publish) -> None:
    first, second = (
        [Part("a", (4,), Box((start,), (stop,)), torch.ones(stop - start))] for start, stop in ((0, 2), (2, 3))
    )
    weights = publish(first, 1) + publish(second, 1)
    with pytest.raises(WeightSyncError, match="the ranks published 3 elements of tensor 'a', which has 4"):
        open_weights(weights)


def test_versions_of_different_numbers_do_not_add_up(publish: Publish) -> None:
    first, second = (publish(whole({"a": torch.ones(1)}), version) for version in (1, 2))
    with pytest.raises(ValueError, match="versions 1 and 2 do not add up"):
        _ = first + second


def test_weights_of_another_dtype_are_cast_and_checked_as_they_were_read(publish: Publish) -> None:
    weights = publish(whole({"a": torch.tensor([1.0, 1 + 2**-12])}), version=1)
    assert _received(weights, {"a": torch.zeros(2, dtype=torch.bfloat16)})["a"].tolist() == [1.0, 1.0]


def test_a_tensor_published_twice_is_refused(publish: Publish) -> None:
    twice = [*whole({"a": torch.ones(1)}), *whole({"a": torch.ones(1)})]
    with pytest.raises(WeightSyncError, match=r"Box\(\[0:1\]\) of tensor 'a' was published twice"):
        publish(twice)


def test_writing_to_received_tensors_changes_nothing_for_others(publish: Publish) -> None:
    weights = publish(whole({"a": torch.ones(4)}), version=1)
    open_weights(weights).part("a", 0, 0, Box.full((4,))).zero_()
    assert open_weights(weights).part("a", 0, 0, Box.full((4,))).tolist() == [1, 1, 1, 1]


def test_tensors_are_asked_for_one_at_a_time(publish: Publish) -> None:
    alive: list[int] = []

    class Counted:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def gather():
        for index in range(4):
            tensor = torch.full((8,), float(index))
            tensor.counted = Counted()  # pyright: ignore[reportAttributeAccessIssue]
            assert len(alive) <= 2  # the one being made, and the one that the caller's loop variable still names
            yield Part(f"t{index}", (8,), Box.full((8,)), tensor)
            del tensor

    weights = publish(gather(), version=1)
    assert len(open_weights(weights).layout.tensors) == 4


def test_another_process_maps_the_weights_and_nothing_is_left_when_it_is_killed() -> None:
    program = (
        "import dataclasses, json, time, torch\n"
        "from weft.resharding.publisher import WeightPublisher\n"
        "from weft.resharding.weights import whole\n"
        "p = WeightPublisher()\n"
        "weights = p.publish(whole({'a': torch.arange(1000.0)}), version=5)\n"
        "print(json.dumps(dataclasses.asdict(weights)), flush=True)\n"
        "time.sleep(60)\n"
    )
    before = set(os.listdir("/dev/shm"))
    publisher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert publisher.stdout is not None
    try:
        fields = json.loads(publisher.stdout.readline())
        weights = Weights(**fields | {"ranks": tuple(RankWeights(**rank) for rank in fields["ranks"])})
        assert _received(weights, {"a": torch.zeros(1000)})["a"].sum() == 499500
    finally:
        publisher.kill()
        publisher.wait()
        publisher.stdout.close()
    with pytest.raises(WeightSyncError, match=r"version 5, .* cannot be opened .* has the process"):
        open_weights(weights)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "weft" in name]
