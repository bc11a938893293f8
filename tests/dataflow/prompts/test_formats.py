"""Common data sets, and formats of TRL, verl, OpenRLHF and slime, load unmodified."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiny_tokenizers import USER, jsonl, parquet, text_of

from weft.dataflow.prompts.prompts import Prompts


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_verl_prompts_load_unmodified(write: Any, tmp_path: Path, qwen: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 7},
    }
    file = write(tmp_path / f"train.{write.__name__}", [row, row])
    prompts = Prompts.read(file, qwen)
    assert (len(prompts), prompts.name, prompts.format) == (2, "train", "verl prompts")
    assert prompts.columns == (
        "prompt_ids", "prompt", "answer", "data_source", "ability", "reward_model", "extra_info", "prompt_messages",
    )  # fmt: skip
    first = prompts.table.slice(0, 1).to_pylist()[0]
    assert first["prompt"] == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]
    assert first["answer"] == "4"
    assert first["extra_info"] == row["extra_info"] and first["reward_model"] == row["reward_model"]
    assert first["prompt_messages"] == row["prompt"]
    assert prompts.table.schema.field("prompt_ids").type == pa.list_(pa.int32())


def test_a_ground_truth_within_an_object_keeps_its_value(qwen: Path) -> None:
    def answers(*values: Any) -> list[Any]:
        rows = [
            {"prompt": "2 + 2", "reward_model": {"style": "rule", "ground_truth": value}}
            for value in values
        ]
        return Prompts.from_rows(rows, qwen).table["answer"].to_pylist()

    for values in ([4, None], [["4", "four"]], [{"target": [4]}, "4"]):
        assert answers(*values) == values


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "The sky is"}, None),
        ({"prompt": [USER], "solution": "blue"}, "blue"),
        ({"prompt": [USER], "ground_truth": "blue"}, "blue"),
        ({"input": "The sky is", "label": "blue"}, "blue"),
        ({"input": [USER], "label": "blue"}, "blue"),
        ({"context_messages": [USER]}, None),
        ({"messages": [USER]}, None),
        ({"question": "The sky is", "answer": "It is #### blue"}, "blue"),
        ({"problem": "The sky is", "solution": "It is $\\boxed{blue}$.", "level": 1}, "blue"),
        ({"problem": "The sky is", "answer": "blue"}, "blue"),
        ({"question": "The sky is", "solution": "blue"}, "blue"),
        ({"problem": "The sky is"}, None),
        ({"question": "The sky is", "info": '{"color": "blue"}'}, None),
        ({"prompt": [USER], "label": "blue", "metadata": {"n": 1}}, "blue"),
        ({"messages": [USER], "label": "blue"}, "blue"),
    ],
)
def test_prompts_of_other_trainers_load_unmodified(
    row: dict[str, Any], answer: str | None, qwen: Path
) -> None:
    prompts = Prompts.from_rows([row], qwen)
    first = prompts.table.to_pylist()[0]
    text = "The sky is" if "The sky is" in row.values() else "What color is the sky?"
    assert first["prompt"] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]
    assert first.get("answer") == answer
    assert "response_ids" not in first


def test_the_columns_can_be_named_and_reached_inside_structs(base: Path) -> None:
    rows = [{"extra_info": {"question": "2 + 2", "answer": "4", "why": "so"}, "id": 3}]
    prompts = Prompts.from_rows(rows, base, prompt="extra_info.question", answer="extra_info.answer")
    assert prompts.columns == ("prompt_ids", "prompt", "answer", "extra_info", "id")
    assert prompts.table.select(["prompt", "answer"]).to_pylist() == [{"prompt": "2 + 2", "answer": "4"}]
    supervised = Prompts.from_rows(
        rows, base, prompt="extra_info.question", response="extra_info.answer"
    )
    assert text_of(base, supervised.table["response_ids"].to_pylist()[0]) == "4<|im_end|>"


@pytest.mark.parametrize("column", ["text", "prompt"])
def test_tasks_of_mbpp_show_their_tests(column: str, qwen: Path) -> None:
    row = {
        column: "Add.",
        "code": "add = sum",
        "test_list": ["assert add(1) == 1", "assert add(2) == 2"],
    }
    wanted = "Add.\n\nassert add(1) == 1\nassert add(2) == 2"
    others = [
        {**row, "test_list": []},
        {**row, "test_list": ["assert a", None]},
        {**row, column: wanted},
    ]
    prompts = Prompts.from_rows([row, *others], qwen, chat=False)
    shown = prompts.table["prompt"].to_pylist()
    assert shown == [wanted, "Add.", "Add.\n\nassert a", wanted]
    assert prompts.table["test_list"].to_pylist()[0] == row["test_list"]
    objects = {"prompt": "Add.", "code": "", "test_list": [{"input": "1", "output": "1"}]}
    assert Prompts.from_rows([objects], qwen).format == "TRL prompt-only"


def test_every_example_row_of_the_documentation_loads(qwen: Path) -> None:
    document = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\{.*\})`.* \| (.*) \|$", document, re.M)
    assert len(rows) == 29
    for row, gives in rows:
        columns = Prompts.from_rows([json.loads(row.split("`")[0])], qwen).columns
        assert ("answer" in columns) == ("answer" in gives), row
        assert ("response_ids" in columns) == ("response" in gives), row
        assert ("chosen_ids" in columns) == ("chosen" in row), row
