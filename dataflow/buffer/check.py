"""`weft buffer check`: check a run's log against the rules for rows (`log_rules.py`), and the run's
checkpoints and samples against the log. The check only reads, so the run may be active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError
from ..runs.files import LOG, SAMPLES
from ..runs.log import DAMAGED, LogReader, Position, lost_records
from ..runs.manifest import describe
from ..runs.samples import files_by, noted_checksums, sample_files
from ..runs.tables import last_step
from .log_rules import Checker, Rule, Violation
from .logged_rows import GraphCounts
from .recovery import ledger_checkpoints, read_checkpoint

MAX_VIOLATIONS = 1000
"""Stop after this many violations: later ones mostly follow from earlier ones."""

_FOREIGN = "of another log, or from after the point to which the run went back; recovery skips it"


@dataclass
class Report:
    """Result of a check. A log without `violations` is valid."""

    graphs: dict[str, GraphCounts]
    records: int
    num_bytes: int
    leases: dict[str, int]
    """Maps `granted`, `finished`, `released` and `open` to numbers of leases."""
    restarts: int
    """Number of epochs after the first or, in logs without epochs, of restarts that released
    leases."""
    segments: int
    checkpoints: int
    """Number of valid checkpoints."""
    damage: list[str]
    """Damage that breaks no rule: an incomplete last record, unreadable checkpoints, and parts that
    a rollback cut off the log."""
    violations: list[Violation]


def check_log(folder: Path) -> Report:
    """Check the log in a folder, and the run's checkpoints and samples.

    Raises:
        UserError: the folder has no log.
        FormatError: another version of Weft wrote the log.
    """
    measured = last_step(folder.parent)  # read it before the log, which may grow
    samples = _RecordedSamples(folder.parent)
    checker = Checker(on_recorded=samples.compare)
    saved = _SavedStates(folder, checker)
    violations, damage, end = saved.violations, saved.damage, Position()
    saved.compare(end)
    for end, found in check_records(folder, checker, damage):
        violations += found
        # A checkpoint's position is between two records.
        saved.compare(end)
        if len(violations) >= MAX_VIOLATIONS:
            violations.append(Violation(Rule.SOUND_LOG, "... and more: the check stopped here"))
            break
    cuts = sorted(folder.glob(f"{LOG}.cut-*"))
    saved.note_rest(end, went_back=bool(cuts))
    # The driver logs each step before it writes the metrics. A run resumed without its log begins a
    # new one, which has no step until the first step ends.
    noted = checker.notes.get("step", None if "cursor" in checker.notes else 0)
    if measured is not None and isinstance(noted, int) and noted < measured:
        said = (
            f"the metrics know step {measured}, and the log ends in step {noted}, at byte {checker.at}"
        )
        violations.append(Violation(Rule.SOUND_LOG, f"{said}: what came after it is lost"))
    samples.compare_late()
    for path in cuts:
        size = path.stat().st_size
        damage.append(f"{path.name}: {size} bytes were cut off the log when the run was restarted")
    return Report(
        graphs=checker.rows.counts(),
        records=checker.rows.events,
        num_bytes=end.offset,
        leases={**checker.lease_counts, "open": len(checker.rows.leases)},
        restarts=checker.restarts,
        segments=len(checker.segments),
        checkpoints=saved.sound,
        damage=[*damage, *samples.notes()],
        violations=[*violations, *samples.violations],
    )


def read_log(folder: Path, checker: Checker, notes: list[str]) -> None:
    """Feed a log to a checker to rebuild its rows. Adds a line to `notes` for each gap in the log.
    Raises the errors of `check_log`."""
    for _, found in check_records(folder, checker, []):
        notes += [f"{DAMAGED}{one}" for one in found if one.rule is Rule.SOUND_LOG]


def check_records(
    folder: Path, checker: Checker, damage: list[str]
) -> Iterator[tuple[Position, list[Violation]]]:
    """Feed a log to a checker, and yield the end of each record with its violations. Adds a line to
    `damage` if a crash cut off the last record. Raises the errors of `check_log`."""
    log = folder / LOG
    if not log.exists():
        raise UserError(f"{folder} holds no log of a run ({LOG})")
    reader, end = LogReader(log), Position()
    for record in reader:
        found = checker.feed(record, end.offset)
        end = reader.end
        yield end, found
    broken = checker.end_log()
    if not checker.rows.events:
        problem = f"{log} has no record: the run never began, or its log was emptied"
        broken.append(Violation(Rule.SOUND_LOG, problem))
    if reader.damage and (problem := lost_records(log, end)):
        broken.append(Violation(Rule.SOUND_LOG, f"{reader.damage}; {problem}"))
    elif reader.damage:
        damage.append(reader.damage)
    yield end, broken


class _SavedStates:
    """Compares the checkpoints of the ledgers with the log."""

    def __init__(self, folder: Path, checker: Checker) -> None:
        self._checker = checker
        self._paths: dict[int, Path] = {}
        self.sound = 0
        self.damage: list[str] = []
        self.violations: list[Violation] = []
        for path in ledger_checkpoints(folder):
            try:
                self._paths[read_checkpoint(path)[0].offset] = path
            except (ValueError, OSError, KeyError) as error:
                if path.exists():  # the run may have just deleted an old checkpoint
                    self.damage.append(str(error))

    def compare(self, end: Position) -> None:
        """Compare the checkpoint at this log position, if there is one, with the log."""
        path = self._paths.pop(end.offset, None) if self._paths else None
        if path is None:
            return
        try:
            place, records = read_checkpoint(path)
        except (ValueError, OSError):
            return
        # The log up to this offset is a different one.
        if place.checksum != end.checksum:
            self.damage.append(f"{path.name}: {_FOREIGN}")
            return
        self.sound += 1
        levels = (lv for record in records if record["do"] == "group" for lv in record["levels"])
        saved = dict(state for level in levels for state in _saved_states(level))
        rows = self._checker.rows.in_flight
        for id in sorted(saved.keys() ^ rows.keys()):
            where = "the checkpoint lacks" if id in rows else "the log lacks"
            self._complain(f"{path.name}: row {id} is in flight, which {where}")
        # Compare the states of the common rows at each node.
        for id in saved.keys() & rows.keys():
            nodes = rows[id].group.graph.nodes
            done = sum(1 << i for i, node in enumerate(nodes) if id in node.done)
            leased = sum(1 << i for i, node in enumerate(nodes) if id in node.leased)
            if saved[id] != (done, leased):
                self._complain(f"{path.name}: row {id} has other done or leased nodes than in the log")

    def note_rest(self, end: Position, *, went_back: bool) -> None:
        """Report checkpoints whose position is not in the log, which ends at `end`. A checkpoint is
        written after the log is synced, so one beyond the end of the log is a violation, unless a
        rollback cut the log (`went_back`)."""
        for offset, path in self._paths.items():
            beyond = f"{path.name}: at byte {offset} of the log; only {end.offset} bytes can be read"
            if offset < end.offset:
                self.damage.append(f"{path.name}: {_FOREIGN}")
            elif went_back:
                self.damage.append(beyond)
            else:
                self._complain(beyond, Rule.SOUND_LOG)

    def _complain(self, text: str, rule: Rule = Rule.CHECKPOINT) -> None:
        self.violations.append(Violation(rule, text))


def _saved_states(level: Mapping[str, Any]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (sample id, (mask of nodes done, mask of nodes leasing)) for each saved row."""
    masks = [(i, int(done, 16), int(leased, 16)) for i, done, _, leased, *_ in level["states"]]
    for place, id in enumerate(level["ids"]):
        done = sum((of >> place & 1) << i for i, of, _ in masks)
        leased = sum((of >> place & 1) << i for i, _, of in masks)
        yield id, (done, leased)


class _RecordedSamples:
    """Compares a run's recorded samples with the log, lease by lease."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._parts = files_by(sample_files(run), "graph", "lease")
        self._checksums = noted_checksums(run)
        self._without_checksum = 0
        self.violations: list[Violation] = []
        self._uncompared = 0
        self._late: dict[tuple[str, int], Mapping[int, int]] = {}
        """Maps (graph, lease) to {sample id: step}, for leases with rows that were not in the
        listed files."""
        self._is_late = False

    def compare_late(self) -> None:
        late, self._late, self._is_late = self._late, {}, True
        if late:
            found = files_by(sample_files(self._run), "graph", "lease")
            self._checksums = noted_checksums(self._run)
            self._parts |= {key: found[key] for key in late.keys() & found.keys()}
        for (graph, lease), steps in late.items():
            self.compare(graph, lease, steps)

    def compare(self, graph: str, lease: int, steps: Mapping[int, int]) -> None:
        """Check that a lease's files contain exactly the rows of `steps`, which maps sample id to
        step."""
        found = self._parts.pop((graph, lease), [])
        if steps and not (self._run / SAMPLES).is_dir():
            self._uncompared += len(steps)
            return
        filed: list[tuple[int, int]] = []
        for part in found:
            try:
                filed += [(id, part.step) for id in part.rows()["sample_id"].to_pylist()]
            except (pa.ArrowException, OSError, KeyError) as error:
                self._complain(f"{part.path} cannot be read: {error}")
                return
        who, times = f"lease {lease} of graph {graph!r}", Counter(id for id, _ in filed)
        if missing := sorted(steps.keys() - times.keys()):
            # An active run may have added files since they were listed.
            if not self._is_late:
                self._late[graph, lease] = dict(steps)
                return
            those = f"{len(missing)} are missing (sample ids {missing[:3]})"
            self._complain(f"{who} recorded {len(steps)} rows; {those}")
        before = len(self.violations)
        if wrong := [id for id, number in times.items() if number > 1 or id not in steps]:
            those = f"were not recorded by it, or are there more than once (sample ids {wrong[:3]})"
            self._complain(f"{who}: {len(wrong)} rows {those}")
        if wrong := [(id, step) for id, step in filed if steps.get(id, step) != step]:
            id, step = wrong[0]
            those = f"is filed under step {step}; it belongs to step {steps[id]}"
            self._complain(f"{who}: sample {id} {those}")
        # Do not report a file with wrong rows a second time.
        for path in [part.path for part in found] if len(self.violations) == before else ():
            noted = self._checksums.get(path.name)
            if noted is None:
                self._without_checksum += 1
                continue
            try:
                checksum = describe(path)["xxh3_64"]
            except (OSError, UserError) as error:
                self._complain(f"{path} cannot be read: {error}")
                continue
            if checksum != noted:
                self._complain(f"{path} was changed: its checksum is {checksum}, not {noted}")

    def _complain(self, text: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(Rule.SAMPLES, f"samples: {text}"))

    def notes(self) -> list[str]:
        """Return lines about files that readers skip, and data that was not compared."""
        left = [part.path for own in self._parts.values() for part in own]
        found = [f"{path} belongs to a lease that was not finished: readers skip it" for path in left]
        if self._checksums and self._without_checksum:  # earlier versions of Weft log no checksums
            found.append(
                f"{self._run / SAMPLES}: {self._without_checksum} files have no checksum to be compared with"
            )
        if self._uncompared:
            what = f"{self._uncompared} recorded rows are not compared with it"
            found.append(f"{self._run / SAMPLES} does not exist: {what}")
        return found
