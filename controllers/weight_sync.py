"""WeightSync: transfers new weights from leaders to their followers.

    leader: publish_weights ──> follower: receive_weights ──> leader: finish_publishing
                                  leader: send_weights (if the transfer needs it)

- Followers read weights from the leader's memory, so the leader is not updated until all have them.
- A follower receives weights at once or, with `partial_rollouts="finish"`, when its unfinished
  responses are done. If generation does not run ahead of training, the follower also waits for
  evaluations of its current weights. A follower of several leaders receives their adapters
  independently of each other, and evaluations of one policy do not delay the others.
- Followers on the leader's devices come first, one at a time: the leader gives up the devices and
  sends from host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, Literal

from ..dataflow.errors import WeightSyncError
from ..dataflow.graph import ParameterEdge
from ..dataflow.metrics import merge
from .group import REGISTER, Call, CallRequest, WorkerGroup


class WeightSync:
    """Decides which leader publishes and which followers receive a version, and returns the calls
    as requests.

    Args:
        partial_rollouts: See `Asynchronous`.
        cancel: Function that cancels a call on all of its ranks.
        keeps: Returns whether an evaluation needs this version of an edge's weights; None if
            evaluations never do.
    """

    def __init__(
        self,
        edges: Sequence[ParameterEdge],
        groups: Mapping[str, WorkerGroup],
        partial_rollouts: Literal["continue", "recompute", "finish", "requeue"],
        cancel: Callable[[Call], None],
        keeps: Callable[[ParameterEdge, int], bool] | None = None,
    ) -> None:
        self._edges = edges
        self._groups = groups
        self._partial_rollouts = partial_rollouts
        self._cancel = cancel
        self._keeps = keeps
        self._owing: dict[str, set[str]] = {}
        """Publishing leader -> followers that have not received the weights."""
        self._taken: dict[str, list[tuple[str, str]]] = {}
        """Publishing leader -> (rank, checksum) of ranks that received the weights."""
        self._sent: dict[ParameterEdge, int] = {}
        """Last received version."""
        self._lacking: dict[ParameterEdge, set[int]] = {}
        """Ranks of the follower that are up but have no weights of the leader yet."""
        self._compared: dict[ParameterEdge, set[int]] = {}
        """Ranks of the follower whose log-probabilities were compared with the leader's."""
        self._waiting: set[ParameterEdge] = set()
        """Edges whose followers receive weights once they are ready."""

        self._metrics: dict[str, float] = {}

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    @property
    def under_way(self) -> bool:
        return bool(self._owing or self._waiting)

    def lag(self, generating: Sequence[str]) -> int:
        """[versions] Return the largest lag of these groups behind their leaders."""
        edges = [e for e in self._edges if e.follower in generating]
        return max((self._groups[e.leader].version - self.held(e) for e in edges), default=0)

    def held(self, edge: ParameterEdge) -> int:
        """Return the version of the leader's weights that a follower has."""
        return self._groups[edge.follower].version_of(edge.leader)

    def coming(self, followers: Collection[str]) -> dict[ParameterEdge, int]:
        """Return the versions that these followers have once the weights that are due have arrived."""
        wanted: dict[ParameterEdge, int] = {}
        for edge in self._edges:
            if edge.follower in followers:
                version = self._groups[edge.leader].version
                wanted[edge] = version if self._is_due(edge, version) else self.held(edge)
        return wanted

    def followers(self, leader: str) -> dict[str, int]:
        return {e.follower: self.held(e) for e in self._edges if e.leader == leader}

    def holds_back(self, group: WorkerGroup) -> bool:
        """Whether a group must start no calls, because it waits to receive weights."""
        return any(edge.follower == group.name for edge in self._waiting)

    def is_read(self, group: WorkerGroup) -> bool:
        """Whether followers are reading a group's weights, which must then not change."""
        return group.name in self._owing

    def replaces(self, follower: WorkerGroup, request: CallRequest) -> bool:
        """Whether a follower that gives up its devices for this request needs its weights no more:
        an update of its leader has begun, and every update sends it new weights."""
        edges = [edge for edge in self._edges if edge.follower == follower.name]
        if self._keeps is None or any(self._keeps(edge, self.held(edge)) for edge in edges):
            return False
        if any(edge.leader == follower.name for edge in self._edges):
            return False
        leader = request.group
        return leader.updating and [(e.leader, e.every) for e in edges] == [(leader.name, 1)]

    def publish(self, leader: str) -> list[CallRequest]:
        """Send the current weights to due followers: at once if ready, otherwise later."""
        group = self._groups[leader]
        if leader in self._owing or group.updating:  # each ends with another `publish`
            return []
        edges = {e for e in self._edges if e.leader == leader and self._is_due(e, group.version)}
        late = {edge for edge in edges if not self._is_ready(edge, group.version)}
        self._waiting = self._waiting - edges | late
        ready = [edge for edge in self._edges if edge in edges - late]
        pool = group.place.pool
        shared = [e for e in ready if pool.gpus and self._groups[e.follower].place.pool == pool]
        if shared:  # followers on the leader's devices take turns
            ready = shared[:1]
        if not ready:
            return []
        followers = [self._groups[e.follower] for e in ready]
        self._owing[leader], self._taken[leader] = {f.name for f in followers}, []
        receivers = [
            f"{edge.follower}[{rank}]"
            for edge in ready
            for rank in sorted(self._receivers(edge, group.version))
        ]
        request = CallRequest(
            group,
            "publish_weights",
            {"version": group.version, "receivers": receivers},
            then=partial(self._published, edges=ready, shared=bool(shared)),
            on_device=not shared,
        )
        # The empty call gives the follower the devices; the leader then sends from host memory.
        if shared:
            return [CallRequest(followers[0], REGISTER, then=lambda call: [request], on_device=True)]
        return [request]

    def keep_own(self, follower: WorkerGroup) -> None:
        """Send a follower only later versions than its own weights, which come from its model or a
        checkpoint."""
        for edge in self._edges:
            if edge.follower == follower.name:
                self._sent[edge] = follower.version

    def publish_all(self) -> list[CallRequest]:
        return self._publish_each(e.leader for e in self._edges)

    def receive_when_idle(self) -> list[CallRequest]:
        return self._publish_each(e.leader for e in self._edges if e in self._waiting)

    def _publish_each(self, leaders: Iterable[str]) -> list[CallRequest]:
        return [request for leader in dict.fromkeys(leaders) for request in self.publish(leader)]

    def resend(self, follower: WorkerGroup, rank: int) -> list[CallRequest]:
        """Send weights to a replaced rank of a follower, which gets no rows until it has them."""
        requests: list[CallRequest] = []
        for edge in self._edges:
            if edge.follower == follower.name:
                follower.lacking.add(rank)
                self._lacking.setdefault(edge, set()).add(rank)
                # Without a recorded version, the transfer is due again.
                self._sent.pop(edge, None)
                requests += self.publish(edge.leader)
        return requests

    def _is_due(self, edge: ParameterEdge, version: int) -> bool:
        """Whether versions since the follower's last transfer include a multiple of `every`."""
        return version // edge.every > self._sent.get(edge, -1) // edge.every

    def _is_ready(self, edge: ParameterEdge, version: int) -> bool:
        if edge.follower in self._owing:  # its own followers are reading its weights
            return False
        # The evaluated weights are gone, so a replaced rank receives the current ones.
        lacking = self._lacking_ranks(edge)
        if self._keeps and not lacking and self._keeps(edge, self.held(edge)):
            return False
        return self._partial_rollouts != "finish" or not self._unfinished(edge, version)

    def _unfinished(self, edge: ParameterEdge, version: int) -> list[Call]:
        """Return the calls that sample with the edge's weights on ranks that receive a version."""
        group, ranks = self._groups[edge.follower], self._receivers(edge, version)
        return [
            call
            for call in group.calls
            if call.interruptible
            and ranks.intersection(call.ranks)
            and (call.node is None or call.node.policy in ("", edge.leader))
        ]

    def _lacking_ranks(self, edge: ParameterEdge) -> set[int]:
        # A rank that has ended lacks nothing until its next process is up.
        return self._lacking.get(edge, set()) & self._groups[edge.follower].lacking

    def _published(
        self, call: Call, edges: Sequence[ParameterEdge], shared: bool
    ) -> Iterable[CallRequest]:
        weights = reduce(add, call.results)  # each rank publishes a part
        requests: list[CallRequest] = []
        if call.group.handle.vllm_backend:
            version = {"version": weights.version}
            requests.append(CallRequest(call.group, "send_weights", version, on_device=not shared))
        for edge in edges:
            follower = self._groups[edge.follower]
            ranks = self._receivers(edge, weights.version)
            requeues = self._partial_rollouts == "requeue"
            for other in self._unfinished(edge, weights.version) if requeues else ():
                self._requeue(other)
            arguments: dict[str, Any] = {"weights": weights, **self._of_policy(edge)}
            recomputes = self._partial_rollouts == "recompute"
            # Only running responses have a KV cache to recompute.
            if recomputes and any(other.interruptible for other in follower.calls):
                arguments["recompute"] = True
            then = partial(self._received, edge=edge, weights=weights)
            requests.append(
                CallRequest(follower, "receive_weights", arguments, sorted(ranks), then, on_device=True)
            )
        return requests

    def _requeue(self, call: Call) -> None:
        assert call.ledger is not None and call.lease is not None
        if call.ledger.leases.holds(call.lease):
            # Release before cancelling, so that rows of late replies no longer count.
            call.ledger.release(call.lease, "new weights arrived, so unfinished responses are requeued")
            self._cancel(call)

    def _of_policy(self, edge: ParameterEdge) -> dict[str, str]:
        """Return the argument that names the policy to a follower of several leaders."""
        several = sum(other.follower == edge.follower for other in self._edges) > 1
        return {"policy": edge.leader} if several else {}

    def _receivers(self, edge: ParameterEdge, version: int) -> set[int]:
        """Return the ranks that receive a version: all that are up, or only those without weights
        if the others have this version."""
        lacking = self._lacking_ranks(edge)
        if lacking and self.held(edge) == version:
            return lacking
        return set(self._groups[edge.follower].up)

    def _received(self, call: Call, edge: ParameterEdge, weights: Any) -> Iterable[CallRequest]:
        """Compare log-probabilities of new ranks with the leader's before they get rows."""
        group = call.group
        compared = self._compared.setdefault(edge, set())
        compared -= self._lacking_ranks(edge)  # a replaced rank must be compared again
        fresh = sorted(set(call.ranks) - call.lost - compared)
        publisher, receiver = self._groups[edge.leader].handle.worker_class, group.handle.worker_class
        if not (fresh and hasattr(publisher, "compare_canaries") and hasattr(receiver, "canary")):
            return self._arrived(call, edge, weights)
        then = partial(self._sampled, received=call, edge=edge, weights=weights)
        return [CallRequest(group, "canary", self._of_policy(edge), fresh, then, on_device=True)]

    def _sampled(
        self, call: Call, received: Call, edge: ParameterEdge, weights: Any
    ) -> Iterable[CallRequest]:
        # A rank that died during the comparison does not count as a receiver.
        received.lost |= call.lost
        values = sorted(call.values.items())
        found = {rank: canary for rank, canary in values if rank not in call.lost and canary}
        self._compared[edge] |= found.keys()
        canaries = {f"{call.group.name}[{rank}]": canary for rank, canary in found.items()}
        if not canaries:
            return self._arrived(received, edge, weights)
        arguments = {"canaries": canaries, "version": weights.version}
        group, method = self._groups[edge.leader], "compare_canaries"

        def then(_: Call) -> Iterable[CallRequest]:
            return self._arrived(received, edge, weights)

        return [CallRequest(group, method, arguments, then=then, on_device=True)]

    def _arrived(self, call: Call, edge: ParameterEdge, weights: Any) -> Iterable[CallRequest]:
        group, leader = call.group, edge.leader
        took = {
            rank: checksum for rank, checksum in sorted(call.values.items()) if rank not in call.lost
        }
        self._taken[leader] += [(f"{group.name}[{rank}]", checksum) for rank, checksum in took.items()]
        # From here on the group may get rows that need this version.
        self._sent[edge] = weights.version
        group.set_version(leader, weights.version)
        if lacking := self._lacking_ranks(edge) - (set(call.ranks) - call.lost):
            del self._sent[edge]  # for ranks that came up during the transfer
        self._lacking[edge] = lacking
        own = [other for other in self._edges if other.follower == group.name]
        group.lacking &= set().union(*(self._lacking_ranks(other) for other in own))
        self._note_times(call)
        self._owing[leader].discard(group.name)
        requests = self.publish(group.name)  # for the follower's own followers
        if not self._owing[leader]:
            then, version = partial(self._finished, leader=leader), {"version": weights.version}
            requests.append(CallRequest(self._groups[leader], "finish_publishing", version, then=then))
        return requests

    def _note_times(self, call: Call) -> None:
        transfer_s = max(call.seconds.values(), default=0.0)
        pause = merge(call.metrics).get("weights_pause_s")
        pause_s = transfer_s if pause is None else pause.value
        for name, seconds in (("weights_transfer_s", transfer_s), ("weights_pause_s", pause_s)):
            key = f"{call.group.name}/{name}"
            self._metrics[key] = max(self._metrics.get(key, 0.0), seconds)

    def _finished(self, call: Call, leader: str) -> Iterable[CallRequest]:
        """Compare checksums of received and published weights, then publish newer weights."""
        given = reduce(add, call.results)
        if given.num_bytes:
            self._metrics[f"{leader}/weights_bytes"] = float(given.num_bytes)
        for receiver, checksum in self._taken.pop(leader):
            if checksum != given.checksum:
                raise WeightSyncError(
                    f"weights of version {given.version} arrived at {receiver} with checksum {checksum}, "
                    f"but {given.checksum} was published"
                )
        del self._owing[leader]
        # Meanwhile the leader may have new weights, and ranks or followers may have become ready.
        # The leader may also be a follower.
        return self._publish_each([leader, *(e.leader for e in self._edges if e.follower == leader)])
