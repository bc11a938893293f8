"""The samples of a run as one table, and their archive."""

import pyarrow.parquet as pq
import pytest
from recorded_run import Run, write_samples

from weft.dataflow.buffer.queries import query, recorded_or_archived
from weft.dataflow.errors import UserError
from weft.dataflow.runs.samples import archive


def test_samples_of_all_files_are_one_table_with_their_graph_and_step(run: Run):
    write_samples(run.path)
    (run.path / "samples" / "train_000009.2.0.arrow").write_bytes(b"half")
    notes: list[str] = []
    table = recorded_or_archived(run.path, notes)
    assert table is not None and len(notes) == 1 and "train_000009.2.0.arrow" in notes[0]
    assert table.sort_by("sample_id").to_pydict() == {
        "step": [1, 1, 2],
        "graph": ["train", "train", "eval"],
        "sample_id": [1, 2, 3],
        "response": [None, None, "yes"],
        "reward": [0.5, 1.0, None],
    }
    best = query(
        run.path, "select graph, max(reward) as best from samples group by graph order by graph"
    )
    assert best.to_pydict() == {"graph": ["eval", "train"], "best": [None, 1.0]}


def test_the_archive_holds_all_samples_in_one_file_and_answers_when_they_are_gone(run: Run):
    with pytest.raises(UserError, match="has no samples"):
        archive(run.path)
    write_samples(run.path)
    path = archive(run.path)
    stored = pq.ParquetFile(path)
    assert (
        path.name == "samples.parquet" and stored.metadata.row_group(0).column(0).compression == "ZSTD"
    )
    before = recorded_or_archived(run.path)
    for file in (run.path / "samples").iterdir():
        file.unlink()
    after = recorded_or_archived(run.path)
    assert (
        before is not None
        and after is not None
        and after.sort_by("sample_id").equals(before.sort_by("sample_id"))
    )


def test_an_archive_that_would_lack_samples_is_not_made(run: Run):
    write_samples(run.path)
    (run.path / "samples" / "train_000009.2.0.arrow").write_bytes(b"half")
    with pytest.raises(UserError, match=r"the archive would be incomplete: left out: .*train_000009"):
        archive(run.path)
    assert not (run.path / "samples.parquet").exists()
