"""WeightSync: the parameter edges of a run. A leader publishes its weights; each follower whose turn it is takes them over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from ..dataflow.errors import WeightSyncError
from ..dataflow.graph import ParameterEdge
from .group import Call, WorkerGroup


class Hands(Protocol):
    """What the driver does for it."""

    def take_device(self, group: WorkerGroup) -> None: ...
    def watch(self, call: Call, then: Callable[[Call], None]) -> None: ...
    def give_up(self, call: Call) -> None:
        """End a call that gives way; its rows go back."""
        ...


class WeightSync:
    """One passing at a time from each leader: what it published stays in memory until everybody has it."""

    def __init__(
        self,
        edges: Sequence[ParameterEdge],
        groups: Mapping[str, WorkerGroup],
        hands: Hands,
        partial_rollouts: Literal["continue", "finish", "requeue"],
    ) -> None:
        self._edges = edges
        self._groups = groups
        self._hands = hands
        self._partial_rollouts = partial_rollouts
        self._owing: dict[str, set[str]] = {}
        """Leader -> followers that have not taken over what it passes on now."""
        self._passed: dict[str, int] = {}
        """Follower -> the version that it was last given."""
        self._waiting: dict[str, Any] = {}
        """Follower -> weights that it takes over when its responses are finished."""

    @property
    def under_way(self) -> bool:
        return bool(self._owing)

    def lag(self, generating: Sequence[str]) -> int:
        """Versions that the weights of these groups are behind those of whom they follow, the most of them."""
        behind = (
            self._groups[e.leader].version - self._groups[e.follower].version
            for e in self._edges
            if e.follower in generating
        )
        return max(behind, default=0)

    def coming(self, followers: Collection[str]) -> dict[str, int]:
        """Of these groups, those that follow another -> the version that they hold when its present weights have arrived."""
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
        """Whether a group may begin nothing new: weights wait for it to finish."""
        return group.name in self._waiting

    def pass_on(self, leader: str) -> None:
        """Give the followers of a group its present weights, now, or when those of an earlier version have arrived."""
        group = self._groups[leader]
        edges = [e for e in self._edges if e.leader == leader and self._is_due(e, group.version)]
        # An update that is under way makes other weights of these before they could be published; then it is asked again.
        updating = any(c.node is not None and c.node.operation.updates and c.last for c in group.calls)
        if not edges or leader in self._owing or updating:
            return
        self._owing[leader] = {e.follower for e in edges}
        self._hands.take_device(group)
        call = group.call("publish_weights", version=group.version)
        self._hands.watch(call, lambda call: self._published(call, edges))

    def give(self, follower: WorkerGroup, rank: int) -> None:
        """A rank is up in the place of another: it gets no rows before it has the present weights, if it follows anybody."""
        for edge in self._edges:
            if edge.follower == follower.name:
                follower.lacking.add(rank)
                self._passed.pop(follower.name, None)
                self.pass_on(edge.leader)

    def _is_due(self, edge: ParameterEdge, version: int) -> bool:
        """Whether an `every`-th version has come since the follower was last given one."""
        return version // edge.every > self._passed.get(edge.follower, -1) // edge.every

    def settle(self) -> None:
        """Let those take over their weights who have finished what they were at."""
        for name in list(self._waiting):
            if not self._groups[name].at_work:
                self._receive(self._groups[name], self._waiting.pop(name))

    def _published(self, call: Call, edges: Sequence[ParameterEdge]) -> None:
        weights = next(w for w in call.results if w is not None)
        for edge in edges:
            follower = self._groups[edge.follower]
            ranks = self._receivers(follower, weights)
            unfinished = [c for c in follower.calls if c.interruptible and ranks.intersection(c.ranks)]
            if unfinished and self._partial_rollouts == "finish":
                self._waiting[follower.name] = weights
                continue
            if self._partial_rollouts == "requeue":
                for other in unfinished:
                    self._hands.give_up(other)
            self._receive(follower, weights)

    def _receivers(self, follower: WorkerGroup, weights: Any) -> set[int]:
        """Ranks that are to take over weights: all that are up, or, of weights that the others have, those that lack them."""
        if follower.lacking and follower.version == weights.version:
            return set(follower.lacking)
        return {rank for rank in range(len(follower.mesh)) if rank not in follower.starting}

    def _receive(self, follower: WorkerGroup, weights: Any) -> None:
        self._hands.take_device(follower)
        ranks = sorted(self._receivers(follower, weights))
        call = follower.call("receive_weights", ranks=ranks, weights=weights)
        self._hands.watch(call, lambda call: self._received(call, weights))

    def _received(self, call: Call, weights: Any) -> None:
        for rank, checksum in sorted(call.values.items()):
            if rank not in call.lost and checksum != weights.checksum:
                raise WeightSyncError(
                    f"weights of version {weights.version} arrived at {call.group.name}[{rank}] with checksum {checksum}, "
                    f"but {weights.checksum} was published"
                )
        call.group.version = self._passed[call.group.name] = weights.version
        call.group.lacking -= set(call.ranks) - call.lost
        if call.group.lacking:  # they came up meanwhile
            del self._passed[call.group.name]
        for leader, owing in list(self._owing.items()):
            if call.group.name in owing:
                owing.discard(call.group.name)
                if not owing:
                    del self._owing[leader]
                    self.pass_on(leader)  # if it was updated meanwhile, or one who had them was replaced
        self.pass_on(call.group.name)  # whoever follows the follower
