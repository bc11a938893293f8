"""BucketGroup: whole buckets between the trainer's ranks and their receivers, by collectives.

    transport   buckets          how receivers get the bytes
    auto        on the host      by mapping them (same machine) or over their connections; no group
    gloo        on the host      as members of the group
    nccl        on the device    as members of the group, from device to device
    ipc         on the device    by mapping the bucket of the trainer's rank on their own device

vLLM's own backends, "vllm:nccl" and "vllm:ipc", send whole tensors (`vllm_publisher.py`).

Each of the trainer's ranks has one chunk of every bucket. The group completes the bucket on all of
its members: each chunk is broadcast by its rank.

    rank 0                             each receiver                           other ranks
    waits for the receivers            tells the sizes of the buckets   ──>
    invites those that came     ──>    joins, passes the invitation on  ──>    join once all of these have come

The members make the group when it is first needed, and keep it while the receivers stay the same
processes. After an incomplete pass they make a new one. They meet at a store that rank 0 serves.
The store, gloo and NCCL have neither authentication nor encryption, so a run needs a private
network.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch.distributed import (
    BroadcastOptions,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from .connection import listen
from .weights import LOOPBACK

Transport = Literal["auto", "gloo", "nccl", "ipc"]

_LOOK_S = 0.0002
"""[s] Polling interval for NCCL, whose own `wait` blocks only the device, and has no timeout."""


@dataclass(frozen=True, order=True)
class Member:
    """A receiving process."""

    receiver: str
    part: int
    process: str
    """Identifier of the process: a replacement has the same name and another identifier."""


@dataclass(frozen=True)
class Invitation:
    """What rank 0 of the trainer decides about a pass. Receivers carry it to the other ranks."""

    turn: int
    group: str
    """Random name of the group, and prefix of its keys in the store."""
    host: str
    port: int
    receivers: tuple[Member, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Invitation:
        receivers = tuple(Member(**each) for each in said["receivers"])
        return cls(said["turn"], said["group"], said["host"], said["port"], receivers)


class BucketGroup:
    """One side of a group: `senders` ranks of the trainer come first, then receivers, if they are
    members. Raises OSError if a member is gone or does not answer for `silence_s`.

    Args:
        address: this process's own address, where gloo listens.
        device: where the buckets are ("cpu" for gloo, CUDA for NCCL).
    """

    def __init__(
        self,
        invitation: Invitation,
        rank: int,
        size: int,
        *,
        senders: int,
        address: str,
        device: torch.device,
        silence_s: float,
        store: TCPStore | None = None,
    ) -> None:
        self.name = invitation.group
        self._senders = senders
        self._device = device
        self._silence_s = silence_s
        timeout = timedelta(seconds=silence_s)
        with _as_os_errors():
            at = store or TCPStore(
                invitation.host, invitation.port, None, False, timeout=timeout, wait_for_workers=False
            )
            keys = PrefixStore(self.name, at)
            if device.type == "cpu":
                self._group: Any = _gloo(keys, rank, size, address, timeout)
            else:
                # NCCL's first collective has no time limit.
                names = [f"trainer rank {each}" for each in range(senders)]
                names += [f"{each.receiver}, part {each.part}" for each in invitation.receivers]
                meet(keys, rank, names[:size], silence_s)
                self._group = _nccl(keys, rank, size, device)

    def complete(self, chunks: Sequence[torch.Tensor]) -> None:
        """Complete a bucket, given the memory of each sender's chunk ([bytes] uint8). All members
        call this for each bucket, in order."""
        with _as_os_errors():
            works: list[Any] = []
            for sender, chunk in enumerate(chunks):
                options = BroadcastOptions()
                options.rootRank, options.rootTensor = sender, 0
                works.append(self._group.broadcast([chunk], options))
            for work in works:
                self._await(work)

    def abort(self) -> None:
        """End the group, from any thread. A member that waits for others gets an error."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _await(self, work: Any) -> None:
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=self._silence_s))
            return
        deadline = time.monotonic() + self._silence_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"NCCL moved nothing for {self._silence_s:.0f} s")
            time.sleep(_LOOK_S)
        work.wait()  # order the device's current stream after it; raise its errors


class TrainerSide:
    """A trainer rank's membership, which lasts from version to version.

    Args:
        with_receivers: whether the receivers are members; otherwise, they map the buckets.
    """

    def __init__(
        self, rank: int, ranks: int, host: str, device: torch.device, *, with_receivers: bool
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._host = host or LOOPBACK
        self._device = device
        self._with_receivers = with_receivers
        self._group: BucketGroup | None = None
        self._last: Invitation | None = None
        self._store: TCPStore | None = None
        self._turns = 0

    def invite(self, receivers: Sequence[Member], known: Sequence[set[str]]) -> Invitation:
        """Begin a pass on rank 0. `known` are the groups that each of the receivers has."""
        self._turns += 1
        # In any order of arrival, the same receivers get the same ranks.
        last, came = self._last, tuple(sorted(receivers))
        if self._group is not None and last is not None:
            same = came == last.receivers and all(last.group in names for names in known)
            if same or not self._with_receivers:
                return Invitation(self._turns, last.group, last.host, last.port, came)
        if self._store is None:
            self._store = _serve_store(self._host)
        return Invitation(self._turns, secrets.token_hex(16), self._host, self._store.port, came)

    def join(self, invitation: Invitation, silence_s: float) -> None:
        """Join the group of a pass, unless this rank has it."""
        size = self.ranks + (len(invitation.receivers) if self._with_receivers else 0)
        if self._group is None or self._group.name != invitation.group:
            self.leave()
            if size > 1:
                self._group = BucketGroup(
                    invitation,
                    self.rank,
                    size,
                    senders=self.ranks,
                    address=self._host,
                    device=self._device,
                    silence_s=silence_s,
                    store=self._store,
                )
        self._last = invitation

    def complete(self, chunks: Sequence[torch.Tensor]) -> None:
        if self._group is not None:
            self._group.complete(chunks)

    def leave(self) -> None:
        """End the group, from any thread: the members have taken part in different buckets."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


_PROCESS = ""
_groups: dict[tuple[str, int, Member], BucketGroup] = {}
"""The groups of this receiving process, by the address of the trainer's rank 0 and the member."""


def this_process() -> str:
    """Return a random identifier of this process."""
    global _PROCESS
    if not _PROCESS.endswith(f" {os.getpid()}"):  # a forked process is another one
        _PROCESS = f"{secrets.token_hex(8)} {os.getpid()}"
    return _PROCESS


def known_groups() -> list[str]:
    return [group.name for group in _groups.values()]


def receivers_group(
    invitation: Invitation,
    member: Member,
    senders: int,
    address: str,
    device: torch.device,
    silence_s: float,
) -> BucketGroup:
    """Return a receiver's side of the group of an invitation. It joins a new group once."""
    key = (invitation.host, invitation.port, member)
    group = _groups.get(key)
    if group is not None and group.name != invitation.group:
        leave_group(group)
    if key not in _groups:
        _groups[key] = BucketGroup(
            invitation,
            senders + invitation.receivers.index(member),
            senders + len(invitation.receivers),
            senders=senders,
            address=address,
            device=device,
            silence_s=silence_s,
        )
    return _groups[key]


def leave_group(group: BucketGroup) -> None:
    """End a receiver's side of a group, from any thread."""
    for key, own in list(_groups.items()):
        if own is group:
            del _groups[key]
    group.abort()


def _serve_store(host: str) -> TCPStore:
    taken = listen(host)
    port = taken.getsockname()[1]
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=taken.detach())


def meet(store: Any, rank: int, names: Sequence[str], timeout_s: float) -> None:
    """Wait until each member has called this. Raises a TimeoutError that names the missing ones."""
    store.set(f"came/{rank}", "")
    keys = [f"came/{each}" for each in range(len(names))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [name for key, name in zip(keys, names, strict=True) if not store.check([key])]
        raise TimeoutError(
            f"no group after {timeout_s:g} s: {'; '.join(missing) or 'the store'} did not come"
        ) from None


def _gloo(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    options: Any = cast(Any, ProcessGroupGloo)._Options()
    # Listen only at the address that the connections already use.
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in torch builds without CUDA

    with torch.cuda.device(device):
        options = ProcessGroupNCCL.Options()
        # Weft's own deadlines apply. torch's watchdog would end the process after 10 minutes.
        options._timeout = timedelta(days=7)
        return ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch raises one class for timeouts and lost connections; only the text tells them apart.
        said = str(error)
        if "imed out" in said or "timeout" in said.lower():
            raise TimeoutError(said.partition("\n")[0]) from None
        raise ConnectionResetError(
            f"the group: {said.partition('] ')[2].partition('. ')[0] or said}"
        ) from None
