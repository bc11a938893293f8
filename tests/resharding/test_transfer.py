"""A published version arrives at its receivers bucket by bucket and bit by bit, mapped or
streamed."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import connection as connections
from weft.resharding import incoming as receiving
from weft.resharding import mapped_memory, sources
from weft.resharding import publisher as publishing
from weft.resharding import transfer as transfers
from weft.resharding.bucket_group import Transport
from weft.resharding.buckets import SLOTS, read_description
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import LOOPBACK, Box, Given, TensorLayout, TensorPart, Weights, whole

Tensors = dict[str, torch.Tensor]
BUCKET = 1024


def tensors(scale: int = 1) -> Tensors:
    torch.manual_seed(0)
    found = {
        "embed": torch.randn(33, 70),
        "norm": torch.randn(7, dtype=torch.bfloat16),
        "transposed": torch.randn(50, 30).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "steps": torch.arange(900),
    }
    return {name: tensor * scale for name, tensor in found.items()}


NewPublisher = Callable[..., WeightPublisher]


@pytest.fixture
def new_publisher(request: pytest.FixtureRequest) -> Iterator[NewPublisher]:
    publishers: list[WeightPublisher] = []

    way = request.getfixturevalue("way") if "way" in request.fixturenames else "mapped"
    transport: Transport = "gloo" if way == "gloo" else "ipc" if way == "device" else "auto"

    def make(
        bucket_bytes: int = BUCKET, host: str = LOOPBACK, rank: int = 0, ranks: int = 1
    ) -> WeightPublisher:
        publishers.append(
            WeightPublisher(host, bucket_bytes, transport=transport, rank=rank, ranks=ranks)
        )
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.close()


@pytest.fixture(params=["mapped", "streamed", "gloo", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport: mapped memory, a stream as between machines, a group over gloo, or mapped
    memory of a "device", which host memory stands in for."""
    if request.param == "streamed":
        elsewhere(monkeypatch)
    if request.param == "device":
        monkeypatch.setattr(publishing, "device_of", lambda transport: None)
    return request.param


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "this_machine", lambda: "another machine")


def empty_like(like: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, 7) for name, tensor in like.items()}


def received(weights: Weights, like: Tensors | None = None) -> tuple[Tensors, str]:
    found = empty_like(like or tensors())
    with IncomingWeights(weights) as incoming:
        checksum = receive_parts(incoming, list(whole(found)))
    return found, checksum


def equal(found: Tensors, wanted: Tensors) -> bool:
    return all(found[n].dtype == wanted[n].dtype and torch.equal(found[n], wanted[n]) for n in wanted)


def rows(of: Tensors, rank: int, ranks: int) -> list[TensorPart]:
    """Return a rank's share of the rows of each tensor; scalars belong to the first rank."""
    parts: list[TensorPart] = []
    for part in whole(of):
        if not part.shape:
            parts += [part] * (rank == 0)
            continue
        start, stop = part.shape[0] * rank // ranks, part.shape[0] * (rank + 1) // ranks
        parts.append(
            part._replace(box=Box.along(part.shape, 0, start, stop), tensor=part.tensor[start:stop])
        )
    return parts


def test_version_after_version_arrives_in_the_same_memory(way: str, new_publisher: NewPublisher) -> None:
    publisher, layouts, checksums = new_publisher(), set[int](), set[str]()
    for version in (1, 2, 3):
        weights = publisher.publish(whole(tensors(version)), version)
        found, checksum = received(weights)
        assert equal(found, tensors(version))
        assert publisher.finish() == checksum
        with IncomingWeights(publisher.publish(whole(tensors(version)), version)) as incoming:
            layouts.add(id(incoming.layout))
        checksums.add(checksum)
    assert len(layouts) == 1, "so that plans are used again"
    assert len(checksums) == 3
    assert len(publisher._memory.with_room(0)) == SLOTS * 4096, "of the buckets, not of the model"


def test_several_ranks_give_to_several_receivers_at_once(way: str, new_publisher: NewPublisher) -> None:
    names = ["a", "b", "c"]
    publishers = [new_publisher(rank=rank, ranks=3) for rank in range(3)]
    parts = [rows(tensors(), rank, 3) for rank in range(3)]
    first, second, third = (p.publish(own, 1, names) for p, own in zip(publishers, parts, strict=True))
    weights = first + second + third
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda name: received(weights.to(name)), names))
    assert all(equal(found, tensors()) for found, _ in results)
    one, two, three = (Given(1, publisher.finish(), 0) for publisher in publishers)
    assert {checksum for _, checksum in results} == {(one + two + three).checksum}
    alone = new_publisher()
    _, checksum = received(alone.publish(whole(tensors()), 1))
    assert {checksum} == {found for _, found in results}, "however it is cut"


def test_who_comes_late_gets_everything_too(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "GRACE_S", 0.05)  # waited out: the others come late
    publisher = new_publisher()
    weights = publisher.publish(whole(tensors()), 1, ["early", "late", "never"])
    early, checksum = received(weights.to("early"))
    assert publisher._transfer is not None
    assert publisher._transfer._expected == {"early"}, "no other pass waits for who did not come"
    late, again = received(weights.to("late"))
    assert equal(early, tensors()) and equal(late, tensors()) and checksum == again == publisher.finish()


def test_receivers_of_parts_sum_the_received_data(way: str, new_publisher: NewPublisher) -> None:
    of = {name: tensor for name, tensor in tensors().items() if tensor.ndim}
    weights = new_publisher().publish(whole(of), 1)
    sums: list[np.ndarray] = []
    for rank in range(2):
        with (
            pytest.raises(WeightSyncError, match="or a part on another rank of the receiver"),
            IncomingWeights(weights) as i,
        ):
            receive_parts(
                i, rows(empty_like(of), rank, 2), None, lambda own: sums.append(own.copy()) or own
            )
    for rank in range(2):
        parts = rows(empty_like(of), rank, 2)
        with IncomingWeights(weights) as incoming:
            receive_parts(incoming, parts, None, lambda own: sums[0] + sums[1])
        assert all(torch.equal(part.tensor, of[part.name][part.box.slices]) for part in parts)


def test_replicated_parts_count_once(new_publisher: NewPublisher) -> None:
    weights = new_publisher().publish(whole(tensors()), 1)
    found = empty_like(tensors())
    with IncomingWeights(weights) as incoming:

        def others(own: np.ndarray) -> np.ndarray:
            assert not own.any()
            return np.array([incoming.published_sum(name) for name in found], np.uint64).view(np.int64)

        receive_parts(incoming, list(whole(found)), [False] * len(found), others)
    assert equal(found, tensors())


def test_over_the_network_go_the_bytes_of_the_plan_and_no_others(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch)
    sent: list[int] = []
    real = connections.Connection.send_elements
    monkeypatch.setattr(
        connections.Connection,
        "send_elements",
        lambda self, content: sent.append(len(content)) or real(self, content),
    )
    weights = new_publisher().publish(whole({"a": torch.arange(8000.0).view(1000, 8)}), 1)
    columns = torch.zeros(500, 3)  # a part of each row, so that the source is strided
    with (
        pytest.raises(WeightSyncError, match="or a part on another rank"),
        IncomingWeights(weights) as incoming,
    ):
        receive_parts(incoming, [TensorPart("a", (1000, 8), Box((10, 2), (510, 5)), columns)])
    assert sum(sent) == columns.nbytes and len(sent) > 10
    assert torch.equal(columns, torch.arange(8000.0).view(1000, 8)[10:510, 2:5])


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_other_machine_gets_each_byte_once(
    ranks: int, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    of = {name: "other" if name in "cf" else "alone" if name == "e" else "one" for name in names}
    here = threading.local()
    monkeypatch.setattr(sources, "this_machine", lambda: here.machine)

    def take(weights: Weights) -> tuple[Tensors, str]:
        here.machine = of[weights.receiver]
        return received(weights)

    publishers = [new_publisher(rank=rank, ranks=ranks) for rank in range(ranks)]
    for version in (1, 2):
        parts = [rows(tensors(version), rank, ranks) for rank in range(ranks)]
        records = [p.publish(own, version, names) for p, own in zip(publishers, parts, strict=True)]
        weights = reduce(add, records)
        with ThreadPoolExecutor(len(names)) as threads:
            results = list(threads.map(take, [weights.to(name) for name in names]))
        sent = [publisher.sent for publisher in publishers]
        given = [Given(version, publisher.finish(), 0) for publisher in publishers]
        assert all(equal(found, tensors(version)) for found, _ in results)
        assert {checksum for _, checksum in results} == {reduce(add, given).checksum}
        num_bytes = sum(tensor.nbytes for tensor in tensors().values())
        assert sum(each.num_bytes for each in sent) == 3 * num_bytes, "not six times"


def test_receivers_go_on_alone_if_the_one_that_carries_for_them_dies(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch)
    publisher, of = new_publisher(), {"a": torch.randn(60, 70)}
    weights = publisher.publish(whole(of), 1, ["a", "b", "c"])
    with ThreadPoolExecutor(3) as threads:

        def die() -> None:
            with IncomingWeights(weights.to("a")) as incoming:
                next(iter(incoming.slices(receiving_plan(incoming, of).received_by(0))))

        died = threads.submit(die)
        others = [threads.submit(received, weights.to(name), of) for name in ("b", "c")]
        assert all(equal(other.result(60)[0], of) for other in others)
        died.result(60)
    assert [*publisher.lost] == ["a"]


def test_weights_of_another_dtype_are_cast_and_checked_as_they_came(
    way: str, new_publisher: NewPublisher
) -> None:
    exact = torch.tensor([1.0, 1 + 2**-12])
    weights = new_publisher().publish(whole({"a": exact}), 1)
    assert received(weights, {"a": torch.zeros(2, dtype=torch.bfloat16)})[0]["a"].tolist() == [1.0, 1.0]
    part = TensorPart("a", (2,), Box.full((2,)), exact, torch.bfloat16)
    assert received(new_publisher().publish([part], 1), {"a": torch.zeros(2)})[0]["a"].tolist() == [
        1.0,
        1.0,
    ]


def test_memory_grows_with_the_largest_bucket(new_publisher: NewPublisher) -> None:
    publisher = new_publisher(bucket_bytes=1 << 16)
    for version, size in enumerate((10, 5_000, 3, 100_000)):
        of = {"a": torch.randn(size), "b": torch.randn(size, 2)}
        assert equal(received(publisher.publish(whole(of), version), of)[0], of)


def test_no_receiver_changes_data_of_others(new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    with IncomingWeights(publisher.publish(whole({"a": torch.ones(4)}), 1)) as incoming:
        for _, _, elements in incoming.slices(
            receiving_plan(incoming, {"a": torch.zeros(4)}).received_by(0)
        ):
            elements.zero_()
            assert publisher._memory.with_room(0)[:16].view(torch.float32).tolist() == [1, 1, 1, 1]


def receiving_plan(incoming: receiving.IncomingWeights, like: Tensors):
    from weft.resharding.weights import Layout, Piece, ReshardPlan, Where

    own = (
        TensorLayout(p.name, p.shape, str(p.tensor.dtype)[6:], ((Piece(p.box),),)) for p in whole(like)
    )
    return ReshardPlan(incoming.layout, Layout.of(own, [Where()]))


@pytest.mark.thorough
def test_who_comes_in_the_middle_waits_for_longer_than_its_patience_while_others_get_on(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "NEWS_S", 0.05)  # waited out: the late receiver is told this often
    real, news = sources.RankSource.next_bucket, threading.Semaphore(0)

    def next_bucket(self: Any) -> int | None:
        if (bucket := real(self)) is None:
            news.release()
        return bucket

    monkeypatch.setattr(sources.RankSource, "next_bucket", next_bucket)
    of = {"a": torch.randn(30_000)}
    weights = new_publisher().publish(whole(of), 1, ["early"])
    with ThreadPoolExecutor(1) as threads, IncomingWeights(weights.to("early")) as early:
        steps = early.slices(receiving_plan(early, of).received_by(0))
        next(steps)
        late = threads.submit(lambda: received(weights.to("late"), of))
        told = 0
        for _ in steps:  # each message restarts the late receiver's deadline
            told += told < 5 and news.acquire(
                timeout=0.5
            )  # waited out, if need be: there are 118 buckets
        early.confirm()
        assert told == 5 and equal(late.result(timeout=60)[0], of)


# Errors


def test_a_receiver_that_cannot_be_served_does_not_hold_up_the_others(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch)
    real, failed = transfers.Transfer._send, list[int]()

    def once_without_memory(*arguments: object) -> None:
        failed.append(1)
        if len(failed) == 1:
            raise MemoryError("none left")
        real(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(transfers.Transfer, "_send", once_without_memory)
    publisher = new_publisher()
    weights = publisher.publish(whole(tensors()), 1, ["a", "b"])
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(lambda name: received(weights.to(name)), name) for name in ("a", "b")]
        errors = [result.exception(timeout=60) for result in results]
    assert sum(error is None for error in errors) == 1
    assert isinstance(next(filter(None, errors)), WeightSyncError)
    assert ["none left" in line for line in publisher.lost.values()] == [True]


def test_too_many_open_files_keep_receivers_out_only_as_long_as_they_are_open(
    new_publisher: NewPublisher,
) -> None:
    weights = new_publisher().publish(whole(tensors()), 1)
    (rank,) = weights.ranks
    with socket.socket() as stray, socket.socket() as early:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        next_file = os.dup(early.fileno())
        os.close(next_file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, before[1]))
        try:
            stray.connect((rank.host, rank.port))  # the kernel may have reserved a port for it
            early.connect((rank.host, rank.port))
            early.settimeout(0.3)  # waited out: the publisher cannot answer
            with pytest.raises(TimeoutError):
                early.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        early.settimeout(30)
        assert early.recv(1)
    assert equal(received(weights)[0], tensors())


def test_an_address_of_another_machine_is_named() -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        WeightSyncError, match=r"cannot listen for weight receivers at 203\.0\.113\.7: .*address"
    ):
        WeightPublisher("203.0.113.7")
    assert len(os.listdir("/proc/self/fd")) <= files, "none is left open"


def test_a_late_receiver_learns_of_changed_weights_before_any_checksum(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "GRACE_S", 0.05)  # waited out: the others come late
    real = transfers.Transfer._add_up
    monkeypatch.setattr(
        transfers.Transfer,
        "_add_up",
        lambda *arguments: (
            arguments[0]._condition.wait_for(lambda: False, 0.3) or real(*arguments)
        ),  # waited out
    )
    of = tensors()
    weights = new_publisher().publish(whole(of), 4)
    received(weights.to("first"))
    of["steps"][3] = 0
    with pytest.raises(WeightSyncError, match="version 4 changed during the transfer"):
        received(weights.to("second"))


def test_a_receiver_of_an_older_version_is_rejected(new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    old = publisher.publish(whole(tensors()), 1)
    publisher.publish(whole(tensors()), 2)
    with pytest.raises(
        WeightSyncError,
        match=r"version 1, rank 0 .*: version 1 is no longer available: version 2 is published",
    ):
        IncomingWeights(old)
    publisher.finish()
    with pytest.raises(WeightSyncError, match=r"version 1 is no longer available: none is published"):
        IncomingWeights(old)


def test_weights_that_change_while_they_are_given_are_found(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "GRACE_S", 0.05)  # waited out: the others come late
    of = tensors()
    publisher = new_publisher()
    weights = publisher.publish(whole(of), 4, ["first", "second"])
    received(weights.to("first"))
    of["steps"][3] = 0
    with pytest.raises(WeightSyncError, match="version 4 changed during the transfer"):
        received(weights.to("second"))
    with pytest.raises(WeightSyncError, match="version 4 changed during the transfer"):
        publisher.finish()


def test_bytes_that_change_on_their_way_are_named_with_tensor_box_and_both_ranks(
    way: str, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = sources.RankSource.elements, list[int]()

    def once_wrong(*arguments: object) -> torch.Tensor:
        found = real(*arguments)  # pyright: ignore[reportArgumentType]
        seen.append(1)
        return found + 1 if len(seen) == 3 else found

    monkeypatch.setattr(sources.RankSource, "elements", once_wrong)
    publisher = new_publisher(256)
    weights = publisher.publish(whole({"a": torch.ones(40, 8)}), 1).to("rollout[2]")
    named = r"tensor 'a' did not arrive .* Box\(\[16:24, 0:8\]\) from rank 0 of the trainer differs at rollout\[2\]"
    with pytest.raises(WeightSyncError, match=named):
        received(weights, {"a": torch.zeros(40, 8)})


def test_a_wrong_sum_of_sums_is_found(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = new_publisher().publish(whole(tensors()), 7)
    real = sources.RankSource.checksum
    monkeypatch.setattr(sources.RankSource, "checksum", lambda self: real(self) ^ 1)
    with pytest.raises(
        WeightSyncError,
        match=r"version 7, rank 0 .*: checksum [0-9a-f]{16} was published, but [0-9a-f]{16} arrived",
    ):
        received(weights)


def test_a_stuck_receiver_delays_the_others_for_its_deadline_and_is_named(
    way: str, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "gloo":
        pytest.skip("all members of a group wait for each other")
    real, stopped = transfers.Transfer._give, threading.Event()

    def give(self: transfers.Transfer, session: Any, number: int) -> None:
        answers = session.maps or session.node is not None
        if session.receiver == "idle" and (answers or (number and stopped.wait(60))):
            session.connection.set_silence(
                0.05
            )  # waited out: the idle receiver answers nothing from here on
        real(self, session, number)

    monkeypatch.setattr(transfers.Transfer, "_give", give)
    publisher = new_publisher(1 << 18)
    large = {"a": torch.zeros(4_000_000)}
    weights = publisher.publish(whole(large), 1, ["idle", "other"])
    with ThreadPoolExecutor(1) as threads, IncomingWeights(weights.to("idle")) as idle:
        steps = idle.slices(receiving_plan(idle, large).received_by(0))
        other = threads.submit(lambda: received(weights.to("other"), large))
        next(steps)
        stopped.set()
        assert equal(other.result(timeout=60)[0], large)
        assert [*publisher.lost] == ["idle"]
        assert re.search(r"idle was silent after \d+ of 62 buckets of version 1", publisher.lost["idle"])
        with pytest.raises(
            WeightSyncError, match=r"rank 0 of the trainer at 127.0.0.1:\d+: .*after \d+ of 62 buckets"
        ):
            list(steps)


def test_with_more_bytes_each_side_is_more_patient(
    way: str, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOWEST_BYTES_PER_S", 1000.0)
    of, publisher = {"a": torch.randn(4000)}, new_publisher()
    weights = publisher.publish(whole(of), 1).to("slow")
    with IncomingWeights(weights) as incoming:
        steps = incoming.slices(receiving_plan(incoming, of).received_by(0))
        next(steps)
        assert publisher._transfer is not None
        (source,), (session,) = incoming._sources, publisher._transfer._sessions
        for side in (source, session):
            assert (
                side.connection.silence_s
                == side.connection._socket.gettimeout()
                == connections.SILENCE_S + 16
            )
        list(steps)
        incoming.confirm()


def test_a_silent_publisher_is_given_up(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        receiving, "PATIENCE_S", 0.2
    )  # waited out: the publisher fills nothing until it is over
    over = threading.Event()
    monkeypatch.setattr(transfers.Transfer, "_fill", lambda *arguments: 0 if over.wait(60) else 1)
    weights = new_publisher().publish(whole(tensors()), 3)
    with pytest.raises(
        WeightSyncError, match=r"version 3, rank 0 .* nothing came for 0 s, before the first bucket"
    ):
        received(weights)
    over.set()


def test_a_publisher_that_cannot_read_its_parts_fails_on_both_sides(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> int:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(transfers.Transfer, "_fill", broken)
    publisher = new_publisher()
    weights = publisher.publish(whole(tensors()), 3)
    with pytest.raises(
        WeightSyncError, match=r"rank 0 .*: RuntimeError: the device is gone, before the first bucket"
    ):
        received(weights)
    with pytest.raises(WeightSyncError, match="RuntimeError: the device is gone"):
        publisher.finish()


def test_a_transfer_that_is_ended_tells_its_receivers(new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    weights = publisher.publish(whole(tensors()), 1)
    incoming = IncomingWeights(weights)
    steps = incoming.slices(receiving_plan(incoming, tensors()).received_by(0))
    next(steps)
    assert publisher.finish() is None, "nobody took it all"
    with pytest.raises(
        WeightSyncError,
        match=r"version 1, rank 0 .*(is gone|ended the transfer).*after [01] of 26 buckets",
    ):
        list(steps)
    incoming.close()


def test_who_has_not_the_token_is_given_nothing(new_publisher: NewPublisher) -> None:
    (rank,) = new_publisher().publish(whole(tensors()), 1).ranks
    assert rank.token not in repr(rank)
    with pytest.raises(OSError, match="ended the connection"):
        connections.Connection.connect(LOOPBACK, rank.port, "another token")


def test_the_family_of_an_address_is_that_of_its_form() -> None:
    with connections.listen("") as listener:
        assert listener.getsockname()[0] == LOOPBACK
    with pytest.raises(
        WeightSyncError,
        match=r"cannot listen for weight receivers at 192\.0\.2\.1: .*must be an address of this machine",
    ):
        connections.listen("192.0.2.1")
    with pytest.raises(
        WeightSyncError, match=r"cannot listen for weight receivers at 2001:db8::1: Cannot assign"
    ):
        connections.listen("2001:db8::1")


def test_an_impostor_of_the_publisher_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.sendall(b"n" * 32)
                connected.recv(64)
                connected.sendall(b"p" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="does not have the token"):
            connections.Connection.connect("127.0.0.1", listener.getsockname()[1], "token")
        thread.join()


def test_nonsense_costs_its_own_connection(new_publisher: NewPublisher) -> None:
    weights = new_publisher().publish(whole(tensors()), 1)
    (rank,) = weights.ranks
    with socket.create_connection((rank.host, rank.port)) as stray:
        stray.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    connection = connections.Connection.connect(LOOPBACK, rank.port, rank.token)
    connection.send(b"H", b"[")
    with pytest.raises(OSError, match="ended the connection"):
        connection.receive()
    connection.close()
    assert equal(received(weights)[0], tensors())


@pytest.mark.parametrize("length", [8 << 30, connections.MOST_BYTES, -1, 1 << 62])
def test_a_receiver_that_announces_a_large_message_takes_no_memory(
    new_publisher: NewPublisher, length: int
) -> None:
    weights = new_publisher().publish(whole(tensors()), 1)
    (rank,) = weights.ranks
    before = psutil.Process().memory_info().vms
    connection = connections.Connection.connect(LOOPBACK, rank.port, rank.token)
    connection._socket.sendall(struct.pack("<cq", b"H", length))
    with pytest.raises(OSError, match="ended the connection"):
        connection.receive()
    assert psutil.Process().memory_info().vms - before < 200 << 20
    connection.close()
    assert equal(received(weights)[0], tensors())


@pytest.mark.parametrize(
    "wants",
    [
        [[0, [0, 0], [1 << 20, 1 << 11]]],
        [[0, [-1, 0], [1, 1]]],
        [[10_000, [0, 0], [1, 1]]],
        [[-1, [0, 0], [1, 1]]],
        [[0, [0], [1]]],
        [[0, ["0", 0], [1, 1]]],
        "everything, again and again",
    ],
)
def test_a_receiver_that_wants_more_than_there_is_loses_its_connection(
    new_publisher: NewPublisher, wants: Any
) -> None:
    weights = new_publisher().publish(whole(tensors()), 1)
    (rank,) = weights.ranks
    connection = connections.Connection.connect(LOOPBACK, rank.port, rank.token)
    hello = {"version": 1, "receiver": "greedy", "part": 0, "parts": 1, "known": ""}
    hello |= {"process": "", "groups": [], "machine": ""}
    connection.send(b"H", json.dumps(hello).encode())
    connection.receive()
    entries = read_description(connection.receive()[1]).entries
    if isinstance(wants, str):
        wants = [
            [number, *map(list, (e.box.starts, e.box.stops))] for number, e in enumerate(entries)
        ] * 20
    connection.send(b"W", json.dumps([None, wants]).encode())
    with pytest.raises(OSError, match="ended the connection"):
        while True:
            connection.receive()
    connection.close()
    assert equal(received(weights)[0], tensors())


def test_weights_of_another_machine_without_a_server_are_refused(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = new_publisher(host="").publish(whole(tensors()), 1)
    monkeypatch.setattr(sources, "this_machine", lambda: "another machine")
    with pytest.raises(
        WeightSyncError,
        match="rank 0 of the trainer is on another machine, and only serves receivers on its own machine",
    ):
        IncomingWeights(weights)


def test_a_publisher_that_has_ended_is_named(new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    weights = publisher.publish(whole(tensors()), 5)
    publisher.close()
    with pytest.raises(
        WeightSyncError,
        match=r"version 5, rank 0 of the trainer at 127.0.0.1:\d+: the publisher is gone",
    ):
        IncomingWeights(weights)
    with pytest.raises(WeightSyncError, match="this publisher was closed"):
        publisher.publish(whole(tensors()), 6)


def test_versions_of_different_numbers_do_not_add_up(new_publisher: NewPublisher) -> None:
    first, second = (new_publisher().publish(whole({"a": torch.ones(1)}), version) for version in (1, 2))
    with pytest.raises(ValueError, match="cannot add weights of versions 1 and 2"):
        _ = first + second


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_memory_of_a_missing_device_is_refused_with_alternatives(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = set(threading.enumerate())
    with pytest.raises(
        WeightSyncError, match=f'"{transport}" moves weights from GPU to GPU.*use "auto"'
    ):
        WeightPublisher(LOOPBACK, BUCKET, transport=transport)
    assert set(threading.enumerate()) <= before


class _Devices:
    """Stands in for `torch.cuda` on a machine with two GPUs."""

    def init(self) -> None:
        """Do nothing."""

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(uuid=f"GPU-{device}")


HANDLE = (0, b"handle", 64, 0, b"counter", 3, b"event", True)
"""torch's handle of device memory: fields of
`torch.multiprocessing.reductions.rebuild_cuda_tensor`."""


class _Memory:
    """Stands in for a tensor on the second GPU."""

    device = 1

    def untyped_storage(self) -> _Memory:
        return self

    def _share_cuda_(self) -> Any:
        return HANDLE


def test_the_handle_of_device_memory_travels_as_json_to_the_device_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory: Any = _Memory()
    monkeypatch.setattr(torch, "cuda", _Devices())
    said = json.loads(json.dumps(mapped_memory.device_mapping(memory)))
    asked: list[Any] = []

    def open_it(*fields: Any) -> Any:
        asked.extend(fields)
        return torch.arange(8, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_it)
    assert mapped_memory.open_device_memory(said).tolist() == list(range(8))
    assert tuple(asked) == (1, *HANDLE[1:])
    with pytest.raises(OSError, match=r"does not see its GPU.*GPU-0.*GPU-1") as caught:
        mapped_memory.open_device_memory({**said, "device": "GPU-7"})
    assert caught.value.filename == "GPU-7"
