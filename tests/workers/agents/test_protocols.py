"""The real `openai` and `anthropic` clients accept every reply, stream and error, and send back the
turns that were sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from weft.dataflow.errors import RequestError
from weft.workers.agents.messages import Completion, Message, ToolCall, TurnRequest
from weft.workers.agents.protocol import CHAT, MESSAGES, PROTOCOLS, RESPONSES, HttpProtocol
from weft.workers.agents.protocol_fields import read_json

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

LONG = "Ein längerer Satz über Größe, 空は青い, und 😀. " * 9
TEXT = Message("assistant", "It is blue.")
THOUGHT = Message("assistant", LONG, reasoning="Let me think. " * 20)
CALLS = Message(
    "assistant",
    "I look.",
    (ToolCall("ls", {"path": "/tmp/ä"}, "call00001"), ToolCall("now", {}, "call00002")),
    reasoning="Look first.",
)
ONLY_CALL = Message("assistant", "", (ToolCall("now", {}, "call00003"),))
ANSWERS = {"text": TEXT, "thought": THOUGHT, "calls": CALLS, "only a call": ONLY_CALL}

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
LS = {"name": "ls", "description": "Lists files.", "parameters": PARAMETERS}


def complete(message: Message, **fields: Any) -> Completion:
    settings: dict[str, Any] = {"token_ids": [5, 6, 7], "logprobs": [-0.5, -1.0, -2.0]}
    settings |= {"token_texts": ["It", " is", "\ufffd"], "finish_reason": "stop"}
    return Completion(message, **settings | fields)


@dataclass
class Served:
    """A server with canned answers, which keeps the requests that it reads."""

    answers: Sequence[Completion] = ()
    requests: list[TurnRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        routes = [Route(f"/v1{one.path}", self._route(one), methods=["POST"]) for one in PROTOCOLS]
        self.http = TestClient(Starlette(routes=routes))
        self.openai = openai.OpenAI(
            api_key="key", base_url="http://testserver/v1", http_client=self.http, max_retries=0
        )
        self.anthropic = anthropic.Anthropic(
            api_key="key", base_url="http://testserver", http_client=self.http, max_retries=0
        )

    def _route(self, protocol: HttpProtocol) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                turn = protocol.read(await request.json())
            except RequestError as error:
                body = protocol.error(error.status, error.kind, str(error))
                return JSONResponse(body, error.status)
            self.requests.append(turn)
            head = {"id": "id7", "model": turn.model, "prompt_tokens": 11, "created": 1_700_000_000}
            if turn.stream:
                events = protocol.events(turn, self.answers, **head)
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse(protocol.write(turn, self.answers, **head))

        return answer


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.http.close()


USER = {"role": "user", "content": "What color is the sky?"}
answers = pytest.mark.parametrize("message", ANSWERS.values(), ids=ANSWERS)


# Chat Completions


def chat(served: Served, **settings: Any) -> Any:
    return served.openai.chat.completions.create(model="m", messages=[USER], **settings)


@answers
def test_chat_replies_hold_the_message(served: Served, message: Message):
    served.answers = [complete(message)]
    reply = chat(served)
    (choice,) = reply.choices
    assert (choice.message.content or "") == message.content
    assert (
        getattr(choice.message, "reasoning_content", "")
    ) == message.reasoning or not message.reasoning
    calls = [
        (c.id, c.function.name, json.loads(c.function.arguments))
        for c in choice.message.tool_calls or ()
    ]
    assert calls == [(c.id, c.name, c.arguments) for c in message.tool_calls]
    assert choice.finish_reason == ("tool_calls" if message.tool_calls else "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (
        11,
        3,
        14,
    )


@answers
def test_chat_streams_add_up_to_the_reply(served: Served, message: Message):
    served.answers = [complete(message)]
    whole = chat(served).choices[0]
    manager = served.openai.chat.completions.stream(
        model="m", messages=[USER], stream_options={"include_usage": True}
    )
    with manager as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion()
    (choice,) = found.choices
    assert (choice.message.content or "") == (whole.message.content or "")
    assert (getattr(choice.message, "reasoning_content", "") or "") == message.reasoning
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert calls == [
        (c.id, c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()
    ]
    assert choice.finish_reason == whole.finish_reason
    assert found.usage.total_tokens == 14


def test_usage_is_in_the_last_chunk_if_the_client_asks(served: Served):
    served.answers = [complete(TEXT)]
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
    assert all(chunk.choices and chunk.usage is None for chunk in chat(served, stream=True))


def test_long_texts_come_in_a_handful_of_pieces(served: Served):
    served.answers = [complete(THOUGHT)]
    deltas = [chunk.choices[0].delta.content for chunk in chat(served, stream=True)]
    pieces = [delta for delta in deltas if delta]
    assert 2 <= len(pieces) <= 8 and "".join(pieces) == THOUGHT.content


def test_several_samples_are_several_choices(served: Served):
    served.answers = [complete(TEXT), complete(CALLS, finish_reason="length")]
    choices = chat(served, n=2).choices
    assert [choice.index for choice in choices] == [0, 1]
    assert [choice.finish_reason for choice in choices] == ["stop", "length"]
    ends = {c.choices[0].index: c.choices[0].finish_reason for c in chat(served, n=2, stream=True)}
    assert ends == {0: "stop", 1: "length"}
    assert served.requests[-1].n == 2


def test_logprobs_are_one_per_token_and_only_if_asked_for(served: Served):
    served.answers = [complete(TEXT, logprobs=[-0.5, -1.0, float("-inf")])]
    content = chat(served, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["It", " is", "\ufffd"]
    assert [entry.logprob for entry in content] == [-0.5, -1.0, -9999.0]
    assert content[0].bytes == [73, 116] and content[2].bytes is None
    assert content[0].top_logprobs[0].token == "It"
    streamed = [chunk.choices[0].logprobs for chunk in chat(served, logprobs=True, stream=True)]
    assert [len(entry.content) for entry in streamed if entry] == [3]
    assert chat(served).choices[0].logprobs is None


def test_chat_parameters_are_read(served: Served):
    served.answers = [complete(TEXT)]
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    chat(
        served,
        max_completion_tokens=9,
        stop=["\n\n", "END"],
        temperature=0.2,
        top_p=1.0,
        seed=3,
        tools=[{"type": "function", "function": LS}],
        tool_choice="required",
        response_format=shape,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "top_k": -1, "min_p": 0.1},
    )
    (turn,) = served.requests
    assert (turn.model, turn.max_tokens, turn.stop) == ("m", 9, ("\n\n", "END"))
    assert turn.overridden == ("temperature", "min_p", "seed", "tool_choice", "response_format")
    assert turn.conversation.tools == ({"type": "function", "function": LS},)
    assert turn.conversation.template_arguments == {"enable_thinking": False}
    assert turn.conversation.messages == (Message("user", USER["content"]),)


# Responses


def respond(served: Served, **settings: Any) -> Any:
    return served.openai.responses.create(**{"model": "m", "input": [USER]} | settings)


def response_message(response: Any) -> Message:
    """Return the assistant's message of a reply of Responses."""
    items = [item.to_dict() for item in response.output]
    turn = RESPONSES.read({"input": [USER, *items]})
    return turn.conversation.messages[1]


@answers
def test_responses_hold_the_message(served: Served, message: Message):
    served.answers = [complete(message)]
    reply = respond(served)
    assert reply.output_text == message.content
    assert response_message(reply) == message
    assert response_message(reply).reasoning == message.reasoning
    assert reply.status == "completed" and reply.error is None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (11, 3, 14)


@answers
def test_streamed_responses_add_up_to_the_reply(served: Served, message: Message):
    served.answers = [complete(message)]
    whole = respond(served)
    texts, thoughts, arguments, numbers = [], [], [], []
    with served.openai.responses.stream(model="m", input=[USER]) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            elif event.type == "response.reasoning_text.delta":
                thoughts.append(event.delta)
            elif event.type == "response.function_call_arguments.delta":
                arguments.append(event.delta)
        found = stream.get_final_response()
    assert "".join(texts) == message.content and "".join(thoughts) == message.reasoning
    assert "".join(arguments) == "".join(call.arguments_text for call in message.tool_calls)
    assert response_message(found) == message
    assert [item.id for item in found.output] == [item.id for item in whole.output]
    assert found.usage == whole.usage
    assert sorted(set(numbers)) == sorted(numbers)


def test_a_response_that_was_cut_off_says_so(served: Served):
    served.answers = [complete(TEXT, finish_reason="length")]
    reply = respond(served, max_output_tokens=3)
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    events = list(respond(served, stream=True))
    assert events[-1].type == "response.incomplete"


def test_response_parameters_are_read(served: Served):
    served.answers = [complete(TEXT)]
    respond(
        served,
        instructions="Be brief.",
        input="Hi",
        max_output_tokens=9,
        temperature=0.0,
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        tools=[{"type": "function", "strict": True, **LS}],
        text={"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS, "strict": True}},
    )
    (turn,) = served.requests
    assert turn.conversation.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert turn.conversation.tools == ({"type": "function", "function": {**LS, "strict": True}},)
    assert turn.conversation.template_arguments == {"reasoning_effort": "low"}
    assert (turn.max_tokens, turn.logprobs) == (9, True)
    assert turn.overridden == ("temperature", "response_format")


def test_items_of_one_turn_become_one_message_and_those_of_two_turns_two():
    items = [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "A"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "B"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        {"type": "function_call", "call_id": "3", "name": "h", "arguments": "{}"},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "C"}]},
        {"role": "assistant", "content": "D"},
        {"role": "assistant", "content": "E"},
    ]
    found = RESPONSES.read({"input": items}).conversation.messages
    assert found == (
        Message("assistant", "B", (ToolCall("f", {}), ToolCall("g", {}))),
        Message("tool", "one"),
        Message("tool", "two"),
        Message("assistant", "", (ToolCall("h", {}),)),
        Message("assistant", "D"),
        Message("assistant", "E"),
    )
    assert [message.reasoning for message in found] == ["A", "", "", "", "C", ""]


# Messages


def message_reply(served: Served, **settings: Any) -> Any:
    return served.anthropic.messages.create(
        **{"model": "m", "max_tokens": 9, "messages": [USER]} | settings
    )


def anthropic_message(reply: Any) -> Message:
    """Return the assistant's message of a reply of Messages."""
    content = [block.to_dict() for block in reply.content]
    history = [USER, {"role": "assistant", "content": content}, USER]
    return MESSAGES.read({"messages": history}).conversation.messages[1]


@answers
def test_messages_hold_the_message(served: Served, message: Message):
    served.answers = [complete(message)]
    reply = message_reply(served)
    assert anthropic_message(reply) == message
    assert anthropic_message(reply).reasoning == message.reasoning
    assert reply.stop_reason == ("tool_use" if message.tool_calls else "end_turn")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (11, 3)


@answers
def test_streamed_messages_add_up_to_the_reply(served: Served, message: Message):
    served.answers = [complete(message)]
    whole = message_reply(served)
    with served.anthropic.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        for _ in stream:
            pass
        found = stream.get_final_message()
    assert anthropic_message(found) == message
    assert [block.type for block in found.content] == [block.type for block in whole.content]
    assert found.stop_reason == whole.stop_reason
    assert (found.usage.input_tokens, found.usage.output_tokens) == (11, 3)


def test_stop_reasons_of_messages(served: Served):
    served.answers = [complete(CALLS, finish_reason="length")]
    assert message_reply(served).stop_reason == "max_tokens"
    served.answers = [complete(TEXT, stop_string="END")]
    reply = message_reply(served, stop_sequences=["END"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
    assert served.requests[-1].stop == ("END",)


def test_message_parameters_are_read(served: Served):
    served.answers = [complete(TEXT)]
    served.http.post(
        "/v1/messages",
        json={
            "model": "m",
            "max_tokens": 9,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b;"},
                {"type": "text", "text": "Be brief."},
                {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [USER],
            "thinking": {"type": "disabled"},
            "top_k": 5,
            "tools": [{"name": "ls", "description": "Lists files.", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
        },
    ).raise_for_status()
    (turn,) = served.requests
    system, _ = turn.conversation.messages
    assert system == Message("system", "Be brief.\nBe kind.")
    assert turn.conversation.tools == ({"type": "function", "function": LS},)
    assert turn.conversation.template_arguments == {"enable_thinking": False}
    assert turn.overridden == ("top_k", "tool_choice", "response_format")


def test_tool_results_become_messages_in_the_order_of_the_blocks():
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]}
    content = [result, {**result, "tool_use_id": "2", "content": "two"}]
    content += [{"type": "text", "text": "Go on,"}, {"type": "text", "text": "please."}]
    found = MESSAGES.read({"messages": [{"role": "user", "content": content}]}).conversation.messages
    assert found == (Message("tool", "one"), Message("tool", "two"), Message("user", "Go on,\nplease."))
    assert [message.tool_call_id for message in found] == ["1", "2", ""]


# All protocols

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
OBJECTS = st.dictionaries(
    TEXTS, st.recursive(st.none() | st.booleans() | TEXTS | st.integers(), st.lists), max_size=3
)
CALL = st.builds(ToolCall, TEXTS.filter(bool), OBJECTS, st.just("call00009"))
SAMPLED = st.builds(Message, st.just("assistant"), TEXTS, st.lists(CALL, max_size=2).map(tuple), TEXTS)


@pytest.mark.pitfall(5)
@settings(max_examples=25, deadline=None)
@given(SAMPLED)
def test_a_turn_that_is_sent_back_is_the_sampled_turn(message: Message):
    head = {"id": "id7", "model": "m", "prompt_tokens": 1, "created": 0}

    def reply(protocol: HttpProtocol) -> Any:
        turn = TurnRequest(CHAT.read({"messages": [USER]}).conversation)
        return json.loads(json.dumps(protocol.write(turn, [complete(message)], **head)))

    def back(protocol: HttpProtocol, **body: Any) -> Message:
        return protocol.read(body).conversation.messages[1]

    sent = reply(CHAT)["choices"][0]["message"]
    found = [back(CHAT, messages=[USER, sent])]
    found.append(back(RESPONSES, input=[USER, *reply(RESPONSES)["output"]]))
    sent = {"role": "assistant", "content": reply(MESSAGES)["content"]}
    found.append(back(MESSAGES, messages=[USER, sent, USER]))
    assert all(message.identity == one.identity for one in found)
    assert all(message.reasoning == one.reasoning for one in found)
    for one in found:
        assert [call["function"]["arguments"] for call in one.as_template().get("tool_calls", ())] == [
            call.arguments for call in message.tool_calls
        ]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
ASSISTANT = {"role": "assistant", "content": "It is"}

WRONG: list[tuple[HttpProtocol, dict[str, Any], str]] = [
    (CHAT, {}, "messages: is missing"),
    (CHAT, {"messages": []}, "messages: the list is empty"),
    (CHAT, {"messages": [USER], "n": 0}, "n: 0 is below 1"),
    (CHAT, {"messages": [USER], "n": True}, "n: True is not an integer"),
    (CHAT, {"messages": [USER], "max_tokens": "9"}, "max_tokens: '9' is not an integer"),
    (CHAT, {"messages": [USER], "stop": [""]}, "stop: [''] is neither a text nor a list of texts"),
    (CHAT, {"messages": [{"role": "king", "content": ""}]}, "messages[0].role: 'king' is not one of system"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: a part of type 'image_url'"),
    (CHAT, {"messages": [USER, {"role": "tool", "content": 4}]}, "messages[1].content: 4 is neither"),
    (CHAT, {"messages": [USER, {"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[1].tool_calls: a message"),
    (CHAT, {"messages": [USER], "functions": [{}]}, "functions: the field is obsolete"),
    (CHAT, {"messages": [USER], "tools": [{"type": "web_search"}]}, "tools[0].type: 'web_search' runs at"),
    (CHAT, {"messages": [USER], "tools": [{"function": {}}]}, "tools[0].function.name: is missing"),
    (CHAT, {"messages": [USER, ASSISTANT], "continue_final_message": True}, "continue_final_message: Weft does not"),
    (CHAT, {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt: Weft does not"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: Weft sets"),
    (RESPONSES, {"input": 4}, "input: 4 is not a list"),
    (RESPONSES, {"input": []}, "input: the list is empty"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]: a part of type"),
    (RESPONSES, {"input": "a", "previous_response_id": "r"}, "previous_response_id: Weft stores no responses"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type: 'computer_call' is not one of message"),
    (RESPONSES, {"input": "a", "tools": [{"type": "custom", "name": "f"}]}, "tools[0].parameters: is missing"),
    (MESSAGES, {"messages": [USER, ASSISTANT]}, "messages[1]: Weft does not continue"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: a block of type 'image'"),
    (MESSAGES, {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: 'bash_20250124'"),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "body", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_requests_are_refused_by_the_name_of_the_field(
    protocol: HttpProtocol, body: Any, text: str
):
    with pytest.raises(RequestError) as caught:
        protocol.read(body)
    assert str(caught.value).startswith(text)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")


def test_clients_raise_their_own_errors_with_our_text(served: Served):
    with pytest.raises(openai.BadRequestError, match=r"n: 0 is below 1") as caught:
        chat(served, n=0)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="Weft stores no responses"):
        respond(served, previous_response_id="r")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: 0 is below 1") as caught:
        message_reply(served, max_tokens=0)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_lone_surrogates_in_requests_become_encodable():
    escaped = rb'{"a\ud800": ["b\udc00c", {"d": "\ud83d\ude00"}], "e": 1}'
    wanted = {"a\ufffd": ["b\ufffdc", {"d": "\U0001f600"}], "e": 1}
    assert read_json(escaped) == wanted
    assert read_json(json.dumps(wanted, ensure_ascii=False).encode()) == wanted
    assert read_json('"\ud800"'.encode(errors="surrogatepass")) == "\ufffd"
