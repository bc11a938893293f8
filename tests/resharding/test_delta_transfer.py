"""Versions as deltas: receivers on other machines get the changes, or everything if that is
cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import deltas, sources
from weft.resharding import incoming as receiving
from weft.resharding import transfer as transfers
from weft.resharding.deltas import held_boxes
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import (
    LOOPBACK,
    Box,
    Layout,
    Piece,
    ReshardPlan,
    TensorLayout,
    TensorPart,
    Weights,
    Where,
    whole,
)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make receivers believe that they are on another machine."""
    monkeypatch.setattr(sources, "this_machine", lambda: "another machine")
    monkeypatch.setattr(deltas, "_held", {})


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(LOOPBACK, 64 << 10, deltas=True)
    yield publisher
    publisher.close()


@pytest.fixture
def model() -> Tensors:
    torch.manual_seed(0)
    return {"a": torch.randn(300, 200).bfloat16(), "b": torch.randn(777), "scalar": torch.tensor(2.0)}


def step(model: Tensors, share: float, seed: int = 0) -> None:
    """Change the bits of this share of the elements, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.values():
        changed = torch.rand(tensor.shape, generator=generator) < share
        tensor.copy_(torch.where(changed, tensor * 1.5 + 1, tensor))


def take(weights: Weights, model: Tensors, receiver: str) -> str:
    """Receive a version, compare it bit by bit, and return its checksum."""
    found = {name: torch.full_like(tensor, 7) for name, tensor in model.items()}
    with IncomingWeights(weights.to(receiver)) as incoming:
        checksum = receive_parts(incoming, list(whole(found)))
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    return checksum


def bytes_of(model: Tensors) -> int:
    return sum(tensor.nbytes for tensor in model.values())


def test_a_step_that_changes_one_percent_sends_less_than_three_percent(
    publisher: WeightPublisher, model: Tensors
):
    for version in range(1, 5):
        checksum = take(publisher.publish(whole(model), version, ["one[0]"]), model, "one[0]")
        assert publisher.finish() == checksum
        sent = publisher.sent
        assert sent.whole_bytes == bytes_of(model)
        if version == 1:
            assert sent.num_bytes == sent.whole_bytes and sent.compared == 0
        else:
            assert sent.num_bytes < 0.03 * sent.whole_bytes
            assert sent.compared == sum(tensor.numel() for tensor in model.values())
            assert 0.005 < sent.changed / sent.compared < 0.015
        plain = WeightPublisher(LOOPBACK)
        assert (
            take(plain.publish(whole(model), version), model, "checks") == checksum
        )  # as if everything had been sent
        plain.close()
        step(model, 0.01, seed=version)


def test_who_lacks_the_version_before_is_sent_everything(publisher: WeightPublisher, model: Tensors):
    def share(version: int, receiver: str) -> float:
        take(publisher.publish(whole(model), version, [receiver]), model, receiver)
        publisher.finish()
        step(model, 0.01, seed=version)
        return publisher.sent.num_bytes / publisher.sent.whole_bytes

    assert share(1, "steady[0]") == 1
    assert share(2, "steady[0]") < 0.03
    assert share(3, "replaced[0]") == 1
    assert share(4, "replaced[0]") < 0.03
    assert share(5, "steady[0]") == 1, "it missed two versions"
    assert share(6, "steady[0]") < 0.03


def test_who_comes_late_in_the_same_version_is_sent_everything(
    publisher: WeightPublisher, model: Tensors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfers, "GRACE_S", 0.05)  # waited out: one comes late
    for version in (1, 2):
        weights = publisher.publish(whole(model), version, ["early[0]", "late[0]"])
        assert take(weights, model, "early[0]") == take(weights, model, "late[0]") == publisher.finish()
        step(model, 0.01)
    # a delta, and everything
    assert bytes_of(model) < publisher.sent.num_bytes < 1.05 * bytes_of(model)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_mostly_changed_boxes_are_sent_whole(publisher: WeightPublisher, model: Tensors, share: float):
    for version in (1, 2):
        take(publisher.publish(whole(model), version), model, "one[0]")
        publisher.finish()
        step(model, share)
    assert publisher.sent.num_bytes == (0 if share == 0 else bytes_of(model))
    assert publisher.sent.changed / publisher.sent.compared == pytest.approx(share, abs=0.02)


def receiving_plan(incoming: receiving.IncomingWeights) -> ReshardPlan:
    tensors = incoming.layout.tensors.values()
    own = [TensorLayout(t.name, t.shape, t.dtype, ((Piece(Box.full(t.shape)),),)) for t in tensors]
    return ReshardPlan(incoming.layout, Layout.of(own, [Where()]))


def test_after_a_transfer_that_broke_off_everything_comes_again(
    publisher: WeightPublisher, model: Tensors
):
    take(publisher.publish(whole(model), 1), model, "one[0]")
    publisher.finish()
    step(model, 0.01)
    with (
        pytest.raises(RuntimeError),
        IncomingWeights(publisher.publish(whole(model), 2).to("one[0]")) as incoming,
    ):
        plan = receiving_plan(incoming)
        for _ in incoming.slices(plan.received_by(0)):
            raise RuntimeError("in the middle")
    publisher.finish()
    step(model, 0.01, seed=1)
    take(publisher.publish(whole(model), 3), model, "one[0]")
    publisher.finish()
    assert publisher.sent.num_bytes == publisher.sent.whole_bytes


def test_a_delta_that_arrives_damaged_is_found_by_the_checksum(
    publisher: WeightPublisher, model: Tensors, monkeypatch: pytest.MonkeyPatch
):
    take(publisher.publish(whole(model), 1), model, "one[0]")
    publisher.finish()
    step(model, 0.01)
    real = sources.apply_delta

    def damaged(bits: np.ndarray, gaps: np.ndarray, values: np.ndarray) -> None:
        if len(values):
            values[0] ^= 1
        real(bits, gaps, values)

    monkeypatch.setattr(sources, "apply_delta", damaged)
    with pytest.raises(
        WeightSyncError, match=r"tensor 'a' did not arrive as it was published: .* from rank 0"
    ):
        take(publisher.publish(whole(model), 2), model, "one[0]")
    monkeypatch.undo()


def test_a_part_of_each_row_sends_only_its_changes(publisher: WeightPublisher):
    matrix = torch.randn(100, 50)
    for version in (1, 2):
        columns = torch.full((100, 10), 7.0)
        with IncomingWeights(publisher.publish(whole({"a": matrix}), version).to("half[0]")) as incoming:
            parts = [TensorPart("a", (100, 50), Box((0, 20), (100, 30)), columns)]
            with pytest.raises(
                WeightSyncError, match="a part on another rank"
            ):  # it sums a part, and reports it as the total
                receive_parts(incoming, parts)
            for source in incoming._sources:
                source.thank()
        publisher.finish()
        assert torch.equal(columns, matrix[:, 20:30])
        matrix[::10, :25] += 1
    assert publisher.sent.changed == 10 * 25 and publisher.sent.compared == 5000
    assert publisher.sent.num_bytes < 0.3 * publisher.sent.whole_bytes


def test_versions_that_go_back_are_not_taken_for_those_that_had_their_numbers(
    publisher: WeightPublisher, model: Tensors
):
    first = publisher.publish(whole(model), 5)
    take(first, model, "away[0]")
    for version in (4, 5):
        step(model, 0.01, seed=version)
        take(publisher.publish(whole(model), version), model, "one[0]")
    with pytest.raises(WeightSyncError, match=r"rank 0 of the trainer at .*: the publisher is gone"):
        IncomingWeights(first)
    step(model, 0.01, seed=6)
    take(publisher.publish(whole(model), 6), model, "away[0]")
    publisher.finish()
    assert publisher.sent.num_bytes == publisher.sent.whole_bytes


def test_other_entries_are_other_boxes(publisher: WeightPublisher, model: Tensors):
    take(publisher.publish(whole(model), 1), model, "one[0]")
    publisher.finish()
    model["more"] = torch.randn(50)
    take(publisher.publish(whole(model), 2), model, "one[0]")
    publisher.finish()
    assert publisher.sent.num_bytes == publisher.sent.whole_bytes


def test_boxes_of_another_publisher_are_dropped():
    first = held_boxes("one[0]", 0, 0, "publisher")
    assert first.start_version([(0, Box.full((4,)))]) is None
    assert first.bits(0, Box.full((4,)), np.dtype("u2")).nbytes == 8
    first.version = 3
    assert held_boxes("one[0]", 0, 0, "publisher") is first
    assert first.start_version([(0, Box.full((4,)))]) == 3 and first.version is None
    assert not held_boxes("one[0]", 0, 0, "another")._bits
    assert held_boxes("", 0, 0, "publisher") is not held_boxes("", 0, 0, "publisher")
