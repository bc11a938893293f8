"""What an operation takes, in the format of the log."""

import json

import pytest

from weft.dataflow.operation import (
    FINISHED_GROUPS,
    GROUPS,
    ROWS,
    Quorum,
    Takes,
    TrainingBatch,
    takes_as_json,
    takes_from_json,
)


@pytest.mark.parametrize(
    ("takes", "kind"),
    [
        (ROWS, "rows"),
        (GROUPS, "groups"),
        (FINISHED_GROUPS, "finished groups"),
        (Quorum(2), "quorum"),
        (Quorum(3, 1.5), "quorum"),
        (TrainingBatch(), "training batch"),
        (TrainingBatch(whole_groups=True, accumulates=True), "training batch"),
    ],
)
def test_takes_survive_a_round_trip_through_the_log(takes: Takes, kind: str):
    described = json.loads(json.dumps(takes_as_json(takes)))
    assert described["kind"] == kind
    assert takes_from_json(described) == takes
