"""The GSM8K example with a tiny model, as a user starts it: processes under Ray, two ranks that train, two vLLM replicas."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_gsm8k.py"


def gsm8k_tiny_s(data: Path | None = None) -> float:
    """Seconds of the whole program.

    Args:
        data: rows of GSM8K; None: the program makes problems in their form.

    Raises:
        RuntimeError: the program failed; with the end of what it printed.
    """
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
