"""OpenAI's Responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from .chat_protocol import CHAT
from .messages import Completion, Conversation, Message, ToolCall, TurnRequest
from .protocol_fields import (
    Fields,
    Head,
    Json,
    event,
    pieces,
    read_arguments,
    write_logprobs,
)

_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_STORED = ("previous_response_id", "conversation", "prompt", "background")


class _Responses:
    path = "/responses"

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        fields = Fields(body)
        fields.refuse_prefill()
        for name in _STORED:
            if body.get(name):
                raise fields.wrong(
                    name, "Weft stores no responses; send the whole conversation as input"
                )
        messages: list[Message] = []
        if instructions := fields.string("instructions"):
            messages.append(Message("system", instructions))
        if isinstance(given := body.get("input"), str):
            messages.append(Message("user", given))
        elif not fields.require("input", list):
            raise fields.wrong("input", "the list is empty; send at least one message")
        else:
            for item in fields.objects("input"):
                _read_item(item, messages)
        return TurnRequest(
            conversation=Conversation(
                tuple(messages),
                fields.tools(),
                fields.template_arguments(reasoning_effort=fields.inner("reasoning").get("effort", str)),
            ),
            max_tokens=fields.count("max_output_tokens"),
            stop=fields.stop("stop"),
            stream=fields.get("stream", bool) or False,
            include_usage=True,
            logprobs="message.output_text.logprobs" in (fields.get("include", list) or ()),
            top_logprobs=fields.count("top_logprobs", 0) or 0,
            overridden=fields.overridden(fields.inner("text").inner("format").values),
            model=fields.string("model"),
        )

    def write(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Json:
        (completion,) = completions
        cut, sampled = completion.finish_reason == "length", len(completion.token_ids)
        return _begin(request, head) | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _write_items(request, completion, head["id"]),
            "usage": {
                "input_tokens": head["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": head["prompt_tokens"] + sampled,
            },
        }

    def events(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Iterator[bytes]:
        done = self.write(request, completions, **head)
        numbers = itertools.count()

        def named(name: str, /, **fields: Any) -> bytes:
            kind = f"response.{name}"
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        for name in ("created", "in_progress"):
            yield named(name, response=_begin(request, head))
        for index, item in enumerate(done["output"]):
            place: Json = {"item_id": item["id"], "output_index": index}
            called = item["type"] == "function_call"
            empty = {"status": "in_progress", **({"arguments": ""} if called else {"content": []})}
            yield named("output_item.added", output_index=index, item={**item, **empty})
            if called:
                for piece in pieces(item["arguments"]):
                    yield named("function_call_arguments.delta", **place, delta=piece)
                finished = {"arguments": item["arguments"], "name": item["name"]}
                yield named("function_call_arguments.done", **place, **finished)
            else:
                (part,) = item["content"]
                place["content_index"] = 0
                logprobs = {"logprobs": []} if "logprobs" in part else {}
                yield named("content_part.added", **place, part={**part, "text": "", **logprobs})
                for piece in pieces(part["text"]):
                    yield named(f"{part['type']}.delta", **place, delta=piece, **logprobs)
                if logprobs:
                    logprobs = {"logprobs": part["logprobs"]}
                yield named(f"{part['type']}.done", **place, text=part["text"], **logprobs)
                yield named("content_part.done", **place, part=part)
            yield named("output_item.done", output_index=index, item=item)
        yield named(done["status"], response=done)

    error = staticmethod(CHAT.error)


RESPONSES = _Responses()


def _read_item(item: Fields, messages: list[Message]) -> None:
    """Append an item to the messages. A turn of the assistant is several items: its reasoning, its
    text and its calls, in this order. They become one message."""
    values = item.values
    if item.string("type") in ("", "message"):
        role = item.one_of("role", ("system", "developer", "user", "assistant"))
        added = Message(role, item.text("content"))
    elif (kind := item.one_of("type", _ITEMS)) == "reasoning":
        name = "content" if values.get("content") else "summary"
        parts = [part.require("text", str) for part in item.objects(name)]
        added = Message("assistant", "", reasoning="\n".join(parts))
    elif kind == "function_call":
        arguments = read_arguments(values.get("arguments"))
        call = ToolCall(item.require("name", str), arguments, item.string("call_id"))
        added = Message("assistant", "", (call,))
    else:
        messages.append(Message("tool", item.text("output"), tool_call_id=item.string("call_id")))
        return
    last = messages[-1] if messages else added
    continues = bool(messages) and last.role == added.role == "assistant"
    if not added.tool_calls:
        twice = (added.reasoning and last.reasoning) or last.content or last.tool_calls
        continues = continues and not twice
    if not continues:
        messages.append(added)
        return
    messages[-1] = replace(
        last,
        content=last.content or added.content,
        tool_calls=last.tool_calls + added.tool_calls,
        reasoning=last.reasoning or added.reasoning,
    )


def _begin(request: TurnRequest, head: Head) -> Json:
    """Return a response before its first token."""
    tools = [
        {"type": "function", "strict": None, **tool["function"]} for tool in request.conversation.tools
    ]
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": tools,
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _write_items(request: TurnRequest, completion: Completion, id: str) -> list[Json]:
    message, items = completion.message, list[Json]()
    status = "completed" if completion.finish_reason == "stop" else "incomplete"

    def add(kind: str, prefix: str, **fields: Any) -> None:
        items.append({"id": f"{prefix}_{id}_{len(items)}", "type": kind, "status": status, **fields})

    if message.reasoning:
        part = {"type": "reasoning_text", "text": message.reasoning}
        add("reasoning", "rs", summary=[], content=[part])
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": []}
        part["logprobs"] = write_logprobs(request, completion) if request.logprobs else []
        add("message", "msg", role="assistant", content=[part])
    for call in message.tool_calls:
        add("function_call", "fc", call_id=call.id, name=call.name, arguments=call.arguments_text)
    return items
