"""SQL over the tables of runs: finished, running and damaged."""

import errno
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_run import Run

from weft.dataflow.buffer.queries import columns, query
from weft.dataflow.errors import UserError
from weft.dataflow.runs.files import SEGMENTS


def test_sql_queries_rows_and_their_columns(run: Run):
    run.generate()
    run.map("score", "reward")
    count = query(run.path, "select level, count(*) as n from rows group by level order by level")
    assert count.to_pydict() == {"level": ["generate", "prompts"], "n": [4, 2]}
    written = query(
        run.path,
        "select parent_id, response, reward from columns join rows using (sample_id) where level = 'generate' order by 2",
    )
    assert written.to_pydict() == {
        "parent_id": [0, 0, 1, 1],
        "response": [f"answer {k}" for k in range(4)],
        "reward": [0.0, 1.0, 2.0, 3.0],
    }
    prompts = query(
        run.path,
        "select prompt from columns join rows using (sample_id) where level = 'prompts' order by 1",
    )
    assert prompts["prompt"].to_pylist() == ["one", "two"]


def test_columns_that_cannot_be_read_are_left_out_with_a_note(run: Run):
    run.generate()
    notes: list[str] = []
    for file in run.buffer.segments.glob("w.*.arrows"):
        file.write_bytes(file.read_bytes()[:100])
    table = columns(run.path / "buffer", notes)
    assert table.column_names == ["graph", "sample_id"] and len(table) == 6
    assert len(notes) == 2 and all(
        note.startswith("left out: segment of node 'here' in") for note in notes
    )


def test_segments_need_no_folder_once_the_run_is_over(run: Run):
    run.generate()
    run.map("score", "reward")
    run.keep(4)
    run.map("advantages", "centred")
    run.close()
    assert not (run.path / "buffer" / SEGMENTS).exists()
    assert len(columns(run.path / "buffer")) == 0
    assert query(run.path, "select count(*) as n from rows where state = 'done'")["n"].to_pylist() == [6]


def test_a_failing_query_lists_the_tables(run: Run):
    with pytest.raises(UserError, match="a run's tables are rows, columns, samples, metrics, timeline"):
        query(run.path, "select * from row")
    with pytest.raises(UserError, match="this run has no metrics yet"):
        query(run.path, "select * from metrics")


ELSEWHERE = [
    "select * from read_text('/etc/hostname')",
    "select * from glob('/etc/*')",
    "select * from '{file}'",
    "copy rows to '{file}.csv'",
    "attach '{file}.db'",
    "export database '{file}'",
    "load httpfs",
    "set enable_external_access = true",
    "set lock_configuration = false; select 1",
    "select * from tables",
]


@pytest.mark.parametrize("sql", ELSEWHERE)
def test_a_question_reaches_nothing_but_the_tables_of_the_run(run: Run, tmp_path: Path, sql: str):
    file = tmp_path / "seen.parquet"
    pq.write_table(pa.table({"secret": [1]}), file)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"disabled|configuration|does not exist"):
        query(run.path, sql.format(file=file))
    assert sorted(tmp_path.iterdir()) == before


def test_a_long_answer_is_cut_with_a_note(run: Run):
    notes: list[str] = []
    answer = query(run.path, "select * from range(100) order by 1 desc", notes, max_rows=3)
    assert answer.column(0).to_pylist() == [99, 98, 97]
    assert notes == ["the answer has more than 3 rows; the others are left out"]
    query(run.path, "select * from range(3)", notes, max_rows=3)
    assert len(notes) == 1


def test_a_question_that_takes_too_long_is_given_up(run: Run):
    with pytest.raises(UserError, match=r"the query was stopped after 0\.05 s; ask for less"):
        query(run.path, "select count(*) from range(100000000000)", timeout_s=0.05)  # waited out


UNSTOPPABLE = [
    "select levenshtein(repeat('a', 300000), repeat('b', 300000))",  # a single call of a function
    " union all ".join(["select 1"] * 20000),  # a load on parser and binder
]


@pytest.mark.parametrize("sql", UNSTOPPABLE, ids=["function", "binder"])
def test_a_question_that_duckdb_cannot_interrupt_ends_in_time(run: Run, sql: str):
    began = time.monotonic()
    with pytest.raises(UserError, match=r"was stopped after 0\.2 s|ended its process"):
        query(run.path, sql, timeout_s=0.2)  # waited out
    assert time.monotonic() - began < 60


def test_a_question_takes_no_more_memory_than_it_may(run: Run):
    with pytest.raises(UserError, match="Out of Memory"):
        query(run.path, "select len(range(500000000))", memory_bytes=10**8)


def test_a_third_question_at_once_is_refused(run: Run):
    asked, go_on = threading.Barrier(3), threading.Event()

    def slow() -> None:
        asked.wait(60)
        go_on.wait(60)

    def ask() -> None:
        query(run.path, "select 1 -- metrics", known={"metrics": slow})  # pyright: ignore[reportArgumentType]

    others = [threading.Thread(target=ask) for _ in range(2)]
    for other in others:
        other.start()
    try:
        asked.wait(60)
        with pytest.raises(UserError, match="2 queries are under way already"):
            query(run.path, "select 1")
    finally:
        go_on.set()
        for other in others:
            other.join()


@pytest.mark.parametrize("timeout_s", [0.0, 1e300, float("nan")])
def test_a_time_that_no_clock_has_is_refused(run: Run, timeout_s: float):
    with pytest.raises(UserError, match="at most 86400 s"):
        query(run.path, "select 1", timeout_s=timeout_s)


def test_a_date_that_python_lacks_is_text(run: Run):
    answer = query(run.path, "select date '294247-01-10' as last, 'x' as other")
    assert answer.to_pylist() == [{"last": "294247-01-10", "other": "x"}]


def test_an_empty_query_and_a_table_without_columns_are_reported(run: Run):
    with pytest.raises(UserError, match="the query is empty"):
        query(run.path, " ")
    with pytest.raises(UserError, match="this run has no metrics yet"):
        query(run.path, "select count(*) from metrics", known={"metrics": lambda: pa.table({})})


def test_sql_without_duckdb_names_the_package_to_install(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UserError, match=r"pip install 'weft\[inspect\]'"):
        query(run.path, "select 1")


def test_a_table_that_cannot_be_read_is_left_out_with_a_note(run: Run):
    (run.path / "metrics.parquet").write_bytes(b"PAR1 and no more")
    notes: list[str] = []
    with pytest.raises(UserError, match="this run has no metrics yet"):
        query(run.path, "select * from metrics", notes)
    assert len(notes) == 1 and notes[0].startswith(f"left out: {run.path / 'metrics.parquet'}: ")


@pytest.mark.parametrize("part", ["buffer", "buffer/ledger.log"])
def test_a_part_that_may_not_be_read_is_left_out_with_a_note(
    run: Run, part: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, *arguments: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file" if part == "buffer" else "open", refuse)
    notes: list[str] = []
    with pytest.raises(UserError, match="this run has no rows yet"):
        query(run.path, "select * from rows", notes)
    assert any("Permission denied" in note for note in notes)
