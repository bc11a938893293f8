"""WorkerGroup: the ranks of one worker class, called as one object.

A Call is a running call. A CallRequest describes a call that the loop makes in a later turn.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..dataflow.buffer.leases import ColumnPiece, Lease, column_pieces
from ..dataflow.buffer.ledger import Ledger
from ..dataflow.buffer.segments import Segment
from ..dataflow.column import DRAW_PATH, PROMPT_IDS
from ..dataflow.errors import UserError, WorkerDied, WorkerError, nearest
from ..dataflow.graph import SOURCE, Handle, Node
from ..dataflow.metrics import Metrics
from ..dataflow.operation import Shape
from ..workers.dispatch import Coordinates, Dispatch, RowCost, RowSizes
from ..workers.worker import Worker, dispatch_of
from .placement import Place
from .ranks.tasks import Failure, FailureKind, Reply, RowTask, Task

# Batching delay: with many ranks at work, rows wait briefly, so that a reply or call carries
# several.


MANY_RANKS = 64
"""[ranks] From this many ranks at work, ranks and driver delay rows to send more at once."""
RANK_S = 4e-3
"""[s] Delay per rank at work."""
MAX_S = 2.0
"""[s] Maximum delay."""


def gather_s(ranks: int) -> float:
    """[s] Batching delay with this many ranks at work; 0 below MANY_RANKS.

    >>> gather_s(8), gather_s(100), gather_s(5000)
    (0.0, 0.4, 2.0)
    """
    return min(MAX_S, ranks * RANK_S) if ranks >= MANY_RANKS else 0.0


# Group

REGISTER = "register"
"""Method that every worker has. It returns the mesh coordinates once the process is up."""
Submit = Callable[[int, Task, "Call"], None]
"""Function that gives a task to a rank. The backend's `wait` returns the rank's replies."""


# Calls are keys of dictionaries, so they compare by identity.
@dataclass(eq=False)
class Call:
    """A call on a group, until every rank has answered."""

    group: WorkerGroup
    method: str
    ranks: tuple[int, ...]
    number: int = field(default_factory=itertools.count(1).__next__)
    """Unique number of the call in this process."""
    node: Node | None = None
    ledger: Ledger | None = None
    lease: Lease | None = None
    last: bool = True
    """Whether the call completes an update's batch, which may take several calls."""
    started: float = 0.0
    """[s] Start time on the backend's clock."""
    waiting: set[int] = field(default_factory=set)
    """Ranks that have not answered yet."""
    values: dict[int, Any] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    answered: dict[int, float] = field(default_factory=dict)
    """[s] Rank -> time of its final reply, on the backend's clock."""
    by_load: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Replica -> ids of samples that it got by load; empty if a dispatch protocol assigned them."""
    left: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Ranks that failed or died; the driver ignores their replies."""
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank -> ids of its samples, except samples that it has handed over completely."""
    num_rows: dict[int, int] = field(default_factory=dict)
    """Rank -> number of rows that it got at first."""
    unplaced: int = 0
    """Number of rows that a rank has handed over and no other has got."""

    @property
    def done(self) -> bool:
        return not self.waiting and not self.unplaced

    @property
    def behind(self) -> bool:
        return self.node is not None and self.node.operation.behind

    @property
    def interruptible(self) -> bool:
        return self.node is not None and self.node.operation.interruptible

    @property
    def results(self) -> list[Any]:
        """Results in rank order, without lost ranks."""
        return [self.values[r] for r in self.ranks if r not in self.lost]

    def take_reply(self, rank: int, reply: Reply, now: float) -> None:
        """Record a reply of a rank. `now` is the time of the reply on the backend's clock.

        Raises:
            WorkerError, WorkerDied, UserError: The rank failed, its process died, or its failure is
                one that the user can fix.
        """
        if reply.failure is not None:
            raise self._error(rank, reply.failure)
        if reply.metrics:
            self.metrics.append(reply.metrics)
        if reply.done:
            self.waiting.discard(rank)
            self.values[rank] = reply.value
            self.seconds[rank] = self.seconds.get(rank, 0.0) + reply.seconds
            self.answered[rank] = now

    def lose(self, rank: int) -> None:
        """Stop waiting for a rank and ignore its replies."""
        self.lost.add(rank)
        self.waiting.discard(rank)

    @property
    def holds_lease(self) -> bool:
        return (
            self.ledger is not None and self.lease is not None and self.ledger.leases.holds(self.lease)
        )

    def held_by(self, rank: int) -> set[int]:
        """Return the ids of a rank's unfinished samples; empty if the call holds no lease."""
        if self.lease is None or not self.holds_lease:
            return set()
        return self.lease.open.keys() & set(self.shares.get(rank, ()))

    def describe(self, rank: int | None = None) -> str:
        who = f"{self.group.name}[{rank}]" if rank is not None else self.group.name
        what = f"node {self.node.name!r}" if self.node else f"call {self.method!r}"
        return f"worker {who}, {what}"

    def _error(self, rank: int, failure: Failure) -> Exception:
        ids = failure.sample_ids or self.shares.get(rank, ())[:4]
        samples = f", samples {', '.join(map(str, ids))}" if ids else ""
        samples += f" ({failure.sample})" if failure.sample else ""
        where = f"{self.describe(rank)}{samples}: {failure.message}"
        if failure.kind is FailureKind.USER_ERROR:
            return UserError(where)
        if failure.kind is FailureKind.DIED:
            return WorkerDied(where)
        # A worker that cannot read its rows is alive, but its input is lost: treat it as dead.
        kind = WorkerDied if failure.kind is FailureKind.UNREADABLE else WorkerError
        return kind(f"{where}\n{failure.traceback.rstrip()}")


class BegunRow(NamedTuple):
    """A row that a rank has begun to make, for another rank to continue."""

    parent: int
    """Sample id of its parent."""
    number: int
    """Number among the rows of its parent."""
    id: int
    """Its sample id."""
    segment: Segment
    """Where its columns so far are stored."""


def publishes_as_it_goes(node: Node) -> bool:
    """Whether rows that a call has published count even if the call never finishes."""
    return (
        bool(node.writes)
        and not node.operation.takes_groups
        and node.operation.shape is not Shape.FILTER
    )


Then = Callable[[Call], "Iterable[CallRequest]"]


@dataclass(frozen=True, eq=False)
class CallRequest:
    """Request to call a method on the rows of a lease, or without rows on `ranks` (None: all)."""

    group: WorkerGroup
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: Sequence[int] | None = None
    then: Then = lambda call: ()
    on_device: bool = False
    """Whether the call uses the pool's devices, so that other groups must give them up first."""
    ledger: Ledger | None = None
    lease: Lease | None = None
    by_load: Mapping[int, int] | None = None
    """Replica -> number of rows; None lets the dispatch protocol assign the rows."""
    last: bool = True
    """Whether these rows complete the batch of an update."""

    def make(self) -> Call:
        if self.ledger is None or self.lease is None:
            return self.group.call(self.method, ranks=self.ranks, **self.arguments)
        call = self.group.call_node(self.ledger, self.lease, by_load=self.by_load, **self.arguments)
        call.last = self.last
        return call


class UnderWay:
    """Running calls, oldest first, with counts, so that a turn need not scan all calls."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._calls: dict[Call, None] = {}
        self.interruptible = 0
        self.ranks = 0
        """Number of ranks working on rows, counted once per call."""
        self.beside_the_graph = 0
        """Number of calls that do not belong to a node."""
        for call in calls:
            self.add(call)

    def add(self, call: Call) -> None:
        self._calls[call] = None
        self._count(call, 1)

    def remove(self, call: Call) -> None:
        del self._calls[call]
        self._count(call, -1)

    def _count(self, call: Call, by: int) -> None:
        self.interruptible += by * call.interruptible
        self.beside_the_graph += by * (call.node is None)
        self.ranks += by * len(call.ranks) * (call.lease is not None)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)


class _Loads:
    """Number of unfinished rows on each replica of a group, for load balancing.

    >>> loads = _Loads([0, 1, 2])
    >>> loads.add_rows(0, 4)
    >>> loads.spread(5)
    {1: 3, 2: 2}
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        self._rows = dict.fromkeys(replicas, 0)
        self._heap = [(0, replica) for replica in self._rows]
        """Heap of pairs (rows, replica). Outdated pairs stay until they reach the top."""

    def add_rows(self, replica: int, rows: int) -> None:
        self._rows[replica] += rows
        heapq.heappush(self._heap, (self._rows[replica], replica))
        # Rebuild the heap when most of its pairs are outdated.
        if len(self._heap) > 4 * len(self._rows) + 64:
            self._heap = [(rows, replica) for replica, rows in self._rows.items()]
            heapq.heapify(self._heap)

    def only(self, replicas: Iterable[int]) -> _Loads:
        some = _Loads(())
        for replica in replicas:
            some._rows[replica] = 0
            some.add_rows(replica, self._rows[replica])
        return some

    def spread(self, rows: int) -> dict[int, int]:
        """Split new rows so that all replicas end up with about equally many unfinished rows.
        Return replica -> number of new rows, without zeros. The recorded loads do not change."""
        given: Counter[int] = Counter()
        for _ in range(rows if self._rows else 0):
            while self._heap[0][0] != self._rows[self._heap[0][1]]:
                heapq.heappop(self._heap)
            replica = self._heap[0][1]
            given[replica] += 1
            self.add_rows(replica, 1)
        # `WorkerGroup.watch` counts the rows when their call is made.
        for replica, number in given.items():
            self.add_rows(replica, -number)
        return dict(sorted(given.items()))


class WorkerGroup:
    """The running workers of a handle, with methods to call them."""

    def __init__(
        self, name: str, handle: Handle, place: Place, mesh: Sequence[Coordinates], submit: Submit
    ) -> None:
        self.name = name
        self.handle = handle
        self.place = place
        self.mesh = tuple(mesh)
        self._submit = submit
        self.calls = UnderWay()
        self.version = 0
        """Policy version of the group's weights; of a group that follows several, the newest."""
        self.versions: dict[str, int] = {}
        """Leader -> version of its weights that the group has received."""
        self.absent: set[int] = set()
        """Ranks of an elastic group that do not fit into the cluster. They get no calls."""
        self.starting: set[int] = set()
        """Ranks whose processes are starting. They get no rows."""
        self.lacking: set[int] = set()
        """Ranks that are up but have no weights yet. They get no rows."""
        self.updating = False
        """Whether an update has claimed a complete batch, so the weights will change."""
        self._ranks_of: dict[int, list[int]] = {}
        for rank, at in enumerate(self.mesh):
            self._ranks_of.setdefault(at.dp, []).append(rank)
        self._replicas = sorted(self._ranks_of)
        self._alone = {
            dp: [replace(self.mesh[rank], dp=0) for rank in ranks]
            for dp, ranks in self._ranks_of.items()
        }
        """Replica -> coordinates of its ranks in a call to this replica alone."""
        self._loads = _Loads(self._replicas)
        self._sent: dict[tuple[str, str], Mapping[str, Any]] = {}
        """(graph, node) -> arguments as ranks get them."""

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.name}: {len(self.mesh)} x {self.handle.worker_class.__name__}>"

    # Computed on first use, because some workers read model files for it.
    @cached_property
    def _row_cost(self) -> RowCost:
        worker = self.handle.worker_class
        return worker.row_cost(self.handle.config) if issubclass(worker, Worker) else RowCost()

    @cached_property
    def _shares_prompts(self) -> bool:
        worker = self.handle.worker_class
        return issubclass(worker, Worker) and worker.shares_prompts(self.handle.config)

    def shares_prompts_of(self, node: Node) -> bool:
        """Whether the rows of a node's groups have one prompt each, and ranks compute it once."""
        # All rows that descend from a source row have its prompt.
        have_one = node.level != SOURCE and node.writers.get(str(PROMPT_IDS)) == ""
        return have_one and self._shares_prompts

    def version_of(self, leader: str) -> int:
        """Return the version of a leader's weights that the group has. "" is the only leader, or the
        group itself."""
        return self.versions.get(leader, 0) if len(self.handle.leaders) > 1 else self.version

    def set_version(self, leader: str, version: int) -> None:
        """Note that the group has received a version of a leader's weights."""
        self.versions[leader] = version
        self.version = max(self.versions.values())

    @property
    def busy(self) -> bool:
        return len(self.calls) > 0

    def watch(self, call: Call) -> None:
        self.calls.add(call)
        for replica, ids in call.by_load.items():
            call.left[replica] = len(ids)
            self._loads.add_rows(replica, len(ids))

    def forget(self, call: Call) -> None:
        self.calls.remove(call)
        for replica, left in call.left.items():
            self._loads.add_rows(replica, -left)

    def weigh(self, call: Call, ranks: Iterable[int]) -> None:
        for replica in {self.mesh[rank].dp for rank in ranks} if call.by_load else ():
            assert call.lease is not None
            left = len([id for id in call.by_load[replica] if id in call.lease.open])
            self._loads.add_rows(replica, left - call.left[replica])
            call.left[replica] = left

    @property
    def out(self) -> set[int]:
        return self.absent | self.starting | self.lacking

    @property
    def up(self) -> list[int]:
        return [r for r in range(len(self.mesh)) if r not in self.absent and r not in self.starting]

    @property
    def replicas(self) -> Sequence[int]:
        """Replicas that get rows: all their ranks are up and have weights."""
        without = {self.mesh[rank].dp for rank in self.out}
        return [dp for dp in self._replicas if dp not in without] if without else self._replicas

    @property
    def lone_ranks(self) -> set[int]:
        """Ranks that get rows and are the only rank of their replica."""
        own = (self._ranks_of[replica] for replica in self.replicas)
        return {ranks[0] for ranks in own if len(ranks) == 1}

    @property
    def at_work(self) -> UnderWay:
        if not self.out:
            return self.calls
        return UnderWay(c for c in self.calls if not self.out.issuperset(c.ranks))

    def is_free(self, *, to_join: bool) -> bool:
        """Whether no call is running or, with `to_join`, all running calls are interruptible."""
        calls = self.at_work
        return not len(calls) or (to_join and calls.interruptible == len(calls))

    def call(self, method: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> Call:
        """Call a method that takes no rows. Return without waiting for replies.

        Args:
            method: Remote method, or REGISTER.
            ranks: By default all; for an elastic group, all that are up.

        Raises:
            UserError: The worker does not have this remote method.
        """
        if method != REGISTER:
            self._dispatch(method)
        # In a fixed group, ranks that are being replaced answer once they are up.
        every = self.up if self.place.is_elastic else range(len(self.mesh))
        called = every if ranks is None else ranks
        call = Call(self, method, tuple(rank for rank in called if rank not in self.absent))
        call.waiting = set(call.ranks)
        task = Task(method, arguments, number=call.number)
        for rank in call.ranks:
            self._submit(rank, task, call)
        return call

    def least_loaded(self, rows: int) -> dict[int, int]:
        """Split new rows over `replicas`, as `_Loads.spread` does."""
        return (self._loads.only(self.replicas) if self.out else self._loads).spread(rows)

    def call_node(
        self, ledger: Ledger, lease: Lease, *, by_load: Mapping[int, int] | None = None, **extra: Any
    ) -> Call:
        """Call a node's method on the rows of a lease. Return without waiting for replies."""
        node = lease.node
        method = node.operation.name if node.group else "apply"
        rows = _Rows(ledger, lease)
        shares, keep, begin = dict[int, Sequence[int]](), set[int](), 0
        for replica, number in [(None, lease.num_rows)] if by_load is None else by_load.items():
            part = slice(begin, begin + number)
            # The only rank of a replica gets all of its rows, whatever the dispatch protocol.
            if replica is not None and len(self._ranks_of[replica]) == 1:
                shares[self._ranks_of[replica][0]] = range(begin, begin + number)
                keep.add(self._ranks_of[replica][0])
                begin += number
                continue
            sizes = self._sizes(lease, part)
            given, kept = self._distribute(self._dispatch(method), sizes, replica)
            shares |= {
                rank: rows.in_order([begin + k for k in share] if begin else share)
                for rank, share in given.items()
            }
            keep |= kept
            begin += number
        # A wrong dispatch protocol would lose rows or train on them twice.
        kept_rows = sorted(i for rank in keep for i in shares.get(rank, ()))
        if kept_rows != list(range(lease.num_rows)):
            raise UserError(
                f"{self._dispatch(method)!r} on {self.name!r}: the collected ranks hold {len(kept_rows)} rows of {lease.num_rows}; "
                "each must be held exactly once"
            )
        ranks = tuple(shares)
        call = Call(self, method, ranks, node=node, ledger=ledger, lease=lease)
        call.waiting = set(ranks)
        arguments = {**self._sent_arguments(ledger.name, node), **extra}
        if not node.group:
            arguments = {"function": node.function, "arguments": dict(node.arguments)}
        # Only generating calls yield rows one by one.
        waits_s = gather_s(len(ranks)) if call.interruptible else 0.0
        own = {rank: tuple(share) for rank, share in shares.items()}
        different = list(dict.fromkeys(own.values()))  # the ranks of a replica often get the same rows
        cut = {
            share: (task, tuple(task.ids.tolist()))
            for share, task in zip(different, rows.cut(different), strict=True)
        }
        # Ranks with equal rows share one task object.
        tasks: dict[tuple[tuple[int, ...], bool], Task] = {}
        for rank, share in own.items():
            part, call.shares[rank] = cut[share]
            call.num_rows[rank] = len(share)
            task = tasks.get((share, rank in keep))
            if task is None:
                task = tasks[share, rank in keep] = Task(
                    method, arguments, part, rank in keep, call.number, waits_s
                )
            self._submit(rank, task, call)
        for rank in keep if by_load else ():
            call.by_load[self.mesh[rank].dp] = call.shares[rank]
        return call

    def continue_rows(self, call: Call, rank: int, begun: Sequence[BegunRow]) -> None:
        """Call a rank again, which has answered its part of a call, to continue rows of others."""
        node, ledger, lease = call.node, call.ledger, call.lease
        assert node is not None and ledger is not None and lease is not None
        (rows,) = _Rows(ledger, lease).cut([[lease.place_of[row.parent] for row in begun]])
        ids = np.array([row.id for row in begun], np.int64)
        so_far = ColumnPiece(node.writes, ids, tuple(dict.fromkeys(row.segment for row in begun)))
        numbers = np.array([row.number for row in begun], np.int32)
        rows = replace(rows, pieces=(*rows.pieces, so_far), begun=numbers, made=None)
        call.waiting.add(rank)
        call.shares[rank] = tuple(dict.fromkeys((*call.shares[rank], *rows.ids.tolist())))
        arguments, waits_s = self._sent_arguments(ledger.name, node), gather_s(len(call.ranks))
        self._submit(rank, Task(call.method, arguments, rows, True, call.number, waits_s), call)

    def _sent_arguments(self, graph: str, node: Node) -> Mapping[str, Any]:
        key, worker = (graph, node.name), self.handle.worker_class
        if key not in self._sent:
            is_plain = not (node.group and issubclass(worker, Worker))
            self._sent[key] = node.arguments if is_plain else worker.sent_arguments(node.arguments)
        return self._sent[key]

    def _sizes(self, lease: Lease, part: slice) -> RowSizes:
        """Return what a protocol knows about some rows of a lease."""
        node, tokens = lease.node, lease.num_tokens[part]
        costs = prompt_costs = None
        # With one replica there is nothing to balance.
        if len(self._replicas) > 1:
            costs = self._row_cost(tokens)
            if lease.forecast is not None and not lease.forecast.is_empty:
                costs = lease.forecast.tokens[part]
            if self.shares_prompts_of(node):
                prompt_costs = self._row_cost(np.minimum(lease.source_tokens[part], tokens))
        return RowSizes(tokens, lease.group_ids[part], node.operation.whole_groups, costs, prompt_costs)

    def _distribute(
        self, dispatch: Dispatch, sizes: RowSizes, replica: int | None
    ) -> tuple[dict[int, Sequence[int]], set[int]]:
        """Return rank -> indexes of its rows, and the ranks whose results are kept. If `replica` is
        given, only its ranks get rows."""
        chosen, mesh = self._part(replica)
        given = dispatch.distribute(sizes, mesh)
        if len(given) != len(mesh):
            raise UserError(
                f"{dispatch!r} returned {len(given)} shares for the {len(mesh)} ranks of {self.name!r}"
            )
        # Call ranks with an empty share too, because they take part in the group's collectives.
        shares = {rank: share for rank, share in zip(chosen, given, strict=True) if share is not None}
        return shares, {chosen[k] for k in dispatch.collect(mesh)}

    def _part(self, replica: int | None) -> tuple[Sequence[int], Sequence[Coordinates]]:
        """Return the ranks of a call, and their coordinates with replicas numbered from 0."""
        if replica is None and not self.out and self._replicas == list(range(len(self._replicas))):
            return range(len(self.mesh)), self.mesh
        if replica is not None:
            chosen = self._ranks_of[replica]
            return chosen, self._alone[replica]
        replicas = {dp: number for number, dp in enumerate(self.replicas)}
        chosen = sorted(rank for dp in replicas for rank in self._ranks_of[dp])
        return chosen, [replace(self.mesh[rank], dp=replicas[self.mesh[rank].dp]) for rank in chosen]

    def _dispatch(self, method: str) -> Dispatch:
        worker_class = self.handle.worker_class
        dispatch = dispatch_of(worker_class, method)
        if dispatch is None:
            known = [n for n in dir(worker_class) if dispatch_of(worker_class, n)]
            hint = nearest(method, known) or f"; it has {', '.join(known)}"
            raise UserError(f"{worker_class.__name__} has no remote method {method!r}{hint}")
        return dispatch


class _Rows:
    def __init__(self, ledger: Ledger, lease: Lease) -> None:
        node, self._ledger, self._lease = lease.node, ledger, lease
        self.ids, self.group_ids, self.parent_ids = lease.ids, lease.group_ids, lease.parent_ids
        expands = node.operation.shape is Shape.EXPAND
        self._first_children = lease.first_children if expands else None
        level, self._draws = node.makes_level, None
        if level is not None and str(DRAW_PATH) in (*node.operation.reads, *node.operation.may_read):
            self._draws = [row.draw(level) for row in lease.rows]
        self._made = self._made_before() if expands else None
        self._forecast = lease.forecast

    def in_order(self, share: Sequence[int]) -> Sequence[int]:
        """Return a share with the rows of the longest expected responses first."""
        if self._forecast is None or self._forecast.is_empty:
            return share
        tokens = self._forecast.tokens
        return sorted(share, key=lambda k: -tokens[k])

    def cut(self, shares: Sequence[Sequence[int]]) -> list[RowTask]:
        node, first_children = self._lease.node, self._first_children
        ends = np.cumsum([len(share) for share in shares]).tolist()
        index = np.fromiter(itertools.chain.from_iterable(shares), np.int64, ends[-1] if ends else 0)
        ids, group_ids, parent_ids = self.ids[index], self.group_ids[index], self.parent_ids[index]
        aside = None if first_children is None else first_children[index]
        expected = None if self._forecast is None else self._forecast.of_observed[index]
        tasks: list[RowTask] = []
        begin = 0
        cut = column_pieces(self._ledger.graph, self._ledger.source, self._lease, shares, index)
        for share, end, pieces in zip(shares, ends, cut, strict=True):
            own = slice(begin, end)
            begin = end
            made = None if self._made is None else [self._made[i] for i in share]
            tasks.append(
                RowTask(
                    operation=node.operation,
                    writes=node.writes,
                    ids=ids[own],
                    group_ids=group_ids[own],
                    parent_ids=parent_ids[own],
                    pieces=pieces,
                    first_children=None if aside is None else aside[own],
                    masked=self._lease.masked,
                    draws=None if self._draws is None else [self._draws[i] for i in share],
                    made=made if made is not None and any(made) else None,
                    expected=None if expected is None else expected[own],
                    version_of=self._ledger.version_of,
                )
            )
        return tasks

    def _made_before(self) -> Sequence[Sequence[int]] | None:
        level = self._lease.node.makes_level
        if level is None or not any(len(group.levels[level]) for group in self._lease.groups):
            return None
        made = [[child.number for child in row.made(level)] for row in self._lease.rows]
        return made if any(made) else None
