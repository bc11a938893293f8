"""Conversations: the boundary of prompt and response, trained turns, and template inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import jsonl, parquet, qwen_like, text_of

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts

OPENS_THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""Opens `<think>` for generation, which finished turns lack."""

STRIPS_THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- if loop.last %}{{ m.content if '</think>' in m.content else '<think>\\n\\n</think>\\n\\n' + m.content }}
{%- else %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops the thinking of all assistant turns except the last, like Qwen3's template."""

HEADER = "<|im_start|>assistant\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def with_template(folder: Path, template: str) -> Path:
    (qwen_like(folder) / "chat_template.jinja").write_text(template)
    return folder


def read(row: dict[str, Any], tokenizer: Path, **settings: Any) -> dict[str, str]:
    """Return the decoded tokens of a row, by column."""
    (made,) = Prompts.from_rows([row], tokenizer, **settings).table.to_pylist()
    return {name: text_of(tokenizer, ids) for name, ids in made.items() if name.endswith("_ids")}


def trained(tokenizer: Path, row: dict[str, Any], name: str = "response") -> list[str]:
    """Return the decoded trained stretches of a response."""
    ids, found = row[f"{name}_ids"], [[]]
    for token, on in zip(ids, row.get(f"{name}_mask", [1] * len(ids)), strict=True):
        if on:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [text_of(tokenizer, tokens) for tokens in found if tokens]


ASKED = {
    "prompt_ids": turn("user", "Name a river.") + HEADER,
    "chosen_ids": "Nile<|im_end|>",
    "rejected_ids": "Mud<|im_end|>",
}


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("prompt", ["Name a river.", " Name a\nriver. ", [user("Name a river.")]])
def test_a_prompt_in_both_responses_is_used_once(
    prompt: Any, write: Any, tmp_path: Path, qwen: Path
) -> None:
    row = {
        "prompt": prompt,
        "chosen": [user("Name a river."), assistant("Nile")],
        "rejected": [user("Name a river."), assistant("Mud")],
    }
    prompts = Prompts.read(write(tmp_path / f"pairs.{write.__name__}", [row, row]), qwen)
    made = prompts.table.to_pylist()[1]
    assert {name: text_of(qwen, ids) for name, ids in made.items() if name.endswith("_ids")} == ASKED


@pytest.mark.parametrize(
    ("row", "prompt", "chosen"),
    [
        (  # only the conversations have the system prompt
            {
                "prompt": "Hi",
                "chosen": [system("Be kind."), user("Hi"), assistant("Hello")],
                "rejected": [system("Be kind."), user("Hi"), assistant("No")],
            },
            turn("system", "Be kind.") + turn("user", "Hi"),
            "Hello",
        ),
        (  # only the prompt has the system prompt
            {
                "prompt": [system("Be kind."), user("Hi")],
                "chosen": [user("Hi"), assistant("Hello")],
                "rejected": [user("Hi"), assistant("No")],
            },
            turn("system", "Be kind.") + turn("user", "Hi"),
            "Hello",
        ),
        (  # a prompt of several turns
            {
                "prompt": [user("Hi"), assistant("Hello"), user("How?")],
                "chosen": [user("Hi"), assistant("Hello"), user("How?"), assistant("Fine")],
                "rejected": [user("Hi"), assistant("Hello"), user("How?"), assistant("Bad")],
            },
            turn("user", "Hi") + turn("assistant", "Hello") + turn("user", "How?"),
            "Fine",
        ),
        (  # the text is the last user turn of several
            {
                "prompt": "How?",
                "chosen": [user("Hi"), assistant("Hello"), user("How?"), assistant("Fine")],
                "rejected": [user("Hi"), assistant("Hello"), user("How?"), assistant("Bad")],
            },
            turn("user", "Hi") + turn("assistant", "Hello") + turn("user", "How?"),
            "Fine",
        ),
        (  # the text is the first turn, and both responses share turns after it
            {
                "prompt": "Hi",
                "chosen": [user("Hi"), assistant("Hello"), user("How?"), assistant("Fine")],
                "rejected": [user("Hi"), assistant("Hello"), user("How?"), assistant("Bad")],
            },
            turn("user", "Hi") + turn("assistant", "Hello") + turn("user", "How?"),
            "Fine",
        ),
        (  # one response with the prompt, one without
            {"prompt": "Hi", "chosen": [user("Hi"), assistant("Hello")], "rejected": [assistant("No")]},
            turn("user", "Hi"),
            "Hello",
        ),
        (  # a single message instead of a list
            {"prompt": "Hi", "chosen": assistant("Hello"), "rejected": assistant("No")},
            turn("user", "Hi"),
            "Hello",
        ),
        (  # no column `prompt`
            {
                "chosen": [user("Hi"), assistant("Hello"), user("How?"), assistant("Fine")],
                "rejected": [user("Hi"), assistant("Hello"), user("How?"), assistant("Bad")],
            },
            turn("user", "Hi") + turn("assistant", "Hello") + turn("user", "How?"),
            "Fine",
        ),
    ],
)
def test_the_response_of_a_pair_is_the_assistants_turn(
    row: dict[str, Any], prompt: str, chosen: str, qwen: Path
) -> None:
    found = read(row, qwen)
    assert (found["prompt_ids"], found["chosen_ids"]) == (prompt + HEADER, chosen + "<|im_end|>")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {
                "prompt": "Hello?",
                "chosen": [user("Hi"), assistant("A")],
                "rejected": [user("Hi"), assistant("B")],
            },
            "row 1: 'chosen' begins with a message of role 'user', and the row's prompt is not in it",
        ),
        (
            {
                "prompt": "Hi",
                "chosen": [user("Hi"), assistant("A"), user("B")],
                "rejected": [user("Hi"), assistant("B")],
            },
            "row 1: 'chosen' ends with a message of role 'user'; a response ends with the assistant's turn",
        ),
        (
            {"chosen": [user("Hi"), assistant("A")], "rejected": [user("Hi")]},
            "row 1: 'rejected' ends with a message of role 'user'",
        ),
        (
            {"prompt": [user("Hi")], "completion": [user("Hi")]},
            "'completion' ends with a message of role 'user'",
        ),
        (
            {"prompt": [user("Hi")], "completion": [user("Hi"), user("So?"), assistant("A")]},
            "row 1: in 'completion' no assistant turn follows the prompt",
        ),
        (
            {"chosen": [user("Hi"), assistant("A")], "rejected": [user("Ho"), assistant("A")]},
            "row 1: 'chosen' and 'rejected' begin with different messages",
        ),
        (
            {"prompt": [user("Hi")], "completion": [{"role": "assistant", "content": None}]},
            "row 1: a message in 'completion'",
        ),
        ({"messages": [user("Hi"), None, assistant("A")]}, "row 1: a message in 'messages' is null"),
        (
            {"conversations": [{"from": "martian", "value": "Hi"}]},
            "row 1: a message in 'conversations' is from 'martian'",
        ),
    ],
)
def test_rows_that_have_no_sound_reading_are_refused(row: dict[str, Any], said: str, qwen: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        Prompts.from_rows([row], qwen)


def test_a_role_that_the_template_does_not_name_is_refused(tmp_path: Path) -> None:
    any_role = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = with_template(tmp_path / "any", any_role)
    for role in ("Assistant", "gpt"):
        with pytest.raises(
            UserError,
            match=f"row 1: a message has the role '{role}', which the chat template does not know",
        ):
            Prompts.from_rows([{"messages": [user("Hi"), {"role": role, "content": "A"}]}], tokenizer)
    (tokenizer / "chat_template.jinja").write_text(any_role + "{# knows the role critic #}")
    assert (
        "<critic>Bad"
        in read({"messages": [{"role": "critic", "content": "Bad"}, user("Hi")]}, tokenizer)[
            "prompt_ids"
        ]
    )


def test_responses_of_text_that_repeat_the_prompt_in_every_row_are_the_whole_text(qwen: Path) -> None:
    rows = [
        {"prompt": f"{sky} is", "chosen": f"{sky} is blue.", "rejected": f"{sky} is green."}
        for sky in ("The sky", "It")
    ]
    prompts = Prompts.from_rows(rows, qwen)
    made = prompts.table.to_pylist()[0]
    assert (made["prompt"], text_of(qwen, made["chosen_ids"])) == ("The sky is", " blue.<|im_end|>")
    assert "every response begins with its prompt, which is taken once" in str(prompts.understood)
    rows[1]["chosen"] = "Blue."
    kept = Prompts.from_rows(rows, qwen, chat=False).table.to_pylist()[0]
    assert text_of(qwen, kept["chosen_ids"]) == "The sky is blue.<|im_end|>"


def test_a_turn_that_is_begun_in_the_prompt_is_continued_by_the_response(qwen: Path) -> None:
    begun = [user("Color?"), assistant("It is ")]
    for completion in (
        [assistant("blue")],
        [assistant("It is blue")],
        [user("Color?"), assistant("It is blue")],
    ):
        found = read({"prompt": begun, "completion": completion}, qwen)
        assert found == {
            "prompt_ids": turn("user", "Color?") + HEADER + "It is ",
            "response_ids": "blue<|im_end|>",
        }


@pytest.mark.parametrize("answer", ["<tool_call>{}</tool_call>", "<th", "<think", "<answer>4", "4", ""])
def test_the_prompt_ends_with_the_header_even_if_the_response_starts_with_its_tag(
    answer: str, tmp_path: Path
) -> None:
    tokenizer = with_template(tmp_path / "opens", OPENS_THINKING)
    found = read({"messages": [user("2 + 2?"), assistant(answer)]}, tokenizer)
    assert found == {
        "prompt_ids": turn("user", "2 + 2?") + HEADER,
        "response_ids": answer + "<|im_end|>",
    }
    pair = {"prompt": "2 + 2?", "chosen": [assistant(answer)], "rejected": [assistant("<think>\nSo")]}
    assert read(pair, tokenizer)["rejected_ids"] == "<think>\nSo<|im_end|>"


def test_a_thinking_response_continues_the_tag_opened_for_generation(
    tmp_path: Path,
) -> None:
    tokenizer = with_template(tmp_path / "opens", OPENS_THINKING)
    found = read({"messages": [user("2 + 2?"), assistant("<think>\nFour.</think>4")]}, tokenizer)
    assert found == {
        "prompt_ids": turn("user", "2 + 2?") + HEADER + "<think>\n",
        "response_ids": "Four.</think>4<|im_end|>",
    }
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert read({"messages": [user("2 + 2?"), calls]}, tokenizer)["prompt_ids"].endswith(HEADER)


def test_a_template_that_leaves_no_place_for_the_boundary_is_refused(tmp_path: Path) -> None:
    template = OPENS_THINKING.replace(
        "(m.content or '')", "('<answer>' if m.role == 'assistant' else '') + m.content"
    )
    with pytest.raises(
        UserError,
        match=r"row 1: the chat template writes '.*<answer>4.*' for the assistant's turn, but '.*<think>.* no place divides",
    ):
        read({"messages": [user("2 + 2?"), assistant("4")]}, with_template(tmp_path / "two", template))


DIALOGUE = [
    system("Be brief."),
    user("Color?"),
    assistant("It is blue."),
    user("Why?"),
    assistant("\nLight."),
    user("Thanks"),
]


def test_every_assistant_turn_is_trained_and_no_other_token(qwen: Path, llama: Path) -> None:
    prompts = Prompts.from_rows([{"messages": DIALOGUE}], qwen, train_on="all")
    (row,) = prompts.table.to_pylist()
    assert (
        text_of(qwen, row["prompt_ids"]) == turn("system", "Be brief.") + turn("user", "Color?") + HEADER
    )
    assert trained(qwen, row) == ["It is blue.<|im_end|>", "\nLight.<|im_end|>"]
    whole = text_of(qwen, row["prompt_ids"] + row["response_ids"])
    assert whole + "\n" == "".join(turn(m["role"], m["content"]) for m in DIALOGUE[:-1])
    assert "trains    every assistant turn, 2 in 1 row (train_on='all')" in str(prompts.understood)
    # This tokenizer begins each text with a space, so turns cannot be tokenised one by one.
    (row,) = Prompts.from_rows([{"messages": DIALOGUE[1:-1]}], llama, train_on="all").table.to_pylist()
    marked = [text for text in trained(llama, row) if "</s>" in text]
    assert len(marked) == len(trained(llama, row)) == 2 and "blue" in marked[0] and "ght" in marked[1]


def test_the_last_assistant_turn_is_trained_by_default_and_the_choice_is_printed(qwen: Path) -> None:
    prompts = Prompts.from_rows([{"messages": DIALOGUE[:-1]}], qwen)
    (row,) = prompts.table.to_pylist()
    assert text_of(qwen, row["response_ids"]) == "\nLight.<|im_end|>" and "response_mask" not in row
    assert (
        "trains    the last assistant turn of each conversation, 1 of 2 turns (train_on='last'"
        in str(prompts.understood)
    )


def test_a_row_of_one_turn_has_no_mask(qwen: Path) -> None:
    rows = [{"messages": [user("Hi"), assistant("A")]}]
    assert "response_mask" not in Prompts.from_rows(rows, qwen, train_on="all").columns
    rows += [{"messages": DIALOGUE}]
    masks = Prompts.from_rows(rows, qwen, train_on="all").table["response_mask"].to_pylist()
    assert set(masks[0]) == {1} and set(masks[1]) == {0, 1}


def test_a_conversation_with_rewritten_earlier_turns_becomes_several_rows(
    tmp_path: Path,
) -> None:
    tokenizer = with_template(tmp_path / "strips", STRIPS_THINKING)
    thinks = [
        user("A?"),
        assistant("<think>\nHm.</think>\n\na"),
        user("B?"),
        assistant("<think>\nSo.</think>\n\nb"),
    ]
    rows = [{"messages": thinks, "id": 1}, {"messages": thinks[:2], "id": 2}]
    prompts = Prompts.from_rows(rows, tokenizer, train_on="all")
    made = prompts.table.to_pylist()
    assert [(row["id"], text_of(tokenizer, row["response_ids"])) for row in made] == [
        (1, "<think>\nHm.</think>\n\na<|im_end|>"),
        (1, "<think>\nSo.</think>\n\nb<|im_end|>"),
        (2, "<think>\nHm.</think>\n\na<|im_end|>"),
    ]
    assert text_of(tokenizer, made[1]["prompt_ids"]) == (
        turn("user", "A?") + turn("assistant", "a") + turn("user", "B?") + HEADER
    )
    assert "some conversations became several rows (1 more)" in str(prompts.understood)
    # counts rows of the file, not of the table
    with pytest.raises(UserError, match="row 1: the prompt has"):
        Prompts.from_rows(rows, tokenizer, train_on="all", max_prompt_tokens=len(made[0]["prompt_ids"]))


def test_a_setting_for_turns_needs_conversations(qwen: Path) -> None:
    for row, said in (
        (
            {"prompt": [user("Hi")], "completion": [assistant("A")]},
            "has no conversations to choose turns of",
        ),
        ({"messages": [user("Hi")]}, "row 1: 'messages' has no assistant turn"),
        (
            {"messages": [assistant("Hi"), user("A")]},
            "row 1: 'messages' begins with the assistant's turn",
        ),
    ):
        with pytest.raises(UserError, match=said):
            Prompts.from_rows([row], qwen, train_on="all")


def test_turns_of_others_in_a_response_are_not_trained(qwen: Path, tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "4"}
    agentic = {
        "prompt": [user("2 + 2?")],
        "completion": [assistant("add(2, 2)"), tool, assistant("It is 4.")],
    }
    (row,) = Prompts.from_rows([agentic], qwen).table.to_pylist()
    assert trained(qwen, row) == ["add(2, 2)<|im_end|>", "It is 4.<|im_end|>"]
    pair = {
        "chosen": [user("Hi"), assistant("Hello"), user("How?"), assistant("Fine")],
        "rejected": [user("Hi"), assistant("No"), user("Why?"), assistant("Bad")],
    }
    prompts = Prompts.from_rows([pair], qwen)
    (row,) = prompts.table.to_pylist()
    assert trained(qwen, row, "chosen") == ["Hello<|im_end|>", "Fine<|im_end|>"]
    assert trained(qwen, row, "rejected") == ["No<|im_end|>", "Bad<|im_end|>"]
    assert "(not trained) '\\n<|im_start|>user\\nHow?<|im_end|>\\n<|im_start|>assistant\\n'" in str(
        prompts.understood
    )
    with pytest.raises(
        UserError,
        match="row 1: the response in 'chosen' has several assistant turns, and the chat template",
    ):
        Prompts.from_rows([pair], with_template(tmp_path / "strips", STRIPS_THINKING))


def test_turns_of_hh_rlhf_are_separated(qwen: Path) -> None:
    human, ai = "\n\nHuman: ", "\n\nAssistant: "
    rows = [
        {"chosen": f"{human}Hi{ai}I am glad", "rejected": f"{human}Hi{ai}I am sad"},
        {"chosen": f"{human}Hi{ai}A{human}B{ai}C", "rejected": f"{human}Hi{ai}D"},
    ]
    prompts = Prompts.from_rows(rows, qwen)
    first, second = prompts.table.to_pylist()
    assert prompts.format == "HH-RLHF"
    assert first["prompt"] == second["prompt"] == "\n\nHuman: Hi\n\nAssistant:"
    assert trained(qwen, first, "chosen") == [" I am glad<|im_end|>"]
    assert trained(qwen, second, "chosen") == [" A", " C<|im_end|>"]
    assert trained(qwen, second, "rejected") == [" D<|im_end|>"]
    with pytest.raises(UserError, match="row 1: a text ends with a turn of 'Human:'"):
        Prompts.from_rows([{"chosen": f"{human}Hi{ai}A{human}B", "rejected": f"{human}Hi{ai}D"}], qwen)


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Be brief.", "prompt": "Hi"},
        {"system": "Be brief.", "prompt": [user("Hi")]},
        {"system": "Be brief.", "question": "Hi", "answer": "4"},
        {"system_prompt": "Be brief.", "problem": "Hi"},
        {"system": "Be brief.", "messages": [user("Hi"), assistant("A")]},
        {"system": "Be brief.", "messages": [system("Be brief."), user("Hi"), assistant("A")]},
        {"system": "Be brief.", "instruction": "Hi", "output": "A"},
        {"system": "Be brief.", "question": "Hi", "chosen": "A", "rejected": "B"},
        {
            "system": "Be brief.",
            "chosen": [user("Hi"), assistant("A")],
            "rejected": [user("Hi"), assistant("B")],
        },
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "A"}],
        },
    ],
)
def test_the_system_prompt_of_a_row_is_used_in_every_format(row: dict[str, Any], qwen: Path) -> None:
    prompts = Prompts.from_rows([row], qwen, system="Be long.")
    (made,) = prompts.table.to_pylist()
    assert made["prompt"] == turn("system", "Be brief.") + turn("user", "Hi") + HEADER
    assert "(text) as system prompt" in str(
        prompts.understood
    ) and "(rows that keep their own: 1)" in str(prompts.understood)


def test_system_prompts_that_cannot_be_used_are_refused(qwen: Path, base: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"row 2: column 'system' is for the chat template, which is not applied .*\(the tokenizer",
    ):
        Prompts.from_rows(
            [{"system": "", "prompt": "Hi"}, {"system": "Be brief.", "prompt": "Hi"}], base
        )
    with pytest.raises(
        UserError, match="row 1: the system prompt of the column and the first message of the row differ"
    ):
        Prompts.from_rows([{"system": "Be brief.", "prompt": [system("Be long."), user("Hi")]}], qwen)
    blank = Prompts.from_rows(
        [{"system": None, "prompt": "Hi"}, {"system": " ", "prompt": "Hi"}], qwen, system="Be kind."
    )
    assert all(text.startswith(turn("system", "Be kind.")) for text in blank.table["prompt"].to_pylist())
    assert (
        read({"system": 3, "prompt": "Hi"}, qwen)["prompt_ids"] == turn("user", "Hi") + HEADER
    )  # not text


TOOL = {
    "name": "add",
    "parameters": {"a": {"type": "integer", "default": None}, "b": {"enum": [None, 1]}},
}


@pytest.mark.parametrize("tools", [json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_nulls_in_tools_that_are_json_text_are_kept(tools: Any, qwen: Path) -> None:
    from transformers import AutoTokenizer

    found = read({"prompt": [user("Hi")], "tools": tools}, qwen)["prompt_ids"]
    assert '"default": null' in found
    theirs = AutoTokenizer.from_pretrained(qwen).apply_chat_template(
        [user("Hi")], tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert found == theirs


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tools": json.dumps(TOOL)}, "row 1: 'tools' is {"),
        ({"tools": '["add"]'}, "row 1: 'tools' is ["),
        ({"chat_template_kwargs": "[1]"}, "row 1: 'chat_template_kwargs' is [1]; it must be an object"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": True}},
            "row 1: 'chat_template_kwargs' has 'add_generation_prompt'",
        ),
    ],
)
def test_tools_and_variables_of_another_shape_are_refused(
    row: dict[str, Any], said: str, qwen: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        Prompts.from_rows([{"prompt": [user("Hi")], **row}], qwen)
    assert read({"prompt": [user("Hi")], "tools": ""}, qwen)["prompt_ids"] == turn("user", "Hi") + HEADER


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_messages_that_are_text_are_refused_and_not_trained_as_text(
    qwen: Path, write: Any, keys: tuple[str, str]
) -> None:
    def turn(who: str, text: str) -> str:
        return write([dict(zip(keys, (who, text), strict=True))])

    human, model = ("human", "gpt") if keys[0] == "from" else ("user", "assistant")
    prompt, answer = turn(human, "2 + 2?"), turn(model, "4")
    refused = {
        "prompt": [
            {"prompt": prompt, "answer": "4"},
            {"prompt": prompt, "chosen": "4", "rejected": "5"},
        ],
        "chosen": [{"prompt": "2 + 2?", "chosen": answer, "rejected": answer}],
        "completion": [{"prompt": "2 + 2?", "completion": answer}],
    }
    for column, rows in refused.items():
        for row in rows:
            with pytest.raises(UserError, match=f"the texts of column '{column}' are lists of messages"):
                Prompts.from_rows([row], qwen)
    told = Prompts.from_rows([{"prompt": prompt}], qwen, prompt="prompt")
    assert prompt in told.table["prompt"][0].as_py()
    assert len(Prompts.from_rows([{"prompt": prompt}, {"prompt": "[1, 2]"}], qwen)) == 2
