"""The GSM8K example with a tiny model under Ray: two training ranks and two vLLM replicas."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_gsm8k.py"


def gsm8k_tiny_s(data: Path | None = None) -> float:
    """Return the seconds of the whole program. `data` has rows of GSM8K; None generates problems in
    the same form. Raises RuntimeError with the end of the output if the program failed."""
    with tempfile.TemporaryDirectory(prefix="weft-gsm8k-") as root:
        command = [sys.executable, str(EXAMPLE), "--tiny", "--root", root, "--name", "tiny"]
        command += ["--data", str(data.resolve())] if data else []
        started = time.monotonic()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
        )
        if done.returncode:
            raise RuntimeError(f"{EXAMPLE.name} failed: {done.stdout[-2000:]}")
        return time.monotonic() - started
