"""The example runs in its small setting, in one process, and leaves an adapter beside the merged model."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from small import run
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_example_runs_in_one_process(root: Path, engine: str):
    more = ["--dora"] if engine == "vllm" else []
    said = run("rloo_lora.py", "--engine", engine, "--name", engine, *more, root=root)
    summary = json.loads(said.splitlines()[-1])
    assert summary["steps"] == 3 and summary["samples"] == 3 * 8 * 8
    assert summary["mean_logprob_gap"] <= 1e-5 and summary["max_logprob_gap"] <= 5e-4
    made = root / engine
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/reward/mean"] is not None
    assert all(row["reward/mean"] > 0 and row["actor/grad_norm"] > 0 for row in metrics[1:]), (
        "it has something to learn"
    )
    base = AutoModelForCausalLM.from_pretrained(root / "arithmetic-0-small" / "model")
    merged = PeftModel.from_pretrained(base, made / "adapter").merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]
    model = AutoModelForCausalLM.from_pretrained(made / "model").state_dict()
    assert all(float((model[name] - merged[name]).abs().max()) < 1e-6 for name in model)
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
