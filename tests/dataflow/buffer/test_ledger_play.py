"""The ledger against a model that works everything out from scratch, played by chance."""

import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_model import Model, random_graph
from ledgers import Clock, forgotten, segment

from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.ledger_state import load, save
from weft.dataflow.buffer.ledger_view import table, why
from weft.dataflow.buffer.log import Log, LogReader
from weft.dataflow.buffer.rows import Fate, Ids, Lease, Published, Staleness
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.errors import LeaseError
from weft.dataflow.graph import Graph
from weft.dataflow.node import SOURCE, Node
from weft.dataflow.operation import Shape


@dataclass
class Play:
    """The ledger and the model, played against each other by chance."""

    graph: Graph
    chance: random.Random
    folder: Path
    clock: Clock = field(default_factory=Clock)
    operations: int = 0
    leases: list[Lease] = field(default_factory=list)
    deadlines: dict[int, float] = field(default_factory=dict)
    void: list[Lease] = field(default_factory=list)
    staged: dict[int, list[tuple[list[int], list[int], str]]] = field(default_factory=dict)
    """Token -> what was published of a lease that does not count yet, with its file."""
    stored: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    """File of a segment -> sample id -> its columns."""
    segments: dict[str, Segment] = field(default_factory=dict)
    lies_in: dict[str, list[int]] = field(default_factory=dict)
    """File of a segment that counts -> rows that have columns in it."""
    void_files: set[str] = field(default_factory=set)
    """Of what was published and never counted."""
    freed: list[str] = field(default_factory=list)
    policy: int = 0
    round: int = 0

    def __post_init__(self) -> None:
        self.log = Log(self.folder / "ledger.log", clock=self.clock)
        self.ledger = Ledger(self.graph, source=segment(), log=self.log, clock=self.clock)
        self.model = Model(self.graph)

    def issue(self) -> None:
        if self.ledger.groups_in_flight > 4:
            return
        number = self.chance.randint(1, 2)
        positions = [self.chance.randrange(100) for _ in range(number)]
        self.round += self.chance.random() < 0.3
        ids = self.ledger._ids.next_id, self.ledger._ids.next_group
        self.ledger.issue(positions, [1] * number, round=self.round)
        for k, position in enumerate(positions):
            self.model.add(ids[0] + k, SOURCE, ids[0] + k, ids[1] + k, position, None, self.round, self.clock.now)
        self.operations += 1

    def claim(self, *, bound: int | None = None) -> None:
        n = self.chance.choice(self.graph.nodes)
        limit = self.chance.choice([None, 1, 2, 5])
        limits = {"max_groups": limit} if n.operation.takes_groups else {"max_rows": limit}
        fate: Fate = self.chance.choice(["wait", "mask", "requeue", "drop"])
        staleness = None
        if n.operation.updates and (bound is not None or self.chance.random() < 0.8):
            staleness = Staleness(self.policy, self.chance.randint(0, 3) if bound is None else bound, fate)
        patience = self.chance.choice([None, None, 1.0, 4.0])
        first, first_group = self.ledger._ids.next_id, self.ledger._ids.next_group
        open_before = {x.token: set(x.open) for x in self.leases}
        expected, masked = self.expect_claim(n, limit, staleness, first, first_group)
        lease = self.ledger.claim(n, **limits, deadline_s=patience, staleness=staleness, holder="somebody")
        assert (lease.ids.tolist() if lease else []) == expected, n
        given_up = {(x.token, i) for x in self.leases for i in open_before[x.token] - x.open.keys()}
        assert given_up == set(self.ledger.take_given_up())
        assert all(x.node.name in self.model.done[i] for x in self.leases for i in x.given_up)
        self.operations += 1
        if lease is None:
            return
        assert lease.masked == masked
        for id in expected:
            self.model.leased[id].add(n.name)
            assert self.model.used[id, n.name] == 0, "consumed twice"
        self.check_columns(lease)
        self.leases.append(lease)
        self.staged[lease.token] = []
        if patience is not None:
            self.deadlines[lease.token] = self.clock.now + patience

    def expect_claim(
        self, n: Node, limit: int | None, staleness: Staleness | None, next_id: int, next_group: int
    ) -> tuple[list[int], set[int]]:
        """The rows of the claim and the masked among them; what becomes of groups that are too old."""
        model, masked = self.model, set[int]()
        if staleness is not None:
            for group, _ in [h for h in model.held if h[1] == n.name]:
                if not model.too_old(model.todo(group, n), staleness):
                    model.held.remove((group, n.name))
        ready = [(g, r) for g in model.flying() if (r := model.ready(g, n))]
        if not n.operation.takes_groups:
            return [i for _, r in ready for i in r][:limit], masked
        rows: list[int] = []
        for group, own in ready:
            if limit == 0:
                break
            old = model.too_old(own, staleness) if staleness is not None else []
            if staleness is not None and old:
                model.stale[staleness.fate] += 1
                if staleness.fate == "wait":
                    model.held.add((group, n.name))
                    continue
                if staleness.fate == "mask":
                    masked |= set(old)
                else:
                    if staleness.fate == "requeue":
                        position, round = model.position[own[0]], model.round[group]
                        model.add(next_id, SOURCE, next_id, next_group, position, None, round, self.clock.now)
                        next_id, next_group = next_id + 1, next_group + 1
                    for id in own:
                        model.kept_from[id].add(n.name)
                    model.dropped[f"stale at {n.name}"] += len(own)
                    continue
            limit = None if limit is None else limit - 1
            rows += own
            model.claimed.add((group, n.name))
            if n.operation.quorum and (group, n.name) not in model.chosen:
                cancelled = [i for i in model.todo(group, n) if i not in own]
                model.chosen[group, n.name] = set(own)
                for id in cancelled:
                    model.kept_from[id].add(n.name)
                model.dropped[f"over-issued at {n.name}"] += len(cancelled)
                maker = model.makes_for[n.name]
                if maker is not None:
                    for id in model.todo(group, maker):
                        model.mark(maker, id, self.clock.now)
                        model.cut_short[maker.name] += 1
        return rows, masked

    def check_columns(self, lease: Lease) -> None:
        model, n = self.model, lease.node
        columns: set[str] = set()
        for piece in self.ledger.pieces(n, lease.rows):
            columns |= set(piece.columns)
            store: dict[Any, Any] = {}
            for found in piece.segments:
                store |= self.stored.get(found.file, {})
            for id, key in zip(lease.ids.tolist(), piece.keys.tolist(), strict=True):
                for column in piece.columns:
                    writer = n.writers[column]
                    if not writer:
                        assert piece.by_position and key == model.position[model.ancestor(id, SOURCE)]
                    else:
                        owner = model.ancestor(id, self.graph.level_of(writer))
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
                free = [first[parent] + k for k in range(40) if first[parent] + k not in (*self.model.level, *ids)]
                taken = {i for made, _, _ in self.staged[lease.token] for i in made}
                ids.append(self.chance.choice([i for i in free if i not in taken][:3]))
            assert level is not None
            self.give(lease, ids, children, [p for p in chosen if self.chance.random() < 0.5])

    def give(self, lease: Lease, ids: list[int], held: list[int], finished: list[int] | None = None) -> None:
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
            lease, Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), versions, parents, through), into
        )
        if versions is not None:
            self.model.version |= dict(zip(ids, versions.tolist(), strict=True))
        self.operations += 1
        wanted = [k for k, parent in enumerate(held) if parent not in lease.given_up]  # the others are let go
        ids, held = [ids[k] for k in wanted], [held[k] for k in wanted]
        done = held if finished is None else [p for p in finished if p not in lease.given_up]
        if n.operation.takes_groups:
            self.staged[lease.token].append((ids, held, into.file))
        else:
            self.count(n, ids, held, into.file, done)

    def count(self, n: Node, ids: list[int], held: list[int], file: str, done: list[int]) -> None:
        model = self.model
        if n.writes:
            self.lies_in[file] = ids
        else:
            self.void_files.add(file)
        if n.makes_level is not None:
            for id, parent in zip(ids, held, strict=True):
                group = model.group[parent]
                position, round = model.position[parent], model.round[group]
                model.add(id, n.makes_level, parent, group, position, model.version[id], round, self.clock.now)
        for id in done:
            model.mark(n, id, self.clock.now)

    def finish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        n = lease.node
        left = list(lease.open)
        if left and n.operation.shape in (Shape.MAP, Shape.GROUP):
            with pytest.raises(LeaseError, match="returned no row"):
                self.ledger.finish(lease)
            self.give(lease, left, left)
            left = []
        self.ledger.finish(lease)
        for ids, held, file in self.staged[lease.token]:
            self.count(n, ids, held, file, held if n.makes_level is None else [])
        if n.operation.takes_groups and n.makes_level is not None:
            left = lease.ids.tolist()
        for id in left:
            if n.operation.shape is Shape.FILTER:
                self.model.dropped_by[id].add(n.name)
                self.model.dropped[n.name] += 1
            self.model.mark(n, id, self.clock.now)
        self.close(lease)

    def release(self) -> None:
        if self.leases:
            lease = self.chance.choice(self.leases)
            self.ledger.release(lease)
            self.released(lease)

    def give_some_back(self) -> None:
        """Some rows of a lease are ready again, and it holds the others."""
        leases = [lease for lease in self.leases if lease.open]
        if not leases:
            return
        lease = self.chance.choice(leases)
        ids = [i for i in lease.open if self.chance.random() < 0.4]
        self.operations += 1
        if lease.node.operation.takes_groups:
            with pytest.raises(LeaseError, match="has whole groups"):
                self.ledger.release(lease, ids=ids)
            return
        self.ledger.release(lease, ids=ids)
        for id in ids:
            self.model.leased[id].discard(lease.node.name)

    def drop(self) -> None:
        """A node has failed at some rows that are ready for it, and does without them."""
        n = self.chance.choice(self.graph.nodes)
        ready = [i for g in self.model.flying() for i in self.model.ready(g, n)]
        if not ready or self.chance.random() < 0.6:
            return
        self.operations += 1
        id = self.chance.choice(ready)
        if n.operation.quorum:
            with pytest.raises(LeaseError, match="has a quorum"):
                self.ledger.drop(n, [id], "it fails")
            return
        dropped = self.model.ready(self.model.group[id], n) if n.operation.takes_groups else [id]
        assert self.ledger.drop(n, [id], "it fails") == len(dropped)
        for one in dropped:
            self.model.kept_from[one].add(n.name)
        self.model.dropped[f"failed at {n.name}"] += len(dropped)

    def released(self, lease: Lease) -> None:
        for id in lease.ids.tolist() if lease.node.operation.takes_groups else lease.open:
            self.model.leased[id].discard(lease.node.name)
            if lease.node.operation.takes_groups:
                self.model.claimed.discard((self.model.group[id], lease.node.name))
        self.void_files |= {file for _, _, file in self.staged[lease.token]}
        self.close(lease)

    def close(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.deadlines.pop(lease.token, None)
        self.void.append(lease)
        self.operations += 1

    def wait(self) -> None:
        """Time passes, and what is due is done."""
        model = self.model
        self.clock.now += self.chance.choice([0.5, 1.0, 3.0])
        due = {token for token, deadline in self.deadlines.items() if deadline <= self.clock.now}
        expired = self.ledger.expire()
        assert {x.token for x in expired} == due and len(expired) == len(due)
        for lease in expired:
            self.released(lease)
        for (group, name), since in model.since.items():
            quorum = model.node[name].operation.quorum
            late = quorum and quorum.deadline_s is not None and since + quorum.deadline_s <= self.clock.now
            if late and (group, name) not in model.chosen and group not in model.lost:
                model.short.add((group, name))
        self.operations += 1

    def lose(self) -> None:
        flying = self.model.flying()
        if not flying or self.chance.random() < 0.7:
            return
        group = self.chance.choice(flying)
        self.operations += 1
        if any(self.model.leased[i] for i in self.model.members[group]):
            with pytest.raises(LeaseError, match="is lost"):
                self.ledger.lose(group, "the disk is gone")
            return
        id, new = self.ledger._ids.next_id, self.ledger._ids.next_group
        self.ledger.lose(group, "the disk is gone")
        model = self.model
        model.lost.add(group)
        model.held = {h for h in model.held if h[0] != group}
        model.dropped["lost"] += len(model.members[group])
        position, round = model.position[model.members[group][0]], model.round[group]
        model.add(id, SOURCE, id, new, position, None, round, self.clock.now)

    def use_a_void_lease(self) -> None:
        if not self.void:
            return
        lease = self.chance.choice(self.void)
        parents = lease.ids[:1] if lease.node.makes_level is not None else None
        publication = Published(lease.ids[:1], np.ones(1, np.int64), None, parents)
        for late in (self.ledger.finish, self.ledger.release, lambda x: self.ledger.publish(x, publication, None)):
            with pytest.raises(LeaseError, match="released or finished before"):
                late(lease)
            self.model.late += 1
            self.operations += 1

    def train(self) -> None:
        self.policy += 1

    def restart(self) -> None:
        """Go on with a copy: one that the log was played to, or one of what is saved of the ledger."""
        self.log.commit()
        self.take_freed()
        replayed = Ledger(self.graph, ids=Ids(), source=segment(), clock=self.clock)
        reader = LogReader(self.log.path)
        for record in reader:
            replayed.replay(record)
        assert reader.damage is None and reader.end == self.log.position
        assert [s.file for s in replayed.take_freed()] == self.freed
        replayed.take_given_up()  # said before
        replayed.late = self.ledger.late  # refusals are no events
        state = json.loads(json.dumps(list(save(self.ledger))))
        ids = Ids(self.ledger._ids.next_id, self.ledger._ids.next_group)
        loaded = Ledger(self.graph, ids=ids, clock=self.clock)
        load(loaded, state)
        assert loaded.readiness == self.ledger.readiness, "it follows from the rows and groups in flight"
        for copy in (replayed, loaded):
            self.compare(copy, state)
        self.ledger = self.chance.choice([replayed, loaded])
        self.ledger.log = self.log
        by_token = {x.token: x for x in self.ledger.leases}
        assert list(by_token) == sorted(x.token for x in self.leases)
        self.leases = [by_token[x.token] for x in self.leases]
        self.deadlines.clear()
        for key in self.model.since:
            self.model.since[key] = self.clock.now

    def compare(self, copy: Ledger, state: list[Any]) -> None:
        one = self.ledger
        assert json.loads(json.dumps(list(save(copy)))) == state
        assert table(copy) == table(one)
        assert (copy._ids.next_id, copy._ids.next_group) == (one._ids.next_id, one._ids.next_group)
        of_rows = [Ledger.ready, Ledger.settled, Ledger.exhausted]
        of_groups = [Ledger.ready_groups, Ledger.unclaimed, Ledger.held]
        of_groups += [Ledger.oldest_held, Ledger.leased_groups]
        for n in self.graph.nodes:
            for ask in [*of_rows, *(of_groups if n.operation.takes_groups else [])]:
                assert ask(copy, n) == ask(one, n), ask.__name__
            if n.operation.updates:
                assert all(copy.groups_until(n, v) == one.groups_until(n, v) for v in range(6))
        assert copy.counts() == one.counts() and copy.dropped == one.dropped
        assert copy.num_bytes == one.num_bytes and copy.group_ids == one.group_ids
        assert [why(copy, g) for g in one.group_ids] == [why(one, g) for g in one.group_ids]
        assert set(copy.live_segments()) == set(one.live_segments())
        assert len(copy.live_segments()) == len(one.live_segments())

    def take_freed(self) -> None:
        self.freed += [s.file for s in self.ledger.take_freed()]

    def check(self) -> None:
        ledger, model = self.ledger, self.model
        flying = model.flying()
        assert ledger.group_ids == flying
        rows = {i for g in flying for i in model.members[g]}
        assert set(ledger._rows) == rows
        for n in ledger.graph.nodes:
            ready = [r for g in flying if (r := model.ready(g, n))]
            todo = sum(len(model.todo(g, n)) for g in flying)
            all_here = all(model.whole(g, n.level) for g in flying)
            number = sum(map(len, ready))
            assert ledger.ready(n) == number, n
            assert ledger.exhausted(n) == (all_here and not todo)
            settled = all_here and todo > 0 and number == todo
            if n.operation.takes_groups:
                unclaimed = sum((g, n.name) not in model.claimed for g in flying)
                assert ledger.unclaimed(n) == unclaimed
                assert ledger.ready_groups(n) == len(ready)
                held = sum(name == n.name for _, name in model.held)
                assert ledger.held(n) == held
                leased = {model.group[i] for i in rows if n.name in model.leased[i]}
                assert ledger.leased_groups(n) == len(leased)
                settled = len(ready) == unclaimed > 0 if n.operation.quorum else settled
            if n.operation.updates:
                i = ledger._index[n.name]
                groups = [ledger._groups[g] for g in flying if (g, n.name) not in model.claimed]
                for version in range(-1, 6):
                    due = [g for g in groups if g.version is not None and g.version <= version]
                    on_offer = sum(g.offered >> i & 1 for g in due)
                    assert ledger.groups_until(n, version) == (len(due), on_offer)
            assert ledger.settled(n) == settled
        counts = ledger.counts()
        assert counts["issued"] == len(model.level) == sum(v for k, v in counts.items() if k != "issued")
        assert counts["leased"] == sum(1 for i in rows if model.leased[i])
        here = {lv: [n for n in model.nodes if n.level == lv] for lv in self.graph.levels}
        gone = [i for i in model.level if i not in rows and model.group[i] not in model.lost]
        assert counts["done"] == sum(1 for i in gone if not any(model.skipped(i, n) for n in here[model.level[i]]))
        assert ledger.dropped == {k: v for k, v in model.dropped.items() if v}
        assert ledger.stale == model.stale and ledger.late == model.late
        assert ledger.cut_short == model.cut_short
        for group in flying:
            explained = why(ledger, group)
            waiting = [n.name for n in ledger.graph.nodes if model.todo(group, n) or not model.whole(group, n.level)]
            assert [line.split(":")[0] for line in explained.splitlines()] == waiting
        self.take_freed()
        unused = {f for f, ids in self.lies_in.items() if not rows.intersection(ids)}
        assert len(self.freed) == len(set(self.freed)), "freed twice"
        assert set(self.freed) == unused | self.void_files
        live = [f for f in self.lies_in if f not in unused]
        assert ledger.num_bytes == sum(self.segments[f].num_bytes for f in live)
        assert sorted(s.file for s in ledger.live_segments()) == sorted(live)


def play(seed: int, number: int) -> int:
    """So many operations, and then until nothing is left."""
    chance = random.Random(seed)
    graph = random_graph(chance)
    with tempfile.TemporaryDirectory() as folder:
        play = Play(graph, chance, Path(folder))
        moves = [
            *(play.issue, play.claim, play.claim, play.claim, play.claim, play.publish, play.publish, play.finish),
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
            if not play.ledger.groups_in_flight and not play.leases:
                break
            chance.choice([lambda: play.claim(bound=1_000_000), play.publish, play.finish, play.wait])()
        play.check()
        play.restart()
        play.log.close()
    assert [play.ledger.claim(n) for n in graph.nodes] == [None] * len(graph.nodes)  # offers of rows taken away go
    assert forgotten(play.ledger)
    model = play.model
    for id in model.level:
        for n in graph.nodes:
            if n.level == model.level[id] and model.group[id] not in model.lost:
                assert model.used[id, n.name] == (0 if model.skipped(id, n) else 1)
    return play.operations


@pytest.mark.parametrize("histories", [80, pytest.param(340, marks=pytest.mark.slow)])
def test_the_ledger_agrees_with_a_model_that_has_no_state_whatever_is_done(histories: int):
    operations = 0

    @settings(max_examples=histories, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def agree(seed: int) -> None:
        nonlocal operations
        operations += play(seed, 300)

    agree()
    assert operations >= 290 * histories, operations
