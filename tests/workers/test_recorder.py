"""The worker that records samples."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from weft.dataflow.batch import Batch
from weft.workers.function import RecorderConfig, RecorderWorker


def record(
    folder: Path, rows: Batch, steps: dict[int, int], *, lease: int = 7, tokenizer: Path | None = None
) -> None:
    worker = RecorderWorker(RecorderConfig(tokenizer=str(tokenizer) if tokenizer else None))
    worker.record(rows, folder=folder, graph="train", token=lease, steps=steps)


def written(path: Path) -> list[dict[str, Any]]:
    with pa.OSFile(str(path)) as source:
        return pa.ipc.open_file(source).read_all().to_pylist()


def test_samples_are_written_with_their_text(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )
    rows = Batch.of(group_id=[0, 0], prompt_ids=[[0], [1]], response_ids=[[1, 0], []], reward=[1.0, 0.0])
    record(tmp_path / "samples", rows, {0: 3}, tokenizer=tmp_path)
    (file,) = (tmp_path / "samples").glob("*.arrow")
    first, second = written(file)
    assert file.name == "train_000003.7.0.arrow"
    assert (
        first
        | {"prompt_ids": [0], "response_ids": [1, 0], "reward": 1.0, "prompt": "a", "response": "b a"}
        == first
    )
    assert second["response"] == ""


def test_without_a_tokenizer_there_are_only_tokens(tmp_path: Path):
    for k, tokenizer in enumerate((None, tmp_path / "nowhere")):
        record(tmp_path, Batch.of(group_id=[0], response_ids=[[1]]), {0: k}, tokenizer=tokenizer)
        assert written(tmp_path / f"train_00000{k}.7.0.arrow") == [{"group_id": 0, "response_ids": [1]}]


def test_each_recorded_row_is_filed_under_its_step(tmp_path: Path):
    rows = Batch.of(group_id=[4, 4, 5, 6, 6], reward=[0.0, 1.0, 2.0, 3.0, 4.0])
    record(tmp_path, rows, {6: 2, 4: 3})
    assert {
        path.name: [row["reward"] for row in written(path)] for path in tmp_path.glob("*.arrow")
    } == {
        "train_000002.7.0.arrow": [3.0, 4.0],
        "train_000003.7.0.arrow": [0.0, 1.0],
    }
