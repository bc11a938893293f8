"""Prompts with responses: the boundary between them, in messages and in plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import BLUE, GREEN, USER, text_of

from weft.dataflow.prompts.prompts import Prompts


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [BLUE]},
        {"prompt": [USER], "completion": [BLUE], "label": True},
        {"messages": [USER, BLUE]},
        {"input": [USER, BLUE]},
        {"input": [USER], "output": [BLUE]},
        {"prompt": [USER], "response": "It is blue."},
    ],
)
def test_chat_responses_end_with_the_token_that_stops_generation(
    row: dict[str, Any], qwen: Path
) -> None:
    first = Prompts.from_rows([row], qwen).table.to_pylist()[0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]
    assert text_of(qwen, first["response_ids"]) == "It is blue.<|im_end|>"
    assert "answer" not in first  # a boolean label is a preference, not a ground truth
    assert first.get("label") == row.get("label")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "completion": " blue."},
        {"prompt": "The sky is", "response": " blue."},
        {"input": "The sky is", "output": " blue."},
    ],
)
def test_plain_responses_get_the_end_token(row: dict[str, Any], qwen: Path, llama: Path) -> None:
    first = Prompts.from_rows([row], qwen).table.to_pylist()[0]
    assert (text_of(qwen, first["prompt_ids"]), text_of(qwen, first["response_ids"])) == (
        "The sky is",
        " blue.<|im_end|>",
    )
    # With this tokenizer, a response tokenised alone would begin with a second space.
    first = Prompts.from_rows([row], llama).table.to_pylist()[0]
    assert text_of(llama, first["prompt_ids"] + first["response_ids"]) == "<s> The sky is blue.</s>"


def test_a_token_that_reaches_from_prompt_to_response_does_not_change_the_text(
    base: Path, llama: Path
) -> None:
    rows = [
        {"prompt": "The sky is ", "completion": "blue."},
        {"prompt": "The sk", "completion": "y is blue."},
    ]
    for row in Prompts.from_rows(rows, llama, chat=False).table.to_pylist():
        assert text_of(llama, row["prompt_ids"] + row["response_ids"]) == "<s> The sky is blue.</s>"
    # With byte-level tokens, the prompt keeps the tokens that generation continues from.
    supervised, prompts = (
        Prompts.from_rows(rows, base),
        Prompts.from_rows([{"prompt": r["prompt"]} for r in rows], base),
    )
    assert supervised.table["prompt_ids"] == prompts.table["prompt_ids"]
    for row in supervised.table.to_pylist():
        assert text_of(base, row["prompt_ids"] + row["response_ids"]) == "The sky is blue.<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
        {"chosen": [USER, BLUE], "rejected": [USER, GREEN]},
        {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN], "margin": 0.5},
    ],
)
def test_conversational_preferences_give_a_prompt_and_two_responses(
    row: dict[str, Any], qwen: Path
) -> None:
    prompts = Prompts.from_rows([row], qwen)
    first = prompts.table.to_pylist()[0]
    assert prompts.columns[:4] == ("prompt_ids", "chosen_ids", "rejected_ids", "prompt")
    assert (
        first["prompt"] == "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(qwen, first["chosen_ids"]) == "It is blue.<|im_end|>"
    assert text_of(qwen, first["rejected_ids"]) == "It is green.<|im_end|>"
    assert first["chosen"] == row["chosen"]  # columns of the file are kept


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"question": "The sky is", "chosen": " blue.", "rejected": " green."},
    ],
)
def test_plain_preferences_give_a_prompt_and_two_responses(row: dict[str, Any], qwen: Path) -> None:
    first = Prompts.from_rows(
        [row], qwen, prompt="question" if "question" in row else None
    ).table.to_pylist()[0]
    assert first["prompt"] == "The sky is"
    assert text_of(qwen, first["chosen_ids"]) == " blue.<|im_end|>"
    assert text_of(qwen, first["rejected_ids"]) == " green.<|im_end|>"


def test_an_implicit_prompt_ends_before_the_first_word_that_differs(qwen: Path) -> None:
    def parts(chosen: str, rejected: str) -> tuple[str, str, str]:
        first = Prompts.from_rows([{"chosen": chosen, "rejected": rejected}], qwen).table.to_pylist()[0]
        return first["prompt"], text_of(qwen, first["chosen_ids"]), text_of(qwen, first["rejected_ids"])

    end = "<|im_end|>"
    assert parts("It is blue", "It is black") == ("It is", " blue" + end, " black" + end)
    assert parts("Human: hi\n\nA: yes", "Human: hi\n\nA: no") == (
        "Human: hi\n\nA:",
        " yes" + end,
        " no" + end,
    )
    assert parts("It is", "It is so") == ("It", " is" + end, " is so" + end)
    assert parts("It is", "It is") == ("It", " is" + end, " is" + end)


def test_a_language_modeling_text_is_one_token_of_context_and_the_rest(qwen: Path) -> None:
    first = Prompts.from_rows([{"text": "The sky is blue."}], qwen).table.to_pylist()[0]
    assert len(first["prompt_ids"]) == 1
    assert text_of(qwen, first["prompt_ids"] + first["response_ids"]) == "The sky is blue.<|im_end|>"
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]


def test_a_named_column_of_whole_conversations_is_parted_into_prompt_and_response(qwen: Path) -> None:
    first = Prompts.from_rows([{"dialogue": [USER, BLUE]}], qwen, prompt="dialogue").table.to_pylist()[0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert text_of(qwen, first["response_ids"]) == "It is blue.<|im_end|>"
