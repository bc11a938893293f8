"""Ranks as processes: a program of a test is started once for each."""

import subprocess
import sys
from pathlib import Path


def run_processes(program: Path, argument: Path, ranks: int, timeout_s: float = 240) -> None:
    """Run `python program argument RANK` for each rank, all at once; what a rank that fails has said is in the assertion."""
    command = [sys.executable, str(program), str(argument)]
    started = [subprocess.Popen([*command, str(r)], stderr=subprocess.PIPE, text=True) for r in range(ranks)]
    try:
        errors = [rank.communicate(timeout=timeout_s)[1] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    assert all(rank.returncode == 0 for rank in started), "\n".join(errors)
