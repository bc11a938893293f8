"""Buckets that the trainer's ranks complete together, between four processes: two ranks of the
trainer and two receivers, which are members of the group ("gloo", as with "nccl") or map the
buckets of one rank ("ipc", with host memory in place of a GPU's).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from forked import server
from gloo_ranks import give, take

from weft.resharding.bucket_group import Transport
from weft.resharding.weights import Given

BOTH = ("left", "right")


class Four:
    def __init__(self, transport: Transport) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for function in (give, take):
            for number in range(2):
                here, there = server().Pipe()
                process = server().Process(target=function, args=(there, number, transport))  # pyright: ignore[reportAttributeAccessIssue]
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
        self.givers, self.takers = self.pipes[:2], self.pipes[2:]

    def publish(
        self, version: int, receivers: Any = BOTH, *, dies: int | None = None, wrong: int | None = None
    ) -> Any:
        """Publish on both; the second dies before this bucket, or flips a bit of it."""
        for number, pipe in enumerate(self.givers):
            pipe.send((version, receivers, *((dies, wrong) if number else (None, None))))
        return reduce(add, [pipe.recv() for pipe in self.givers])

    def take(self, weights: Any) -> list[Any]:
        for pipe in self.takers:
            pipe.send((weights, None))
        return [pipe.recv() for pipe in self.takers]

    def finish(self, killed: str = "") -> list[Any]:
        """Finish on both, once they have noticed the killed rank."""
        for pipe in self.givers:
            pipe.send(killed)
        return [pipe.recv() for pipe in self.givers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(params=["gloo", "ipc"])
def four(request: pytest.FixtureRequest) -> Iterator[Four]:
    four = Four(request.param)
    yield four
    four.close()


def test_four_processes_keep_one_group_and_name_who_was_killed(
    four: Four, request: pytest.FixtureRequest
) -> None:
    maps = request.node.callspec.params["four"] == "ipc"
    for version in (1, 2, 3):
        taken = four.take(four.publish(version))
        given = four.finish()
        checksum = reduce(add, (Given(version, found, 0) for found, *_ in given)).checksum
        assert [(found, right) for found, right, *_ in taken] == [(checksum, True)] * 2
        assert [groups for _, _, groups in given] == [1, 1], "kept from version to version"
        assert [groups for _, _, groups, _ in taken] == [0 if maps else 1] * 2
        assert not any(lost for _, lost, _ in given)

    weights = four.publish(4)
    four.takers[0].send((weights, None))
    four.takers[1].send((weights, 2))  # dies after two boxes
    answer = four.takers[0].recv()
    given = four.finish("right")
    for _, lost, _ in given:
        assert list(lost) == ["right"] and "right is gone" in lost["right"]
        assert "buckets of version 4" in lost["right"]
    # The survivor gets everything, in a second pass if the dead one was a member of the group.
    checksum = reduce(add, (Given(4, found, 0) for found, *_ in given)).checksum
    assert answer[:2] == (checksum, True)

    weights = four.publish(5, ["left"])
    four.takers[0].send((weights, None))
    checksum, right, groups, _ = four.takers[0].recv()
    given = four.finish()
    assert right and checksum == reduce(add, (Given(5, found, 0) for found, *_ in given)).checksum
    kept = 0 if maps else 2
    assert groups == kept and [groups for _, _, groups in given] == ([1, 1] if maps else [2, 2])


@pytest.mark.thorough
@pytest.mark.parametrize("copies", [0, 1, 5, 9])
def test_the_other_receiver_gets_everything_wherever_one_is_killed(four: Four, copies: int) -> None:
    for version in (1, 2):
        weights = four.publish(version)
        four.takers[0].send((weights, None))
        four.takers[1].send((weights, copies if version == 2 else None))
        found, right, *_ = four.takers[0].recv()
        given = four.finish("right" if version == 2 else "")
        checksum = reduce(add, (Given(version, found, 0) for found, *_ in given)).checksum
        assert right and found == checksum


@pytest.mark.thorough
def test_a_publisher_that_is_killed_is_named(four: Four) -> None:
    assert all(right for _, right, *_ in four.take(four.publish(1)))
    four.finish()
    for error in four.take(four.publish(2, dies=2)):
        # The receiver's own connection breaks, or a rank whose group broke tells it.
        assert "the publisher is gone" in error or "the group: " in error
        assert "version 2, rank " in error and " bucket" in error


@pytest.mark.thorough
@pytest.mark.parametrize("bucket", [0, 2])
def test_a_bit_that_is_changed_on_its_way_is_found(four: Four, bucket: int) -> None:
    taken = four.take(four.publish(1, wrong=bucket))
    assert sorted(right for _, right, *_ in taken) == [False, True], "each element is one receiver's"
    by_tensor = zip(*(sums for *_, sums in taken), strict=True)
    agree = [(left[0] + right[0]) % 2**64 == left[1] == right[1] for left, right in by_tensor]
    assert agree.count(False) == 1, (
        "the ranks add up their sums, and compare them with the published one"
    )
