"""Rows as the text that is tokenised: whether the chat template is applied is decided once, for all rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from ..errors import UserError
from .conversations import Conversations, Messages, Texts, common_start, read_messages
from .damage import short
from .formats import Format, as_text, column_kind, count_matches, find_column
from .origin import Origin
from .settings import ReadSettings
from .tokenizer import Tokenizer

Kind = Literal["text", "messages"]


@dataclass(frozen=True)
class Rendering:
    """How the rows of a table become text.

    A row is either plain text or messages throughout. Where the chat template is applied, text beside messages, and a plain-text
    prompt, is the content of one message.
    """

    format: Format
    tokenizer: Tokenizer
    kinds: Mapping[str, Kind]
    """By column."""
    chat: bool
    """Whether the rows go through the chat template."""
    reason: str
    """Why they do, or do not."""
    has_bos: bool = False
    """Whether plain prompts begin with the token that begins a sequence already."""
    answered: bool = False
    """Whether conversations end with the assistant's turn."""
    system: str | None = None
    variables: Mapping[str, Any] | None = None
    """Of the chat template, for all rows."""

    @classmethod
    def of(
        cls, table: pa.Table, format: Format, origin: Origin, tokenizer: Tokenizer, settings: ReadSettings
    ) -> Rendering:
        """Decide for all rows of a table.

        Raises:
            UserError: a column is neither text nor messages; or a setting does not go with the columns or the template.
        """
        columns = [path for path in (format.prompt, format.dialogue, *_parts(format).values()) if path]
        kinds: dict[str, Kind] = {
            path: column_kind(find_column(table, path, origin, "column").type, path, origin) for path in columns
        }
        if format.dialogue and kinds[format.dialogue] == "text":
            raise UserError(
                f"{origin.files}: column {format.dialogue!r} is text, in the format {format} it is messages; "
                f"say prompt={format.dialogue!r} to use the text as a prompt"
            )
        chat, reason = _needs_template(table, format, origin, tokenizer, kinds, settings.chat)
        if not chat:
            _refuse_template_settings(settings, reason)
            return cls(format, tokenizer, kinds, chat, reason, _have_bos(table, format, origin, tokenizer))
        variables = tokenizer.chat.variables(settings.thinking, settings.chat_template_kwargs)
        first = read_messages(table.slice(0, 1), format.dialogue, origin) if format.dialogue else []
        answered = bool(first) and first[0][-1]["role"] == "assistant"
        return cls(
            format,
            tokenizer,
            kinds,
            chat,
            reason,
            answered=answered,
            system=settings.system,
            variables=variables,
        )

    def texts(self, table: pa.Table, origin: Origin, images: Sequence[int] | None = None) -> Texts:
        """Prompts and responses of the rows of a table, or of some of them.

        Args:
            images: by row, how many it has; None: no row of the source has any. Where no template is applied, prompts have their own
                placeholders.

        Raises:
            UserError: a row lacks its text or messages, or the chat template refuses it; the message names the row.
        """
        format = self.format
        if format.text:
            return Texts(_strings(table, format.text, origin), {}, chat=False, whole=True)
        parts = _parts(format)
        if not self.chat:
            responses = {name: _strings(table, path, origin) for name, path in parts.items()}
            if format.prompt:
                prompts = _strings(table, format.prompt, origin, empty="refuse")
                return Texts(prompts, responses, chat=False, has_bos=self.has_bos)
            return _split_texts(responses, origin)
        messages = {path: self._messages(table, path, origin) for path in self.kinds}
        rows = Conversations.of(table, origin, self.tokenizer, self.system, self.variables or {}, images)
        if format.prompt:
            return rows.render(messages[format.prompt], {name: messages[path] for name, path in parts.items()})
        if format.dialogue:
            return rows.split_dialogues(messages[format.dialogue], format.dialogue, self.answered)
        chosen, rejected = (messages[path] for path in parts.values())
        return rows.split_preferences(chosen, rejected)

    def _messages(self, table: pa.Table, path: str, origin: Origin) -> list[Messages]:
        """A column as messages; text is the content of one."""
        if self.kinds[path] == "messages":
            return read_messages(table, path, origin)
        if path == self.format.prompt:
            texts, role = _strings(table, path, origin, empty="refuse"), "user"
        else:
            texts, role = _strings(table, path, origin), "assistant"
        return [[{"role": role, "content": text}] for text in texts]


def _parts(format: Format) -> dict[str, str]:
    """The columns of responses, by the column that their tokens go to."""
    if format.chosen and format.rejected:
        return {"chosen_ids": format.chosen, "rejected_ids": format.rejected}
    return {"response_ids": format.response} if format.response else {}


def _needs_template(
    table: pa.Table,
    format: Format,
    origin: Origin,
    tokenizer: Tokenizer,
    kinds: Mapping[str, Kind],
    wanted: bool | None,
) -> tuple[bool, str]:
    """Whether the rows go through the chat template, and why."""
    messages = next((path for path, kind in kinds.items() if kind == "messages"), None)
    if messages is not None:
        text = next((path for path, kind in kinds.items() if kind == "text"), None)
        if text == format.prompt is not None and wanted is False:
            raise UserError(
                f"{origin.files}: column {text!r} is text, but {messages!r} is messages; make both the same, "
                "or leave out chat=False: the prompt is then sent as a user's message"
            )
        return True, f"{messages!r} holds messages"
    if format.text or format.prompt is None:
        return False, "each text is one sequence" if format.text else "the prompt is what both responses begin with"
    if wanted is not None:
        return wanted, f"chat={wanted}"
    if not tokenizer.chat:
        return False, "the tokenizer has no chat template"
    responses = [as_text(find_column(table, path, origin, "response")) for path in _parts(format).values()]
    if responses and all(count_matches(column, r"^\s") == len(column) for column in responses):
        return False, "the responses begin with a space, so they continue the text of the prompts"
    prompts = as_text(find_column(table, format.prompt, origin, "prompt"))
    marks = "|".join(re.escape(text) for text in tokenizer.special_texts if text.strip())
    if marks and count_matches(prompts, marks) == len(prompts):
        return False, "the texts hold special tokens of the tokenizer already"
    return True, "the text is sent as a user's message"


def _have_bos(table: pa.Table, format: Format, origin: Origin, tokenizer: Tokenizer) -> bool:
    """Whether every plain prompt begins with the token that begins a sequence: a template was applied before."""
    bos = tokenizer.special_tokens.get("bos_token")
    if not bos or not format.prompt:
        return False
    prompts = as_text(find_column(table, format.prompt, origin, "prompt"))
    return count_matches(prompts, f"^{re.escape(bos)}") == len(prompts)


def _refuse_template_settings(settings: ReadSettings, reason: str) -> None:
    """Settings of the chat template where it is not applied: they would do nothing, in silence."""
    for name in ("system", "thinking", "chat_template_kwargs"):
        value = getattr(settings, name)
        if value is not None and value != {} and not (name == "thinking" and value is False):
            raise UserError(f"{name}={short(value)}: the chat template is not applied to these prompts ({reason})")


def _strings(table: pa.Table, path: str, origin: Origin, empty: Literal["refuse", "allow"] = "allow") -> list[str]:
    """A text column as Python strings; null is refused, and blank text too if the caller asks for that."""
    texts = as_text(find_column(table, path, origin, "column")).to_pylist()
    for row, text in enumerate(texts):
        if text is None or (empty == "refuse" and not text.strip()):
            raise UserError(f"{origin(row)}: {path!r} is {short(text)}; every row needs text there")
    return texts


def _split_texts(pairs: Mapping[str, Sequence[str]], origin: Origin) -> Texts:
    """Pairs of texts without a separate prompt: the words that both begin with are the prompt."""
    prompts: list[str] = []
    for row, pair in enumerate(zip(pairs["chosen_ids"], pairs["rejected_ids"], strict=True)):
        # Cut before the last white space of the common beginning: no word is split, and tokens begin with their space.
        words = re.match(r"(.*\S)\s", common_start(pair), re.DOTALL)
        if words is None:
            raise UserError(
                f"{origin(row)}: 'chosen' and 'rejected' do not begin with the same words: no common prompt"
            )
        prompts.append(words.group(1))
    tails = {name: [t[len(p) :] for t, p in zip(column, prompts, strict=True)] for name, column in pairs.items()}
    return Texts(prompts, tails, chat=False)
