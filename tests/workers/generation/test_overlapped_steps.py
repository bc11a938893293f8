"""vLLM's steps overlap on GPUs: equal tokens, and each token has the version that sampled it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(program: str, *arguments: str) -> str:
    made = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    return made.stdout.splitlines()[-1]


@pytest.mark.vllm
@pytest.mark.thorough
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_overlapped_steps_change_neither_tokens_nor_versions(folder: Path, runner: str):
    """V2 is the model runner of GPUs."""
    apart, overlapped = json.loads(run("overlapped_steps.py", str(folder), runner))
    assert apart["v2"] == overlapped["v2"] == (runner == "V2")
    assert apart["in_flight"] == [0, 0, 0] and overlapped["in_flight"] == [1, 1, 1]
    assert apart["tokens"] == overlapped["tokens"]
    assert apart["versions"] == overlapped["versions"]
    for new, versions in enumerate(apart["versions"], 1):
        begun = [new - 1] * 5 + [new] * 3
        assert versions == [begun] * 4 + [[new] * 8] * 2, "two requests waited"
    for found in (apart, overlapped):
        assert found["reset"] == [0, True, 0, True], "blocks of ended requests are free after a drain"
        assert max(found["gaps"]) < 1e-4
        assert found["cancelled"] == [1, 2, 3, 4]


@pytest.mark.vllm
@pytest.mark.thorough
def test_the_model_runner_of_gpus_serves_adapters():
    adapters = HERE.parents[1] / "resharding" / "test_vllm_adapter.py"
    said = run("with_model_runner_v2.py", str(adapters), "-k", "serves_each_version_of_an_adapter")
    assert said.startswith("1 passed")


@pytest.mark.vllm
@pytest.mark.thorough
def test_the_model_runner_of_gpus_returns_kept_sets():
    generation = HERE / "test_generation.py"
    said = run("with_model_runner_v2.py", str(generation), "-k", "with_either_model_runner")
    assert said.startswith("1 passed")
