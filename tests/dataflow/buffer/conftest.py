"""Imports of the tests here: `played_ledgers`, `ledgers`, `ledger_model` and `recorded_run`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run(tmp_path: Path):
    """A new `Run` in `runs/one`."""
    from recorded_run import PROMPTS, Run, train

    made = Run(tmp_path / "runs" / "one", train(PROMPTS))
    yield made
    made.close()
