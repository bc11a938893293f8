"""Proof: reads the log of a run and proves that its sample buffer kept its word, or says where it did not.

It shares nothing with the ledger but the form of the records: what the ledger does with heaps, counters and pushed
readiness is worked out here from the rows alone. A mistake in the one is not repeated in the other. It reads only, also
while the run goes on.

What is proven of each graph:

- every sample id is given out once, over all graphs of the run, and a child's is one of those set aside for the lease;
- a node claims rows that exist, are of its level, have everything done that it comes after, and that nobody holds;
- no node consumes a row twice, or one that was dropped before it;
- a node that takes groups claims all of a group, when no more rows of it can come; a quorum the first that were ready;
- a node does without rows alone that are ready for it, and not claimed; if it takes groups, without whole ones;
- only the holder of a live lease publishes, only rows of that lease, each once; a map or group leaves none out;
- a started run holds no lease of the run before it, and its epoch is larger than all before: one run has one writer;
- no update trains on rows older than its bound, but masked;
- an update's rows are of the step that was under way;
- the samples of a run, where it kept any, are those rows that the log says were recorded, each once, under its step;
- in the end every row is exactly one of waiting, leased, done or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError, Violation
from .log import LogReader, Position, Record, find_fork, read_checkpoint
from .rows import MAX_CHILDREN
from .sample_buffer import LOG, checkpoints
from .samples import FOLDER, Part, parts

MOST_VIOLATIONS = 1000
"""The proof stops there: what follows from a broken log is no news."""

RESTARTED = "the run was started again"
"""Why recovery releases the leases of those who are gone."""

_FOREIGN = "of another log, or of a future that was given up when the run went back; recovery passes it over"


@dataclass
class GraphProof:
    """What became of the rows of one graph. `issued` is the sum of the four others."""

    issued: int = 0
    waiting: int = 0
    leased: int = 0
    done: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows; a row is counted with the first reason that it was dropped for."""
    consumed: dict[str, int] = field(default_factory=dict)
    """Node -> rows that it is through with."""
    stale: dict[str, int] = field(default_factory=dict)
    """Fate -> groups that were too old when an update claimed them."""


@dataclass
class Proof:
    """What a log proves; it holds when there are no `violations`."""

    graphs: dict[str, GraphProof]
    records: int
    num_bytes: int
    """Of the sound part of the log."""
    leases: dict[str, int]
    """How many were granted, finished and released, and how many are open."""
    restarts: int
    """Epochs but the first; of a log without epochs, the restarts that found leases."""
    segments: int
    """Segments that the log refers to."""
    checkpoints: int
    """Sound ones, each of a position between two records."""
    damage: list[str]
    """A torn end of the log, unreadable checkpoints, and tails that were cut off when a run went back."""
    violations: list[str]
    """Each with the place in the log: the byte at which the record begins."""


def prove(folder: Path) -> Proof:
    """Read the log in a buffer's folder and prove it, and compare the samples beside that folder with it.

    Raises:
        UserError: when the folder holds no log.
    """
    samples = Samples(folder.parent)
    witness = LogVerifier(folder, on_recorded=samples.compare)
    for _ in witness.read():
        pass
    proof = witness.proof()
    proof.violations.extend(samples.violations)
    proof.damage.extend(samples.notes())
    return proof


class Samples:
    """The samples of a run, compared with the log lease by lease."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._parts: dict[tuple[str, int], list[Part]] = {}
        for part in parts(run):
            self._parts.setdefault((part.graph, part.lease), []).append(part)
        self.violations: list[str] = []
        self._uncompared = 0

    def compare(self, graph: str, lease: int, steps: Mapping[int, int]) -> None:
        """What was written under a lease must be these rows, each under its step."""
        found = self._parts.pop((graph, lease), [])
        if steps and not (self._run / FOLDER).is_dir():
            self._uncompared += len(steps)
            return
        filed: list[tuple[int, int]] = []
        for part in found:
            try:
                filed += [(id, part.step) for id in part.read()["sample_id"].to_pylist()]
            except (pa.ArrowException, OSError, KeyError) as error:
                self._complain(f"{part.path} cannot be read: {error}")
                return
        what = f"lease {lease} of graph {graph!r}"
        if missing := sorted(steps.keys() - {id for id, _ in filed}):
            self._complain(
                f"{what} recorded {len(steps)} rows, of which {len(missing)} are not there (sample ids {missing[:3]})"
            )
        times = Counter(id for id, _ in filed)
        if wrong := [id for id, number in times.items() if number > 1 or id not in steps]:
            self._complain(
                f"{what}: {len(wrong)} rows are there that it did not record, or more than once (sample ids {wrong[:3]})"
            )
        if wrong := [(id, step) for id, step in filed if steps.get(id, step) != step]:
            id, step = wrong[0]
            self._complain(f"{what}: sample {id} is filed under step {step}; it is of step {steps[id]}")

    def _complain(self, text: str) -> None:
        if len(self.violations) < MOST_VIOLATIONS:
            self.violations.append(f"samples: {text}")

    def notes(self) -> list[str]:
        """What is there and counts for nothing, and what could not be compared."""
        left = [part.path for own in self._parts.values() for part in own]
        found = [f"{path} is of a lease that was not finished: no reader takes it" for path in left]
        if self._uncompared:
            found.append(
                f"{self._run / FOLDER} is not there: {self._uncompared} rows that were recorded are not compared with it"
            )
        return found


class Row:
    """What the log says of a row. Bit i of each mask is node i of its graph."""

    __slots__ = (
        "away",
        "cancelled",
        "children",
        "done",
        "group",
        "held",
        "id",
        "level",
        "parent",
        "parts",
        "position",
        "reason",
        "tokens",
        "version",
    )

    def __init__(
        self, id: int, group: Group, parent: Row | None, level: int, position: int, tokens: int, version: int | None
    ) -> None:
        self.id = id
        self.group = group
        self.parent = parent
        self.level = level
        self.position = position
        self.tokens = tokens
        self.version = version
        self.done = self.held = self.away = self.cancelled = 0
        """Nodes that are through with it, hold it, and will never see it; quorums that were chosen without it."""
        self.reason = ""
        """Why it is away."""
        self.children: list[Row] = []
        self.parts: dict[str, Sequence[Any]] | None = None
        """Node -> the segment with what it wrote."""


class Group:
    """All rows that come from one issued row."""

    __slots__ = ("chosen", "claimed", "graph", "id", "levels", "open", "ready", "round", "short", "step", "tokens")

    def __init__(self, id: int, graph: GraphRules, round: int, tokens: int) -> None:
        self.id = id
        self.graph = graph
        self.round = round
        self.step: int | None = None
        """Step of the update that trained it last."""
        self.tokens = tokens
        self.levels: list[list[Row]] = [[] for _ in graph.on_level]
        self.open = 0
        """Pairs of a row and a node that has it still to do."""
        self.ready: dict[int, list[tuple[int, Row]]] = {}
        """Node with a quorum -> (number of the record, row) in the order in which rows became ready."""
        self.chosen: dict[int, set[int]] = {}
        """Node with a quorum -> the rows that it chose."""
        self.short = self.claimed = 0
        """Nodes that it was offered to short of its quorum, and that have claimed it."""


@dataclass
class NodeRules:
    """What an outline says of a node, and what follows from it."""

    index: int
    name: str
    shape: str
    level: int
    makes: int | None
    takes_groups: bool
    quorum: int
    writes: bool
    after: list[str]
    bit: int = 0
    records: bool = False
    needs: list[tuple[int, int]] = field(default_factory=list)
    """(level, mask of nodes) that must be done with a row's ancestor there."""
    downstream: list[NodeRules] = field(default_factory=list)
    servants: list[NodeRules] = field(default_factory=list)
    """Of a quorum: nodes that work for it and what follows it alone."""
    masters: int = 0
    """Quorums that this node works for alone."""


class GraphRules:
    """The rules of one graph, worked out from its outline."""

    def __init__(self, name: str, outline: Mapping[str, Any]) -> None:
        self.name = name
        self.nodes: list[NodeRules] = []
        for i, n in enumerate(outline["nodes"]):
            operation = n["operation"]
            takes = operation["takes"]
            groups, quorum = takes["kind"] != "rows", int(takes.get("n", 0))
            rules = NodeRules(i, n["name"], operation["shape"], n["level"], n["makes_level"], groups, quorum, False, [])
            rules.after, rules.writes, rules.bit = list(n["after"]), bool(n["writes"]), 1 << i
            rules.records = takes["kind"] == "finished groups"
            self.nodes.append(rules)
        self.by_name = {n.name: n for n in self.nodes}
        self.makers = {n.makes: n for n in self.nodes if n.makes is not None}
        self.level_names = {0: outline["source"]} | {level: n.name for level, n in self.makers.items()}
        self.on_level = [[n for n in self.nodes if n.level == lv] for lv in range(len(self.makers) + 1)]
        self.all = (1 << len(self.nodes)) - 1
        self.updates = any(n["operation"]["takes"]["kind"] == "training batch" for n in outline["nodes"])
        for node in self.nodes:
            line = self.line(node.level)
            masks: Counter[int] = Counter()
            for before in (self.by_name[a] for a in node.after):
                if before.makes not in line:  # else the row itself is the proof
                    masks[before.level] |= before.bit
            node.needs = sorted(masks.items())
            node.downstream = [n for n in self.nodes if n is not node and node.name in self.upstream(n)]
        self.quorums_after = [
            [q for q in self.nodes if q.quorum and (n.level, n.bit) in [(lv, m & n.bit) for lv, m in q.needs]]
            for n in self.nodes
        ]
        for quorum in self.nodes:
            if quorum.quorum:
                self._find_servants(quorum)

    def line(self, level: int) -> list[int]:
        """This level and those that it was expanded from."""
        return [0] if level == 0 else [level, *self.line(self.makers[level].level)]

    def upstream(self, node: NodeRules) -> set[str]:
        found: set[str] = set()
        for name in node.after:
            found |= {name} | self.upstream(self.by_name[name])
        return found

    def _find_servants(self, quorum: NodeRules) -> None:
        served = {quorum.name, *(n.name for n in quorum.downstream)}
        for node in reversed(self.nodes):  # recorded before the quorum or after it, on a branch of its own
            if node.name in served:
                continue
            users = {n.name for n in self.nodes if node.name in n.after}
            alike = node.level == quorum.level and node.makes is None and not node.takes_groups
            if alike and users and users <= served:
                served.add(node.name)
                quorum.servants.append(node)
                node.masters |= quorum.bit


@dataclass
class LeaseNote:
    """What the log says of a lease."""

    node: NodeRules
    rows: list[Row]
    offset: int
    first_child: int
    open: dict[int, Row]
    made: set[int] = field(default_factory=set)
    """Rows that were made under it."""
    staged: list[tuple[Record, list[Row]]] = field(default_factory=list)
    """What was published of it and counts when it is finished (nodes that take groups)."""


class LogVerifier:
    """Reads a log from its beginning, knows of each row what was done with it, and believes no record."""

    def __init__(
        self,
        folder: Path,
        *,
        on_retired: Callable[[Group], None] | None = None,
        on_recorded: Callable[[str, int, Mapping[int, int]], None] | None = None,
        keep_parts: bool = False,
    ) -> None:
        """
        Args:
            on_recorded: told, of each lease of a recorder that is finished, its graph, its number, and the rows that are kept:
                sample id -> step.
            on_retired: told of each group when nothing is left to do with it, just before it is forgotten.
            keep_parts: remember where the columns of rows in flight lie.
        """
        if not (folder / LOG).exists():
            raise UserError(f"{folder} holds no log of a run ({LOG})")
        self.folder, self.log = folder, folder / LOG
        self.graphs: dict[str, GraphRules] = {}
        self.counts: dict[str, GraphProof] = {}
        self.rows: dict[int, Row] = {}
        self.groups: dict[int, Group] = {}
        self.notes: dict[str, Any] = {}
        self.sources: dict[str, Sequence[Any]] = {}
        """Graph -> the segment with the rows of its source."""
        self.violations: list[str] = []
        self.damage: list[str] = []
        self._on_retired, self._on_recorded, self._keep_parts = on_retired, on_recorded, keep_parts
        self._next_id = self._next_group = 0
        self._leases: dict[tuple[str, int], LeaseNote] = {}
        self._ended: dict[tuple[str, int], str] = {}
        self._last_token: Counter[str] = Counter()
        self._held_back: dict[tuple[str, int], set[int]] = {}
        """(graph, node) -> groups that are too old and wait for a larger bound."""
        self._unclaimed: dict[tuple[str, int], dict[int, Group]] = {}
        """(graph, update) -> groups that it has not claimed, oldest first."""
        self._closing: list[Group] = []
        self._segments: set[tuple[str, str, int]] = set()
        self._granted, self._finished, self._released = 0, 0, 0
        self._restarts, self._restarting = 0, False
        self._epoch = 0
        self._records, self._offset = 0, 0
        self._checkpoint_paths = checkpoints(folder)
        self._sound_checkpoints = 0

    @property
    def offset(self) -> int:
        """Byte at which the record that is taken in begins; in the end, of the end."""
        return self._offset

    @property
    def groups_issued(self) -> int:
        return self._next_group

    # Reading

    def read(self) -> Iterator[None]:
        """Take in the log, record by record."""
        places = self._places_of_checkpoints()
        reader, position = LogReader(self.log), Position()
        take = {
            "epoch": self._begin_epoch,
            "ids": self._begin_ids,
            "graph": self._graph,
            "source": self._source,
            "note": self._note,
            "issue": self._issue,
            "claim": self._claim,
            "publish": self._publish,
            "finish": self._finish,
            "release": self._release,
            "lose": self._lose,
            "drop": self._drop,
            "offer": self._offer,
        }
        for record in reader:
            self._offset = position.offset
            try:
                do = record["do"]
                if self._restarting and do not in ("lose", "epoch") and record.get("why") != RESTARTED:
                    self._end_restart()
                if do not in take:
                    raise Violation("no such record is known; the log was written by another version")
                take[do](record)
            except Violation as violation:
                self._complain(f"{record.get('do')}: {violation}")
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                self._complain(f"{record.get('do')}: the record lacks what it needs ({type(error).__name__}: {error})")
            for group in self._closing:
                if not group.open and group.id in self.groups:
                    self._retire(group)
            self._closing.clear()
            self._records += 1
            position = reader.end
            if position.offset in places:
                self._compare(places.pop(position.offset), position)
            if len(self.violations) >= MOST_VIOLATIONS:
                self.violations.append("... and more: the proof was given up here")
                return
            yield
        if self._restarting:
            self._end_restart()
        self._offset = position.offset
        if reader.damage:
            with self.log.open("rb") as file:
                file.seek(position.offset)
                lines = sum(1 for line in file if line.endswith(b"\n"))
            if lines:  # what a kill leaves behind is one line without an end; this was changed, or the disk lost a part
                fork = find_fork(self.log, position)
                why = (
                    "" if fork is None else f"; it goes on from byte {fork}: two processes appended to this log at once"
                )
                self.violations.append(f"{reader.damage}; {lines} whole lines from there on prove nothing{why}")
            else:
                self.damage.append(reader.damage)
        if not self._records:
            self.violations.append(f"{self.log} has no record: the run never began, or its log was emptied")
        for offset, path in places.items():
            if offset < position.offset:
                self.damage.append(f"{path.name}: {_FOREIGN}")
            else:
                self.damage.append(f"{path.name}: of byte {offset} of the log, of which {position.offset} can be read")

    def _places_of_checkpoints(self) -> dict[int, Path]:
        places: dict[int, Path] = {}
        for path in self._checkpoint_paths:
            try:
                position, _ = read_checkpoint(path)
            except (ValueError, OSError, KeyError) as error:
                if path.exists():  # the run deletes old ones
                    self.damage.append(str(error))
                continue
            if position == Position():
                self._sound_checkpoints += 1
            else:
                places[position.offset] = path
        return places

    def _compare(self, path: Path, position: Position) -> None:
        """A checkpoint must say of the rows in flight what the log up to its place says."""
        try:
            place, records = read_checkpoint(path)
        except (ValueError, OSError):
            return
        if place.checksum != position.checksum:
            self.damage.append(f"{path.name}: {_FOREIGN}")
            return
        self._sound_checkpoints += 1
        saved = {
            fields[0]: (fields[6], fields[8])  # done, leased
            for record in records
            if record["do"] == "group"
            for fields in record["rows"]
        }
        for id in sorted(saved.keys() ^ self.rows.keys()):
            where = "the checkpoint has not" if id in self.rows else "the log has not"
            self.violations.append(f"{path.name}: row {id} is in flight, which {where}")
        for id, row in self.rows.items():
            if id in saved and saved[id] != (row.done, row.held):
                self.violations.append(f"{path.name}: of row {id} the nodes done and leased are not those of the log")

    def _complain(self, text: str) -> None:
        self.violations.append(f"byte {self._offset}: {text}")

    def _end_restart(self) -> None:
        self._restarting = False
        for (graph, token), lease in self._leases.items():
            who = f"lease {token} of node {lease.node.name!r} in graph {graph!r}, claimed at byte {lease.offset},"
            self._complain(f"the run was started again, but {who} was not released")

    def _begin_epoch(self, record: Record) -> None:
        epoch = record["epoch"]
        if epoch <= self._epoch:
            who = f"host {record['host']!r}, process {record['pid']}, since {record['since']}"
            self._complain(f"epoch {epoch} ({who}) begins after epoch {self._epoch}: two drivers wrote this log")
        if self._epoch:
            self._restarts += not self._restarting
            self._restarting = True
        self._epoch = max(epoch, self._epoch)

    def _begin_ids(self, record: Record) -> None:
        if self._next_id or self._next_group:
            self._complain("ids: a log may begin with other ids than 0, but this one has given out some")
        self._next_id, self._next_group = record["next_id"], record["next_group"]

    # Rows come in

    def _graph(self, record: Record) -> None:
        name = record["graph"]
        if name not in self.graphs:
            self.graphs[name] = GraphRules(name, record["outline"])
            self.counts[name] = GraphProof(consumed=dict.fromkeys((n.name for n in self.graphs[name].nodes), 0))

    def _rules(self, record: Record) -> GraphRules:
        rules = self.graphs.get(record["graph"])
        if rules is None:
            raise Violation(f"graph {record['graph']!r} was not recorded")
        return rules

    def _note(self, record: Record) -> None:
        self.notes[record["key"]] = record["value"]

    def _source(self, record: Record) -> None:
        self.sources[self._rules(record).name] = record["segment"]
        self._refer(record["segment"])

    def _refer(self, segment: Sequence[Any]) -> None:
        self._segments.add((segment[0], segment[1], segment[2]))

    def _issue(self, record: Record) -> None:
        graph = self._rules(record)
        first, group, positions, tokens = record["first"], record["group"], record["positions"], record["tokens"]
        if first < self._next_id:
            self._complain(f"issue: row {first} is issued, but ids below {self._next_id} were given out before")
        elif first > self._next_id:
            self._complain(f"issue: row {first} is issued, but {self._next_id} is next: a record is missing")
        if group != self._next_group:
            self._complain(f"issue: group {group} is issued, but {self._next_group} is next")
        if len(positions) != len(tokens):
            raise Violation(f"{len(positions)} rows have {len(tokens)} numbers of tokens")
        self._next_id, self._next_group = max(self._next_id, first), max(self._next_group, group)
        for position, number in zip(positions, tokens, strict=True):
            self._root(graph, position, number, record["round"])

    def _root(self, graph: GraphRules, position: int, tokens: int, round: int) -> None:
        group = Group(self._next_group, graph, round, tokens)
        row = Row(self._next_id, group, None, 0, position, tokens, None)
        self._next_id += 1
        self._next_group += 1
        self.groups[group.id] = group
        for node in graph.nodes:
            if node.takes_groups:
                self._unclaimed.setdefault((graph.name, node.index), {})[group.id] = group
        self._add(row)

    def _add(self, row: Row) -> None:
        group = row.group
        graph = group.graph
        self.rows[row.id] = row
        group.levels[row.level].append(row)
        self.counts[graph.name].issued += 1
        nodes = graph.on_level[row.level]
        group.open += len(nodes)
        if not group.open:
            self._closing.append(group)
        for node in nodes:
            if node.quorum and node.index in group.chosen:
                self._cancel(row, node, f"late at {node.name}")
        for node in nodes if row.parent is not None else ():
            gone = (a for level, mask in node.needs if level != row.level and (a := _ancestor(row, level)).away & mask)
            if dropped := next(gone, None):  # before this row came
                self._take_away(row, node, dropped.reason, also_here=True)
        for node in nodes:
            if node.quorum and node.index not in group.chosen and _is_ready(row, node):
                group.ready.setdefault(node.index, []).append((self._records, row))

    # Rows are worked on

    def _claim(self, record: Record) -> None:
        graph, token, ids = self._rules(record), record["lease"], record["ids"]
        node = self._node(graph, record["node"])
        what = f"lease {token} of node {node.name!r}"
        if token <= self._last_token[graph.name]:
            raise Violation(f"{what} was granted before")
        self._last_token[graph.name] = token
        stale = record.get("stale")
        passed_over = self._passed_over(graph, node, ids, record.get("groups"), stale) if stale else []
        rows: list[Row] = []
        known = self.rows
        bit, level, needs = node.bit, node.level, node.needs
        here = needs[0][1] if len(needs) == 1 and needs[0][0] == level else None
        for id in ids:
            row = known.get(id)
            if (
                row is None
                or row.level != level
                or row.group.graph is not graph
                or (row.done | row.held | row.away) & bit
                or (row.done & here != here if here is not None else not _is_ready(row, node))
            ):
                self._complain(f"claim: {what} takes row {id}, {self._why_not(graph, node, id)}")
                continue
            row.held |= bit
            rows.append(row)
        if node.takes_groups:
            self._check_groups(node, rows, what)
        if stale:
            self._check_age(node, rows, stale, what)
            for group in passed_over:
                self._stale_fate(group, node, stale[2])
        if not ids:
            if not stale:
                self._complain(f"claim: {what} takes no rows")
            return
        first = self._next_id
        if node.makes is not None:
            self._next_id += len(ids) * MAX_CHILDREN
        self._leases[graph.name, token] = LeaseNote(node, rows, self._offset, first, {r.id: r for r in rows})
        self._granted += 1

    def _node(self, graph: GraphRules, name: str) -> NodeRules:
        if name not in graph.by_name:
            raise Violation(f"graph {graph.name!r} has no node {name!r}")
        return graph.by_name[name]

    def _why_not(self, graph: GraphRules, node: NodeRules, id: int) -> str:
        row = self.rows.get(id)
        if row is None:
            return "which is finished, or was never made" if id < self._next_id else "which was never made"
        of = f"of group {row.group.id}, "
        if row.group.graph is not graph:
            return f"{of}which is of graph {row.group.graph.name!r}"
        if row.level != node.level:
            return f"{of}which is of level {graph.level_names[row.level]!r}, not {graph.level_names[node.level]!r}"
        if row.held & node.bit:
            owners = (t for (g, t), lease in self._leases.items() if g == graph.name and _holds(lease, node, id))
            return f"{of}which it holds already (lease {next(owners, 'of this claim')})"
        if row.done & node.bit:
            return f"{of}which it has consumed before"
        if row.away & node.bit:
            return f"{of}which was dropped before it ({row.reason})"
        missing = [a for a in node.after if not _has_passed(row, graph.by_name[a], graph)]
        return f"{of}with which {', '.join(missing)} is not done"

    def _check_groups(self, node: NodeRules, rows: Iterable[Row], what: str) -> None:
        by_group: dict[Group, set[int]] = {}
        for row in rows:
            by_group.setdefault(row.group, set()).add(row.id)
        for group, taken in by_group.items():
            problem = self._check_quorum(group, node, taken) if node.quorum else _check_whole(group, node, taken)
            if problem:
                self._complain(f"claim: {what} takes {len(taken)} rows of group {group.id}: {problem}")
            group.claimed |= node.bit
            self._unclaimed[group.graph.name, node.index].pop(group.id, None)
            self._held_back.get((group.graph.name, node.index), set()).discard(group.id)
            if node.quorum and node.index not in group.chosen:
                self._close_quorum(group, node, taken)

    def _check_quorum(self, group: Group, node: NodeRules, taken: set[int]) -> str:
        if node.index in group.chosen:
            return "" if taken == group.chosen[node.index] else "its quorum was chosen before, and was another"
        ready = group.ready.get(node.index, [])
        if len(taken) < node.quorum:
            if not group.short & node.bit and not _is_whole(group, node.level):
                return f"its quorum is {node.quorum}, more rows can come, and it was not offered short"
            if len(taken) < len(ready):
                return f"{len(ready)} were ready"
            unready = [r.id for r in group.levels[node.level] if r.id not in taken and not r.away & node.bit]
            if unready and not group.short & node.bit:
                return f"row {unready[0]} can still come, and it was not offered short"
            return ""
        if len(taken) > node.quorum:
            return f"its quorum is {node.quorum}"
        last = max(when for when, row in ready if row.id in taken)
        earlier = [row.id for when, row in ready if when < last and row.id not in taken]
        return f"row {earlier[0]} was ready before" if earlier else ""

    def _close_quorum(self, group: Group, node: NodeRules, taken: set[int]) -> None:
        group.chosen[node.index] = taken
        for row in list(group.levels[node.level]):
            if row.id not in taken and not (row.away | row.done) & node.bit:
                self._cancel(row, node, f"over-issued at {node.name}")

    def _cancel(self, row: Row, node: NodeRules, reason: str) -> None:
        """A quorum was chosen without this row: work on it for the quorum alone is over too, but where it is under way."""
        self._take_away(row, node, reason, also_here=True)
        row.cancelled |= node.bit
        for servant in node.servants:
            if not row.held & servant.bit:
                self._skip(row, servant)

    def _passed_over(
        self, graph: GraphRules, node: NodeRules, ids: Sequence[int], limit: int | None, stale: Sequence[Any]
    ) -> list[Group]:
        """Groups that this claim found too old: ready ones, looked at by age until it had enough."""
        version, bound, _ = stale
        held_back = self._held_back.setdefault((graph.name, node.index), set())
        held_back &= {g for g in held_back if g in self.groups and _too_old(self.groups[g], node, version, bound)}
        taken = {row.group.id for id in ids if (row := self.rows.get(id))}
        last = max(taken, default=-1) if limit is not None and len(taken) >= limit else None
        found: list[Group] = []
        for id in sorted(self._unclaimed.get((graph.name, node.index), ())):
            if last is not None and id > last:
                break
            if id in taken or id in held_back:
                continue
            group = self.groups[id]
            rows = [r for r in group.levels[node.level] if not r.away & node.bit]
            if (
                _too_old(group, node, version, bound)
                and _is_whole(group, node.level)
                and all(_is_ready(r, node) for r in rows)
            ):
                found.append(group)
        return found

    def _check_age(self, node: NodeRules, rows: Iterable[Row], stale: Sequence[Any], what: str) -> None:
        version, bound, fate = stale
        old = [row for row in rows if _age(row, version) > bound]
        if old and fate == "mask":
            self._count_stale(old[0].group.graph, fate, len({r.group.id for r in old}))
        elif old:
            row = old[0]
            age = f"row {row.id} of group {row.group.id}, of version {row.version}"
            self._complain(f"claim: {what} takes {age}, for version {version} with a bound of {bound} ({fate})")

    def _count_stale(self, graph: GraphRules, fate: str, number: int = 1) -> None:
        stale = self.counts[graph.name].stale
        stale[fate] = stale.get(fate, 0) + number

    def _stale_fate(self, group: Group, node: NodeRules, fate: str) -> None:
        graph = group.graph
        if fate == "mask":
            return  # it is among the rows when it is claimed, and was left when the claim had enough
        self._count_stale(graph, fate)
        if fate == "wait":
            self._held_back.setdefault((graph.name, node.index), set()).add(group.id)
            return
        root = group.levels[0][0]
        if fate == "requeue":
            self._root(graph, root.position, group.tokens, group.round)
        for row in group.levels[node.level]:
            if not row.away & node.bit:
                self._take_away(row, node, f"stale at {node.name}", also_here=True)
        self._unclaimed[graph.name, node.index].pop(group.id, None)

    def _lease(self, record: Record) -> LeaseNote:
        key = self._rules(record).name, record["lease"]
        lease = self._leases.get(key)
        if lease is None:
            raise Violation(f"lease {key[1]} of graph {key[0]!r} {self._ended.get(key, 'was never granted')}")
        return lease

    def _publish(self, record: Record) -> None:
        lease, ids, tokens = self._lease(record), record["ids"], record["tokens"]
        node, parents, versions = lease.node, record.get("parents"), record.get("versions")
        what = f"lease {record['lease']} of node {node.name!r}"
        if (parents is None) != (node.makes is None):
            raise Violation(f"{what}: {'new rows without parents' if parents is None else 'parents of rows of a map'}")
        if len(tokens) != len(ids) or any(x is not None and len(x) != len(ids) for x in (parents, versions)):
            raise Violation(f"{what}: of {len(ids)} rows, parents, tokens or versions are more or fewer")
        if len(set(ids)) != len(ids):
            raise Violation(f"{what} publishes a row twice")
        rows: list[Row] = []
        for id in ids if parents is None else dict.fromkeys(parents):
            row = lease.open.pop(id, None)
            if row is None:
                verb = "publishes" if parents is None else "makes a row of"
                self._complain(f"publish: {what} {verb} row {id}, which is not, or no longer, its own")
            else:
                rows.append(row)
        if parents is not None:
            self._check_children(lease, ids, what)
        if "segment" in record:
            self._refer(record["segment"])
        if node.takes_groups:
            lease.staged.append((record, rows))
        else:
            self._accept(node, record, rows)

    def _check_children(self, lease: LeaseNote, ids: Sequence[int], what: str) -> None:
        end = lease.first_child + len(lease.rows) * MAX_CHILDREN
        for id in ids:
            if id in lease.made:
                self._complain(f"publish: {what} makes row {id}, which was made before")
            elif not lease.first_child <= id < end:
                aside = f"ids {lease.first_child} to {end - 1} are set aside for it"
                self._complain(f"publish: {what} makes row {id}, but {aside}")
        lease.made.update(ids)

    def _accept(self, node: NodeRules, record: Record, rows: Sequence[Row]) -> None:
        segment = record.get("segment") if self._keep_parts and node.writes else None
        if node.makes is not None:
            versions = record.get("versions")
            for k, (id, parent_id, tokens) in enumerate(
                zip(record["ids"], record["parents"], record["tokens"], strict=True)
            ):
                parent = self.rows.get(parent_id)
                if parent is None or id in self.rows:
                    continue  # complained about
                version = parent.version if versions is None else versions[k]
                child = Row(id, parent.group, parent, node.makes, parent.position, parent.tokens + tokens, version)
                if segment:
                    child.parts = {node.name: segment}
                parent.children.append(child)
                self._add(child)
        else:
            for id, tokens in zip(record["ids"], record["tokens"], strict=True):
                if (row := self.rows.get(id)) is not None:
                    row.tokens += tokens
                    if segment:
                        row.parts = {**(row.parts or {}), node.name: segment}
        self._done(node, rows)

    def _done(self, node: NodeRules, rows: Sequence[Row]) -> None:
        if not rows:
            return
        bit, graph = node.bit, rows[0].group.graph
        quorums = graph.quorums_after[node.index]
        self.counts[graph.name].consumed[node.name] += len(rows)
        for row in rows:
            row.done |= bit
            row.held &= ~bit
            group = row.group
            group.open -= 1
            if not group.open:
                self._closing.append(group)
            for quorum in quorums:
                for other in _below(row, quorum.level, graph):
                    if not (other.away & quorum.bit) and _is_ready(other, quorum):
                        group.ready.setdefault(quorum.index, []).append((self._records, other))

    def _finish(self, record: Record) -> None:
        lease = self._lease(record)
        node, what = lease.node, f"lease {record['lease']} of node {lease.node.name!r}"
        if "step" in record:
            self._train(lease, record["step"], what)
        if node.records:
            self._say_recorded(lease, record)
        for published, rows in lease.staged:
            self._accept(node, published, rows)
        if lease.open and node.shape in ("map", "group"):
            some = list(lease.open)[:3]
            self._complain(f"finish: {what} leaves {len(lease.open)} of its rows out (sample ids {some})")
        left = list(lease.open.values())
        if node.shape == "filter":
            for row in left:
                self._take_away(row, node, node.name)
        self._done(node, left)
        self._end(record, "was finished")
        self._finished += 1

    def _train(self, lease: LeaseNote, step: int, what: str) -> None:
        under_way = self.notes.get("step", 0) + 1
        if step != under_way:
            self._complain(f"finish: {what} is of step {step}, but step {under_way} was under way")
        for row in lease.rows:
            row.group.step = step

    def _say_recorded(self, lease: LeaseNote, record: Record) -> None:
        every = self.notes.get("record_every", 0)
        if self._on_recorded is None or not every:
            return
        kept: dict[int, int] = {}
        for row in lease.rows:
            step = row.group.step if row.group.graph.updates else row.group.round
            if step is not None and step % every == 0:
                kept[row.id] = step
        self._on_recorded(record["graph"], record["lease"], kept)

    def _release(self, record: Record) -> None:
        lease, why = self._lease(record), record["why"]
        node = lease.node
        if "ids" in record:
            self._release_some(lease, record)
            return
        if why == RESTARTED:
            self._restarts += not self._restarting
            self._restarting = True
        for row in lease.rows if node.takes_groups else lease.open.values():
            row.held &= ~node.bit
            if not node.takes_groups and row.cancelled & node.masters:
                self._skip(row, node)  # its quorum was chosen meanwhile
        for group in {row.group for row in lease.rows} if node.takes_groups else ():
            group.claimed &= ~node.bit
            self._unclaimed[group.graph.name, node.index][group.id] = group
        self._end(record, f"was released ({why})")
        self._released += 1

    def _release_some(self, lease: LeaseNote, record: Record) -> None:
        """Rows go back that were not published, and the lease holds the others."""
        node, what = lease.node, f"lease {record['lease']} of node {lease.node.name!r}"
        if node.takes_groups:
            raise Violation(f"{what} gives back some of its rows, but the node takes whole groups")
        for id in record["ids"]:
            row = lease.open.pop(id, None)
            if row is None:
                self._complain(f"release: {what} gives back row {id}, which is not, or no longer, its own")
                continue
            row.held &= ~node.bit
            if row.cancelled & node.masters:
                self._skip(row, node)

    def _drop(self, record: Record) -> None:
        """A node that failed at rows again and again does without them."""
        graph = self._rules(record)
        node = self._node(graph, record["node"])
        rows: list[Row] = []
        for id in record["ids"]:
            row = self.rows.get(id)
            ready = row is not None and row.level == node.level and row.group.graph is graph and _is_ready(row, node)
            if row is None or not ready or (row.done | row.held | row.away) & node.bit:
                self._complain(f"drop: node {node.name!r} does without row {id}, {self._why_not(graph, node, id)}")
            else:
                rows.append(row)
        by_group: dict[Group, set[int]] = {}
        for row in rows:
            by_group.setdefault(row.group, set()).add(row.id)
        for group, taken in by_group.items() if node.takes_groups else ():
            if problem := _check_whole(group, node, taken):
                self._complain(
                    f"drop: node {node.name!r} does without {len(taken)} rows of group {group.id}: {problem}"
                )
            self._unclaimed[graph.name, node.index].pop(group.id, None)
        for row in rows:
            self._take_away(row, node, f"failed at {node.name}", also_here=True)

    def _end(self, record: Record, how: str) -> None:
        key = record["graph"], record["lease"]
        del self._leases[key]
        self._ended[key] = f"{how} at byte {self._offset}"

    def _offer(self, record: Record) -> None:
        node = self._node(self._rules(record), record["node"])
        group = self._in_flight(record)
        if not node.quorum or not group.ready.get(node.index):
            raise Violation(f"group {group.id} is offered short to node {node.name!r}, for which no row is ready")
        if group.short & node.bit or node.index in group.chosen:
            raise Violation(f"group {group.id} was offered to node {node.name!r} before")
        group.short |= node.bit

    def _in_flight(self, record: Record) -> Group:
        group = self.groups.get(record["group"])
        if group is None or group.graph is not self._rules(record):
            raise Violation(f"group {record['group']} of graph {record['graph']!r} is not in flight")
        return group

    def _lose(self, record: Record) -> None:
        group = self._in_flight(record)
        rows = [row for level in group.levels for row in level]
        held = [row.id for row in rows if row.held]
        if held:
            raise Violation(f"group {group.id} is lost while row {held[0]} is leased")
        for row in rows:
            for node in group.graph.on_level[row.level]:
                self._skip(row, node)
            row.away |= group.graph.all + 1
            row.reason = "lost" if record.get("again", True) else "given up"
        if record.get("again", True):
            self._root(group.graph, group.levels[0][0].position, group.tokens, group.round)
        self._closing.append(group)

    # Rows go

    def _take_away(self, row: Row, node: NodeRules, reason: str, *, also_here: bool = False) -> None:
        """A row, and what was made of it, will not reach what comes after the node (nor, `also_here`, the node)."""
        graph = row.group.graph
        row.reason = row.reason or reason
        if also_here:
            self._skip(row, node)
        for below in node.downstream:
            for other in _below(row, below.level, graph):
                if not other.done & below.bit:
                    other.reason = other.reason or reason
                    self._skip(other, below)

    def _skip(self, row: Row, node: NodeRules) -> None:
        if (row.done | row.away) & node.bit:
            return
        row.away |= node.bit
        row.group.open -= 1
        if not row.group.open:
            self._closing.append(row.group)

    def _retire(self, group: Group) -> None:
        counts = self.counts[group.graph.name]
        if self._on_retired is not None:
            self._on_retired(group)
        for level in group.levels:
            for row in level:
                if row.away:
                    counts.dropped[row.reason] = counts.dropped.get(row.reason, 0) + 1
                else:
                    counts.done += 1
                del self.rows[row.id]
        for node in group.graph.nodes:
            if node.takes_groups:
                self._unclaimed[group.graph.name, node.index].pop(group.id, None)
        del self.groups[group.id]

    # In the end

    def proof(self) -> Proof:
        """What was proven."""
        for name, counts in self.counts.items():
            counts.waiting = counts.leased = 0
            dropped = Counter(counts.dropped)
            for row in self.rows.values():
                if row.group.graph.name == name:
                    state = state_of(row)
                    counts.leased += state == "leased"
                    counts.waiting += state == "waiting"
                    dropped[row.reason] += state == "dropped"
            counts.dropped = {reason: number for reason, number in dropped.items() if number}
            total = counts.waiting + counts.leased + counts.done + sum(counts.dropped.values())
            if total != counts.issued:
                self.violations.append(f"graph {name!r}: {counts.issued} rows were issued, {total} are accounted for")
        leases = {
            "granted": self._granted,
            "finished": self._finished,
            "released": self._released,
            "open": len(self._leases),
        }
        cuts = [
            f"{path.name}: {path.stat().st_size} bytes were cut off the log when the run was started again"
            for path in sorted(self.folder.glob(f"{self.log.name}.cut-*"))
        ]
        return Proof(
            graphs=self.counts,
            records=self._records,
            num_bytes=self._offset,
            leases=leases,
            restarts=self._restarts,
            segments=len(self._segments),
            checkpoints=self._sound_checkpoints,
            damage=[*self.damage, *cuts],
            violations=self.violations,
        )


def state_of(row: Row) -> str:
    """Of a row in flight: waiting, leased or dropped."""
    return "leased" if row.held else "dropped" if row.away else "waiting"


def _holds(lease: LeaseNote, node: NodeRules, id: int) -> bool:
    return lease.node is node and any(row.id == id for row in lease.rows)


def _age(row: Row, version: int) -> int:
    """Versions that a row is behind; nothing where no policy made it."""
    return version - row.version if row.version is not None and row.version >= 0 else -1


def _too_old(group: Group, node: NodeRules, version: int, bound: int) -> bool:
    return any(_age(r, version) > bound for r in group.levels[node.level] if not r.away & node.bit)


def _ancestor(row: Row, level: int) -> Row:
    while row.level != level:
        assert row.parent is not None, f"row {row.id} has no ancestor on level {level}"
        row = row.parent
    return row


def _below(row: Row, level: int, graph: GraphRules) -> Iterable[Row]:
    """The row itself, or the rows of a level that were made from it."""
    if row.level == level:
        return (row,)
    if row.level not in graph.line(level):
        return ()
    found, pending = [], list(row.children)
    while pending:
        child = pending.pop()
        if child.level == level:
            found.append(child)
        else:
            pending += child.children
    return sorted(found, key=attrgetter("id"))


def _is_ready(row: Row, node: NodeRules) -> bool:
    return all(_ancestor(row, level).done & mask == mask for level, mask in node.needs)


def _has_passed(row: Row, node: NodeRules, graph: GraphRules) -> bool:
    return node.makes in graph.line(row.level) or bool(_ancestor(row, node.level).done & node.bit)


def _is_whole(group: Group, level: int) -> bool:
    """No more rows of the level can come."""
    if level == 0:
        return True
    maker = group.graph.makers[level]
    return _is_whole(group, maker.level) and all((r.done | r.away) & maker.bit for r in group.levels[maker.level])


def _check_whole(group: Group, node: NodeRules, taken: set[int]) -> str:
    left_out = [r.id for r in group.levels[node.level] if r.id not in taken and not r.away & node.bit]
    if left_out:
        return f"row {left_out[0]} of the group is left out"
    if not _is_whole(group, node.level):
        return f"more rows of it can come from {group.graph.level_names[node.level]!r}"
    return ""
