"""`weft buffer`: output and exit codes."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from weft.__main__ import main
from weft.dataflow.runs.log import Log, LogReader


def test_a_log_that_cannot_be_replayed_gives_advice_and_no_traceback(
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
        "Continue with the graphs and the version of Weft"
    )


def test_check_counts_every_row_and_prints_ok(runs: Path, capsys: pytest.CaptureFixture[str]):
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
    assert f"{len(lines) - 2} complete lines from there on are not read" in capsys.readouterr().out
    path.write_bytes(b"")
    assert main(["buffer", "check", "tiny"]) == 1
    assert "has no record" in capsys.readouterr().out


@pytest.mark.parametrize(("run", "left"), [("one", 1), ("one", 12), ("two", 1)])
def test_check_refutes_a_log_without_its_end(
    run: str, left: int, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cut = Path(shutil.copytree(done / run, tmp_path / "cut"))
    path = cut / "buffer" / "ledger.log"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:left]))
    assert main(["buffer", "check", str(cut)]) == 1
    said = capsys.readouterr().out
    assert "the metrics know step 3, and the log ends in step 0" in said and "NOT OK" in said
    (cut / "metrics.parquet").unlink()
    assert main(["buffer", "check", str(cut)]) == int(run == "two"), (
        "which has a checkpoint that the log does not reach"
    )
    capsys.readouterr()


def test_user_errors_exit_with_two(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "check", "tinny"]) == 2
    assert "error: there is no run runs/tinny; did you mean 'tiny'?" in capsys.readouterr().err
    (runs / "empty").mkdir()
    assert main(["buffer", "check", "empty"]) == 2
    assert "runs/empty has no buffer/ledger.log" in capsys.readouterr().err
    assert main(["buffer", "why", "tiny", "0", "--graph", "trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err
    assert main(["buffer", "archive", "tinny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err
    assert main(["buffer", "chekc", "tiny"]) == 2
    assert "error: weft buffer has no command 'chekc'; did you mean 'check'?" in capsys.readouterr().err


def test_why_gives_the_outcome_of_a_group(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "why", "tiny", "0"]) == main(["buffer", "why", "tiny", "1"]) == 0
    finished, flying, waits = capsys.readouterr().out.splitlines()
    assert finished.startswith(
        "group 0 of graph 'train' (row 0 of the source, step 0) was finished at byte"
    )
    assert flying.endswith("is in flight") and waits == "measure: 1 of 1 rows to do; 1 leased"


def test_table_lists_rows_of_a_state(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "table", "tiny", "--state", "waiting"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    said = dict(zip(header.split(), row.split(), strict=False))
    assert (said["sample_id"], said["level"], said["state"]) == ("2", "prompts", "waiting")
    assert main(["buffer", "table", "tiny", "--limit", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "... 2 more"


def test_sql_prints_the_answer(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        main(
            [
                "buffer",
                "sql",
                "tiny",
                "select state, count(*) as n from rows group by state order by state",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "state    n",
        "done     1",
        "leased   1",
        "waiting  1",
    ]


def test_archive_writes_one_file(runs: Path, capsys: pytest.CaptureFixture[str]):
    (runs / "tiny" / "samples").mkdir()
    table = pa.table({"sample_id": [1]})
    with pa.ipc.new_file(runs / "tiny" / "samples" / "train_000001.1.0.arrow", table.schema) as writer:
        writer.write_table(table)
    assert main(["buffer", "archive", "tiny"]) == 0
    assert (
        capsys.readouterr().out == "runs/tiny/samples.parquet\n"
        and (runs / "tiny" / "samples.parquet").is_file()
    )


def test_with_json_each_prints_one_object(runs: Path, capsys: pytest.CaptureFixture[str]):
    def found(*words: str) -> dict:
        main(["buffer", *words, "--json"])
        [line] = capsys.readouterr().out.splitlines()
        return json.loads(line)

    train = {"issued": 3, "waiting": 1, "leased": 1, "done": 1, "dropped": {}}
    checked = found("check", "tiny")
    assert (checked["sound"], checked["rows"], checked["graphs"]) == (True, 3, {"train": train})
    assert found("why", "tiny", "1")["why"][1] == "measure: 1 of 1 rows to do; 1 leased"
    table = found("table", "tiny", "--limit", "1")
    assert (table["number"], [row["state"] for row in table["rows"]]) == (3, ["done"])
    assert found("sql", "tiny", "select count(*) as n from rows") == {"rows": [{"n": 3}], "number": 1}
    said = found("check", "tinny")
    assert said["exit_code"] == 2 and "did you mean 'tiny'" in said["error"]
