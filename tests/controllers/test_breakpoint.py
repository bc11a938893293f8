"""With `Local()`, a `breakpoint()` in a worker stops the run in the user's terminal."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_breakpoint_in_a_worker_method_stops_the_run_there(tmp_path: Path):
    command = [sys.executable, str(Path(__file__).with_name("stops.py")), str(tmp_path)]
    told = "p len(samples), type(self).__name__\ncontinue\n"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"}  # Ray sets it
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert "stops.py" in done.stdout and "(Pdb) (8, 'StoppingReward')" in done.stdout
    assert done.stdout.rstrip().endswith("2"), "told to go on, it does"
