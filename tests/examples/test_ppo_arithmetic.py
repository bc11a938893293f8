"""The example runs in its small setting, in one process: with a reward model of its own, and with the exact match."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_arithmetic.py"


def run(*arguments: str, root: Path) -> str:
    command = [sys.executable, str(EXAMPLE), "--small", "--backend", "local", "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first run leaves data and a warm-started model for the others."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("reward", ["model", "exact"])
def test_the_example_runs_in_one_process(root: Path, reward: str):
    said = run("--reward", reward, "--name", reward, root=root)
    summary = json.loads(said.splitlines()[-1])
    assert summary["steps"] == 3 and summary["samples"] == 3 * 8
    assert ("of held-out pairs in the right order" in said) == (reward == "model")
    metrics = pq.read_table(root / reward / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/reward/mean"] is not None
    assert metrics[1]["critic/loss"] > 0 and metrics[1]["actor/max_logprob_gap"] <= 5e-4
    for name in ("model", "critic"):
        assert (root / reward / name / "model.safetensors").exists()
