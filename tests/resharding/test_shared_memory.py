"""Parts in mappable memory are read in place, without buckets, and arrive unchanged."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import mapped_memory as shared_memory
from weft.resharding import sources
from weft.resharding import sources as mapped_memory
from weft.resharding.buckets import described, read_description
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.mapped_memory import MemoryPlace, SharedMemory, place_of
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import LOOPBACK, Box, Copy, TensorPart, Weights, whole

Tensors = dict[str, torch.Tensor]
BUCKET = 1024
SHAPES = {"embed": (33, 70), "norm": (7,), "scalar": (), "deep": (5, 6, 40)}


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(SharedMemory.room(list(SHAPES.values()), torch.float32))


@pytest.fixture
def shared(memory: SharedMemory) -> Tensors:
    torch.manual_seed(0)
    return {name: memory.empty(shape, torch.float32).normal_() for name, shape in SHAPES.items()}


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(LOOPBACK, BUCKET)
    yield publisher
    publisher.close()


def received(weights: Weights, like: Tensors) -> tuple[Tensors, str]:
    found = {name: torch.full_like(tensor, 7) for name, tensor in like.items()}
    with IncomingWeights(weights) as incoming:
        return found, receive_parts(incoming, list(whole(found)))


def equal(found: Tensors, wanted: Tensors) -> bool:
    return all(found[n].dtype == wanted[n].dtype and torch.equal(found[n], wanted[n]) for n in wanted)


def is_read_in_place(publisher: WeightPublisher, weights: Weights) -> dict[str, bool]:
    with IncomingWeights(weights) as incoming:
        (source,) = incoming._sources
        return {entry.name: bool(entry.memory) for entry in source.parts.entries}


def test_every_version_is_read_in_place(shared: Tensors, publisher: WeightPublisher) -> None:
    checksums = set[str]()
    for version in (1, 2, 3):
        found, checksum = received(publisher.publish(whole(shared), version), shared)
        assert equal(found, shared) and publisher.finish() == checksum
        checksums.add(checksum)
        for tensor in shared.values():
            tensor.mul_(1.5)
    assert len(checksums) == 3
    assert all(is_read_in_place(publisher, publisher.publish(whole(shared), 4)).values())
    assert len(publisher._memory.with_room(0)) == 2 * 4096, "no bucket has more than a page"


def test_only_cast_or_unshared_parts_are_copied(shared: Tensors, publisher: WeightPublisher) -> None:
    mixed = {**shared, "elsewhere": torch.randn(40, 30), "turned": shared["embed"].t()}
    parts = [
        part._replace(dtype=torch.bfloat16 if part.name == "deep" else None) for part in whole(mixed)
    ]
    found, _ = received(publisher.publish(parts, 1), {**mixed, "deep": mixed["deep"].bfloat16()})
    assert equal(found, {**mixed, "deep": mixed["deep"].bfloat16()})
    read = is_read_in_place(publisher, publisher.publish(parts, 2))
    assert [name for name, in_place in read.items() if in_place] == ["embed", "norm", "scalar"]


def test_a_receiver_of_columns_reads_a_row_shard_in_place(
    shared: Tensors, publisher: WeightPublisher
) -> None:
    embed = shared["embed"]
    second = WeightPublisher(LOOPBACK, BUCKET)
    halves = [
        TensorPart("embed", (33, 70), Box.along((33, 70), 0, start, stop), embed[start:stop])
        for start, stop in ((0, 16), (16, 33))
    ]
    weights = publisher.publish([halves[0]], 1) + second.publish([halves[1]], 1)
    found = torch.zeros(33, 30)
    with IncomingWeights(weights) as incoming:
        counts = receive_parts(
            incoming,
            [TensorPart("embed", (33, 70), Box((0, 40), (33, 70)), found)],
            sum_over_ranks=lambda sums: sums * 0 + incoming.published_sum("embed"),
        )
    assert torch.equal(found, embed[:, 40:]) and counts
    second.close()


def test_a_receiver_on_another_machine_is_sent_the_same(
    shared: Tensors, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "this_machine", lambda: "another machine")
    found, checksum = received(publisher.publish(whole(shared), 1), shared)
    assert equal(found, shared) and publisher.finish() == checksum


def test_new_memory_of_the_same_tensors_is_found(shared: Tensors, publisher: WeightPublisher) -> None:
    received(publisher.publish(whole(shared), 1), shared)
    other = SharedMemory(SharedMemory.room(list(SHAPES.values()), torch.float32))
    moved = {
        name: other.empty(tensor.shape, tensor.dtype).copy_(2 * tensor)
        for name, tensor in shared.items()
    }
    found, _ = received(publisher.publish(whole(moved), 2), moved)
    assert equal(found, moved)


def test_reused_memory_is_distinguished_and_the_old_mapping_released(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, number = os.memfd_create, 200

    def always_the_same(name: str, flags: int) -> int:
        file = create(name, flags)
        assert os.dup2(file, number, inheritable=False) == number
        os.close(file)
        return number

    monkeypatch.setattr(os, "memfd_create", always_the_same)
    before = len(mapped_memory._maps)
    for version in (1, 2, 3):
        memory = SharedMemory(4096)
        tensors = {"embed": memory.empty((16, 64), torch.float32).fill_(version)}
        del memory
        place = place_of(tensors["embed"])
        assert place is not None and place.path.endswith(f"/{number}"), (
            "tensors keep it for those who read them"
        )
        found, checksum = received(publisher.publish(whole(tensors), version), tensors)
        assert equal(found, tensors) and publisher.finish() == checksum
        del tensors
    assert len(mapped_memory._maps) <= before + 1


@pytest.mark.thorough
def test_concurrent_threads_map_once_each_and_release_dead_mappings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = [SharedMemory(4096) for _ in range(4)]
    kept = [SharedMemory(4096) for _ in range(4)]
    places = [place_of(memory.empty((4,), torch.float32)) for memory in gone + kept]
    paths = [place.path for place in places if place is not None]
    nothing = read_description(described(()))
    for path in paths[:4]:
        mapped_memory._map_files([(path, 4096)], nothing)
    gone.clear()
    gc.collect()
    looked = mapped_memory._is_there

    def slowly(path: str, inode: int) -> bool:
        time.sleep(0.002)  # waited out, so that other threads come
        return looked(path, inode)

    monkeypatch.setattr(mapped_memory, "_is_there", slowly)
    start = threading.Barrier(8)

    def maps(number: int) -> mapped_memory._Views:
        start.wait(60)
        return mapped_memory._map_files([(paths[4 + number % 4], 4096)], nothing)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(maps, range(8)))
    assert found[:4] == found[4:] and len(set(found)) == 4, (
        "both who read a memory have the same mapping"
    )
    known = {path for key in mapped_memory._maps for path, _, _ in key}
    assert not known & set(paths[:4]) and known >= set(paths[4:])


def test_weights_that_change_while_they_are_read_are_found_out(
    shared: Tensors, publisher: WeightPublisher
) -> None:
    weights = publisher.publish(whole(shared), 1)
    with (
        IncomingWeights(weights) as incoming,
        pytest.raises(WeightSyncError, match="'embed' did not arrive as it was published"),
    ):
        slices = incoming.slices

        def changed(copies: Iterable[tuple[str, Copy]]) -> Iterator[tuple[str, Copy, torch.Tensor]]:
            for name, copy, elements in slices(copies):
                shared["embed"].add_(1)
                yield name, copy, elements

        incoming.slices = changed
        receive_parts(incoming, list(whole({name: torch.zeros_like(t) for name, t in shared.items()})))


def test_a_place_is_that_of_the_first_element_or_of_none(memory: SharedMemory, shared: Tensors) -> None:
    place = place_of(shared["embed"][2:])
    assert place is not None and place.num_bytes == memory.num_bytes and place.offset == 2 * 70 * 4
    with Path(place.path).open("rb") as file:
        file.seek(place.offset)
        assert file.read(4) == shared["embed"][2, :1].numpy().tobytes()
    for tensor in (torch.zeros(4), shared["embed"].t(), shared["embed"][:0]):
        assert place_of(tensor) is None


def test_places_are_found_while_another_thread_makes_memory(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starts(weakref.WeakKeyDictionary[Any, Any]):
        """While iterated, lets another thread allocate memory."""

        def values(self) -> Iterator[Any]:
            for value in super().values():
                maker.start()
                maker.join(0.2)  # waited out: it cannot end before this does
                yield value

    other = SharedMemory(64)
    maker = threading.Thread(target=lambda: setattr(other, "another", SharedMemory(64)))
    monkeypatch.setattr(shared_memory, "_starts", Starts({memory._memory: (0, MemoryPlace("", 0, 0))}))
    assert place_of(torch.empty(4)) is None
    maker.join(60)
    assert len(shared_memory._starts) == 2


@pytest.mark.thorough
def test_full_memory_is_reported_and_freed_with_its_tensors() -> None:
    memory = SharedMemory(64)
    tensor = memory.empty((16,), torch.float32)
    with pytest.raises(ValueError, match="no room"):
        memory.empty((1,), torch.float32)
    place = place_of(tensor)
    assert place is not None and os.path.exists(place.path)
    del memory
    gc.collect()
    assert tensor.fill_(3).sum() == 48 and place_of(tensor) == place, (
        "its tensors stay, and are read there"
    )
    del tensor
    gc.collect()
    assert not os.path.exists(place.path)
