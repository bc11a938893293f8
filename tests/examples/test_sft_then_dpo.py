"""The small example in one process; a second run reuses the model and the pairs of the first."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run, summary


@pytest.mark.thorough
def test_the_example_runs_in_one_process(tmp_path: Path):
    said = run("sft_then_dpo.py", "first", root=tmp_path)
    found, task = summary(said), tmp_path / "sft_then_dpo-0-small"
    pairs = [
        json.loads(line)
        for line in next(task.glob("supervised_*/pairs_*.jsonl")).read_text().splitlines()
    ]
    assert found["steps"] == 3 and found["pairs"] == len(pairs) > 8
    answers = {row["prompt"]: row["answer"] for row in pq.read_table(task / "train.parquet").to_pylist()}

    def right_digits(response: str, prompt: str) -> int:
        return sum(a == b for a, b in zip(response, answers[prompt], strict=False))

    assert all(
        right_digits(p["chosen"], p["prompt"]) > right_digits(p["rejected"], p["prompt"]) for p in pairs
    )
    metrics = pq.read_table(tmp_path / "first" / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3][
        "eval/reward/mean"
    ] is not None
    assert found["preference_accuracy"] == metrics[3]["actor/preference_accuracy"]
    assert abs(metrics[1]["actor/reward_margin"]) < 1e-4, "the policy begins as its reference"
    assert (tmp_path / "first" / "curve.png").exists() and (
        tmp_path / "first" / "model" / "model.safetensors"
    ).exists()

    again = run("sft_then_dpo.py", "second", root=tmp_path)
    assert "phase 1" in said and "phase 1" not in again and "phase 2" not in again
    assert summary(again)["pairs"] == found["pairs"]
