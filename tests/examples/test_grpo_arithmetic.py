"""The example runs in its small setting, in one process, with either engine; `.ci/run` runs it under Ray."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_example_runs_in_one_process(root: Path, engine: str):
    summary = json.loads(run("grpo_arithmetic.py", "--engine", engine, root=root).splitlines()[-1])
    assert summary["steps"] == 3 and summary["samples"] == 3 * 8 * 8
    assert summary["mean_logprob_gap"] <= 1e-5 and summary["max_logprob_gap"] <= 5e-4
    made = max((p for p in root.iterdir() if (p / "curve.png").exists()), key=lambda p: p.stat().st_mtime)
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/reward/mean"] is not None
    assert (made / "model" / "model.safetensors").exists()
