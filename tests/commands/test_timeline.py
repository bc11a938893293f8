"""`weft timeline`: its output, and the place of its picture."""

import json
from pathlib import Path

import pytest

from weft.__main__ import main
from weft.dataflow.runs.directory import RunDirectory


@pytest.fixture
def timeline_run(runs: Path) -> Path:
    """runs/tiny with a timeline: two steps of one second each; the actor is busy for a quarter."""
    directory = RunDirectory(runs / "tiny")
    for step in (0, 1):
        for name, what, start_s, end_s in (
            ("rollout", "generate", 0.0, 0.75),
            ("actor", "update", 0.75, 1.0),
        ):
            call = {
                "step": step,
                "group": name,
                "node": what,
                "start_s": step + start_s,
                "end_s": step + end_s,
            }
            directory.add_call(**call, worker_s=end_s - start_s, rows=8)
    directory.flush()
    return runs / "tiny"


def test_timeline_prints_and_draws_the_load_of_each_group(
    timeline_run: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["timeline", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps 0 to 1: 4 calls in 2.00 s",
        "",
        "group    calls  busy %  idle %  longest gap  between",
        "rollout      2    75.0    25.0       0.25 s  generate and generate, at 0.75 s",
        "actor        2    25.0    75.0       0.75 s  start and update, at 0 s",
        "",
        "group    node      calls  rows  seconds   in worker  mean call  share %",
        "rollout  generate      2    16      1.50       1.50     0.75 s     75.0",
        "actor    update        2    16      0.50       0.50     0.25 s     25.0",
        "",
        "picture: runs/tiny/timeline.png",
    ]
    assert (timeline_run / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_timeline_of_some_steps_is_written_to_the_given_path(
    timeline_run: Path, capsys: pytest.CaptureFixture[str]
):
    out = timeline_run.parent.parent / "some.svg"
    assert main(["timeline", "tiny", "--steps", "1:", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 1: 2 calls in 1.00 s" and said[-1] == f"picture: {out}"
    assert "<svg" in out.read_text() and not (timeline_run / "timeline.png").exists()


def test_timeline_writes_a_trace_for_perfetto(timeline_run: Path, capsys: pytest.CaptureFixture[str]):
    trace = timeline_run.parent.parent / "trace.json"
    assert main(["timeline", "tiny", "--perfetto", str(trace)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"trace: {trace}"
    events = json.loads(trace.read_text())["traceEvents"]
    busy = {"generate": 0.0, "update": 0.0}
    for event in events:
        if event["ph"] == "X":
            busy[event["name"]] += event["dur"] / 1e6
    assert busy == {"generate": 1.5, "update": 0.5}


def test_timeline_ends_with_two_when_the_user_can_mend_it(
    timeline_run: Path, capsys: pytest.CaptureFixture[str]
):
    for arguments, says in (
        (["tinny"], "there is no run runs/tinny; did you mean 'tiny'?"),
        (["tiny", "--steps", "7:9"], "no step in 7:9; it has steps 0 to 1"),
        (["tiny", "--steps", "7-9"], "not '7-9'"),
        (["tiny", "--out", "picture.doc"], "cannot be written to picture.doc"),
    ):
        assert main(["timeline", *arguments]) == 2
        assert says in capsys.readouterr().err
    (timeline_run / "timeline.arrows").unlink()
    assert main(["timeline", "tiny"]) == 2
    assert "runs/tiny has no timeline" in capsys.readouterr().err


def test_timeline_as_json_has_the_idle_share_of_each_group_and_the_times_of_each_node(
    timeline_run: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["timeline", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["end_s"], found["groups"]["rollout"]["idle"]) == (2.0, 0.25)
    assert found["picture"] == "runs/tiny/timeline.png"
    update = {
        "group": "actor",
        "node": "update",
        "calls": 2,
        "rows": 16,
        "seconds": 0.5,
        "worker_s": 0.5,
        "share": 0.25,
    }
    assert found["nodes"][1] == update
