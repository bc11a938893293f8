"""Convert rows to text and tokens. The chat template applies to all rows or to none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..batch import ragged_array
from ..errors import UserError
from .conversations import (
    Gap,
    Messages,
    TemplateRenderer,
    Texts,
    divide_after_prompt,
    divide_all_turns,
    divide_last_turn,
    divide_wholes,
    read_messages,
)
from .files import Rows, short
from .formats import (
    Format,
    Kind,
    ReadSettings,
    as_text,
    column_kind,
    count_matches,
    is_list_of_text,
    matches_all,
    type_name,
)
from .tokenizer import THINKING, Tokenizer

_TURNS = re.compile(r"\n\n(Human|Assistant):")
"""Start of a turn in HH-RLHF's texts."""


@dataclass(frozen=True)
class ReadPlan:
    """How to convert the rows of a table to text.

    Rows are plain text or messages. With the chat template, each plain text (a prompt, or text next
    to messages) becomes the content of one message.
    """

    format: Format
    tokenizer: Tokenizer
    kinds: Mapping[str, Kind]
    settings: ReadSettings
    chat: bool
    reason: str
    """Why the template applies or not."""
    repeats: bool
    """Whether each text response repeats its prompt, which is then removed."""
    has_bos: bool = False
    """Whether plain texts begin with the beginning-of-sequence token."""
    answered: bool = False
    """Whether conversations end with a response."""
    variables: Mapping[str, Any] | None = None
    """Template variables for all rows."""

    @property
    def many_turns(self) -> bool:
        marked = self.format.name == "HH-RLHF"
        return marked or any(self.kinds[path] == "messages" for path in self.format.responses.values())

    @classmethod
    def decide(cls, rows: Rows, format: Format, tokenizer: Tokenizer, how: ReadSettings) -> ReadPlan:
        """Decide for all rows. Raises a `UserError` for an unsuitable column or setting."""
        columns = [path for path in (format.prompt, format.dialogue, *format.responses.values()) if path]
        kinds: dict[str, Kind] = {path: column_kind(rows, path) for path in columns}
        if format.dialogue and kinds[format.dialogue] == "text":
            raise rows.error(
                f"column {format.dialogue!r} is text, in the format {format} it is messages; "
                f"set prompt={format.dialogue!r} to use the text as a prompt"
            )
        if how.train_on == "all" and not format.dialogue:
            raise UserError(
                f"train_on='all': {rows.files} was read as {format}, which has no conversations to choose turns of; leave it out"
            )
        repeats = _repeat_prompts(rows, format, kinds)
        chat, reason = _needs_template(rows, format, tokenizer, kinds, how.chat, repeats)
        if not chat:
            _refuse_template_use(rows, format, how, reason)
            bos = _have_bos(rows, format, tokenizer)
            return cls(format, tokenizer, kinds, how, chat, reason, repeats, bos)
        answered = how.train_on == "all"
        if format.dialogue and not answered:
            answered = read_messages(rows.part(0, 1), format.dialogue)[0][-1]["role"] == "assistant"
        variables = tokenizer.chat.variables(how.chat_template_kwargs)
        return cls(
            format, tokenizer, kinds, how, chat, reason, repeats, answered=answered, variables=variables
        )

    def texts(self, rows: Rows, images: Sequence[int] | None = None) -> Texts:
        """Return the prompts and responses of rows. `images` is the number of images in each row,
        if any."""
        format, parts = self.format, self.format.responses
        if format.text:
            return Texts(_strings(rows, format.text), {}, has_bos=self.has_bos, whole=True)
        prompts: list[str] = []
        if format.prompt and self.kinds[format.prompt] == "text":
            prompts = self._prompts(rows, format.prompt)
        answers = {
            name: self._answers(rows, path, prompts)
            for name, path in parts.items()
            if self.kinds[path] == "text"
        }
        if not self.chat:
            if format.prompt:
                return Texts(prompts, answers, has_bos=self.has_bos)
            return _split_texts(rows, answers, self.has_bos)
        systems = as_text(rows.table.column(format.system)).to_pylist() if format.system else None
        renderer = TemplateRenderer(
            rows, self.tokenizer, self.settings.system, self.variables or {}, systems, images
        )
        if column := format.dialogue:
            conversations = read_messages(rows, column)
            if self.settings.train_on == "all":
                return renderer.render(
                    lambda row: divide_all_turns(conversations[row], column),
                    {"response_ids": column},
                    split=images is None,
                )
            return renderer.render(
                lambda row: divide_last_turn(conversations[row], column, self.answered),
                {"response_ids": column} if self.answered else {},
            )
        replies = {
            name: _as_messages(answers[name], "assistant")
            if name in answers
            else read_messages(rows, path)
            for name, path in parts.items()
        }
        asked = _as_messages(prompts, "user")
        if format.prompt and not prompts:
            asked = read_messages(rows, format.prompt)

        def replies_of(row: int) -> dict[str, Messages]:
            return {name: column[row] for name, column in replies.items()}

        if asked:
            return renderer.render(
                lambda row: divide_after_prompt(asked[row], replies_of(row), parts), parts
            )
        return renderer.render(lambda row: divide_wholes(replies_of(row), parts), parts)

    def _prompts(self, rows: Rows, path: str) -> list[str]:
        prompts, context = _strings(rows, path, blank=False), self.format.context
        if context is None or pa.types.is_null(rows.column(context).type):
            return prompts
        column = rows.column(context)
        if is_list_of_text(column.type):
            texts = ["\n".join(line for line in lines or () if line) for lines in column.to_pylist()]
            # Some prompts already show these lines.
            texts = ["" if text in prompt else text for text, prompt in zip(texts, prompts, strict=True)]
            column = pa.chunked_array([texts], pa.string())
        elif column_kind(rows, context) != "text":
            raise rows.error(
                f"column {context!r} is {type_name(rows.column(context).type)}, in the format {self.format} it is text"
            )
        return [
            f"{prompt}\n\n{more}" if (more or "").strip() else prompt
            for prompt, more in zip(prompts, as_text(column).to_pylist(), strict=True)
        ]

    def _answers(self, rows: Rows, path: str, prompts: Sequence[str]) -> list[str]:
        texts = _strings(rows, path)
        if not self.repeats:
            return texts
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _as_messages(texts: Sequence[str], role: str) -> list[Messages]:
    return [[{"role": role, "content": text}] for text in texts]


def _repeat_prompts(rows: Rows, format: Format, kinds: Mapping[str, Kind]) -> bool:
    """Return whether each response begins with its prompt."""
    paths = [path for path in (format.prompt, *format.responses.values()) if path]
    if not format.prompt or len(paths) < 2 or format.context or {*map(kinds.get, paths)} != {"text"}:
        return False
    columns = [as_text(rows.column(path)) for path in paths]
    # Convert in parts, because Python texts take more memory than Arrow's.
    for start in range(0, len(rows.table), 8192):
        prompts, *responses = (column.slice(start, 8192).to_pylist() for column in columns)
        for texts in responses:
            for prompt, text in zip(prompts, texts, strict=True):
                if not prompt or not text or len(text) <= len(prompt) or not text.startswith(prompt):
                    return False
    return True


def _needs_template(
    rows: Rows,
    format: Format,
    tokenizer: Tokenizer,
    kinds: Mapping[str, Kind],
    wanted: bool | None,
    repeats: bool,
) -> tuple[bool, str]:
    messages = next((path for path, kind in kinds.items() if kind == "messages"), None)
    if messages is not None:
        text = next((path for path, kind in kinds.items() if kind == "text"), None)
        if text == format.prompt is not None and wanted is False:
            raise rows.error(
                f"column {text!r} is text, but {messages!r} is messages; make both the same, "
                "or leave out chat=False: the prompt is then sent as a user's message"
            )
        return True, f"{messages!r} holds messages"
    if format.name == "HH-RLHF":
        return False, "the texts mark their turns themselves ('Human:', 'Assistant:')"
    if format.text:
        return False, "each text is one sequence"
    if format.prompt is None:
        return False, "the prompt is what both responses begin with"
    # The user's setting overrides the rules below.
    if wanted is not None:
        return wanted, f"chat={wanted}"
    if not tokenizer.chat:
        return False, "the tokenizer has no chat template"
    if repeats:
        return False, "the responses begin with the prompts, so each is one text with its prompt"
    responses = [as_text(rows.column(path, "response")) for path in format.responses.values()]
    if responses and all(matches_all(column, r"^\s") for column in responses):
        return False, "the responses begin with a space, so they continue the text of the prompts"
    marks = "|".join(re.escape(text) for text in tokenizer.special_texts if text.strip())
    if marks and matches_all(as_text(rows.column(format.prompt, "prompt")), marks):
        return False, "the texts hold special tokens of the tokenizer already"
    return True, "the text is sent as a user's message"


def _have_bos(rows: Rows, format: Format, tokenizer: Tokenizer) -> bool:
    bos = tokenizer.special_tokens.get("bos_token")
    paths = [path for path in (format.prompt or format.text,) if path] or list(format.responses.values())
    if not bos:
        return False
    having = sum(count_matches(as_text(rows.column(path)), f"^{re.escape(bos)}") for path in paths)
    return having == len(paths) * len(rows.table)


def _refuse_template_use(rows: Rows, format: Format, how: ReadSettings, reason: str) -> None:
    """Raise a UserError for settings and columns without effect if no chat template applies."""
    variables = {
        name: value
        for name, value in how.chat_template_kwargs.items()
        if not (name in THINKING and value is False)
    }
    for name, value in (("system", how.system), ("chat_template_kwargs", variables or None)):
        if value is not None:
            raise UserError(
                f"{name}={short(value)}: the chat template is not applied to these prompts ({reason})"
            )
    for column in (format.system, "tools", "chat_template_kwargs"):
        row = first_with_value(rows.table, column)
        if row is not None:
            raise rows.error(
                f"column {column!r} is for the chat template, which is not applied to these rows ({reason}); rename the "
                "column if the model is not to see it",
                row,
            )


def first_with_value(table: pa.Table, column: str | None) -> int | None:
    """Return the index of the first row with a value in a column, or None."""
    values = table.column(column) if column in table.column_names else ()
    none: tuple[Any, ...] = (None, [], "", {})
    return next((row for row, value in enumerate(values) if value.as_py() not in none), None)


def _strings(rows: Rows, path: str, *, blank: bool = True) -> list[str]:
    """Return a text column as strings. Raises a UserError for null and, unless `blank`, for blank
    text."""
    texts = as_text(rows.column(path)).to_pylist()
    for row, text in enumerate(texts):
        if text is None or not (blank or text.strip()):
            raise rows.error(f"{path!r} is {short(text)}; every row needs text there", row)
    return texts


def _split_texts(rows: Rows, pairs: Mapping[str, Sequence[str]], has_bos: bool) -> Texts:
    """Split pairs of texts without a prompt column into a shared prompt and responses.

    The prompt is the shared beginning, up to its last `Assistant:` (as in HH-RLHF) or else its last
    complete word. With such marks, `Human:` turns in a response are gaps.
    """
    prompts: list[str] = []
    tails: dict[str, list[str]] = {name: [] for name in pairs}
    gaps: dict[str, list[list[Gap]]] = {name: [] for name in pairs}
    for row, pair in enumerate(zip(*pairs.values(), strict=True)):
        low, high = min(pair), max(pair)  # all texts share the common beginning of these two
        differ = (k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
        start = low[: next(differ, len(low))]
        marks = [found.end() for found in _TURNS.finditer(start) if found[1] == "Assistant"]
        if marks:
            cut = marks[-1]
        # Cut before the last white space: words stay whole, and tokens keep their leading space.
        elif words := re.match(r"(.*\S)\s", start, re.DOTALL):
            cut = words.end(1)
        else:
            raise rows.error(
                "'chosen' and 'rejected' do not begin with the same words: no common prompt", row
            )
        prompts.append(pair[0][:cut])
        for name, text in zip(pairs, pair, strict=True):
            tails[name].append(text[cut:])
            try:
                gaps[name].append(_turns_of_others(text[cut:]) if marks else [])
            except UserError as error:
                raise rows.error(str(error), row) from None
    return Texts(prompts, tails, has_bos=has_bos, gaps=gaps)


def _turns_of_others(response: str) -> list[Gap]:
    found: list[Gap] = []
    began: int | None = None
    for mark in _TURNS.finditer(response):
        if mark[1] == "Human" and began is None:
            began = mark.start()
        elif mark[1] == "Assistant" and began is not None:
            found.append((began, mark.end()))
            began = None
    if began is not None:
        raise UserError("a text ends with a turn of 'Human:'; a response ends with the assistant's turn")
    return found


# Tokens


MAX_CHARACTERS = 4_000_000
"""Maximum number of characters of a text to tokenise, about a million tokens of English. Longer
texts take minutes."""


def tokenise(texts: Texts, rows: Rows, tokenizer: Tokenizer) -> dict[str, pa.Array]:
    """Return the columns `*_ids` of rows (lists of int32) and, for responses that may have gaps,
    `*_mask` (lists of uint8). Raises a `UserError` for a text without tokens."""

    def error(problem: str, row: int) -> UserError:
        return rows.error(problem, texts.source_row(row))

    for row, name in too_many_characters(texts).items():
        text = {"prompt_ids": texts.prompts, **texts.responses}[name][row]
        raise error(
            f"the {name.removesuffix('_ids')} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read. Shorten "
            "the row, or leave it out with too_long='drop'",
            row,
        )
    special = not (texts.chat or texts.has_bos)
    prompts = _encode(tokenizer, texts.prompts, special)
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise error(f"the prompt {short(texts.prompts[row])} has no tokens", row)
    if not texts.responses and not texts.whole:
        return {"prompt_ids": _lists(prompts)}
    # Append a stop token to plain text, so that models learn to stop. Templates write their own.
    stop = None if texts.chat else _stop_token(tokenizer)
    if texts.whole:
        wholes = [_stopped(prompt, stop) for prompt in prompts]
        for row, ids in enumerate(wholes):
            if len(ids) < 2:
                raise error(f"the text {short(texts.prompts[row])} has fewer than two tokens", row)
        # The prompt of a whole text is its first token.
        prompts = [ids[:1] for ids in wholes]
        texts.prompts[:] = [_text(tokenizer, ids) for ids in prompts]
        return {"prompt_ids": _lists(prompts), "response_ids": _lists([ids[1:] for ids in wholes])}
    responses = _responses(prompts, texts, tokenizer, special)
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise error("prompt and response have no token apart from each other", row)
    masks = {name: _masks(name, responses[name], texts, rows, tokenizer) for name in texts.gaps}
    for name, column in responses.items():
        responses[name] = [_stopped(response, stop) for response in column]
        for row, response in enumerate(responses[name]):
            if len(response) == 0:
                raise error(
                    f"the response {short(texts.responses[name][row])} has no tokens ({name})", row
                )
    columns = {"prompt_ids": _lists(prompts), **{name: _lists(ids) for name, ids in responses.items()}}
    for name, column in masks.items():
        # The appended end-of-sequence token is trained.
        longer = [
            np.pad(mask, (0, len(ids) - len(mask)), constant_values=1)
            for mask, ids in zip(column, responses[name], strict=True)
        ]
        columns[mask_of(name)] = _lists(longer, pa.uint8())
    return columns


def too_many_characters(texts: Texts) -> dict[int, str]:
    """Map each row with a text that is too long to tokenise to the text's column."""
    found: dict[int, str] = {}
    for name, column in {"prompt_ids": texts.prompts, **texts.responses}.items():
        for row, text in enumerate(column):
            if len(text) > MAX_CHARACTERS:
                found.setdefault(row, name)
    return dict(sorted(found.items()))


def mask_of(ids: str) -> str:
    """Return the name of the mask column of a token column.

    >>> mask_of("response_ids")
    'response_mask'
    """
    return f"{ids.removesuffix('_ids')}_mask"


def _masks(
    name: str, responses: list[np.ndarray], texts: Texts, rows: Rows, tokenizer: Tokenizer
) -> list[np.ndarray]:
    """Return the masks of a column of responses, [tokens] uint8 per row: 0 in gaps, 1 elsewhere.

    Tokenise a response with gaps again, part by part as in generation, and replace it in
    `responses`. No token may cross the end of a turn.
    """
    masks = [np.ones(len(ids), np.uint8) for ids in responses]
    pieces: dict[int, list[str]] = {}
    for row, gaps in enumerate(texts.gaps[name]):
        if gaps:
            text = texts.responses[name][row]
            ends = [0, *itertools.chain(*gaps), len(text)]
            pieces[row] = [text[a:b] for a, b in itertools.pairwise(ends)]
    tokens = iter(_encode(tokenizer, [piece for parts in pieces.values() for piece in parts], False))
    for row, texts_of_row in pieces.items():
        parts = list(itertools.islice(tokens, len(texts_of_row)))
        whole, ids = np.concatenate(parts), responses[row]
        if np.array_equal(whole, ids) or _text(tokenizer, whole) == _text(tokenizer, ids):
            responses[row] = whole
            trained = np.arange(len(parts)) % 2 == 0
            masks[row] = np.repeat(trained, [len(part) for part in parts]).astype(np.uint8)
        else:  # the tokenizer adds a space to each part, which changes the text
            try:
                masks[row] = _mask_by_place(ids, texts.prompts[row], texts_of_row, tokenizer)
            except UserError as error:
                raise rows.error(str(error), texts.source_row(row)) from None
    return masks


def _mask_by_place(
    ids: np.ndarray, prompt: str, pieces: Sequence[str], tokenizer: Tokenizer
) -> np.ndarray:
    """Return a mask, [tokens] uint8: 0 for tokens whose character offsets overlap a gap, else 1."""
    encoding = tokenizer.backend.encode(prompt + "".join(pieces), add_special_tokens=False)
    if encoding.ids[-len(ids) :] != ids.tolist():
        raise UserError(
            "the tokenizer splits this row differently with and without its prompt, so its turns cannot be told apart"
        )
    spans = np.array(encoding.offsets[-len(ids) :]) - len(prompt)
    ends = np.cumsum([0, *map(len, pieces)])
    mask = np.ones(len(ids), np.uint8)
    for start, end in zip(ends[1::2], ends[2::2], strict=False):
        mask[(spans[:, 0] < end) & (spans[:, 1] > start)] = 0
    return mask


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


def _responses(
    prompts: list[np.ndarray], texts: Texts, tokenizer: Tokenizer, special: bool
) -> dict[str, list[np.ndarray]]:
    """Map token columns to the tokens of responses. May replace entries of `prompts` by shorter
    ones, because a token that spans the end of a prompt can go to the response."""
    # Tokenise prompt and response together, so that the response's first word continues the text.
    wholes = {
        name: _encode(tokenizer, list(map(str.__add__, texts.prompts, tails)), special)
        for name, tails in texts.responses.items()
    }
    responses = {
        name: [whole[len(prompt) :] for whole, prompt in zip(column, prompts, strict=True)]
        for name, column in wholes.items()
    }
    for row, prompt in enumerate(prompts):
        of_row = {name: column[row] for name, column in wholes.items()}
        if all(np.array_equal(whole[: len(prompt)], prompt) for whole in of_row.values()):
            continue
        # A token spans the end of the prompt. As in generation, tokenise both sides separately.
        alone = {name: _encode(tokenizer, [texts.responses[name][row]], False)[0] for name in of_row}
        if any(
            _text(tokenizer, np.concatenate([prompt, alone[name]])) != _text(tokenizer, whole)
            for name, whole in of_row.items()
        ):
            # Some tokenizers begin each text with a space, which changes the text. Then, the token
            # that spans the end of the prompt goes to the responses.
            same = min(len(prompt), *map(len, of_row.values()))
            differs = np.any([whole[:same] != prompt[:same] for whole in of_row.values()], axis=0)
            cut = int(np.argmax(differs)) if differs.any() else same
            prompts[row], alone = prompt[:cut], {name: whole[cut:] for name, whole in of_row.items()}
        for name, response in alone.items():
            responses[name][row] = response
    return responses


def _stopped(response: np.ndarray, stop: int | None) -> np.ndarray:
    """Append the stop token, if any, to a response that does not end with it."""
    ended = stop is None or (len(response) > 0 and response[-1] == stop)
    return response if ended else np.concatenate([response, np.array([stop], np.int32)])


def _stop_token(tokenizer: Tokenizer) -> int | None:
    eos, after = tokenizer.token_id("eos_token"), tokenizer.added[1]
    return after[-1] if eos is None and after else eos


def _encode(tokenizer: Tokenizer, texts: Sequence[str], special: bool) -> list[np.ndarray]:
    """Return the token ids of texts, without end tokens. `special` adds the tokens that begin a
    text, unless the text already begins with them."""
    values, offsets = tokenizer.encode(texts, add_special_tokens=special)
    rows = [values[start:end] for start, end in itertools.pairwise(offsets.tolist())]
    before, after = tokenizer.added if special else ((), ())
    if after:  # end tokens are added later, and only to responses
        rows = [ids[: len(ids) - len(after)] for ids in rows]
    begun = tokenizer.backend.decode(before, skip_special_tokens=False).strip() if before else ""
    for row, text in enumerate(texts if begun else ()):
        number = len(before)
        if text.startswith(begun) and tuple(rows[row][number : 2 * number]) == before:
            rows[row] = rows[row][number:]
    return rows


def _lists(rows: Sequence[np.ndarray], kind: pa.DataType = pa.int32()) -> pa.Array:
    return ragged_array(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), kind)
