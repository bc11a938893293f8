"""TrackerProcess: the program that hands the metrics of one run to one tracker.

    python -m weft.controllers.reports.tracker_process RUN TRACKER [SAMPLES [STEP]]

The driver starts it, and holds its standard input open. It ends when a line comes there that says how the run ended, or when the driver
is gone: then it sends what remains, and has PATIENCE_S for that. It never writes to the run's directory but for its log and what it has
sent (`sent_metrics.py`), whose time of change shows the driver that it is not stuck.
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

# New values
#
# NewValues: what was added to the metrics of a run since the last look. Its cost does not depend
# on how long the run has gone on.


class NewValues:
    """Reads the metrics of a run while another process appends to them.

    The stream that they are appended to becomes a Parquet file when the run ends. Whoever has opened the stream reads it to its end;
    whoever comes later reads the Parquet file.

    Args:
        run: directory of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file: BinaryIO | None = None
        self._read = 0
        """Bytes of the stream that were read: complete messages."""
        self._over = False

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and metrics, of what was added since the last time; a step comes again when more of its metrics were measured."""
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
        """The messages that are complete. One that is being written is read another time."""
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
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _by_step(rows: list[dict[str, float]]) -> Iterator[tuple[int, dict[str, float]]]:
    for row in rows:
        yield int(row["step"]), {name: value for name, value in row.items() if name != "step"}


# Sent metrics
#
# SentMetrics: which metrics a tracker has taken, kept in the run's directory, so that a run that
# goes on sends nothing twice.
#
# A tracker takes each metric's steps in order, so one number for each metric says it all: the
# latest step that was sent.


@dataclass
class SentMetrics:
    """What one tracker has taken of a run."""

    id: str = ""
    """The tracker's own id of the run."""
    logged: int = 0
    """Calls of `Tracker.log` so far."""
    steps: dict[str, int] = field(default_factory=dict)
    """Metric -> the latest step that was sent of it."""
    error: str = ""
    """Why the process of the tracker has ended; empty: it goes on, or ended well."""

    @classmethod
    def read(cls, path: Path) -> SentMetrics:
        """What was written there; nothing was sent where there is no such file, or it is damaged."""
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
        """The error that was written there; empty where there is none."""
        try:
            return str(read_json(path)["error"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def write(self, path: Path) -> None:
        """Replace the file."""
        make_folder(path.parent)
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(self)))

    def go_back(self, step: int) -> None:
        """What was sent of later steps counts no more.

        >>> sent = SentMetrics(steps={"loss": 7, "eval/mean": 2})
        >>> sent.go_back(4)
        >>> sent.steps
        {'loss': 4, 'eval/mean': 2}
        """
        self.steps = {name: min(latest, step) for name, latest in self.steps.items()}

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of the metrics of a step that were not sent.

        >>> SentMetrics(steps={"loss": 7}).new(7, {"loss": 0.5, "eval/mean": 1.0})
        {'eval/mean': 1.0}
        """
        return {name: value for name, value in metrics.items() if step > self.steps.get(name, -1)}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """These were sent."""
        self.steps |= dict.fromkeys(metrics, step)
        self.logged += 1


def path_of(run: Path, tracker: str) -> Path:
    """Where the tracker of a run keeps what it has sent.

    >>> path_of(Path("runs/sums"), "my_module:Mine").as_posix()
    'runs/sums/trackers/my_module-Mine.json'
    """
    return run / TRACKERS / f"{tracker.replace(':', '-')}.json"


POLL_S = 1.0
"""Seconds between two looks at the metrics of the run."""
PATIENCE_S = 60.0
"""Longest time for what remains to be sent when the driver is gone."""
FINISHED = "finished"
"""The line that says that the run came to its end."""
NICE = 5
"""It gives way to the run."""


class TrackerProcess:
    """Hands metrics to a tracker.

    Args:
        run: directory of the run.
        name: of the tracker.
        after: the step after which the run goes on; None: it begins.
        samples: number of recorded samples of each step that the tracker gets.
    """

    def __init__(self, run: Path, name: str, after: int | None, samples: int = 0) -> None:
        self._run, self._name, self._after, self._samples = run, name, after, samples
        self._values = NewValues(run)
        self._path = path_of(run, name)
        self._sent = SentMetrics.read(self._path)

    def follow(self, said_within: Callable[[float], str | None]) -> None:
        """Send metrics until the run is over.

        Args:
            said_within: waits so many seconds for what the driver says at the end; empty: it is gone; None: it has said nothing yet.
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
                said = said_within(
                    POLL_S
                )  # first: what is on the disk when the run is over is all there is
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
        """Send samples of the latest recorded step whose metrics have come; returns whether any were sent. Steps that were passed over
        are in the run's directory: a slow tracker never has a backlog of texts."""
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
        """Note why it ended."""
        self._sent.error = redacted(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            self._sent.write(self._path)


class Input:
    """Waits for the line that ends the process, in a thread, so that it is heard also while a tracker is stuck."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._wait, daemon=True, name="input").start()

    def _wait(self) -> None:
        line = sys.stdin.readline().strip()
        signal.setitimer(
            signal.ITIMER_REAL, PATIENCE_S
        )  # its signal ends this process, wherever it is stuck
        self._lines.put(line)

    def within(self, seconds: float) -> str | None:
        """The line, if it comes in time; empty when the driver is gone. None: nothing came."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None


def _of_step(files: Sequence[SampleFile], step: int) -> list[SampleFile]:
    return [file for file in files if file.step == step]


def _hidden(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The row without secrets of the environment, before a text is cut in the middle of one."""
    for at, column in enumerate(batch.schema):
        if pa.types.is_string(column.type):
            texts = [None if text is None else redacted(text) for text in batch.column(at).to_pylist()]
            batch = batch.set_column(at, column, pa.array(texts, column.type))
    return batch


def _row(sample: Sample) -> dict[str, str | float]:
    """A sample as a row of a table. Long texts are cut, and control characters escaped."""
    texts = {name: sample.shown.get(name, "") for name in ("prompt", "response", "answer")}
    reward = sample.reward if sample.reward is not None else float("nan")
    return {**texts, "reward": reward, "verdict": sample.verdict}


def _config(path: Path) -> dict[str, Any]:
    """The configuration of a run without secrets, also those of this environment; empty where it cannot be read."""
    try:
        return without_secrets(parse_object(read_file(path).decode(errors="replace"), path))
    except (OSError, ValueError):
        return {}


def main(run: str, name: str, samples: str = "0", *after: str) -> int:
    """Follow a run to its end; returns the exit code."""
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
    os._exit(code)  # a thread that the tracker's package has left does not keep the process
