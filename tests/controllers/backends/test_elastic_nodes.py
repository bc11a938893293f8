"""An elastic group on Ray: ranks join when a node joins, and leave when a node is killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_ranks_join_with_a_node_that_comes_and_leave_with_one_that_is_killed(tmp_path: Path):
    script = Path(__file__).with_name("elastic_run.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    alone, three, left, again = (
        {rank: devices for rank, devices, _ in look} for look in result["looks"]
    )
    assert all(visible == ",".join(devices) for look in result["looks"] for _, devices, visible in look)
    (stays,) = alone
    assert alone == {stays: ["0"]} and three.keys() == {0, 1, 2} and left == alone
    joined = {rank: devices for rank, devices in three.items() if rank != stays}
    assert sorted(joined.values()) == [["0"], ["1"]], (
        "each has a GPU of its own of those of the node that came"
    )
    (back,) = again.keys() - {stays}
    assert again[back] == ["0"], "its device on the node where it is now"

    said = done.stdout
    assert "reward x1 (of 3)" in said and "3 of 3 ranks are up" in said and "left, " in said
    assert result["starts"] == 0 and not result["violations"]
    assert 0 < result["repeated"] <= 6, "those that its ranks held"
    assert result["rows"] == 2 * result["trained"] == 2 * 4 * result["steps"], (
        "no row is lost, none is trained on twice"
    )
