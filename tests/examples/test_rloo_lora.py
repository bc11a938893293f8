"""The small example in one process saves both an adapter and the merged model."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from small import run, summary
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_the_example_runs_in_one_process(root: Path, engine: str):
    more = ["--dora"] if engine == "vllm" else []
    made = root / f"rloo-{engine}"
    found = summary(run("rloo_lora.py", made.name, "--engine", engine, *more, root=root))
    assert found["steps"] == 3 and found["samples"] == 3 * 8 * 8
    assert found["mean_logprob_gap"] <= 1e-5 and found["max_logprob_gap"] <= 5e-4
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3][
        "eval/reward/mean"
    ] is not None
    assert all(row["reward/mean"] > 0 and row["actor/grad_norm"] > 0 for row in metrics[1:]), (
        "it has something to learn"
    )
    base = AutoModelForCausalLM.from_pretrained(root / "arithmetic-0-small" / "model")
    merged = PeftModel.from_pretrained(base, made / "adapter").merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]
    model = AutoModelForCausalLM.from_pretrained(made / "model").state_dict()
    assert all(float((model[name] - merged[name]).abs().max()) < 1e-6 for name in model)
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
