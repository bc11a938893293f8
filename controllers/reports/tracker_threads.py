"""Send the metrics of a run to its trackers, each on its own thread, so that a slow or hanging
tracker never stops the run.

    start ──> follows ──end()──> sends what remains ──> ended
                 │ raises: reported once          │ takes longer than FINISH_S: reported, and left behind
                 │ shows no sign of life for STUCK_S: reported once

The run's own files are the queue: a thread reads the metrics that were added since its last look,
so a slow tracker costs no memory. `trackers/NAME.json` in the run's directory records the sent
metrics. A resumed run sends the metrics that its trackers missed.
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
from ...dataflow.runs.samples import SampleFile, sample_files, tables
from ...dataflow.runs.tables import by_step
from ...dataflow.safe_files import parse_object, read_file, read_json
from ...dataflow.untrusted_text import redacted, without_secrets
from .sample import Sample, sample_of
from .trackers import PROMETHEUS, TrackedRun, Tracker, new_tracker

logger = logging.getLogger("weft.trackers")

POLL_S = 1.0
"""[s] Time between two looks at the metrics."""
FINISH_S = 30.0
"""[s] How long a finished run waits for its trackers."""
LEAVE_S = 5.0
"""[s] How long a run that failed or was stopped waits for its trackers."""
STUCK_S = 60.0
"""[s] Report a tracker that has not responded for this long."""
FINISHED, FAILED = "finished", "failed"

Row = Mapping[str, float]


class NewValues:
    """Reads the metrics of a run as they are added. A look costs only as much as the new values.

    Args:
        run: directory of the run.
    """

    def __init__(self, run: Path) -> None:
        self._table = FollowedTable(run, METRICS)

    def after(self, sent: Mapping[str, int]) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield steps and their new metrics. A step comes again when more of its metrics are measured.

        Args:
            sent: the latest sent step of each metric. A finished run has its metrics in a Parquet
                file, and only later steps are read from it.
        """
        try:
            news = self._table.news()
        except (OSError, ValueError, pa.ArrowException):
            return
        if news.batches:
            for row in by_step(pa.Table.from_batches(news.batches)):
                yield int(row["step"]), {name: value for name, value in row.items() if name != "step"}
        if news.table is not None:
            steps, found = news.table["step"].to_numpy(), dict[int, dict[str, float]]()
            for name in news.table.column_names:
                values = news.table[name]
                known = values.is_valid().to_numpy() & (steps > sent.get(name, -1))
                for place in np.flatnonzero(known) if name != "step" else ():
                    found.setdefault(int(steps[place]), {})[name] = values[place].as_py()
            yield from sorted(found.items())


# The record of sent metrics in the run's directory, so that a resumed run sends nothing twice. Trackers
# take the steps of a metric in order, so the latest sent step of each metric is enough.


@dataclass
class SentMetrics:
    """The metrics that one tracker has received from a run."""

    id: str = ""
    """The tracker's id of the run."""
    logged: int = 0
    """Calls of `Tracker.log` so far."""
    steps: dict[str, int] = field(default_factory=dict)
    """Metric -> the latest step that was sent of it."""

    @classmethod
    def read(cls, path: Path) -> SentMetrics:
        """Read the record, or return an empty one if it is missing or damaged."""
        try:
            found = read_json(path)
            return cls(
                str(found["id"]),
                int(found["logged"]),
                {str(n): int(s) for n, s in found["steps"].items()},
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()

    def write(self, path: Path) -> None:
        """Write the record, replacing the file."""
        make_folder(path.parent)
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(self)))

    def go_back(self, step: int) -> None:
        """Forget what was sent for later steps.

        >>> sent = SentMetrics(steps={"loss": 7, "eval/mean": 2})
        >>> sent.go_back(4)
        >>> sent.steps
        {'loss': 4, 'eval/mean': 2}
        """
        self.steps = {name: min(latest, step) for name, latest in self.steps.items()}

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step that were not sent yet.

        >>> SentMetrics(steps={"loss": 7}).new(7, {"loss": 0.5, "eval/mean": 1.0})
        {'eval/mean': 1.0}
        """
        return {name: value for name, value in metrics.items() if step > self.steps.get(name, -1)}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record that these metrics were sent."""
        self.steps |= dict.fromkeys(metrics, step)
        self.logged += 1


def path_of(run: Path, tracker: str) -> Path:
    """Return the path of a tracker's record.

    >>> path_of(Path("runs/sums"), "my_module:Mine").as_posix()
    'runs/sums/trackers/my_module-Mine.json'
    """
    return run / TRACKERS / f"{tracker.replace(':', '-')}.json"


class Follower:
    """Sends the metrics of a run to one tracker.

    Args:
        after: the step that the run resumes after, or None for a new run.
        samples: recorded samples of each step to send.
    """

    def __init__(self, run: Path, name: str, after: int | None, samples: int = 0) -> None:
        self._run, self._name, self._after, self._samples = run, name, after, samples
        self._values = NewValues(run)
        self._path = path_of(run, name)
        self._sent = SentMetrics.read(self._path)
        self.looks = 0
        """Looks at the metrics so far: a sign of life."""
        self.is_left_behind = False
        """Whether the run ended before this tracker. It must not send anything any more, because
        the run may have been resumed, with another follower."""

    def follow(self, said_within: Callable[[float], str | None]) -> None:
        """Send metrics until the run is over.

        Args:
            said_within: waits this many seconds for FINISHED or FAILED; returns None before the end of the run.
        """
        tracker = new_tracker(self._name)
        if tracker.overwrites and self._after is not None:
            self._sent.go_back(self._after)
        config = _config(self._run / CONFIG)
        run = TrackedRun(self._run.name, self._run, config, self._sent.id, self._after, self._sent.logged)
        self._sent.id = tracker.open(run)
        said = None
        while said is None:
            said = said_within(POLL_S)  # first: the files are complete once the run has ended
            self._send(tracker)
            self.looks += 1
        tracker.close(failed=said != FINISHED)

    def _send(self, tracker: Tracker) -> None:
        sent, steps = False, set[int]()
        for step, metrics in self._values.after(self._sent.steps):
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
        self._sent.write(self._path)

    def _send_samples(self, tracker: Tracker, latest: int) -> bool:
        """Send samples of the latest recorded step with metrics. Return whether any were sent.

        Earlier steps are skipped, so that a slow tracker never builds up a backlog of texts.
        """
        log = getattr(tracker, "log_samples", None)
        if not self._samples or log is None or latest < 0:
            return False
        files = [file for file in sample_files(self._run) if file.graph == TRAIN and file.step <= latest]
        step = max((file.step for file in files), default=-1)
        if not self._sent.new(step, {SAMPLES: 0.0}) or step < 0:
            return False
        rows = itertools.chain.from_iterable(
            table.to_batches() for table in tables(_of_step(files, step), [])
        )
        batches = (batch.slice(at, 1) for batch in rows for at in range(len(batch)))
        found = [sample_of(_hidden(batch), step) for batch in itertools.islice(batches, self._samples)]
        if found:
            log(step, [_row(sample) for sample in found])
            self._sent.note(step, {SAMPLES: 0.0})
        return bool(found)


def _of_step(files: Sequence[SampleFile], step: int) -> list[SampleFile]:
    return [file for file in files if file.step == step]


def _hidden(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Remove secrets of the environment from a row, before its texts are cut."""
    for at, column in enumerate(batch.schema):
        if pa.types.is_string(column.type):
            texts = [None if text is None else redacted(text) for text in batch.column(at).to_pylist()]
            batch = batch.set_column(at, column, pa.array(texts, column.type))
    return batch


def _row(sample: Sample) -> dict[str, str | float]:
    """Return a sample as a table row. Long texts are cut, and control characters escaped."""
    texts = {name: sample.shown.get(name, "") for name in ("prompt", "response", "answer")}
    reward = sample.reward if sample.reward is not None else float("nan")
    return {**texts, "reward": reward, "verdict": sample.verdict}


def _config(path: Path) -> dict[str, Any]:
    """Return the configuration of a run without secrets, or nothing if it is unreadable."""
    try:
        return without_secrets(parse_object(read_file(path).decode(errors="replace"), path))
    except (OSError, ValueError):
        return {}


class _Thread:
    """The thread of one tracker."""

    def __init__(self, name: str, follower: Follower, now: float) -> None:
        self.name, self._follower = name, follower
        self.error = ""
        self.is_reported = False
        self.seen = 0, now
        """Looks of the follower, and when this number was seen first."""
        self._wake, self._said = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    _said: str | None

    def _run(self) -> None:
        try:
            self._follower.follow(self._said_within)
        except BaseException as error:  # also SystemExit, which some packages raise
            self.error = redacted(f"{type(error).__name__}: {error}")
            logger.info("tracker %s failed", self.name, exc_info=True)  # the alert of the run warns

    def _said_within(self, seconds: float) -> str | None:
        self._wake.wait(seconds)
        return self._said

    def end(self, said: str) -> None:
        self._said = said
        self._wake.set()

    def leave_behind(self) -> None:
        self._follower.is_left_behind = True

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread. Return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def is_stuck(self, now: float) -> bool:
        if self._follower.looks != self.seen[0]:
            self.seen = self._follower.looks, now
        return now - self.seen[1] > STUCK_S


class TrackerThreads:
    """The trackers of a run.

    Args:
        names: names of the trackers.
        run: directory of the run.
        report: sets the gauges of the cluster's endpoint, for the tracker `prometheus`, if there is one.
        warn: shows an alert.
        clock: [s] a monotonic clock.
        samples: recorded samples of each step to send.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: Path,
        report: Callable[[str, Row], None] | None,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        samples: int = 0,
    ) -> None:
        self._names = [name for name in names if name != PROMETHEUS]
        self._report = report if PROMETHEUS in names else None
        self._warn, self._clock = warn, clock
        self._run, self._samples = run, samples
        self._threads: list[_Thread] = []

    def start(self, after: int | None) -> None:
        """Start the threads.

        Args:
            after: the step that the run resumes after, or None for a new run.
        """
        for name in self._names:
            follower = Follower(self._run, name, after, self._samples)
            self._threads.append(_Thread(name, follower, self._clock()))

    def stepped(self, row: Row) -> None:
        """Report a finished step or evaluation to the endpoint, and check on the threads without waiting."""
        if self._report is not None:
            try:
                self._report(self._run.name, row)
            except Exception as error:  # whatever Ray raises: its endpoint must not end a run
                self._report = None
                self._warn(f"tracker {PROMETHEUS!r} failed, and the run continues without it: {error}")
        for one in self._threads:
            if one.join(0):
                self._tell(one, f"has ended ({one.error})")
            elif one.is_stuck(self._clock()):
                self._tell(one, f"has not responded for {STUCK_S:g} s")

    def end(self, *, finished: bool) -> None:
        """Have the trackers send what remains, and wait FINISH_S or LEAVE_S for them.

        Args:
            finished: whether the run has reached the end of its schedule.
        """
        threads, self._threads = self._threads, []
        for one in threads:
            one.end(FINISHED if finished else FAILED)
        patience_s = FINISH_S if finished else LEAVE_S
        deadline = self._clock() + patience_s
        for one in threads:
            if not one.join(max(0.0, deadline - self._clock())):
                one.leave_behind()
                self._tell(one, f"had not sent everything {patience_s:g} s after the end")
            elif one.error:
                self._tell(one, f"has ended ({one.error})")

    def _tell(self, one: _Thread, problem: str) -> None:
        if not one.is_reported:
            one.is_reported = True
            self._warn(
                f"tracker {one.name!r} {problem}. The run continues; all metrics are in its own files, and a run that is "
                "resumed sends what is missing."
            )
