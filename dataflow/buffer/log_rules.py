"""Rules for rows, and the checker that finds the events of a log that break them.

    checker = Checker()
    for record in LogReader(path):
        for violation in checker.feed(record):
            print(violation, violation.rule.value)
    violations = checker.end_log()

`weft buffer check` does this for the log of a run (`check.py`). To add a rule:

1. Name it in `Rule`.
2. In the method of the event that can break it (`_claim`, `_publish`, ...), compare the event with
   the rows in flight (`logged_rows.py`).
3. Add a log that breaks the rule to `WRONG` in `tests/dataflow/buffer/test_log_rules.py`.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BrokenRule, nearest
from ..operation import Shape
from ..runs.log import Record, described_graph
from .events import RESTARTED
from .logged_rows import (
    LoggedGraph,
    LoggedGroup,
    LoggedLease,
    LoggedNode,
    LoggedRow,
    LoggedRows,
    segments_of_rows,
)

# Rules


class Rule(enum.Enum):
    """The rules for rows. `weft buffer check` prints each broken rule."""

    KNOWN_RECORD = (
        "a record is of a known kind, has all its fields, and names graphs and nodes that exist"
    )
    NEW_ID = "a sample id or group id is assigned once and in order; a child's id is one of those reserved for its lease"
    READY = "a node claims rows of its level that all nodes before it are done with"
    ONCE = "a node consumes a row at most once: a row that is not leased, that it has not consumed, and that was not dropped"
    COMPLETE_GROUP = (
        "a node that takes groups claims or drops complete groups, which can get no more rows"
    )
    QUORUM = "a quorum takes the first rows of a group that were ready"
    LEASE = "only the holder of an open lease publishes, finishes or releases rows, and only rows of that lease"
    NOTHING_LEFT_OUT = "a map or a group publishes all rows of its lease"
    STALENESS = "no update trains on rows that are older than its bound, unless they are masked"
    OLDEST_FIRST = "an update takes the ready groups with the oldest versions first"
    STEP = "an update is part of the current step"
    ONE_UPDATE = "a step is one update: each group that is trained gets one new version in it"
    ONE_WRITER = "a restarted run holds no lease from before the restart, and its epoch is larger than all earlier ones"
    ACCOUNTED = "every row is exactly one of waiting, leased, done or dropped"
    SOUND_LOG = "each record of the log follows the one before"
    CHECKPOINT = "a checkpoint and the log agree on the rows in flight"
    SAMPLES = (
        "the samples are the rows that were recorded according to the log, each once, under its step"
    )


@dataclass(frozen=True)
class Violation:
    """A broken rule, and where the log breaks it."""

    rule: Rule
    text: str
    at: int | None = None
    """Byte offset of the record that breaks the rule; None if it is not a single record."""

    def __str__(self) -> str:
        return self.text if self.at is None else f"byte {self.at}: {self.text}"


# Checker


class Checker:
    """Checks each event of a run's log against the rows in flight."""

    def __init__(
        self,
        *,
        on_finished: Callable[[LoggedGroup, Mapping[int, LoggedRow]], None] | None = None,
        on_recorded: Callable[[str, int, Mapping[int, int]], None] | None = None,
        keep_parts: bool = False,
    ) -> None:
        """
        Args:
            on_finished: function of (group, mapping from sample id to row in flight), called for
                each finished group.
            on_recorded: function of (graph, lease number, mapping from sample id to step of the
                rows to record), called for each finished lease of a recorder.
            keep_parts: whether to keep the segments of rows in flight.
        """
        self._handlers: Mapping[str, Callable[[Record], None]] = {
            "claim": self._claim,
            "publish": self._publish,
            "finish": self._finish,
            "release": self._release,
            "issue": self._issue,
            "drop": self._drop,
            "lose": self._lose,
            "offer": self._offer,
            "graph": self._graph,
            "source": self._source,
            "note": self._note,
            "ids": self._begin_ids,
            "epoch": self._begin_epoch,
        }
        self.graphs: dict[str, LoggedGraph] = {}
        self.rows = LoggedRows(on_finished, keep_parts=keep_parts)
        self.notes: dict[str, Any] = {}
        self.sources: dict[str, Sequence[Any]] = {}
        self.segments: set[tuple[str, str, int]] = set()
        self.lease_counts = Counter(granted=0, finished=0, released=0)
        self.restarts = 0
        self._on_recorded = on_recorded
        self._ended: dict[tuple[str, int], str] = {}
        self._versions: dict[str, list[int]] = {}
        self._restarting = False
        self._epoch = 0
        self.at = 0
        self._violations: list[Violation] = []

    def feed(self, record: Record, at: int = 0) -> list[Violation]:
        """Process the event at byte `at` of the log, and return its violations."""
        self.at, self._violations = at, []
        try:
            # A restart logs its epoch, released leases and lost groups. Other records end it.
            released = record["do"] in ("lose", "epoch") or record.get("why") == RESTARTED
            if self._restarting and not released:
                self._end_restart()
            handler = self._handlers.get(record["do"])
            if handler is None:
                raise BrokenRule(
                    "no such record is known; the log was written by another version", Rule.KNOWN_RECORD
                )
            handler(record)
        except BrokenRule as broken:
            assert isinstance(broken.rule, Rule)
            self._break(broken.rule, f"{record['do']}: {broken}")
        # A record of another version must not end the check.
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"the record lacks what it needs ({type(error).__name__}: {error})"
            self._break(Rule.KNOWN_RECORD, f"{record.get('do')}: {what}")
        # Last, because the checks of this event may refer to finished groups.
        self.rows.forget_finished_groups()
        return self._violations

    def end_log(self) -> list[Violation]:
        """Return violations that are not due to a single event."""
        self._violations = []
        if self._restarting:
            self._end_restart()
        problems: list[str] = []
        for name, counts in self.rows.counts().items():
            graph = self.graphs[name]
            total = counts.waiting + counts.leased + counts.done + counts.dropped.total()
            if total != counts.issued:
                problems.append(f"{name!r}: {counts.issued} rows were issued, {total} are accounted for")
            for row in (row for row in self.rows.in_flight.values() if row.group.graph is graph):
                for node in graph.on_level[row.level]:
                    states = (node.waiting, node.leased, node.done, node.dropped)
                    if sum(row.id in ids for ids in states) != 1:
                        problems.append(
                            f"{name!r}: row {row.id} is in no state, or in two, at node {node.name!r}"
                        )
        self._violations += [Violation(Rule.ACCOUNTED, f"graph {problem}") for problem in problems]
        return self._violations

    def _break(self, rule: Rule, text: str) -> None:
        self._violations.append(Violation(rule, text, self.at))

    # The run and its graphs

    def _begin_epoch(self, record: Record) -> None:
        epoch = record["epoch"]
        if epoch <= self._epoch:
            who = f"host {record['host']!r}, process {record['pid']}, since {record['since']}"
            said = f"epoch {epoch} ({who}) begins after epoch {self._epoch}: two drivers wrote this log"
            self._break(Rule.ONE_WRITER, said)
        # The first epoch is not a restart.
        if self._epoch:
            self.restarts += not self._restarting
            self._restarting = True
        self._epoch = max(epoch, self._epoch)

    def _end_restart(self) -> None:
        self._restarting = False
        for (graph, number), lease in self.rows.leases.items():
            who = f"lease {number} of node {lease.node.name!r} in graph {graph!r}, claimed at byte {lease.at},"
            self._break(Rule.ONE_WRITER, f"the run was started again, but {who} was not released")

    def _note(self, record: Record) -> None:
        key, value = record["key"], record["value"]
        if key.startswith("version/"):
            self._count_update(key.removeprefix("version/"), value)
        elif key == "step":
            for name, at in self._versions.items():
                if not at:
                    problem = f"note: step {value} ended without an update of {name!r}"
                    self._break(Rule.ONE_UPDATE, problem)
                at.clear()
        self.notes[key] = value

    def _count_update(self, name: str, version: Any) -> None:
        nodes = (node.node for graph in self.graphs.values() for node in graph.nodes)
        allowed = sum(node.operation.updates and node.group == name for node in nodes)
        made = self._versions.setdefault(name, [])
        made.append(self.at)
        # A worker group may have several update nodes.
        if len(made) > max(allowed, 1):
            step = self.notes.get("step", 0) + 1
            problem = f"version {version} of {name!r} is update {len(made)} of step {step}, whose first is at byte {made[0]}"
            self._break(Rule.ONE_UPDATE, f"note: {problem}")

    def _begin_ids(self, record: Record) -> None:
        if self.rows.next_id or self.rows.next_group:
            raise BrokenRule(
                "a log may begin with other ids than 0, but this one has given out some", Rule.NEW_ID
            )
        self.rows.next_id, self.rows.next_group = record["next_id"], record["next_group"]

    def _graph(self, record: Record) -> None:
        name = record["graph"]
        if name not in self.graphs:
            self.graphs[name] = graph = LoggedGraph(name, described_graph(record))
            self.rows.add_graph(graph)

    def _source(self, record: Record) -> None:
        self.sources[self._graph_of(record).name] = record["segment"]
        self._refer(record["segment"])

    def _graph_of(self, record: Record) -> LoggedGraph:
        graph = self.graphs.get(record["graph"])
        if graph is None:
            raise BrokenRule(f"graph {record['graph']!r} was not recorded", Rule.KNOWN_RECORD)
        return graph

    def _node_of(self, record: Record) -> LoggedNode:
        graph, name = self._graph_of(record), record["node"]
        if name not in graph.by_name:
            problem = f"graph {graph.name!r} has no node {name!r}{nearest(name, graph.by_name)}"
            raise BrokenRule(problem, Rule.KNOWN_RECORD)
        return graph.by_name[name]

    def _lease_of(self, record: Record) -> LoggedLease:
        key = self._graph_of(record).name, record["lease"]
        lease = self.rows.leases.get(key)
        if lease is None:
            ended = self._ended.get(key, "was never granted")
            raise BrokenRule(f"lease {key[1]} of graph {key[0]!r} {ended}", Rule.LEASE)
        return lease

    def _group_of(self, record: Record) -> LoggedGroup:
        group = self.rows.groups.get(record["group"])
        if group is None or group.graph is not self._graph_of(record):
            problem = f"group {record['group']} of graph {record['graph']!r} is not in flight"
            raise BrokenRule(problem, Rule.KNOWN_RECORD)
        return group

    def _refer(self, segment: Sequence[Any]) -> None:
        self.segments.add((segment[0], segment[1], segment[2]))

    # Rows come in

    def _issue(self, record: Record) -> None:
        graph, rows = self._graph_of(record), self.rows
        first, group = record["first"], record["group"]
        positions, tokens = record["positions"], record["tokens"]
        problem = ""
        if first < rows.next_id:
            problem = f"row {first} is issued, but ids below {rows.next_id} were given out before"
        elif first > rows.next_id:
            problem = f"row {first} is issued, but {rows.next_id} is next: a record is missing"
        if problem:
            self._break(Rule.NEW_ID, f"issue: {problem}")
        if group != rows.next_group:
            self._break(Rule.NEW_ID, f"issue: group {group} is issued, but {rows.next_group} is next")
        if len(positions) != len(tokens):
            problem = f"{len(positions)} rows have {len(tokens)} numbers of tokens"
            raise BrokenRule(problem, Rule.KNOWN_RECORD)
        # Continue after the gap, to report it only once.
        rows.next_id, rows.next_group = max(rows.next_id, first), max(rows.next_group, group)
        for position, number in zip(positions, tokens, strict=True):
            rows.issue_row(graph, record["step"], position, number)

    # Rows are claimed

    def _claim(self, record: Record) -> None:
        graph, node = self._graph_of(record), self._node_of(record)
        number, ids, stale = record["lease"], record["ids"], record.get("stale")
        who = node.describe_lease(number)
        # Lease numbers increase, so a smaller one was granted before.
        if number <= graph.last_lease:
            raise BrokenRule(f"{who} was granted before", Rule.LEASE)
        graph.last_lease = number
        too_old = self._set_aside(graph, node, record, who) if stale else []
        taken = self._ready(graph, node, ids, f"claim: {who} takes")
        if node.takes_groups:
            self._check_groups(node, taken, f"claim: {who} takes")
        if stale:
            self._check_age(taken, stale, who)
            for group in too_old:
                self.rows.reject(group, node, stale[2])
        if node.node.operation.updates:
            self._check_order(graph, node, taken, who)
        # A claim may take no rows and only set groups aside.
        if not ids:
            if not stale:
                raise BrokenRule(f"{who} takes no rows", Rule.KNOWN_RECORD)
            return
        self.rows.lease(graph, number, node, [id for id in ids if id in taken], self.at)
        self.lease_counts["granted"] += 1

    def _ready(self, graph: LoggedGraph, node: LoggedNode, ids: Sequence[int], what: str) -> set[int]:
        """Return the rows that a node may take. Report the others as violations."""
        taken = set(ids)
        if (
            len(taken) == len(ids)
            and taken <= node.waiting
            and node.is_ready(taken, self.rows.in_flight)
        ):
            return taken
        taken = set[int]()
        for id in ids:
            if id in taken:
                self._break(Rule.ONCE, f"{what} row {id}, which it holds already (lease of this claim)")
            elif id in node.waiting and node.is_ready({id}, self.rows.in_flight):
                taken.add(id)
            else:
                rule, problem = self._why_not(graph, node, id)
                self._break(rule, f"{what} row {id}, {problem}")
        return taken

    def _why_not(self, graph: LoggedGraph, node: LoggedNode, id: int) -> tuple[Rule, str]:
        row = self.rows.in_flight.get(id)
        if row is None:
            ended = "is finished, or " if id < self.rows.next_id else ""
            return Rule.ONCE, f"which {ended}was never made"
        of = f"of group {row.group.id}, "
        if row.group.graph is not graph:
            return Rule.READY, f"{of}which is of graph {row.group.graph.name!r}"
        if row.level != node.level:
            names = graph.level_names
            return Rule.READY, f"{of}which is of level {names[row.level]!r}, not {names[node.level]!r}"
        if id in node.leased:
            leases = self.rows.leases.items()
            numbers = (n for (_, n), lease in leases if lease.node is node and id in lease.ids)
            return Rule.ONCE, f"{of}which it holds already (lease {next(numbers, '?')})"
        if id in node.done:
            return Rule.ONCE, f"{of}which it has consumed before"
        if id in node.dropped:
            return Rule.ONCE, f"{of}which was dropped before it ({row.reason})"
        missing = [name for name in node.node.after if not graph.has_passed(row, graph.by_name[name])]
        return Rule.READY, f"{of}with which {', '.join(missing)} is not done"

    def _check_groups(self, node: LoggedNode, ids: Iterable[int], what: str) -> None:
        for group, taken in self.rows.by_group(ids).items():
            rule, problem = Rule.COMPLETE_GROUP, _incomplete(group, node, taken)
            if node.quorum:
                rule, problem = Rule.QUORUM, _not_the_first(group, node, taken)
            if problem:
                self._break(rule, f"{what} {len(taken)} rows of group {group.id}: {problem}")
            node.held_back.discard(group.id)
            if node.quorum and node not in group.chosen:
                self.rows.choose(group, node, taken)

    # Rows are too old

    def _set_aside(
        self, graph: LoggedGraph, node: LoggedNode, record: Record, who: str
    ) -> list[LoggedGroup]:
        """Return the ready groups that a claim sets aside."""
        ids, limit, named = record["ids"], record.get("groups"), record.get("too_old")
        version, bound, fate = record["stale"]

        def is_too_old(group: LoggedGroup) -> bool:
            rows = (self.rows.in_flight[id] for id in group.levels[node.level] - node.dropped)
            return any(row.age(version) > bound for row in rows)

        waits = named is None or fate == "wait"
        held_back = node.held_back if waits else ()
        node.held_back = {id for id in held_back if is_too_old(self.rows.groups[id])}
        if fate == "mask":
            return []  # the claim takes old groups like all others
        taken = {row.group.id for id in ids if (row := self.rows.in_flight.get(id))}
        # Formats up to 5 checked groups in order of ids, until the claim was full.
        full = named is None and limit is not None and len(taken) >= limit
        last = max(taken, default=-1) if full else self.rows.next_group
        found: dict[int, LoggedGroup] = {}
        for group in self.rows.groups.values():
            if group.id > last:
                break
            if group.id not in taken and self._is_ready(graph, group, node) and is_too_old(group):
                found[group.id] = group
        if named is None:
            return list(found.values())
        if set(named) != found.keys():
            those = f"groups {sorted(named)} aside as too old; those are {sorted(found)}"
            self._break(Rule.STALENESS, f"claim: {who} sets {those}")
        return [found[id] for id in named if id in found]

    def _is_ready(self, graph: LoggedGraph, group: LoggedGroup, node: LoggedNode) -> bool:
        if group.graph is not graph or group.id in node.held_back:
            return False
        rows = group.levels[node.level] & node.waiting
        return bool(rows) and graph.is_complete(group, node) and node.is_ready(rows, self.rows.in_flight)

    def _check_order(self, graph: LoggedGraph, node: LoggedNode, taken: Iterable[int], who: str) -> None:
        groups = {row.group for id in taken for row in [self.rows.in_flight[id]]}
        youngest = max(groups, key=lambda group: self._oldest(group, node), default=None)
        if youngest is None:
            return
        newest = self._oldest(youngest, node)
        for group in self.rows.groups.values():
            if group.graph is not graph or group in groups or self._oldest(group, node) >= newest:
                continue
            if self._is_ready(graph, group, node):
                takes = f"takes group {youngest.id}, of version {newest:.0f}"
                leaves = f"leaves group {group.id}, of version {self._oldest(group, node):.0f}"
                self._break(Rule.OLDEST_FIRST, f"claim: {who} {takes}, and {leaves}")
                return

    def _oldest(self, group: LoggedGroup, node: LoggedNode) -> float:
        """Return the oldest version of a group's rows at a node; inf if no policy generated them."""
        rows = (self.rows.in_flight[id] for id in group.levels[node.level] - node.dropped)
        versions = (row.version for row in rows if row.version is not None and row.version >= 0)
        return min(versions, default=math.inf)

    def _check_age(self, ids: Iterable[int], stale: Sequence[Any], who: str) -> None:
        version, bound, fate = stale
        old = [row for id in sorted(ids) if (row := self.rows.in_flight[id]).age(version) > bound]
        if old and fate == "mask":
            self.rows.count_stale(old[0].group.graph, fate, len({row.group for row in old}))
        elif old:
            row = old[0]
            age = f"row {row.id} of group {row.group.id}, of version {row.version}"
            limit = f"for version {version} with a bound of {bound} ({fate})"
            self._break(Rule.STALENESS, f"claim: {who} takes {age}, {limit}")

    # Rows are published

    def _publish(self, record: Record) -> None:
        lease, ids, tokens = self._lease_of(record), record["ids"], record["tokens"]
        node, parents, versions = lease.node, record.get("parents"), record.get("versions")
        who = node.describe_lease(record["lease"])
        if (parents is None) != (node.node.makes_level is None):
            problem = "new rows without parents" if parents is None else "parents of rows of a map"
            raise BrokenRule(f"{who}: {problem}", Rule.KNOWN_RECORD)
        if any(x is not None and len(x) != len(ids) for x in (tokens, parents, versions)):
            problem = f"of {len(ids)} rows, parents, tokens or versions are more or fewer"
            raise BrokenRule(f"{who}: {problem}", Rule.KNOWN_RECORD)
        if len(set(ids)) != len(ids):
            raise BrokenRule(f"{who} publishes a row twice", Rule.ONCE)
        foreign = set[int](parents or ()) - lease.open
        self._check_own(foreign, f"publish: {who} makes a row of")
        if parents is not None:
            self._check_children(lease, ids, parents, f"publish: {who} makes")
        finished = set[int](ids if parents is None else record["finished"])
        verb = "publishes" if parents is None else "finishes"
        # `foreign` rows are reported above.
        self._check_own(finished - lease.open - foreign, f"publish: {who} {verb}")
        # Continue with the valid rows only.
        finished &= lease.open
        lease.open -= finished
        if "segment" in record:
            self._refer(record["segment"])
        for _, *segment in record.get("segments", ()):
            self._refer(segment)
        if "segments" in record and (node.takes_groups or len(segments_of_rows(record)) != len(ids)):
            raise BrokenRule(f"{who}: its segments do not hold {len(ids)} rows", Rule.KNOWN_RECORD)
        if node.takes_groups:
            lease.staged.append((record, finished))
        else:
            self.rows.accept(node, record, finished)

    def _check_own(self, foreign: set[int], what: str) -> None:
        for id in sorted(foreign):
            self._break(Rule.LEASE, f"{what} row {id}, which is not, or no longer, its own")

    def _check_children(
        self, lease: LoggedLease, ids: Sequence[int], parents: Sequence[int], what: str
    ) -> None:
        level = lease.node.node.makes_level
        assert level is not None
        for id, parent in ((i, p) for i, p in zip(ids, parents, strict=True) if p in lease.open):
            aside = self.rows.in_flight[parent].group.ids_aside[parent, level]
            if id in lease.made or id in self.rows.in_flight:
                self._break(Rule.NEW_ID, f"{what} row {id}, which was made before")
            elif id not in aside:
                those = f"ids {aside.start} to {aside.stop - 1} are set aside for it"
                self._break(Rule.NEW_ID, f"{what} row {id} of row {parent}, but {those}")
        lease.made.update(ids)

    # Leases end

    def _finish(self, record: Record) -> None:
        lease = self._lease_of(record)
        node, who = lease.node, lease.node.describe_lease(record["lease"])
        if "step" in record:
            step, current = record["step"], self.notes.get("step", 0) + 1
            if step != current:
                problem = f"{who} is of step {step}, but step {current} was under way"
                self._break(Rule.STEP, f"finish: {problem}")
            for id in lease.ids:
                self.rows.in_flight[id].group.trained_in = step
        every = self.notes.get("record_every", 0)
        if node.node.operation.behind and self._on_recorded is not None and every:
            self._on_recorded(record["graph"], record["lease"], self._recorded(lease, every))
        for published, finished in lease.staged:
            self.rows.accept(node, published, finished)
        left = lease.open
        shape = node.node.operation.shape
        if left and shape in (Shape.MAP, Shape.GROUP):
            problem = f"finish: {who} leaves {len(left)} of its rows out (sample ids {sorted(left)[:3]})"
            self._break(Rule.NOTHING_LEFT_OUT, problem)
        if shape is Shape.FILTER:
            for id in sorted(left):
                self.rows.drop_below(self.rows.in_flight[id], node, node.name)
        self.rows.mark_done(node, left)
        self._end_lease(record, "finished", "was finished")

    def _recorded(self, lease: LoggedLease, every: int) -> dict[int, int]:
        """Return the rows of a lease to record, as a mapping from sample id to step."""
        kept: dict[int, int] = {}
        for id in lease.ids:
            group = self.rows.in_flight[id].group
            step = group.trained_in if group.graph.updates else group.issued_in
            if step is not None and step % every == 0:
                kept[id] = step
        return kept

    def _release(self, record: Record) -> None:
        lease, why = self._lease_of(record), record["why"]
        node, who = lease.node, lease.node.describe_lease(record["lease"])
        if "ids" not in record:
            # Without epochs, only these releases show a restart.
            if why == RESTARTED:
                self.restarts += not self._restarting
                self._restarting = True
            self.rows.requeue(node, lease.ids if node.takes_groups else lease.open)
            self._end_lease(record, "released", f"was released ({why})")
            return
        if node.takes_groups:
            problem = "gives back some of its rows, but the node takes complete groups"
            raise BrokenRule(f"{who} {problem}", Rule.COMPLETE_GROUP)
        ids = set[int](record["ids"])
        self._check_own(ids - lease.open, f"release: {who} gives back")
        ids &= lease.open
        lease.open -= ids
        lease.ids -= ids
        self.rows.requeue(node, ids)

    def _end_lease(self, record: Record, end: str, said: str) -> None:
        key = record["graph"], record["lease"]
        del self.rows.leases[key]
        self._ended[key] = f"{said} at byte {self.at}"
        self.lease_counts[end] += 1

    # Rows go

    def _drop(self, record: Record) -> None:
        graph, node = self._graph_of(record), self._node_of(record)
        what = f"drop: node {node.name!r} does without"
        taken = self._ready(graph, node, record["ids"], what)
        for group, ids in self.rows.by_group(taken).items() if node.takes_groups else ():
            if problem := _incomplete(group, node, ids):
                self._break(
                    Rule.COMPLETE_GROUP, f"{what} {len(ids)} rows of group {group.id}: {problem}"
                )
        for id in sorted(taken):
            self.rows.drop_from(self.rows.in_flight[id], node, f"failed at {node.name}")

    def _offer(self, record: Record) -> None:
        node, group = self._node_of(record), self._group_of(record)
        who = f"group {group.id} is offered short to node {node.name!r}"
        if not node.quorum or not group.arrived.get(node):
            raise BrokenRule(f"{who}, for which no row is ready", Rule.QUORUM)
        if node in group.offered_short or node in group.chosen:
            raise BrokenRule(f"{who}, to which it was offered before", Rule.QUORUM)
        group.offered_short.add(node)

    def _lose(self, record: Record) -> None:
        group, again = self._group_of(record), record.get("again", True)
        for node in group.graph.nodes:
            if held := group.levels[node.level] & node.leased:
                raise BrokenRule(f"group {group.id} is lost while row {min(held)} is leased", Rule.ONCE)
        self.rows.lose(group, again=again)


def _incomplete(group: LoggedGroup, node: LoggedNode, taken: set[int]) -> str:
    """Return why these rows are not a complete group; empty if they are."""
    if left_out := group.levels[node.level] - taken - node.dropped:
        return f"row {min(left_out)} of the group is left out"
    if not group.graph.is_complete(group, node):
        return f"more rows of it can come from {group.graph.level_names[node.level]!r}"
    return ""


def _not_the_first(group: LoggedGroup, quorum: LoggedNode, taken: set[int]) -> str:
    """Return why a quorum may not take these rows; empty if it may."""
    if quorum in group.chosen:
        return "" if taken == group.chosen[quorum] else "its quorum was chosen before, and was another"
    arrived, short = group.arrived.get(quorum, {}), quorum in group.offered_short
    if len(taken) > quorum.quorum:
        return f"its quorum is {quorum.quorum}"
    if len(taken) == quorum.quorum:
        last = max(arrived[id] for id in taken)
        earlier = [id for id, when in arrived.items() if when < last and id not in taken]
        return f"row {min(earlier)} was ready before" if earlier else ""
    if not short and not group.graph.is_complete(group, quorum):
        return f"its quorum is {quorum.quorum}, more rows can come, and it was not offered short"
    if len(taken) < len(arrived):
        return f"{len(arrived)} were ready"
    unready = group.levels[quorum.level] - taken - quorum.dropped
    if unready and not short:
        return f"row {min(unready)} can still come, and it was not offered short"
    return ""
