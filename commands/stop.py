"""`weft stop`: end a run cleanly, on any machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..dataflow.errors import RunError
from ..dataflow.runs.files import CHECKPOINTS
from ..dataflow.untrusted_text import show
from .command import Answer, Command, RunName, find_run

if TYPE_CHECKING:
    from ..dataflow.runs.facts import RunFacts

LOOK_S = 0.5
"""[s] Time between two looks at a run that was asked to end."""


@dataclass(frozen=True, kw_only=True)
class Stop(Command):
    """Make a run save itself and end with exit code 0, on any machine. A run with checkpoints
    writes one and ends. A run without checkpoints ends after the current step, as if it were its
    last.
    """

    run: RunName
    timeout: float = 600
    """Seconds to wait for the end; 0 to return at once."""

    def answer(self) -> Answer:
        from ..dataflow.runs.facts import facts_of
        from ..dataflow.runs.lock import Life
        from ..dataflow.runs.requests import request_stop

        run = find_run(self.run)
        facts = facts_of(run)
        if facts.life is not Life.ALIVE or facts.holder is None:
            return Answer(
                {"asked": False, "ended": True, **facts.for_programs},
                f"{run} is not running: {_state(facts)}",
            )
        try:
            request_stop(run, facts.holder.epoch)
        except OSError as error:
            raise RunError(f"{run} cannot be asked to end: {error}") from None
        if not self.timeout:
            return Answer(
                {"asked": True, "ended": False, **facts.for_programs}, f"{run} was asked to end"
            )
        show(f"{run} is asked to end, held by {facts.holder} ...")
        return self._ended(run, facts)

    def _ended(self, run: Path, asked: RunFacts) -> Answer:
        from ..dataflow.runs.facts import facts_of
        from ..dataflow.runs.lock import Life, life_of

        deadline = time.monotonic() + self.timeout
        while life_of(run) == (Life.ALIVE, asked.holder):
            if time.monotonic() > deadline:
                raise RunError(
                    f"{run} did not end within {self.timeout:g} s: its driver is {asked.holder}. It checks for the request each second, "
                    "except during its start and during an evaluation that training waits for; --timeout SECONDS waits longer"
                )
            time.sleep(LOOK_S)
        facts = facts_of(run)
        return Answer(
            {"asked": True, "ended": True, **facts.for_programs}, f"{run} has ended: {_state(facts)}"
        )


def _state(facts: RunFacts) -> str:
    of = f" of {facts.steps}" if facts.steps is not None else ""
    said = f"{facts.status}, after step {facts.step}{of}"
    if facts.status in ("killed", "stopped", "failed") and any((facts.path / CHECKPOINTS).glob("step_*")):
        said += "; resume='latest' continues from its last checkpoint"
    return said
