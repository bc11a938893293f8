"""A check that is tried: its record, and a process of its own for each, so that one that fails, hangs or crashes stops no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

Figures = Mapping[str, float | str]
"""What a check measured, by name with its unit."""


@dataclass(frozen=True)
class Check:
    """Something that is tried."""

    name: str
    claim: str
    """What it supports, and the page that says so."""
    run: Callable[[Path, bool], Figures]
    """Called with a folder for its files and whether to use the GPUs; raises AssertionError with what was found."""
    deadline_s: float
    skipped_on_cpu: str = ""
    """Why it is skipped without GPUs; empty: it is made there, too."""


@dataclass(frozen=True)
class Record:
    """The outcome of a check."""

    name: str
    claim: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    why: str = ""
    figures: Figures = field(default_factory=dict)

    def json(self) -> dict[str, object]:
        """The values of JSON."""
        return asdict(self)


def try_check(check: Check, gpu: bool) -> Record:
    """Make a check in a process of its own, which is killed with all that it started when its deadline is over."""
    if check.skipped_on_cpu and not gpu:
        return Record(check.name, check.claim, "skipped", 0.0, check.skipped_on_cpu)
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # CUDA is not to be forked
    answers: Any
    answers, answer = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        process = spawn.Process(target=_run, args=(check, Path(folder), gpu, answer))
        process.start()
        answer.close()
        try:
            outcome, why, figures = _answer(answers, process, check.deadline_s)
        finally:
            _end(process)
    return Record(check.name, check.claim, outcome, round(time.monotonic() - started, 1), why, figures)


def table_of(records: list[Record]) -> str:
    """The records for a person, a line or two for each."""
    lines: list[str] = []
    for record in records:
        figures = ", ".join(f"{name} {value}" for name, value in record.figures.items())
        lines.append(f"{record.outcome:8}{record.name:22}{record.seconds:6.1f} s  {record.why or figures}")
        lines.append(f"{'':8}supports: {record.claim}")
    return "\n".join(lines)


_Answer = tuple[Literal["passed", "failed"], str, Figures]


def _run(check: Check, folder: Path, gpu: bool, answer: Connection) -> None:
    os.setsid()  # it ends with all that it started
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    with (folder / "said").open("w") as said, contextlib.redirect_stdout(said):
        answer.send(_tried(check, folder, gpu))


def _tried(check: Check, folder: Path, gpu: bool) -> _Answer:
    try:
        return "passed", "", dict(check.run(folder, gpu))
    except BaseException as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", {}


def _answer(answers: Connection, process: BaseProcess, deadline_s: float) -> _Answer:
    if not answers.poll(deadline_s):
        return "failed", f"it did not end in {deadline_s:g} s", {}
    try:
        return answers.recv()
    except EOFError:
        process.join(5)
        return "failed", f"its process ended with exit code {process.exitcode}", {}


def _end(process: BaseProcess) -> None:
    process.join(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join(0.5)  # one that waits for a device in the kernel ends when that answers
