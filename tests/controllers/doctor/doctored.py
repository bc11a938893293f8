"""Trials for the tests of the doctor. Each is called in a separate process."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from weft.controllers.doctor.trials import Case, Figures


def passes(case: Case) -> Figures:
    print("nobody reads this")
    with case.phase("counting"):
        assert case.folder == Path.cwd()
    return {"gpu": str(case.gpu), "model": case.model}


def fails(case: Case) -> Figures:
    raise AssertionError("two is not three\nand more")


def fails_with_a_fix(case: Case) -> Figures:
    error = AssertionError("torch is for CPUs")
    error.add_note("install another torch")
    raise error


def crashes(case: Case) -> Figures:
    with case.phase("starting"):
        os._exit(7)


def hangs(case: Case) -> Figures:
    with case.phase("waiting"):
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ["DOCTORED"]).write_text(str(child.pid))
        time.sleep(600)
    return {}


def first_rank_fails(
    rendezvous: str, ranks: int, devices: Sequence[str], rank: int
) -> tuple[float, float]:
    assert rank, "rank 0: a wrong sum"
    time.sleep(600)  # in a collective, where it waits for the first rank
    return 0.0, 0.0
