"""`weft doctor`: what is installed and found on this machine, and what does not work there."""

from __future__ import annotations

from dataclasses import dataclass

from .command import Answer, Command


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Try on this machine, with a random model, what Weft does on it: attention, collectives, weights, a run. Nothing is downloaded.
    Exit code 1 if a check failed."""

    gpu: bool = False
    """Use the GPUs; otherwise what a CPU allows is tried, and the rest is skipped."""

    def answer(self) -> Answer:
        from ..controllers.doctor.check import table_of
        from ..controllers.doctor.doctor import examine

        records = examine(self.gpu)
        found = {"gpu": self.gpu, "checks": [record.json() for record in records]}
        return Answer(found, table_of(records), exit_code=int(any(record.outcome == "failed" for record in records)))
