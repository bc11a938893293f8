"""The example runs in its small setting, in one process, and leaves an adapter beside the merged model."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "rloo_lora.py"


def run(*arguments: str, root: Path) -> str:
    command = [sys.executable, str(EXAMPLE), "--small", "--backend", "local", "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first run leaves data and a warm-started model for the others."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_example_runs_in_one_process(root: Path, engine: str):
    more = ["--dora"] if engine == "vllm" else []
    said = run("--engine", engine, "--name", engine, *more, root=root)
    summary = json.loads(said.splitlines()[-1])
    assert summary["steps"] == 3 and summary["samples"] == 3 * 8 * 8
    assert summary["mean_logprob_gap"] <= 1e-5 and summary["max_logprob_gap"] <= 5e-4
    made = root / engine
    metrics = pq.read_table(made / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/reward/mean"] is not None
    base = AutoModelForCausalLM.from_pretrained(root / "arithmetic-0-small" / "model")
    merged = PeftModel.from_pretrained(base, made / "adapter").merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]
    model = AutoModelForCausalLM.from_pretrained(made / "model").state_dict()
    assert all(float((model[name] - merged[name]).abs().max()) < 1e-6 for name in model)
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
