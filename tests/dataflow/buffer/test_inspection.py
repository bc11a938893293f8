"""What a person asks the sample buffer: of a run that goes on, of one that is over, and of one with damage."""

import builtins
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.history import HISTORY, buffer_folder, history, why
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.rows import Lease, Published, Staleness
from weft.dataflow.buffer.sample_buffer import SEGMENTS, SampleBuffer
from weft.dataflow.buffer.samples import archive
from weft.dataflow.buffer.segments import SegmentWriter
from weft.dataflow.buffer.sql import columns, query, samples
from weft.dataflow.buffer.text_table import as_text
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph
from weft.dataflow.operation import Shape, node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph

PROMPTS = TableSource("prompts", pa.table({"prompt": ["one", "two"]}))


@node(shape=Shape.EXPAND, reads=("prompt",), writes=("response",))
def generate(batch: Batch) -> Batch:
    return batch


@node(reads=("response",), writes=("reward",))
def score(batch: Batch) -> Batch:
    return batch


@node(shape=Shape.FILTER, reads=("reward",))
def keep(batch: Batch) -> Batch:
    return batch


@node(shape=Shape.GROUP, reads=("reward",), writes=("centred",))
def advantages(batch: Batch) -> Batch:
    return batch


@graph
def train(prompts, learn=advantages):
    learn(keep(score(generate(prompts))))


class Run:
    """A run whose buffer goes as far as it is asked to: two prompts, two samples each."""

    def __init__(self, path: Path, recorded: Graph) -> None:
        self.path = path
        self.buffer = SampleBuffer.create(path / "buffer", {"train": recorded}, node="here", clock=lambda: 0.0)
        self.writer = SegmentWriter(self.buffer.segments, "here", "w")
        self.ledger: Ledger = self.buffer.ledgers["train"]
        self.ledger.set_source(self.writer.append(Batch.of(prompt=["one", "two"])))
        self.ledger.issue([0, 1], [1, 1], round=3)
        self.commit()

    def commit(self) -> None:
        self.buffer.commit()

    def claim(self, name: str, max_rows: int | None = None) -> Lease:
        lease = self.ledger.claim(self.ledger.graph[name], max_rows=max_rows)
        assert lease is not None
        return lease

    def generate(self) -> None:
        lease = self.claim("generate")
        ids = np.add.outer(lease.first_children, np.arange(2)).ravel()
        texts = Batch.of(sample_id=ids, response=[f"answer {k}" for k in range(len(ids))])
        made = Published(ids, np.full(len(ids), 4), np.full(len(ids), 7), np.repeat(lease.ids, 2))
        self.buffer.publish(self.ledger, lease, made, self.writer.append(texts))
        self.ledger.finish(lease)
        self.commit()

    def map(self, name: str, column: str) -> None:
        lease = self.claim(name)
        values = Batch.of(sample_id=lease.ids, **{column: np.arange(len(lease.ids), dtype=np.float32)})
        none = np.zeros(len(lease.ids), np.int64)
        self.buffer.publish(self.ledger, lease, Published(lease.ids, none), self.writer.append(values))
        self.ledger.finish(lease)
        self.commit()

    def keep(self, number: int) -> None:
        lease = self.claim("keep")
        self.buffer.publish(self.ledger, lease, Published(lease.ids[:number], np.zeros(number, np.int64)), None)
        self.ledger.finish(lease)
        self.commit()

    def close(self) -> None:
        self.writer.close()
        self.buffer.close()


@pytest.fixture
def run(tmp_path: Path):
    made = Run(tmp_path / "runs" / "one", train(PROMPTS))
    yield made
    made.close()


def test_history_says_of_every_row_where_it_stands_while_the_run_goes_on(run: Run):
    run.generate()
    run.claim("score", max_rows=1)
    run.commit()
    table = history(run.path / "buffer")
    assert table.schema == HISTORY
    prompt, _, sample, other, *_ = table.to_pylist()
    assert prompt == {
        "graph": "train",
        "sample_id": 0,
        "group_id": 0,
        "parent_id": 0,
        "level": "prompts",
        "round": 3,
        "position": 0,
        "tokens": 1,
        "version": None,
        "state": "waiting",
        "reason": None,
        "done": ["generate"],
        "leased": [],
        "columns": [],
    }
    first = sample["sample_id"]
    assert (sample["parent_id"], sample["level"], sample["tokens"], sample["version"]) == (0, "generate", 5, 7)
    assert (sample["state"], sample["leased"], other["state"]) == ("leased", ["score"], "waiting")
    [part] = sample["columns"]
    assert (part["writer"], part["node"], part["file"]) == ("generate", "here", run.ledger.live_segments()[0].file)
    assert first == 2 and part["checksum"] == run.ledger.live_segments()[0].checksum


def test_history_keeps_finished_and_dropped_rows(run: Run):
    run.generate()
    run.map("score", "reward")
    run.keep(3)
    run.map("advantages", "centred")
    run.close()
    table = history(run.path / "buffer")
    states = table.group_by("state").aggregate([([], "count_all")]).to_pydict()
    assert dict(zip(states["state"], states["count_all"], strict=True)) == {"done": 5, "dropped": 1}
    last = table.to_pylist()[-1]
    assert (last["reason"], last["done"], last["columns"]) == ("keep", ["score", "keep"], [])
    assert run.ledger.counts() == {"issued": 6, "waiting": 0, "leased": 0, "done": 5, "dropped": 1}


def test_why_says_what_a_group_waits_for(run: Run):
    run.generate()
    run.claim("score", max_rows=1)
    run.commit()
    assert why(run.path / "buffer", 0).splitlines() == [
        "group 0 of graph 'train' (row 0 of the source, round 3, 3 rows) is in flight",
        "score: 2 of 2 rows to do; 1 leased",
        "keep: 2 of 2 rows to do; waits for score",
        "advantages: 2 of 2 rows to do; waits for keep, score",
    ]


def test_why_says_when_a_group_was_finished_and_which_was_never_issued(run: Run):
    run.generate()
    run.map("score", "reward")
    run.buffer.note("step", 12)
    run.keep(3)
    run.map("advantages", "centred")
    offset = run.buffer.log.position.offset
    said = why(run.path / "buffer", 1)
    start = "group 1 of graph 'train' (row 1 of the source, round 3) was finished at byte "
    end = " of the log, after step 12: of 3 rows 2 done, 1 dropped: keep"
    assert said.startswith(start) and said.endswith(end), said
    assert 0 < int(said[len(start) : -len(end)]) < offset
    assert why(run.path / "buffer", 2) == "group 2 was never issued; groups 0 to 1 were"
    with pytest.raises(UserError, match="the run has no graph 'trian'; did you mean 'train'"):
        why(run.path / "buffer", 1, "trian")


def test_why_names_a_group_that_is_too_old_and_waits(tmp_path: Path):
    run = Run(tmp_path / "run", train(PROMPTS))
    run.generate()
    run.map("score", "reward")
    run.keep(4)
    found = run.ledger.claim(run.ledger.graph["advantages"], staleness=Staleness(9, 1, "wait"))
    run.commit()
    assert found is None
    said = why(tmp_path / "run" / "buffer", 0).splitlines()
    assert said[1].startswith("advantages: ") and "too old, of version 7; waits for a larger bound" in said[1]
    run.close()


# SQL


def test_sql_answers_over_rows_and_what_was_written_of_them(run: Run):
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
        run.path, "select prompt from columns join rows using (sample_id) where level = 'prompts' order by 1"
    )
    assert prompts["prompt"].to_pylist() == ["one", "two"]


def test_columns_that_cannot_be_read_are_left_out_with_a_note(run: Run):
    run.generate()
    notes: list[str] = []
    for file in run.buffer.segments.glob("w.*.arrows"):
        file.write_bytes(file.read_bytes()[:100])
    table = columns(run.path / "buffer", notes)
    assert table.column_names == ["graph", "sample_id"] and len(table) == 6
    assert len(notes) == 2 and all(note.startswith("left out: segment of node 'here' in") for note in notes)


def test_segments_need_no_folder_once_the_run_is_over(run: Run):
    run.generate()
    run.map("score", "reward")
    run.keep(4)
    run.map("advantages", "centred")
    run.close()
    assert not (run.path / "buffer" / SEGMENTS).exists()
    assert len(columns(run.path / "buffer")) == 0
    assert query(run.path, "select count(*) as n from rows where state = 'done'")["n"].to_pylist() == [6]


def test_a_question_that_cannot_be_answered_says_which_tables_there_are(run: Run):
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
    with pytest.raises(UserError, match=r"the question was given up after 0\.05 s; ask for less"):
        query(run.path, "select count(*) from range(100000000000)", timeout_s=0.05)


def test_sql_without_duckdb_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch):
    import_module = builtins.__import__

    def without_duckdb(name: str, *rest: object, **more: object):
        if name == "duckdb":
            raise ImportError(name)
        return import_module(name, *rest, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(builtins, "__import__", without_duckdb)
    with pytest.raises(UserError, match=r"pip install 'weft\[inspect\]'"):
        query(run.path, "select 1")


def test_a_table_that_cannot_be_read_is_left_out_with_a_note(run: Run):
    (run.path / "metrics.parquet").write_bytes(b"PAR1 and no more")
    notes: list[str] = []
    with pytest.raises(UserError, match="this run has no metrics yet"):
        query(run.path, "select * from metrics", notes)
    assert len(notes) == 1 and notes[0].startswith(f"left out: {run.path / 'metrics.parquet'}: ")


# Samples


def write_samples(run: Path) -> None:
    (run / "samples").mkdir(parents=True)
    for name, table in {
        "train_000001": pa.table({"sample_id": [1, 2], "reward": pa.array([0.5, 1.0], pa.float32())}),
        "eval_000002": pa.table({"sample_id": [3], "response": ["yes"]}),
    }.items():
        with pa.ipc.new_file(run / "samples" / f"{name}.1.0.arrow", table.schema) as writer:
            writer.write_table(table)


def test_samples_of_all_files_are_one_table_with_their_graph_and_step(run: Run):
    write_samples(run.path)
    (run.path / "samples" / "train_000009.2.0.arrow").write_bytes(b"half")
    notes: list[str] = []
    table = samples(run.path, notes)
    assert table is not None and len(notes) == 1 and "train_000009.2.0.arrow" in notes[0]
    assert table.sort_by("sample_id").to_pydict() == {
        "step": [1, 1, 2],
        "graph": ["train", "train", "eval"],
        "sample_id": [1, 2, 3],
        "response": [None, None, "yes"],
        "reward": [0.5, 1.0, None],
    }
    best = query(run.path, "select graph, max(reward) as best from samples group by graph order by graph")
    assert best.to_pydict() == {"graph": ["eval", "train"], "best": [None, 1.0]}


def test_the_archive_holds_all_samples_in_one_file_and_answers_when_they_are_gone(run: Run):
    with pytest.raises(UserError, match="has no samples"):
        archive(run.path)
    write_samples(run.path)
    path = archive(run.path)
    stored = pq.ParquetFile(path)
    assert path.name == "samples.parquet" and stored.metadata.row_group(0).column(0).compression == "ZSTD"
    before = samples(run.path)
    for file in (run.path / "samples").iterdir():
        file.unlink()
    after = samples(run.path)
    assert before is not None and after is not None and after.sort_by("sample_id").equals(before.sort_by("sample_id"))


def test_an_archive_that_would_lack_samples_is_not_made(run: Run):
    write_samples(run.path)
    (run.path / "samples" / "train_000009.2.0.arrow").write_bytes(b"half")
    with pytest.raises(UserError, match=r"the archive would be incomplete: left out: .*train_000009"):
        archive(run.path)
    assert not (run.path / "samples.parquet").exists()


# Names and text


def test_a_run_that_is_not_there_is_answered_with_the_nearest_one(run: Run):
    assert buffer_folder(run.path) == buffer_folder(run.path / "buffer") == run.path / "buffer"
    with pytest.raises(UserError, match=r"there is no run .*; did you mean 'one'"):
        buffer_folder(run.path.parent / "onee")
    with pytest.raises(UserError, match=r"has no buffer/ledger\.log"):
        buffer_folder(run.path.parent)


def test_long_values_and_long_tables_are_cut():
    text = as_text(pa.table({"text": ["a" * 50, "line\nbreak", "c"], "x": [0.1234567, None, 3.0]}), limit=2)
    assert text.splitlines() == [
        "text                                     x",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa...  0.123457",
        "line\\nbreak                              -",
        "... 1 more",
    ]
