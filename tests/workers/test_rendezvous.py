"""Ranks meet at a store on rank 0: each proves that it knows the secret, and missing ranks are
named."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from weft.dataflow.errors import WorkerError
from weft.workers import rendezvous
from weft.workers.rendezvous import LOOPBACK, GatewayAddress, Rendezvous, take_port


def meeting(timeout_s: float = 20.0, secret: str = "right") -> tuple[Rendezvous, Rendezvous]:
    """Return the rendezvous as rank 0 has it, and as the others have it."""
    first = Rendezvous.at(take_port(LOOPBACK), secret, timeout_s)
    return first, replace(first, taken=None)


def test_ranks_meet_and_share_secret_keys():
    first, other = meeting()
    with ThreadPoolExecutor(3) as ranks:
        joining = [
            ranks.submit(one.join, "actor", rank, 3) for rank, one in enumerate((first, other, other))
        ]
        stores = [each.result(30) for each in joining]
    stores[0].set("where", "here")
    assert [store.get("where") for store in stores] == [b"here"] * 3
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    stranger = TCPStore(LOOPBACK, first.port, None, False, wait_for_workers=False)
    assert not stranger.check(["where"]), (
        "the keys of the group have a prefix that is made of the secret"
    )


def test_the_store_listens_on_the_address_that_it_was_given_alone():
    first, _ = meeting()
    store = first.join("alone", 0, 1)
    with socket.socket(socket.AF_INET6) as other:
        assert other.connect_ex(("::1", first.port)), "nobody listens on other addresses"
    store.set("still", "there")
    with pytest.raises(WorkerError, match=r"cannot take a port of 192\.0\.2\.1"):
        take_port("192.0.2.1")


class Clock:
    """Replaces the module `time` in the rendezvous."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rendezvous, "time", made)
    return made


def await_proof_of(rank: int, port: int) -> None:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    with socket.socket() as looking:
        while looking.connect_ex((LOOPBACK, port)):
            time.sleep(0.01)
    store = TCPStore(LOOPBACK, port, None, False, wait_for_workers=False)
    while not store.check([f"proof/{rank}"]):
        time.sleep(0.01)


def test_a_rank_that_does_not_come_is_named_by_its_number(clock: Clock):
    first, other = meeting()
    with ThreadPoolExecutor(2) as ranks:
        joining = [ranks.submit(one.join, "actor", rank, 4) for rank, one in ((0, first), (2, other))]
        await_proof_of(2, first.port)
        clock.now_s = 21.0
        with pytest.raises(
            WorkerError,
            match=rf"'actor' meet at {LOOPBACK}:\d+, but ranks 1, 3 did not join within 20 s",
        ):
            joining[0].result(30)
        with pytest.raises(WorkerError, match=r"but rank 0 \(which admits ranks in order"):
            joining[1].result(30)


def test_rank_0_that_does_not_serve_is_named_with_its_address():
    first, other = meeting(timeout_s=1.0)  # waited out: rank 0 does not serve
    assert first.taken is not None
    with (
        first.taken,
        pytest.raises(
            WorkerError, match=rf"rank 0 did not answer at {LOOPBACK}:{first.port} within 1 s"
        ),
    ):
        other.join("actor", 1, 2)


@pytest.mark.parametrize(("rank_0", "rank_1"), [("right", "wrong"), ("wrong", "right")])
def test_who_does_not_have_the_secret_is_not_let_in(rank_0: str, rank_1: str, clock: Clock):
    first, other = meeting(secret=rank_0)
    with ThreadPoolExecutor(2) as ranks:
        joining = [
            ranks.submit(one.join, "actor", r, 2)
            for r, one in enumerate((first, replace(other, secret=rank_1)))
        ]
        with pytest.raises(
            WorkerError, match=r"a process without the secret of 'actor' connected to .* as rank 1"
        ):
            joining[0].result(30)
        clock.now_s = 21.0
        with pytest.raises(WorkerError):
            joining[1].result(30)


def test_a_store_that_does_not_have_the_secret_is_not_trusted():
    first, other = meeting()
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    assert first.taken is not None
    taken = first.taken.detach()
    impostor = TCPStore(LOOPBACK, first.port, None, True, wait_for_workers=False, master_listen_fd=taken)
    impostor.set("nonce/0", "1234")
    impostor.set("proof/0/1", "1234")
    with pytest.raises(
        WorkerError,
        match=rf"the process that serves {LOOPBACK}:{first.port} does not have the secret of 'actor'",
    ):
        other.join("actor", 1, 2)


def test_a_secret_is_not_printed():
    assert "hush" not in repr(Rendezvous(LOOPBACK, 1, "hush"))


def test_the_key_of_a_gateway_is_in_no_message():
    assert "a secret" not in repr(GatewayAddress("127.0.0.1", 80, "a secret"))
