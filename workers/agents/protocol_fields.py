"""The parts that the protocols share: read fields of requests, and write events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from ...dataflow.errors import RequestError
from .messages import Completion, TurnRequest, json_value

Json = dict[str, Any]

T = TypeVar("T")


class Head(TypedDict):
    """Facts about a reply."""

    id: str
    model: str
    prompt_tokens: int
    created: int
    """[s since 1970]"""


# Read

MOST_CHOICES = 128
"""Maximum number of choices (`n`) of a request."""

_KINDS: dict[type, str] = {
    int: "an integer",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Maps types of content parts to the field with their text."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "seed": (),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "tool_choice": ("auto", {"type": "auto"}),
    "parallel_tool_calls": (True,),
}
"""Maps parameters that the trainer sets to the values that change nothing."""

_RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_last", "chat_template"),
    "self",
)
"""Names in `chat_template_kwargs` that Weft fills itself."""


class Fields:
    """An object in a request's body. Its methods raise `RequestError`s that name the field.

    >>> Fields({"n": "two"}).get("n", int)
    Traceback (most recent call last):
    weft.dataflow.errors.RequestError: n: 'two' is not an integer
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.values = values
        self.place = place

    def wrong(self, name: str, problem: str) -> RequestError:
        """Return the error for a field; for the object itself if `name` is empty."""
        place = ".".join(filter(None, (self.place, name)))
        return RequestError(400, "invalid_request_error", f"{place}: {problem}")

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a field of a type; None if it is missing or null."""
        value = self.values.get(name)
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise self.wrong(name, f"{short(value)} is not {_KINDS[kind]}")

    def require(self, name: str, kind: type[T]) -> T:
        value = self.get(name, kind)
        if value is None:
            raise self.wrong(name, f"is missing; it must be {_KINDS[kind]}")
        return value

    def count(self, name: str, lowest: int = 1, highest: int | None = None) -> int | None:
        value = self.get(name, int)
        if value is not None and value < lowest:
            raise self.wrong(name, f"{value} is below {lowest}")
        if value is not None and highest is not None and value > highest:
            raise self.wrong(name, f"{value} is above {highest}; send several requests")
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str:
        value = self.require(name, str)
        if value not in known:
            raise self.wrong(name, f"{short(value)} is not one of {', '.join(known)}")
        return value

    def inner(self, name: str) -> Fields:
        """Return the object in a field; an empty one if it is missing."""
        return Fields(self.get(name, dict) or {}, ".".join(filter(None, (self.place, name))))

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list; none if it is missing."""
        for number, value in enumerate(self.get(name, list) or ()):
            place = f"{name}[{number}]"
            if not isinstance(value, dict):
                raise self.wrong(place, f"{short(value)} is not an object")
            yield Fields(value, ".".join(filter(None, (self.place, place))))

    def string(self, *names: str) -> str:
        """Return the first string in the named fields; "" if there is none."""
        return next((found for name in names if (found := self.get(name, str))), "")

    def text(self, name: str) -> str:
        """Return content: a string, or a list of text parts, joined by newlines."""
        content = self.values.get(name)
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise self.wrong(name, f"{short(content)} is neither a string nor a list of parts")
        texts: list[str] = []
        for part in self.objects(name):
            kind = part.values.get("type", "text")
            if kind not in _TEXT_PARTS:
                raise part.wrong(
                    "", f"a part of type {short(kind)}, but Weft serves text only to harnesses"
                )
            texts.append(part.require(_TEXT_PARTS[kind], str))
        return "\n".join(texts)

    def tools(self, nested: str = "", parameters: str = "parameters") -> tuple[Json, ...]:
        """Return the tools in the schema of Chat Completions.

        Args:
            nested: field of a tool that has its name and schema; "" if the tool has them itself.
            parameters: field with the JSON schema of its parameters.
        """
        found: list[Json] = []
        for tool in self.objects("tools"):
            if (kind := tool.values.get("type")) not in (None, "function", "custom"):
                hosted = f"{short(kind)} runs at OpenAI or Anthropic; give a function instead"
                raise tool.wrong("type", hosted)
            given = tool.inner(nested) if nested else tool
            fields = {
                "name": given.require("name", str),
                "description": given.get("description", str),
                # OpenAI's custom tools have no schema, because they take any text.
                "parameters": (given.require if kind == "custom" else given.get)(parameters, dict),
                "strict": given.get("strict", bool),
            }
            kept = {name: value for name, value in fields.items() if value is not None}
            found.append({"type": "function", "function": kept})
        return tuple(found)

    def stop(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
            raise self.wrong(name, f"{short(value)} is neither a text nor a list of texts")
        return tuple(values)

    def template_arguments(self, **found: Any) -> Json:
        """Return the variables for the chat template. Those in `chat_template_kwargs` take
        precedence over `found`, whose Nones are dropped."""
        given = self.inner("chat_template_kwargs")
        for name in _RESERVED:
            if name in given.values:
                raise given.wrong(name, "Weft sets this variable; leave it out")
        return {name: value for name, value in found.items() if value is not None} | dict(given.values)

    def overridden(self, form: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Return the names of parameters that the trainer sets instead. `form` describes structured
        output, which would mask tokens and thus change the distribution.

        >>> Fields({"seed": 3, "top_p": 1.0}).overridden({"type": "text"}), Fields({}).overridden({"type": "json_object"})
        (('seed',), ('response_format',))
        """
        given, is_free = self.values, not form or form == {"type": "text"}
        found = [
            name
            for name, neutral in _NEUTRAL.items()
            if given.get(name) is not None and given[name] not in neutral
        ]
        return (*found, *(() if is_free else ("response_format",)))

    def refuse_prefill(self) -> None:
        for name, wanted in (("continue_final_message", True), ("add_generation_prompt", False)):
            if self.get(name, bool) is wanted:
                raise self.prefill(name)

    def prefill(self, name: str) -> RequestError:
        return self.wrong(
            name,
            "Weft does not continue an assistant's message (prefill); end the conversation with a "
            "message of a user or a tool",
        )


def read_arguments(value: Any) -> Any:
    """Return the arguments of a call as an object. Other text stays as it is.

    >>> read_arguments('{"path": "."}'), read_arguments('{"path": ')
    ({'path': '.'}, '{"path": ')
    """
    if value is None or value == "":
        return {}
    text = clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    try:
        found = json.loads(text)
        json_value(found)
        # Escapes can encode lone surrogates, and numbers can be infinite.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def read_json(content: bytes) -> Any:
    """Return the value of a JSON text, without lone surrogates. Raises a ValueError if it is not JSON,
    or too deeply nested.

    >>> read_json(rb'["\\ud83d\\ude00", "\\ud83d"]') == ["\\U0001f600", "\\ufffd"]
    True
    """
    try:
        found = json.loads(content)
        # Other texts have no surrogates.
        return _cleaned(found) if b"\\u" in content or b"\xed" in content else found
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if isinstance(value, dict):
        return {clean(name): _cleaned(each) for name, each in value.items()}
    return value


def clean(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Write


def event(body: Json, name: str = "") -> bytes:
    """Return a server-sent event."""
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {json.dumps(body)}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Divide a text into at most eight pieces."""
    size = max(16, -(-len(text) // 8))
    return (text[start : start + size] for start in range(0, len(text), size))


def write_logprobs(request: TurnRequest, completion: Completion) -> list[Json]:
    """Return the log-probabilities of the sampled tokens as OpenAI writes them."""
    found: list[Json] = []
    for token, logprob in zip(completion.token_texts, completion.logprobs, strict=True):
        # The text of a part of a character does not tell its bytes.
        whole = None if "\ufffd" in token else list(token.encode())
        # JSON has no infinity.
        entry: Json = {"token": token, "logprob": max(float(logprob), -9999.0), "bytes": whole}
        found.append({**entry, "top_logprobs": [entry] if request.top_logprobs else []})
    return found
