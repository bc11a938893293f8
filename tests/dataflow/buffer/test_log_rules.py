"""The checker accepts logs of the real ledger, and finds the broken rule and place in a corrupted
log."""

import ast
import importlib
import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import Drawing, dapo, random_graph
from played_ledgers import Play, Records, at, byte_of, drive, lease_of, publish, report_of

from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.log_rules import Checker, Rule
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.operation import Quorum, Shape
from weft.dataflow.runs.log import LogReader


@pytest.mark.parametrize("runs", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_random_ledger_operations_keep_the_rules_and_the_counts(
    tmp_path_factory: pytest.TempPathFactory, runs: int
):
    @settings(max_examples=runs, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def keeps_the_law(seed: int) -> None:
        chance = random.Random(seed)
        graphs = {name: random_graph(chance, name) for name in ("train", "eval")[: chance.randint(1, 2)]}
        play = Play(tmp_path_factory.mktemp("run"), graphs, chance)
        for _ in range(4):
            play.random_moves(40)
            agree(play)
        play.run_dry()
        agree(play)
        play.buffer.log.close()

    keeps_the_law()


def agree(play: Play) -> None:
    report = play.report()
    assert not report.violations, "\n".join(map(str, report.violations))
    for name, ledger in play.buffer.ledgers.items():
        counted, proven = ledger.live.counts(), report.graphs[name]
        ours = [proven.issued, proven.waiting, proven.leased, proven.done, sum(proven.dropped.values())]
        assert ours == list(counted.values()), (name, counted, proven)
        assert proven.stale == dict(ledger.stale)
    assert report.leases["open"] == sum(len(g.leases) for g in play.buffer.ledgers.values())


# Corrupted logs


@pytest.fixture
def true(tmp_path: Path) -> Records:
    """The log records of a complete run of `dapo`."""
    drive(tmp_path / "true", dapo()).log.close()
    records = list(LogReader(tmp_path / "true" / "ledger.log"))
    assert not report_of(records, tmp_path).violations
    return records


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
    """Change values of a record; each new value is a function of the old one."""

    def mutate(records: Records) -> int:
        index = at(records, do, of, number)
        record = records[index]
        records[index] = record | {k: v(record[k]) if callable(v) else v for k, v in values.items()}
        return index

    return mutate


def moved(do: str, node: str | None, after: str, of: str | None) -> Callable[[Records], int]:
    """Move a record behind another."""

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


def two_updates(records: Records) -> int:
    records += [{"do": "note", "key": "version/updater", "value": version} for version in (1, 2)]
    return len(records) - 1


def no_update(records: Records) -> int:
    records += [{"do": "note", "key": key, "value": 1} for key in ("version/updater", "step")]
    records.append({"do": "note", "key": "step", "value": 2})
    return len(records) - 1


def youngest_first(records: Records) -> int:
    """Make the first group younger than the second, so that the update takes it out of order."""
    index = at(records, "publish", "generate")
    records[index] = records[index] | {"versions": [1, 1, 1, 0, 0, 0]}
    index = at(records, "claim", "updater.update")
    records[index] = records[index] | {"ids": records[index]["ids"][:1], "groups": 1}
    return index


def not_set_aside(records: Records) -> int:
    """Let the update take one group without setting the stale one aside."""
    index = at(records, "publish", "generate")
    records[index] = records[index] | {"versions": [1, 1, 1, 0, 0, 0]}
    index = at(records, "claim", "updater.update")
    one = {"ids": records[index]["ids"][:1], "groups": 1, "stale": [1, 0, "wait"]}
    records[index] = records[index] | one
    return index


def lost_under_way(records: Records) -> int:
    index = at(records, "claim", "score") + 1
    records.insert(index, {"do": "lose", "graph": "train", "group": 0, "why": "its file is gone"})
    return index


WRONG: dict[Rule, dict[str, tuple[Callable[[Records], int], str]]] = {
    Rule.ONCE: {
        "an issue is missing": (
            without("issue"),
            "claim: lease 1 of node 'generate' takes row 0, which was never made",
        ),
        "the children are missing": (
            without("publish", "generate"),
            "takes row 8194, which is finished, or was never made",
        ),
        "a release is missing": (
            without("release"),
            r"takes row 0, of group 0, which it holds already \(lease 1\)",
        ),
        "a row is claimed twice": (
            changed("claim", "score", ids=lambda ids: [ids[0]] * 2),
            "which it holds already",
        ),
        "a row is consumed twice": (
            changed("claim", "score", 1, ids=lambda ids: [8194, *ids]),
            "takes row 8194, of group 0, which it has consumed before",
        ),
        "a dropped row is claimed": (
            changed("claim", "advantages", ids=lambda ids: [*ids, 8195]),
            r"takes row 8195, of group 0, which was dropped before it \(keep\)",
        ),
        "a row is published twice in one": (
            changed("publish", "score", ids=lambda ids: ids[:1] * 2),
            "publishes a row twice",
        ),
        "a group is lost while it is worked on": (
            lost_under_way,
            "lose: group 0 is lost while row .* is leased",
        ),
    },
    Rule.LEASE: {
        "a claim is missing": (
            without("claim", "score"),
            "publish: lease .* of graph 'train' was never granted",
        ),
        "a claim stands twice": (
            twice("claim", "score"),
            "claim: lease .* of node 'score' was granted before",
        ),
        "a publication stands twice": (
            twice("publish", "score"),
            "publishes row .*, which is not, or no longer, its own",
        ),
        "children come after their parent is finished": (
            twice("publish", "generate"),
            "makes a row of row 0, which is not, or no longer, its own",
        ),
        "a finish stands twice": (
            twice("finish", "score"),
            r"finish: lease .* of graph 'train' was finished at byte \d+",
        ),
        "a release stands twice": (twice("release"), r"was released \(its holder died\) at byte \d+"),
        "a void lease publishes": (
            changed("publish", "generate", lease=1),
            r"publish: lease 1 of graph 'train' was released \(its holder died\)",
        ),
        "another's row is published": (
            two_samples_for_each_other,
            "publishes row .*, which is not, or no longer, its own",
        ),
        "a child has another's parent": (
            changed("publish", "generate", parents=lambda ids: [8194, *ids[1:]]),
            "makes a row of row 8194, which is not, or no longer, its own",
        ),
    },
    Rule.NOTHING_LEFT_OUT: {
        "a publication is missing": (
            without("publish", "score"),
            "finish: lease .* leaves 2 of its rows out",
        ),
    },
    Rule.COMPLETE_GROUP: {
        "the finish of a filter is missing": (
            without("finish", "keep"),
            "takes .* rows of group 0: row .* is left out",
        ),
        "half a group is claimed": (
            changed("claim", "advantages", ids=lambda ids: ids[1:]),
            "takes 1 rows of group 0: row 8194 of the group is left out",
        ),
        "half a group is trained on": (
            changed("claim", "updater.update", ids=lambda ids: ids[1:]),
            "takes 1 rows of group 0: row 8194 of the group is left out",
        ),
    },
    Rule.READY: {
        "the finish of a group is missing": (
            without("finish", "advantages"),
            "with which advantages is not done",
        ),
        "one row is claimed for another": (
            changed("claim", "score", ids=lambda ids: [ids[0], 0]),
            "takes row 0, of group 0, which is of level 'prompts', not 'generate'",
        ),
        "a row is claimed too early": (
            moved("claim", "keep", "claim", "score"),
            "takes row 8194, of group 0, with which score is not done",
        ),
    },
    Rule.NEW_ID: {
        "an issue stands twice": (
            twice("issue"),
            "issue: row 0 is issued, but ids below 2 were given out before",
        ),
        "children are made twice": (children_twice, "makes row 8194, which was made before"),
        "an id is issued again": (
            changed("issue", None, first=lambda id: id - 1),
            "row -1 is issued, but ids below 0",
        ),
        "an id is left out": (
            changed("issue", None, first=lambda id: id + 1),
            "row 1 is issued, but 0 is next",
        ),
        "a group is issued again": (changed("issue", None, group=7), "group 7 is issued, but 0 is next"),
        "a child has another's id": (
            changed("publish", "generate", ids=lambda ids: [99, *ids[1:]]),
            "makes row 99 of row 0, but ids 8194 to 12289 are set aside for it",
        ),
    },
    Rule.KNOWN_RECORD: {
        "a child has no parent": (
            changed("publish", "generate", parents=lambda ids: ids[:-1]),
            "of 6 rows, parents, tokens or versions are more or fewer",
        ),
        "a map makes rows": (changed("publish", "score", parents=[0]), "parents of rows of a map"),
        "an unknown node": (changed("claim", "score", node="scor"), "graph 'train' has no node 'scor'"),
        "an unknown graph": (changed("claim", "score", graph="trian"), "graph 'trian' was not recorded"),
        "an unknown record": (changed("claim", "score", do="clam"), "clam: no such record is known"),
        "a field is missing": (
            changed("claim", "score", ids=None),
            "claim: the record lacks what it needs",
        ),
    },
    Rule.STALENESS: {
        "an update trains on rows too old": (
            too_new,
            r"of version 0, for version 5 with a bound of 1 \(wait\)",
        ),
        "a group that is too old is not set aside": (
            not_set_aside,
            r"sets groups \[\] aside as too old; those are \[1\]",
        ),
    },
    Rule.STEP: {
        "an update is of another step": (
            changed("finish", "updater.update", step=7),
            "is of step 7, but step 1 was under way",
        ),
    },
    Rule.ONE_UPDATE: {
        "a step has two updates": (
            two_updates,
            r"version 2 of 'updater' is update 2 of step 1, whose first is at byte \d+",
        ),
        "a step has no update": (no_update, "step 2 ended without an update of 'updater'"),
    },
    Rule.OLDEST_FIRST: {
        "an update takes the younger of two groups": (
            youngest_first,
            "takes group 0, of version 1, and leaves group 1, of version 0",
        ),
    },
}
"""Rule -> fault -> (change to a valid log, message).

The change returns the index of the record that breaks the rule, or -1.
"""


@pytest.mark.parametrize(
    ("rule", "wrong"), [(rule, wrong) for rule, mutations in WRONG.items() for wrong in mutations]
)
def test_a_log_with_one_thing_wrong_breaks_a_rule_at_its_place(
    rule: Rule, wrong: str, true: Records, tmp_path: Path
):
    mutate, message = WRONG[rule][wrong]
    index = mutate(true)
    violations = report_of(true, tmp_path).violations
    found = [violation.rule for violation in violations if re.search(message, str(violation))]
    assert found and found[0] is rule, "\n".join(map(str, violations[:5]))
    if index >= 0:
        assert violations[0].at == byte_of(true, index), violations[0]


def test_a_log_breaks_every_rule_in_one_test_or_another():
    elsewhere = {Rule.QUORUM, Rule.ACCOUNTED}  # tested below
    of_files = {
        Rule.ONE_WRITER,
        Rule.SOUND_LOG,
        Rule.CHECKPOINT,
        Rule.SAMPLES,
    }  # tested in test_check.py and test_recording.py
    assert {*WRONG, *elsewhere, *of_files} == set(Rule)


def test_a_row_in_no_state_or_in_two_is_not_accounted_for(true: Records):
    checker = Checker()
    for record in true[:2]:
        checker.feed(record)
    node = checker.graphs["train"].by_name["generate"]
    node.waiting.discard(0)
    node.done.add(1)
    said = [(violation.rule, violation.text) for violation in checker.end_log()]
    text = "graph 'train': row {} is in no state, or in two, at node 'generate'"
    assert said == [(Rule.ACCOUNTED, text.format(id)) for id in (0, 1)]


def test_the_checker_shares_no_code_with_the_ledger():
    """They share only the size of id blocks, which is part of the log format."""
    pending, seen = ["weft.dataflow.buffer.log_rules"], set[str]()
    while pending:
        module = importlib.import_module(name := pending.pop())
        seen.add(name)
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = {alias.name for alias in node.names}
                assert node.module != "rows" or names == {"MAX_CHILDREN"}, f"{name} imports {names}"
                other = f"weft.dataflow.buffer.{node.module}"
                pending += [other] if node.module != "rows" and other not in seen else []
    assert not seen & {
        f"weft.dataflow.buffer.{name}" for name in ("ledger", "ledger_state", "sample_buffer")
    }


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
def test_stale_groups_follow_the_policy(tmp_path: Path, fate: Any, issued: int):
    """Two prompts have three samples each of version 0; an update to version 5 accepts version 3 or
    newer."""
    buffer = SampleBuffer.create(tmp_path / "run", {"train": dapo()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1], [2, 2], step=0)
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
    ledger.issue([0] * 6, [2] * 6, step=1)  # ids continue after the reissued groups
    buffer.commit()
    report = check_log(tmp_path / "run")
    assert not report.violations, report.violations
    train = report.graphs["train"]
    assert train.stale == {fate: 2} and train.issued == issued == ledger.live.counts()["issued"]
    assert train.dropped == ({"stale at updater.update": 6} if fate in ("requeue", "drop") else {})
    buffer.log.close()


def test_a_row_that_comes_after_its_quorum_was_chosen_is_dropped_and_so_is_work_for_it(tmp_path: Path):
    draw = Drawing("train")
    rows = draw.add(draw.prompts, "chunk", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(rows, "generate", Shape.EXPAND, reads=("chunk_c",))
    draw.add(
        samples, "length", reads=("generate_c",)
    )  # takes all samples, so the quorum does not end generation
    rows = draw.add(samples, "score", reads=("generate_c",))
    draw.add(rows, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(1))
    buffer = SampleBuffer.create(tmp_path / "run", {"train": draw.graph()}, clock=lambda: 0.0)
    ledger = buffer.ledgers["train"]
    ledger.issue([0], [1], step=0)
    for name in ("chunk", "generate", "score", "first", "generate", "length", "length"):
        lease = ledger.claim(ledger.graph[name], max_rows=1)
        assert lease is not None
        publish(buffer, ledger, lease, 2 if name == "chunk" else 1)
        ledger.finish(lease)
    assert len(ledger.live.groups) == 0
    buffer.log.close()
    report = check_log(tmp_path / "run")
    assert not report.violations
    train = report.graphs["train"]
    assert (train.issued, train.done, train.dropped) == (5, 4, {"late at first": 1})
    assert train.consumed == {"chunk": 1, "generate": 2, "length": 2, "score": 1, "first": 1}
