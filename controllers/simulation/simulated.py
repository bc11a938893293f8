"""Simulated: a backend without workers, on a clock of its own. The same graphs, driver, schedules and ledgers run on any number
of devices that nobody has; what a call takes is said by a cost model, and the clock jumps from one event to the next.

    CostModel -> Simulated(costs) -> Driver(..., backend=...)     metrics, timeline and log as of any run, in virtual seconds
    calibrate(run) -> CostModel                                   from the timeline of a real run
    bound(costs, graph, placement, ...)                       what no schedule can beat

A replica that generates is a continuous batch: while the responses that it works on are the same, all advance at one speed, so
a whole stretch of decode steps costs one event. Nothing is written: references to columns are invented.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import zlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, field_validator

from ...dataflow.batch import Batch
from ...dataflow.buffer.rows import Published, Row
from ...dataflow.buffer.run_tables import read_timeline
from ...dataflow.buffer.segments import Segment
from ...dataflow.column import RESPONSE_VERSIONS
from ...dataflow.config import Config
from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import SOURCE, Graph
from ...dataflow.metrics import Max, Mean, Metrics, Sum
from ...dataflow.operation import Shape
from ...workers.dispatch import Coordinates
from ..backends.backend import Event, Setup
from ..cursor import positions
from ..group import Call, WorkerGroup
from ..own_groups import FUNCTIONS
from ..placement import Place, Placement, resolve
from ..row_io import num_tokens
from ..tasks import Reply, RowTask, Task

NODE = "simulated"
"""The node that invented references name: no file of it exists anywhere."""
BYTES_PER_TOKEN = 12
"""A token id, its log-probability and its version: what a response counts towards `BufferConfig.max_bytes`."""
EPSILON = 1e-9
"""Decode steps that rounding may take for begun."""


# CostModel


class LogNormal(Config):
    """Lengths of responses: log-normal, cut off at a limit (which makes the mean a little smaller).

    >>> LogNormal(mean=100, max_tokens=400).draw((0, 7), position=7, n=3).tolist()
    [33, 128, 97]
    """

    mean: float = Field(gt=0)
    """Tokens, before the limit."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm."""
    max_tokens: int = Field(ge=1)

    def draw(self, key: Sequence[int], position: int, n: int) -> np.ndarray:
        """[n] int64 lengths, the same for the same key."""
        chance = np.random.default_rng(key)
        drawn = chance.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, n)
        return np.clip(np.rint(drawn), 1, self.max_tokens).astype(np.int64)


class FixedLengths(Config):
    """Lengths of responses, said: those of the rows of the source, in order.

    >>> FixedLengths(lengths=((3, 5), (2, 7))).draw((), position=1, n=2).tolist()
    [2, 7]
    """

    lengths: tuple[tuple[int, ...], ...]

    def draw(self, key: Sequence[int], position: int, n: int) -> np.ndarray:
        own = self.lengths[position % len(self.lengths)]
        return np.array([max(1, own[k % len(own)]) for k in range(n)], np.int64)


class LinearCost(Config):
    """Seconds of a call: a constant, and so much for each row and token of the replica that has the most to do.

    >>> LinearCost(fixed_s=1.0, per_token_s=0.5).seconds(rows=2, tokens=10)
    6.0
    """

    fixed_s: float = Field(default=0.0, ge=0)
    """Of each call; of an update that comes in parts, with the last alone."""
    per_row_s: float = Field(default=0.0, ge=0)
    per_token_s: float = Field(default=0.0, ge=0)
    """Prompts included."""
    keep: float = Field(default=1.0, ge=0, le=1)
    """Of a filter: the share of rows (or of groups, where it sees whole ones) that it lets through."""

    def seconds(self, rows: float, tokens: float, *, fixed: bool = True) -> float:
        return fixed * self.fixed_s + self.per_row_s * rows + self.per_token_s * tokens


class Generation(Config):
    """Continuous batching on one replica.

    >>> Generation(lengths=FixedLengths(lengths=((1,),)), step_s=((0, 0.5), (4, 0.7)), max_num_seqs=4).steps_s.round(2).tolist()
    [0.5, 0.55, 0.6, 0.65, 0.7]
    """

    lengths: LogNormal | FixedLengths
    step_s: float | Sequence[tuple[float, float]]
    """Seconds of a decode step, or a table of (responses in the batch, seconds), linear in between."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Responses at once; others queue, in order."""
    prefill_s: float = Field(default=0.0, ge=0)
    """For each token of a prompt, once for all of its responses; the batch stands still meanwhile."""

    @field_validator("step_s")
    @classmethod
    def _is_a_table(cls, value: Any) -> Any:
        table = ((0.0, value),) if isinstance(value, float) else value
        if not table or any(s <= 0 for _, s in table) or [b for b, _ in table] != sorted({b for b, _ in table}):
            raise ValueError("step_s must be seconds above 0, or a table of such by ascending numbers of responses")
        return value

    @property
    def steps_s(self) -> np.ndarray:
        """[max_num_seqs + 1] seconds of a step by the number of responses."""
        table = ((0.0, self.step_s),) if isinstance(self.step_s, float) else self.step_s
        return np.interp(np.arange(self.max_num_seqs + 1), *np.array(table, float).T)


class CostModel(Config):
    """What a run takes, where it is simulated.

    >>> CostModel(nodes={"actor.update": LinearCost(fixed_s=0.5), "rollout.receive_weights": LinearCost(fixed_s=0.1)}).dispatch_s
    0.0
    """

    nodes: Mapping[str, LinearCost | Generation] = Field(default_factory=dict)
    """By node ("actor.update"; of a function, its name), or by group and method beside the graph ("actor.publish_weights",
    "rollout.receive_weights", "actor.onload", "actor.offload"). What is not mentioned takes no time."""
    ranks_per_replica: Mapping[str, int] = Field(default_factory=dict)
    """Group -> ranks of one tensor-parallel replica; 1 where it is not mentioned. CostModel are those of a replica."""
    dispatch_s: float = Field(default=0.0, ge=0)
    """What a call costs the driver for each rank, one after the other; all of a call begin when the first has been told."""
    seed: int = 0
    """Of the lengths: a prompt gets the same under every schedule and placement."""

    def linear(self, name: str) -> LinearCost:
        cost = self.nodes.get(name)
        return cost if isinstance(cost, LinearCost) else LinearCost()


# The backend


@dataclass(frozen=True)
class SimulatedWeights:
    """What a simulated leader publishes."""

    version: int

    @property
    def checksum(self) -> str:
        return f"version-{self.version}"


class Simulated:
    """Worker groups that take their time and do nothing. Every placement is possible, and `clock` counts virtual seconds."""

    def __init__(self, costs: CostModel = CostModel()) -> None:
        self.costs = costs
        self._now = 0.0
        self._fates = _Fates(costs)
        self._replicas: dict[tuple[str, int], _Replica] = {}
        self._asked: list[tuple[float, Call, list[tuple[int, Task]]]] = []
        """Calls that were made since the clock last moved."""
        self._heard: list[tuple[float, int, Event]] = []
        """Replies by the time at which they come: a heap, as the next."""
        self._due: list[tuple[float, int, _Replica]] = []
        """When something happens at a replica next. Entries of replicas that changed since stay until they come up."""
        self._order = itertools.count()
        self._offset = 0

    def __repr__(self) -> str:
        return "Simulated()"

    def check(self, placement: Mapping[str, Place]) -> None:
        """CostModel must be those of groups that there are; devices are as many as the placement asks for."""
        for name in [*(n.partition(".")[0] for n in self.costs.nodes if "." in n), *self.costs.ranks_per_replica]:
            if name not in placement:
                raise UserError(f"CostModel names a group {name!r}, which no graph has{nearest(name, placement)}")
        for name, each in self.costs.ranks_per_replica.items():
            ranks = placement[name].ranks
            if each < 1 or ranks % each:
                raise UserError(
                    f"CostModel.ranks_per_replica: replicas of {each} ranks do not divide the {ranks} of {name!r}"
                )

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        groups: dict[str, WorkerGroup] = {}
        for name, handle in setup.handles.items():
            each = self.costs.ranks_per_replica.get(name, 1)
            place = setup.placement[name]
            mesh = [Coordinates(dp=rank // each, tp=rank % each) for rank in range(place.ranks)]
            groups[name] = WorkerGroup(name, handle, place, mesh, self._submit)
            generates = [
                c for n, c in self.costs.nodes.items() if n.startswith(f"{name}.") and isinstance(c, Generation)
            ]
            if len(generates) > 1:
                raise UserError(f"CostModel.nodes: two nodes of {name!r} have a Generation; they share one engine")
            cost = generates[0] if generates else None
            for replica in range(mesh[-1].dp + 1) if cost else (0,):  # else all ranks work as one
                self._replicas[name, replica] = _Replica(cost, self._reply, self._invent)
        return groups

    def delete(self, node: str, file: str) -> None:
        """There is no file."""

    has_processes = False
    nodes = (NODE,)

    def has_lost_node(self) -> bool:
        return False

    def replace(self, group: WorkerGroup, rank: int) -> None:
        raise RuntimeError(f"{group.name}[{rank}] has no process that could end")

    def sample_at(self, group: WorkerGroup, rank: int) -> None:
        """Nobody asks."""

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        for left in (self._replicas, self._asked, self._heard, self._due):
            left.clear()

    def cancel(self, call: Call) -> None:
        self._begin()
        for replica in {id(d): d for rank in call.ranks for d in [self._replica(call, rank)]}.values():
            replica.run(self._now)
            replica.cancel(call, self._now)
            self._note(replica)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        self._begin()
        for replica in {id(d): d for rank in call.ranks for d in [self._replica(call, rank)]}.values():
            replica.run(self._now)
            replica.cancel(call, self._now, frozenset(sample_ids))
            self._note(replica)

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """The next replies; the clock moves to their time, or by `timeout_s` when none comes until then."""
        self._begin()
        end = self._now + timeout_s
        while self._due and self._due[0][0] <= max(self._now, min(end, self._heard[0][0] if self._heard else end)):
            time, _, replica = heapq.heappop(self._due)
            if time == replica.next_s:
                replica.run(time)
                self._note(replica)
        if not self._heard or self._heard[0][0] > max(self._now, end):
            self._now = end
            return []
        self._now = max(self._now, self._heard[0][0])
        events: list[Event] = []
        while self._heard and self._heard[0][0] <= self._now:
            events.append(heapq.heappop(self._heard)[2])
        return events

    # Calls

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        self._now += self.costs.dispatch_s
        if not self._asked or self._asked[-1][1] is not call:
            self._asked.append((self._now, call, []))
        self._asked[-1][2].append((rank, task))

    def _begin(self) -> None:
        """Hand the calls that were made to their replicas."""
        asked, self._asked = self._asked, []
        for at, call, tasks in asked:
            name = call.node.name if call.node is not None else f"{call.group.name}.{call.method}"
            cost = self.costs.nodes.get(name)
            if isinstance(cost, Generation):
                self._generate(at, call, tasks)
            else:
                self._work(at, call, tasks, cost or LinearCost())

    def _generate(self, at: float, call: Call, tasks: Sequence[tuple[int, Task]]) -> None:
        assert call.lease is not None and call.ledger is not None
        by_id = {r.id: r for r in call.lease.rows}
        for replica, own in self._by_replica(call, tasks):
            _, kept = next((one for one in own if one[1].keep), own[0])
            assert kept.rows is not None
            rows = [by_id[id] for id in kept.rows.ids.tolist()]
            n = int(kept.arguments.get("n", 1))
            lengths = [self._fates.lengths(replica.cost, call.ledger.name, row, n) for row in rows]
            replica.run(at)
            replica.answer(_Answers(call, own, kept.rows, lengths, [r.tokens for r in rows], at), at)
            self._note(replica)

    def _work(self, at: float, call: Call, tasks: Sequence[tuple[int, Task]], cost: LinearCost) -> None:
        rows = {r.id: r for r in call.lease.rows} if call.lease is not None else {}
        fixed = bool(tasks[0][1].arguments.get("last", True)) if call.node is not None else True
        done: dict[int, float] = {}
        for _, task in tasks:
            if task.rows is not None and id(task.rows) not in done:
                tokens = sum(rows[i].tokens for i in task.rows.ids.tolist())
                done[id(task.rows)] = cost.seconds(len(task.rows.ids), tokens, fixed=fixed)
        seconds = max(done.values(), default=cost.fixed_s)  # ranks of one program wait for the slowest
        for replica, own in self._by_replica(call, tasks):
            replies = [(rank, self._result(call, rank, task, rows, cost, seconds)) for rank, task in own]
            weights = own[0][1].arguments.get("weights")
            version = weights.version if call.method == "receive_weights" and weights is not None else None
            replica.run(at)
            replica.work(_Work(call, seconds, replies, version), at)
            self._note(replica)

    def _result(
        self, call: Call, rank: int, task: Task, rows: Mapping[int, Row], cost: LinearCost, seconds: float
    ) -> Reply:
        if task.rows is None:
            return Reply(value=_value(task, rank) if task.keep else None, done=True, seconds=seconds)
        published = self._published(call, task.rows, rows, cost, task) if task.keep and len(task.rows.ids) else None
        wrote = published is not None and task.rows.writes
        return Reply(
            published,
            self._invent(8 * len(task.rows.ids)) if wrote else None,
            _trained(call, [rows[i] for i in task.rows.ids.tolist()]) if task.keep else {},
            done=True,
            seconds=seconds,
        )

    def _published(
        self, call: Call, task: RowTask, rows: Mapping[int, Row], cost: LinearCost, arguments: Task
    ) -> Published | None:
        """What the ledger is told of rows that a node has seen."""
        operation = task.operation
        ids = task.ids
        if str(RESPONSE_VERSIONS) in task.writes:
            name = call.node.name if call.node else operation.name
            raise UserError(f"node {name!r} generates: its cost must be a Generation(...) in CostModel.nodes")
        if operation.shape is Shape.FILTER:
            assert call.ledger is not None and call.node is not None
            graph, node = call.ledger.name, call.node.name
            whole = operation.whole_groups
            ids = ids[[self._fates.passes(cost, graph, rows[i], node, whole_groups=whole) for i in ids.tolist()]]
        elif operation.shape is Shape.EXPAND:
            assert task.first_children is not None
            n = int(arguments.arguments.get("n", 1))
            numbers = [np.setdiff1d(np.arange(n), made) for made in task.made or [[]] * len(ids)]
            children = np.concatenate([first + own for first, own in zip(task.first_children, numbers, strict=True)])
            parents = np.repeat(ids, [len(own) for own in numbers])
            return Published(children, np.zeros(len(children), np.int64), None, parents, ids)
        elif not task.writes:
            return None  # an update, say
        return Published(ids, np.zeros(len(ids), np.int64))

    # Between the replicas and the driver

    def _replica(self, call: Call, rank: int) -> _Replica:
        own = self._replicas.get((call.group.name, call.group.mesh[rank].dp))
        return own or self._replicas[call.group.name, 0]

    def _by_replica(
        self, call: Call, tasks: Sequence[tuple[int, Task]]
    ) -> list[tuple[_Replica, list[tuple[int, Task]]]]:
        found: dict[int, tuple[_Replica, list[tuple[int, Task]]]] = {}
        for rank, task in tasks:
            replica = self._replica(call, rank)
            found.setdefault(id(replica), (replica, []))[1].append((rank, task))
        return list(found.values())

    def _note(self, replica: _Replica) -> None:
        if replica.next_s < math.inf:
            heapq.heappush(self._due, (replica.next_s, next(self._order), replica))

    def _reply(self, time: float, call: Call, rank: int, reply: Reply) -> None:
        heapq.heappush(self._heard, (time, next(self._order), Event(call, rank, reply)))

    def _invent(self, num_bytes: int) -> Segment:
        """A reference to columns that nobody wrote."""
        self._offset += num_bytes
        return Segment(NODE, f"{NODE}.0.000001.arrows", self._offset, num_bytes, 0)


def _value(task: Task, rank: int) -> Any:
    """What a method beside the graph returns."""
    if task.method == "publish_weights":
        return SimulatedWeights(task.arguments["version"]) if rank == 0 else None
    if task.method == "receive_weights":
        return task.arguments["weights"].checksum
    return {"save_checkpoint": 0.0, "checkpoint_written": True}.get(task.method)


def _trained(call: Call, rows: Sequence[Row]) -> Metrics:
    """How far the rows of an update lag its weights."""
    assert call.node is not None
    lags = [call.group.version - r.version for r in rows if r.version is not None and r.version >= 0]
    if not call.node.operation.updates or not lags:
        return {}
    return {"max_staleness": Max(float(max(lags))), "mean_staleness": Mean(float(sum(lags)), float(len(lags)))}


class _Fates:
    """What chance decides of each row: by its place in the source and among its siblings, so that no schedule changes it."""

    def __init__(self, costs: CostModel) -> None:
        self._seed = costs.seed
        self._turns: dict[tuple[str, int], dict[int, int]] = {}
        """(graph, row of the source) -> the groups that were made of it, numbered."""

    def lengths(self, cost: Generation | None, graph: str, row: Row, n: int) -> np.ndarray:
        assert cost is not None
        return cost.lengths.draw(self._key(graph, row), row.position, n)

    def passes(self, cost: LinearCost, graph: str, row: Row, node: str, *, whole_groups: bool) -> bool:
        if cost.keep == 1:
            return True
        root = row
        while whole_groups and root.parent is not None:
            root = root.parent
        return bool(np.random.default_rng([*self._key(graph, root), zlib.crc32(node.encode())]).random() < cost.keep)

    def _key(self, graph: str, row: Row) -> list[int]:
        turns = self._turns.setdefault((graph, row.position), {})
        return draw_key(self._seed, graph, row.position, turns.setdefault(row.group.id, len(turns)), _path(row))


def draw_key(seed: int, graph: str, position: int, turn: int, path: Sequence[int] = ()) -> list[int]:
    """What the lengths of the responses to a row are drawn from: the `turn`-th group made of a row of the source."""
    return [seed, zlib.crc32(graph.encode()), position, turn, *path]


def _path(row: Row) -> list[int]:
    """Its number among its siblings, after those of its parents."""
    path: list[int] = []
    while row.parent is not None:
        path.insert(0, row.number)
        row = row.parent
    return path


# One replica


@dataclass
class _Work:
    """A call that runs to its end."""

    call: Call
    seconds: float
    replies: list[tuple[int, Reply]]
    version: int | None = None
    """Of the weights that are taken over."""


@dataclass(eq=False)
class _Answers:
    """A call that generates."""

    call: Call
    tasks: list[tuple[int, Task]]
    rows: RowTask
    lengths: list[np.ndarray]
    """[prompts] of [n]"""
    prompt_tokens: list[int]
    started: float
    left: list[int] = field(default_factory=list)
    """[prompts] responses that are not finished"""
    to_make: list[list[int]] = field(default_factory=list)
    """[prompts] numbers of the responses that are to be made"""
    versions: list[np.ndarray] = field(default_factory=list)
    open: int = 0
    """Prompts that are not finished."""

    def __post_init__(self) -> None:
        self.to_make = [
            [index for index in range(len(own)) if index not in made]
            for own, made in zip(self.lengths, self.rows.made or [()] * len(self.lengths), strict=True)
        ]
        self.left = [len(own) for own in self.to_make]
        self.versions = [np.zeros(len(own), np.int64) for own in self.lengths]
        self.open = sum(number > 0 for number in self.left)


Say = Callable[[float, Call, int, Reply], None]


class _Replica:
    """The calls of one replica (or of all ranks of a group that does not generate), in turns as of `turns.py`: calls
    that give way share a continuous batch; others run to their end, between two decode steps.

    `at` is the latest boundary between two steps (or the end of a call) that was looked at; it may lie ahead of the clock.
    """

    def __init__(self, cost: Generation | None, say: Say, invent: Callable[[int], Segment]) -> None:
        self.cost = cost
        self._steps_s = cost.steps_s.tolist() if cost else []
        self._say = say
        self._invent = invent
        self.at = 0.0
        self._steps = 0
        """Decode steps made until `at`."""
        self._running: list[tuple[int, int, int, _Answers, int, int]] = []
        """Heap of (last step, order, steps made before the first, call, prompt, number of the response)."""
        self._waiting: deque[tuple[_Answers, int, int]] = deque()
        self._works: deque[_Work] = deque()
        self._order = itertools.count()
        self._changes, self._versions = [0], [0]
        """Step after which each version was taken over, and the versions."""

    @property
    def next_s(self) -> float:
        """When something happens next, if nobody calls."""
        if self._works:
            return self.at + self._works[0].seconds
        if self._running:
            return self.at + (self._running[0][0] - self._steps) * self._steps_s[len(self._running)]
        return math.inf

    def run(self, until: float) -> None:
        """Do what is due until then."""
        while self.next_s <= until:
            if self._works:
                self._end_work()
            else:
                self._advance(self._running[0][0] - self._steps)

    def work(self, work: _Work, at: float) -> None:
        self._reach_boundary(at)
        self._works.append(work)

    def answer(self, answers: _Answers, at: float) -> None:
        self._reach_boundary(at)
        self._waiting.extend((answers, k, i) for k, own in enumerate(answers.to_make) for i in own)
        if not answers.open:
            self._done(answers, at)
        if not self._works:
            self._admit()

    def cancel(self, call: Call, at: float, parents: Container[int] | None = None) -> None:
        """Forget a call that gives way, or what it has still to make of some parents; nothing happens when it has ended already."""

        def is_over(answers: _Answers, k: int) -> bool:
            return answers.call is call and (parents is None or answers.rows.ids[k] in parents)

        mine = {id(a): a for a in [*(r[3] for r in self._running), *(w[0] for w in self._waiting)] if a.call is call}
        if not mine:
            return
        self._reach_boundary(at)
        ended = [a for a in mine.values() if not a.open]  # with the very step that was under way
        self._running = [r for r in self._running if not is_over(r[3], r[4])]
        heapq.heapify(self._running)
        self._waiting = deque(w for w in self._waiting if not is_over(w[0], w[1]))
        for answers in mine.values():
            for k in range(len(answers.left)):
                if answers.left[k] and is_over(answers, k):
                    answers.left[k] = 0
                    answers.open -= 1
            if answers not in ended and not answers.open:
                self._done(answers, at)
        if not self._works:
            self._admit()

    def _reach_boundary(self, at: float) -> None:
        """Who comes now has a turn when the step that is under way ends."""
        if self._works:
            return
        if not self._running:
            self.at = max(self.at, at)
        elif at > self.at:
            steps = math.ceil((at - self.at) / self._steps_s[len(self._running)] - EPSILON)
            self._advance(min(steps, self._running[0][0] - self._steps))

    def _advance(self, steps: int) -> None:
        """So many decode steps, in which no response ends before the last."""
        self.at += steps * self._steps_s[len(self._running)]
        self._steps += steps
        ended: dict[int, tuple[_Answers, list[tuple[int, int]]]] = {}
        while self._running and self._running[0][0] == self._steps:
            _, _, first, answers, k, index = heapq.heappop(self._running)
            answers.versions[k][index] = self._versions[bisect_right(self._changes, first) - 1]
            answers.left[k] -= 1
            ended.setdefault(id(answers), (answers, []))[1].append((k, index))
        for answers, responses in ended.values():
            self._publish(answers, sorted(responses))
        self._admit()

    def _admit(self) -> None:
        assert self.cost is not None or not self._waiting
        while self._waiting and self.cost is not None and len(self._running) < self.cost.max_num_seqs:
            answers, k, index = self._waiting.popleft()
            if index == answers.to_make[k][0]:
                self.at += self.cost.prefill_s * answers.prompt_tokens[k]
            last = self._steps + int(answers.lengths[k][index])
            heapq.heappush(self._running, (last, next(self._order), self._steps, answers, k, index))

    def _publish(self, answers: _Answers, responses: list[tuple[int, int]]) -> None:
        """Hand over responses that ended in one step, each the prompt and its number."""
        rows = answers.rows
        assert rows.first_children is not None
        prompts = [k for k, _ in responses]
        lengths = np.array([answers.lengths[k][index] for k, index in responses], np.int64)
        ids = rows.first_children[prompts] + np.array([index for _, index in responses], np.int64)
        finished = [k for k in dict.fromkeys(prompts) if not answers.left[k]]
        knows = str(RESPONSE_VERSIONS) in rows.writes
        versions = np.array([answers.versions[k][index] for k, index in responses], np.int64) if knows else None
        answers.open -= len(finished)
        tokens = float(lengths.sum())
        metrics: Metrics = {"tokens": Sum(tokens), "response_length": Mean(tokens, float(len(lengths)))}
        segment = self._invent(BYTES_PER_TOKEN * int(tokens))
        rank = next((rank for rank, task in answers.tasks if task.keep), answers.tasks[0][0])
        newest = self._versions[-1] if knows else -1
        published = Published(ids, lengths, versions, rows.ids[prompts], rows.ids[finished], newest)
        self._say(self.at, answers.call, rank, Reply(published, segment, metrics))
        if not answers.open:
            self._done(answers, self.at)

    def _done(self, answers: _Answers, at: float) -> None:
        for rank, _ in answers.tasks:
            self._say(at, answers.call, rank, Reply(done=True, seconds=at - answers.started))

    def _end_work(self) -> None:
        work = self._works.popleft()
        self.at += work.seconds
        if work.version is not None:
            self._changes.append(self._steps)
            self._versions.append(work.version)
        for rank, reply in work.replies:
            self._say(self.at, work.call, rank, reply)
        if not self._works:
            self._admit()


# What a run cannot beat


@dataclass(frozen=True)
class Bound:
    """The time of the slowest stage alone."""

    seconds: float
    """A step, on average."""
    pool: str
    """Whose groups it keeps busy all the time."""
    pools: Mapping[str, float]
    """Pool -> seconds a step that its groups are busy at least."""


def bound(
    costs: CostModel,
    graph: Graph,
    placement: Placement | None = None,
    *,
    prompts_per_step: int,
    steps: int = 1,
    seed: int = 0,
    shuffle: bool = True,
) -> Bound:
    """Seconds a step that no schedule can beat in this placement: for each pool what its groups have to do, perfectly
    balanced, generation always at its best batch, nobody waiting for anybody, weights and the driver for nothing.

    Args:
        steps: whose rows are counted: the first so many of a run.
        seed: of the driver, for the order of the prompts.
        shuffle: as the schedule says.

    Filters are taken to drop nothing.
    """
    places = resolve(placement, {**graph.handles, FUNCTIONS: None})
    busy: Counter[str] = Counter()
    rows, tokens = _load(costs, graph, prompts_per_step * steps, seed, shuffle)
    for node in graph.nodes:
        group = node.group or FUNCTIONS
        replicas = places[group].ranks // costs.ranks_per_replica.get(group, 1)
        cost = costs.nodes.get(node.name, LinearCost())
        if isinstance(cost, Generation):
            assert node.makes_level is not None
            made = tokens[node.makes_level] - tokens[node.level] * rows[node.makes_level] / rows[node.level]
            best = float((cost.steps_s[1:] / np.arange(1, cost.max_num_seqs + 1)).min())
            seconds = (made * best + tokens[node.level] * cost.prefill_s) / replicas
        else:
            seconds = steps * cost.fixed_s + cost.seconds(
                rows[node.level] / replicas, tokens[node.level] / replicas, fixed=False
            )
        busy[places[group].pool.name] += seconds / steps  # pyright: ignore[reportArgumentType]
    pool = max(busy, key=lambda name: busy[name])
    return Bound(float(busy[pool]), pool, dict(busy))


def _load(costs: CostModel, graph: Graph, groups: int, seed: int, shuffle: bool) -> tuple[Counter[int], Counter[int]]:
    """Rows of each level, and their tokens, in the first so many groups of a run."""
    batch = Batch.of_table(graph.source.table)
    lengths = num_tokens(batch)
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    makers = [n for n in graph.nodes if n.makes_level is not None]
    for number, position in enumerate(itertools.islice(positions(len(batch), seed, shuffle=shuffle), groups)):
        sizes: dict[int, list[tuple[list[int], int]]] = {SOURCE: [([], int(lengths[position]))]}
        for node in makers:
            n, cost = int(node.arguments.get("n", 1)), costs.nodes.get(node.name)
            made = sizes.setdefault(node.makes_level or SOURCE, [])
            for path, own in sizes[node.level]:
                key = draw_key(costs.seed, "train", position, number // len(batch), path)
                drawn = cost.lengths.draw(key, position, n) if isinstance(cost, Generation) else np.zeros(n, np.int64)
                made += [([*path, k], own + int(length)) for k, length in enumerate(drawn)]
        for level, own in sizes.items():
            rows[level] += len(own)
            tokens[level] += sum(size for _, size in own)
    return rows, tokens


# From a real run


def calibrate(
    timeline: pa.Table | Path,
    *,
    replicas: Mapping[str, int] | None = None,
    nodes: Mapping[str, LinearCost | Generation] | None = None,
    **others: Any,
) -> CostModel:
    """CostModel of the nodes of a real run, fitted to its timeline by least squares with no cost below zero. Of lines that
    fit alike (calls all had as many rows, say) the one of the fewest terms is taken: tokens first, then the constant, then rows.

    How long responses are is not in a timeline: the `Generation` of a node that generates is to be given. Updates that came in
    parts have their constant with the last.

    Args:
        timeline: a `timeline.parquet`, its columns group, node, worker_s, rows, tokens, and last, if it is there; or the folder
            of a run, whose `config.json` says how many ranks each group had.
        replicas: group -> replicas that shared the rows of a call; 1 where it is not mentioned.
        nodes: costs that are known, which are taken as they are.
        others: further settings of `CostModel`.

    Raises:
        UserError: when the timeline lacks a column.
    """
    counts: dict[str, int] = {}
    if isinstance(timeline, Path):
        if timeline.is_dir():
            counts = _ranks(timeline / "config.json")
            table = read_timeline(timeline)
        else:
            table = pq.read_table(timeline)
        if table is None:
            raise UserError(f"{timeline} has no timeline: nothing was called yet, or it is not the directory of a run")
    else:
        table = timeline
    counts |= dict(replicas or {})
    for column in ("group", "node", "worker_s", "rows", "tokens"):
        if column not in table.column_names:
            raise UserError(
                f"the timeline has no column {column!r}; calibrate() needs group, node, worker_s, rows, tokens"
            )
    calls: dict[str, list[tuple[float, float, float, float]]] = {}
    last = table["last"].to_pylist() if "last" in table.column_names else [True] * len(table)
    for group, node, seconds, rows, tokens, whole in zip(
        *(table[c].to_pylist() for c in ("group", "node", "worker_s", "rows", "tokens")), last, strict=True
    ):
        known = group == FUNCTIONS or node.startswith(f"{group}.")
        share = counts.get(group, 1)
        calls.setdefault(node if known else f"{group}.{node}", []).append(
            (seconds, rows / share, tokens / share, float(whole))
        )
    fitted = {name: _fit(np.array(own, float)) for name, own in calls.items()}
    return CostModel(nodes={**fitted, **(nodes or {})}, **others)


def _ranks(config: Path) -> dict[str, int]:
    """Ranks of each group of a run; in one process, one."""
    described = json.loads(config.read_text())
    if described.get("backend") == "Local()":
        return {}
    return {name: place["ranks"] for name, place in described["placement"].items() if isinstance(place, dict)}


def _fit(calls: np.ndarray) -> LinearCost:
    """[calls, (seconds, rows, tokens, constants)] -> the line with no slope below zero, of the fewest terms, that is closest."""
    seconds, terms = calls[:, 0], calls[:, [2, 1, 3]]
    found: tuple[float, np.ndarray] = float(seconds @ seconds), np.zeros(3)
    for chosen in ([0], [2], [1], [0, 2], [0, 1], [1, 2], [0, 1, 2]):
        if np.linalg.matrix_rank(terms[:, chosen]) < len(chosen):
            continue
        weights = np.linalg.lstsq(terms[:, chosen], seconds, rcond=None)[0]
        error = float(((terms[:, chosen] @ weights - seconds) ** 2).sum())
        if (weights >= 0).all() and error < found[0] * (1 - 1e-6) - 1e-12:
            line = np.zeros(3)
            line[chosen] = weights
            found = error, line
    per_token, per_row, fixed = found[1].tolist()
    return LinearCost(fixed_s=fixed, per_row_s=per_row, per_token_s=per_token)
