"""ChatTemplate: messages to text, in the Jinja environment that chat templates are written for."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UserError, nearest

if TYPE_CHECKING:
    import jinja2

_THINKING = ("enable_thinking", "thinking")
"""Variables by which templates let a model think or not: of Qwen3 and GLM, and of DeepSeek and Granite."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a tokenizer.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    >>> template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    >>> ChatTemplate({"default": template}).render([{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True)
    '<user>2 + 2?<assistant>'
    """

    sources: Mapping[str, str]
    """Jinja source by name (`default`, `tool_use`)."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Named tokens (`eos_token`, ...), visible to the template."""
    name: str = "the tokenizer"
    """What the tokenizer is called in messages."""

    def __bool__(self) -> bool:
        return bool(self.sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_last: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Messages as text, through the chat template; what `apply_chat_template(tokenize=False)` returns.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first. Content is text, or blocks of type `text` and `image`; the template
                writes the placeholders of images.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_last: end inside the last message, so that generation goes on with it.
            tools: JSON schemas of functions, for templates that know about tools.
            variables: further variables of the template (`enable_thinking=False`).

        Raises:
            UserError: there is no template, or it refuses the messages, or the content of a message is neither text nor such blocks.
        """
        messages = [_with_text(message) for message in messages]
        mark = "WEFT_CONTINUES_HERE "
        if continue_last:
            messages[-1] = _marked(messages[-1], mark)
        try:
            text = self._template(bool(tools)).render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except UserError:
            raise
        except Exception as error:  # a template can fail in any way that an expression can
            raise self._broken(error) from None
        if not continue_last:
            return text
        end = text.rfind(mark.strip())
        if end < 0:
            raise UserError(f"the chat template of {self.name} leaves out the last message, which should be continued")
        # A template that trims the message trimmed the mark's space too: then trim as it would have.
        return text[:end] if text.startswith(mark, end) else text[:end].rstrip()

    def variables(self, thinking: bool | None, others: Mapping[str, Any]) -> dict[str, Any]:
        """The variables that a user sets, by the template's own names.

        Args:
            thinking: whether the model may think; None: the template's default.
            others: variables by name.

        Raises:
            UserError: the template reads no such variable; or it has no switch for thinking, and thinking is wanted.
        """
        reads = self._reads
        for name in others:
            if name not in reads:
                ours = {"messages", "tools", "documents", "add_generation_prompt", *self.special_tokens}
                known = sorted(reads - ours)
                hint = nearest(name, known) or (f"; it reads {', '.join(known)}" if known else "; it reads none")
                raise UserError(f"chat_template_kwargs: the chat template of {self.name} reads no {name!r}{hint}")
        if thinking is None:
            return dict(others)
        switch = next((name for name in _THINKING if name in reads), None)
        if switch is not None:
            return {switch: thinking, **others}
        if thinking:
            raise UserError(
                f"thinking=True: the chat template of {self.name} has no switch for it (none of {', '.join(_THINKING)}); leave it out"
            )
        return dict(others)  # a model that cannot think need not be told

    @functools.cached_property
    def _reads(self) -> set[str]:
        """Every variable that a template looks at, those that it sets by itself left out."""
        from jinja2 import meta

        found: set[str] = set()
        for source in self.sources.values():
            try:
                found |= meta.find_undeclared_variables(_environment().parse(source))
            except Exception as error:
                raise self._broken(error) from None
        return found - set(_environment().globals)

    def _broken(self, error: Exception) -> UserError:
        return UserError(f"the chat template of {self.name} refused the messages: {error}")

    def _template(self, with_tools: bool) -> jinja2.Template:
        if not self.sources:
            raise UserError(
                f"{self.name} has no chat template (no chat_template.jinja, none in tokenizer_config.json), "
                "and the prompts are messages; add one, or use plain-text prompts"
            )
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise UserError(f"{self.name} has several chat templates and none is called 'default': {known}")
        return _compiled(self.sources[name])


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one string; blocks of text alone are joined, and blocks with images among them are left to the
    template. Most templates would write down other content as Python does, and a model be trained on that."""
    content, role = message.get("content"), message.get("role")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list):
        raise UserError(f"the content of a message of role {role!r} is {content!r}; it must be text")
    kinds = {str(b.get("type", "text")) if isinstance(b, Mapping) else type(b).__name__ for b in content}
    if kinds == {"text"}:
        return {**message, "content": "".join(str(block.get("text", "")) for block in content)}
    if kinds <= {"text", "image"}:
        blocks = [
            {"type": "image"} if b["type"] == "image" else {"type": "text", "text": str(b["text"])} for b in content
        ]
        return {**message, "content": blocks}
    raise UserError(
        f"the content of a message of role {role!r} is a list of content blocks ({', '.join(sorted(kinds))}); Weft takes blocks of type "
        "'text' and 'image': images themselves go into a column 'images', and rows with video or audio are left out"
    )


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment that chat templates are written for (that of `transformers`), sandboxed."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own filter escapes HTML, which a model should not see.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with `mark` at the end of its text."""
    content = message.get("content")
    if content is None:
        raise UserError("the last message is the assistant's, to be continued, and has no text")
    if not isinstance(content, str):
        raise UserError("the last message is the assistant's, to be continued, and has images in it")
    return {**message, "content": content + mark}
