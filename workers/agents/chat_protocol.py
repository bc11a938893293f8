"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import Unpack

from .messages import ROLES, Completion, Conversation, Message, ToolCall, TurnRequest
from .protocol_fields import (
    MOST_CHOICES,
    Fields,
    Head,
    Json,
    event,
    pieces,
    read_arguments,
    write_logprobs,
)


class _Chat:
    path = "/chat/completions"

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        fields = Fields(body)
        fields.refuse_prefill()
        if not fields.require("messages", list):
            raise fields.wrong("messages", "the list is empty; send at least one message")
        if body.get("functions"):
            raise fields.wrong("functions", "the field is obsolete; send `tools`")
        return TurnRequest(
            conversation=Conversation(
                tuple(_read_message(item) for item in fields.objects("messages")),
                fields.tools("function"),
                fields.template_arguments(reasoning_effort=fields.get("reasoning_effort", str)),
            ),
            n=fields.count("n", highest=MOST_CHOICES) or 1,
            max_tokens=fields.count("max_completion_tokens") or fields.count("max_tokens"),
            stop=fields.stop("stop"),
            stream=fields.get("stream", bool) or False,
            include_usage=fields.inner("stream_options").get("include_usage", bool) or False,
            logprobs=fields.get("logprobs", bool) or False,
            top_logprobs=fields.count("top_logprobs", 0) or 0,
            overridden=fields.overridden(fields.get("response_format", dict)),
            model=fields.string("model"),
        )

    def write(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Json:
        choices: list[Json] = []
        for index, completion in enumerate(completions):
            message = completion.message
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_text},
                }
                for call in message.tool_calls
            ]
            written = {
                "role": "assistant",
                "content": message.content or (None if calls else ""),
                "refusal": None,
                **({"tool_calls": calls} if calls else {}),
                **_thinking(message.reasoning),
            }
            choices.append({"index": index, "message": written, **_end(request, completion)})
        return {
            "id": head["id"],
            "object": "chat.completion",
            "created": head["created"],
            "model": head["model"],
            "choices": choices,
            "usage": _usage(completions, head["prompt_tokens"]),
        }

    def events(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Iterator[bytes]:
        begin: Json = {"id": head["id"], "object": "chat.completion.chunk"}
        begin |= {"created": head["created"], "model": head["model"]}

        def chunk(index: int, delta: Json, **end: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | end
            usage = {"usage": None} if request.include_usage else {}
            return event({**begin, "choices": [choice], **usage})

        for index, completion in enumerate(completions):
            message = completion.message
            yield chunk(index, {"role": "assistant", "content": ""})
            for piece in pieces(message.reasoning):
                yield chunk(index, _thinking(piece))
            for piece in pieces(message.content):
                yield chunk(index, {"content": piece})
            for number, call in enumerate(message.tool_calls):
                function = {"name": call.name, "arguments": ""}
                opened = {"index": number, "id": call.id, "type": "function", "function": function}
                yield chunk(index, {"tool_calls": [opened]})
                for piece in pieces(call.arguments_text):
                    grown = {"index": number, "function": {"arguments": piece}}
                    yield chunk(index, {"tool_calls": [grown]})
            yield chunk(index, {}, **_end(request, completion))
        if request.include_usage:
            usage = _usage(completions, head["prompt_tokens"])
            yield event({**begin, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, kind: str, message: str) -> Json:
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


CHAT = _Chat()


def _read_message(item: Fields) -> Message:
    role = item.one_of("role", ROLES)
    calls: list[ToolCall] = []
    for call in item.objects("tool_calls"):
        if call.values.get("type", "function") != "function":
            raise call.wrong("type", f"{call.values['type']!r} is not 'function'")
        function = call.inner("function")
        name, arguments = function.require("name", str), function.values.get("arguments")
        calls.append(ToolCall(name, read_arguments(arguments), call.string("id")))
    if calls and role != "assistant":
        raise item.wrong("tool_calls", f"a message of role {role!r} cannot call tools")
    return Message(
        role,
        item.text("content") or item.string("refusal"),
        tuple(calls),
        item.string("reasoning_content", "reasoning"),
        item.string("name"),
        item.string("tool_call_id"),
    )


def _thinking(text: str) -> Json:
    # DeepSeek gave the field its first name, OpenRouter and vLLM its second.
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _end(request: TurnRequest, completion: Completion) -> Json:
    called = completion.message.tool_calls and completion.finish_reason == "stop"
    logprobs = request.logprobs and {"content": write_logprobs(request, completion), "refusal": None}
    return {
        "finish_reason": "tool_calls" if called else completion.finish_reason,
        "logprobs": logprobs or None,
        "stop_reason": completion.stop_string or None,
    }


def _usage(completions: Sequence[Completion], prompt_tokens: int) -> Json:
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
