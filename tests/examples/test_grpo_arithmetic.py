"""The small example in one process, with either engine. `.ci/run` runs it under Ray with vLLM."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import run, summary


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("transformers", marks=pytest.mark.thorough),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_the_example_runs_in_one_process(root: Path, engine: str):
    steps = ["--steps", "2"] if engine == "transformers" else []
    found = summary(run("grpo_arithmetic.py", f"grpo-{engine}", "--engine", engine, *steps, root=root))
    count = 2 if steps else 3
    assert found["steps"] == count and found["samples"] == count * 8 * 8, (
        "--small, but for what is given"
    )
    assert found["mean_logprob_gap"] <= 1e-5 and found["max_logprob_gap"] <= 5e-4
    made = root / f"grpo-{engine}"
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == list(range(count + 1)) and metrics[-1][
        "eval/reward/mean"
    ] is not None
    assert all(row["reward/mean"] > 0 and row["actor/grad_norm"] > 0 for row in metrics[1:]), (
        "it has something to learn"
    )
    assert (made / "model" / "model.safetensors").exists() and (made / "curve.png").exists()
