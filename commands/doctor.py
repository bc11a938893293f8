"""`weft doctor`: check this machine and its packages for problems."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from ..dataflow.errors import UserError
from .command_line import RUNS, Answer, Switch

REPORT = Path("weft-doctor.json")


def doctor(
    *,
    # `try` is a Python keyword.
    tried: Annotated[bool, arg(name="try", help_behavior_hint="")] = False,
    gpu: Switch = False,
    only: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="NUMBER", help_behavior_hint="")] = (),
    model: Annotated[str, arg(metavar="MODEL", help_behavior_hint="")] = "",
    report: Annotated[Path, arg(metavar="FILE")] = REPORT,
    root: Annotated[Path, arg(metavar="FOLDER")] = RUNS,
) -> Answer:
    """Report problems of this machine, with advice: incompatible versions, disk and memory, limits,
    ports, GPUs, environment variables. --try and --gpu also run checks in order: driver, packages,
    collectives, copies, attention, generation, weight sync and a small training run. They write a
    report without secrets and host names, which you can send. Exit code 1 if a check fails.

    Args:
        tried: Also run the checks that need only a CPU. They take some minutes.
        gpu: Also run the checks on the GPUs of this machine.
        only: Run only the check with this number. Can be repeated.
        model: Folder or Hugging Face id of a model for the checks that can take any. By default,
            they take a random model and download nothing.
        report: The file for the report of --try or --gpu.
        root: The folder of runs, whose disk is checked.
    """
    from ..controllers.prechecks.machine import look, text_of

    if (only or model or report != REPORT) and not (tried or gpu):
        raise UserError("--only, --model and --report need --try or --gpu")
    findings = look(root)
    text = text_of(findings)
    found: dict[str, Any] = {"gpu": gpu, "findings": [asdict(finding) for finding in findings]}
    failed = any(finding.outcome == "fail" for finding in findings)
    if tried or gpu:
        from ..controllers.doctor.hardware import HARDWARE
        from ..controllers.doctor.operations import OPERATIONS
        from ..controllers.doctor.trials import run_trials, table_of, write_report

        records = run_trials(gpu, (*HARDWARE, *OPERATIONS), model=model, only=only)
        failed |= any(record.outcome == "failed" for record in records)
        found["checks"] = [asdict(record) for record in records]
        write_report(report, findings, records)
        text = f"{text}\n\n{table_of(records)}\n\nThe report is in {report}."
    return Answer(found, text, exit_code=int(failed))
