"""Send a run's metrics to its trackers, each on its own thread, so that no tracker stops the run.

    start ──> follows ──end_all()──> sends what remains ──> ended
                 │ raises: reported once              │ takes longer than FINISH_S: reported, and left behind
                 │ shows no sign of life for STUCK_S: reported once

The run's files are the queue: a thread reads the metrics that were added since its last read, so a
slow tracker costs no memory. `trackers/NAME.json` records the sent metrics; a resumed run sends the
others.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...dataflow.graph import TRAIN
from ...dataflow.runs.files import CONFIG, METRICS, SAMPLES, TRACKERS, make_folder, replacing
from ...dataflow.runs.follow import FollowedTable
from ...dataflow.runs.samples import sample_files, tables
from ...dataflow.runs.tables import by_step
from ...dataflow.safe_files import parse_object, read_file, read_json
from ...dataflow.untrusted_text import redacted, without_secrets
from .sample import Sample, sample_of
from .trackers import PROMETHEUS, TrackedRun, Tracker, new_tracker

logger = logging.getLogger("weft.trackers")

POLL_S = 1.0
"""[s] Time between two reads of the metrics."""
FINISH_S = 30.0
"""[s] How long a finished run waits for its trackers."""
LEAVE_S = 5.0
"""[s] How long a run that failed or was stopped waits for its trackers."""
STUCK_S = 60.0
"""[s] Report a tracker that has been silent for this long."""
FINISHED, FAILED = "finished", "failed"


def new_values(table: FollowedTable, sent: Mapping[str, int]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, its new metrics). A step may come again with more metrics.

    Args:
        sent: Metric -> latest sent step. From a finished run, only later steps are read.
    """
    try:
        news = table.news()
    except (OSError, ValueError, pa.ArrowException):
        return
    if news.batches:
        for row in by_step(pa.Table.from_batches(news.batches)):
            yield int(row["step"]), {name: value for name, value in row.items() if name != "step"}
    if news.table is not None and "step" in news.table.column_names:
        steps, found = news.table["step"].to_numpy(), dict[int, dict[str, float]]()
        for name in news.table.column_names:
            values = news.table[name]
            known = values.is_valid().to_numpy() & (steps > sent.get(name, -1))
            for place in np.flatnonzero(known) if name != "step" else ():
                found.setdefault(int(steps[place]), {})[name] = values[place].as_py()
        yield from sorted(found.items())


@dataclass
class _SentMetrics:
    """The metrics that one tracker has received.

    Trackers get a metric's steps in order, so its latest sent step is enough.
    """

    id: str = ""
    logged: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    """Metric -> latest sent step."""

    @classmethod
    def of_file(cls, path: Path) -> _SentMetrics:
        """Read the record, or return an empty one if it is missing or damaged."""
        try:
            found = read_json(path)
            steps = {str(name): int(step) for name, step in found["steps"].items()}
            return cls(str(found["id"]), int(found["logged"]), steps)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()

    def save(self, path: Path) -> None:
        make_folder(path.parent)
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(self)))

    def go_back(self, step: int) -> None:
        """Forget what was sent for steps after `step`.

        >>> sent = _SentMetrics(steps={"loss": 7, "eval/mean": 2})
        >>> sent.go_back(4)
        >>> sent.steps
        {'loss': 4, 'eval/mean': 2}
        """
        self.steps = {name: min(latest, step) for name, latest in self.steps.items()}

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the unsent metrics of a step.

        >>> _SentMetrics(steps={"loss": 7}).new(7, {"loss": 0.5, "eval/mean": 1.0})
        {'eval/mean': 1.0}
        """
        return {name: value for name, value in metrics.items() if step > self.steps.get(name, -1)}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps |= dict.fromkeys(metrics, step)
        self.logged += 1


def path_of(run: Path, tracker: str) -> Path:
    """
    >>> path_of(Path("runs/sums"), "my_module:Mine").as_posix()
    'runs/sums/trackers/my_module-Mine.json'
    """
    return run / TRACKERS / f"{tracker.replace(':', '-')}.json"


class _Follower(threading.Thread):
    """Sends a run's metrics to one tracker. `after` is the step of a resumed run's checkpoint."""

    def __init__(self, run: Path, tracker: str, after: int | None, samples: int = 0) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self.error = tracker, ""
        self.looks = 0
        """Number of reads of the metrics, as a sign of life."""
        self.is_left_behind = False
        """Whether the run ended before this thread, which must then send nothing: the run may have
        been resumed with another thread."""
        self._run, self._after, self._samples = run, after, samples
        self._metrics = FollowedTable(run, METRICS)
        self._path = path_of(run, tracker)
        self._sent = _SentMetrics.of_file(self._path)
        self._ended, self._said = threading.Event(), ""

    def run(self) -> None:
        try:
            self.follow(lambda seconds: self._said if self._ended.wait(seconds) else None)
        except BaseException as error:  # also SystemExit, which some packages raise
            self.error = redacted(f"{type(error).__name__}: {error}")
            logger.info("tracker %s failed", self.tracker, exc_info=True)  # the run's alert warns

    def say_ended(self, said: str) -> None:
        """Let the thread send what remains, and end. `said` is FINISHED or FAILED."""
        self._said = said
        self._ended.set()

    def follow(self, said_within: Callable[[float], str | None]) -> None:
        """Send metrics until the run is over.

        Args:
            said_within: Waits up to this many seconds for the end of the run. Returns FINISHED,
                FAILED, or None if the run continues.
        """
        tracker = new_tracker(self.tracker)
        if tracker.overwrites and self._after is not None:
            self._sent.go_back(self._after)
        config = _config(self._run / CONFIG)
        run = TrackedRun(
            self._run.name, self._run, config, self._sent.id, self._after, self._sent.logged
        )
        self._sent.id = tracker.open(run)
        said = None
        while said is None:
            said = said_within(POLL_S)  # first: the files are complete once the run has ended
            self._send(tracker)
            self.looks += 1
        tracker.close(failed=said != FINISHED)

    def _send(self, tracker: Tracker) -> None:
        sent, steps = False, set[int]()
        for step, metrics in new_values(self._metrics, self._sent.steps):
            if self.is_left_behind:
                raise RuntimeError("the run ended without it")
            steps.add(step)
            if new := self._sent.new(step, metrics):
                tracker.log(step, new)
                self._sent.note(step, new)
                sent = True
        sent |= self._send_samples(tracker, max(steps, default=-1))
        if sent:
            tracker.flush()
        # After the flush: a crash in between sends values twice, but loses none.
        self._sent.save(self._path)

    def _send_samples(self, tracker: Tracker, latest: int) -> bool:
        """Send samples of the latest recorded step with metrics, and return whether there were any.

        Skips earlier steps, so that a slow tracker has no backlog of texts.
        """
        log = getattr(tracker, "log_samples", None)
        if not self._samples or log is None or latest < 0:
            return False
        files = [file for file in sample_files(self._run) if file.graph == TRAIN and file.step <= latest]
        step = max((file.step for file in files), default=-1)
        if not self._sent.new(step, {SAMPLES: 0.0}) or step < 0:
            return False
        of_step = [file for file in files if file.step == step]
        batches = (batch for table in tables(of_step, []) for batch in table.to_batches())
        rows = (batch.slice(at, 1) for batch in batches for at in range(len(batch)))
        found = [sample_of(_hidden(row), step) for row in itertools.islice(rows, self._samples)]
        if found:
            log(step, [_row(sample) for sample in found])
            self._sent.note(step, {SAMPLES: 0.0})
        return bool(found)


def _hidden(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the environment's secrets from a row, before its texts are cut."""
    for at, column in enumerate(batch.schema):
        if pa.types.is_string(column.type):
            texts = [None if text is None else redacted(text) for text in batch.column(at).to_pylist()]
            batch = batch.set_column(at, column, pa.array(texts, column.type))
    return batch


def _row(sample: Sample) -> dict[str, str | float]:
    """Return a sample as a table row, with cut and escaped texts."""
    texts = {name: sample.shown.get(name, "") for name in ("prompt", "response", "answer")}
    reward = sample.reward if sample.reward is not None else float("nan")
    return {**texts, "reward": reward, "verdict": sample.verdict}


def _config(path: Path) -> dict[str, Any]:
    try:
        return without_secrets(parse_object(read_file(path).decode(errors="replace"), path))
    except (OSError, ValueError):
        return {}


class TrackerThreads:
    """The trackers of a run.

    Args:
        report: Sets the gauges of the cluster's endpoint (`prometheus`), if any.
        warn: Shows an alert.
    """

    def __init__(
        self,
        trackers: Sequence[str] | Mapping[str, int],
        run: Path,
        report: Callable[[str, Mapping[str, float]], None] | None,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        samples = trackers if isinstance(trackers, Mapping) else dict.fromkeys(trackers, 0)
        self._samples = {name: number for name, number in samples.items() if name != PROMETHEUS}
        """Tracker -> number of samples to send of each step."""
        self._report = report if PROMETHEUS in trackers else None
        self._warn, self._clock = warn, clock
        self._run = run
        self._threads: list[_Follower] = []
        self._seen: dict[str, tuple[int, float]] = {}
        """Tracker -> (its reads, [s] time when this number was first seen)."""
        self._reported: set[str] = set()

    def start(self, after: int | None) -> None:
        """Start the threads. `after` is the step of a resumed run's checkpoint."""
        for name, samples in self._samples.items():
            self._seen[name] = 0, self._clock()
            self._threads.append(_Follower(self._run, name, after, samples))
            self._threads[-1].start()

    def stepped(self, row: Mapping[str, float]) -> None:
        """Report a step or evaluation to the endpoint, and check the threads."""
        if self._report is not None:
            try:
                self._report(self._run.name, row)
            except Exception as error:  # no error of the endpoint may end a run
                self._report = None
                self._warn(f"tracker {PROMETHEUS!r} failed, and the run continues without it: {error}")
        now = self._clock()
        for one in self._threads:
            looks, since = self._seen[one.tracker]
            if one.looks != looks:
                self._seen[one.tracker] = one.looks, now
            if not one.is_alive():
                self._tell(one, f"has ended ({one.error})")
            elif one.looks == looks and now - since > STUCK_S:
                self._tell(one, f"has not responded for {STUCK_S:g} s")

    def end_all(self, *, finished: bool) -> None:
        """Let trackers send the rest: wait FINISH_S, or LEAVE_S if the run did not finish."""
        threads, self._threads = self._threads, []
        for one in threads:
            one.say_ended(FINISHED if finished else FAILED)
        patience_s = FINISH_S if finished else LEAVE_S
        deadline = self._clock() + patience_s
        for one in threads:
            one.join(max(0.0, deadline - self._clock()))
            if one.is_alive():
                one.is_left_behind = True
                self._tell(one, f"had not sent everything {patience_s:g} s after the end")
            elif one.error:
                self._tell(one, f"has ended ({one.error})")

    def _tell(self, one: _Follower, problem: str) -> None:
        if one.tracker not in self._reported:
            self._reported.add(one.tracker)
            self._warn(
                f"tracker {one.tracker!r} {problem}. The run continues; all metrics are in its own files, and a run that is "
                "resumed sends what is missing."
            )
