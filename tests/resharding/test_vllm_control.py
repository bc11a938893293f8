"""A trainer controls the engines that receive its weights by a vLLM backend: in order, together,
and with deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding import connection
from weft.resharding.buckets import Entry, box_sum, checksum_of
from weft.resharding.vllm_control import Receivers, TensorSum, checksum_of_tensors, take_as_told
from weft.resharding.weights import Box, Weights

SUMS = {"a": TensorSum("float32", (2, 3), 17), "b": TensorSum("bfloat16", (4,), 2**63)}


class Engine:
    """An engine on a separate thread."""

    def __init__(
        self, weights: Weights, *, ranks: int = 1, identity: str = "first", came: Any = None
    ) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failure = ""
        self.checksum = ""
        self.breaks_in = ""
        self.port = weights.ranks[0].port
        self._arguments = weights, ranks, identity
        self._came = came or [SUMS] * ranks
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        weights, ranks, identity = self._arguments
        try:
            self.checksum = take_as_told(weights, ranks, identity, self._call, lambda: self._came)
        except (WeightSyncError, ValueError) as error:
            self.failure = str(error)

    def _call(self, method: str, payload: Any) -> None:
        self.calls.append((method, payload))
        if method == self.breaks_in:
            raise ValueError("it broke")

    def over(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture(params=[False, True], ids=["each for itself", "together"])
def receivers(request: pytest.FixtureRequest) -> Iterator[Receivers]:
    receivers = Receivers("", together=request.param)
    yield receivers
    receivers.close()


def record(receivers: Receivers, receiver: str = "rollout[0]", version: int = 3) -> Weights:
    return Weights(version, (receivers.endpoint,), receiver, backend="nccl")


def test_engines_obey_and_are_numbered_consecutively(
    receivers: Receivers,
) -> None:
    engines = [Engine(record(receivers, f"rollout[{n}]"), ranks=2) for n in (1, 0)]
    assert receivers.gather(3, ["rollout[0]", "rollout[1]"], 100) == [
        "rollout[0] first",
        "rollout[1] first",
    ]
    assert receivers.num_ranks == 4
    receivers.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    receivers.start_weight_update()
    receivers.update_weights({"names": ["a"], "handle": (b"x", torch.float32)})
    receivers.finish_weight_update("v3")
    receivers.send_sums(SUMS)
    for engine, offset in zip(engines, (3, 1), strict=True):
        engine.over()
        assert engine.calls == [
            ("init_weight_transfer_engine", {"rank_offset": offset, "world_size": 5}),
            ("start_weight_update", None),
            ("update_weights", {"names": ["a"], "handle": (b"x", torch.float32)}),
            ("finish_weight_update", None),
        ]
        assert (engine.checksum, engine.failure) == (checksum_of_tensors(SUMS), "")
    assert not receivers.lost


def test_a_replaced_engine_is_distinguished_from_its_predecessor(receivers: Receivers) -> None:
    for identity in ("first", "second"):
        engine = Engine(record(receivers), identity=identity)
        assert receivers.gather(3, ["rollout[0]"], 0) == [f"rollout[0] {identity}"]
        receivers.send_sums(SUMS)
        engine.over()
        assert not engine.failure


def test_the_transfer_begins_without_an_engine_that_does_not_come(receivers: Receivers) -> None:
    late = Engine(record(receivers, version=2))
    engine = Engine(record(receivers))
    while receivers._came.qsize() < 2:
        time.sleep(0.001)
    assert receivers.gather(3, ["rollout[0]", "rollout[1]"], 0, patience_s=0) == ["rollout[0] first"]
    assert receivers.lost == {"rollout[1]": "rollout[1] did not come within 0 s for version 3"}
    receivers.send_sums(SUMS)
    engine.over()
    late.over()
    assert (
        not engine.failure and "version 2 is no longer available: version 3 is published" in late.failure
    )


def test_a_failing_engine_ends_a_transfer_that_needs_it(
    receivers: Receivers,
) -> None:
    engines = [Engine(record(receivers, f"rollout[{n}]")) for n in range(2)]
    engines[1].breaks_in = "update_weights"
    receivers.gather(3, ["rollout[0]", "rollout[1]"], 0)
    if receivers._together:
        with pytest.raises(
            WeightSyncError, match=r"rollout\[1\] failed in update_weights: ValueError: it broke"
        ):
            receivers.update_weights({})
        receivers.dismiss("one has failed")
    else:
        receivers.update_weights({})
        receivers.finish_weight_update()
        receivers.send_sums(SUMS)
    for engine in engines:
        engine.over()
    assert engines[1].failure == "it broke" and receivers.lost.keys() == {"rollout[1]"}
    assert ("one has failed" in engines[0].failure) == receivers._together
    assert bool(engines[0].checksum) != receivers._together


@pytest.mark.parametrize("receivers", [True], indirect=True, ids=["together"])
def test_where_all_take_part_the_transfer_ends_with_an_engine_that_is_gone(receivers: Receivers) -> None:
    engines = [Engine(record(receivers, f"rollout[{n}]")) for n in range(2)]
    receivers.gather(3, ["rollout[0]", "rollout[1]"], 0)
    receivers._engines[0].connection.hang_up()
    with pytest.raises(WeightSyncError, match=r"^rollout\[0\] is gone \([^;]*\)\n"):
        receivers.start_weight_update()
    assert receivers.lost.keys() == {"rollout[0]"}
    receivers.dismiss("one is gone")
    for engine in engines:
        engine.over()
    assert "one is gone" in engines[1].failure and "is gone" in engines[0].failure


def test_the_transfer_begins_without_an_engine_that_has_come_and_is_gone(receivers: Receivers) -> None:
    engines = [Engine(record(receivers, f"rollout[{n}]")) for n in range(2)]
    came = [receivers._came.get(timeout=20) for _ in engines]
    for engine in came:
        if engine.receiver == "rollout[0]":
            engine.connection.hang_up()
        receivers._came.put(engine)
    assert receivers.gather(3, ["rollout[0]", "rollout[1]"], 0) == ["rollout[1] first"]
    assert (
        receivers.lost.keys() == {"rollout[0]"}
        and "rollout[0] is gone (" in receivers.lost["rollout[0]"]
    )
    receivers.start_weight_update()
    receivers.send_sums(SUMS)
    for engine in engines:
        engine.over()
    assert engines[0].failure and not engines[1].failure


@pytest.mark.parametrize("receivers", [False], indirect=True, ids=["each for itself"])
def test_a_dead_engine_is_skipped_and_the_last_one_ends_the_transfer(
    receivers: Receivers,
) -> None:
    engines = [Engine(record(receivers, f"rollout[{n}]")) for n in range(2)]
    receivers.gather(3, ["rollout[0]", "rollout[1]"], 0)
    receivers._engines[0].connection.hang_up()
    receivers.start_weight_update()
    assert receivers.lost.keys() == {"rollout[0]"}
    receivers._engines[1].connection.hang_up()
    with pytest.raises(WeightSyncError, match=r"rollout\[0\] is gone.*rollout\[1\] is gone"):
        receivers.update_weights({})
    for engine in engines:
        engine.over()
        assert "the trainer at 127.0.0.1" in engine.failure and "is gone" in engine.failure


@pytest.mark.parametrize("after", range(4))
def test_an_engine_reports_the_death_of_its_trainer(receivers: Receivers, after: int) -> None:
    engine = Engine(record(receivers))
    steps: list[Callable[[], Any]] = [
        lambda: receivers.gather(3, ["rollout[0]"], 0),
        receivers.start_weight_update,
        receivers.finish_weight_update,
    ]
    for step in steps[:after]:
        step()
    while after == 0 and receivers._came.empty():
        time.sleep(0.001)
    receivers.close()
    engine.over()
    assert (
        engine.failure
        == f"weights version 3, the trainer at 127.0.0.1:{engine.port}: the trainer has ended"
    )


def test_an_engine_waits_no_longer_than_its_patience(
    receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(record(receivers))
    while receivers._came.empty():
        time.sleep(0.001)
    monkeypatch.setattr(
        connection, "SILENCE_S", 0.05
    )  # waited out: the engine is connected, and is sent nothing more
    receivers.gather(3, ["rollout[0]"], 0)
    engine.over()
    assert "it was silent for 0 s" in engine.failure


def changed(**tensors: Any) -> Mapping[str, TensorSum]:
    return {name: tensor for name, tensor in {**SUMS, **tensors}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("came", "what"),
    [
        (changed(a=SUMS["a"]._replace(box_sum=18)), "tensor 'a' did not arrive as it was published at"),
        (
            changed(b=SUMS["b"]._replace(dtype="float16")),
            "tensor 'b' did not arrive as it was published at",
        ),
        (changed(a=None), "tensor 'a' did not arrive at"),
        (changed(c=SUMS["a"]), "tensor 'c' was not published, and came to"),
    ],
)
def test_a_tensor_that_arrived_wrong_is_named_with_its_rank(
    receivers: Receivers, came: Any, what: str
) -> None:
    engine = Engine(record(receivers), ranks=2, came=[SUMS, came])
    receivers.gather(3, ["rollout[0]"], 0)
    receivers.send_sums(SUMS)
    engine.over()
    assert engine.failure == f"weights version 3: {what} rank 1 of rollout[0]"


def test_only_methods_of_a_weight_update_are_carried_out(receivers: Receivers) -> None:
    engine = Engine(record(receivers))
    receivers.gather(3, ["rollout[0]"], 0)
    with pytest.raises(WeightSyncError, match="'shutdown' is not a method of a weight update"):
        receivers._ask("shutdown")
    engine.over()
    assert not engine.calls and "is not a method" in engine.failure


def test_sums_of_parts_add_up_to_the_checksum_of_everything() -> None:
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    parts = [Box((0, 0), (3, 7)), Box((3, 0), (5, 7))]
    sums = [box_sum(whole[part.slices], part, (5, 7)) for part in parts]
    total = (
        sum(int(checksum_of_tensors({"w": TensorSum("float32", (5, 7), each)}), 16) for each in sums)
        % 2**64
    )
    assert f"{total:016x}" == checksum_of_tensors({"w": TensorSum("float32", (5, 7), sum(sums))})
    entry = Entry("w", "float32", (5, 7), Box.full((5, 7)), 0, 0)
    assert total == checksum_of([entry], [box_sum(whole, entry.box, (5, 7))])
