"""The history of a run's rows, and the reason why a group waits."""

from pathlib import Path

import pytest
from recorded_run import PROMPTS, Run, train

from weft.dataflow.buffer.queries import HISTORY, buffer_folder, history, why
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.errors import UserError


def test_history_gives_the_state_of_every_row_of_a_live_run(run: Run):
    run.generate()
    run.claim("score", max_rows=1)
    run.commit()
    table = history(run.path / "buffer")
    assert table.schema == HISTORY
    prompt, _, sample, other, *_ = table.to_pylist()
    assert prompt == {
        "graph": "train",
        "sample_id": 0,
        "group_id": 0,
        "parent_id": 0,
        "level": "prompts",
        "step": 3,
        "position": 0,
        "tokens": 1,
        "version": None,
        "state": "waiting",
        "reason": None,
        "done": ["generate"],
        "leased": [],
        "columns": [],
    }
    first = sample["sample_id"]
    assert (sample["parent_id"], sample["level"], sample["tokens"], sample["version"]) == (
        0,
        "generate",
        5,
        7,
    )
    assert (sample["state"], sample["leased"], other["state"]) == ("leased", ["score"], "waiting")
    [part] = sample["columns"]
    assert (part["writer"], part["node"], part["file"]) == (
        "generate",
        "here",
        run.ledger.parts.segments[0].file,
    )
    assert first == 2 and part["checksum"] == run.ledger.parts.segments[0].checksum


def test_history_keeps_finished_and_dropped_rows(run: Run):
    run.generate()
    run.map("score", "reward")
    run.keep(3)
    run.map("advantages", "centred")
    run.close()
    table = history(run.path / "buffer")
    states = table.group_by("state").aggregate([([], "count_all")]).to_pydict()
    assert dict(zip(states["state"], states["count_all"], strict=True)) == {"done": 5, "dropped": 1}
    last = table.to_pylist()[-1]
    assert (last["reason"], last["done"], last["columns"]) == ("keep", ["score", "keep"], [])
    assert run.ledger.live.counts() == {"issued": 6, "waiting": 0, "leased": 0, "done": 5, "dropped": 1}


def test_why_explains_the_wait_of_a_group(run: Run):
    run.generate()
    run.claim("score", max_rows=1)
    run.commit()
    assert why(run.path / "buffer", 0).splitlines() == [
        "group 0 of graph 'train' (row 0 of the source, step 3, 3 rows) is in flight",
        "score: 2 of 2 rows to do; 1 leased",
        "keep: 2 of 2 rows to do; waits for score",
        "advantages: 2 of 2 rows to do; waits for keep, score",
    ]


def test_why_reports_finished_and_never_issued_groups(run: Run):
    run.generate()
    run.map("score", "reward")
    run.buffer.note("step", 12)
    run.keep(3)
    run.map("advantages", "centred")
    offset = run.buffer.log.position.offset
    said = why(run.path / "buffer", 1)
    start = "group 1 of graph 'train' (row 1 of the source, step 3) was finished at byte "
    end = " of the log, after step 12: of 3 rows 2 done, 1 dropped: keep"
    assert said.startswith(start) and said.endswith(end), said
    assert 0 < int(said[len(start) : -len(end)]) < offset
    assert why(run.path / "buffer", 2) == "group 2 was never issued; groups 0 to 1 were"
    with pytest.raises(UserError, match="the run has no graph 'trian'; did you mean 'train'"):
        why(run.path / "buffer", 1, "trian")


def test_why_names_a_group_that_is_too_old_and_waits(tmp_path: Path):
    run = Run(tmp_path / "run", train(PROMPTS))
    run.generate()
    run.map("score", "reward")
    run.keep(4)
    found = run.ledger.claim(run.ledger.graph["advantages"], staleness=Staleness(9, 1, "wait"))
    run.commit()
    assert found is None
    said = why(tmp_path / "run" / "buffer", 0).splitlines()
    assert (
        said[1].startswith("advantages: ")
        and "too old, of version 7; waits for a larger bound" in said[1]
    )
    run.close()


def test_a_run_that_is_not_there_is_answered_with_the_nearest_one(run: Run):
    assert buffer_folder(run.path) == buffer_folder(run.path / "buffer") == run.path / "buffer"
    with pytest.raises(UserError, match=r"there is no run .*; did you mean 'one'"):
        buffer_folder(run.path.parent / "onee")
    with pytest.raises(UserError, match=r"has no buffer/ledger\.log"):
        buffer_folder(run.path.parent)
