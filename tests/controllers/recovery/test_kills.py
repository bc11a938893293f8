"""Real processes are killed at random moments: no sample is lost or trained twice."""

import os
import random
import re
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from saved_runs import begun

from weft.dataflow.buffer.check import check_log
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader

STEPS, SAMPLES = 60, 6
VICTIMS = ("driver", "rollout", "actor", "reward")


def rank(run: Path, name: str) -> psutil.Process:
    """Return the worker process that writes this log."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.NoSuchProcess):
            if os.readlink(f"/proc/{process.pid}/fd/1") == str((run / "logs" / f"{name}.log").resolve()):
                return process
    raise AssertionError(f"no process writes {name}.log")


def last_step(run: Path) -> int:
    with suppress(FileNotFoundError):
        if found := re.findall(rb'"key":"step","value":(\d+)', (run / "buffer" / LOG).read_bytes()):
            return int(found[-1])
    return 0


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while last_step(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("schedule", ["synchronous", "pipelined", "asynchronous"])
def test_kills_at_random_moments_lose_no_sample_and_none_is_trained_on_twice(
    tmp_path: Path, schedule: str
):
    run, chance = tmp_path / "run", random.Random(schedule)
    settings = ("--backend", "ray", "--schedule", schedule, "--every", "2", "--steps", str(STEPS))
    process = begun(tmp_path, *settings)
    wait_for_step(
        process, run, 2
    )  # wait for the first checkpoint: before it, the death of an actor ends the run
    for victim in chance.sample(VICTIMS, len(VICTIMS)):
        wait_for_step(process, run, last_step(run) + chance.randint(1, 3))
        time.sleep(chance.uniform(0, 0.3))
        if victim == "driver":
            process.kill()
            process.communicate()
            process = begun(tmp_path, *settings, "--resume", "latest")
        else:
            rank(run, f"{victim}_0").kill()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert check_log(run / "buffer").violations == []
    samples = [
        (row["step"], row["samples"])
        for row in pq.read_table(run / "metrics.parquet").to_pylist()
        if row["step"]
    ]
    assert samples == [(step, SAMPLES) for step in range(1, STEPS + 1)], "each step once, and complete"
    issued = Counter(
        position
        for record in LogReader(run / "buffer" / LOG)
        if record["do"] == "issue"
        for position in record["positions"]
    )
    assert len(issued) == 10 and max(issued.values()) - min(issued.values()) <= 1, (
        "no prompt is passed over"
    )
