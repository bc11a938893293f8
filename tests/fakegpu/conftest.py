"""The fixture `run_on_fake_gpu`, for tests of the CUDA paths without a GPU.

A fake GPU is a folder with the CUDA build of torch (`cu/`), a library that replaces the CUDA runtime (`shim.so`)
and a driver (`driver/`). Its numbers are garbage; the allocator, pinned memory, copies and the order of calls are
real. The environment variable `WEFT_FAKE_GPU` names the folder; without it, these tests are skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def run_on_fake_gpu() -> Callable[..., dict[str, Any]]:
    """Run a script of this folder on the fake GPU, and return the JSON object that it prints last.

    `run_on_fake_gpu("host_memory.py", MODEL="1.5B", SHIM_SKIP=1)` sets two environment variables.
    """
    folder = os.environ.get("WEFT_FAKE_GPU")
    if folder is None:
        pytest.skip("needs a fake GPU: set WEFT_FAKE_GPU to its folder")
    if not Path(folder, "shim.so").is_file():
        pytest.fail(f"WEFT_FAKE_GPU={folder}: there is no shim.so; name the folder of a fake GPU")

    def run(script: str, *, within_s: float = 900, **env: object) -> dict[str, Any]:
        fake = {
            "LD_LIBRARY_PATH": f"{folder}/driver",
            "LD_PRELOAD": f"{folder}/shim.so",
            "PYTHONPATH": f"{folder}/cu",
            "SHIM": f"{folder}/shim.so",  # scripts read the counters of this library
        }
        given = {name: str(value) for name, value in env.items()}
        ended = subprocess.run(
            [sys.executable, str(HERE / script)],
            env={**os.environ, **fake, **given},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert ended.returncode == 0, f"{script}: {ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        return json.loads(ended.stdout.splitlines()[-1])

    return run
