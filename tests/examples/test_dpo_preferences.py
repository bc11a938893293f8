"""The example runs in its small setting: with a reference that is computed beforehand, and without one; and under Ray."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run


@pytest.mark.parametrize("method", ["rpo", "simpo"])
def test_the_example_runs_in_one_process(root: Path, method: str):
    said = run("dpo_preferences.py", "--method", method, "--name", method, root=root)
    summary = json.loads(said.splitlines()[-1])
    assert summary["steps"] == 3 and summary["pairs"] == 3 * 8
    assert 0 <= summary["preference_accuracy_before"] <= 1 and 0 <= summary["preference_accuracy_after"] <= 1
    metrics = pq.read_table(root / method / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    if method == "rpo":  # the policy begins as its reference
        assert abs(metrics[1]["actor/chosen_reward"]) < 1e-4 and abs(metrics[1]["actor/reward_margin"]) < 1e-4
    assert ("reference_of_pairs" in said) == (method == "rpo")
    assert (root / method / "curve.png").exists() and (root / method / "model" / "model.safetensors").exists()


@pytest.mark.ray
def test_the_example_runs_on_two_ranks_under_ray(root: Path):
    one, two = (
        json.loads(run("dpo_preferences.py", "--name", backend, root=root, backend=backend).splitlines()[-1])
        for backend in ("local", "ray")
    )
    for name in ("preference_accuracy_before", "preference_accuracy_after"):
        assert abs(one[name] - two[name]) <= 2 / 512, "the same updates, but for rounding"
    log = (root / "ray" / "config.json").read_text()
    assert "RayBackend" in log and (root / "ray" / "model" / "model.safetensors").exists()
