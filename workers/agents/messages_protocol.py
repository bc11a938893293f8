"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import Unpack

from .messages import Completion, Conversation, Message, ToolCall, TurnRequest
from .protocol_fields import Fields, Head, Json, event, pieces, read_arguments

_BILLING = "x-anthropic-billing-header"
"""Start of a block in Claude Code's system prompt. The block differs in each request, so the
requests of a conversation would have no common prefix."""


class _Messages:
    path = "/messages"

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        fields = Fields(body)
        if not (items := fields.require("messages", list)):
            raise fields.wrong("messages", "the list is empty; send at least one message")
        system = _read_system(fields, "system")
        messages = [Message("system", system)] if system else []
        for item in fields.objects("messages"):
            messages += _read_item(item)
        if messages and messages[-1].role == "assistant":
            raise fields.prefill(f"messages[{len(items) - 1}]")
        output = fields.inner("output_config")
        disabled = fields.inner("thinking").values.get("type") == "disabled"
        return TurnRequest(
            conversation=Conversation(
                tuple(messages),
                fields.tools(parameters="input_schema"),
                fields.template_arguments(
                    reasoning_effort=output.get("effort", str),
                    enable_thinking=False if disabled else None,
                ),
            ),
            max_tokens=fields.count("max_tokens"),
            stop=fields.stop("stop_sequences"),
            stream=fields.get("stream", bool) or False,
            include_usage=True,
            overridden=fields.overridden(output.inner("format").values),
            model=fields.string("model"),
        )

    def write(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Json:
        (completion,) = completions
        message, blocks = completion.message, list[Json]()
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": "weft"})
        if message.content or not message.tool_calls:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            given = call.arguments if isinstance(call.arguments, dict) else {"input": call.arguments}
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        if completion.finish_reason == "length":
            reason = "max_tokens"
        elif message.tool_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if completion.stop_string else "end_turn"
        return {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": completion.stop_string if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": head["prompt_tokens"],
                "output_tokens": len(completion.token_ids),
            },
        }

    def events(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Iterator[bytes]:
        done = self.write(request, completions, **head)

        def named(kind: str, /, **fields: Any) -> bytes:
            return event({"type": kind, **fields}, kind)

        begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**done["usage"], "output_tokens": 0}
        yield named("message_start", message={**done, **begun})
        for index, block in enumerate(done["content"]):
            if block["type"] == "tool_use":
                empty: Json = {"input": {}}
                text, delta, grown = json.dumps(block["input"]), "input_json_delta", "partial_json"
            else:
                empty = {block["type"]: "", **({"signature": ""} if "signature" in block else {})}
                text, delta, grown = block[block["type"]], f"{block['type']}_delta", block["type"]
            yield named("content_block_start", index=index, content_block={**block, **empty})
            for piece in pieces(text):
                yield named("content_block_delta", index=index, delta={"type": delta, grown: piece})
            if "signature" in block:
                signed = {"type": "signature_delta", "signature": block["signature"]}
                yield named("content_block_delta", index=index, delta=signed)
            yield named("content_block_stop", index=index)
        end = {"stop_reason": done["stop_reason"], "stop_sequence": done["stop_sequence"]}
        yield named("message_delta", delta=end, usage=done["usage"])
        yield named("message_stop")

    def error(self, status: int, kind: str, message: str) -> Json:
        return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = _Messages()


def _read_system(fields: Fields, name: str) -> str:
    content = fields.values.get(name)
    if isinstance(content, list):
        kept = [block for block in content if not _is_billing(block)]
        fields = Fields({name: kept}, fields.place)
    return fields.text(name)


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(_BILLING)


def _read_item(item: Fields) -> list[Message]:
    """Return the messages of an item. Each result of a tool becomes a separate message."""
    role = item.one_of("role", ("user", "assistant", "system"))
    if role == "system":
        text = _read_system(item, "content")
        return [Message("system", text)] if text else []
    if not isinstance(item.values.get("content"), list):
        return [Message(role, item.text("content"))]
    found: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []

    def close() -> None:
        found.append(Message(role, "\n".join(texts), tuple(calls), "\n".join(thoughts)))
        texts.clear()

    for block in item.objects("content"):
        kind = block.values.get("type")
        if kind == "text":
            texts.append(block.require("text", str))
        elif kind == "tool_result" and role == "user":
            if texts:
                close()
            answered = block.string("tool_use_id")
            found.append(Message("tool", block.text("content"), tool_call_id=answered))
        elif kind == "tool_use" and role == "assistant":
            arguments = read_arguments(block.values.get("input"))
            calls.append(ToolCall(block.require("name", str), arguments, block.string("id")))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(block.require("thinking", str))
        elif kind != "redacted_thinking":
            raise block.wrong("", f"a block of type {kind!r} from the {role}, which Weft cannot read")
    if texts or not found:
        close()
    return found
