"""Runs an example as a program, in its small setting."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as pq

from weft.dataflow.metric_names import undeclared

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, name: str, *arguments: str, root: Path, backend: str = "local") -> str:
    """Run an example, with data and models below `root`, and return its output.

    Under Ray it starts like a user's program, otherwise it is forked. Every metric must be in the
    table of metrics.
    """
    arguments = ("--small", "--backend", backend, "--root", str(root), "--name", name, *arguments)
    if backend == "local":
        said = forked.program(root / f"{name}.log", EXAMPLES / example, *arguments).finish()
        assert undeclared(pq.read_schema(root / name / "metrics.parquet").names) == []
        return said
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def summary(said: str) -> dict[str, Any]:
    """Return the last line of an example's output."""
    return json.loads(said.splitlines()[-1])
