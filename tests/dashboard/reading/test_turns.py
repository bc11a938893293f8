"""Conversations split into turns for every common chat template, with exact token ranges."""

import re

import pytest
from episode_runs import BACKEND, encode, spell  # pyright: ignore[reportMissingImports]

from weft.dashboard.reading.turns import (
    calls_of,
    gist,
    only_real_markers,
    token_texts,
    turns_of_prompt,
    turns_of_text,
    turns_of_tokens,
)
from weft.dataflow.prompts.tokenizer import Tokenizer

CALL = '{"name": "search", "arguments": {"q": "weft"}}'
TEMPLATES = {
    "chatml": f"<think>hm</think><tool_call>{CALL}</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>a thread</tool_response><|im_end|>\n<|im_start|>assistant\nA thread.<|im_end|>",
    "begun to think": f"hm</think>\n\n<tool_call>{CALL}</tool_call><|im_end|>\n"
    "<|im_start|>tool\na thread<|im_end|>\n<|im_start|>assistant\nA thread.",
    "llama": f"<think>hm</think><tool_call>{CALL}</tool_call><|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\na thread<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA thread.<|eot_id|>",
    "phi": f"<think>hm</think><tool_call>{CALL}</tool_call><|end|>\n<|observation|>\na thread<|end|>\n<|assistant|>\nA thread.<|end|>",
    "harmony": f"<|channel|>analysis<|message|>hm<tool_call>{CALL}</tool_call><|call|><|start|>tool<|message|>a thread<|end|>"
    "<|start|>assistant<|channel|>final<|message|>A thread.<|return|>",
    "mistral": f"<think>hm</think>[TOOL_CALLS]{CALL}</s>[INST][TOOL_RESULTS]a thread[/TOOL_RESULTS][/INST] A thread.</s>",
}
SAID = [
    ("assistant", "thinking", "hm"),
    ("assistant", "call", CALL),
    ("tool", "result", "a thread"),
    ("assistant", "text", "A thread."),
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_response_with_a_tool_has_its_turns(template: str):
    text = TEMPLATES[template]
    turns = turns_of_text(text, "assistant") or []
    assert [
        (turn["role"], part["kind"], part["text"]) for turn in turns for part in turn["parts"]
    ] == SAID
    tokens = re.findall(r"<[^<>]+>|\w+|\W", text)
    by_token = turns_of_tokens(tokens) or []
    parts = [
        ("".join(tokens[part["from"] : part["to"]])).strip("\n")
        for turn in by_token
        for part in turn["parts"]
    ]
    assert parts == [text for _, _, text in SAID]
    assert [part["name"] for turn in by_token for part in turn["parts"] if part["kind"] == "call"] == [
        "search"
    ]


def test_plain_text_has_no_turns():
    assert (
        turns_of_text("2 + 2 = 4", "assistant") is None and turns_of_tokens(["4", "<|im_end|>"]) is None
    )
    assert (
        turns_of_text("a < b, <|strange|>", "assistant") is None
        and turns_of_prompt({"prompt": "2 + 2 ="}) is None
    )
    assert turns_of_tokens([]) is None and gist("plain") == "plain"


def test_a_prompt_has_its_turns_from_its_messages_or_from_its_marks():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    messages += [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}]
    messages += [{"role": "tool", "name": "look", "content": "nothing"}]
    said = [
        (turn["role"], [part["kind"] for part in turn["parts"]])
        for turn in turns_of_prompt({"prompt_messages": messages}) or []
    ]
    assert said == [
        ("system", ["text"]),
        ("user", ["text"]),
        ("assistant", ["call"]),
        ("tool", ["result"]),
    ]
    ended = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert [
        turn["role"] for turn in turns_of_prompt({"messages": ended, "response_ids": [1]}) or []
    ] == ["user"]
    marked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [turn["role"] for turn in turns_of_prompt({"prompt": marked, "messages": "{torn"}) or []] == [
        "system",
        "user",
    ]
    assert gist(marked) == "Hi"


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 3000,
        "<tool_call>" * 3000,
        "<|start|>a" * 3000,
        "<|im_start|>user" * 3000,
        "[INST]" * 3000,
    ],
)
def test_a_text_of_marks_alone_takes_no_time(text: str):
    assert len(turns_of_text(text, "assistant") or []) <= 500


def test_calls_in_json_have_their_names_and_arguments():
    two = '[{"name": "look", "arguments": {"at": [1, null]}}, {"function": {"name": "go", "arguments": "{}"}}]'
    assert calls_of(two) == [
        {"name": "look", "arguments": [["at", "[1, null]"]]},
        {"name": "go", "arguments": []},
    ]
    for plain in (
        "{torn",
        '{"name": 1, "arguments": {}}',
        "[]",
        "[" * 90_000,
        '{"name": "a", "arguments": "b"}',
    ):
        assert calls_of(plain) is None


def test_a_call_without_markers_is_a_call_only_if_the_whole_turn_is_one():
    bare = '{"name": "look", "parameters": {"at": "x"}}'
    for said in (f"{bare}<|eot_id|>", f"<|python_tag|>{bare}<|eom_id|>"):
        [turn] = turns_of_text(said, "assistant") or []
        assert [(part["kind"], part["calls"]) for part in turn["parts"]] == [
            ("call", [{"name": "look", "arguments": [["at", "x"]]}])
        ]
    assert turns_of_text(f"I call {bare}", "assistant") is None
    users = turns_of_text(f"<|im_start|>user\n{bare}<|im_end|>") or []
    assert [part["kind"] for turn in users for part in turn["parts"]] == ["text"]


def test_only_special_tokens_are_markers_if_the_tokenizer_has_them():
    tokenizer = Tokenizer(BACKEND)
    said = "<tool_call>{}</tool_call><|im_end|>\n<|im_start|>user\n<|user|>hi"
    for ids, number in ((encode(said), 2), (spell(said), 0)):
        texts = token_texts(tokenizer, ids)
        marked = only_real_markers(tokenizer, ids, texts)
        assert len(marked) == len(said) and len(turns_of_tokens(texts, marked) or []) == number
    plain = ["[INST]", "a", "[/INST]"]
    assert only_real_markers(None, [1, 2, 3], plain) == "[INST]a[/INST]"


def test_markers_that_no_token_has_are_found_as_text():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    tokenizer = Tokenizer(Backend(models.WordLevel({"[INST]": 0, "a": 1, "[/INST]": 2, "b": 3})))
    tokenizer.backend.add_special_tokens(["</s>"])
    ids, texts = [0, 1, 2, 3], ["[INST]", "a", "[/INST]", "b"]
    marked = only_real_markers(tokenizer, ids, texts)
    assert [turn["role"] for turn in turns_of_text("".join(texts), "", marked) or []] == [
        "user",
        "assistant",
    ]
