"""`weft runs`: the runs of a folder, with their status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..dataflow.errors import UserError
from ..dataflow.runs.files import is_run
from .command import RUNS, Answer, Command, run_names


@dataclass(frozen=True, kw_only=True)
class Runs(Command):
    """List the runs of a folder, or one run: status, step, time, reward, loss, last warning or error."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")] = RUNS
    """The folder of all runs, or the directory of one."""

    def answer(self) -> Answer:
        from ..dataflow.runs.facts import facts_of

        if not self.folder.is_dir():
            raise UserError(
                f"there is no folder {self.folder}: name the folder of your runs (default: {RUNS}/)"
            )
        paths = (
            [self.folder]
            if is_run(self.folder)
            else [self.folder / name for name in run_names(self.folder)]
        )
        found = [facts_of(path) for path in paths if is_run(path)]
        notes = [f"damaged: {what}" for facts in found for what in facts.damage]
        if not found:
            return Answer({"runs": []}, f"no runs in {self.folder}", notes)
        import pyarrow as pa

        from ..controllers.reports.records import clock
        from ..dataflow.runs.tables import render_table

        rows = [
            {
                "run": facts.path.name,
                "status": facts.status,
                "step": f"{facts.step}/{facts.steps}" if facts.steps is not None else str(facts.step),
                "time": clock(facts.last.get("time_s", 0.0)),
                "reward": facts.reward,
                "loss": facts.loss,
                "trouble": facts.trouble or None,
            }
            for facts in found
        ]
        shown = render_table(pa.Table.from_pylist(rows), limit=len(rows), width=80)
        return Answer({"runs": [facts.for_programs for facts in found]}, shown, notes)
