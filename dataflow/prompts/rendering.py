"""Convert rows to text and tokens. One decision about the chat template holds for all rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ..batch import ragged_array
from ..errors import UserError
from .conversations import Conversations, Divider, Gap, Texts, read_messages, read_tools, read_variables
from .files import Origin, short
from .formats import Format, as_text, column_kind, count_matches, find_column, type_name
from .settings import ReadSettings, TrainOn
from .tokenizer import Tokenizer

Kind = Literal["text", "messages"]

_TURNS = re.compile(r"\n\n(Human|Assistant):")
"""Start of a turn in the texts of HH-RLHF."""


@dataclass(frozen=True)
class Rendering:
    """How to convert the rows of a table to text.

    A row is either all plain text or all messages. With the chat template, plain text (a prompt, or
    text next to messages) becomes the content of one message.
    """

    format: Format
    tokenizer: Tokenizer
    kinds: Mapping[str, Kind]
    chat: bool
    reason: str
    has_bos: bool = False
    """Whether plain texts already begin with the beginning-of-sequence token."""
    repeats: bool = False
    """Whether every text response repeats its prompt, which is then removed."""
    answered: bool = False
    train_on: TrainOn = "last"
    system: str | None = None
    variables: Mapping[str, Any] | None = None
    """Variables of the chat template, for all rows."""

    @property
    def many_turns(self) -> bool:
        marked = self.format.name == "HH-RLHF"
        return marked or any(self.kinds[path] == "messages" for path in self.format.responses.values())

    @classmethod
    def of(
        cls, table: pa.Table, format: Format, origin: Origin, tokenizer: Tokenizer, settings: ReadSettings
    ) -> Rendering:
        """Decide for all rows of a table.

        Raises:
            UserError: a column is neither text nor messages, or a setting does not fit the columns
                or the template.
        """
        columns = [path for path in (format.prompt, format.dialogue, *format.responses.values()) if path]
        kinds: dict[str, Kind] = {
            path: column_kind(find_column(table, path, origin, "column").type, path, origin)
            for path in columns
        }
        if format.dialogue and kinds[format.dialogue] == "text":
            raise UserError(
                f"{origin.files}: column {format.dialogue!r} is text, in the format {format} it is messages; "
                f"set prompt={format.dialogue!r} to use the text as a prompt"
            )
        if settings.train_on == "all" and not format.dialogue:
            raise UserError(
                f"train_on='all': {origin.files} was read as {format}, which has no conversations to choose turns of; leave it out"
            )
        repeats = _repeat_prompts(table, format, origin, kinds)
        chat, reason = _needs_template(table, format, origin, tokenizer, kinds, settings.chat, repeats)
        if not chat:
            _refuse_template_settings(settings, reason)
            _refuse_template_columns(table, format, origin, reason)
            bos = _have_bos(table, format, origin, tokenizer)
            return cls(format, tokenizer, kinds, chat, reason, bos, repeats)
        variables = tokenizer.chat.variables(settings.thinking, settings.chat_template_kwargs)
        first = read_messages(table.slice(0, 1), format.dialogue, origin) if format.dialogue else []
        return cls(
            format,
            tokenizer,
            kinds,
            chat,
            reason,
            repeats=repeats,
            answered=settings.train_on == "all" or (bool(first) and first[0][-1]["role"] == "assistant"),
            train_on=settings.train_on,
            system=settings.system,
            variables=variables,
        )

    def texts(self, table: pa.Table, origin: Origin, images: Sequence[int] | None = None) -> Texts:
        """Return prompts and responses of the rows of a table, or of a part of it.

        Args:
            images: number of images in each row; None if the source has none. Without a template,
                prompts have their own placeholders.

        Raises:
            UserError: a row lacks its text or messages, or the chat template refuses it. The
                message names the row.
        """
        format = self.format
        if format.text:
            return Texts(
                _strings(table, format.text, origin), {}, chat=False, has_bos=self.has_bos, whole=True
            )
        parts = format.responses
        if not self.chat:
            prompts = self._prompts(table, origin) if format.prompt else []
            responses = {
                name: self._answers(table, path, origin, prompts) for name, path in parts.items()
            }
            if format.prompt:
                return Texts(prompts, responses, chat=False, has_bos=self.has_bos)
            return _split_texts(responses, origin, self.has_bos)
        rows = Conversations(
            origin,
            self.tokenizer,
            self.system,
            self.variables or {},
            read_tools(table, origin),
            read_variables(table, origin),
            as_text(table.column(format.system)).to_pylist() if format.system else None,
            images,
        )
        divider = Divider(origin)
        if format.dialogue:
            dialogues, response = (
                read_messages(table, format.dialogue, origin),
                {"response_ids": format.dialogue},
            )
            if self.train_on == "all":
                return rows.render(
                    divider.all_turns(dialogues, format.dialogue), response, split=images is None
                )
            exchanges = divider.last_turns(dialogues, format.dialogue, self.answered)
            return rows.render(exchanges, response if self.answered else {})
        prompts = self._prompts(table, origin) if self.kinds.get(format.prompt or "") == "text" else []
        answers = {
            name: read_messages(table, path, origin)
            if self.kinds[path] == "messages"
            else [
                [{"role": "assistant", "content": text}]
                for text in self._answers(table, path, origin, prompts)
            ]
            for name, path in parts.items()
        }
        if not format.prompt:
            return rows.render(
                divider.pairs(answers["chosen_ids"], answers["rejected_ids"], parts), parts
            )
        asked = (
            [[{"role": "user", "content": text}] for text in prompts]
            if prompts
            else read_messages(table, format.prompt, origin)
        )
        return rows.render(divider.with_prompts(asked, answers, parts), parts)

    def _prompts(self, table: pa.Table, origin: Origin) -> list[str]:
        assert self.format.prompt
        prompts = _strings(table, self.format.prompt, origin, empty="refuse")
        if self.format.context is None:
            return prompts
        column = find_column(table, self.format.context, origin, "column")
        if pa.types.is_null(column.type):
            return prompts
        if column_kind(column.type, self.format.context, origin) != "text":
            raise UserError(
                f"{origin.files}: column {self.format.context!r} is {type_name(column.type)}, in the format {self.format} it is text"
            )
        contexts = as_text(column).to_pylist()
        return [
            f"{prompt}\n\n{context}" if (context or "").strip() else prompt
            for prompt, context in zip(prompts, contexts, strict=True)
        ]

    def _answers(self, table: pa.Table, path: str, origin: Origin, prompts: Sequence[str]) -> list[str]:
        texts = _strings(table, path, origin)
        if not self.repeats:
            return texts
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _repeat_prompts(table: pa.Table, format: Format, origin: Origin, kinds: Mapping[str, Kind]) -> bool:
    """Return whether every response repeats its prompt, and is therefore the whole text."""
    paths = [format.prompt, *format.responses.values()]
    if len(paths) < 2 or format.context or any(kinds.get(path or "") != "text" for path in paths):
        return False
    columns = [as_text(find_column(table, path, origin, "column")) for path in paths if path]
    for start in range(0, len(table), 8192):
        prompts, *responses = (column.slice(start, 8192).to_pylist() for column in columns)
        for texts in responses:
            for prompt, text in zip(prompts, texts, strict=True):
                if not prompt or not text or len(text) <= len(prompt) or not text.startswith(prompt):
                    return False
    return True


def _needs_template(
    table: pa.Table,
    format: Format,
    origin: Origin,
    tokenizer: Tokenizer,
    kinds: Mapping[str, Kind],
    wanted: bool | None,
    repeats: bool,
) -> tuple[bool, str]:
    """Return whether to apply the chat template, and the reason."""
    messages = next((path for path, kind in kinds.items() if kind == "messages"), None)
    if messages is not None:
        text = next((path for path, kind in kinds.items() if kind == "text"), None)
        if text == format.prompt is not None and wanted is False:
            raise UserError(
                f"{origin.files}: column {text!r} is text, but {messages!r} is messages; make both the same, "
                "or leave out chat=False: the prompt is then sent as a user's message"
            )
        return True, f"{messages!r} holds messages"
    if format.name == "HH-RLHF":
        return False, "the texts mark their turns themselves ('Human:', 'Assistant:')"
    if format.text or format.prompt is None:
        return (
            False,
            "each text is one sequence"
            if format.text
            else "the prompt is what both responses begin with",
        )
    # The user's setting takes precedence over the heuristics below.
    if wanted is not None:
        return wanted, f"chat={wanted}"
    if not tokenizer.chat:
        return False, "the tokenizer has no chat template"
    if repeats:
        return False, "the responses begin with the prompts, so each is one text with its prompt"
    responses = [
        as_text(find_column(table, path, origin, "response")) for path in format.responses.values()
    ]
    if responses and all(count_matches(column, r"^\s") == len(column) for column in responses):
        return False, "the responses begin with a space, so they continue the text of the prompts"
    prompts = as_text(find_column(table, format.prompt, origin, "prompt"))
    marks = "|".join(re.escape(text) for text in tokenizer.special_texts if text.strip())
    if marks and count_matches(prompts, marks) == len(prompts):
        return False, "the texts hold special tokens of the tokenizer already"
    return True, "the text is sent as a user's message"


def _have_bos(table: pa.Table, format: Format, origin: Origin, tokenizer: Tokenizer) -> bool:
    """Return whether every plain text begins with the beginning-of-sequence token, because a
    template was applied before."""
    bos = tokenizer.special_tokens.get("bos_token")
    paths = [path for path in (format.prompt or format.text,) if path] or list(format.responses.values())
    if not bos:
        return False
    columns = [as_text(find_column(table, path, origin, "column")) for path in paths]
    having = sum(count_matches(column, f"^{re.escape(bos)}") for column in columns)
    return having == len(columns) * len(table)


def _refuse_template_settings(settings: ReadSettings, reason: str) -> None:
    """Refuse settings of the chat template if it is not applied, because they would be ignored."""
    for name in ("system", "thinking", "chat_template_kwargs"):
        value = getattr(settings, name)
        if value is not None and value != {} and not (name == "thinking" and value is False):
            raise UserError(
                f"{name}={short(value)}: the chat template is not applied to these prompts ({reason})"
            )


def _refuse_template_columns(table: pa.Table, format: Format, origin: Origin, reason: str) -> None:
    """Refuse system prompts and tools without a chat template, because the model would not see
    them."""
    for column in (format.system, "tools", "chat_template_kwargs"):
        values = table.column(column) if column is not None and column in table.column_names else ()
        row = next(
            (row for row, value in enumerate(values) if value.as_py() not in (None, [], "", {})), None
        )
        if row is not None:
            raise UserError(
                f"{origin(row)}: column {column!r} is for the chat template, which is not applied to these rows ({reason}); rename the "
                "column if the model is not to see it"
            )


def _strings(
    table: pa.Table, path: str, origin: Origin, empty: Literal["refuse", "allow"] = "allow"
) -> list[str]:
    """Return a text column as Python strings. Refuse null, and optionally blank text."""
    texts = as_text(find_column(table, path, origin, "column")).to_pylist()
    for row, text in enumerate(texts):
        if text is None or (empty == "refuse" and not text.strip()):
            raise UserError(f"{origin(row)}: {path!r} is {short(text)}; every row needs text there")
    return texts


def _split_texts(pairs: Mapping[str, Sequence[str]], origin: Origin, has_bos: bool) -> Texts:
    """Split pairs of texts without a prompt column.

    The prompt is the shared beginning, up to its last mark `Assistant:` (HH-RLHF) or, without
    marks, its last complete word. With marks, the turns `Human:` in a response are gaps.
    """
    prompts: list[str] = []
    tails: dict[str, list[str]] = {name: [] for name in pairs}
    gaps: dict[str, list[list[Gap]]] = {name: [] for name in pairs}
    for row, pair in enumerate(zip(*pairs.values(), strict=True)):
        start = common_start(pair)
        marks = [found.end() for found in _TURNS.finditer(start) if found[1] == "Assistant"]
        if marks:
            cut = marks[-1]
        else:
            # Cut before the last white space of the common beginning, so that no word is split and
            # tokens begin with their space.
            words = re.match(r"(.*\S)\s", start, re.DOTALL)
            if words is None:
                raise UserError(
                    f"{origin(row)}: 'chosen' and 'rejected' do not begin with the same words: no common prompt"
                )
            cut = words.end(1)
        prompts.append(pair[0][:cut])
        for name, text in zip(pairs, pair, strict=True):
            tails[name].append(text[cut:])
            gaps[name].append(_turns_of_others(text[cut:], origin, row) if marks else [])
    return Texts(prompts, tails, chat=False, has_bos=has_bos, gaps=gaps)


def _turns_of_others(response: str, origin: Origin, row: int) -> list[Gap]:
    """Find the parts of a response from a mark `Human:` to the next mark `Assistant:`."""
    found: list[Gap] = []
    began: int | None = None
    for mark in _TURNS.finditer(response):
        if mark[1] == "Human" and began is None:
            began = mark.start()
        elif mark[1] == "Assistant" and began is not None:
            found.append((began, mark.end()))
            began = None
    if began is not None:
        raise UserError(
            f"{origin(row)}: a text ends with a turn of 'Human:'; a response ends with the assistant's turn"
        )
    return found


def common_start(texts: Sequence[str]) -> str:
    """Return the longest string that all texts begin with.

    >>> common_start(["the sky", "the sea"])
    'the s'
    """
    low, high = min(texts), max(texts)  # all texts share the common start of these two
    end = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:end]


# Tokens


MAX_CHARACTERS = 4_000_000
"""Longest text to tokenise, about a million tokens of English. Tokenizers take minutes for longer
ones."""


def tokenise(texts: Texts, origin: Origin, tokenizer: Tokenizer) -> dict[str, pa.Array]:
    """Return the `*_ids` columns of rows (lists of int32), and a `*_mask` (lists of uint8) for
    responses that may have gaps.

    Raises:
        UserError: a prompt or response has no tokens. The message names the row.
    """
    origin, special = origin.of(texts.rows), not (texts.chat or texts.has_bos)
    for row, name in too_many_characters(texts).items():
        text = {"prompt_ids": texts.prompts, **texts.responses}[name][row]
        raise UserError(
            f"{origin(row)}: the {name.removesuffix('_ids')} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read. Shorten "
            "the row, or leave it out with too_long='drop'"
        )
    values, offsets = _encode(tokenizer, texts.prompts, special)
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise UserError(
            f"{origin(int(empty[0]))}: the prompt {short(texts.prompts[empty[0]])} has no tokens"
        )
    if not texts.responses and not texts.whole:
        return {"prompt_ids": ragged_array(values, offsets, pa.int32())}
    prompts = np.split(values, offsets[1:-1])
    # Templates write the token that ends a turn. Plain text has none, and a model must learn to
    # stop.
    stop = None if texts.chat else _stop_token(tokenizer)
    if texts.whole:
        return _whole(prompts, texts, origin, tokenizer, stop)
    responses = _responses(prompts, texts, origin, tokenizer, special)
    masks = _masks(responses, texts, origin, tokenizer)
    for name, rows in responses.items():
        if stop is not None:
            responses[name] = rows = [_stopped(response, stop) for response in rows]
        for row, response in enumerate(rows):
            if len(response) == 0:
                raise UserError(
                    f"{origin(row)}: the response {short(texts.responses[name][row])} has no tokens ({name})"
                )
    columns = {"prompt_ids": _lists(prompts), **{name: _lists(rows) for name, rows in responses.items()}}
    for name, rows in masks.items():
        # Train the appended end-of-sequence token.
        longer = [
            np.pad(mask, (0, len(ids) - len(mask)), constant_values=1)
            for mask, ids in zip(rows, responses[name], strict=True)
        ]
        columns[mask_of(name)] = _lists(longer, pa.uint8())
    return columns


def too_many_characters(texts: Texts) -> dict[int, str]:
    """Return row -> column of its first text that is too long to tokenise, in order."""
    found: dict[int, str] = {}
    for name, column in {"prompt_ids": texts.prompts, **texts.responses}.items():
        for row, text in enumerate(column):
            if len(text) > MAX_CHARACTERS:
                found.setdefault(row, name)
    return dict(sorted(found.items()))


def mask_of(ids: str) -> str:
    """Return the name of the mask for a token column.

    >>> mask_of("response_ids")
    'response_mask'
    """
    return f"{ids.removesuffix('_ids')}_mask"


def _masks(
    responses: dict[str, list[np.ndarray]], texts: Texts, origin: Origin, tokenizer: Tokenizer
) -> dict[str, list[np.ndarray]]:
    """Mask the tokens of gaps: [tokens] uint8 for each row, by column.

    A response with gaps is tokenised again part by part, as in generation, and replaced in
    `responses`. No token then crosses the end of a turn.
    """
    masks: dict[str, list[np.ndarray]] = {}
    for name, all_gaps in texts.gaps.items():
        rows = responses[name]
        masks[name] = [np.ones(len(ids), np.uint8) for ids in rows]
        gapped = [row for row, gaps in enumerate(all_gaps) if gaps]
        ends = {
            row: [*itertools.chain(*all_gaps[row]), len(texts.responses[name][row])] for row in gapped
        }
        pieces = {
            row: [texts.responses[name][row][a:b] for a, b in itertools.pairwise([0, *ends[row]])]
            for row in gapped
        }
        tokens = iter(
            _rows(tokenizer, [piece for row in gapped for piece in pieces[row]], False) if gapped else []
        )
        for row in gapped:
            parts = list(itertools.islice(tokens, len(pieces[row])))
            joined = np.concatenate(parts)
            if np.array_equal(joined, rows[row]) or _text(tokenizer, joined) == _text(
                tokenizer, rows[row]
            ):
                rows[row] = joined
                masks[name][row] = np.repeat(
                    np.arange(len(parts)) % 2 == 0, [len(part) for part in parts]
                ).astype(np.uint8)
            else:  # the tokenizer adds a space to each part
                masks[name][row] = _mask_by_place(
                    rows[row],
                    texts.prompts[row],
                    texts.responses[name][row],
                    all_gaps[row],
                    origin(row),
                    tokenizer,
                )
    return masks


def _mask_by_place(
    ids: np.ndarray, prompt: str, response: str, gaps: Sequence[Gap], place: str, tokenizer: Tokenizer
) -> np.ndarray:
    """Mask the tokens that overlap a gap, by their character offsets: [tokens] uint8."""
    encoding = tokenizer.backend.encode(prompt + response, add_special_tokens=False)
    if encoding.ids[-len(ids) :] != ids.tolist():
        raise UserError(
            f"{place}: the tokenizer splits this row differently with and without its prompt, so its turns cannot be told apart"
        )
    spans = np.array(encoding.offsets[-len(ids) :]) - len(prompt)
    mask = np.ones(len(ids), np.uint8)
    for start, end in gaps:
        mask[(spans[:, 0] < end) & (spans[:, 1] > start)] = 0
    return mask


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


def _responses(
    prompts: list[np.ndarray], texts: Texts, origin: Origin, tokenizer: Tokenizer, special: bool
) -> dict[str, list[np.ndarray]]:
    """Return the tokens of responses, by column. If a prompt's last token reaches into a response,
    shorten the prompt in place."""
    # Tokenise prompt and response together, so that the response's first word is split as in
    # running text.
    wholes = {
        name: _rows(
            tokenizer, [prompt + tail for prompt, tail in zip(texts.prompts, tails, strict=True)], special
        )
        for name, tails in texts.responses.items()
    }
    responses = {
        name: [whole[len(prompt) :] for whole, prompt in zip(rows, prompts, strict=True)]
        for name, rows in wholes.items()
    }
    for row, prompt in enumerate(prompts):
        if not all(np.array_equal(rows[row][: len(prompt)], prompt) for rows in wholes.values()):
            prompts[row], parted = _part(
                prompt,
                {name: rows[row] for name, rows in wholes.items()},
                {name: tails[row] for name, tails in texts.responses.items()},
                tokenizer,
            )
            for name, response in parted.items():
                responses[name][row] = response
            if len(prompts[row]) == 0:
                raise UserError(f"{origin(row)}: prompt and response have no token apart from each other")
    return responses


def _part(
    prompt: np.ndarray, wholes: Mapping[str, np.ndarray], tails: Mapping[str, str], tokenizer: Tokenizer
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Split a row whose prompt and response share a token.

    The prompt keeps its own tokens, as in generation, and responses are tokenised separately. If
    that changes the text (some tokenizers begin every text with a space), the shared token goes to
    the responses.
    """
    alone = {name: _rows(tokenizer, [tail], False)[0] for name, tail in tails.items()}
    decode = tokenizer.backend.decode
    if all(
        decode([*prompt, *alone[name]], skip_special_tokens=False)
        == decode(whole.tolist(), skip_special_tokens=False)
        for name, whole in wholes.items()
    ):
        return prompt, alone
    same = min(len(prompt), *map(len, wholes.values()))
    differs = np.any([whole[:same] != prompt[:same] for whole in wholes.values()], axis=0)
    cut = int(np.argmax(differs)) if differs.any() else same
    return prompt[:cut], {name: whole[cut:] for name, whole in wholes.items()}


def _whole(
    rows: list[np.ndarray], texts: Texts, origin: Origin, tokenizer: Tokenizer, stop: int | None
) -> dict[str, pa.Array]:
    """Return columns for language modeling: the first token of a text is its prompt, the others are
    trained."""
    if stop is not None:
        rows = [_stopped(row, stop) for row in rows]
    for index, row in enumerate(rows):
        if len(row) < 2:
            raise UserError(
                f"{origin(index)}: the text {short(texts.prompts[index])} has fewer than two tokens"
            )
    # Show the first token as the prompt.
    texts.prompts[:] = tokenizer.backend.decode_batch(
        [row[:1].tolist() for row in rows], skip_special_tokens=False
    )
    return {
        "prompt_ids": _lists([row[:1] for row in rows]),
        "response_ids": _lists([row[1:] for row in rows]),
    }


def _stopped(response: np.ndarray, stop: int) -> np.ndarray:
    """Append the stop token to a response, unless it ends with it."""
    ended = len(response) > 0 and response[-1] == stop
    return response if ended else np.concatenate([response, np.array([stop], np.int32)])


def _stop_token(tokenizer: Tokenizer) -> int | None:
    eos, after = tokenizer.token_id("eos_token"), tokenizer.added[1]
    return after[-1] if eos is None and after else eos


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and offsets of texts, without end tokens from the tokenizer and without a second
    beginning token.

    Args:
        special: whether the tokenizer adds special tokens at the beginning.
    """
    values, offsets = tokenizer.encode(texts, add_special_tokens=special)
    before, after = tokenizer.added if special else ((), ())
    begun = tokenizer.backend.decode(before, skip_special_tokens=False) if before else ""
    twice = [row for row, text in enumerate(texts) if begun and text.startswith(begun.strip())]
    if not after and not twice:
        return values, offsets
    kept, lengths = np.ones(len(values), bool), np.diff(offsets)
    for place in range(1, len(after) + 1):
        # End tokens are added later, only to responses.
        kept[offsets[1:] - place] = False
    lengths = lengths - len(after)
    for row in twice:
        start, number = int(offsets[row]), len(before)
        if tuple(values[start + number : start + 2 * number]) == before:
            kept[start : start + number] = False
            lengths[row] -= number
    return values[kept], np.concatenate([[0], np.cumsum(lengths)])


def _rows(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[np.ndarray]:
    values, offsets = _encode(tokenizer, texts, special)
    return np.split(values, offsets[1:-1])


def _lists(rows: Sequence[np.ndarray], kind: pa.DataType = pa.int32()) -> pa.Array:
    return ragged_array(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), kind)
