"""TrackerProcess: the program that hands the metrics of one run to one tracker.

    python -m weft.controllers.trackers.tracker_process RUN TRACKER [SAMPLES [STEP]]

The driver starts it, and holds its standard input open. It ends when a line comes there that says how the run ended, or when the driver
is gone: then it sends what remains, and has PATIENCE_S for that. It never writes to the run's directory but for its log and what it has
sent (`sent_metrics.py`), whose time of change shows the driver that it is not stuck.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...dataflow.buffer.run_files import CONFIG, SAMPLES
from ...dataflow.buffer.samples import SampleFile, sample_files, tables
from ...dataflow.graph import TRAIN
from ...dataflow.redaction import redacted, without_secrets
from ...dataflow.safe_files import parse_object, read_file
from ..telling.sample import Sample, sample_of
from .new_values import NewValues
from .sent_metrics import SentMetrics, path_of
from .tracker import TrackedRun, Tracker, new_tracker

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
                said = said_within(POLL_S)  # first: what is on the disk when the run is over is all there is
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
        rows = itertools.chain.from_iterable(table.to_batches() for table in tables(_of_step(files, step), []))
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
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)  # its signal ends this process, wherever it is stuck
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
    for at, field in enumerate(batch.schema):
        if pa.types.is_string(field.type):
            texts = [None if text is None else redacted(text) for text in batch.column(at).to_pylist()]
            batch = batch.set_column(at, field, pa.array(texts, field.type))
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
