"""The small example in one process: four adapters train on one rollout group."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from small import run, summary

from weft.dataflow.runs.samples import samples

NAMES = ("even", "odd", "sevens", "short")


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_the_example_runs_in_one_process(root: Path, engine: str):
    made = root / f"four-{engine}"
    found = summary(run("four_adapters.py", made.name, "--engine", engine, root=root))
    assert found["steps"] == 3 and found["samples"] == 3 * 4 * 8 * len(NAMES)
    assert found["max_logprob_gap"] <= 5e-4
    steps = pq.read_table(made / "metrics.parquet").to_pylist()[1:]
    assert all(row[f"{name}/grad_norm"] > 0 for row in steps[:1] for name in NAMES)
    recorded = samples(made)
    assert recorded is not None
    rows = recorded.select(["policy", "step", "response_versions"]).to_pylist()
    assert sorted({row["policy"] for row in rows}) == list(NAMES)
    assert all(set(row["response_versions"]) <= {row["step"] - 1} for row in rows)
    adapters = [load_file(made / name / "adapter_model.safetensors") for name in NAMES]
    for name in adapters[0]:
        if ".lora_B." in name:
            assert len({tuple(each[name].flatten().tolist()) for each in adapters}) == len(NAMES)
            assert all(torch.isfinite(each[name]).all() for each in adapters)
