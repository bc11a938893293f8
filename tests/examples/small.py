"""An example as a program, in its small setting."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str, root: Path, backend: str = "local") -> str:
    """What it prints. It keeps data and models below `root`."""
    command = [
        sys.executable,
        str(EXAMPLES / example),
        "--small",
        "--backend",
        backend,
        "--root",
        str(root),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
