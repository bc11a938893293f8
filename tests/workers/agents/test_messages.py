"""Messages are compared as harnesses may change them, and handed to templates whole."""

import pytest

from weft.workers.agents.messages import Message, ToolCall
from weft.workers.agents.protocol_fields import read_arguments

SAMPLED = Message(
    "assistant",
    "\n\nI list the files. ",
    (ToolCall("ls", {"path": ".", "depth": 2}, "call00001"),),
    reasoning="The user wants files.",
)


def test_ids_reasoning_key_order_and_outer_white_space_do_not_count():
    call = ToolCall("ls", {"depth": 2.0, "path": "."}, "other")
    assert SAMPLED.identity == Message("assistant", "I list the files.", (call,)).identity
    # AutoGen adds the agent's name.
    assert SAMPLED.identity == Message("assistant", "I list the files.", (call,), name="coder").identity


def test_other_words_calls_and_roles_count():
    content, (call,) = "I list the files.", SAMPLED.tool_calls
    others = [
        Message("user", content, (call,)),
        Message("assistant", "I list  the files.", (call,)),
        Message("assistant", content),
        Message("assistant", content, (call, call)),
        Message("assistant", content, (ToolCall("ls", {"path": "/", "depth": 2}),)),
        Message("assistant", content, (ToolCall("dir", {"path": ".", "depth": 2}),)),
        Message("assistant", content, (ToolCall("ls", '{"path": ".", "depth": 2'),)),
    ]
    assert not any(SAMPLED.identity == other.identity for other in others)


def test_white_space_around_the_words_of_others_counts():
    assert Message("user", "yes").identity != Message("user", "yes\n").identity
    assert Message("tool", "4").identity != Message("tool", " 4").identity


def test_a_tools_name_counts_and_its_call_id_does_not():
    result = Message("tool", "a.py", name="ls", tool_call_id="call00001")
    assert result.identity == Message("tool", "a.py", name="ls", tool_call_id="toolu_7").identity
    assert result.identity != Message("tool", "a.py", name="dir", tool_call_id="call00001").identity


@pytest.mark.pitfall(5)
def test_templates_receive_the_arguments_of_calls_in_the_history():
    assert SAMPLED.as_template() == {
        "role": "assistant",
        "content": "\n\nI list the files. ",
        "tool_calls": [
            {
                "type": "function",
                "id": "call00001",
                "function": {"name": "ls", "arguments": {"path": ".", "depth": 2}},
            }
        ],
        "reasoning_content": "The user wants files.",
        "reasoning": "The user wants files.",
    }


def test_templates_receive_only_the_fields_that_a_message_has():
    assert Message("user", "hi").as_template() == {"role": "user", "content": "hi"}
    result = Message("tool", "4", name="add", tool_call_id="call00001").as_template()
    assert result == {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00001"}


def test_gpt_oss_receives_thinking_unless_it_would_refuse_it():
    assert Message("assistant", "4", reasoning="2 + 2").as_template()["thinking"] == "2 + 2"
    assert "thinking" not in SAMPLED.as_template()


def test_arguments_that_are_no_object_stay_text():
    assert read_arguments('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for text in (
        '{"a": ',
        "[1, 2]",
        '"ls"',
        "null",
        "rm -rf",
        "[" * 100_000,
        '{"a": NaN}',
        '{"a": 1e999}',
    ):
        assert read_arguments(text) == text
    assert read_arguments("") == read_arguments(None) == read_arguments({}) == {}


def test_lone_surrogates_of_json_escapes_never_reach_a_tokenizer():
    kept = read_arguments('{"name": "\\ud83d\\ude00"}')
    assert kept == {"name": "😀"}
    escaped = '{"name": "\\ud83d"}'
    assert read_arguments(escaped) == escaped  # as text, it is encodable
    ToolCall("f", read_arguments({"name": "\ud83d"})).arguments_text.encode()
