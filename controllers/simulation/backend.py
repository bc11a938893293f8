"""Simulated: a backend without workers, on a virtual clock.

A cost model gives the time of each call, and the clock jumps from one event to the next. The
backend writes no rows, and invents the references to them.

    CostModel -> Simulated(costs) -> Driver(..., backend=...)   a run with a log, in virtual seconds
    calibrate(run) -> CostModel                                 from the timeline of a real run
    bound(costs, graph, placement, ...)                         a lower bound on a step's time
"""

from __future__ import annotations

import heapq
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ...dataflow.buffer.leases import Published
from ...dataflow.buffer.rows import Row
from ...dataflow.buffer.segments import Segment
from ...dataflow.column import RESPONSE_VERSIONS
from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import Handle
from ...dataflow.metrics import Max, Mean, Metrics
from ...dataflow.operation import Shape
from ...workers.dispatch import Coordinates
from ...workers.generation.longest_first import HandOver
from ...workers.training.microbatch_plan import OptimizerSteps
from ..backends.backend import Backend, Event, Setup
from ..group import Call, WorkerGroup
from ..placement import Place, ranks_of_a_replica
from ..ranks.tasks import Reply, Task
from .costs import (
    CostModel,
    Generation,
    LinearCost,
    PipelineCost,
    SequenceParallelCost,
    batch_limit,
    draw_key,
)
from .replica import Generating, Replica, Work

NODE = "simulated"
"""Node name in the invented references."""


@dataclass(frozen=True)
class _Weights:
    """Weights published by a simulated leader: a version number without tensors."""

    version: int
    num_bytes: int = 0

    @property
    def checksum(self) -> str:
        return f"version-{self.version}"

    def __add__(self, other: _Weights) -> _Weights:
        return self


class Simulated(Backend):
    """Backend whose workers only let virtual time pass, on any placement. Calls without a cost in
    `costs` take no time."""

    def __init__(self, costs: CostModel = CostModel()) -> None:
        self.costs = costs
        self._seed = 0
        """The driver's seed. It fixes response lengths for all schedules and placements."""
        self._now = 0.0
        self._turns: dict[tuple[str, int], dict[int, int]] = {}
        """(graph, source row) -> group id -> number of the group among those made of the row."""
        self._replicas: dict[tuple[str, int], Replica] = {}
        self._submitted: list[tuple[float, Call, list[tuple[int, Task]]]] = []
        """Calls that have not begun: (time, call, [(rank, task)])."""
        self._replies: list[tuple[float, int, Event]] = []
        """Heap of replies, ordered by time."""
        self._due: list[tuple[float, int, Replica]] = []
        """Heap of replicas, ordered by the time of their next event. Includes outdated entries."""
        self._order = itertools.count()
        self._offset = 0
        self._begun: dict[int, int] = {}
        """Sample id -> tokens so far of each response that a replica has handed over."""

    @property
    def own_address(self) -> None:
        return None

    def __repr__(self) -> str:
        return "Simulated()"

    def check(
        self,
        placement: Mapping[str, Place],
        handles: Mapping[str, Handle] = MappingProxyType({}),
    ) -> None:
        """Check that the costs name groups of the graphs, and fit the ranks of these groups."""
        costs = self.costs
        for name in (node.partition(".")[0] for node in costs.nodes if "." in node):
            if name not in placement:
                raise UserError(
                    f"CostModel names a group {name!r}, which no graph has{nearest(name, placement)}"
                )
        configs = {name: handle.config for name, handle in handles.items()}
        for node, cost in costs.nodes.items():
            name = node.partition(".")[0]
            ranks = costs.replica_ranks(name, configs.get(name))
            # A cost is for the rows of one replica, so it must have as many ranks as a replica.
            if isinstance(cost, PipelineCost):
                costs.pipeline(node, configs.get(name))
                fits, wanted = ranks % cost.stages == 0, f"a pipeline of {cost.stages} stages"
            elif isinstance(cost, SequenceParallelCost):
                fits, wanted = ranks == cost.ranks, f"{cost.ranks} ranks"
            else:
                continue
            if not fits:
                raise UserError(
                    f"the cost of node {node!r} is for {wanted}, but a replica of {name!r} has {ranks} ranks"
                )
        for name, place in placement.items():
            each = costs.replica_ranks(name, configs.get(name))
            if place.ranks % each:
                own = ranks_of_a_replica(configs.get(name)) == each
                where = f"the configuration of {name!r}" if own else f"the costs of {name!r}"
                raise UserError(
                    f"{where}: replicas of {each} ranks do not divide the {place.ranks} of {name!r}"
                )

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        self._seed = setup.seed
        groups: dict[str, WorkerGroup] = {}
        for name, handle in setup.handles.items():
            each = self.costs.replica_ranks(name, handle.config)
            place = setup.placement[name]
            mesh = [Coordinates(dp=rank // each, tp=rank % each) for rank in range(place.ranks)]
            groups[name] = WorkerGroup(name, handle, place, mesh, self._submit)
            costs = (c for n, c in self.costs.nodes.items() if n.startswith(f"{name}."))
            generates = [cost for cost in costs if isinstance(cost, Generation)]
            if any(cost != generates[0] for cost in generates):
                raise UserError(
                    f"CostModel.nodes: nodes of {name!r} have different Generations, and share one engine; give both the same"
                )
            cost = generates[0] if generates else None
            for replica in range(mesh[-1].dp + 1) if cost else (0,):  # otherwise all ranks work as one
                limit = batch_limit(handle.config)
                self._replicas[name, replica] = Replica(
                    cost, self._reply, self._invent, limit, begun=self._begun
                )
        return groups

    sync_interval_s = math.inf
    """Never sync the log: a power loss destroys no results of a simulation."""

    @property
    def nodes(self) -> tuple[str]:
        return (NODE,)

    def rest(self, seconds: float) -> None:
        self._now += seconds

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        for left in (self._replicas, self._submitted, self._replies, self._due):
            left.clear()

    def cancel(self, call: Call) -> None:
        self._cancel(call, None)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        self._cancel(call, frozenset(sample_ids))

    def _cancel(self, call: Call, parents: frozenset[int] | None) -> None:
        self._begin()
        for replica in dict.fromkeys(self._replica(call, rank) for rank in call.ranks):
            replica.run(self._now)
            replica.cancel_call(call.number, self._now, parents)
            self._note(replica)

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Return the next replies, and move the clock to their time. If there are none within
        `timeout_s`, move the clock by `timeout_s`."""
        self._begin()
        end = self._now + timeout_s
        while self._due:
            first_s = min(end, self._replies[0][0]) if self._replies else end
            if self._due[0][0] > max(self._now, first_s):
                break
            time, _, replica = heapq.heappop(self._due)
            # Otherwise, this entry is outdated.
            if time == replica.next_s:
                replica.run(time)
                self._note(replica)
        if not self._replies or self._replies[0][0] > max(self._now, end):
            self._now = end
            return []
        self._now = max(self._now, self._replies[0][0])
        events: list[Event] = []
        while self._replies and self._replies[0][0] <= self._now:
            events.append(heapq.heappop(self._replies)[2])
        return events

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        self._now += self.costs.dispatch_s
        if not self._submitted or self._submitted[-1][1] is not call:
            self._submitted.append((self._now, call, []))
        self._submitted[-1][2].append((rank, task))

    def _begin(self) -> None:
        submitted, self._submitted = self._submitted, []
        for at, call, tasks in submitted:
            name = call.node.name if call.node is not None else f"{call.group.name}.{call.method}"
            cost = self.costs.nodes.get(name)
            if isinstance(cost, Generation):
                self._generate(at, call, tasks)
            else:
                self._work(at, call, tasks, cost or LinearCost())

    def _generate(self, at: float, call: Call, tasks: Sequence[tuple[int, Task]]) -> None:
        assert call.lease is not None and call.ledger is not None
        for replica, own in self._by_replica(call, tasks):
            _, kept = next((one for one in own if one[1].keep), own[0])
            assert kept.rows is not None
            rows = [call.lease.row_of[id] for id in kept.rows.ids.tolist()]
            n = int(kept.arguments.get("n", 1))
            assert replica.cost is not None
            lengths = [
                replica.cost.draw_lengths(self._key(call.ledger.name, row), row.position, n)
                for row in rows
            ]
            tokens, so_far = [row.tokens for row in rows], list[int]()
            if kept.rows.begun is not None and kept.rows.first_children is not None:
                ids = kept.rows.first_children + kept.rows.begun
                so_far = [self._begun[id] for id in ids.tolist()]
            replica.run(at)
            replica.add_call(Generating(call, own, kept.rows, lengths, tokens, at, so_far), at)
            self._note(replica)

    def _work(self, at: float, call: Call, tasks: Sequence[tuple[int, Task]], cost: LinearCost) -> None:
        held, is_update = call.lease, call.node is not None and call.node.operation.updates
        ids = held.ids.tolist() if held is not None else []
        tokens_of = {} if held is None else dict(zip(ids, held.num_tokens.tolist(), strict=True))
        versions = {} if held is None or not is_update else dict(zip(ids, held.versions, strict=True))
        # If an update comes in parts, only the last part takes the cost's constant time.
        fixed = bool(tasks[0][1].arguments.get("last", True)) if call.node is not None else True
        steps, key = OptimizerSteps.of_node(call.node), (self._seed, call.group.version)
        done: dict[int, np.ndarray] = {}
        for _, task in tasks:
            # Ranks with equal rows share one object, so compute their time once.
            if task.rows is not None and id(task.rows) not in done:
                lengths = np.array([tokens_of[i] for i in task.rows.ids.tolist()], np.int64)
                units = np.arange(len(lengths))
                if task.rows.operation.whole_groups:
                    units = np.unique(task.rows.group_ids, return_inverse=True)[1]
                done[id(task.rows)] = cost.seconds_of_steps(lengths, steps.cut(units, key))
        seconds = fixed * cost.fixed_s
        if done:  # in each optimizer step, the ranks of one program wait for the slowest
            seconds += float(np.max(list(done.values()), axis=0).sum())
        for replica, own in self._by_replica(call, tasks):
            about = versions, cost, seconds
            replies = [(rank, self._result(call, rank, task, *about)) for rank, task in own]
            weights = own[0][1].arguments.get("weights") if call.method == "receive_weights" else None
            version = None if weights is None else weights.version
            policy = own[0][1].arguments.get("policy", "")
            replica.run(at)
            if call.method == "hand_over":
                replica.hand_over(HandOver(**own[0][1].arguments), at)
            replica.add_call(Work(call, seconds, replies, version, policy), at)
            self._note(replica)

    def _result(
        self,
        call: Call,
        rank: int,
        task: Task,
        versions: Mapping[int, int | None],
        cost: LinearCost,
        seconds: float,
    ) -> Reply:
        """Return the reply of a rank. In subclasses, it may depend on the rank."""
        if task.rows is None:
            return Reply(value=_value(task) if task.keep else None, done=True, seconds=seconds)
        published = self._published(call, task, cost) if task.keep and len(task.rows.ids) else None
        wrote = published is not None and task.rows.writes
        segment = self._invent(8 * len(task.rows.ids)) if wrote else None
        trained = [versions[i] for i in task.rows.ids.tolist()] if task.keep and versions else []
        return Reply(published, segment, _trained(call, trained), done=True, seconds=seconds)

    def _published(self, call: Call, task: Task, cost: LinearCost) -> Published | None:
        """Return the rows that a call publishes to the ledger, or None if it publishes none."""
        share = task.rows
        assert share is not None
        operation, ids = share.operation, share.ids
        if str(RESPONSE_VERSIONS) in share.writes:
            name = call.node.name if call.node else operation.name
            raise UserError(
                f"node {name!r} generates: its cost must be a Generation(...) in CostModel.nodes"
            )
        if operation.shape is Shape.FILTER:
            ids = ids[[self._passes(call, cost, id) for id in ids.tolist()]]
        elif operation.shape is Shape.EXPAND:
            assert share.first_children is not None
            n = int(task.arguments.get("n", 1))
            # Earlier calls may have made some of the responses.
            numbers = [np.setdiff1d(np.arange(n), made) for made in share.made or [[]] * len(ids)]
            children = np.concatenate(
                [first + own for first, own in zip(share.first_children, numbers, strict=True)]
            )
            parents = np.repeat(ids, [len(own) for own in numbers])
            return Published(children, np.zeros(len(children), np.int64), None, parents, ids)
        elif not share.writes:
            return None  # for example an update
        return Published(ids, np.zeros(len(ids), np.int64))

    def _passes(self, call: Call, cost: LinearCost, sample_id: int) -> bool:
        assert call.ledger is not None and call.node is not None and call.lease is not None
        if cost.keep == 1:
            return True
        row = call.lease.row_of[sample_id]
        # A filter of whole groups draws once per group.
        while call.node.operation.whole_groups and row.parent is not None:
            row = row.parent
        key = [*self._key(call.ledger.name, row), zlib.crc32(call.node.name.encode())]
        return bool(np.random.default_rng(key).random() < cost.keep)

    def _key(self, graph: str, row: Row) -> list[int]:
        turns = self._turns.setdefault((graph, row.position), {})
        turn = turns.setdefault(row.group.id, len(turns))
        path: list[int] = []
        while row.parent is not None:
            path.insert(0, row.number)
            row = row.parent
        return draw_key(self._seed, graph, row.position, turn, path)

    def _replica(self, call: Call, rank: int) -> Replica:
        own = self._replicas.get((call.group.name, call.group.mesh[rank].dp))
        return own or self._replicas[call.group.name, 0]

    def _by_replica(
        self, call: Call, tasks: Sequence[tuple[int, Task]]
    ) -> list[tuple[Replica, list[tuple[int, Task]]]]:
        found: dict[int, tuple[Replica, list[tuple[int, Task]]]] = {}
        for rank, task in tasks:
            replica = self._replica(call, rank)
            found.setdefault(id(replica), (replica, []))[1].append((rank, task))
        return list(found.values())

    def _note(self, replica: Replica) -> None:
        if replica.next_s < math.inf:
            heapq.heappush(self._due, (replica.next_s, next(self._order), replica))

    def _reply(self, time: float, call: Call, rank: int, reply: Reply) -> None:
        heapq.heappush(self._replies, (time, next(self._order), Event(call, rank, reply)))

    def _invent(self, num_bytes: int) -> Segment:
        self._offset += num_bytes
        return Segment(NODE, f"{NODE}.0.000001.arrows", self._offset, num_bytes, 0)


def _value(task: Task) -> Any:
    if task.method in ("publish_weights", "finish_publishing"):
        return _Weights(task.arguments["version"])
    if task.method == "receive_weights":
        return task.arguments["weights"].checksum
    return {"save_checkpoint": 0.0, "checkpoint_written": True}.get(task.method)


def _trained(call: Call, versions: Sequence[int | None]) -> Metrics:
    lags = [call.group.version - version for version in versions if version is not None and version >= 0]
    if not lags:
        return {}
    return {
        "max_staleness": Max(float(max(lags))),
        "mean_staleness": Mean(float(sum(lags)), float(len(lags))),
    }
