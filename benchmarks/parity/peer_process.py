"""The peers' side of a comparison: a script that runs in their environment, from a file of inputs to a file of outputs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from machine import PEERS


def outputs_of(script: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a script of this folder makes of the inputs. The program ends where the peers are not installed or fail."""
    if not PEERS.exists():
        sys.exit("the peers are not installed: `make bench-peers` makes .venv-peers")
    with tempfile.TemporaryDirectory(prefix="weft-parity-") as folder:
        given, made = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(given, **inputs)  # pyright: ignore[reportArgumentType]
        command = [str(PEERS), str(Path(__file__).with_name(script)), str(given), str(made)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{script} failed:\n{done.stderr[-4000:]}")
        with np.load(made) as outputs:
            return dict(outputs)
