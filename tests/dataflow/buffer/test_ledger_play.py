"""Random operations on the ledger, against the checker that reads its log and a model of
readiness."""

import json
import random
import tempfile
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_model import Model
from ledgers import Clock, forgotten, random_graph, readiness_state, segment

from weft.dataflow.buffer.leases import Lease, Published, column_pieces
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.live_rows import Readiness
from weft.dataflow.buffer.recovery import count, load, replay, save
from weft.dataflow.buffer.rows import Ids
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.buffer.staleness import Fate, Staleness
from weft.dataflow.errors import LeaseError
from weft.dataflow.graph import Graph, Node
from weft.dataflow.operation import Shape
from weft.dataflow.runs.log import Log, LogReader

COUNTED = ("open", "behind", "claimed", "complete", "rested")
"""Counters of a group that follow from the states of its rows."""


@dataclass
class Play:
    """Random moves on the ledger and the model."""

    graph: Graph
    chance: random.Random
    folder: Path
    clock: Clock = field(default_factory=Clock)
    operations: int = 0
    leases: list[Lease] = field(default_factory=list)
    deadlines: dict[int, float] = field(default_factory=dict)
    void: list[Lease] = field(default_factory=list)
    staged: dict[int, list[tuple[list[int], list[int], str]]] = field(default_factory=dict)
    """Token -> publications of a lease that do not count yet, with their files."""
    stored: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    """File of a segment -> sample id -> its columns."""
    segments: dict[str, Segment] = field(default_factory=dict)
    lies_in: dict[str, list[int]] = field(default_factory=dict)
    """File of a counted segment -> rows with columns in it."""
    void_files: set[str] = field(default_factory=set)
    """Files of publications that never counted."""
    freed: list[str] = field(default_factory=list)
    since: dict[tuple[int, str], float] = field(default_factory=dict)
    """Group and node with a quorum -> time its first row was ready."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of rows dropped for it."""
    policy: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.log = Log(self.folder / "ledger.log", clock=self.clock)
        self.ledger = Ledger(self.graph, source=segment(), log=self.log, clock=self.clock)
        self.model = Model(self.graph, self.log)

    def issue(self) -> None:
        if len(self.ledger.live.groups) > 4:
            return
        number = self.chance.randint(1, 2)
        positions = [self.chance.randrange(100) for _ in range(number)]
        self.step += self.chance.random() < 0.3
        first = self.ledger.ids.next_group
        self.ledger.issue(positions, [1] * number, step=self.step)
        self.saw()
        groups = [
            self.model.groups.get(first + k) for k in range(number)
        ]  # None: the graph had no node for it
        assert [(g.position, g.issued_in) for g in groups if g] == [
            (p, self.step) for p, g in zip(positions, groups, strict=True) if g
        ]

    def saw(self) -> None:
        """Let the checker read the records of the last operation."""
        self.operations += 1
        self.model.read()

    def claim(self, *, bound: int | None = None) -> None:
        n = self.chance.choice(self.graph.nodes)
        limit = self.chance.choice([None, 1, 2, 5])
        limits = {"max_groups": limit} if n.operation.takes_groups else {"max_rows": limit}
        fate: Fate = self.chance.choice(["wait", "mask", "requeue", "drop"])
        staleness = None
        if n.operation.updates and (bound is not None or self.chance.random() < 0.8):
            staleness = Staleness(
                self.policy, self.chance.randint(0, 3) if bound is None else bound, fate
            )
        patience = self.chance.choice([None, None, 1.0, 4.0])
        open_before = {x.token: set(x.open) for x in self.leases}
        expected, masked = self.expect_claim(n, limit, staleness)
        lease = self.ledger.claim(
            n, **limits, deadline_s=patience, staleness=staleness, holder="somebody"
        )
        ids = lease.ids.tolist() if lease else []
        for number, candidates in expected:
            own, ids = ids[:number], ids[number:]
            assert len(own) == number and own == sorted(own) and set(own) <= set(candidates), n
        assert not ids, n
        if lease is not None:
            self.check_columns(lease)
        self.saw()
        given_up = {(x.token, i) for x in self.leases for i in open_before[x.token] - x.open.keys()}
        assert given_up == set(self.ledger.leases.take_given_up())
        rows = self.model.rows
        assert all(
            i not in rows or i in self.model.states(x.node).done for x in self.leases for i in x.given_up
        )
        if lease is None:
            return
        assert lease.masked == masked
        self.leases.append(lease)
        self.staged[lease.token] = []
        if patience is not None:
            self.deadlines[lease.token] = self.clock.now + patience

    def expect_claim(
        self, n: Node, limit: int | None, staleness: Staleness | None
    ) -> tuple[list[tuple[int, list[int]]], set[int]]:
        """Return the expected claim as (number of rows, candidates) per group, and the masked rows.

        Nodes that take rows have one entry per row.
        """
        model, masked, node = self.model, set[int](), self.model.states(n)
        groups = list(model.groups.values())
        if staleness is not None:
            waits = staleness.fate == "wait"
            node.held_back -= {g.id for g in groups if not (waits and model.too_old(g, n, staleness))}
        ready = [(group, *found) for group in groups if (found := model.ready(group, n))[0]]
        if not n.operation.takes_groups:
            return [(1, [i]) for _, _, rows in ready for i in rows][:limit], masked
        old_of = {
            g.id: model.too_old(g, n, staleness) if staleness is not None else set[int]()
            for g, _, _ in ready
        }
        if staleness is not None and staleness.fate != "mask":
            aside = [own for group, _, own in ready if old_of[group.id]]
            self.dropped[f"stale at {n.name}"] += 0 if staleness.fate == "wait" else sum(map(len, aside))
            ready = [each for each in ready if not old_of[each[0].id]]
        if n.operation.updates:
            ready.sort(key=lambda each: model.oldest(each[2]))
        expected: list[tuple[int, list[int]]] = []
        for group, number, own in sorted(ready[:limit], key=lambda each: each[0].id):
            masked |= old_of[group.id]
            expected.append((number, own))
            if n.operation.quorum and node not in group.chosen:
                self.dropped[f"over-issued at {n.name}"] += len(model.todo(group, n)) - number
        return expected, masked

    def check_columns(self, lease: Lease) -> None:
        model, n = self.model, lease.node
        columns: set[str] = set()
        source, index = self.ledger.source, np.arange(lease.num_rows)
        [pieces] = column_pieces(self.graph, source, lease, [range(lease.num_rows)], index)
        for piece in pieces:
            columns |= set(piece.columns)
            store: dict[Any, Any] = {}
            for found in piece.segments:
                store |= self.stored.get(found.file, {})
            for id, key in zip(lease.ids.tolist(), piece.keys.tolist(), strict=True):
                for column in piece.columns:
                    writer = n.writers[column]
                    if not writer:
                        assert piece.by_position and key == model.rows[id].group.position
                    else:
                        owner = model.rows[id].ancestor(self.graph.level_of(writer)).id
                        assert store[key][column] == f"{column} of {owner}"
        assert columns == set(n.reads)

    def publish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        open_ids = sorted(lease.open)
        chosen = [i for i in open_ids if self.chance.random() < 0.6]
        self.chance.shuffle(chosen)
        if lease.node.makes_level is None:
            self.give(lease, chosen, chosen)
        else:
            chosen += [i for i in lease.given_up if self.chance.random() < 0.3]
            children = [p for p in chosen for _ in range(self.chance.randint(1, 3))]
            self.chance.shuffle(children)
            first, level = (
                dict(zip(lease.ids.tolist(), lease.first_children.tolist(), strict=True)),
                lease.node.makes_level,
            )
            ids: list[int] = []
            for parent in children:
                free = [
                    first[parent] + k
                    for k in range(40)
                    if first[parent] + k not in (*self.model.rows, *ids)
                ]
                taken = {i for made, _, _ in self.staged[lease.token] for i in made}
                ids.append(self.chance.choice([i for i in free if i not in taken][:3]))
            assert level is not None
            self.give(lease, ids, children, [p for p in chosen if self.chance.random() < 0.5])

    def give(
        self, lease: Lease, ids: list[int], held: list[int], finished: list[int] | None = None
    ) -> None:
        n = lease.node
        makes = n.makes_level is not None
        into = segment(f"{len(self.stored)}", self.chance.randint(1, 99))
        self.segments[into.file] = into
        self.stored[into.file] = {id: {c: f"{c} of {id}" for c in n.writes} for id in ids}
        made_by = [self.chance.choice([self.policy, max(0, self.policy - 2)]) for _ in ids]
        versions = np.array(made_by, np.int64) if makes else None
        parents = np.array(held, np.int64) if makes else None
        through = np.array(finished, np.int64) if makes else None
        self.ledger.publish(
            lease,
            Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), versions, parents, through),
            into,
        )
        wanted = [
            k for k, parent in enumerate(held) if parent not in lease.given_up
        ]  # drop the children of rows that were given up
        ids, held = [ids[k] for k in wanted], [held[k] for k in wanted]
        if n.operation.takes_groups:
            self.staged[lease.token].append((ids, held, into.file))
        else:
            self.count(n, ids, held, into.file)
        self.saw()

    def count(self, n: Node, ids: list[int], held: list[int], file: str) -> None:
        """Record a publication that counts: its file, and rows too late for a quorum."""
        if n.writes:
            self.lies_in[file] = ids
        else:
            self.void_files.add(file)
        for parent in held if n.makes_level is not None else ():
            chosen = [q for q in self.model.rows[parent].group.chosen if q.level == n.makes_level]
            for quorum in chosen:
                self.dropped[f"late at {quorum.name}"] += not any(
                    quorum in other.downstream for other in chosen
                )

    def finish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        n, left = lease.node, list(lease.open)
        if left and n.operation.shape in (Shape.MAP, Shape.GROUP):
            with pytest.raises(LeaseError, match="returned no row"):
                self.ledger.finish(lease)
            self.give(lease, left, left)
        self.ledger.finish(lease)
        for ids, held, file in self.staged[lease.token]:
            self.count(n, ids, held, file)
        if n.operation.shape is Shape.FILTER:
            self.dropped[n.name] += len(left)
        self.close(lease)

    def release(self) -> None:
        if self.leases:
            lease = self.chance.choice(self.leases)
            self.ledger.release(lease)
            self.released(lease)

    def give_some_back(self) -> None:
        """Return some rows of a lease, which keeps the others."""
        leases = [lease for lease in self.leases if lease.open]
        if not leases:
            return
        lease = self.chance.choice(leases)
        ids = [i for i in lease.open if self.chance.random() < 0.4]
        if lease.node.operation.takes_groups:
            with pytest.raises(LeaseError, match="takes complete groups"):
                self.ledger.release(lease, ids=ids)
        else:
            self.ledger.release(lease, ids=ids)
        self.saw()

    def drop(self) -> None:
        """Fail a node at some of its ready rows, and continue without them."""
        n = self.chance.choice(self.graph.nodes)
        found = [(g, *self.model.ready(g, n)) for g in self.model.groups.values()]
        ready = [(rows, id) for _, _, rows in found for id in rows]
        if not ready or self.chance.random() < 0.6:
            return
        rows, id = self.chance.choice(ready)
        if n.operation.quorum:
            with pytest.raises(LeaseError, match="has a quorum"):
                self.ledger.drop(n, [id], "it fails")
        else:
            dropped = len(rows) if n.operation.takes_groups else 1
            assert self.ledger.drop(n, [id], "it fails") == dropped
            self.dropped[f"failed at {n.name}"] += dropped
        self.saw()

    def released(self, lease: Lease) -> None:
        self.void_files |= {file for _, _, file in self.staged[lease.token]}
        self.close(lease)

    def close(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.deadlines.pop(lease.token, None)
        self.void.append(lease)
        self.saw()

    def wait(self) -> None:
        """Advance the clock, and process deadlines."""
        self.note_arrivals()
        self.clock.now += self.chance.choice([0.5, 1.0, 3.0])
        due = {token for token, deadline in self.deadlines.items() if deadline <= self.clock.now}
        expired = self.ledger.expire()
        assert {x.token for x in expired} == due and len(expired) == len(due)
        for lease in expired:
            self.released(lease)
        for (group, name), since in self.since.items():
            quorum = self.graph[name].operation.quorum
            assert quorum is not None
            if quorum.deadline_s is not None and since + quorum.deadline_s <= self.clock.now:
                self.model.short.add((group, name))
        self.saw()

    def note_arrivals(self) -> None:
        """Note the quorums whose first row became ready since the last advance."""
        for group in self.model.groups.values():
            for quorum, arrived in group.arrived.items():
                if arrived:
                    self.since.setdefault((group.id, quorum.name), self.clock.now)

    def lose(self) -> None:
        if not self.model.groups or self.chance.random() < 0.7:
            return
        group = self.chance.choice(list(self.model.groups.values()))
        rows = set[int]().union(*group.levels)
        if any(rows & self.model.states(n).leased for n in self.graph.nodes):
            with pytest.raises(LeaseError, match="is lost"):
                self.ledger.lose(group.id, "the disk is gone")
        else:
            self.ledger.lose(group.id, "the disk is gone")
            self.dropped["lost"] += len(rows)
        self.saw()

    def use_a_void_lease(self) -> None:
        if not self.void:
            return
        lease = self.chance.choice(self.void)
        parents = lease.ids[:1] if lease.node.makes_level is not None else None
        publication = Published(lease.ids[:1], np.ones(1, np.int64), None, parents)
        for late in (
            self.ledger.finish,
            self.ledger.release,
            lambda x: self.ledger.publish(x, publication, None),
        ):
            with pytest.raises(LeaseError, match="released or finished before"):
                late(lease)
            self.operations += 1

    def train(self) -> None:
        self.policy += 1

    def restart(self) -> None:
        """Continue with a copy, from a replay of the log or from a saved state."""
        self.log.commit()
        self.take_freed()
        replayed = Ledger(self.graph, ids=Ids(), source=segment(), clock=self.clock)
        reader = LogReader(self.log.path)
        for record in reader:
            replay(replayed, record)
        assert reader.damage is None and reader.end == self.log.position
        assert [s.file for s in replayed.parts.take_freed()] == self.freed
        replayed.leases.take_given_up()  # already reported
        state = json.loads(json.dumps(list(save(self.ledger))))
        ids = Ids(self.ledger.ids.next_id, self.ledger.ids.next_group)
        loaded = Ledger(self.graph, ids=ids, clock=self.clock)
        load(loaded, state)
        for copy in (replayed, loaded):
            self.compare(copy, state)
        self.ledger = self.chance.choice([replayed, loaded])
        self.ledger.log = self.log
        by_token = {x.token: x for x in self.ledger.leases}
        assert list(by_token) == sorted(x.token for x in self.leases)
        self.leases = [by_token[x.token] for x in self.leases]
        self.deadlines.clear()
        self.note_arrivals()
        self.since = dict.fromkeys(self.since, self.clock.now)

    def compare(self, copy: Ledger, state: list[Any]) -> None:
        one = self.ledger
        assert json.loads(json.dumps(list(save(copy)))) == state
        assert (copy.ids.next_id, copy.ids.next_group) == (one.ids.next_id, one.ids.next_group)
        assert readiness_state(copy, copy.readiness) == readiness_state(one, one.readiness)
        for n in (n for n in self.graph.nodes if n.operation.takes_groups):
            assert copy.live.oldest_too_old(n) == one.live.oldest_too_old(n)
            assert copy.leases.num_groups(n) == one.leases.num_groups(n)
        assert copy.live.counts() == one.live.counts() and copy.live.dropped == one.live.dropped
        assert copy.parts.num_bytes == one.parts.num_bytes and list(copy.live.groups) == list(
            one.live.groups
        )
        assert [copy.live.waits_for(g) for g in list(one.live.groups)] == [
            one.live.waits_for(g) for g in list(one.live.groups)
        ]
        assert set(copy.parts.segments) == set(one.parts.segments)
        assert len(copy.parts.segments) == len(one.parts.segments)

    def check_derived(self) -> None:
        """Check that counters and ready rows follow from the states of the rows."""
        live = self.ledger.live
        for group in live.groups.values():
            kept = {name: deepcopy(getattr(group, name)) for name in COUNTED}
            count(live.wiring, group)
            assert {name: getattr(group, name) for name in COUNTED} == kept
        worked_out = Readiness.of(live.wiring, live.groups.values())
        assert readiness_state(self.ledger, worked_out) == readiness_state(self.ledger, live.readiness)

    def take_freed(self) -> None:
        self.freed += [s.file for s in self.ledger.parts.take_freed()]

    def check(self) -> None:
        self.check_derived()
        ledger, model = self.ledger, self.model
        assert list(ledger.live.groups) == list(model.groups)
        assert set(ledger.live.rows) == set(model.rows)
        for n in ledger.graph.nodes:
            self.check_readiness(n)
        counts = model.counts
        known = [counts.issued, counts.waiting, counts.leased, counts.done, counts.dropped.total()]
        assert list(ledger.live.counts().values()) == known
        assert ledger.live.dropped == {k: v for k, v in self.dropped.items() if v}
        assert ledger.stale == counts.stale
        for group in model.groups.values():
            explained = ledger.live.waits_for(group.id)
            waiting = [
                n.name
                for n in self.graph.nodes
                if model.todo(group, n) or not model.is_complete(group, n)
            ]
            assert [line.split(":")[0] for line in explained.splitlines()] == waiting
        self.take_freed()
        unused = {f for f, ids in self.lies_in.items() if not model.rows.keys() & set(ids)}
        assert len(self.freed) == len(set(self.freed)), "freed twice"
        assert set(self.freed) == unused | self.void_files
        live = [f for f in self.lies_in if f not in unused]
        assert ledger.parts.num_bytes == sum(self.segments[f].num_bytes for f in live)
        assert sorted(s.file for s in ledger.parts.segments) == sorted(live)

    def check_readiness(self, n: Node) -> None:
        model, readiness, states = self.model, self.ledger.readiness, self.model.states(n)
        groups = list(model.groups.values())
        ready = [number for group in groups if (number := model.ready(group, n)[0])]
        todo = sum(len(model.todo(group, n)) for group in groups)
        all_here = all(model.is_complete(group, n) for group in groups)
        assert readiness.ready(n) == sum(ready), n
        assert readiness.exhausted(n) == (all_here and not todo)
        settled = all_here and todo > 0 and sum(ready) == todo
        unclaimed = [group for group in groups if not model.is_claimed(group, n)]
        if n.operation.takes_groups:
            assert readiness.unclaimed(n) == len(unclaimed)
            assert readiness.ready_groups(n) == len(ready)
            assert readiness.too_old(n) == len(states.held_back)
            leased = [group for group in groups if group.levels[n.level] & states.leased]
            assert self.ledger.leases.num_groups(n) == len(leased)
            settled = len(ready) == len(unclaimed) > 0 if n.operation.quorum else settled
        assert readiness.settled(n) == settled
        if n.operation.updates:
            i = self.ledger.live.wiring.index[n.name]
            live = [self.ledger.live.groups[group.id] for group in unclaimed]
            begun = [(g.version, g.offered >> i & 1) for g in live if g.version is not None]
            until = {v: sum(not offered for other, offered in begun if other <= v) for v, _ in begun}
            assert readiness.not_offered_until(n) == sorted(until.items())


def play(seed: int, number: int) -> int:
    """Make this many moves, then finish all rows."""
    chance = random.Random(seed)
    graph = random_graph(chance)
    with tempfile.TemporaryDirectory() as folder:
        play = Play(graph, chance, Path(folder))
        moves = [
            *(
                play.issue,
                play.claim,
                play.claim,
                play.claim,
                play.claim,
                play.publish,
                play.publish,
                play.finish,
            ),
            *(play.finish, play.release, play.use_a_void_lease, play.wait, play.lose, play.train),
            *(play.give_some_back, play.drop),
        ]
        turn = 0
        while play.operations < number:
            chance.choice(moves)()
            turn += 1
            if turn % 25 == 0:
                play.check()
            if turn % 120 == 0:
                play.restart()
                play.check()
        for _ in range(10_000):
            if not play.ledger.live.groups and not play.leases:
                break
            chance.choice([lambda: play.claim(bound=1_000_000), play.publish, play.finish, play.wait])()
        play.check()
        play.restart()
        play.log.close()
    assert [play.ledger.claim(n) for n in graph.nodes] == [None] * len(
        graph.nodes
    )  # removes offers of rows that were taken away
    assert forgotten(play.ledger)
    assert not play.model.checker.end_log()
    return play.operations


@pytest.mark.parametrize("histories", [20, pytest.param(340, marks=pytest.mark.slow)])
def test_the_ledger_agrees_with_a_stateless_model_after_any_operation(histories: int):
    operations = 0

    @settings(max_examples=histories, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def agree(seed: int) -> None:
        nonlocal operations
        operations += play(seed, 300)

    agree()
    assert operations >= 290 * histories, operations
