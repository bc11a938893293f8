"""What the buffer's benchmark works on, and that every work comes back verified."""

from pathlib import Path
from typing import Any

import pytest


def test_any_process_makes_the_same_groups_of_about_2000_tokens_a_row(load: Any):
    rows = load("buffer/rows")
    groups = rows.ragged(1024, seed=7)
    again = rows.group(7, 5)
    assert [*map(rows.content_hash, groups[5].rows())] == [*map(rows.content_hash, again.rows())]
    assert len({rows.content_hash(row) for group in groups for row in group.rows()}) == 1024
    assert sum(group.num_tokens for group in groups) / 1024 == pytest.approx(2000, rel=0.05)
    with pytest.raises(ValueError, match="not complete groups"):
        rows.ragged(12)


def test_groups_are_the_same_rows_joined_and_in_arrow(load: Any):
    rows = load("buffer/rows")
    groups = rows.ragged(24)
    joined = rows.joined(groups)
    expected = [rows.content_hash(row) for group in groups for row in group.rows()]
    assert [rows.content_hash(row) for row in joined.rows()] == expected
    arrow = joined.to_arrow()
    assert arrow.schema.names == list(rows.DTYPES)
    assert arrow["response_ids"][17].as_py() == joined["response_ids"][17].tolist()
    assert arrow["reward"].to_pylist() == joined.scalars["reward"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["weft_buffer.py", "queue_peer.py"])
def test_a_buffer_does_all_its_work_in_small(load: Any, script: str, tmp_path: Path):
    turns, machine, rows = load("turns"), load("machine"), load("buffer/rows")
    python = {"python": machine.PEERS} if script == "queue_peer.py" else {}
    if python and not machine.PEERS.exists():
        pytest.skip("no peers: `make bench-peers`")
    folder = Path(rows.__file__).parent
    system = turns.System(folder / script, "--small", log=tmp_path / "log", **python)
    try:
        for work in rows.DEFAULTS:
            [answer] = system.run(1, work=work)
            assert answer["work"] == work and answer["verified"], answer
    finally:
        system.close()
