"""Render conversations as tokens, and parse sampled tokens as messages.

The chat template in the model's folder renders, exactly as for prompts of a data set, so a gateway
does not import vLLM or torch. vLLM renders models without a template, such as DeepSeek V3.2.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...dataflow.errors import UserError, nearest
from ...dataflow.prompts.tokenizer import Tokenizer
from ..models.model_folder import read_stop_tokens
from .messages import Conversation, Message, ToolCall
from .parsing import (
    FORMATS,
    TurnParser,
    opens_thinking,
    split_thinking,
    thinking_tags,
    tool_format,
)

_MARK = "weft31mark7"
"""Stands for the text of an assistant's turn. Tokenizers do not join its end with other text."""
_PIECE = 1 << 14
"""[characters] Length of the pieces of a long text that `Renderer.has_more` counts."""
_CUT = 16
"""[tokens] Bound on the additional tokens of a piece, whose ends may cut tokens."""
_HEADS = 100_000
"""Maximum number of hashes in `Renderer._needs_head`."""


class Template(Protocol):
    """Renders messages, as chat templates take them, as token ids."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> list[int]: ...


class Renderer:
    """Converts conversations to tokens and back, for one model.

        renderer = Renderer.load("Qwen/Qwen3-8B")
        ids = renderer.render(conversation)
        sampled = ...  # from the engine
        message = renderer.parse(sampled, conversation)
        ids += sampled
        # Later, with the answers of tools after the message:
        ids += renderer.tail(longer, known=len(conversation.messages) + 1, last_id=sampled[-1])

    Args:
        tokenizer: the model's tokenizer.
        stop_token_ids: tokens that end a turn.
        parser: parser of sampled turns.
        template: renders messages; by default, the tokenizer's chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        parser: TurnParser,
        template: Template | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self._parser = parser
        self._template = template or _by_template(tokenizer)
        self._sources = "" if template else "\n".join(tokenizer.chat.sources.values())
        self._token_texts: dict[int, str] = {}
        self._opened: dict[str, bool] = {}
        """Whether the generation prompt opens the thinking, by the template's variables."""
        self._needs_head: dict[bytes, bool] = {}
        """Whether tails contain text of the system message or the tools, by hashes of these and of
        the roles in the tail."""

    @classmethod
    def load(
        cls, model: str | Path, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> Renderer:
        """Load the renderer of a model folder or Hugging Face id. Loads no weights.

        Args:
            model: folder or id.
            tool_parser: one of vLLM's names of tool parsers, "none", or "auto": by the template.
            reasoning_parser: one of vLLM's names of reasoning parsers, "none", or "auto": tags such
                as `<think>`, if the model has them.

        Raises:
            UserError: the model has no chat template that Weft or vLLM can render, or a parser
                needs vLLM and it is not installed.
        """
        tokenizer, stops = Tokenizer.load(model), read_stop_tokens(model)
        if tokenizer.chat:
            source, template = "\n".join(tokenizer.chat.sources.values()), None
        else:
            from ..generation.vllm_rendering import VllmTemplate

            _need_vllm(f"{model}: the model has no chat template, and only vLLM can render it")
            template = VllmTemplate(model)
            source = ""
            tool_parser = template.tool_parser if tool_parser == "auto" else tool_parser
        parser = _load_parser(model, source, tokenizer, tool_parser, reasoning_parser)
        return cls(tokenizer, stops, parser, template)

    def render(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a whole conversation. Raises a `UserError` if the template refuses
        it, or if it has tools and the format of the model's calls is unknown."""
        if conversation.tools and self._parser.unknown:
            raise UserError(self._parser.unknown)
        return self._render(conversation, conversation.messages)

    def tail(self, conversation: Conversation, known: int, last_id: int | None) -> list[int]:
        """Return the tokens that continue stored tokens with the messages that they lack.

        The result does not depend on how the template renders earlier turns, which may, for
        example, leave out their thinking. It costs as much as rendering the new messages, except for
        the first tail after a system message or tools.

        Args:
            conversation: the whole conversation.
            known: number of messages in the stored tokens. The last of them is the assistant's.
            last_id: last stored token. If it is not a stop token, because the turn was cut off, the
                result begins with the token that ends a turn. None if nothing was sampled.

        Raises:
            UserError: the template refuses the messages, or does not show where the turn ends.
                `render` may still work.
        """
        messages = conversation.messages
        if not 0 < known <= len(messages) or messages[known - 1].role != "assistant":
            raise ValueError(f"message {known - 1} of {len(messages)} is not an assistant's turn")
        system = messages[:1] if messages[0].role in ("system", "developer") else ()
        turn, new = messages[known - 1], messages[known:]
        bare = replace(conversation, tools=())
        if not (system or conversation.tools):
            after, end = self._after_turn(bare, turn, new)
        else:  # render the system message and the tools only if the template writes them again
            head = [system, conversation.tools, conversation.template_arguments]
            kind = f"{head} {bool(turn.tool_calls)} {[message.role for message in new]}"
            key = hashlib.blake2b(kind.encode(), digest_size=16).digest()
            if self._needs_head.get(key) is False:
                after, end = self._after_turn(bare, turn, new)
            else:
                after, end = self._after_turn(conversation, turn, new, system)
                if key not in self._needs_head:
                    if len(self._needs_head) >= _HEADS:
                        self._needs_head.clear()
                    try:
                        self._needs_head[key] = self._after_turn(bare, turn, new) != (after, end)
                    except UserError:
                        self._needs_head[key] = True
        return after[end:] if last_id in self.stop_token_ids else after

    def _after_turn(
        self,
        conversation: Conversation,
        turn: Message,
        new: Sequence[Message],
        system: Sequence[Message] = (),
    ) -> tuple[list[int], int]:
        """Return the tokens after the text of a turn, from a window with a mark in its place, and
        how many of them only end the turn."""

        def after_turn(calls: Sequence[ToolCall]) -> tuple[list[int], int]:
            marked = tuple(replace(call, arguments={"text": _MARK}) for call in calls)
            shown = Message("assistant", "" if calls else _MARK, marked)
            window = (*system, Message("user", "Hi."), shown)
            alone = replace(conversation, add_generation_prompt=False)
            before, number = self._after_mark(self._render(alone, window))
            after, _ = self._after_mark(self._render(conversation, (*window, *new)), number)
            # The rest of the last call, or tokens before the one that ends the turn.
            ends = [at for at, token in enumerate(before) if token in self._closers][:1]
            rest = ends[0] if ends else len(before)
            if after[:rest] != before[:rest]:
                if calls or ends:
                    raise self._hidden("ends a turn differently if a message follows")
                return after, 0
            start = rest if calls else 0
            if after[rest:] and after[rest] in self._closers:
                return after[start:], rest + 1 - start
            return after[start:], rest - start if ends else 0

        try:
            return after_turn(turn.tool_calls)
        except UserError:
            if len(turn.tool_calls) < 2:
                raise
            # Some templates allow one call per turn, but models may sample more.
            return after_turn(turn.tool_calls[-1:])

    def parse(self, token_ids: Sequence[int], conversation: Conversation) -> Message:
        """Return the message of a turn sampled after a conversation.

        A call that cannot be read stays text. Special tokens never become text.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.decode(ids)
        thinking = self._opens_thinking(conversation.template_arguments)
        thoughts, content, calls = self._parser.parse(text, tools=conversation.tools, thinking=thinking)
        for special in self.token_texts(sorted(self._special.intersection(ids))):
            thoughts, content = thoughts.replace(special, ""), content.replace(special, "")
        turn = f"{len(conversation.messages)} {ids}" if calls else ""
        found = (
            ToolCall(name, arguments, _call_id(f"{turn} {number}"))
            for number, (name, arguments) in enumerate(calls)
        )
        return Message("assistant", content, tuple(found), reasoning=thoughts)

    def has_more(self, texts: Iterable[str], tokens: int) -> bool:
        """Whether texts certainly have more than this number of tokens. Reads no further than that."""
        for text in texts:
            for start in range(0, len(text), _PIECE):
                piece = [text[start : start + _PIECE]]
                ids, _ = self.tokenizer.encode(piece, add_special_tokens=False)
                tokens -= max(0, len(ids) - _CUT)
                if tokens < 0:
                    return True
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return self.tokenizer.backend.decode(token_ids, skip_special_tokens=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special tokens included. A part of a character is U+FFFD."""
        known = self._token_texts
        for token in token_ids:
            if token not in known:
                # Decoders strip the space before a first token, so decode the token twice.
                once, twice = self.decode([token]), self.decode([token, token])
                known[token] = twice[len(once) :] if twice.startswith(once) else once
        return [known[token] for token in token_ids]

    # Tokens

    @functools.cached_property
    def _special(self) -> set[int]:
        backend = self.tokenizer.backend
        found = {backend.token_to_id(text) for text in self.tokenizer.special_texts}
        return {token for token in found if token is not None} | set(self.stop_token_ids)

    def _is_blank(self, token: int) -> bool:
        return token not in self._special and not self.token_texts([token])[0].strip()

    @functools.cached_property
    def _closers(self) -> set[int]:
        """Tokens that end an assistant's turn: stop tokens, and a token that ends turns in the
        history only, such as GPT-OSS's `<|end|>`. That token also ends the user's turns."""
        messages = (Message("user", _MARK), Message("assistant", _MARK), Message("user", "Hi."))
        try:
            ids = self._render(Conversation(()), messages)
            after_user, after_turn = (self._after_mark(ids, number)[0] for number in (1, 2))
        except UserError:  # the template refuses the messages
            return set(self.stop_token_ids)
        firsts = {
            next(itertools.dropwhile(self._is_blank, after), -1) for after in (after_user, after_turn)
        }
        ends_both = firsts if len(firsts) == 1 else set[int]()
        return set(self.stop_token_ids) | (ends_both & self._special)

    def _after_mark(self, ids: list[int], number: int | None = None) -> tuple[list[int], int]:
        """Return the tokens after a mark, by default the last, and the mark's number, from 1."""
        texts = self.token_texts(ids)
        text = "".join(texts)
        number = number or text.count(_MARK)
        if not 0 < number <= text.count(_MARK):
            raise self._hidden("leaves out an assistant's turn")
        end = 0
        for _ in range(number):
            end = text.index(_MARK, end) + len(_MARK)
        for at, length in enumerate(itertools.accumulate(map(len, texts)), 1):
            if length >= end:
                if length > end:
                    raise self._hidden("writes text directly after an assistant's turn")
                return ids[at:], number
        raise AssertionError("unreachable")

    def _hidden(self, problem: str) -> UserError:
        return UserError(f"the chat template of {self.tokenizer.name} {problem}")

    # Templates

    def _render(self, conversation: Conversation, messages: Sequence[Message]) -> list[int]:
        return self._template(
            [self._fit(number, message) for number, message in enumerate(messages)],
            list(conversation.tools) or None,
            conversation.template_arguments,
            add_generation_prompt=conversation.add_generation_prompt,
        )

    def _fit(self, number: int, message: Message) -> dict[str, Any]:
        """Return a message for the template, with a role and calls that the template writes."""
        if message.role == "developer" and self._sources and "developer" not in self._sources:
            message = replace(message, role="system")
        if message.role == "system" and number and not self._takes_late_system:
            message = replace(message, role="user")
        return _styled(message, *self._call_style) if message.tool_calls else message.as_template()

    @functools.cached_property
    def _call_style(self) -> tuple[bool, bool]:
        """Whether the template wants null as the content of a turn that only calls tools, and
        whether it wants arguments as text. It drops or refuses such turns otherwise."""
        call = ToolCall("f", {"text": _MARK}, "call00001")
        turn, result = Message("assistant", "", (call,)), Message("tool", "3", tool_call_id=call.id)
        tool = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}}
        for null, text in itertools.product((False, True), repeat=2):
            messages = [message.as_template() for message in (Message("user", "Hi."), turn, result)]
            messages[1] = _styled(turn, null, text)
            with contextlib.suppress(UserError):
                tools = [{"type": "function", "function": tool}]
                self._after_mark(self._template(messages, tools, {}, add_generation_prompt=True))
                return null, text
        return False, False

    @functools.cached_property
    def _takes_late_system(self) -> bool:
        """Whether the template writes system messages in the middle of a conversation."""
        roles = ("user", "assistant", "system", "user")
        messages = [Message(role, _MARK if role == "system" else "a").as_template() for role in roles]
        try:
            self._after_mark(self._template(messages, None, {}, add_generation_prompt=True))
        except UserError:
            return False
        return True

    def _opens_thinking(self, variables: Mapping[str, Any]) -> bool:
        """Whether the generation prompt ends inside the model's thinking."""
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._opened:
            self._opened[key] = False
            prompt = Conversation((Message("user", _MARK),), template_arguments=variables)
            with contextlib.suppress(UserError):  # the template refuses such a conversation
                self._opened[key] = opens_thinking(self.decode(self._after_mark(self.render(prompt))[0]))
        return self._opened[key]


def _styled(message: Message, null: bool, text: bool) -> dict[str, Any]:
    """Return a message with tool calls for a template, in a style of `Renderer._call_style`."""
    found = message.as_template()
    if null and not message.content:
        found["content"] = None
    for written, call in zip(found["tool_calls"], message.tool_calls, strict=True):
        if text:
            written["function"]["arguments"] = call.arguments_text
    return found


def _by_template(tokenizer: Tokenizer) -> Template:
    """Return the tokenizer's chat template as a function."""

    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        text = tokenizer.chat.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        ids, _ = tokenizer.encode([text], add_special_tokens=False)
        return ids.tolist()

    return render


def _load_parser(
    model: str | Path, template: str, tokenizer: Tokenizer, tools: str, thinking: str
) -> TurnParser:
    """Return the parser for a chat template's source, and the names that the user gave."""
    name = tool_format(template) if tools == "auto" else tools
    if name == "openai":
        return TurnParser(channels=True)
    read_calls, read_thinking = FORMATS.get(name), None
    if name != "none" and read_calls is None:
        _need_vllm(
            f"{model}: tool calls in the format {name!r} are read by vLLM; or set tool_parser='none'"
        )
        from ..generation.vllm_rendering import load_tool_parser

        read_calls = load_tool_parser(model, name)
    if thinking == "auto":
        tags = thinking_tags(template, tokenizer.backend.get_vocab(with_added_tokens=True))
        read_thinking = split_thinking(*tags) if tags else None
    elif thinking != "none":
        _need_vllm(f"{model}: reasoning_parser={thinking!r} names a parser of vLLM")
        from ..generation.vllm_rendering import load_reasoning_parser

        read_thinking = load_reasoning_parser(model, thinking)
    unknown = ""
    if name == "none" and tools == "auto":
        unknown = (
            f"{model}: the conversation has tools, but the chat template shows no known format of tool calls. "
            f"Set tool_parser to a format ({', '.join(FORMATS)}, or one of vLLM's), or to 'none' to get calls as text"
        )
    return TurnParser(read_calls, read_thinking, unknown=unknown)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raise a UserError if no parsers have these names. Does not import vLLM."""
    for setting, name, package, own in (
        ("tool_parser", tool_parser, "tool_parsers", ("auto", "none", "openai", *FORMATS)),
        ("reasoning_parser", reasoning_parser, "reasoning", ("auto", "none")),
    ):
        if name in own:
            continue
        _need_vllm(f"{setting}={name!r} names a parser of vLLM")
        names = sorted({*own, *parsers_of_vllm(package)})
        if name not in names:
            hint = nearest(name, names)
            raise UserError(
                f"{setting}={name!r}: there is no such parser{hint} (there are {', '.join(names)})"
            )


def parsers_of_vllm(package: str) -> list[str]:
    """Return the names of vLLM's parsers in a package, from its source: the import takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / package / "__init__.py"
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    tables = (each.value for each in statements if isinstance(each, ast.Assign))
    keys = (key for table in tables if isinstance(table, ast.Dict) for key in table.keys)
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def _need_vllm(reason: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"{reason}. vLLM is not installed; install it with pip install 'weft[cuda]'")


def _call_id(turn: str) -> str:
    """Return an id of a call, which is the same each time a turn is parsed. Mistral's templates
    require nine letters or digits."""
    digits = string.digits + string.ascii_letters
    number = int.from_bytes(hashlib.blake2b(turn.encode(), digest_size=8).digest())
    return "".join(digits[number // 62**place % 62] for place in range(9))
