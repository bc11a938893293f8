"""Check: reads the log of a run, has the checker say where it breaks the law of rows, and compares checkpoints and samples with it.

This is `weft buffer check`. It reads only, also while the run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ..errors import UserError
from .checker import Checker
from .log import LogReader, Position, find_fork, read_checkpoint
from .rows_in_flight import GraphCounts
from .rules import Rule, Violation
from .sample_buffer import LOG, checkpoints
from .samples import FOLDER, Part, parts

MAX_VIOLATIONS = 1000
"""The check stops there: what follows from a broken log is no news."""

_FOREIGN = "of another log, or of a future that was given up when the run went back; recovery passes it over"


@dataclass
class Report:
    """What a log says of the rows of a run; the law holds when there are no `violations`."""

    graphs: dict[str, GraphCounts]
    records: int
    num_bytes: int
    """Of the sound part of the log."""
    leases: dict[str, int]
    """How many were granted, finished and released, and how many are open."""
    restarts: int
    """Epochs but the first; of a log without epochs, the restarts that found leases."""
    segments: int
    """Segments that the log refers to."""
    checkpoints: int
    """Sound ones, each of a position between two records."""
    damage: list[str]
    """A torn end of the log, unreadable checkpoints, and tails that were cut off when a run went back."""
    violations: list[Violation]


def check_log(folder: Path) -> Report:
    """Check the log in the folder of a buffer, and compare checkpoints and samples beside it with the log.

    Raises:
        UserError: the folder holds no log.
        FormatError: another version of Weft wrote it.
    """
    samples = RecordedSamples(folder.parent)
    checker = Checker(on_recorded=samples.compare)
    saved = SavedStates(folder, checker)
    violations, damage, end = saved.violations, saved.damage, Position()
    for end, found in read(folder, checker, damage):
        violations += found
        saved.compare(end)
        if len(violations) >= MAX_VIOLATIONS:
            violations.append(Violation(Rule.SOUND_LOG, "... and more: the check was given up here"))
            break
    saved.note_rest(end)
    for path in sorted(folder.glob(f"{LOG}.cut-*")):
        size = path.stat().st_size
        damage.append(f"{path.name}: {size} bytes were cut off the log when the run was started again")
    return Report(
        graphs=checker.flight.counts(),
        records=checker.flight.events,
        num_bytes=end.offset,
        leases={**checker.lease_counts, "open": len(checker.flight.leases)},
        restarts=checker.restarts,
        segments=len(checker.segments),
        checkpoints=saved.sound,
        damage=[*damage, *samples.notes()],
        violations=[*violations, *samples.violations],
    )


def read_log(folder: Path, checker: Checker) -> None:
    """Feed a checker with the log in the folder of a buffer, for its rows alone. Raises as `check_log`."""
    for _ in read(folder, checker, []):
        pass


def read(folder: Path, checker: Checker, damage: list[str]) -> Iterator[tuple[Position, list[Violation]]]:
    """Feed a checker with the log in the folder of a buffer; yields, after each record, where it ends and the rules that it breaks.

    Args:
        damage: gets a line for an end that a kill has torn.

    Raises:
        UserError: the folder holds no log.
        FormatError: another version of Weft wrote it.
    """
    log = folder / LOG
    if not log.exists():
        raise UserError(f"{folder} holds no log of a run ({LOG})")
    reader, end = LogReader(log), Position()
    for record in reader:
        found = checker.feed(record, end.offset)
        end = reader.end
        yield end, found
    broken = checker.end()
    if not checker.flight.events:
        problem = f"{log} has no record: the run never began, or its log was emptied"
        broken.append(Violation(Rule.SOUND_LOG, problem))
    if reader.damage and (problem := _behind(log, end)):
        broken.append(Violation(Rule.SOUND_LOG, f"{reader.damage}; {problem}"))
    elif reader.damage:
        damage.append(reader.damage)
    yield end, broken


def _behind(log: Path, end: Position) -> str:
    """What stands behind the sound part of a log: a kill leaves one line without an end; complete lines mean that the log was changed,
    or that the disk lost a part of it."""
    with log.open("rb") as file:
        file.seek(end.offset)
        lines = sum(1 for line in file if line.endswith(b"\n"))
    if not lines:
        return ""
    fork = find_fork(log, end)
    why = "" if fork is None else f"; it goes on from byte {fork}: two processes appended to this log at once"
    return f"{lines} complete lines from there on prove nothing{why}"


class SavedStates:
    """The checkpoints of the ledgers, compared with the log."""

    def __init__(self, folder: Path, checker: Checker) -> None:
        self._checker = checker
        self._paths: dict[int, Path] = {}
        """Byte of the log -> checkpoint."""
        self.sound = 0
        self.damage: list[str] = []
        self.violations: list[Violation] = []
        for path in checkpoints(folder):
            try:
                position, _ = read_checkpoint(path)
            except (ValueError, OSError, KeyError) as error:
                if path.exists():  # the run deletes old ones
                    self.damage.append(str(error))
                continue
            if position == Position():
                self.sound += 1
            else:
                self._paths[position.offset] = path

    def compare(self, end: Position) -> None:
        """A checkpoint must say of the rows in flight what the log up to its place says."""
        path = self._paths.pop(end.offset, None) if self._paths else None
        if path is None:
            return
        try:
            place, records = read_checkpoint(path)
        except (ValueError, OSError):
            return
        if place.checksum != end.checksum:
            self.damage.append(f"{path.name}: {_FOREIGN}")
            return
        self.sound += 1
        groups = (record for record in records if record["do"] == "group")
        saved = {fields[0]: (fields[6], fields[8]) for record in groups for fields in record["rows"]}  # done, leased
        rows = self._checker.flight.rows
        for id in sorted(saved.keys() ^ rows.keys()):
            where = "the checkpoint has not" if id in rows else "the log has not"
            self._complain(f"{path.name}: row {id} is in flight, which {where}")
        for id in saved.keys() & rows.keys():
            nodes = rows[id].group.graph.nodes
            done = sum(1 << i for i, node in enumerate(nodes) if id in node.done)
            leased = sum(1 << i for i, node in enumerate(nodes) if id in node.leased)
            if saved[id] != (done, leased):
                self._complain(f"{path.name}: of row {id} the nodes done and leased are not those of the log")

    def _complain(self, text: str) -> None:
        self.violations.append(Violation(Rule.CHECKPOINT, text))

    def note_rest(self, end: Position) -> None:
        """Note the checkpoints whose place is not in the log."""
        for offset, path in self._paths.items():
            beyond = f"of byte {offset} of the log, of which {end.offset} can be read"
            self.damage.append(f"{path.name}: {_FOREIGN if offset < end.offset else beyond}")


class RecordedSamples:
    """The samples of a run, compared with the log lease by lease."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._parts: dict[tuple[str, int], list[Part]] = {}
        for part in parts(run):
            self._parts.setdefault((part.graph, part.lease), []).append(part)
        self.violations: list[Violation] = []
        self._uncompared = 0

    def compare(self, graph: str, lease: int, steps: Mapping[int, int]) -> None:
        """What was written under a lease must be these rows (sample id -> step), each under its step."""
        found = self._parts.pop((graph, lease), [])
        if steps and not (self._run / FOLDER).is_dir():
            self._uncompared += len(steps)
            return
        filed: list[tuple[int, int]] = []
        for part in found:
            try:
                filed += [(id, part.step) for id in part.read()["sample_id"].to_pylist()]
            except (pa.ArrowException, OSError, KeyError) as error:
                self._complain(f"{part.path} cannot be read: {error}")
                return
        who, times = f"lease {lease} of graph {graph!r}", Counter(id for id, _ in filed)
        if missing := sorted(steps.keys() - times.keys()):
            those = f"{len(missing)} are not there (sample ids {missing[:3]})"
            self._complain(f"{who} recorded {len(steps)} rows, of which {those}")
        if wrong := [id for id, number in times.items() if number > 1 or id not in steps]:
            those = f"that it did not record, or more than once (sample ids {wrong[:3]})"
            self._complain(f"{who}: {len(wrong)} rows are there {those}")
        if wrong := [(id, step) for id, step in filed if steps.get(id, step) != step]:
            id, step = wrong[0]
            self._complain(f"{who}: sample {id} is filed under step {step}; it is of step {steps[id]}")

    def _complain(self, text: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(Rule.SAMPLES, f"samples: {text}"))

    def notes(self) -> list[str]:
        """What is there and counts for nothing, and what could not be compared."""
        left = [part.path for own in self._parts.values() for part in own]
        found = [f"{path} is of a lease that was not finished: no reader takes it" for path in left]
        if self._uncompared:
            what = f"{self._uncompared} rows that were recorded are not compared with it"
            found.append(f"{self._run / FOLDER} is not there: {what}")
        return found
