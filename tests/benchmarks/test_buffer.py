"""The buffer benchmark's data, and that every work is verified."""

from pathlib import Path
from typing import Any

import pytest


def test_any_process_makes_the_same_groups_of_about_2000_tokens_a_row(load: Any):
    rows = load("buffer/rows")
    groups = rows.ragged(1024, seed=7)
    assert rows.hashes([groups[5]]) == rows.hashes([rows.group(7, 5)])
    assert len(set(rows.hashes(groups))) == 1024
    tokens = sum(
        len(group[name].flatten()) for group in groups for name in ("prompt_ids", "response_ids")
    )
    assert tokens / 1024 == pytest.approx(2000, rel=0.05)
    with pytest.raises(ValueError, match="not complete groups"):
        rows.ragged(12)


def test_rows_keep_their_content_when_groups_are_joined_or_cut(load: Any):
    rows = load("buffer/rows")
    groups = rows.ragged(24)
    [joined] = rows.joined(groups, 3)
    assert rows.hashes([joined]) == rows.hashes(groups)
    assert rows.hashes([joined.slice(8, 8)]) == rows.hashes([groups[1]]), (
        "a part of a batch starts anywhere"
    )
    changed = [*groups[:2], rows.group(1, 2)]
    assert rows.hashes(changed) != rows.hashes(groups)


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
