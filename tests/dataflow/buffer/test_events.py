"""Events and their records: reading a record gives the same event."""

import json

import pytest

from weft.dataflow.buffer.events import (
    Claim,
    Drop,
    Event,
    Finish,
    Issue,
    Lose,
    Offer,
    Publish,
    Release,
    SetSource,
    from_record,
    to_json,
)
from weft.dataflow.runs.log import unpacked

SEGMENT = ["n0", 'file "0"', 7, 12, 99]
EVENTS: list[Event] = [
    Issue(4, 2, 1, [7, 8], [3, 5]),
    Issue(4, 2, 1, [], []),
    SetSource(SEGMENT),
    Claim(3, "score", [4, 5]),
    Claim(3, 'a "node"', [], rows=5, groups=2, stale=[1, 2, "wait"], version=0, holder="über"),
    Publish(3, [4], [7]),
    Publish(3, [4, 5], [7, 9], SEGMENT),
    Publish(3, [4], [7], SEGMENT, [2], [1], []),
    Publish(3, [4], [7], None, [2], [1], []),
    Publish(3, [4], [7], SEGMENT, [2], [1], [1]),
    Publish(3, [4], [7], SEGMENT, None, [1], []),
    Publish(3, [4], [7], SEGMENT, [2], [1], None),
    Publish(3, [], [], None, [], [], [1, 2]),
    Claim(3, "score", [*range(4, 20), 22, *range(5000, 5016)]),
    Publish(3, list(range(4, 20)), [0] * 16, SEGMENT, [7] * 16, [1] * 16, []),
    Publish(3, list(range(40, 4, -2)), list(range(18))),
    Finish(3),
    Finish(3, step=0),
    Release(3, "given\nback"),
    Release(3, "some", ids=[5]),
    Drop("score", [4], "it failed"),
    Lose(2, "gone"),
    Lose(2, "gone", again=False),
    Offer("first", 2),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: str(event)[:60])
def test_an_event_is_read_unchanged(event: Event):
    text = to_json(event, 'a "graph"')
    assert "\n" not in text and " " not in text.replace("a \\", "").replace("file \\", "").replace(
        "it failed", ""
    )
    record = unpacked(json.loads(text))
    assert record["graph"] == 'a "graph"' and from_record(record) == event


def test_ids_that_follow_each_other_and_equal_values_are_written_once():
    text = to_json(Publish(3, [*range(4, 20), 30, 31], [0] * 18, None, [7] * 18), "train")
    assert '"ids":[[4,16],[30,2]],"tokens":0,"versions":7' in text


def test_default_values_are_left_out():
    assert json.loads(to_json(Claim(3, "score", [4]), "train")) == {
        "do": "claim",
        "graph": "train",
        "lease": 3,
        "node": "score",
        "ids": [4],
    }
    assert (
        to_json(Publish(3, [4], [7]), "train")
        == '{"do":"publish","graph":"train","lease":3,"ids":[4],"tokens":[7]}'
    )
