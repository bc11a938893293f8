"""The small example in one process: the student gets closer to a teacher that has just begun to learn."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run, summary


@pytest.mark.thorough
def test_the_example_runs_in_one_process(root: Path):
    found = summary(run("distillation.py", "distil", "--divergence", "jsd", root=root))
    assert found["steps"] == 3 and found["samples"] == 3 * 8
    assert found["max_logprob_gap"] <= 5e-4 and 0 < found["divergence"] < 0.7
    steps = pq.read_table(root / "distil" / "metrics.parquet").to_pylist()[1:]
    assert all(0 < row["actor/teacher_tail"] < 0.5 and row["actor/grad_norm"] > 0 for row in steps)
