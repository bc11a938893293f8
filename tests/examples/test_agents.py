"""The small examples of agents in one process, with either engine."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run, summary


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
@pytest.mark.parametrize(("example", "most_turns"), [("agent_calculator", 4), ("agent_gridworld", 8)])
def test_the_example_runs_in_one_process(root: Path, example: str, most_turns: int, engine: str):
    name = f"{example}-{engine}"
    found = summary(run(f"{example}.py", name, "--engine", engine, root=root))
    assert found["steps"] == 3 and 1 <= found["turns"] <= most_turns
    assert found["max_logprob_gap"] <= 5e-4
    metrics = pq.read_table(root / name / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/pass@1"] is not None
    assert all(row["rollout/retokenised"] == 0 for row in metrics[1:])
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:]), "it has something to learn"
    assert (root / name / "model" / "model.safetensors").exists()
    assert (root / name / "curve.png").exists()
