"""The small example in one process, with a trained reward model and with the exact match."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run, summary


@pytest.mark.parametrize("reward", [pytest.param("model", marks=pytest.mark.slow), "exact"])
def test_the_example_runs_in_one_process(root: Path, reward: str):
    made = root / f"ppo-{reward}"
    said = run("ppo_arithmetic.py", made.name, "--reward", reward, root=root)
    found = summary(said)
    assert found["steps"] == 3 and found["samples"] == 3 * 8
    assert ("of held-out pairs in the right order" in said) == (reward == "model")
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3][
        "eval/reward/mean"
    ] is not None
    assert metrics[1]["critic/loss"] > 0 and metrics[1]["actor/max_logprob_gap"] <= 5e-4
    for name in ("model", "critic"):
        assert (made / name / "model.safetensors").exists()
