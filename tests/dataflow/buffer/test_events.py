"""Events and their records: reading a record gives the same event."""

import json
from functools import partial
from typing import Any

import pytest

from weft.dataflow.buffer.events import publish_json, to_json
from weft.dataflow.runs.log import unpacked

SEGMENT = ["n0", 'file "0"', 7, 12, 99]
MADE: dict[str, Any] = {"lease": 3, "ids": [4], "tokens": [7]}
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("issue", {"first": 4, "group": 2, "step": 1, "positions": [7, 8], "tokens": [3, 5]}),
    ("issue", {"first": 4, "group": 2, "step": 1, "positions": [], "tokens": []}),
    ("issue", {"first": 4, "group": 2, "step": 1, "positions": [*range(20)], "tokens": [3] * 20}),
    ("source", {"segment": SEGMENT}),
    ("claim", {"lease": 3, "node": "score", "ids": [4, 5]}),
    (
        "claim",
        {"lease": 3, "node": 'a "node"', "ids": [], "rows": 5, "groups": 2, "stale": [1, 2, "wait"]},
    ),
    ("claim", {"lease": 3, "node": "score", "ids": [4], "too_old": [2], "version": 0, "holder": "über"}),
    ("publish", MADE),
    ("publish", {"lease": 3, "ids": [4, 5], "tokens": [7, 9], "segment": SEGMENT}),
    ("publish", {**MADE, "segment": SEGMENT, "versions": [2], "parents": [1], "finished": []}),
    ("publish", {**MADE, "versions": [2], "parents": [1], "finished": []}),
    ("publish", {**MADE, "segment": SEGMENT, "versions": [2], "parents": [1], "finished": [1]}),
    ("publish", {**MADE, "segment": SEGMENT, "parents": [1], "finished": []}),
    ("publish", {**MADE, "segment": SEGMENT, "versions": [2], "parents": [1]}),
    ("publish", {**MADE, "segments": [[1, *SEGMENT], [0, *SEGMENT]]}),
    (
        "publish",
        {"lease": 3, "ids": [], "tokens": [], "versions": [], "parents": [], "finished": [1, 2]},
    ),
    ("claim", {"lease": 3, "node": "score", "ids": [*range(4, 20), 22, *range(5000, 5016)]}),
    (
        "publish",
        {
            "lease": 3,
            "ids": list(range(4, 20)),
            "tokens": [0] * 16,
            "segment": SEGMENT,
            "versions": [7] * 16,
            "parents": [1] * 16,
            "finished": [],
        },
    ),
    ("publish", {"lease": 3, "ids": list(range(40, 4, -2)), "tokens": list(range(18))}),
    ("finish", {"lease": 3}),
    ("finish", {"lease": 3, "step": 0}),
    ("release", {"lease": 3, "why": "given\nback"}),
    ("release", {"lease": 3, "why": "some", "ids": [5]}),
    ("drop", {"node": "score", "ids": [4], "why": "it failed"}),
    ("lose", {"group": 2, "why": "gone"}),
    ("lose", {"group": 2, "why": "gone", "again": False}),
    ("offer", {"node": "first", "group": 2}),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: str(event)[:60])
def test_an_event_is_read_unchanged(event: tuple[str, dict[str, Any]]):
    do, fields = event
    write = publish_json if do == "publish" else partial(to_json, do)
    text = write('a "graph"', **fields)
    assert "\n" not in text and " " not in text.replace("a \\", "").replace("file \\", "").replace(
        "it failed", ""
    )
    assert unpacked(json.loads(text)) == {"do": do, "graph": 'a "graph"', **fields}


def test_ids_that_follow_each_other_and_equal_values_are_written_once():
    ids = [*range(4, 20), 30, 31]
    text = publish_json("train", lease=3, ids=ids, tokens=[0] * 18, versions=[7] * 18)
    assert '"ids":[[4,16],[30,2]],"tokens":0,"versions":7' in text


def test_fields_without_a_value_are_left_out():
    text = to_json("claim", "train", lease=3, node="score", ids=[4], rows=None, holder=None)
    assert text == '{"do":"claim","graph":"train","lease":3,"node":"score","ids":[4]}'
    assert (
        publish_json("train", lease=3, ids=[4], tokens=[7])
        == '{"do":"publish","graph":"train","lease":3,"ids":[4],"tokens":[7]}'
    )
