"""The small example with a precomputed reference and without one; slow tests run it under Ray."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small import run, summary

ACCURACY = "pairs/preference_accuracy"


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(run / "metrics.parquet").to_pylist()


def check(said: str, run: Path) -> None:
    """Check three steps, and that the printed summary equals the metrics."""
    found, metrics = summary(said), metrics_of(run)
    assert found["steps"] == 3 and found["pairs"] == 3 * 8
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert found["preference_accuracy_before"] == metrics[0][ACCURACY]
    assert found["preference_accuracy_after"] == metrics[-1][ACCURACY]
    assert (run / "curve.png").exists() and (run / "model" / "model.safetensors").exists()


@pytest.mark.thorough
def test_the_example_runs_with_a_reference_that_is_computed_beforehand(root: Path):
    said = run("dpo_preferences.py", "rpo", "--method", "rpo", root=root)
    check(said, root / "rpo")
    metrics = metrics_of(root / "rpo")
    assert abs(metrics[1]["actor/chosen_reward"]) < 1e-4, "the policy begins as its reference"
    assert abs(metrics[1]["actor/reward_margin"]) < 1e-4
    assert "reference_of_pairs" in said


@pytest.fixture(scope="module")
def simpo(root: Path) -> str:
    """The output of the example in one process."""
    return run("dpo_preferences.py", "simpo", "--method", "simpo", root=root)


@pytest.mark.thorough
def test_the_example_runs_without_a_reference(simpo: str, root: Path):
    check(simpo, root / "simpo")
    assert "reference_of_pairs" not in simpo


@pytest.mark.slow
@pytest.mark.ray
def test_the_example_runs_on_two_ranks_under_ray(simpo: str, root: Path):
    said = run("dpo_preferences.py", "simpo-ray", "--method", "simpo", root=root, backend="ray")
    one, two = summary(simpo), summary(said)
    for name in ("preference_accuracy_before", "preference_accuracy_after"):
        assert abs(one[name] - two[name]) <= 2 / 512, "the same updates, but for rounding"
    log = (root / "simpo-ray" / "config.json").read_text()
    assert "RayBackend" in log and (root / "simpo-ray" / "model" / "model.safetensors").exists()
