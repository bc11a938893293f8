"""The benchmark of a resume: what it counts is what a resumed run has read."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "recovery"))

from resume import CONFIG, EVERY, PROMPTS, SAMPLES, measure


def test_a_played_run_is_resumed_from_its_last_checkpoint(tmp_path: Path):
    measured = measure(tmp_path, EVERY + 3)
    assert measured["rows_in_flight"] == 2 * PROMPTS * (1 + SAMPLES) and measured["resume_mb_s"] > 0
    assert 0.5 < measured["log_mb"] < CONFIG.cut_bytes / 1e6 and measured["history_mb"] == 0
