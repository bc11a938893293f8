"""Weights between machines: the receiver believes that it is on another one, and takes its parts over TCP."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import open_weights as opening
from weft.resharding import part_server
from weft.resharding.box import Box
from weft.resharding.open_weights import open_weights
from weft.resharding.publisher import WeightPublisher
from weft.resharding.tensor_receiver import receive_parts
from weft.resharding.weights import Part, Weights, whole


@pytest.fixture(autouse=True)
def another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers of these tests believe that they are elsewhere."""
    monkeypatch.setattr(opening, "this_machine", lambda: "another machine")


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("127.0.0.1")
    yield publisher
    publisher.close()


def tensors(rows: int = 40) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(rows, 6), "b": torch.randn(3).bfloat16(), "c": torch.tensor(2.5), "d": torch.empty(0, 2)}


def received(weights: Weights, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    receive_parts(open_weights(weights), list(whole(found)))
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_weights_arrive_over_the_network_version_after_version(publisher: WeightPublisher) -> None:
    for version in (1, 2):
        now = {name: tensor * version for name, tensor in tensors().items()}
        assert same(received(publisher.publish(whole(now), version), now), now)


def test_parts_of_several_publishers_come_in_the_order_in_which_they_are_taken(publisher: WeightPublisher) -> None:
    second = WeightPublisher("127.0.0.1")
    of = [Part("a", (40, 6), Box((s, 0), (s + 20, 6)), tensors()["a"][s : s + 20]) for s in (0, 20)]
    weights = publisher.publish(of[:1], 1) + second.publish(of[1:], 1)
    columns = torch.zeros(40, 3)  # a part of each row, so that what travels is strided at its source
    total = open_weights(weights).published_sum("a")
    receive_parts(
        open_weights(weights),
        [Part("a", (40, 6), Box((0, 2), (40, 5)), columns)],
        None,
        lambda own: own * 0 + _signed(total),
    )
    assert torch.equal(columns, tensors()["a"][:, 2:5])
    second.close()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def test_only_what_is_needed_travels(publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = publisher.publish(whole({"a": torch.zeros(1000, 8)}), 1)
    read: list[int] = []
    real = part_server._receive_into

    def counted(connection: socket.socket, target: memoryview) -> None:
        if threading.current_thread() is threading.main_thread():  # the publisher's own thread reads what is asked for
            read.append(len(target))
        real(connection, target)

    monkeypatch.setattr(part_server, "_receive_into", counted)
    opened = open_weights(weights)
    before = sum(read)
    opened.part("a", 0, 0, Box((10, 0), (20, 8)))
    assert sum(read) - before == 10 * 8 * 4


def test_who_has_not_the_token_is_given_nothing(publisher: WeightPublisher) -> None:
    weights = publisher.publish(whole(tensors()), 1)
    (rank,) = weights.ranks
    assert rank.token not in repr(weights)
    stranger = dataclasses.replace(weights, ranks=(dataclasses.replace(rank, token="guessed"),))
    with pytest.raises(
        WeightSyncError, match=rf"rank 0 of the trainer at 127.0.0.1:{rank.port}: the publisher is gone"
    ):
        open_weights(stranger)
    assert same(received(weights, tensors()), tensors()), "others are served as before"


def test_whoever_answers_in_the_publishers_place_is_not_believed(publisher: WeightPublisher) -> None:
    weights = publisher.publish(whole(tensors()), 1)
    impostor = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = impostor.accept()
        connection.sendall(bytes(32))
        connection.recv(64, socket.MSG_WAITALL)
        connection.sendall(bytes(32))
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    there = dataclasses.replace(weights.ranks[0], port=impostor.getsockname()[1])
    with pytest.raises(WeightSyncError, match="does not have the token"):
        open_weights(dataclasses.replace(weights, ranks=(there,)))
    impostor.close()


def test_a_publisher_that_has_ended_is_named(publisher: WeightPublisher) -> None:
    weights = publisher.publish(whole(tensors()), 1)
    opened = open_weights(weights)
    publisher.close()
    with pytest.raises(
        WeightSyncError, match=r"version 1, rank 0 of the trainer at 127.0.0.1:\d+: the publisher is gone"
    ):
        receive_parts(opened, list(whole(tensors())))
    with pytest.raises(WeightSyncError, match="the publisher is gone"):
        open_weights(weights)


def test_a_publisher_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, publisher: WeightPublisher) -> None:
    weights = publisher.publish(whole(tensors()), 1)
    silent = socket.create_server(("127.0.0.1", 0))
    for module in (part_server, opening):
        monkeypatch.setattr(module, "SILENCE_S", 0.2)
    there = dataclasses.replace(weights.ranks[0], port=silent.getsockname()[1])
    with pytest.raises(WeightSyncError, match=r"the publisher was silent for 0 s"):
        open_weights(dataclasses.replace(weights, ranks=(there,)))
    silent.close()


def test_a_receiver_that_stops_in_the_middle_holds_up_nobody(publisher: WeightPublisher) -> None:
    large = {"a": torch.randn(2_000_000, 4)}  # more than sockets hold
    weights = publisher.publish(whole(large), 1)
    idle = open_weights(weights)
    idle._sources[0].ask([("a", 0, Box.full((2_000_000, 4)))])  # and takes none of it
    started = time.monotonic()
    larger = {"a": torch.randn(3_000_000, 4)}
    again = publisher.publish(whole(larger), 2)
    assert time.monotonic() - started < 9, "the transfer that nobody takes is ended"
    assert same(received(again, larger), larger)
    with pytest.raises(WeightSyncError, match="is gone"):
        idle._sources[0].read("a", 0, Box.full((2_000_000, 4)))


def test_nonsense_costs_its_own_connection(publisher: WeightPublisher) -> None:
    weights = publisher.publish(whole(tensors()), 1)
    (rank,) = weights.ranks
    with socket.create_connection((rank.host, rank.port)) as stray:
        stray.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    stream = part_server.PartStream(rank.host, rank.port, rank.token)
    stream.ask([(99, Box((0,), (1,)))])
    with pytest.raises(OSError, match="ended the connection"):
        stream.receive(Box((0,), (1,)), torch.float32)
    stream.close()
    assert same(received(weights, tensors()), tensors())


def test_weights_of_another_machine_that_nobody_serves_are_refused() -> None:
    alone = WeightPublisher()
    weights = alone.publish(whole(tensors()), 1)
    with pytest.raises(WeightSyncError, match="rank 0 of the trainer is on another machine"):
        open_weights(weights)
    alone.close()
