"""Damage to the files of a run, and whether going on from it notices."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.controllers.recovery.resume import find_checkpoint
from weft.controllers.recovery.run_state import FOLDER, RunState, checkpoints
from weft.dataflow.buffer.ledger_state import save
from weft.dataflow.buffer.log import Position
from weft.dataflow.buffer.sample_buffer import LOG, restore
from weft.dataflow.errors import UserError

Damaging = Callable[[Path, range, random.Random], None]
"""Change a file at a place within these bytes."""

CHECKPOINT_FILES = (
    "actor/model/model.safetensors",
    "actor/model/config.json",
    "actor/model/generation_config.json",
    "actor/model/tokenizer.json",
    "actor/state/rank_0.safetensors",
    "actor/rank_0.json",
    "run.json",
    "manifest.json",
)
LAST_RECORD = "ledger.log, its last record"
SPARE = "ledger checkpoint"
BUFFER_FILES = (LOG, LAST_RECORD, SPARE)
"""Each damaged before the position that the latest checkpoint names; the log behind that of the checkpoint before."""


def truncated(path: Path, within: range, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice(within)])


def flipped(path: Path, within: range, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.choice(within)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def missing(path: Path, within: range, rng: random.Random) -> None:
    path.unlink()


def half_written(path: Path, within: range, rng: random.Random) -> None:
    """Its size is right, and it ends in zeros."""
    data = path.read_bytes()
    start = rng.choice(within[: max(1, len(within) // 2)])
    path.write_bytes(data[:start] + bytes(len(data) - start))


KINDS: Mapping[str, Damaging] = {
    "truncated": truncated,
    "flipped": flipped,
    "missing": missing,
    "half-written": half_written,
}


@dataclass(frozen=True)
class Outcome:
    """What is said of a damage, and from where the run would go on."""

    file: str
    kind: str
    said: str
    goes_on_after: int
    """Step; -1: nowhere."""
    named: bool
    same_rows: bool
    """Where it goes on, the rows in flight are those of the run without damage."""
    found: bool
    """Named, and nothing damaged is used: the checkpoint before goes on, or the same rows are known from elsewhere."""


def damage_all(run: Path, scratch: Path, seed: int) -> list[Outcome]:
    """Damage each file of the latest checkpoint of a run in each way, in copies of the run."""
    latest, before, *_ = checkpoints(run / FOLDER)
    position, earlier = (RunState.read(path).position for path in (latest, before))
    rows = {path.name: _rows(run, RunState.read(path).position) for path in (latest, before)}
    rng = random.Random(seed)
    outcomes: list[Outcome] = []
    for file in (*CHECKPOINT_FILES, *BUFFER_FILES):
        for kind, damage in KINDS.items():
            if (file, kind) == (LAST_RECORD, "missing"):
                continue  # that is a truncated log
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(run, scratch)
            path, start, end = scratch / FOLDER / latest.name / file, 0, 0
            if file in (LOG, LAST_RECORD):
                path, start, end = scratch / "buffer" / LOG, earlier.offset, position.offset
            if file == LAST_RECORD:
                start = path.read_bytes()[:end].rfind(b"\n", 0, -1) + 1
            if file == SPARE:
                path = scratch / "buffer" / f"ledger-{position.offset:012d}.checkpoint"
            damage(path, range(start, end or path.stat().st_size), rng)
            outcomes.append(_outcome(scratch, file, kind, path, rows, latest.name))
    shutil.rmtree(scratch)
    return outcomes


def _outcome(run: Path, file: str, kind: str, path: Path, rows: Mapping[str, object], latest: str) -> Outcome:
    try:
        sound = find_checkpoint(run)
    except UserError as error:
        named = path.name in str(error)
        return Outcome(file, kind, str(error), -1, named, False, named and kind == "missing" and file == LOG)
    if sound is None:
        return Outcome(file, kind, "there is no checkpoint", -1, False, False, False)
    # What recovery says of the log and of its checkpoints is printed with the rest when a run goes on.
    said = [*sound.damage, *restore(run / "buffer", at=sound.state.position).damage]
    named = any(path.name in line for line in said)
    same = _rows(run, sound.state.position) == rows.get(sound.path.name)
    # The log and the checkpoint of the ledgers say the same: a run does without either, and without nothing else.
    spared = file == SPARE or (file in (LOG, LAST_RECORD) and kind == "flipped")
    right = spared or sound.path.name != latest
    return Outcome(file, kind, "; ".join(said), sound.state.step, named, same, named and same and right)


def _rows(run: Path, position: Position) -> object:
    """All that is known of the rows at a position."""
    ledgers = restore(run / "buffer", at=position).ledgers
    return {name: list(save(ledger)) for name, ledger in ledgers.items()}
