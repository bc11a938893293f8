"""The mistakes of the tests, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests" / "controllers"
sys.path.append(str(TESTS))


def measure() -> dict[str, Any]:
    """Return the share of clear failures, and the seconds of the slowest."""
    from mistakes import MISTAKES  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer, models

    clear, took = 0, dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="weft-mistakes-") as name:
        folder = Path(name)
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
        for mistake, wrong in MISTAKES.items():
            wrong.write_files(folder)
            command = [sys.executable, str(TESTS / "bad_input.py"), "--root", name, *wrong.words]
            address = {"RAY_ADDRESS": "http://ray-head:8265"} if "address" in wrong.words else {}
            started = time.perf_counter()
            done = subprocess.run(
                command, cwd=folder, env=os.environ | address, capture_output=True, text=True
            )
            took[mistake] = time.perf_counter() - started
            said = " ".join(done.stderr.replace("│", " ").split())
            right = (
                done.returncode == 2
                and "Traceback" not in said
                and all(part in said for part in wrong.says)
            )
            clear += right
            if not right:
                print(f"  {mistake}: exit code {done.returncode}: {done.stderr[-400:]}", flush=True)
    slowest = max(took, key=lambda each: took[each])
    return {
        "bad_settings_clear": clear / len(MISTAKES),
        "bad_settings_max_s": round(took[slowest], 2),
        "bad_settings": len(MISTAKES),
        "bad_settings_slowest": slowest,
    }
