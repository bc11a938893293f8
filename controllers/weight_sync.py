"""WeightSync: the parameter edges of a run. A leader gives its weights away, and each follower that is due takes them.

    publish ──> publish_weights on the leader ──> receive_weights on each follower ──> finish_publishing on the leader
                                                  send_weights on the leader, where it has to work meanwhile

Followers take a version straight from the leader's memory, so the leader is not updated before they have it. A follower
takes part at once, or, with `partial_rollouts="finish"`, when its unfinished responses are finished; where generation does not run ahead,
when the evaluations of the weights that it has are over. A follower on the leader's own
devices has them first: the leader gives from host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, Literal

from ..dataflow.errors import WeightSyncError
from ..dataflow.graph import ParameterEdge
from .group import REGISTER, Call, WorkerGroup
from .request import CallRequest


class WeightSync:
    """Decides who publishes and who receives which version; the calls that this takes are returned as requests.

    Args:
        edges: who follows whom.
        groups: the worker groups of the run, by name.
        partial_rollouts: what becomes of responses that are unfinished when weights come (see `Asynchronous`).
        cancel: ends a call that gives way, on all of its ranks.
        keeps: whether a group has to keep the version that it has, because it is evaluated; None: none has to.
    """

    def __init__(
        self,
        edges: Sequence[ParameterEdge],
        groups: Mapping[str, WorkerGroup],
        partial_rollouts: Literal["continue", "recompute", "finish", "requeue"],
        cancel: Callable[[Call], None],
        keeps: Callable[[str, int], bool] | None = None,
    ) -> None:
        self._edges = edges
        self._groups = groups
        self._partial_rollouts = partial_rollouts
        self._cancel = cancel
        self._keeps = keeps
        self._owing: dict[str, set[str]] = {}
        """Leader that gives its weights away -> followers that have not taken them."""
        self._taken: dict[str, list[tuple[str, str]]] = {}
        """Leader that gives its weights away -> the ranks that have taken them, each with the checksum of what it took."""
        self._sent: dict[str, int] = {}
        """Follower -> the version that it received last."""
        self._compared: dict[str, set[int]] = {}
        """Follower -> ranks whose log-probabilities were compared with the leader's."""
        self._waiting: set[str] = set()
        """Followers that take weights when their responses are finished."""

        self._metrics: dict[str, float] = {}
        """Of transfers since they were asked for last."""

    def take_metrics(self) -> dict[str, float]:
        """What transfers were since this was asked last: the longest one's `FOLLOWER/weights_transfer_s`, and `FOLLOWER/weights_pause_s`,
        the part of it in which the group could do nothing else; and `LEADER/weights_bytes`, the size of a version."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @property
    def under_way(self) -> bool:
        """Whether a follower has still to receive weights."""
        return bool(self._owing or self._waiting)

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

    def reads(self, group: WorkerGroup) -> bool:
        """Whether a group's weights must stay what they are, because followers take them."""
        return group.name in self._owing

    def publish(self, leader: str) -> list[CallRequest]:
        """Send the present weights of a group to its followers that are due and ready; to the others when they are."""
        group = self._groups[leader]
        if leader in self._owing or group.updating:  # each of these ends with another `publish`
            return []
        edges = [e for e in self._edges if e.leader == leader and self._is_due(e, group.version)]
        late = {e.follower for e in edges if not self._is_ready(self._groups[e.follower], group.version)}
        self._waiting = self._waiting - {e.follower for e in edges} | late
        ready = [e for e in edges if e.follower not in late]
        shared = [
            e
            for e in ready
            if group.place.pool.gpus and self._groups[e.follower].place.pool == group.place.pool
        ]
        if shared:  # one follower after the other has the devices
            ready = shared[:1]
        if not ready:
            return []
        followers = [self._groups[e.follower] for e in ready]
        self._owing[leader], self._taken[leader] = {f.name for f in followers}, []
        receivers = [
            f"{f.name}[{rank}]" for f in followers for rank in sorted(self._receivers(f, group.version))
        ]
        request = CallRequest(
            group,
            "publish_weights",
            {"version": group.version, "receivers": receivers},
            then=partial(self._published, edges=ready, shared=bool(shared)),
            on_device=not shared,
        )
        if shared:
            return [CallRequest(followers[0], REGISTER, then=lambda call: [request], on_device=True)]
        return [request]

    def publish_all(self) -> list[CallRequest]:
        """Send the present weights of every leader."""
        return [
            request
            for leader in dict.fromkeys(e.leader for e in self._edges)
            for request in self.publish(leader)
        ]

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
        """Send weights to followers that have finished their responses meanwhile."""
        leaders = dict.fromkeys(e.leader for e in self._edges if e.follower in self._waiting)
        return [request for leader in leaders for request in self.publish(leader)]

    def _is_ready(self, follower: WorkerGroup, version: int) -> bool:
        """Whether a follower can take weights now."""
        if follower.name in self._owing:  # its own followers take what it has
            return False
        if (
            self._keeps is not None
            and not follower.lacking
            and self._keeps(follower.name, follower.version)
        ):
            return False
        ranks = self._receivers(follower, version)
        finishes = self._partial_rollouts == "finish"
        return not (
            finishes and any(c.interruptible and ranks.intersection(c.ranks) for c in follower.calls)
        )

    def _published(
        self, call: Call, edges: Sequence[ParameterEdge], shared: bool
    ) -> Iterable[CallRequest]:
        weights = reduce(add, call.results)  # what the ranks publish adds up
        requests: list[CallRequest] = []
        if call.group.handle.vllm_backend:
            requests.append(
                CallRequest(
                    call.group, "send_weights", {"version": weights.version}, on_device=not shared
                )
            )
        for edge in edges:
            follower = self._groups[edge.follower]
            ranks = self._receivers(follower, weights.version)
            for other in list(follower.calls) if self._partial_rollouts == "requeue" else ():
                if other.interruptible and ranks.intersection(other.ranks):
                    self._requeue(other)
            arguments: dict[str, Any] = {"weights": weights}
            if self._partial_rollouts == "recompute" and any(
                other.interruptible for other in follower.calls
            ):
                arguments["recompute"] = True
            then = partial(self._received, leader=edge.leader, weights=weights)
            requests.append(
                CallRequest(follower, "receive_weights", arguments, sorted(ranks), then, on_device=True)
            )
        return requests

    def _requeue(self, call: Call) -> None:
        """End a call that generates; the rows that it has not finished go back."""
        assert call.ledger is not None and call.lease is not None
        if call.ledger.leases.holds(call.lease):
            call.ledger.release(call.lease, "new weights came, and what was unfinished is requeued")
            self._cancel(call)

    def _receivers(self, follower: WorkerGroup, version: int) -> set[int]:
        """Ranks that are to receive a version: all that are up, or only those that lack it, if the others have it."""
        if follower.lacking and follower.version == version:
            return set(follower.lacking)
        return set(follower.up)

    def _received(self, call: Call, leader: str, weights: Any) -> Iterable[CallRequest]:
        """Ranks that took weights for the first time answer a few prompts before those of the run, and the leader compares."""
        group = call.group
        compared = self._compared.setdefault(group.name, set())
        compared -= group.lacking  # a rank that was replaced is another one
        fresh = sorted(set(call.ranks) - call.lost - compared)
        if not fresh or not _compares(self._groups[leader], group):
            return self._arrived(call, leader, weights)
        then = partial(self._sampled, received=call, leader=leader, weights=weights)
        return [CallRequest(group, "canary", {}, fresh, then, on_device=True)]

    def _sampled(self, call: Call, received: Call, leader: str, weights: Any) -> Iterable[CallRequest]:
        received.lost |= call.lost
        found = {
            rank: canary
            for rank, canary in sorted(call.values.items())
            if rank not in call.lost and canary
        }
        self._compared[call.group.name] |= found.keys()
        canaries = {f"{call.group.name}[{rank}]": canary for rank, canary in found.items()}
        if not canaries:
            return self._arrived(received, leader, weights)
        arguments = {"canaries": canaries, "version": weights.version}
        return [
            CallRequest(
                self._groups[leader],
                "compare_canaries",
                arguments,
                then=lambda _: self._arrived(received, leader, weights),
                on_device=True,
            )
        ]

    def _arrived(self, call: Call, leader: str, weights: Any) -> Iterable[CallRequest]:
        group = call.group
        took = {rank: checksum for rank, checksum in sorted(call.values.items()) if rank not in call.lost}
        self._taken[leader] += [(f"{group.name}[{rank}]", checksum) for rank, checksum in took.items()]
        group.version = self._sent[group.name] = weights.version
        group.lacking -= set(call.ranks) - call.lost
        if group.lacking:  # ranks that came up meanwhile
            del self._sent[group.name]
        self._note_times(call)
        self._owing[leader].discard(group.name)
        requests = self.publish(group.name)  # for groups that follow the follower
        if not self._owing[leader]:
            then = partial(self._finished, leader=leader)
            requests.append(
                CallRequest(
                    self._groups[leader], "finish_publishing", {"version": weights.version}, then=then
                )
            )
        return requests

    def _note_times(self, call: Call) -> None:
        transfer_s = max(call.seconds.values(), default=0.0)
        pause = call.merged_metrics().get("weights_pause_s")
        pause_s = transfer_s if pause is None else pause.value
        for name, seconds in (("weights_transfer_s", transfer_s), ("weights_pause_s", pause_s)):
            key = f"{call.group.name}/{name}"
            self._metrics[key] = max(self._metrics.get(key, 0.0), seconds)

    def _finished(self, call: Call, leader: str) -> Iterable[CallRequest]:
        """Everybody has taken a version: compare what each took with what was given."""
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
        # If it was updated meanwhile, a follower's rank was replaced, or others waited; and if it follows others itself.
        leaders = dict.fromkeys([leader, *(e.leader for e in self._edges if e.follower == leader)])
        return [request for each in leaders for request in self.publish(each)]


def _compares(leader: WorkerGroup, follower: WorkerGroup) -> bool:
    """Whether these groups can compare log-probabilities. On one pool of GPUs the leader has its turn after the follower."""
    classes = (leader.handle.worker_class, "compare_canaries"), (follower.handle.worker_class, "canary")
    return all(hasattr(worker_class, method) for worker_class, method in classes)
