"""`weft explain`: its table, its JSON, and wrong arguments."""

import json
from pathlib import Path

import pytest

from weft.__main__ import main
from weft.dataflow.runs.directory import RunDirectory


@pytest.fixture
def explained(runs: Path) -> Path:
    """runs/tiny: a start of one second, and two steps of two."""
    directory = RunDirectory(runs / "tiny")
    calls = [(0, "", "actor", "publish_weights", 0.0, 1.0)]
    for step, begin in ((1, 1.0), (2, 3.0)):
        calls += [
            (step, "train", "rollout", "rollout.generate", begin, begin + 1.5),
            (step, "train", "actor", "actor.update", begin + 1.75, begin + 2.0),
        ]
    for step, graph, group, node, start_s, end_s in calls:
        own = {"step": step, "graph": graph, "group": group, "node": node}
        directory.add_call(**own, start_s=start_s, end_s=end_s, worker_s=end_s - start_s, rows=8)
    directory.flush()
    return runs / "tiny"


def test_explain_prints_what_the_steps_waited_for(explained: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps 1 to 2: 4 calls in 4.00 s; a step takes 2.00 s (median)",
        "",
        "group    call              cause    a step     share %",
        "rollout  rollout.generate  compute     1.50 s     75.0",
        "-        -                 driver      0.25 s     12.5",
        "actor    actor.update      compute     0.25 s     12.5",
        "",
        "compute: the ranks compute",
        "driver: no call is under way",
    ]


def test_explain_as_json_has_all_causes_of_the_chosen_steps(
    explained: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["explain", "tiny", "--steps", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["seconds"], found["median_step_s"]) == ([0], 1.0, 1.0)
    [limit] = found["limits"]
    assert (limit["node"], limit["cause"], limit["seconds"], limit["share"]) == (
        "publish_weights",
        "weights",
        1.0,
        1.0,
    )


def test_a_step_that_the_run_does_not_have_is_refused(
    explained: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["explain", "tiny", "--steps", "7"]) == 2
    assert "no step in 7; it has steps 0 to 2" in capsys.readouterr().err
