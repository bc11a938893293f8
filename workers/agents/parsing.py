"""Parse the text of a sampled turn: thinking, content and tool calls.

This module reads the formats of Hermes and Qwen, Llama 3, Mistral, and GPT-OSS. vLLM's parsers read
the others (`workers/generation/vllm_rendering.py`). A call that cannot be read stays text, so the
policy's mistake is scored and not hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .protocol_fields import read_arguments

Calls = list[tuple[str, dict[str, Any]]]
"""Names and arguments of tool calls."""

ReadCalls = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, Calls] | None]
"""Return the content and the calls of a text, given the tools; None if it has no readable call."""

ReadThinking = Callable[[str, bool], tuple[str, str]]
"""Return the thinking and the rest of a text. The flag says whether the prompt opened the
thinking."""


@dataclass(frozen=True)
class TurnParser:
    """Parses the text of turns.

    >>> parser = TurnParser(read_hermes, split_thinking("<think>", "</think>"))
    >>> text = 'Add them.</think>I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> parser.parse(text, tools=[{"type": "function"}], thinking=True)
    ('Add them.', 'I add.', [('add', {'a': 1})])
    """

    read_calls: ReadCalls | None = None
    read_thinking: ReadThinking | None = None
    channels: bool = False
    """Whether the text is in the format of GPT-OSS, which has thinking and calls in channels."""
    unknown: str = ""
    """Why the format of the model's tool calls is unknown; empty if it is known, or does not matter."""

    def parse(
        self, text: str, *, tools: Sequence[Mapping[str, Any]], thinking: bool
    ) -> tuple[str, str, Calls]:
        """Return the thinking, the content, and the calls.

        Args:
            text: the turn, without its last stop token. Other special tokens are in it as text.
            tools: tools of the conversation. Without tools, calls stay text.
            thinking: whether the prompt ended inside the model's thinking.
        """
        if self.channels:
            return _read_channels(text, tools)
        thoughts, rest = self.read_thinking(text, thinking) if self.read_thinking else ("", text)
        found = self.read_calls(rest, tools) if self.read_calls and tools else None
        content, calls = found or (rest, [])
        return thoughts, content, calls


def split_thinking(start: str, end: str) -> ReadThinking:
    """Return a function that splits thinking between two tags from the rest.

    >>> split_thinking("<think>", "</think>")("<think>\\nHm.\\n</think>\\n\\nYes.", False)
    ('Hm.', 'Yes.')
    """

    def split(text: str, opened: bool) -> tuple[str, str]:
        before, closed, after = text.partition(end)
        if not (closed or opened or before.lstrip().startswith(start)):
            return "", text
        first, tag, thoughts = before.partition(start)
        if not tag:  # the prompt has the first tag, or the model left it out
            first, thoughts = "", before
        return thoughts.strip("\n"), first + after.lstrip("\n")

    return split


# Formats of tool calls

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"\s*")
_MISTRAL_NAME = re.compile(r"([\w.:-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")


def _skip(text: str, start: int, what: re.Pattern[str] = _BLANK) -> int:
    found = what.match(text, start)
    return found.end() if found else start


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """Return the JSON value at a place and its end."""
    try:
        return _DECODER.raw_decode(text, _skip(text, start))
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and arguments of a call that is an object with these fields."""
    name = value.get("name") if isinstance(value, dict) else None
    if not name or not isinstance(name, str):
        return None
    given = value.get("arguments", value.get("parameters"))
    arguments = given if given is None else read_arguments(given)
    return (name, arguments) if isinstance(arguments, dict) else None


def read_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Calls] | None:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as of Hermes and Qwen. The
    last end tag may be missing."""
    calls, texts, place = Calls(), list[str](), 0
    while (start := text.find("<tool_call>", place)) >= 0:
        texts.append(text[place:start])
        found = _json_at(text, start + len("<tool_call>"))
        call = _call(found[0]) if found else None
        if found is None or call is None:
            return None
        place = _skip(text, found[1])
        if text.startswith("</tool_call>", place):
            place += len("</tool_call>")
        elif place < len(text):
            return None
        calls.append(call)
    return ("".join([*texts, text[place:]]).strip(), calls) if calls else None


def read_llama(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Calls] | None:
    """Read `{"name": ..., "parameters": {...}}` at the end of a text, as of Llama 3. Semicolons
    may separate several."""
    content, tag, rest = text.partition("<|python_tag|>")
    if not tag:
        content, brace, rest = text.partition("{")
        rest = brace + rest
    calls, place = Calls(), _skip(rest, 0)
    while place < len(rest):
        found = _json_at(rest, place)
        call = _call(found[0]) if found else None
        if found is None or call is None:
            return None
        calls.append(call)
        place = _skip(rest, found[1], re.compile(r"[\s;]*"))
    return (content.strip(), calls) if calls else None


def read_mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Calls] | None:
    """Read `[TOOL_CALLS]` with a list of objects, or with a name and its arguments, as of Mistral's
    older and newer models."""
    content, *bodies = text.split("[TOOL_CALLS]")
    calls = Calls()
    for body in map(str.strip, bodies):
        name = "" if body.startswith("[") else _MISTRAL_NAME.match(body)
        found = _json_at(body, name.end()) if name else _json_at(body, 0)
        if found is None or body[found[1] :].strip():
            return None
        values = [{"name": name[1], "arguments": found[0]}] if name else found[0]
        if not isinstance(values, list):
            return None
        read = [_call(value) for value in values]
        if None in read:
            return None
        calls += [call for call in read if call]
    return (content.strip(), calls) if calls else None


def _read_channels(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str, Calls]:
    """Read the messages of a turn of GPT-OSS: thinking in the channel `analysis`, calls with a
    recipient, everything else as content."""
    thoughts, contents, calls = list[str](), list[str](), Calls()
    if "<|message|>" not in text and "<|channel|>" not in text:
        return "", text, calls
    for message in text.split("<|start|>"):
        header, _, body = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|return|call)\|>", body, maxsplit=1)[0]
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        called = recipient and tools and body
        if recipient and isinstance(arguments := read_arguments(body) if called else None, dict):
            calls.append((recipient[1], arguments))
        elif channel and channel[1] == "analysis" and not recipient:
            thoughts.append(body)
        elif body:
            contents.append(body)
    return "\n".join(thoughts), "\n".join(contents), calls


# Choice of a format

FORMATS: dict[str, ReadCalls] = {
    "hermes": read_hermes,
    "llama3_json": read_llama,
    "mistral": read_mistral,
}
"""Maps vLLM's names of parsers to the formats that need no vLLM."""

_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "openai"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call>call:", "gemma4"),
    ("<atem:invoke", "muse_glimmer"),
    ("<|tool_call_start|>", "lfm2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
)
"""Maps texts in chat templates to vLLM's names of tool parsers. The first one counts."""


def tool_format(template: str) -> str:
    """Return vLLM's name of the tool parser for a chat template; "none" if none is known.

    >>> tool_format("... <tool_call> ..."), tool_format("{{ messages[0].content }}")
    ('hermes', 'none')
    """
    found = next((name for sign, name in _SIGNS if sign in template), "none")
    # V3 and R1 write arguments in a block of Markdown, later models do not.
    return "deepseek_v3" if found == "deepseek_v31" and "```json" in template else found


_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def thinking_tags(template: str, tokens: Collection[str]) -> tuple[str, str] | None:
    """Return the tags around a model's thinking, by its chat template and vocabulary; None if it
    has none."""
    return next(((start, end) for start, end in _TAGS if end in template or end in tokens), None)


def opens_thinking(prompt: str) -> bool:
    """Return whether a prompt ends inside the model's thinking.

    >>> opens_thinking("<assistant><think>"), opens_thinking("<assistant><think></think>")
    (True, False)
    """
    return any(prompt.rfind(start) > prompt.rfind(end) for start, end in _TAGS)
