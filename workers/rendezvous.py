"""Rendezvous: how the ranks of a group find each other, through a store of keys and values that rank 0 serves over TCP.

    rank 0                                                  rank r
    takes a free port of an address that it is given
                 ── the driver tells the others its port ──>
    serves the store, sets its nonce                        connects, sets its own nonce
    checks the proof of each rank       <── proof of r ──   HMAC of rank 0's nonce, under the secret of the group
    proves itself                       ── proof for r ──>  checks the proof of rank 0
                 both go on with `torch.distributed`, under keys that begin with another HMAC of the secret

What this protects: a process that does not have the secret (of another run, or with the address of an earlier one) is never taken for a
rank, and a rank never goes on with a store that is not its group's. The store listens on the one address that it was given.

What it does not protect: `TCPStore` has no authentication and no encryption of its own. Who can connect to its port can list, read,
overwrite and delete its keys, and so disturb a group or learn where its ranks listen; gloo's and NCCL's own connections carry tensors in
the clear. Between machines, the network of a run has to be one that strangers do not reach.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
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
"""Seconds between two looks for a key. `TCPStore.wait` prints a warning in C++ for each wait that ends without one."""


def take_port(host: str) -> socket.socket:
    """A socket that holds a free port of one address of this machine. It does not listen yet: who comes too early is refused, and tries
    again, where a connection that nobody serves would be waited for without end.

    >>> with take_port("127.0.0.1") as taken:
    ...     taken.getsockname()[0]
    '127.0.0.1'

    Raises:
        WorkerError: this machine has no such address.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.bind((host, 0))
    except OSError as error:
        taken.close()
        raise WorkerError(f"no port of {host} can be taken: {error.strerror or error}") from None
    return taken


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet."""

    host: str
    """Address of the machine of rank 0; loopback where all ranks are on one machine."""
    port: int
    secret: str = field(repr=False)
    """Of the group; nobody else has it."""
    timeout_s: float = 300.0
    """Longest wait for the other ranks."""
    taken: socket.socket | None = field(default=None, repr=False, compare=False)
    """On rank 0: the socket that holds the port. The store listens on it."""

    @classmethod
    def at(cls, taken: socket.socket, secret: str, timeout_s: float = 300.0) -> Rendezvous:
        """The rendezvous of rank 0, which has taken a port."""
        host, port = taken.getsockname()[:2]
        return cls(host, port, secret, timeout_s, taken)

    @property
    def on_one_machine(self) -> bool:
        """Whether nobody outside of this machine can come to it."""
        return ipaddress.ip_address(self.host).is_loopback

    def proof(self, of: str, nonce: str) -> str:
        """Shows that who makes it has the secret, and was asked with this nonce."""
        return hmac.digest(self.secret.encode(), f"{of} {nonce}".encode(), "sha256").hex()

    def join(self, group: str, rank: int, ranks: int) -> Store:
        """Meet the other ranks; returns the store that they share, once all have proved that they have the secret.

        Args:
            group: name of the group, for messages.
            rank: of this process.
            ranks: of the group.

        Raises:
            WorkerError: somebody did not come in time (the message names the ranks), or does not have the secret.
        """
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        deadline = time.monotonic() + self.timeout_s
        store = self._connect(group, rank, deadline)
        meeting = _Meeting(self, store, group, deadline)
        nonce = meeting.let_in(range(1, ranks)) if rank == 0 else meeting.come(rank)
        return PrefixStore(self.proof("keys", nonce), store)

    def _connect(self, group: str, rank: int, deadline: float) -> Store:
        from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        timeout = timedelta(seconds=self.timeout_s)
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
                wait_for_workers=False,  # it would count whoever connects
                master_listen_fd=listening,
            )
        except (DistError, OSError) as error:
            raise WorkerError(
                f"rank {rank} of {group!r}: rank 0 did not answer at {self.host}:{self.port} within {self.timeout_s:.0f} s "
                f"({str(error).splitlines()[0]})"
            ) from None

    def _wait_for_port(self, deadline: float) -> None:
        """Wait until rank 0 listens. `TCPStore` would, too, and log a stack for each try.

        Raises:
            OSError: it does not in time.
        """
        while True:
            try:
                socket.create_connection(
                    (self.host, self.port), max(POLL_S, deadline - time.monotonic())
                ).close()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
            else:
                return


@dataclass(frozen=True)
class _Meeting:
    """The exchange of proofs, as one rank sees it."""

    rendezvous: Rendezvous
    store: Store
    group: str
    deadline: float

    def let_in(self, others: Sequence[int]) -> str:
        """Check the proofs of the others, and prove to each that this is their rank 0; returns the nonce of rank 0."""
        own = secrets.token_hex(16)
        self.store.set("nonce/0", own)
        for rank in others:
            self._wait_for(f"proof/{rank}", lambda: self._missing(others))
            nonce = self._read(f"nonce/{rank}")
            if not hmac.compare_digest(
                self._read(f"proof/{rank}"), self.rendezvous.proof(f"rank {rank}", own)
            ):
                raise WorkerError(
                    f"somebody without the secret of {self.group!r} came to {self._where} as rank {rank}"
                )
            self.store.set(f"proof/0/{rank}", self.rendezvous.proof(f"rank 0 to {rank}", nonce))
        return own

    def come(self, rank: int) -> str:
        """Prove that this is a rank of the group, and check the proof of rank 0; returns the nonce of rank 0."""
        own = secrets.token_hex(16)
        self._wait_for("nonce/0", lambda: "rank 0")
        nonce = self._read("nonce/0")
        self.store.set(f"nonce/{rank}", own)
        self.store.set(f"proof/{rank}", self.rendezvous.proof(f"rank {rank}", nonce))
        self._wait_for(
            f"proof/0/{rank}", lambda: "rank 0, which lets nobody in before all have come before them"
        )
        if not hmac.compare_digest(
            self._read(f"proof/0/{rank}"), self.rendezvous.proof(f"rank 0 to {rank}", own)
        ):
            raise WorkerError(f"who serves {self._where} does not have the secret of {self.group!r}")
        return nonce

    @property
    def _where(self) -> str:
        return f"{self.rendezvous.host}:{self.rendezvous.port}"

    def _missing(self, others: Sequence[int]) -> str:
        missing = [rank for rank in others if not self.store.check([f"proof/{rank}"])]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"

    def _read(self, key: str) -> str:
        return self.store.get(key).decode(errors="replace")

    def _wait_for(self, key: str, who: Callable[[], str]) -> None:
        while not self.store.check([key]):
            if time.monotonic() > self.deadline:
                raise WorkerError(
                    f"the ranks of {self.group!r} meet at {self._where}, and {who()} did not come within "
                    f"{self.rendezvous.timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
