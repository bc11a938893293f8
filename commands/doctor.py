"""`weft doctor`: problems of this machine and its packages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from .command import RUNS, Answer, Command, Switch


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Report problems of this machine, with advice: incompatible versions, disk and memory, limits,
    ports, GPUs, environment variables. --try and --gpu also run attention, collectives, weight sync
    and a small training with a random model. Nothing is downloaded. Exit code 1 if something fails.
    """

    tried: Annotated[bool, arg(name="try", help_behavior_hint="")] = False
    """Also run the checks that a CPU allows; takes some minutes."""
    gpu: Switch = False
    """Also run the checks on the GPUs of this machine."""
    root: Annotated[Path, arg(metavar="FOLDER")] = RUNS
    """The folder of runs, to check its disk."""

    def answer(self) -> Answer:
        from ..controllers.prechecks.finding import text_of
        from ..controllers.prechecks.machine import look

        findings = look(self.root)
        text = text_of(findings)
        found = {"gpu": self.gpu, "findings": [finding.json() for finding in findings]}
        failed = any(finding.outcome == "fail" for finding in findings)
        if not (self.tried or self.gpu):
            return Answer(found, text, exit_code=int(failed))
        from .trials import examine, table_of

        records = examine(self.gpu)
        failed |= any(record.outcome == "failed" for record in records)
        found["checks"] = [record.json() for record in records]
        return Answer(found, f"{text}\n\n{table_of(records)}", exit_code=int(failed))
