"""The chat template: when it is applied, and its inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import BLUE, GREEN, USER, complaint, jsonl, qwen_like, text_of

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

CHAT = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def texts(row: dict[str, Any], tokenizer: Path, **settings: Any) -> list[str]:
    """Return the prompt of a row and its responses, as text for the model."""
    first = Prompts.from_rows([row], tokenizer, **settings).table.to_pylist()[0]
    return [text_of(tokenizer, value) for name, value in first.items() if name.endswith("_ids")]


def test_plain_text_is_sent_as_a_users_message_where_there_is_a_template(qwen: Path, base: Path) -> None:
    row = {"question": "2 + 2?", "answer": "4"}
    assert texts(row, qwen) == [CHAT]
    assert texts(row, base) == ["2 + 2?"]
    assert texts(row, qwen, chat=False) == ["2 + 2?"]
    assert texts(row, qwen, prompt="question", response="answer") == [CHAT, "4<|im_end|>"]
    with pytest.raises(UserError, match="has no chat template"):
        texts(row, base, chat=True)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": CHAT}, "the texts hold special tokens of the tokenizer already"),
        (
            {"prompt": "2 + 2 =", "completion": " 4"},
            "the responses begin with a space, so they continue",
        ),
        (
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            "the responses begin with a space, so they continue",
        ),
        (
            {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
            "the prompt is what both responses begin with",
        ),
        ({"text": "2 + 2 = 4"}, "each text is one sequence"),
    ],
)
def test_text_that_is_no_message_by_itself_gets_no_template(
    row: dict[str, Any], why: str, qwen: Path
) -> None:
    understood = Prompts.from_rows([row], qwen).understood
    assert understood is not None and not understood.chat
    assert understood.chat_reason.startswith(why)
    assert f"template  not applied: {why}" in str(understood)


def test_text_that_went_through_a_template_gets_no_second_first_token(llama: Path) -> None:
    again = Prompts.from_rows([{"prompt": [USER]}], llama).table.select(["prompt"]).to_pylist()
    assert again[0]["prompt"].startswith("<s>")
    once, twice = (Prompts.from_rows(rows, llama) for rows in ([{"prompt": [USER]}], again))
    assert twice.table["prompt_ids"] == once.table["prompt_ids"]
    answered = Prompts.from_rows([{**again[0], "response": " It is blue."}], llama).table.to_pylist()[0]
    assert answered["prompt_ids"][:2] == once.table["prompt_ids"].to_pylist()[0][:2]
    assert text_of(llama, answered["response_ids"]).endswith("</s>")


def test_no_text_gets_a_second_first_token(llama: Path) -> None:
    for with_bos, without in (
        ({"text": "<s> The sky is blue."}, {"text": "The sky is blue."}),
        (
            {"chosen": "<s> The sky is blue", "rejected": "<s> The sky is green"},
            {"chosen": "The sky is blue", "rejected": "The sky is green"},
        ),
    ):
        tables = [Prompts.from_rows([row], llama).table.to_pylist()[0] for row in (with_bos, without)]
        assert [row["prompt_ids"][0] for row in tables] == [1, 1]
        assert all([*row["prompt_ids"], *row.get("response_ids", [])].count(1) == 1 for row in tables)
    mixed = Prompts.from_rows([{"prompt": "The sky is"}, {"prompt": "<s>The sky is"}], llama, chat=False)
    assert [ids.count(1) for ids in mixed.table["prompt_ids"].to_pylist()] == [1, 1]


def test_text_prompts_work_with_responses_that_are_messages(qwen: Path) -> None:
    four, five = ([{"role": "assistant", "content": text}] for text in "45")
    assert texts({"prompt": "2 + 2?", "completion": four}, qwen) == [CHAT, "4<|im_end|>"]
    assert texts({"prompt": "2 + 2?", "chosen": four, "rejected": five}, qwen) == [
        CHAT,
        "4<|im_end|>",
        "5<|im_end|>",
    ]
    with pytest.raises(
        UserError, match=r"'prompt' is text, but 'completion' is messages; .* leave out chat=False"
    ):
        texts({"prompt": "2 + 2?", "completion": four}, qwen, chat=False)


def test_blocks_of_text_alone_are_one_text(qwen: Path) -> None:
    blocks = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    assert texts({"prompt": [{"role": "user", "content": blocks}]}, qwen) == [CHAT]
    begun = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "text", "text": "It"}]},
    ]
    assert texts({"prompt": begun}, qwen) == [CHAT + "It"]


def test_a_system_prompt_is_added_where_a_row_has_none(qwen: Path) -> None:
    own = {"role": "system", "content": "Be long."}
    ask = {"role": "user", "content": "2 + 2?"}
    prompts = Prompts.from_rows([{"prompt": [ask]}, {"prompt": [own, ask]}], qwen, system="Be brief.")
    begins = [f"<|im_start|>system\n{said}<|im_end|>\n{CHAT}" for said in ("Be brief.", "Be long.")]
    assert prompts.table["prompt"].to_pylist() == begins
    assert "; system prompt 'Be brief.' (rows that keep their own: 1)" in str(prompts.understood)
    assert texts({"question": "2 + 2?", "answer": "4"}, qwen, system="Be brief.") == [begins[0]]
    assert texts({"messages": [ask, BLUE]}, qwen, system="Be brief.") == [
        begins[0],
        "It is blue.<|im_end|>",
    ]
    pair = {"chosen": [ask, BLUE], "rejected": [ask, GREEN]}
    assert texts(pair, qwen, system="Be brief.") == [
        begins[0],
        "It is blue.<|im_end|>",
        "It is green.<|im_end|>",
    ]


def test_thinking_is_switched_by_the_name_that_the_template_has(
    qwen: Path, llama: Path, tmp_path: Path
) -> None:
    row = {"question": "2 + 2?", "answer": "4"}
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    assert texts(row, qwen, chat_template_kwargs=off) == [CHAT + "<think>\n\n</think>\n\n"]
    assert texts(row, qwen, chat_template_kwargs=on) == [CHAT]
    assert texts(row, qwen, chat_template_kwargs={"thinking": False}) == texts(
        row, qwen, chat_template_kwargs=off
    )
    own = {
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert texts(own, qwen, chat_template_kwargs=off) == [CHAT]  # the row's setting wins
    # this template has no thinking to switch off
    assert texts(row, llama, chat_template_kwargs=off) == texts(row, llama)
    with pytest.raises(
        UserError,
        match=r"enable_thinking=True: the chat template of .*llama-tiny has no switch for thinking",
    ):
        texts(row, llama, chat_template_kwargs=on)
    granite = qwen_like(tmp_path / "granite")
    (granite / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if thinking %}<think>{% endif %}"
    )
    assert texts(row, granite, chat_template_kwargs=on) == ["2 + 2?<think>"]
    with pytest.raises(UserError, match=r"no setting 'thinking' .*; set chat_template_kwargs="):
        texts(row, qwen, thinking=False)


def test_settings_of_the_template_that_would_do_nothing_are_refused(qwen: Path, base: Path) -> None:
    row = {"question": "2 + 2?", "answer": "4"}
    with pytest.raises(UserError, match=r"reads no 'enable_thinkng'; did you mean 'enable_thinking'\?"):
        texts(row, qwen, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(
        UserError, match=r'system="Be brief\.": the chat template is not applied .*has no chat template'
    ):
        texts(row, base, system="Be brief.")
    with pytest.raises(
        UserError,
        match=r'chat_template_kwargs={"enable_thinking": true}: the chat template is not applied to these',
    ):
        texts(row, qwen, chat=False, chat_template_kwargs={"enable_thinking": True})
    assert texts(row, base, chat_template_kwargs={"enable_thinking": False}) == texts(row, base)


def test_a_prompt_that_ends_with_the_assistant_is_continued(qwen: Path, llama: Path) -> None:
    row = {"prompt": [USER, {"role": "assistant", "content": "It is "}]}
    text = Prompts.from_rows([row], qwen).table["prompt"].to_pylist()[0]
    assert text == "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\nIt is "
    # This template trims messages, so the space before the response belongs to the response.
    assert Prompts.from_rows([row], llama).table["prompt"].to_pylist()[0].endswith("[ASSISTANT] It is")


def test_tools_and_template_variables_come_from_their_columns(qwen: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        rows = [{"prompt": [USER], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}]
        text = Prompts.from_rows(rows, qwen).table["prompt"].to_pylist()[0]
        assert text.startswith("<|im_start|>system\nTools:\n" + json.dumps(tool))
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_fields_that_only_some_messages_have_are_not_null_in_the_others(qwen: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    rows = [{"messages": [USER, call, {"role": "tool", "content": "4"}]}, {"messages": [USER]}]
    texts = Prompts.from_rows(rows, qwen).table["prompt"].to_pylist()
    assert '<|im_start|>assistant\n{"name": "add"}<|im_end|>' in texts[0]
    assert "None" not in "".join(texts)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    folder = qwen_like(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": [USER]}])
    assert "base has no chat template" in complaint(file, folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert "the chat template of" in complaint(jsonl(file, [{"prompt": [USER]}]), folder)


def test_a_chat_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    folder = qwen_like(tmp_path / "evil")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    assert "unsafe" in complaint(jsonl(tmp_path / "p.jsonl", [{"prompt": [USER]}]), folder)


def test_templates_that_write_only_blocks_get_texts_in_blocks(tmp_path: Path):
    folder = qwen_like(tmp_path / "blocks")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{% for b in m.content %}{{ b.text }}{% endfor %};{% endfor %}"
    )
    chat = Tokenizer.load(folder).chat
    assert chat.render([USER, BLUE]) == "[user]What color is the sky?;[assistant]It is blue.;"
    assert chat.render([USER, BLUE], continue_last=True).endswith("[assistant]It is blue.")
    blocks = [{"type": "text", "text": "What color "}, {"type": "text", "text": "is the sky?"}]
    assert chat.render([{"role": "user", "content": blocks}]) == "[user]What color is the sky?;"


def test_a_teacher_has_prompts_of_its_own(qwen: Path, llama: Path) -> None:
    rows = [{"prompt": [USER]}, {"prompt": [{"role": "user", "content": "2 + 2?"}]}]
    both = Prompts.from_rows(rows, qwen, teacher=llama, max_prompt_tokens=60, too_long="drop")
    for tokenizer, column in ((qwen, "prompt_ids"), (llama, "teacher_prompt_ids")):
        assert both.table.column(column) == Prompts.from_rows(rows, tokenizer).table.column("prompt_ids")
    assert "teacher_prompt_ids" not in both.file_columns, "it comes from Weft, and not from the file"
    kept = both.filter(lambda row: "sky" not in row["prompt"])
    alone = Prompts.from_rows(rows[1:], llama).table
    assert kept.table["teacher_prompt_ids"].to_pylist() == alone["prompt_ids"].to_pylist()
    named = Prompts.from_rows([{"prompt": "2 + 2?", "teacher_prompt_ids": [1]}], qwen)
    assert named.table["file_teacher_prompt_ids"].to_pylist() == [[1]]
