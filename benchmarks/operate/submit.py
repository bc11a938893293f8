"""The overhead of `weft submit` over `ray job submit` of the same script, in turns.

    python benchmarks/operate/submit.py --rounds 5

Prints one line of JSON: `submit_overhead_s` (median difference), and both medians in seconds. If
`ray[default]` is missing, the benchmark installs it into a temporary environment on top of the
current one.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

START_S = 180.0
"""[s] Longest wait for the head."""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
"""The command `ray` of this environment."""
LOCK = Path(__file__).resolve().parents[2] / "requirements" / "jobs.txt"


@contextmanager
def head(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Start a head with a job server, and yield its address. Raises RuntimeError if the head did
    not start in time.

    Args:
        folder: folder for its files; keep the path short, because it contains sockets.
        environment: environment with its token.
    """
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        dashboard, agent = one.getsockname()[1], other.getsockname()[1]
    words = f"start --head --block --disable-usage-stats --port=0 --node-ip-address=127.0.0.1 --num-cpus=2 --temp-dir={folder}/r"
    words += (
        f" --dashboard-host=127.0.0.1 --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
    )
    log = folder / "head.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*RAY, *words.split()], env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the head did not start: {log.read_text()}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        process.terminate()
        process.wait(60)


def seconds_of(command: list[str], project: Path, environment: Mapping[str, str]) -> float:
    """Return the wall time of a command, which must succeed. [s]"""
    began = time.perf_counter()
    subprocess.run(command, cwd=project, env=environment, check=True, capture_output=True, timeout=300)
    return time.perf_counter() - began


def measure(rounds: int = 3) -> dict[str, float]:
    """Submit a script that prints a line, `rounds` times in both ways, in turns. Return
    `submit_overhead_s`, `weft_submit_s` and `ray_job_submit_s`, medians in seconds."""
    if find_spec("aiohttp_cors") is not None:
        return {name: round(value, 2) for name, value in _measure(rounds).items()}
    with tempfile.TemporaryDirectory(prefix="weft-jobs-") as name:
        python = with_job_server(Path(name))
        done = subprocess.run(
            [python, __file__, "--rounds", f"{rounds}"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=900,
        )
    return json.loads(done.stdout.splitlines()[-1])


def with_job_server(folder: Path) -> str:
    """Create an environment in `folder`, on top of this one, with `ray[default]`. Return its
    interpreter."""
    venv.create(folder, symlinks=True)
    python = str(folder / "bin" / "python")
    below = [entry for entry in sys.path if entry.endswith("site-packages")]
    [own] = (folder / "lib").glob("python*/site-packages")
    (own / "below.pth").write_text(
        "".join(f"import site; site.addsitedir({entry!r})\n" for entry in below)
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-qq",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--no-deps", "--requirement", str(LOCK)], check=True, timeout=300)
    return python


def _measure(rounds: int) -> dict[str, float]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    } | token
    with tempfile.TemporaryDirectory(prefix="weft-", dir="/tmp") as name:
        folder, project = Path(name), Path(name) / "project"
        project.mkdir()
        (project / "hello.py").write_text("print('hello')\n")
        with head(folder, environment) as address:
            ours = [sys.executable, "-m", "weft", "submit", "--address", address, "hello.py"]
            rays = [
                *RAY,
                "job",
                "submit",
                "--address",
                address,
                "--working-dir",
                ".",
                "--",
                "python",
                "hello.py",
            ]
            seconds_of(rays, project, environment)  # the first job of a cluster is slower
            took = [
                (seconds_of(ours, project, environment), seconds_of(rays, project, environment))
                for _ in range(rounds)
            ]
    return {
        "submit_overhead_s": statistics.median(weft - ray for weft, ray in took),
        "weft_submit_s": statistics.median(weft for weft, _ in took),
        "ray_job_submit_s": statistics.median(ray for _, ray in took),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="submissions in each way")
    print(json.dumps(measure(parser.parse_args().rounds)))
