"""Fixtures for displays: steps of an imaginary run, a file of samples, and streams in memory."""

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from weft.controllers.reports.displays import Display, JsonLines, PlainLines
from weft.controllers.reports.progress import Progress
from weft.controllers.reports.step_line import ending_of
from weft.controllers.reports.terminal import Terminal

DISPLAYS = {"plain": PlainLines, "json": JsonLines, "rich": Terminal}

ROW = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "groups_without_signal": 0.75,
    "rollout/response_length": 12.0,
    "rollout/truncation_rate": 0.5,
    "actor/entropy": 1.5,
    "actor/mean_logprob_gap": 0.002,
    "tokens_per_s": 1234.0,
}


def write_samples(path: Path, **columns: object) -> Path:
    """Write a file of samples with one row."""
    table = pa.table({name: pa.array([value]) for name, value in columns.items()})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def run(
    display: Display,
    folder: Path,
    steps: int,
    then: Callable[[Progress, int], object] = lambda progress, step: None,
) -> None:
    """Show a run of this many steps, with one evaluation."""
    progress, rows = Progress(steps, folder, display), []
    for step in range(steps + 1):
        evaluated = {"eval/reward/mean": step / 10, "eval/reward/std": 0.5, "eval/reward/scored": 101.0}
        rows.append({"step": float(step), **ROW, **evaluated})
        progress.stepped(rows[-1])
        then(progress, step)
    progress.ended(lambda seconds: ending_of("run", rows, ["eval"], seconds, {"run": folder}))


def stream(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def written(to: io.TextIOWrapper) -> str:
    assert isinstance(to.buffer, io.BytesIO)
    return to.buffer.getvalue().decode(to.encoding)
