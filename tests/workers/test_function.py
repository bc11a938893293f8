"""The worker that runs pure functions and writes samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from weft.dataflow.batch import Batch
from weft.workers.function import FunctionConfig, FunctionWorker


def doubled(rows: Batch, *, factor: int) -> Batch:
    return rows.with_columns(x=rows.numpy("x") * factor)


def test_a_function_is_called_with_its_arguments():
    result = FunctionWorker(FunctionConfig()).apply(Batch.of(x=[1, 2]), function=doubled, arguments={"factor": 3})
    assert result.numpy("x").tolist() == [3, 6]


def written(path: Path) -> list[dict[str, Any]]:
    with pa.OSFile(str(path)) as source:
        return pa.ipc.open_file(source).read_all().to_pylist()


def test_samples_are_written_with_their_text(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )
    worker = FunctionWorker(FunctionConfig(tokenizer=str(tmp_path)))
    rows = Batch.of(prompt_ids=[[0], [1]], response_ids=[[1, 0], []], reward=[1.0, 0.0])
    worker.record(rows, path=tmp_path / "samples" / "x.arrow")
    first, second = written(tmp_path / "samples" / "x.arrow")
    assert first == {"prompt_ids": [0], "response_ids": [1, 0], "reward": 1.0, "prompt": "a", "response": "b a"}
    assert second["response"] == ""
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["x.arrow"], "no half-written file"


def test_without_a_tokenizer_there_are_only_tokens(tmp_path: Path):
    for folder in (None, str(tmp_path / "nowhere")):
        FunctionWorker(FunctionConfig(tokenizer=folder)).record(
            Batch.of(response_ids=[[1]]), path=tmp_path / f"{folder is None}.arrow"
        )
        assert written(tmp_path / f"{folder is None}.arrow") == [{"response_ids": [1]}]


def test_the_parts_of_a_refilled_step_come_together(tmp_path: Path):
    worker = FunctionWorker(FunctionConfig())
    for k in range(3):
        rows = Batch.of(sample_id=[2 * k, 2 * k + 1], reward=np.full(2, k, np.float32))
        worker.record(rows, path=tmp_path / "x.arrow")
    assert [row["reward"] for row in written(tmp_path / "x.arrow")] == [0, 0, 1, 1, 2, 2]
    again = Batch.of(sample_id=[3, 2], reward=np.full(2, 9, np.float32))  # after the run was taken back
    worker.record(again, path=tmp_path / "x.arrow")
    assert [row["reward"] for row in written(tmp_path / "x.arrow")] == [0, 0, 2, 2, 9, 9]
