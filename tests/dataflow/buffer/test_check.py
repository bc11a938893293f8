"""The proof: true logs of the real ledger pass, and a log with one thing wrong in it does not, at the right place."""

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.buffer.check import Report, check_log
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.log import Log, LogReader, Position, Record, read_checkpoint, write_checkpoint
from weft.dataflow.buffer.rows import Lease, Published, Staleness
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.config import Config
from weft.dataflow.errors import UserError
from weft.dataflow.graph import SOURCE, Graph, Recording, Rows, TableSource
from weft.dataflow.handle import Handle
from weft.dataflow.operation import Declaration, Shape
from weft.dataflow.takes import GROUPS, Quorum, TrainingBatch
from weft.workers.worker import Worker

PROMPTS = TableSource("prompts", pa.table({"prompt": ["a"]}))
DATA = Segment("node", "w.0.000001.arrows", 0, 10, 0)


class Trainer(Worker):
    Config = Config


def function(rows: object) -> None: ...
def method(self: object, rows: object) -> None: ...


class Drawing:
    """A graph made node by node."""

    def __init__(self, name: str) -> None:
        self.recording = Recording(name, PROMPTS)
        self.prompts = Rows(self.recording, SOURCE, {"prompt": ""})

    def add(self, rows: Rows, name: str, shape: Shape = Shape.MAP, **rule: Any) -> Rows:
        updates = isinstance(rule.get("takes"), TrainingBatch)
        rule.setdefault("writes", () if shape is Shape.FILTER or updates else (f"{name}_c",))
        handle = Handle(Trainer, Config(), f"{name}r") if updates else None
        return self.recording.add(
            rows, handle, method if handle else function, Declaration(name, shape, **rule), (), {}
        )

    def graph(self) -> Graph:
        return self.recording.finish()


def dapo(*, quorum: int = 0) -> Graph:
    """generate, score, keep, advantages, update; with a quorum of its samples."""
    draw = Drawing("dapo")
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    if quorum:
        samples = draw.add(samples, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(quorum, 5.0))
    samples = draw.add(samples, "keep", Shape.FILTER, reads=("score_c",))
    samples = draw.add(samples, "advantages", Shape.GROUP, reads=("score_c",))
    draw.add(samples, "update", reads=("advantages_c",), takes=TrainingBatch())
    return draw.graph()


def random_graph(chance: random.Random, name: str) -> Graph:
    """Maps, groups, filters, quorums, expansions and updates on branches that part and join."""
    draw = Drawing(name)
    branches = [draw.prompts]
    kinds: list[dict[str, Any]] = [
        {"shape": Shape.MAP},
        {"shape": Shape.MAP},
        {"shape": Shape.FILTER},
        {"shape": Shape.FILTER, "takes": GROUPS},
        {"shape": Shape.EXPAND},
        {"shape": Shape.EXPAND, "takes": GROUPS},
        {"shape": Shape.GROUP},
        {"shape": Shape.FILTER, "takes": Quorum(chance.randint(1, 3), chance.choice([None, 3.0]))},
        {"shape": Shape.MAP, "takes": TrainingBatch()},
    ]
    for number in range(chance.randint(2, 8)):
        rows = chance.choice(branches)
        if chance.random() < 0.3:
            rows = rows | chance.choice([b for b in branches if b.level == rows.level])
        kind = {"shape": Shape.EXPAND} if not number else chance.choice(kinds)
        reads = tuple(chance.sample(rows.columns, chance.randint(0, len(rows.columns))))
        made = draw.add(rows, "abcdefgh"[number], reads=reads, **kind)
        if not isinstance(kind.get("takes"), TrainingBatch):
            branches.append(made)
    return draw.graph()


def children(ids: Any, versions: Any, parents: Any, finished: Any) -> Published:
    return Published(ids, np.ones(len(ids), np.int64), versions, parents, finished)


class Play:
    """Drives the ledgers of a run by chance: claims, publications in parts, releases, deadlines, losses, restarts."""

    def __init__(self, folder: Path, graphs: dict[str, Graph], chance: random.Random) -> None:
        self.folder, self.graphs, self.chance = folder, graphs, chance
        self.now, self.version, self.segments = 0.0, 0, 0
        self.bounds = [0, 1, 2]
        self.fate: Any = chance.choice(["wait", "mask", "requeue", "drop"])
        self.buffer = SampleBuffer.create(folder, graphs, clock=lambda: self.now)

    @property
    def ledger(self) -> Ledger:
        return self.chance.choice(list(self.buffer.ledgers.values()))

    def issue(self) -> None:
        number = self.chance.randint(1, 3)
        self.ledger.issue([self.chance.randrange(9) for _ in range(number)], [2] * number, round=self.version)

    def claim(self) -> None:
        ledger = self.ledger
        node = self.chance.choice(ledger.graph.nodes)
        stale = Staleness(self.version, self.chance.choice(self.bounds), self.fate) if node.operation.updates else None
        limit = self.chance.choice([None, 1, 2])
        ledger.claim(
            node, max_rows=limit, max_groups=limit, staleness=stale, deadline_s=self.chance.choice([None, 9.0])
        )

    def publish(self, part: float = 0.6) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(ledger.leases)
            self.give(ledger, lease, [i for i in lease.open if self.chance.random() < part])

    def give(self, ledger: Ledger, lease: Lease, held: list[int]) -> None:
        self.chance.shuffle(held)
        self.segments += 1
        into = replace(DATA, offset=self.segments) if lease.node.writes else None
        if lease.node.makes_level is None:
            self.buffer.publish(ledger, lease, Published(np.array(held, np.int64), np.ones(len(held), np.int64)), into)
            return
        place = {id: k for k, id in enumerate(lease.ids.tolist())}
        parents = [parent for parent in held for _ in range(self.chance.randint(1, 3))]
        ids = [lease.first_children[place[p]] + parents[:k].count(p) for k, p in enumerate(parents)]
        versions = np.array([max(0, self.version - self.chance.randint(0, 3)) for _ in ids], np.int64)
        of, all_of_them = np.array(parents, np.int64), np.array(held, np.int64)
        made = children(np.array(ids, np.int64), versions, of, all_of_them)
        self.buffer.publish(ledger, lease, made, into)

    def finish(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(ledger.leases)
            if lease.open and lease.node.operation.shape in (Shape.MAP, Shape.GROUP):
                self.give(ledger, lease, list(lease.open))
            ledger.finish(lease)

    def release(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            ledger.release(self.chance.choice(ledger.leases), "its holder died")

    def wait(self) -> None:
        self.now += self.chance.choice([1.0, 4.0])
        self.version += self.chance.random() < 0.3
        for ledger in self.buffer.ledgers.values():
            ledger.expire()

    def give_some_back(self) -> None:
        ledger = self.ledger
        leases = [lease for lease in ledger.leases if not lease.node.operation.takes_groups]
        if leases:
            lease = self.chance.choice(leases)
            ledger.release(lease, "its rank died", ids=[i for i in lease.open if self.chance.random() < 0.5])

    def fail(self) -> None:
        """A node fails at what it has claimed, and does without it."""
        ledger = self.ledger
        node = self.chance.choice(ledger.graph.nodes)
        lease = None if node.operation.quorum else ledger.claim(node, max_rows=2, max_groups=1)
        if lease is not None:
            ledger.release(lease, "it failed")
            ledger.drop(node, [i for i in lease.ids.tolist() if self.chance.random() < 0.6], "it failed again")

    def lose(self) -> None:
        ledger = self.ledger
        if ledger.group_ids and not ledger.leases:
            ledger.lose(self.chance.choice(ledger.group_ids), "its file is gone")

    def checkpoint(self) -> None:
        self.buffer.checkpoint()

    def restart(self) -> None:
        self.buffer.commit()
        self.buffer.log.close()
        self.buffer = SampleBuffer.recover(self.folder, self.graphs, check=lambda segment: None, clock=lambda: self.now)

    def random_moves(self, number: int) -> None:
        often = [self.issue, *[self.claim] * 6, *[self.publish] * 4, *[self.finish] * 3, self.release, self.wait]
        for _ in range(number):
            seldom = self.chance.random()
            if seldom < 0.02:
                self.chance.choice([self.restart, self.checkpoint, self.lose])()
            elif seldom < 0.06:
                self.chance.choice([self.give_some_back, self.fail])()
            else:
                self.chance.choice(often)()

    def run_dry(self) -> None:
        self.bounds = [1 << 30]
        for _ in range(20_000):
            if not any(g.groups_in_flight or g.leases for g in self.buffer.ledgers.values()):
                return
            self.chance.choice([self.claim, self.claim, self.publish, self.finish, self.wait])()
        raise AssertionError("it did not run dry")

    def report(self) -> Report:
        self.buffer.commit()
        return check_log(self.folder)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_a_ledger_does_is_proven_and_counted_as_it_counts_itself(
    tmp_path_factory: pytest.TempPathFactory, seed: int
):
    chance = random.Random(seed)
    graphs = {name: random_graph(chance, name) for name in ("train", "eval")[: chance.randint(1, 2)]}
    play = Play(tmp_path_factory.mktemp("run"), graphs, chance)
    for _ in range(4):
        play.random_moves(40)
        agree(play)
    play.run_dry()
    agree(play)
    play.buffer.log.close()


def agree(play: Play) -> None:
    report = play.report()
    assert not report.violations, "\n".join(map(str, report.violations))
    for name, ledger in play.buffer.ledgers.items():
        counted, proven = ledger.counts(), report.graphs[name]
        ours = [proven.issued, proven.waiting, proven.leased, proven.done, sum(proven.dropped.values())]
        assert ours == list(counted.values()), (name, counted, proven)
        assert proven.stale == dict(ledger.stale)
    assert report.leases["open"] == sum(len(g.leases) for g in play.buffer.ledgers.values())


# A log with one thing wrong in it


def drive(folder: Path, graph: Graph, *, prompts: int = 2, samples: int = 3) -> SampleBuffer:
    """A run of one graph in which everything was done: filters keep the first row of each lease, and a lease was lost."""
    buffer = SampleBuffer.create(folder, {"train": graph}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue(range(prompts), [2] * prompts, round=0)
    ledger.release(lease_of(ledger, "generate"), "its holder died")
    while ledger.groups_in_flight:
        for node in graph.nodes:
            stale = Staleness(1, 1) if node.operation.updates else None
            while lease := ledger.claim(node, max_rows=2, staleness=stale):
                publish(buffer, ledger, lease, samples)
                ledger.finish(lease)
    buffer.commit()
    return buffer


def lease_of(ledger: Ledger, name: str) -> Lease:
    lease = ledger.claim(next(n for n in ledger.graph.nodes if n.name == name))
    assert lease is not None
    return lease


def publish(buffer: SampleBuffer, ledger: Ledger, lease: Lease, samples: int) -> None:
    into = replace(DATA, offset=buffer.log.position.offset) if lease.node.writes else None
    if lease.node.makes_level is None:
        ids = lease.ids[:1] if lease.node.operation.shape is Shape.FILTER else lease.ids
        buffer.publish(ledger, lease, Published(ids, np.ones(len(ids), np.int64)), into)
        return
    parents = np.repeat(lease.ids, samples)
    ids = np.add.outer(lease.first_children, np.arange(samples)).ravel()
    made = children(ids, np.zeros(len(ids), np.int64), parents, lease.ids)
    buffer.publish(ledger, lease, made, into)


Records = list[dict[str, Any]]


@pytest.fixture
def true(tmp_path: Path) -> Records:
    """The records of a run of `dapo` in which everything was done."""
    drive(tmp_path / "true", dapo()).log.close()
    records = list(LogReader(tmp_path / "true" / "ledger.log"))
    assert not report_of(records, tmp_path).violations
    return records


def report_of(records: Records, folder: Path) -> Report:
    """The report of a log with these records, whose checksums are right."""
    place = folder / f"told-{len(list(folder.iterdir()))}"
    place.mkdir()
    log = Log(place / "ledger.log")
    for record in records:
        log.append(record)
    log.close()
    return check_log(place)


def at(records: Records, do: str, node: str | None = None, number: int = 0) -> int:
    """Where a record stands: of this kind, and of a lease of this node."""
    of = {r["lease"]: r["node"] for r in records if r["do"] == "claim"}
    found = [i for i, r in enumerate(records) if r["do"] == do and (node is None or of[r["lease"]] == node)]
    return found[number]


def byte_of(records: Records, index: int) -> int:
    return sum(len(json.dumps(r, separators=(",", ":"))) + 10 for r in records[:index])


def without(do: str, node: str | None = None, number: int = 0) -> Callable[[Records], int]:
    def mutate(records: Records) -> int:
        index = at(records, do, node, number)
        del records[index]
        return -1

    return mutate


def twice(do: str, node: str | None = None) -> Callable[[Records], int]:
    def mutate(records: Records) -> int:
        index = at(records, do, node)
        records.insert(index + 1, dict(records[index]))
        return index + 1

    return mutate


def changed(do: str, of: str | None, number: int = 0, /, **values: Any) -> Callable[[Records], int]:
    """The record with other values, each worked out from the one that it has."""

    def mutate(records: Records) -> int:
        index = at(records, do, of, number)
        record = records[index]
        records[index] = record | {k: v(record[k]) if callable(v) else v for k, v in values.items()}
        return index

    return mutate


def moved(do: str, node: str | None, after: str, of: str | None) -> Callable[[Records], int]:
    """The record put behind another."""

    def mutate(records: Records) -> int:
        record = records.pop(at(records, do, node))
        records.insert(at(records, after, of) + 1, record)
        return records.index(record)

    return mutate


def too_new(records: Records) -> int:
    index = at(records, "claim", "updater.update")
    records[index] = records[index] | {"stale": [5, 1, "wait"]}
    return index


def two_samples_for_each_other(records: Records) -> int:
    index = at(records, "publish", "score")
    other = records[at(records, "claim", "score", 1)]["ids"][0]
    records[index] = records[index] | {"ids": [other, *records[index]["ids"][1:]]}
    return index


def children_twice(records: Records) -> int:
    index = at(records, "publish", "generate")
    records.insert(index, records[index] | {"finished": []})
    return index + 1


def lost_under_way(records: Records) -> int:
    index = at(records, "claim", "score") + 1
    records.insert(index, {"do": "lose", "graph": "train", "group": 0, "why": "its file is gone"})
    return index


MUTATIONS: dict[str, tuple[Callable[[Records], int], str]] = {
    "an issue is missing": (without("issue"), "claim: lease 1 of node 'generate' takes row 0, which was never made"),
    "a claim is missing": (without("claim", "score"), "publish: lease .* of graph 'train' was never granted"),
    "a publication is missing": (without("publish", "score"), "finish: lease .* leaves 2 of its rows out"),
    "the children are missing": (
        without("publish", "generate"),
        "takes row 8194, which is finished, or was never made",
    ),
    "the finish of a filter is missing": (without("finish", "keep"), "takes .* rows of group 0: row .* is left out"),
    "the finish of a group is missing": (without("finish", "advantages"), "with which advantages is not done"),
    "a release is missing": (without("release"), r"takes row 0, of group 0, which it holds already \(lease 1\)"),
    "an issue stands twice": (twice("issue"), "issue: row 0 is issued, but ids below 2 were given out before"),
    "a claim stands twice": (twice("claim", "score"), "claim: lease .* of node 'score' was granted before"),
    "a publication stands twice": (twice("publish", "score"), "publishes row .*, which is not, or no longer, its own"),
    "children are made twice": (children_twice, "makes row 8194, which was made before"),
    "children come after their parent is finished": (
        twice("publish", "generate"),
        "makes a row of row 0, which is not, or no longer, its own",
    ),
    "a finish stands twice": (twice("finish", "score"), r"finish: lease .* of graph 'train' was finished at byte \d+"),
    "a release stands twice": (twice("release"), r"was released \(its holder died\) at byte \d+"),
    "an id is issued again": (changed("issue", None, first=lambda id: id - 1), "row -1 is issued, but ids below 0"),
    "an id is left out": (changed("issue", None, first=lambda id: id + 1), "row 1 is issued, but 0 is next"),
    "a group is issued again": (changed("issue", None, group=7), "group 7 is issued, but 0 is next"),
    "one row is claimed for another": (
        changed("claim", "score", ids=lambda ids: [ids[0], 0]),
        "takes row 0, of group 0, which is of level 'prompts', not 'generate'",
    ),
    "a row is claimed twice": (changed("claim", "score", ids=lambda ids: [ids[0]] * 2), "which it holds already"),
    "a row is consumed twice": (
        changed("claim", "score", 1, ids=lambda ids: [8194, *ids]),
        "takes row 8194, of group 0, which it has consumed before",
    ),
    "a row is claimed too early": (
        moved("claim", "keep", "claim", "score"),
        "takes row 8194, of group 0, with which score is not done",
    ),
    "a dropped row is claimed": (
        changed("claim", "advantages", ids=lambda ids: [*ids, 8195]),
        r"takes row 8195, of group 0, which was dropped before it \(keep\)",
    ),
    "half a group is claimed": (
        changed("claim", "advantages", ids=lambda ids: ids[1:]),
        "takes 1 rows of group 0: row 8194 of the group is left out",
    ),
    "half a group is trained on": (
        changed("claim", "updater.update", ids=lambda ids: ids[1:]),
        "takes 1 rows of group 0: row 8194 of the group is left out",
    ),
    "a void lease publishes": (
        changed("publish", "generate", lease=1),
        r"publish: lease 1 of graph 'train' was released \(its holder died\)",
    ),
    "another's row is published": (two_samples_for_each_other, "publishes row .*, which is not, or no longer, its own"),
    "a row is published twice in one": (
        changed("publish", "score", ids=lambda ids: ids[:1] * 2),
        "publishes a row twice",
    ),
    "a child has another's id": (
        changed("publish", "generate", ids=lambda ids: [99, *ids[1:]]),
        "makes row 99 of row 0, but ids 8194 to 12289 are set aside for it",
    ),
    "a child has another's parent": (
        changed("publish", "generate", parents=lambda ids: [8194, *ids[1:]]),
        "makes a row of row 8194, which is not, or no longer, its own",
    ),
    "a child has no parent": (
        changed("publish", "generate", parents=lambda ids: ids[:-1]),
        "of 6 rows, parents, tokens or versions are more or fewer",
    ),
    "a map makes rows": (changed("publish", "score", parents=[0]), "parents of rows of a map"),
    "an unknown node": (changed("claim", "score", node="scor"), "graph 'train' has no node 'scor'"),
    "an unknown graph": (changed("claim", "score", graph="trian"), "graph 'trian' was not recorded"),
    "an unknown record": (changed("claim", "score", do="clam"), "clam: no such record is known"),
    "a field is missing": (changed("claim", "score", ids=None), "claim: the record lacks what it needs"),
    "an update trains on rows too old": (too_new, r"of version 0, for version 5 with a bound of 1 \(wait\)"),
    "a group is lost while it is worked on": (lost_under_way, "lose: group 0 is lost while row .* is leased"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_log_with_one_thing_wrong_is_refuted_at_its_place(mutation: str, true: Records, tmp_path: Path):
    mutate, message = MUTATIONS[mutation]
    index = mutate(true)
    report = report_of(true, tmp_path)
    assert report.violations, "nothing was found"
    found = [v for v in report.violations if re.search(message, str(v))]
    assert found, "\n".join(map(str, report.violations[:5]))
    if index >= 0:
        assert str(report.violations[0]).startswith(f"byte {byte_of(true, index)}: "), report.violations[0]


def test_a_started_run_holds_no_lease_of_the_run_before(tmp_path: Path):
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], round=0)
    for _ in range(2):
        assert ledger.claim(ledger.graph["generate"], max_rows=1)
    buffer.log.close()
    buffer = SampleBuffer.recover(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    buffer.note("step", 1)
    buffer.commit()
    report = check_log(tmp_path / "run")
    assert (report.restarts, report.violations) == (1, [])
    assert report.leases == {"granted": 2, "finished": 0, "released": 2, "open": 0}
    records = list(LogReader(tmp_path / "run" / "ledger.log"))
    del records[at(records, "release")]
    [violation] = map(str, report_of(records, tmp_path).violations)
    assert "the run was started again, but lease 1 of node 'generate' in graph 'train', claimed at byte" in violation
    buffer.log.close()


def test_a_quorum_takes_the_first_that_were_ready_and_cancels_the_others(tmp_path: Path):
    drive(tmp_path / "run", dapo(quorum=2)).log.close()
    report = check_log(tmp_path / "run")
    assert not report.violations and report.graphs["train"].dropped["over-issued at first"] == 2
    records = list(LogReader(tmp_path / "run" / "ledger.log"))
    index = at(records, "claim", "first")
    first, second = records[index]["ids"][:2]
    for ids, message in (
        ([first, second, second + 1], "takes 3 rows of group 0: its quorum is 2"),
        ([first], "takes 1 rows of group 0: 3 were ready"),
        ([first, second + 1], f"takes 2 rows of group 0: row {second} was ready before"),
    ):
        changed = [*records[:index], records[index] | {"ids": ids}]
        violations = report_of(changed, tmp_path).violations
        assert violations and message in str(violations[0]), violations


@pytest.mark.parametrize(("fate", "issued"), [("wait", 14), ("mask", 14), ("requeue", 16), ("drop", 14)])
def test_groups_that_are_too_old_go_where_their_fate_says(tmp_path: Path, fate: Any, issued: int):
    """Two prompts with three samples each were made of version 0; an update to version 5 wants them no older than 3."""
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], round=0)
    for node in ledger.graph.nodes[:-1]:
        lease = lease_of(ledger, node.name)
        if node.name == "keep":
            everything = Published(lease.ids, np.ones(len(lease.ids), np.int64))
            buffer.publish(ledger, lease, everything, None)
        else:
            publish(buffer, ledger, lease, 3)
        ledger.finish(lease)
    update = ledger.graph.nodes[-1]
    lease = ledger.claim(update, staleness=Staleness(5, 3, fate))
    assert (lease is not None) == (fate == "mask")
    buffer.commit()
    ledger.issue([0] * 6, [2] * 6, round=1)  # the ids go on behind those that were issued again
    buffer.commit()
    report = check_log(tmp_path / "run")
    assert not report.violations, report.violations
    train = report.graphs["train"]
    assert train.stale == {fate: 2} and train.issued == issued == ledger.counts()["issued"]
    assert train.dropped == ({"stale at updater.update": 6} if fate in ("requeue", "drop") else {})
    buffer.log.close()


def test_a_checkpoint_that_is_not_what_the_log_says_is_found(tmp_path: Path):
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], round=0)
    position = buffer.checkpoint()
    assert check_log(tmp_path / "run").checkpoints == 1 and not check_log(tmp_path / "run").violations
    [path] = (tmp_path / "run").glob("*.checkpoint")
    _, records = read_checkpoint(path)
    write_checkpoint(path, position, [r for r in records if r.get("id") != 1])
    assert list(map(str, check_log(tmp_path / "run").violations)) == [
        f"{path.name}: row 1 is in flight, which the checkpoint has not"
    ]
    for foreign in (Position(position.offset, 1), Position(position.offset - 3, position.checksum)):
        write_checkpoint(path, foreign, records)
        report = check_log(tmp_path / "run")
        assert not report.violations and not report.checkpoints and "of another log" in report.damage[0]
    path.write_bytes(path.read_bytes()[:-3])
    report = check_log(tmp_path / "run")
    assert not report.violations and "the last record is torn" in report.damage[0]
    buffer.log.close()


def test_a_torn_tail_and_what_was_cut_off_are_reported_and_are_no_violation(tmp_path: Path):
    drive(tmp_path / "run", dapo()).log.close()
    log = tmp_path / "run" / "ledger.log"
    log.write_bytes(log.read_bytes()[:-5])
    report = check_log(tmp_path / "run")
    assert not report.violations and "the last record is torn" in report.damage[0]
    assert report.leases["open"] == 1 and report.graphs["train"].leased == 3
    SampleBuffer.recover(tmp_path / "run", {"train": dapo()}, check=lambda segment: None).log.close()
    report = check_log(tmp_path / "run")
    assert not report.violations and report.restarts == 1 and "bytes were cut off the log" in report.damage[0]


@dataclass
class Epoch:
    """A writer of the log."""

    number: int

    def check(self) -> None: ...

    def record(self) -> Record:
        return {"do": "epoch", "epoch": self.number, "host": "here", "pid": 7, "since": "2026-11-22 04:20:15 UTC"}


def test_epochs_in_a_log_count_restarts_and_show_two_drivers(tmp_path: Path):
    graphs = {"train": dapo()}
    SampleBuffer.create(tmp_path, graphs, fence=Epoch(1)).close()
    for number in (2, 5):
        buffer = SampleBuffer.recover(tmp_path, graphs, fence=Epoch(number), check=lambda segment: None)
        if number == 2:
            buffer.ledgers["train"].issue([0], [2], round=0)
            buffer.ledgers["train"].claim(buffer.ledgers["train"].graph.nodes[0])
        buffer.log.close()
    report = check_log(tmp_path)
    assert not report.violations and report.restarts == 2, "also the one that found no lease"
    SampleBuffer.recover(tmp_path, graphs, fence=Epoch(4)).log.close()
    (violation,) = map(str, check_log(tmp_path).violations)
    assert (
        "epoch 4 (host 'here', process 7, since 2026-11-22 04:20:15 UTC) begins after epoch 5: two drivers" in violation
    )


def test_a_log_that_two_drivers_appended_to_is_refuted_with_the_place_where_they_parted(tmp_path: Path):
    buffer = drive(tmp_path / "run", dapo())
    place = buffer.log.position
    buffer.note("step", 1)
    buffer.commit()
    shutil.copy(tmp_path / "run" / "ledger.log", tmp_path / "other")
    other = Log(tmp_path / "other", at=place)
    other.append({"do": "note", "key": "step", "value": 2})
    other.close()
    log = tmp_path / "run" / "ledger.log"
    log.write_bytes(log.read_bytes() + (tmp_path / "other").read_bytes()[place.offset :])
    (violation,) = map(str, check_log(tmp_path / "run").violations)
    assert f"it goes on from byte {place.offset}: two processes appended to this log at once" in violation


def test_a_folder_without_a_log_is_the_users_mistake(tmp_path: Path):
    with pytest.raises(UserError, match="holds no log of a run"):
        check_log(tmp_path)


def test_a_hundred_thousand_row_events_are_proven_in_a_second_or_so(tmp_path: Path):
    drive(tmp_path / "warm", dapo()).log.close()
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    for step in range(10):
        ledger.issue(range(125), [2] * 125, round=step)
        for node in ledger.graph.nodes:
            while lease := ledger.claim(node, max_rows=100, max_groups=20):
                publish(buffer, ledger, lease, 8)
                ledger.finish(lease)
    buffer.log.close()
    started = time.process_time()
    report = check_log(tmp_path / "run")
    took = time.process_time() - started
    events = 2 * sum(report.graphs["train"].consumed.values())  # each was claimed and published
    assert not report.violations and events > 40_000
    assert took < 4 * events / 100_000, f"{events / took:.0f} row-events a second"


def test_a_row_that_comes_after_its_quorum_was_chosen_is_dropped_and_so_is_work_for_it(tmp_path: Path):
    draw = Drawing("train")
    rows = draw.add(draw.prompts, "chunk", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(rows, "generate", Shape.EXPAND, reads=("chunk_c",))
    draw.add(samples, "length", reads=("generate_c",))  # wants all samples, so the quorum does not end generation
    rows = draw.add(samples, "score", reads=("generate_c",))
    draw.add(rows, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(1))
    buffer = SampleBuffer.create(tmp_path / "run", {"train": draw.graph()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0], [1], round=0)
    for name in ("chunk", "generate", "score", "first", "generate", "length", "length"):
        lease = ledger.claim(ledger.graph[name], max_rows=1)
        assert lease is not None
        publish(buffer, ledger, lease, 2 if name == "chunk" else 1)
        ledger.finish(lease)
    assert ledger.groups_in_flight == 0
    buffer.log.close()
    report = check_log(tmp_path / "run")
    assert not report.violations
    train = report.graphs["train"]
    assert (train.issued, train.done, train.dropped) == (5, 4, {"late at first": 1})
    assert train.consumed == {"chunk": 1, "generate": 2, "length": 2, "score": 1, "first": 1}
