"""Weights over gloo between four processes: exactly the planned bytes, and the death of any
process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from forked import server
from gloo_ranks import SHAPES, give, share, take

from weft.resharding.weights import Given, Layout, Piece, ReshardPlan, TensorLayout, Where


class Four:
    def __init__(self) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for function in (give, take):
            for number in range(2):
                here, there = server().Pipe()
                process = server().Process(target=function, args=(there, number))  # pyright: ignore[reportAttributeAccessIssue]
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
        self.givers, self.takers = self.pipes[:2], self.pipes[2:]

    def publish(self, version: int, *, dies: int | None = None, wrong: int | None = None) -> Any:
        """Publish on both; the second dies before this bucket, or flips a bit of this box."""
        for number, pipe in enumerate(self.givers):
            pipe.send((version, *((dies, wrong) if number else (None, None))))
        return reduce(add, [pipe.recv() for pipe in self.givers])

    def finish(self, killed: str = "") -> list[Any]:
        """Finish on both, once they have noticed the killed rank."""
        for pipe in self.givers:
            pipe.send(killed)
        return [pipe.recv() for pipe in self.givers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def four() -> Iterator[Four]:
    four = Four()
    yield four
    four.close()


def plan() -> ReshardPlan:
    sides = [
        Layout.of_ranks(
            [
                Layout.of(
                    [
                        TensorLayout(n, s, "float32", ((Piece(share(s, dim, rank)),),))
                        for n, s in SHAPES.items()
                    ],
                    [Where()],
                )
                for rank in range(2)
            ]
        )
        for dim in (0, 1)
    ]
    return ReshardPlan(*sides)


def test_four_processes_move_the_bytes_of_the_plan_and_name_who_was_killed(four: Four) -> None:
    for version in (1, 2):
        weights = four.publish(version)
        for pipe in four.takers:
            pipe.send((weights, None))
        taken = [pipe.recv() for pipe in four.takers]
        given = four.finish()
        checksum = reduce(add, (Given(version, found, 0) for found, _, _ in given)).checksum
        assert [(found, right) for found, right, _, _ in taken] == [(checksum, True)] * 2
        assert [sum(sent) for _, sent, _ in given] == plan().sent_bytes.tolist()
        assert [sum(came) for _, _, came, _ in taken] == plan().received_bytes.tolist()
        assert all(len(sent) == 2 and not lost for _, sent, lost in given)

    weights = four.publish(3)
    four.takers[0].send((weights, None))
    four.takers[1].send((weights, 2))  # dies after two boxes
    checksum, right, *_ = four.takers[0].recv()
    assert right
    given = four.finish("right")
    assert reduce(add, (Given(3, found, 0) for found, _, _ in given)).checksum == checksum
    for _, _, lost in given:
        assert "right is gone" in lost["right"] and "buckets of version 3" in lost["right"]

    weights = four.publish(4, dies=2)
    four.takers[0].send((weights, None))
    error = four.takers[0].recv()
    assert (
        "version 4, rank 1 of the trainer" in error
        and "the publisher is gone" in error
        and " buckets" in error
    )


BUCKETS, BOXES = 5, 10
"""The second sender's data has this many buckets; each receiver takes one box per entry of each."""


@pytest.mark.slow
@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_publisher_that_is_killed_before_any_bucket_is_named(four: Four, bucket: int) -> None:
    weights = four.publish(1, dies=bucket)
    for pipe in four.takers:
        pipe.send((weights, None))
    for pipe in four.takers:
        error = pipe.recv()
        assert (
            "version 1, rank 1 of the trainer" in error
            and "the publisher is gone" in error
            and " bucket" in error
        )


@pytest.mark.slow
@pytest.mark.parametrize("box", range(BOXES))
def test_a_receiver_that_is_killed_after_any_box_is_named_and_the_other_has_everything(
    four: Four, box: int
) -> None:
    weights = four.publish(1)
    four.takers[0].send((weights, None))
    four.takers[1].send((weights, box))
    _, right, *_ = four.takers[0].recv()
    assert right
    assert all("right is gone" in lost.get("right", "") for _, _, lost in four.finish("right"))


@pytest.mark.slow
@pytest.mark.parametrize("box", range(BOXES))
def test_a_bit_that_is_changed_on_its_way_in_any_box_is_found(four: Four, box: int) -> None:
    weights = four.publish(1, wrong=box)
    for pipe in four.takers:
        pipe.send((weights, None))
    taken = [pipe.recv() for pipe in four.takers]
    assert sorted(right for _, right, _, _ in taken) == [False, True], "each box is one receiver's"
    by_tensor = zip(*(sums for _, _, _, sums in taken), strict=True)
    agree = [(left[0] + right[0]) % 2**64 == left[1] == right[1] for left, right in by_tensor]
    assert agree.count(False) == 1, (
        "the ranks add up their sums, and compare them with the published one"
    )
