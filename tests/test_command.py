"""The command line `weft`: what it prints, and with which exit code it ends."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from weft.__main__ import main
from weft.controllers.run_directory import RunDirectory
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.log import Log, LogReader
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.operation import node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph

ROOT = Path(__file__).resolve().parent.parent


@node(reads=("prompt",), writes=("length",))
def measure(batch):
    return batch


@graph
def train(prompts):
    measure(prompts)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs/tiny, of whose three rows one is done, one leased and one waiting."""
    recorded = train(TableSource("prompts", pa.table({"prompt": ["a", "b", "c"]})))
    buffer = SampleBuffer.create(tmp_path / "runs" / "tiny" / "buffer", {"train": recorded})
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1, 2], [1, 1, 1], step=0)
    for _ in range(2):
        lease = ledger.claim(ledger.graph["measure"], max_rows=1, holder="rank 0")
        assert lease is not None
        if lease.ids[0] == 0:
            ledger.publish(lease, Published(lease.ids, np.zeros(1, np.int64)), None)
            ledger.finish(lease)
    buffer.commit()
    buffer.log.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_log_that_cannot_be_replayed_ends_with_what_to_do_and_no_traceback(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    path = runs / "tiny" / "buffer" / "ledger.log"
    records = list(LogReader(path))
    log = Log(path)
    for record in [*records, {"do": "finish", "graph": "train", "lease": 999}]:
        log.append(record)
    log.close()
    assert main(["buffer", "why", "tiny", "1"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("RecoveryError: ") and said[-1].startswith(
        "Go on with the graphs and the version of Weft"
    )


def test_check_counts_every_row_and_says_ok(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "check", "tiny"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "graph  issued  waiting  leased  done  dropped  why",
        "train       3        1       1     1        0",
        "",
        "graph  node     rows consumed",
        "train  measure              1",
        "",
        "leases: 2 granted, 1 finished, 0 released, 1 open; 0 restarts, 0 segments, 0 checkpoints",
        "OK: 6 records account for 3 rows",
    ]
    assert main(["buffer", "check", str(runs / "tiny")]) == 0


def test_check_ends_with_one_when_the_log_is_refuted(runs: Path, capsys: pytest.CaptureFixture[str]):
    path = runs / "tiny" / "buffer" / "ledger.log"
    records = list(LogReader(path))
    log = Log(path)
    for record in [*records, records[-1] | {"lease": 3}]:
        log.append(record)
    log.close()
    assert main(["buffer", "check", "tiny"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"VIOLATION byte \d+: claim: lease 3 of node 'measure' takes row 1, of group 1, "
        r"which it holds already \(lease 2\)",
        said[-3],
    )
    assert said[-2].startswith("broken rule: a node consumes a row at most once")
    assert said[-1].startswith("NOT OK: 1 violation")


def test_check_notes_a_torn_tail(runs: Path, capsys: pytest.CaptureFixture[str]):
    path = runs / "tiny" / "buffer" / "ledger.log"
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["buffer", "check", "tiny"]) == 0
    assert "note: " in (said := capsys.readouterr().out) and "the last record is torn" in said


def test_check_refutes_a_log_that_was_changed_or_emptied(runs: Path, capsys: pytest.CaptureFixture[str]):
    path = runs / "tiny" / "buffer" / "ledger.log"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"train", b"trXin"), *lines[3:]]))
    assert main(["buffer", "check", "tiny"]) == 1
    assert f"{len(lines) - 2} complete lines from there on prove nothing" in capsys.readouterr().out
    path.write_bytes(b"")
    assert main(["buffer", "check", "tiny"]) == 1
    assert "has no record" in capsys.readouterr().out


def test_what_the_user_can_mend_ends_with_two(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "check", "tinny"]) == 2
    assert "error: there is no run runs/tinny; did you mean 'tiny'?" in capsys.readouterr().err
    (runs / "empty").mkdir()
    assert main(["buffer", "check", "empty"]) == 2
    assert "runs/empty has no buffer/ledger.log" in capsys.readouterr().err
    assert main(["buffer", "why", "tiny", "0", "--graph", "trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err
    assert main(["buffer", "archive", "tinny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["buffer", "chekc", "tiny"])
    assert end.value.code == 2


def test_why_says_what_became_of_a_group(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "why", "tiny", "0"]) == main(["buffer", "why", "tiny", "1"]) == 0
    finished, flying, waits = capsys.readouterr().out.splitlines()
    assert finished.startswith("group 0 of graph 'train' (row 0 of the source, step 0) was finished at byte")
    assert flying.endswith("is in flight") and waits == "measure: 1 of 1 rows to do; 1 leased"


def test_table_lists_rows_of_a_state(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "table", "tiny", "--state", "waiting"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    said = dict(zip(header.split(), row.split(), strict=False))
    assert (said["sample_id"], said["level"], said["state"]) == ("2", "prompts", "waiting")
    assert main(["buffer", "table", "tiny", "--limit", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "... 2 more"


def test_sql_prints_the_answer(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "sql", "tiny", "select state, count(*) as n from rows group by state order by state"]) == 0
    assert capsys.readouterr().out.splitlines() == ["state    n", "done     1", "leased   1", "waiting  1"]


def test_archive_writes_one_file(runs: Path, capsys: pytest.CaptureFixture[str]):
    (runs / "tiny" / "samples").mkdir()
    table = pa.table({"sample_id": [1]})
    with pa.ipc.new_file(runs / "tiny" / "samples" / "train_000001.1.0.arrow", table.schema) as writer:
        writer.write_table(table)
    assert main(["buffer", "archive", "tiny"]) == 0
    assert capsys.readouterr().out == "runs/tiny/samples.parquet\n" and (runs / "tiny" / "samples.parquet").is_file()


def test_help_is_quick_and_loads_nothing_heavy():
    code = "import sys; from weft.__main__ import main\ntry: main(['buffer', 'check', '--help'])\nfinally: print(sorted(sys.modules))"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    took = time.monotonic() - started
    assert done.returncode == 0 and "the directory of a run, or its name under runs/" in done.stdout
    loaded = set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))
    assert not loaded & {"torch", "ray", "vllm", "transformers", "duckdb", "pyarrow", "tyro"}
    assert took < 5, "on a busy machine; 0.05 s on an idle one"


def test_the_module_and_the_script_are_the_same_command(runs: Path):
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "weft", "buffer", "check", "tinny"]
    done = subprocess.run(command, cwd=runs.parent, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean 'tiny'" in done.stderr
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"weft": f"{main.__module__}:{main.__qualname__}"}


@pytest.fixture
def timeline_run(runs: Path) -> Path:
    """runs/tiny with a timeline: two steps of one second each, of which the actor works a quarter."""
    directory = RunDirectory(runs / "tiny")
    for step in (0, 1):
        for name, what, start_s, end_s in (("rollout", "generate", 0.0, 0.75), ("actor", "update", 0.75, 1.0)):
            call = {"step": step, "group": name, "node": what, "start_s": step + start_s, "end_s": step + end_s}
            directory.add_call(**call, worker_s=end_s - start_s, rows=8)
    directory.flush()
    return runs / "tiny"


def test_timeline_says_how_busy_each_group_was_and_draws_it(timeline_run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["timeline", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps 0 to 1: 4 calls in 2.00 s",
        "",
        "group    calls  busy %  idle %  longest gap  between",
        "rollout      2    75.0    25.0       0.25 s  generate and generate, at 0.75 s",
        "actor        2    25.0    75.0       0.75 s  start and update, at 0 s",
        "",
        "group    node      calls  rows  seconds   in worker  mean call  share %",
        "rollout  generate      2    16      1.50       1.50     0.75 s     75.0",
        "actor    update        2    16      0.50       0.50     0.25 s     25.0",
        "",
        "picture: runs/tiny/timeline.png",
    ]
    assert (timeline_run / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_of_some_steps_goes_where_it_is_told(timeline_run: Path, capsys: pytest.CaptureFixture[str]):
    out = timeline_run.parent.parent / "some.svg"
    assert main(["timeline", "tiny", "--steps", "1:", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 1: 2 calls in 1.00 s" and said[-1] == f"picture: {out}"
    assert "<svg" in out.read_text() and not (timeline_run / "timeline.png").exists()


def test_timeline_ends_with_two_when_the_user_can_mend_it(timeline_run: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, says in (
        (["tinny"], "there is no run runs/tinny; did you mean 'tiny'?"),
        (["tiny", "--steps", "7:9"], "no step in 7:9; it has steps 0 to 1"),
        (["tiny", "--steps", "7-9"], "not '7-9'"),
        (["tiny", "--out", "picture.doc"], "cannot be written to picture.doc"),
    ):
        assert main(["timeline", *arguments]) == 2
        assert says in capsys.readouterr().err
    (timeline_run / "timeline.arrows").unlink()
    assert main(["timeline", "tiny"]) == 2
    assert "runs/tiny has no timeline" in capsys.readouterr().err
