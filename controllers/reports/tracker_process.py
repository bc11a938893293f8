"""TrackerProcess: a separate program that sends the metrics of one run to one tracker.

    python -m weft.controllers.reports.tracker_process RUN TRACKER [SAMPLES [STEP]]

The driver starts it, and keeps its standard input open. The process ends when a line arrives there
that tells how the run ended, or when the driver is gone. It then sends the remaining metrics within
PATIENCE_S. In the run's directory it writes only its log and the record of sent metrics, whose
modification time shows the driver that it is not stuck.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ...dataflow.graph import TRAIN
from ...dataflow.runs.files import CONFIG, METRICS, SAMPLES, STREAM, TRACKERS, make_folder, replacing
from ...dataflow.runs.samples import SampleFile, sample_files, tables
from ...dataflow.runs.tables import VALUES, by_step, present, read_metrics
from ...dataflow.safe_files import parse_object, read_file, read_json
from ...dataflow.untrusted_text import redacted, without_secrets
from .sample import Sample, sample_of
from .trackers import TrackedRun, Tracker, new_tracker

# New metrics of a run since the last look. The cost does not grow with the length of the run.


class NewValues:
    """Reads the metrics of a run while another process appends to them.

    When the run ends, the stream is replaced by a Parquet file. A reader that has opened the stream
    reads it to the end; otherwise it reads the Parquet file.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file: BinaryIO | None = None
        self._read = 0
        """[bytes] Position in the stream, after complete messages."""
        self._over = False

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, metrics) added since the last time. A step may come again with more metrics."""
        if self._over:
            return
        if self._file is None:
            try:
                self._file = (self._run / f"{METRICS}{STREAM}").open("rb")
            except FileNotFoundError:
                yield from self._of_parquet()
                return
        yield from _by_step(by_step(pa.Table.from_batches(self._batches(self._file), VALUES)))

    def _batches(self, file: BinaryIO) -> Iterator[pa.RecordBatch]:
        """Yield complete messages. A partial one is read the next time."""
        file.seek(self._read)
        reader = pa.ipc.MessageReader.open_stream(file)
        while True:
            try:
                message = reader.read_next_message()
            except (StopIteration, pa.ArrowException, OSError):
                return
            self._read = file.tell()
            if message.type == "record batch":
                yield pa.ipc.read_record_batch(message, VALUES)

    def _of_parquet(self) -> Iterator[tuple[int, dict[str, float]]]:
        table = read_metrics(self._run)
        if table is not None:
            self._over = True
            yield from _by_step([present(row) for row in table.to_pylist()])

    def close(self) -> None:
        """Close the stream."""
        if self._file is not None:
            self._file.close()


def _by_step(rows: list[dict[str, float]]) -> Iterator[tuple[int, dict[str, float]]]:
    for row in rows:
        yield int(row["step"]), {name: value for name, value in row.items() if name != "step"}


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
    """Metric -> latest sent step."""
    error: str = ""
    """Error that ended the tracker's process, or empty."""

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

    @staticmethod
    def error_in(path: Path) -> str:
        """Return the error in the record, or an empty string."""
        try:
            return str(read_json(path)["error"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

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


POLL_S = 1.0
"""[s] Time between two looks at the metrics of the run."""
PATIENCE_S = 60.0
"""[s] Longest time to send remaining metrics after the driver is gone."""
FINISHED = "finished"
"""Input line for a run that finished."""
NICE = 5
"""Niceness of the process, so that the run has priority."""


class TrackerProcess:
    """Sends metrics to a tracker.

    Args:
        after: the step that the run resumes after, or None for a new run.
        samples: recorded samples of each step to send.
    """

    def __init__(self, run: Path, name: str, after: int | None, samples: int = 0) -> None:
        self._run, self._name, self._after, self._samples = run, name, after, samples
        self._values = NewValues(run)
        self._path = path_of(run, name)
        self._sent = SentMetrics.read(self._path)

    def follow(self, said_within: Callable[[float], str | None]) -> None:
        """Send metrics until the run is over.

        Args:
            said_within: waits up to a number of seconds for the driver's last line. Returns an
                empty string if the driver is gone, and None if there is no line yet.
        """
        tracker = new_tracker(self._name)
        if tracker.overwrites and self._after is not None:
            self._sent.go_back(self._after)
        config = _config(self._run / CONFIG)
        run = TrackedRun(self._run.name, self._run, config, self._sent.id, self._after, self._sent.logged)
        self._sent.id = tracker.open(run)
        said = None
        try:
            while said is None:
                # Wait before reading: once the run is over, everything is on the disk.
                said = said_within(POLL_S)
                self._send(tracker)
        finally:
            self._values.close()
        tracker.close(failed=said != FINISHED)

    def _send(self, tracker: Tracker) -> None:
        sent, steps = False, set[int]()
        for step, metrics in self._values:
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

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the process."""
        self._sent.error = redacted(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            self._sent.write(self._path)


class Input:
    """Waits in a thread for the line that ends the process, even while a tracker is stuck."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._wait, daemon=True, name="input").start()

    def _wait(self) -> None:
        line = sys.stdin.readline().strip()
        # The timer's signal ends this process, even if the tracker is stuck.
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        self._lines.put(line)

    def within(self, seconds: float) -> str | None:
        """Return the line, an empty string if the driver is gone, or None after a timeout."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None


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


def main(run: str, name: str, samples: str = "0", *after: str) -> int:
    """Follow a run to its end. Return the exit code."""
    os.nice(NICE)
    follower = TrackerProcess(Path(run), name, int(after[0]) if after else None, int(samples))
    try:
        follower.follow(Input().within)
    except BaseException as error:
        traceback.print_exc()
        follower.failed(error)
        return 1
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for threads of the tracker's package
