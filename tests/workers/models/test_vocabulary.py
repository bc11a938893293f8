"""Before anything starts, a model's vocabulary is compared with everything that uses its token
ids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.models.model_folder import check_vocabulary
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

SETTINGS = {
    "model_type": "qwen2",
    "num_attention_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 64,
}


class Rows(SimpleNamespace):
    """A source of rows with nothing but a table."""

    name = "train.parquet"

    def __init__(self, **columns: list[list[int]]) -> None:
        arrays = {
            name: pa.chunked_array([pa.array(values, pa.list_(pa.int32()))])
            for name, values in columns.items()
        }
        super().__init__(table=pa.table(arrays))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)


def folder_with(folder: Path, settings: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SETTINGS | settings))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def tokenizer(vocabulary: Any, *added: tuple[str, int, bool]) -> dict[str, Any]:
    tokens = [{"content": text, "id": number, "special": special} for text, number, special in added]
    return {"model": {"vocab": vocabulary}, "added_tokens": tokens}


WORDS = {"a": 0, "b": 1, "c": 5}


def test_ids_that_the_model_has_pass(tmp_path: Path):
    folder = folder_with(
        tmp_path,
        {"vocab_size": 6, "eos_token_id": [5, 2], "pad_token_id": -1},
        tokenizer=tokenizer(WORDS, ("<eos>", 4, True)),
        generation_config={"eos_token_id": 5},
        tokenizer_config={"eos_token": {"content": "<eos>"}},
    )
    check_vocabulary(folder, Rows(prompt_ids=[[0, 5], []], labels=[[99], []]))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("files", "rows", "message"),
    [
        (
            {"tokenizer": tokenizer(WORDS)},
            {},
            r"^the tokenizer in {folder} has ids up to 5, and the model in {folder} ",
        ),
        (
            {"tokenizer": tokenizer([["a", 0.0]] * 7)},
            {},
            r"^the tokenizer in {folder} has ids up to 6, ",
        ),
        (
            {"tokenizer": tokenizer({}, ("<tool>", 8, False))},
            {},
            r"^the tokenizer in {folder} has ids up to 8, ",
        ),
        (
            {"tokenizer": tokenizer({}, ("<eos>", 7, True)), "tokenizer_config": {"eos_token": "<eos>"}},
            {},
            r"^in the tokenizer of {folder}, the id of eos_token is 7, ",
        ),
        (
            {"generation_config": {"eos_token_id": [1, 9]}},
            {},
            r": eos_token_id in generation_config.json is 9, ",
        ),
        ({}, {"prompt_ids": [[1], [2, 5]]}, r"^train.parquet: column 'prompt_ids' has token id 5, "),
        ({}, {"rejected_ids": [[6]]}, r"^train.parquet: column 'rejected_ids' has token id 6, "),
    ],
)
def test_ids_beyond_the_vocabulary_are_one_line_with_both_sizes(
    tmp_path: Path, files: dict[str, Any], rows: dict[str, Any], message: str
):
    folder = folder_with(tmp_path, {"vocab_size": 5}, **files)
    with pytest.raises(UserError, match=message.format(folder=folder)) as caught:
        check_vocabulary(folder, Rows(**rows))  # pyright: ignore[reportArgumentType]
    assert f"the model in {folder} has ids 0 to 4 (its vocab_size is 5)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_padding_that_the_model_itself_is_configured_with_is_compared(tmp_path: Path):
    folder = folder_with(tmp_path, {"text_config": {"vocab_size": 5}, "pad_token_id": 5})
    with pytest.raises(
        UserError, match=r"pad_token_id in config.json is 5, and the model in .* has ids 0 to 4"
    ):
        check_vocabulary(folder, Rows())  # pyright: ignore[reportArgumentType]


def test_a_special_token_outside_the_vocabulary_is_allowed_if_no_text_makes_it(tmp_path: Path):
    folder = folder_with(
        tmp_path,
        {"vocab_size": 6},
        tokenizer=tokenizer(WORDS | {"<image>": 6}, ("<image>", 6, True)),
        tokenizer_config={"pad_token": "<image>"},
    )
    check_vocabulary(folder, Rows())  # pyright: ignore[reportArgumentType]


def test_every_worker_with_a_model_compares(tmp_path: Path):
    folder, rows = folder_with(tmp_path, {"vocab_size": 5}), Rows(prompt_ids=[[7]])
    for worker, config in (
        (RolloutWorker, RolloutConfig(model=folder)),
        (ActorWorker, ActorConfig(model=folder)),
        (ReferenceWorker, ReferenceConfig(model=folder)),
    ):
        with pytest.raises(UserError, match="column 'prompt_ids' has token id 7"):
            worker.check(config, [], rows)  # pyright: ignore[reportArgumentType]
