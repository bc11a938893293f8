"""The summary of a data set: a record, and the text that a run prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import BLUE, USER, jsonl, text_of

from weft.dataflow.prompts.formats import ReadArguments, ReadSettings
from weft.dataflow.prompts.prompts import Prompts, _Example, _Lengths


def test_columns_roles_lengths_and_dropped_rows_are_reported(tmp_path: Path, qwen: Path) -> None:
    rows = [
        {"question": "2 + 2?" * (1 + k // 4), "answer": f"so\n#### {k}", "level": k} for k in range(5)
    ]
    file = jsonl(tmp_path / "sums.jsonl", rows)
    prompts = Prompts.read(
        file,
        qwen,
        max_prompt_tokens=53,
        too_long="drop",
        chat_template_kwargs={"enable_thinking": False},
        system="Be brief.",
    )
    understood = prompts.understood
    assert understood is not None
    short = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert understood.examples[:1] == (_Example(short + "<think>\n\n</think>\n\n", None, "0"),)
    assert len(understood.examples) == 3
    tokens = len(prompts.table["prompt_ids"][0])
    assert str(understood).replace(str(tmp_path), "").splitlines()[:8] == [
        "/sums.jsonl: 5 rows, read as GSM8K questions",
        "  reads     question (text) as prompt; answer (text) as answer",
        "  keeps     level (int64); not trained on, for rewards and nodes of your own",
        "  template  applied: the text is sent as a user's message; enable_thinking=False; system prompt 'Be brief.'",
        "  trains    no text of these rows: they are prompts, which the model is to answer",
        "  answers   from 'answer': what follows ####, in 5 of 5 rows",
        f"  prompts   {tokens} to {understood.prompts.longest} tokens; half up to {tokens}, "
        f"90 % {understood.prompts.longest}, 99 % {understood.prompts.longest}",
        "  left out  1 of 5: longer than max_prompt_tokens=53",
    ]
    assert "            answer   '0'" in str(understood)
    assert prompts.up_to(tokens) is prompts  # none is longer


def test_unreadable_prompts_are_added_to_the_dropped_rows(base: Path) -> None:
    rows = [{"prompt": "1" * tokens} for tokens in (3, 5, 7, 9)]
    prompts = Prompts.from_rows(rows, base, max_prompt_tokens=8, too_long="drop").up_to(4)
    assert prompts.understood is not None and len(prompts) == 1
    assert prompts.dropped == sum(prompts.understood.dropped.values()) == 3
    assert (
        "  left out  1 of 4: longer than max_prompt_tokens=8; "
        "2 of 4: longer than 4 tokens, which leaves the model no room for a response"
    ) in str(prompts.understood)


def test_examples_show_the_models_input_not_the_file(qwen: Path, llama: Path) -> None:
    prompts = Prompts.from_rows([{"prompt": [USER], "completion": [BLUE]}], llama)
    assert prompts.understood is not None
    (example,) = prompts.understood.examples
    row = prompts.table.to_pylist()[0]
    assert example == _Example(text_of(llama, row["prompt_ids"]), text_of(llama, row["response_ids"]))
    assert prompts.understood.responses == _Lengths(*[len(row["response_ids"])] * 5)
    assert prompts.understood.roles == {"prompt": "prompt", "response": "completion"}
    assert "  answers   none" in str(prompts.understood)
    pair = Prompts.from_rows([{"prompt": [USER], "chosen": [BLUE], "rejected": [BLUE]}], qwen).understood
    assert pair and pair.roles == {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}


def test_a_limit_for_the_prompts_comes_from_their_lengths(base: Path) -> None:
    rows = [{"prompt": "1" * (k + 1)} for k in range(200)]
    understood = Prompts.from_rows(rows, base).understood
    assert understood is not None
    assert understood.prompts == _Lengths(1, 101, 181, 199, 200)
    assert understood.prompts.limit() == 200 and understood.prompts.limit(multiple=1) == 199


def test_editors_know_every_setting() -> None:
    settings = {name: field.annotation for name, field in ReadSettings.model_fields.items()}
    assert list(ReadArguments.__annotations__) == list(settings)


def test_control_characters_of_a_columns_name_do_not_reach_the_terminal(
    tmp_path: Path, base: Path
) -> None:
    prompts = Prompts.from_rows([{"prompt": "1", "a\x1b[2Jb": {"c\nd": 1}}], base, name="ro\rws")
    assert all(c.isprintable() or c == "\n" for c in str(prompts.understood))
    assert "a\\x1b[2Jb" in str(prompts.understood)


def test_boundaries_roles_and_odd_rows_are_printed(qwen: Path) -> None:
    rows = [
        {"prompt": "Color?", "chosen": "Blue.", "rejected": "Red.", "score": 1.0},
        {"prompt": "Color?", "chosen": "", "rejected": "Red.", "score": 1.0},
        {"prompt": "Color?", "chosen": "Red.", "rejected": "Red.", "score": 1.0},
    ]
    said = str(Prompts.from_rows(rows, qwen).understood).splitlines()
    assert (
        "  reads     prompt (text) as prompt; chosen (text) as chosen; rejected (text) as rejected"
        in said
    )
    assert "  keeps     score (double); not trained on, for rewards and nodes of your own" in said
    assert "  trains    the chosen and the rejected response, compared with each other" in said
    assert "  note      empty responses: 1 of 6; they train the model to answer nothing" in said
    assert "  note      pairs of equal responses: 1 of 3 rows; they have no preference" in said
    first = said.index(
        "  row 1     prompt   '<|im_start|>user\\nColor?<|im_end|>\\n<|im_start|>assistant\\n'"
    )
    assert said[first + 1 : first + 3] == [
        "            chosen   'Blue.<|im_end|>'",
        "            rejected 'Red.<|im_end|>'",
    ]
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    said = str(
        Prompts.from_rows(
            [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}], qwen
        ).understood
    )
    assert (
        "note      arguments of tool calls in 'messages' are objects: those that are null are left out"
        in said
    )
    weighted = [
        {"from": "human", "value": "Hi", "weight": 0.0},
        {"from": "gpt", "value": "A", "weight": 0.0},
    ]
    said = str(Prompts.from_rows([{"conversations": weighted}], qwen).understood)
    assert (
        "note      the messages in 'conversations' have a field 'weight', which does not change what is trained"
        in said
    )


@pytest.mark.thorough
def test_printed_rows_are_short_and_escaped(qwen: Path) -> None:
    turns = [
        {"role": ("user", "assistant")[k % 2], "content": "x\x1b[2J\u202e" * 5_000} for k in range(100)
    ]
    row = {
        "messages": turns,
        **{f"column {k}" * 20: k for k in range(500)},
        "deep": {f"field{k}": k for k in range(999)},
    }
    said = str(Prompts.from_rows([row], qwen, train_on="all").understood)
    assert len(said) < 4000 and max(map(len, said.splitlines())) < 1100
    assert all(c.isprintable() or c == "\n" for c in said)
    assert "and 493 more columns" in said and "and 93 more parts of it" in said
