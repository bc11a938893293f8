"""The real trackers and their record of a run that is killed after step 4 and resumes after step 2.

The TensorBoard test always runs. The others are heavy: they are `slow`, and skipped where their
packages are missing.
"""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from test_follower import rows, scripted
from test_new_values import add, stream

from weft.controllers.reports.tracker_threads import _Follower, _SentMetrics, path_of

CONFIG = {
    "seed": 7,
    "settings": {"hub_token": "hf_s3cr3t", "model": "m"},
    "graphs": {"train": ["a", "b"]},
}
FIRST = [(step, float(step)) for step in range(5)]
OVERWRITTEN = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5)]
NOT_AGAIN = [*FIRST, (5, 5.5)]
LATE = (3, 0.25)


def needs(package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        missing, reason=f"{package} is not installed: pip install 'weft[{package}]'"
    )


def tracked(tmp_path: Path, name: str) -> Path:
    """Track a run killed after step 4 and resumed after step 2. An evaluation of step 3 comes after
    step 5."""
    run = tmp_path / "sums"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(CONFIG))
    first = stream(run)
    _Follower(run, name, None).follow(
        scripted(lambda: add(first, *rows(0, 1, 2)), lambda: add(first, *rows(3, 4)), last="")
    )
    first.close()
    first.path.unlink()
    second = stream(run)
    late = {"step": float(LATE[0]), "eval/pass@1": LATE[1]}
    _Follower(run, name, 2).follow(
        scripted(
            lambda: add(second, *rows(0, 1, 2), *rows(3, 4, 5, value=0.5)), lambda: add(second, late)
        )
    )
    second.close()
    return run


def events(folder: Path) -> list[Any]:
    """Return the events of all files, by creation time."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    found = []
    for file in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def test_tensorboard_forgets_the_steps_that_are_made_again(tmp_path: Path):
    run = tracked(tmp_path, "tensorboard")
    shown: defaultdict[str, dict[int, float]] = defaultdict(dict)
    starts = []
    for event in events(run / "tensorboard"):
        if event.HasField("session_log") and event.session_log.status == 1:  # TensorBoard does the same
            starts.append(event.step)
            for curve in shown.values():
                for step in [step for step in curve if step >= event.step]:
                    del curve[step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                assert event.step not in shown[value.tag], "no step is there twice"
                shown[value.tag][event.step] = value.simple_value
    assert starts == [3]
    assert sorted(shown["loss"].items()) == OVERWRITTEN and shown["eval/pass_at_1"] == dict([LATE])
    written = b"".join(file.read_bytes() for file in (run / "tensorboard").iterdir())
    assert b"hf_s3cr3t" not in written and b"graphs" in written


@pytest.mark.slow
@needs("tensorboard")
def test_tensorboard_reads_continuous_curves(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    read = EventAccumulator(str(tracked(tmp_path, "tensorboard") / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == OVERWRITTEN


def leveldb_records(data: bytes) -> list[bytes]:
    """Return the records of a W&B log: a header, then blocks of 32 KiB of (checksum, length, kind)
    pieces."""
    found, at, parts = [], 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a complete record, or its last piece
            found.append(parts)
            parts = b""
    return found


@pytest.mark.slow
@needs("wandb")
def test_wandb_continues_offline_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(tmp_path, "wandb")
    files = sorted(run.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [
        Record.FromString(record) for file in files for record in leveldb_records(file.read_bytes())
    ]
    history = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["loss"]) for row in history if "loss" in row] == NOT_AGAIN
    assert [(row["step"], row["eval/pass@1"]) for row in history if "eval/pass@1" in row] == [LATE]
    assert [row["_step"] for row in history] == list(range(7)), "W&B's own step goes on, too"
    assert {record.run.run_id for record in records if record.HasField("run")} == {
        _SentMetrics.of_file(path_of(run, "wandb")).id
    }
    assert not [
        file
        for file in run.rglob("*")
        if file.is_file() and b"hf_s3cr3t" in file.read_bytes() and file.name != "config.json"
    ]


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tracked(tmp_path, "mlflow")
    client, id = MlflowClient(), _SentMetrics.of_file(path_of(run, "mlflow")).id
    assert [(metric.step, metric.value) for metric in client.get_metric_history(id, "loss")] == NOT_AGAIN
    assert [
        (metric.step, metric.value) for metric in client.get_metric_history(id, "eval/pass_at_1")
    ] == [LATE]
    kept = client.get_run(id)
    assert kept.info.status == "FINISHED" and kept.info.run_name == "sums"
    assert kept.data.params["seed"] == "7" and kept.data.params["settings.hub_token"] == "[hidden]"


@pytest.mark.slow
@needs("trackio")
def test_trackio_continues_under_its_name(tmp_path: Path):
    program = "from test_kinds import tracked, Path; import sys; tracked(Path(sys.argv[1]), 'trackio')"
    read = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as store; "
        "print(json.dumps([(m['step'], m.get('loss'), m.get('eval/pass@1')) for m in store.get_logs('weft', 'sums')]))"
    )
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, timeout=300
    )
    done = subprocess.run(
        [sys.executable, "-c", read], env=environment, check=True, timeout=300, stdout=subprocess.PIPE
    )
    history = json.loads(done.stdout.splitlines()[-1])
    assert [(step, loss) for step, loss, _ in history if loss is not None] == NOT_AGAIN
    assert [(step, score) for step, _, score in history if score is not None] == [LATE]
