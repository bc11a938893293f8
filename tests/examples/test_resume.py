"""A run of a real model, killed with SIGKILL and resumed, ends with identical bits, with either
engine."""

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from forked import Forked, program
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from weft.dataflow.metric_names import untimed

PROGRAM = Path(__file__).with_name("resumed_run.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def start(root: Path, engine: str, name: str, *more: str) -> Forked:
    number = sum(1 for _ in root.glob(f"{name}*.log"))
    arguments = ("--engine", engine, "--root", str(root), "--name", name, *more)
    environment = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    return program(root / f"{name}-{number}.log", PROGRAM, *arguments, environment=environment)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [untimed(row) for row in pq.read_table(run / "metrics.parquet").to_pylist()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        ("transformers", [2]),
        pytest.param("transformers", [1], marks=pytest.mark.slow),
        pytest.param("vllm", [1, 2], marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_a_run_that_was_killed_ends_with_the_same_bits(root: Path, engine: str, steps: list[int]):
    check_kills(root, engine, steps, replicas=1)


@pytest.mark.slow
@pytest.mark.ray
def test_a_killed_run_with_two_replicas_generates_the_same_batches(root: Path):
    metrics = check_kills(root, "transformers", [2], replicas=2)
    assert metrics[3]["rollout/forecast_error"] < 1


def check_kills(root: Path, engine: str, steps: list[int], replicas: int) -> list[dict[str, Any]]:
    unbroken = root / f"whole-{engine}-{replicas}-{steps[0]}"
    more = ("--replicas", str(replicas))
    start(root, engine, unbroken.name, *more).finish()
    before = load_file(root / "arithmetic-0-small" / "model" / "model.safetensors")
    whole = load_file(unbroken / "model" / "model.safetensors")
    assert not all(torch.equal(before[key], whole[key]) for key in before), "it learns something"
    for step in steps:
        name = f"killed-{engine}-{replicas}-{step}"
        killed = start(root, engine, name, *more)
        killed.kill_when(root / name / "checkpoints" / f"step_{step:06d}")
        said = start(root, engine, name, *more, "--resume", "latest").finish()
        assert "goes on after step" in said
        resumed = load_file(root / name / "model" / "model.safetensors")
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
        assert metrics(root / name) == metrics(unbroken)
        kept = Path("checkpoints") / "step_000003" / "reference" / "state" / "rank_0.safetensors"
        averages = load_file(unbroken / kept), load_file(root / name / kept)
        assert all(torch.equal(average, averages[1][key]) for key, average in averages[0].items())
        assert any(not torch.equal(before[k], averages[0][f"model.{k}"]) for k in before), "it moves"
    saved = unbroken / "checkpoints" / "step_000003" / "actor" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(torch.equal(loaded[key], whole[key]) for key in whole)
    return metrics(unbroken)
