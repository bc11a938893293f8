"""Conversations of messages, and requests and completions of single turns. They are the same for
all protocols."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. Two calls are equal if their names and arguments are; ids do not count.

    >>> ToolCall("add", {"a": 1, "b": 2}, id="x") == ToolCall("add", {"b": 2, "a": 1.0}, id="y")
    True
    """

    name: str
    arguments: Any
    """A JSON object, or the text that the model or harness wrote if it is not one."""
    id: str = field(default="", compare=False)

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        kept = isinstance(self.arguments, str)
        return self.arguments if kept else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Message:
    """One message of a conversation. `content` is text, with text parts joined by newlines."""

    role: str
    """One of `ROLES`."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = field(default="", compare=False)
    """Thinking of the model. Harnesses may drop it, so comparisons ignore it."""
    name: str = ""
    tool_call_id: str = field(default="", compare=False)

    @property
    def identity(self) -> str:
        """A text that is equal for messages that count as the same.

        Ids and reasoning do not count, because clients replace or drop them. Nor do white space around
        an assistant's content, and an assistant's name. Arguments are compared as JSON values.

        >>> sampled = Message("assistant", "Let me see.\\n", (ToolCall("ls", {"path": "."}, "a1"),), reasoning="Hm.")
        >>> sampled.identity == Message("assistant", "Let me see.", (ToolCall("ls", {"path": "."}, "b2"),)).identity
        True
        """
        if self.role == "assistant":
            calls = [[call.name, json_value(call.arguments)] for call in self.tool_calls]
            return json.dumps([self.role, self.content.strip(), calls], sort_keys=True)
        return json.dumps([self.role, self.content, self.name])

    def as_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it, with arguments as objects."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.reasoning:
            found["reasoning_content"] = found["reasoning"] = self.reasoning
            # GPT-OSS calls it thinking, and refuses thinking and content next to tool calls.
            if not (self.content and self.tool_calls):
                found["thinking"] = self.reasoning
        if self.name:
            found["name"] = self.name
        if self.tool_call_id:
            found["tool_call_id"] = self.tool_call_id
        return found


@dataclass(frozen=True)
class Conversation:
    """Everything that a chat template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the schema of Chat Completions, whatever the protocol."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    add_generation_prompt: bool = True


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn, as read from any protocol."""

    conversation: Conversation
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    overridden: tuple[str, ...] = ()
    """Names of sent parameters that the trainer sets itself, such as `temperature`."""
    model: str = ""


@dataclass(frozen=True)
class Completion:
    """One sampled turn, to be written as a reply."""

    message: Message
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probabilities of `token_ids`."""
    token_texts: Sequence[str]
    """Texts of `token_ids`, one per token."""
    finish_reason: Literal["stop", "length"]
    stop_string: str = ""
    """The stop string that ended the turn, if any."""


DEEPEST = 100
"""Maximum nesting of a call's arguments."""


def json_value(value: Any, depth: int = 0) -> Any:
    """Return arguments with one form for equal numbers. Clients may send 1 for 1.0. Raises a ValueError
    if they are nested too deeply."""
    if depth > DEEPEST:
        raise ValueError(f"the arguments have more than {DEEPEST} levels")
    if isinstance(value, Mapping):
        return {name: json_value(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each, depth + 1) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
