"""Rendezvous: the ranks of a group meet at a key-value store that rank 0 serves over TCP.

    rank 0                                                rank r
    takes a free port of a given address
       ── the driver tells the others its port ──>
    serves the store, sets its nonce                      connects, sets its own nonce
    checks the proof of each rank     <── proof of r ──   HMAC of rank 0's nonce, keyed with the secret
    proves itself                     ── proof for r ──>  checks the proof of rank 0
       both continue with `torch.distributed`, under keys that begin with another HMAC of the secret

Protection: a process without the secret, such as one of another run, cannot pass for a rank. A rank
never uses another group's store. The store listens on only one address.

Limits: `TCPStore` has neither authentication nor encryption. A process that can connect to its port
can list, read, overwrite and delete keys, and thus disturb a group or learn where its ranks listen.
gloo and NCCL send unencrypted tensors. Between machines, use a network that outsiders cannot reach.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ..dataflow.errors import WorkerError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"
POLL_S = 0.01
"""[s] Polling interval for a key. `TCPStore.wait` would print a C++ warning at each timeout."""


def take_port(host: str) -> socket.socket:
    """Return a socket bound to a free port of an address of this machine. It does not listen yet,
    so early connections are refused and retried instead of waiting forever.

    >>> with take_port("127.0.0.1") as taken:
    ...     taken.getsockname()[0]
    '127.0.0.1'

    Raises:
        WorkerError: the machine lacks this address.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.bind((host, 0))
    except OSError as error:
        taken.close()
        raise WorkerError(f"cannot take a port of {host}: {error.strerror or error}") from None
    return taken


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of a group's ranks."""

    host: str
    """Address of rank 0's machine; loopback if all ranks are on one machine."""
    port: int
    secret: str = field(repr=False)
    timeout_s: float = 300.0
    """[s] Maximum wait for the other ranks."""
    taken: socket.socket | None = field(default=None, repr=False, compare=False)
    """On rank 0: the socket that holds the store's port."""

    @classmethod
    def at(cls, taken: socket.socket, secret: str, timeout_s: float = 300.0) -> Rendezvous:
        host, port = taken.getsockname()[:2]
        return cls(host, port, secret, timeout_s, taken)

    @property
    def on_one_machine(self) -> bool:
        """Whether only processes on this machine can connect."""
        return ipaddress.ip_address(self.host).is_loopback

    def proof(self, of: str, nonce: str) -> str:
        # The role keeps one rank's proof from being replayed as another's.
        return hmac.digest(self.secret.encode(), f"{of} {nonce}".encode(), "sha256").hex()

    def join(self, group: str, rank: int, ranks: int) -> Store:
        """Meet the other ranks of a group. Return the shared store once all ranks have proved that
        they know the secret. Raises a WorkerError that names ranks that did not join in time, or if
        a process does not know the secret."""
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        deadline = time.monotonic() + self.timeout_s
        store = self._connect(group, rank, deadline)
        meeting = _Meeting(self, store, group, deadline)
        nonce = meeting.let_in(range(1, ranks)) if rank == 0 else meeting.come(rank)
        # A process without the secret cannot guess the prefix of the group's keys.
        return PrefixStore(self.proof("keys", nonce), store)

    def _connect(self, group: str, rank: int, deadline: float) -> Store:
        from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        timeout = timedelta(seconds=self.timeout_s)
        # The store takes over the socket's descriptor.
        listening = self.taken.detach() if self.taken is not None else None
        try:
            if rank:
                self._wait_for_port(deadline)
            return TCPStore(
                self.host,
                self.port,
                None,
                rank == 0,
                timeout=timeout,
                wait_for_workers=False,  # it would count every connection
                master_listen_fd=listening,
            )
        except (DistError, OSError) as error:
            raise WorkerError(
                f"rank {rank} of {group!r}: rank 0 did not answer at {self.host}:{self.port} within {self.timeout_s:.0f} s "
                f"({str(error).splitlines()[0]})"
            ) from None

    def _wait_for_port(self, deadline: float) -> None:
        """Wait until rank 0 listens. `TCPStore` would log a stack trace for each attempt."""
        while True:
            try:
                left_s = max(POLL_S, deadline - time.monotonic())
                return socket.create_connection((self.host, self.port), left_s).close()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)


@dataclass(frozen=True)
class _Meeting:
    """One rank's view of the exchange of proofs."""

    rendezvous: Rendezvous
    store: Store
    group: str
    deadline: float

    def let_in(self, others: Sequence[int]) -> str:
        """On rank 0: check the other ranks' proofs, prove its identity, and return its nonce."""

        def missing() -> str:
            late = [rank for rank in others if not self.store.check([f"proof/{rank}"])]
            return f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"

        own = secrets.token_hex(16)
        self.store.set("nonce/0", own)
        for rank in others:
            self._wait_for(f"proof/{rank}", missing)
            nonce = self._read(f"nonce/{rank}")
            if not self._is_proved(f"proof/{rank}", f"rank {rank}", own):
                raise WorkerError(
                    f"a process without the secret of {self.group!r} connected to "
                    f"{self._where} as rank {rank}"
                )
            self.store.set(f"proof/0/{rank}", self.rendezvous.proof(f"rank 0 to {rank}", nonce))
        return own

    def come(self, rank: int) -> str:
        """On other ranks: prove membership to rank 0, check its proof, and return its nonce."""
        own = secrets.token_hex(16)
        self._wait_for("nonce/0", lambda: "rank 0")
        nonce = self._read("nonce/0")
        self.store.set(f"nonce/{rank}", own)
        self.store.set(f"proof/{rank}", self.rendezvous.proof(f"rank {rank}", nonce))
        self._wait_for(f"proof/0/{rank}", lambda: "rank 0 (which admits ranks in order)")
        if not self._is_proved(f"proof/0/{rank}", f"rank 0 to {rank}", own):
            raise WorkerError(
                f"the process that serves {self._where} does not have the secret of {self.group!r}"
            )
        return nonce

    @property
    def _where(self) -> str:
        return f"{self.rendezvous.host}:{self.rendezvous.port}"

    def _is_proved(self, key: str, of: str, nonce: str) -> bool:
        return hmac.compare_digest(self._read(key), self.rendezvous.proof(of, nonce))

    def _read(self, key: str) -> str:
        return self.store.get(key).decode(errors="replace")

    def _wait_for(self, key: str, who: Callable[[], str]) -> None:
        while not self.store.check([key]):
            if time.monotonic() > self.deadline:
                raise WorkerError(
                    f"the ranks of {self.group!r} meet at {self._where}, but {who()} did "
                    f"not join within {self.rendezvous.timeout_s:.0f} s"
                )
            time.sleep(POLL_S)


# The gateway of a run's agents


@dataclass(frozen=True)
class GatewayAddress:
    """Where a run's gateway listens."""

    host: str
    port: int
    key: str = field(repr=False)
    """Secret of the run. Harnesses never see it: each episode has its own key."""
    certificate: str = ""
    """Certificate of the gateway, as PEM text; empty without TLS."""

    def ssl_context(self) -> ssl.SSLContext | bool:
        """Return what a client needs to verify the gateway."""
        if not self.certificate:
            return True
        context = ssl.create_default_context(cadata=self.certificate)
        context.check_hostname = False  # the certificate names no host
        return context

    def url(self, scheme: str, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}{'s' * bool(self.certificate)}://{host}:{self.port}{path}"
