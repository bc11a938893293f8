"""The small example in one process, with either engine."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run, summary


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_the_example_runs_in_one_process(root: Path, engine: str):
    found = summary(run("agent_calculator.py", f"calculator-{engine}", "--engine", engine, root=root))
    assert found["steps"] == 3 and 1 <= found["turns"] <= 4
    assert found["max_logprob_gap"] <= 5e-4
    made = root / f"calculator-{engine}"
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/pass@1"] is not None
    assert all(row["rollout/retokenised"] == 0 for row in metrics[1:])
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:]), "it has something to learn"
    assert (made / "model" / "model.safetensors").exists() and (made / "curve.png").exists()
