"""Trials for the tests of the doctor. Each is called in a separate process."""

import os
import subprocess
import time
from pathlib import Path

from weft.controllers.doctor_trials import Figures


def passes(folder: Path, gpu: bool) -> Figures:
    print("nobody reads this")
    return {"files": len(list(folder.iterdir())), "gpu": str(gpu)}


def fails(folder: Path, gpu: bool) -> Figures:
    raise AssertionError("two is not three\nand more")


def crashes(folder: Path, gpu: bool) -> Figures:
    os._exit(7)


def hangs(folder: Path, gpu: bool) -> Figures:
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["DOCTORED"]).write_text(str(child.pid))
    time.sleep(600)
    return {}


def first_rank_fails(rendezvous: str, ranks: int, gpu: bool, rank: int) -> float:
    assert rank, "rank 0: a wrong sum"
    time.sleep(600)  # in a collective, where it waits for the first rank
    return 0.0
