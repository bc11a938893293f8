"""Split text from chat templates into turns: speakers, tool calls and tool results.

The turns of a prompt come from a column of messages, or else from the markers of its chat template.
The turns of a response are ranges of its tokens, so that each token keeps its values.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...dataflow.errors import UserError
from ...dataflow.prompts.tokenizer import Tokenizer

HEADER = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)[^\S\n]*\n?"  # Qwen, ChatML
    r"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\n*"
    r"|<start_of_turn>(?P<gemma>\w+)\n?"
    r"|<\|start\|>(?P<harmony>[\w.]+)[^<]*(?:<\|channel\|>(?P<channel>[^<]*))?<\|message\|>"  # GPT-OSS
    r"|<\|channel\|>(?P<begun>[^<]*)<\|message\|>"
    r"|<\|(?P<phi>system|user|assistant|tool|observation)\|>\n?"  # Phi, OLMo, GLM
    r"|(?P<asked>\[INST\])|(?P<answers>\[/INST\])\s?"  # Mistral
)
END = re.compile(
    r"<\|im_end\|>\n?|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>\n?|<\|end\|>\n?|<\|return\|>|<\|call\|>|<\|endoftext\|>|</s>"
)
PART = re.compile(
    r"<think>(?P<thinking>.*?)(?:</think>|\Z)"
    r"|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)|\[TOOL_CALLS\](?P<calls>.*)"
    r"|<tool_response>(?P<result>.*?)(?:</tool_response>|\Z)|\[TOOL_RESULTS\](?P<results>.*?)(?:\[/TOOL_RESULTS\]|\Z)",
    re.DOTALL,
)
MARKER = re.compile(
    r"<\|\w+\|>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|s)>|\[/?[A-Z_]+\]"
)
"""Tokens that may be markers, or begin one."""
BEGINS_TURN = re.compile(
    r"<\|(?:im_start|start_header_id|start|channel|user|assistant)\|>|<start_of_turn>|\[INST\]"
)
ROLES = {
    "model": "assistant",
    "human": "user",
    "ipython": "tool",
    "observation": "tool",
    "developer": "system",
}
MESSAGES = ("prompt_messages", "messages", "context_messages", "turns", "conversation")
"""Columns with the messages of a prompt, as lists or JSON."""
MOST_TURNS = 500
MOST_TEXT = 100_000
"""Maximum characters of a prompt's turn to send."""


def turns_of_text(text: str, role: str = "", marked: str | None = None) -> list[dict[str, Any]] | None:
    """Split a text into turns by the markers of its chat template; None without markers. `role` is
    the speaker at the beginning; if empty, text before the first marker is a system turn. `marked`
    is a text of the same length that has the markers (see `only_real_markers`).

    >>> turns = turns_of_text("<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>easy</think>4<|im_end|>")
    >>> [(turn["role"], [(part["kind"], part["text"]) for part in turn["parts"]]) for turn in turns]
    [('user', [('text', '2+2?')]), ('assistant', [('thinking', 'easy'), ('text', '4')])]
    """
    found: list[dict[str, Any]] = []
    marked = text if marked is None else marked
    for speaker, start, end, kind in _stretches(marked, role):
        parts = list(_parts(text, marked, start, end, kind))
        if speaker != "assistant" and parts and all(part["kind"] == "result" for part in parts):
            speaker = "tool"  # some templates put tool results into user turns
        if speaker == "tool":
            parts = [part | {"kind": "result"} for part in parts]
        elif speaker == "assistant":
            parts = list(map(_with_bare_call, parts))
        if parts or (found and start < len(text)):
            found.append({"role": speaker, "parts": parts})
    has_marks = len(found) > 1 or any(part["kind"] != "text" for turn in found for part in turn["parts"])
    return found[:MOST_TURNS] if has_marks or (found and not role) else None


def _stretches(text: str, role: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield (speaker, start, end, kind), with kind "text" or "thinking"."""
    speaker, start, said_as = role, 0, "text"
    for header in HEADER.finditer(text):
        if speaker or text[start : header.start()].strip():
            yield speaker or "system", start, _without_end(text, start, header.start()), said_as
        kind = header.lastgroup or ""
        named = {"asked": "user", "answers": "assistant", "begun": "assistant"}.get(kind)
        said = named or next(
            value for name, value in header.groupdict().items() if value and name != "channel"
        )
        speaker, start = ROLES.get(said, said), header.end()
        said_as = "thinking" if (header["channel"] or header["begun"]) == "analysis" else "text"
    if speaker:
        yield speaker, start, _without_end(text, start, len(text)), said_as


def _without_end(text: str, start: int, end: int) -> int:
    mark = END.search(text, start, end)
    return mark.start() if mark else end


def _parts(text: str, marked: str, start: int, end: int, otherwise: str) -> Iterator[dict[str, Any]]:
    """Yield a turn's text, thinking, tool calls and tool results. Unmarked text has the kind
    `otherwise`."""
    at = start
    closed = marked.find("</think>", start, end)
    if closed >= 0 and marked.find("<think>", start, closed) < 0:  # the prompt ends with <think>
        yield _part("thinking", text, start, closed)
        at = closed + len("</think>")
    for found in PART.finditer(marked, at, end):
        if text[at : found.start()].strip():
            yield _part(otherwise, text, at, found.start())
        group = found.lastgroup or ""
        kind = {"calls": "call", "results": "result"}.get(group, group)
        if text[slice(*found.span(group))].strip():
            yield _part(kind, text, *found.span(group))
        at = found.end()
    if text[at:end].strip():
        yield _part(otherwise, text, at, end)


def _part(kind: str, text: str, start: int, end: int) -> dict[str, Any]:
    own = text[start:end]
    part = {"kind": kind, "text": own.strip("\n"), "start": start, "end": end}
    return part | (_call(own) if kind == "call" else {})


def _with_bare_call(part: dict[str, Any]) -> dict[str, Any]:
    """Return a text part as a call if it is a call in JSON without markers, as Llama writes it."""
    is_call = part["kind"] == "text" and calls_of(part["text"].removeprefix("<|python_tag|>"))
    return part | {"kind": "call"} | _call(part["text"]) if is_call else part


def _call(text: str) -> dict[str, Any]:
    calls = calls_of(text.removeprefix("<|python_tag|>"))
    return {"name": _called(text)} | ({"calls": calls} if calls else {})


def calls_of(text: str) -> list[dict[str, Any]] | None:
    """Return the name and the arguments of tool calls in JSON: an object, or a list of objects;
    None for other text.

    >>> calls_of('{"name": "add", "arguments": {"a": 1, "to": "b"}}')
    [{'name': 'add', 'arguments': [['a', '1'], ['to', 'b']]}]
    >>> calls_of('[{"name": "look", "parameters": {}}]'), calls_of('{"name": "Ada"}'), calls_of("add(1)")
    ([{'name': 'look', 'arguments': []}], None, None)
    """
    text = text.strip()
    if not text.startswith(("{", "[")) or len(text) > MOST_TEXT:
        return None
    found = _json(text)
    calls: list[dict[str, Any]] = []
    for one in found if isinstance(found, list) else [found]:
        inner = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return None
        given = inner.get("arguments", inner.get("parameters"))
        given = _json(given) if isinstance(given, str) else given
        if not isinstance(given, dict):
            return None
        arguments = [
            [str(name), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
            for name, value in given.items()
        ]
        calls.append({"name": inner["name"], "arguments": arguments})
    return calls or None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _called(text: str) -> str:
    """
    >>> _called('{"name": "search", "arguments": {}}'), _called("<function=run><parameter=x>1"), _called("?")
    ('search', 'run', 'a tool')
    """
    found = re.search(r'"name"\s*:\s*"([^"]{1,80})"|<function=([^>\s]{1,80})>', text)
    return (found[1] or found[2]) if found else "a tool"


def turns_of_tokens(tokens: Sequence[str], marked: str | None = None) -> list[dict[str, Any]] | None:
    """Split a response, given as the text of each token, into turns with token ranges; None for a
    single plain turn. `marked` is as in `turns_of_text`."""
    turns = turns_of_text("".join(tokens), "assistant", marked)
    if turns is None:
        return None
    ends = np.cumsum([len(token) for token in tokens])
    for part in (part for turn in turns for part in turn["parts"]):
        first = int(np.searchsorted(ends, part.pop("start"), "right"))
        last = int(np.searchsorted(ends, part.pop("end"), "left"))
        del part["text"]
        part |= {"from": first, "to": min(len(tokens), last + 1)}
    return turns


def turns_of_prompt(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the turns of a row's prompt; None for plain text."""
    for name in MESSAGES:
        value = row.get(name)
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            continue
        are_turns = isinstance(found, list) and all(isinstance(t, dict) and "role" in t for t in found)
        if found and are_turns:
            # Columns other than `prompt_messages` may end with the response.
            has_answer = name != "prompt_messages" and found[-1]["role"] == "assistant"
            before = found[:-1] if has_answer and row.get("response_ids") else found
            return [_of_message(turn) for turn in before[:MOST_TURNS]]
    turns = turns_of_text(str(row.get("prompt") or ""))
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["parts"]:
        turns.pop()  # the header before the response
    for part in (part for turn in turns or () for part in turn["parts"]):
        part |= {"text": cut(part["text"])}
        del part["start"], part["end"]
    return turns


def _of_message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = ROLES.get(str(message["role"]), str(message["role"]))
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(block.get("text", "")) for block in content if isinstance(block, Mapping))
    text = cut(str(content or ""))
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"kind": "thinking", "text": cut(str(message["reasoning_content"]))})
    if text.strip():
        parts.append({"kind": "result" if role == "tool" else "text", "text": text})
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        said = call if isinstance(call, str) else json.dumps(call, indent=2, default=str)
        parts.append({"kind": "call", "text": cut(said)} | _call(said))
    name = message.get("name")
    return {"role": role, "parts": parts} | ({"name": str(name)[:80]} if name else {})


def cut(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text that is longer than `most` characters, and add its length."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def gist(prompt: str) -> str:
    """Return the last user or assistant text of a prompt; prompts often begin alike.

    >>> gist("<|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n"), gist("2+2=")
    ('2+2?', '2+2=')
    """
    turns = turns_of_text(prompt) or ()
    said = [
        part["text"]
        for turn in turns
        for part in turn["parts"]
        if turn["role"] not in ("system", "tool")
    ]
    return said[-1] if said else prompt


# Texts of response tokens, if the run's tokenizer is on this machine


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoded text of a token with only some of a character's bytes."""
LONGEST_CHARACTER = 6
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece marker for a space before a word."""


def tokenizer_of(config: Mapping[str, Any]) -> Tokenizer | None:
    """Return the run's tokenizer; None if it is not on this machine."""
    groups = config.get("groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        for name in ("tokenizer", "model"):
            where = group.get(name) if isinstance(group, Mapping) else None
            if isinstance(where, str) and (found := _load(where)) is not None:
                return found
    return None


@lru_cache(maxsize=8)
def _load(where: str) -> Tokenizer | None:
    """Load a tokenizer from a folder, or from the cached files of a Hugging Face id."""
    file: Any = Path(where) / "tokenizer.json"
    if not file.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(where, "tokenizer.json")
        except (ImportError, ValueError):  # ValueError: the name is a path, not an id
            return None
    if not isinstance(file, str | Path):
        return None
    try:
        return Tokenizer.load(Path(file).parent)
    except (UserError, OSError):
        return None


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, including special ones, or its id without a tokenizer. Of
    several tokens that form a character, the first one gets it."""
    if tokenizer is None:
        return [f"⟨{id}⟩" for id in ids]
    backend = tokenizer.backend
    texts: list[str] = []
    place = 0
    while place < len(ids):
        number, text = 1, backend.decode([ids[place]], skip_special_tokens=False)
        if UNFINISHED in text:
            # The next tokens may complete a character.
            for more in range(2, min(LONGEST_CHARACTER, len(ids) - place) + 1):
                longer = backend.decode(list(ids[place : place + more]), skip_special_tokens=False)
                if UNFINISHED not in longer:
                    number, text = more, longer
                    break
        if (backend.id_to_token(ids[place]) or "").startswith(WORD_START) and not text.startswith(" "):
            text = f" {text}"
        texts += [text, *[""] * (number - 1)]
        place += number
    return texts


def only_real_markers(tokenizer: Tokenizer | None, ids: Sequence[int], tokens: Sequence[str]) -> str:
    """Return the joined text of tokens for the search of markers, without the markers that ordinary
    tokens spell: an `<|im_end|>` in the output of a tool ends no turn."""
    decoder = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
    added = {id: token.content for id, token in decoder.items()}
    literals = [content for content in added.values() if MARKER.fullmatch(content)]
    if not literals:
        return "".join(tokens)
    fake = [re.escape(content) for content in literals]
    if any(map(BEGINS_TURN.fullmatch, literals)):  # otherwise the template spells its headers
        fake += [HEADER.pattern, END.pattern]
    search = re.compile("|".join(fake))
    pieces: list[str] = []
    pairs = zip(ids, tokens, strict=True)
    for is_added, run in itertools.groupby(pairs, key=lambda pair: pair[0] in added):
        text = "".join(token for _, token in run)
        pieces.append(text if is_added else search.sub(lambda found: "\0" * len(found[0]), text))
    return "".join(pieces)
