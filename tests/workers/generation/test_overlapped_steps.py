"""vLLM's steps overlap on GPUs: equal tokens, and each token has the version that sampled it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("overlapped_steps.py")


@pytest.mark.vllm
@pytest.mark.thorough
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_overlapped_steps_change_neither_tokens_nor_versions(folder: Path, runner: str):
    """V2 is the model runner of GPUs."""
    if runner == "V2":
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    else:
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    made = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    apart, overlapped = json.loads(made.stdout.splitlines()[-1])
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
