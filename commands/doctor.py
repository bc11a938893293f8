"""`weft doctor`: check this machine and its packages for problems."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from .command_line import RUNS, Answer, Switch


def doctor(
    *,
    # `try` is a Python keyword.
    tried: Annotated[bool, arg(name="try", help_behavior_hint="")] = False,
    gpu: Switch = False,
    root: Annotated[Path, arg(metavar="FOLDER")] = RUNS,
) -> Answer:
    """Report problems of this machine, with advice: incompatible versions, disk and memory, limits,
    ports, GPUs, environment variables. --try and --gpu also run attention, collectives, weight sync
    and a small training run of a random model. Nothing is downloaded. Exit code 1 if a check fails.

    Args:
        tried: Also run the checks that need only a CPU. They take some minutes.
        gpu: Also run the checks on the GPUs of this machine.
        root: The folder of runs, whose disk is checked.
    """
    from ..controllers.prechecks.machine import look, text_of

    findings = look(root)
    text = text_of(findings)
    found: dict[str, Any] = {"gpu": gpu, "findings": [asdict(finding) for finding in findings]}
    failed = any(finding.outcome == "fail" for finding in findings)
    if tried or gpu:
        from ..controllers.doctor_trials import run_trials, table_of

        records = run_trials(gpu)
        failed |= any(record.outcome == "failed" for record in records)
        found["checks"] = [asdict(record) for record in records]
        text = f"{text}\n\n{table_of(records)}"
    return Answer(found, text, exit_code=int(failed))
