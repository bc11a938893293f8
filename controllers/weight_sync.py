"""WeightSync: the parameter edges of a run. A leader publishes its weights, and each follower that is due receives them.

    publish ──> publish_weights on the leader ──> receive_weights on each follower ──> the leader may publish again

A leader publishes one version at a time: what it published stays in memory until every follower has received it. A follower
receives at once, or, with `partial_rollouts="finish"`, when its unfinished responses are finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, Literal

from ..dataflow.errors import WeightSyncError
from ..dataflow.node import ParameterEdge
from .group import Call, WorkerGroup
from .request import CallRequest


class WeightSync:
    """Decides who publishes and who receives which version; the calls that this takes are returned as requests.

    Args:
        edges: who follows whom.
        groups: the worker groups of the run, by name.
        partial_rollouts: what becomes of responses that are unfinished when weights come (see `Asynchronous`).
        cancel: ends a call that gives way, on all of its ranks.
    """

    def __init__(
        self,
        edges: Sequence[ParameterEdge],
        groups: Mapping[str, WorkerGroup],
        partial_rollouts: Literal["continue", "finish", "requeue"],
        cancel: Callable[[Call], None],
    ) -> None:
        self._edges = edges
        self._groups = groups
        self._partial_rollouts = partial_rollouts
        self._cancel = cancel
        self._owing: dict[str, set[str]] = {}
        """Leader -> followers that have not received what it publishes now."""
        self._sent: dict[str, int] = {}
        """Follower -> the version that it received last."""
        self._waiting: dict[str, Any] = {}
        """Follower -> weights that it receives when its responses are finished."""

    @property
    def under_way(self) -> bool:
        """Whether a follower has still to receive weights."""
        return bool(self._owing)

    def lag(self, generating: Sequence[str]) -> int:
        """The most versions that one of these groups is behind the group that it follows."""
        behind = (
            self._groups[e.leader].version - self._groups[e.follower].version
            for e in self._edges
            if e.follower in generating
        )
        return max(behind, default=0)

    def coming(self, followers: Collection[str]) -> dict[str, int]:
        """Each of these groups that follows another -> the version that it will hold once the leader's present weights have arrived."""
        wanted: dict[str, int] = {}
        for edge in self._edges:
            if edge.follower in followers:
                version = self._groups[edge.leader].version
                due = self._is_due(edge, version)
                wanted[edge.follower] = version if due else self._groups[edge.follower].version
        return wanted

    def followers(self, leader: str) -> dict[str, int]:
        """Follower -> the version that it holds."""
        return {e.follower: self._groups[e.follower].version for e in self._edges if e.leader == leader}

    def holds_back(self, group: WorkerGroup) -> bool:
        """Whether a group may begin nothing new because weights wait for it to finish."""
        return group.name in self._waiting

    def publish(self, leader: str) -> list[CallRequest]:
        """Send the present weights of a group to its followers that are due, now or when those of an earlier version have arrived."""
        group = self._groups[leader]
        edges = [e for e in self._edges if e.leader == leader and self._is_due(e, group.version)]
        if not edges or leader in self._owing or group.updating:  # each of these ends with another `publish`
            return []
        self._owing[leader] = {e.follower for e in edges}
        then = partial(self._published, edges=edges)
        return [CallRequest(group, "publish_weights", {"version": group.version}, then=then, on_device=True)]

    def publish_all(self) -> list[CallRequest]:
        """Send the present weights of every leader."""
        return [request for leader in dict.fromkeys(e.leader for e in self._edges) for request in self.publish(leader)]

    def resend(self, follower: WorkerGroup, rank: int) -> list[CallRequest]:
        """A rank was replaced. If its group follows another, it gets no rows before it has received the present weights."""
        requests: list[CallRequest] = []
        for edge in self._edges:
            if edge.follower == follower.name:
                follower.lacking.add(rank)
                self._sent.pop(follower.name, None)
                requests += self.publish(edge.leader)
        return requests

    def _is_due(self, edge: ParameterEdge, version: int) -> bool:
        """Whether an `every`-th version has come since the follower last received one."""
        return version // edge.every > self._sent.get(edge.follower, -1) // edge.every

    def receive_when_idle(self) -> list[CallRequest]:
        """Have followers receive the weights that waited for them to finish their responses."""
        idle = [name for name in self._waiting if not self._groups[name].at_work]
        return [self._receive(self._groups[name], self._waiting.pop(name)) for name in idle]

    def _published(self, call: Call, edges: Sequence[ParameterEdge]) -> Iterable[CallRequest]:
        weights = reduce(add, call.results)  # what the ranks published adds up
        requests: list[CallRequest] = []
        for edge in edges:
            follower = self._groups[edge.follower]
            ranks = self._receivers(follower, weights)
            unfinished = [c for c in follower.calls if c.interruptible and ranks.intersection(c.ranks)]
            if unfinished and self._partial_rollouts == "finish":
                self._waiting[follower.name] = weights
                continue
            if self._partial_rollouts == "requeue":
                for other in unfinished:
                    self._requeue(other)
            requests.append(self._receive(follower, weights))
        return requests

    def _requeue(self, call: Call) -> None:
        """End a call that generates; the rows that it has not finished go back."""
        assert call.ledger is not None and call.lease is not None
        if call.ledger.leases.holds(call.lease):
            call.ledger.release(call.lease, "new weights came, and what was unfinished is requeued")
            self._cancel(call)

    def _receivers(self, follower: WorkerGroup, weights: Any) -> set[int]:
        """Ranks that are to receive weights: all that are up, or only those that lack them, if the others have this version."""
        if follower.lacking and follower.version == weights.version:
            return set(follower.lacking)
        return set(follower.up)

    def _receive(self, follower: WorkerGroup, weights: Any) -> CallRequest:
        ranks = sorted(self._receivers(follower, weights))
        then = partial(self._received, weights=weights)
        return CallRequest(follower, "receive_weights", {"weights": weights}, ranks, then, on_device=True)

    def _received(self, call: Call, weights: Any) -> Iterable[CallRequest]:
        for rank, checksum in sorted(call.values.items()):
            if rank not in call.lost and checksum != weights.checksum:
                raise WeightSyncError(
                    f"weights of version {weights.version} arrived at {call.group.name}[{rank}] with checksum {checksum}, "
                    f"but {weights.checksum} was published"
                )
        group, requests = call.group, list[CallRequest]()
        group.version = self._sent[group.name] = weights.version
        group.lacking -= set(call.ranks) - call.lost
        if group.lacking:  # ranks that came up meanwhile
            del self._sent[group.name]
        for leader, owing in list(self._owing.items()):
            if group.name in owing:
                owing.discard(group.name)
                if not owing:
                    del self._owing[leader]
                    requests += self.publish(leader)  # if it was updated meanwhile, or a follower's rank was replaced
        return [*requests, *self.publish(group.name)]  # for groups that follow the follower
