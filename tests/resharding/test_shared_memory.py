"""Weights published by one process arrive in another, or in the same, byte for byte."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding.shared_memory import WeightPublisher, open_weights
from weft.resharding.weights import TensorEntry, Weights


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


def _equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    same_kind = all(found[n].dtype == wanted[n].dtype and found[n].shape == wanted[n].shape for n in wanted)
    return list(found) == list(wanted) and same_kind and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_every_kind_of_tensor_comes_back_in_the_same_process() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish(_tensors().items(), version=3)
    assert weights.version == 3
    assert _equal(open_weights(weights), _tensors())
    publisher.close()


def test_the_next_version_reuses_the_memory_and_has_another_checksum() -> None:
    publisher = WeightPublisher()
    first = publisher.publish(_tensors().items(), version=1)
    changed = _tensors() | {"steps": torch.arange(9) + 1}
    second = publisher.publish(changed.items(), version=2)
    assert first.location == second.location and first.num_bytes == second.num_bytes
    assert first.checksum != second.checksum
    assert _equal(open_weights(second), changed)


def test_changed_bytes_are_found_and_named() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish(_tensors().items(), version=7)
    with open(weights.location, "r+b") as file:
        file.seek(weights.tensors[-1].offset)
        file.write(b"\x01")
    with pytest.raises(
        WeightSyncError, match=rf"version 7: checksum {weights.checksum} was published, [0-9a-f]{{8}} was"
    ):
        open_weights(weights)


def test_a_receiver_of_an_older_version_is_told() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish(_tensors().items(), version=1)
    publisher.publish([("other", torch.zeros(2))], version=2)
    with pytest.raises(WeightSyncError, match=r"version 1: .* bytes were published, 8 found"):
        open_weights(weights)


def test_the_same_bytes_under_another_name_or_shape_are_other_weights() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish([("a", torch.ones(4, 2))], version=1)
    for changed in ({"name": "b"}, {"shape": (2, 4)}, {"dtype": "int32"}):
        entry = dataclasses.replace(weights.tensors[0], **changed)  # pyright: ignore[reportArgumentType]
        with pytest.raises(WeightSyncError, match="checksum"):
            open_weights(dataclasses.replace(weights, tensors=(entry,)))


def test_a_tensor_published_twice_is_refused() -> None:
    twice = [("a", torch.ones(1)), ("a", torch.ones(1))]
    with pytest.raises(WeightSyncError, match="'a' was published twice"):
        WeightPublisher().publish(twice, version=1)


def test_writing_to_received_tensors_changes_nothing_for_others() -> None:
    publisher = WeightPublisher()
    weights = publisher.publish([("a", torch.ones(4))], version=1)
    open_weights(weights)["a"].zero_()
    assert open_weights(weights)["a"].tolist() == [1, 1, 1, 1]


def test_tensors_are_asked_for_one_at_a_time() -> None:
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
            yield f"t{index}", tensor
            del tensor

    weights = WeightPublisher().publish(gather(), version=1)
    assert len(weights.tensors) == 4


def test_another_process_maps_the_weights_and_nothing_is_left_when_it_is_killed() -> None:
    program = (
        "import dataclasses, json, time, torch\n"
        "from weft.resharding.shared_memory import WeightPublisher\n"
        "p = WeightPublisher()\n"
        "weights = p.publish([('a', torch.arange(1000.0))], version=5)\n"
        "print(json.dumps(dataclasses.asdict(weights)), flush=True)\n"
        "time.sleep(60)\n"
    )
    before = set(os.listdir("/dev/shm"))
    publisher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert publisher.stdout is not None
    try:
        fields = json.loads(publisher.stdout.readline())
        (entry,) = fields.pop("tensors")
        weights = Weights(**fields, tensors=(TensorEntry(**entry | {"shape": tuple(entry["shape"])}),))
        assert open_weights(weights)["a"].sum() == 499500
    finally:
        publisher.kill()
        publisher.wait()
        publisher.stdout.close()
    with pytest.raises(WeightSyncError, match=r"version 5 cannot be opened .* has the process"):
        open_weights(weights)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "weft" in name]


def test_publishing_and_opening_run_at_a_gigabyte_a_second() -> None:
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    publisher = WeightPublisher()
    publisher.publish([("a", tensor)], version=0)  # the pages of the memory file are made once
    started = time.perf_counter()
    open_weights(publisher.publish([("a", tensor)], version=1))
    elapsed = time.perf_counter() - started
    assert elapsed < 0.6, f"64 MiB took {elapsed:.2f} s"  # about 0.05 s on a free core; twice 64 MiB are checked
