"""The resume benchmark counts exactly the bytes that a resume reads."""

from pathlib import Path
from typing import Any

from weft.dataflow.buffer.sample_buffer import CUT_BYTES


def test_a_played_run_is_resumed_from_its_last_checkpoint(tmp_path: Path, load: Any):
    resume = load("recovery/resume")
    measured = resume.measure(tmp_path, resume.EVERY + 3)
    assert (
        measured["rows_in_flight"] == 2 * resume.PROMPTS * (1 + resume.SAMPLES)
        and measured["resume_mb_s"] > 0
    )
    assert 0.2 < measured["log_mb"] < CUT_BYTES / 1e6 and measured["history_mb"] == 0
