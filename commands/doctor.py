"""`weft doctor`: check this machine and its packages for problems."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
    report after each check. It hides known secrets, host names and addresses, but read it before you
    publish it. Exit code 1 if a check fails.

    Args:
        tried: Also run the checks that need only a CPU. They take some minutes.
        gpu: Also run the checks on the GPUs of this machine.
        only: Run only the check with this number, with --gpu after check 1. Can be repeated. The
            results replace older ones in an existing report.
        model: Folder or Hugging Face id of a model for the checks that can take any. By default,
            they take a random model and download nothing.
        report: The file for the report of --try or --gpu.
        root: The folder of runs, whose disk is checked.
    """
    from ..controllers.prechecks.machine import look, text_of

    if (only or model or report != REPORT) and not (tried or gpu):
        raise UserError("--only, --model and --report need --try or --gpu")
    if tried or gpu:
        model = _resolve_model(model)
        _check_report(report)
    findings = look(root)
    text = text_of(findings)
    found: dict[str, Any] = {"gpu": gpu, "findings": [asdict(finding) for finding in findings]}
    failed = any(finding.outcome == "fail" for finding in findings)
    if tried or gpu:
        from ..controllers.doctor.hardware import HARDWARE
        from ..controllers.doctor.operations import OPERATIONS
        from ..controllers.doctor.trials import (
            Record,
            earlier_checks,
            run_trials,
            table_of,
            write_report,
        )

        earlier = earlier_checks(report) if only else {}

        def save(records: Sequence[Record]) -> None:
            write_report(report, findings, records, earlier)

        records = run_trials(gpu, (*HARDWARE, *OPERATIONS), model=model, only=only, save=save)
        failed |= any(record.outcome == "failed" for record in records)
        found["checks"] = [asdict(record) for record in records]
        text = f"{text}\n\n{table_of(records)}\n\nThe report is in {report}."
    return Answer(found, text, exit_code=int(failed))


def _resolve_model(model: str) -> str:
    """Return the absolute path of a model's folder, because checks run in other folders. Return a
    Hugging Face id as it is."""
    folder = Path(os.path.expanduser(model))  # `Path.expanduser` raises for unknown users
    if model and folder.is_dir():
        return str(folder.absolute())
    if model.startswith((".", "/", "~")):
        raise UserError(f"--model {model}: no such folder")
    return model


def _check_report(report: Path) -> None:
    """Check that the report can be written, before checks that take minutes."""
    folder = report.parent
    if not folder.is_dir():
        raise UserError(f"--report {report}: no such folder {str(folder)!r}; create it")
    if report.is_dir():
        raise UserError(f"--report {report}: this is a folder; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--report {report}: cannot write to folder {str(folder)!r}; name another")
