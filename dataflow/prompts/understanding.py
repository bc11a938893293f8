"""Understanding: a summary of how a data set was read, for the user to check before training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..untrusted_text import beginning, both_ends, one_line
from .conversations import Texts
from .datasets import Rows
from .formats import Answers, Format, type_name
from .images import Images
from .rendering import Rendering, mask_of
from .settings import ReadSettings

EXAMPLES = 3
"""Rows to print."""

_SHOWN = 240
"""Characters to print of a prompt. Responses get half as many, answers and system prompts a
quarter."""

_NAMED = 8
"""Unused columns to print. The others are counted."""

_PARTS = 6
"""Parts of a response to print."""

_UNREAD_FIELDS = ("weight", "train", "mask", "masked", "loss")
"""Message fields that select turns in other trainers."""


@dataclass(frozen=True)
class Lengths:
    """Distribution of lengths in tokens."""

    shortest: int
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> Lengths:
        """Summarise token counts of rows; there must be at least one row.

        >>> Lengths.of(range(1, 101))
        Lengths(shortest=1, p50=51, p90=91, p99=100, longest=100)
        """
        quantiles = np.quantile(np.asarray(tokens), [0, 0.5, 0.9, 0.99, 1], method="higher")
        return cls(*(int(value) for value in quantiles))

    def limit(self, multiple: int = 64) -> int:
        """Return a limit for such rows: the 99th percentile, rounded up to a multiple, but not
        above the longest.

        >>> Lengths(10, 60, 90, 130, 5000).limit(), Lengths(10, 60, 90, 130, 135).limit(), Lengths(1, 2, 3, 4, 9).limit()
        (192, 135, 9)
        """
        # `-(-a // b)` rounds up.
        return min(-(-self.p99 // multiple) * multiple, self.longest)

    def __str__(self) -> str:
        return f"{self.shortest:,} to {self.longest:,} tokens; half up to {self.p50:,}, 90 % {self.p90:,}, 99 % {self.p99:,}"


@dataclass(frozen=True)
class Example:
    """A row as the model will see it."""

    prompt: str
    response: str | None = None
    """The trained response (the chosen one of a pair), if any."""
    answer: Any = None
    rejected: str | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts of each response with several turns, by token column. Trained and untrained parts
    alternate; the first is trained."""


@dataclass(frozen=True)
class Understanding:
    """How a data set was read. A run prints `str` of it at the start.

    Lengths include dropped rows.
    """

    source: str
    """Files, or the id of a data set with its subset and split."""
    rows: int
    format: str
    columns: Mapping[str, str]
    roles: Mapping[str, str]
    """Role (`prompt`, `answer`, `response`, ...) -> its column."""
    trains: str
    chat: bool
    chat_reason: str
    prompts: Lengths
    examples: tuple[Example, ...]
    variables: Mapping[str, object]
    """Variables of the chat template that the user set."""
    system: str | None = None
    own_system: int = 0
    responses: Lengths | None = None
    extraction: str = ""
    choices: tuple[str, ...] = ()
    """Defaults that were used: `subset 'main' of main, socratic`."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    images: str = ""
    """Number of images and of rows with images; empty without images."""
    notes: tuple[str, ...] = ()
    """Warnings: empty responses, equal pairs, ignored fields."""

    def without(self, rows: int, reason: str) -> Understanding:
        """Return a copy that counts more dropped rows."""
        return replace(self, dropped={**self.dropped, reason: self.dropped.get(reason, 0) + rows})

    def __str__(self) -> str:
        lines = [f"{self.source}: {_rows(self.rows)}, read as {self.format}"]
        lines += [f"  default   {choice}" for choice in self.choices]
        used = [name for name in self.columns if self._roles_of(name)]
        kept = [name for name in self.columns if name not in used]
        lines.append(f"  reads     {'; '.join(self._column(name) for name in used)}")
        if kept:
            lines.append(
                f"  keeps     {self._listed(kept)}; not trained on, for rewards and nodes of your own"
            )
        lines.append(
            f"  template  {'applied' if self.chat else 'not applied'}: {self.chat_reason}{self._settings()}"
        )
        lines.append(f"  trains    {self.trains}")
        if "answer" in self.roles:
            lines.append(f"  answers   from {self.roles['answer']!r}: {self.extraction}")
        else:
            lines.append("  answers   none: no column has a known name; answer='...' names one")
        if self.images:
            lines.append(f"  images    {self.images}")
        lines.append(f"  prompts   {self.prompts}")
        if self.responses is not None:
            lines.append(f"  responses {self.responses}")
        lines += [f"  note      {note}" for note in self.notes]
        dropped = [f"{rows:,} of {self.rows:,}: {reason}" for reason, rows in self.dropped.items()]
        lines.append(f"  left out  {'; '.join(dropped) or 'none'}")
        for number, example in enumerate(self.examples, start=1):
            lines += _example_lines(number, example)
        return "\n".join(map(one_line, lines))

    def _roles_of(self, column: str) -> list[str]:
        return [
            role for role, name in self.roles.items() if name == column or name.startswith(f"{column}.")
        ]

    def _column(self, name: str) -> str:
        return (
            f"{_clipped(name)} ({_clipped(self.columns[name])}) as {' and '.join(self._roles_of(name))}"
        )

    def _listed(self, names: Sequence[str]) -> str:
        named = [f"{_clipped(name)} ({_clipped(self.columns[name])})" for name in names[:_NAMED]]
        return ", ".join(named) + (
            f" and {len(names) - _NAMED:,} more columns" if len(names) > _NAMED else ""
        )

    def _settings(self) -> str:
        said = [f"{name}={value!r}" for name, value in self.variables.items()]
        if self.system is not None:
            own = f" (rows that keep their own: {self.own_system:,})" if self.own_system else ""
            said.append(f"system prompt {_shown(self.system, _SHOWN // 4)}{own}")
        return "".join(f"; {text}" for text in said)


class Observer:
    """Collects the summary while rows are read, part by part."""

    def __init__(self, rendering: Rendering, settings: ReadSettings) -> None:
        self._rendering = rendering
        self._settings = settings
        self._examples: list[Example] = []
        self._own_system = self._turns = self._trained_turns = self._split = self._rows = 0
        self._empty = self._equal = 0

    def see(self, texts: Texts, ids: Mapping[str, pa.Array], answers: pa.ChunkedArray | None) -> None:
        """Add a part of the rows.

        Args:
            texts: their texts.
            ids: their tokens, by column.
            answers: their answers.
        """
        self._own_system += texts.own_system
        self._turns += texts.turns
        self._trained_turns += texts.trained_turns
        self._rows += len(texts.prompts)
        # Extra rows of conversations that the template forced apart.
        self._split += len(texts.prompts) - len(set(texts.rows)) if texts.rows is not None else 0
        self._count_odd(texts)
        decode = self._rendering.tokenizer.backend.decode
        for row in range(min(EXAMPLES - len(self._examples), len(texts.prompts))):
            # Decode the tokens, because they are what the model sees.
            tokens = {name: column[row].as_py() for name, column in ids.items()}
            shown = {
                name: decode(values, skip_special_tokens=False)
                for name, values in tokens.items()
                if name.endswith("_ids")
            }
            # `prompt_ids` is always the first column.
            prompt, *responses = shown.values()
            response, rejected, *_ = (*responses, None, None)
            parts = {
                column: tuple(
                    decode([token for _, token in piece], skip_special_tokens=False)
                    for _, piece in itertools.groupby(
                        zip(tokens[mask_of(column)], tokens[column], strict=True), lambda pair: pair[0]
                    )
                )
                for column in shown
                if 0 in (tokens.get(mask_of(column)) or ())
            }
            answer = None if answers is None else answers[row].as_py()
            self._examples.append(Example(prompt, response, answer, rejected, parts))

    def _count_odd(self, texts: Texts) -> None:
        columns = list(texts.responses.values())
        stops = self._rendering.tokenizer.special_texts
        for column in columns:
            self._empty += sum(not _without_end(text, stops).strip() for text in column)
        if len(columns) == 2:
            self._equal += sum(one == other for one, other in zip(*columns, strict=True))

    def _trains(self) -> str:
        format, rendering = self._rendering.format, self._rendering
        if format.text:
            return "every token of a text but the first"
        turns = "; of several turns only the assistant's" if rendering.many_turns else ""
        if format.chosen:
            return f"the chosen and the rejected response, compared with each other{turns}"
        if format.dialogue and rendering.train_on == "all":
            split = (
                "; the template changes earlier turns when later ones follow, so " if self._split else ""
            )
            split += (
                f"some conversations became several rows ({self._split:,} more)" if self._split else ""
            )
            return f"every assistant turn, {self._trained_turns:,} in {_rows(self._rows)} (train_on='all'){split}"
        if format.dialogue and rendering.answered:
            more = (
                f"{self._trained_turns:,} of {self._turns:,} turns (train_on='last'; 'all' trains each)"
            )
            return f"the last assistant turn of each conversation{f', {more}' if self._turns > self._trained_turns else ''}"
        if format.response:
            return f"the response{turns}"
        return "no text of these rows: they are prompts, which the model is to answer"

    def _notes(self, rows: Rows, odd_of: int) -> tuple[str, ...]:
        format = self._rendering.format
        notes = []
        if self._rendering.repeats:
            notes.append("every response begins with its prompt, which is taken once")
        if self._empty:
            notes.append(
                f"empty responses: {self._empty:,} of {odd_of:,}; they train the model to answer nothing"
            )
        if self._equal:
            notes.append(
                f"pairs of equal responses: {self._equal:,} of {_rows(len(rows.table))}; they have no preference"
            )
        for column in (format.dialogue, format.prompt, *format.responses.values()):
            fields = _fields_of(rows.table, column)
            if column and "tool_calls" in fields and _has_arguments(rows.table.schema.field(column).type):
                notes.append(
                    f"arguments of tool calls in {column!r} are objects: those that are null are left out; JSON text keeps them"
                )
            if unread := [name for name in _UNREAD_FIELDS if name in fields]:
                notes.append(
                    f"the messages in {column!r} have a field {unread[0]!r}, which does not change what is trained"
                )
        return tuple(notes)

    def understanding(
        self,
        rows: Rows,
        answers: Answers | None,
        lengths: Mapping[str, npt.ArrayLike],
        images: Images | None = None,
    ) -> Understanding:
        """Return the summary of all rows.

        Args:
            rows: the source rows.
            answers: answers of the rows.
            lengths: [rows] token counts, by token column.
            images: images of the rows, if any.
        """
        rendering, format = self._rendering, self._rendering.format
        responses = [np.asarray(value) for name, value in lengths.items() if name != "prompt_ids"]
        return Understanding(
            source=rows.origin.files,
            rows=len(rows.table),
            format=format.name,
            columns={field.name: type_name(field.type) for field in rows.table.schema},
            roles=_roles(format, answers, rows.table.column_names, rendering.chat, images),
            trains=self._trains(),
            chat=rendering.chat,
            chat_reason=rendering.reason,
            prompts=Lengths.of(lengths["prompt_ids"]),
            examples=tuple(self._examples),
            variables=dict(rendering.variables or {}),
            system=rendering.system,
            own_system=self._own_system,
            responses=Lengths.of(np.concatenate(responses)) if responses else None,
            extraction=_extraction(answers, rows, self._settings.extract_answer),
            choices=rows.choices,
            images="" if images is None else str(images),
            notes=self._notes(rows, sum(map(len, responses))),
        )


def _roles(
    format: Format, answers: Answers | None, names: Sequence[str], chat: bool, images: Images | None
) -> dict[str, str]:
    of_template = {"tools": "tools", "template variables": "chat_template_kwargs"} if chat else {}
    named: dict[str, str | None] = {
        "system prompt": format.system if chat else None,
        "prompt": format.prompt,
        "text": format.text,
        "context of the prompt": format.context,
        "conversation": format.dialogue,
        "response": format.response,
        "chosen": format.chosen,
        "rejected": format.rejected,
        "answer": answers.column if answers else None,
        "images": images.column if images else None,
        **{role: column for role, column in of_template.items() if column in names},
    }
    return {role: column for role, column in named.items() if column is not None}


def _fields_of(table: pa.Table, column: str | None) -> list[str]:
    kind = table.schema.field(column).type if column in table.column_names else None
    if kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind = kind.value_type
    return [field.name for field in kind] if kind is not None and pa.types.is_struct(kind) else []


def _has_arguments(kind: pa.DataType) -> bool:
    return any(
        (kind.field(k).name == "arguments" and pa.types.is_struct(kind.field(k).type))
        or _has_arguments(kind.field(k).type)
        for k in range(kind.num_fields)
    )


def _without_end(text: str, ends: tuple[str, ...]) -> str:
    end = next((end for end in ends if end and text.endswith(end)), "")
    return text.removesuffix(end)


def _extraction(answers: Answers | None, rows: Rows, extract: bool) -> str:
    if answers is None:
        return ""
    missing = answers.missing
    none = (
        f"; none in {len(missing):,} of {len(answers.values):,} rows, the first {rows.origin(missing[0])}"
        if missing
        else ""
    )
    if not extract:
        return f"as written (extract_answer=False){none}"
    found: Sequence[tuple[int, str]] = [
        (answers.after_hashes, "what follows ####"),
        (answers.boxed, r"what \boxed{} holds"),
    ]
    said = [f"{what}, in {count:,} of {len(answers.values):,} rows" for count, what in found if count]
    if not said:
        return f"as written{none}"
    if answers.first_whole is not None:
        whole = len(answers.values) - answers.shortened - len(missing)
        said.append(f"as written in {whole:,}, the first {rows.origin(answers.first_whole)}")
    return "; ".join(said) + none


def _example_lines(number: int, example: Example) -> list[str]:
    lines = [f"  row {number}     prompt   {_shown(example.prompt, _SHOWN)}"]
    texts = {"response_ids": example.response}
    if example.rejected is not None:
        texts = {"chosen_ids": example.response, "rejected_ids": example.rejected}
    for column, text in texts.items():
        name = column.removesuffix("_ids")
        for k, part in enumerate(example.parts.get(column, () if text is None else (text,))[:_PARTS]):
            lines.append(
                f"            {'(not trained)' if k % 2 else f'{name:8}'} {_shown(part, _SHOWN // 2)}"
            )
        if len(example.parts.get(column, ())) > _PARTS:
            lines.append(f"            and {len(example.parts[column]) - _PARTS:,} more parts of it")
    if example.answer is not None:
        lines.append(f"            answer   {_shown(example.answer, _SHOWN // 4)}")
    return lines


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"


def _clipped(text: str) -> str:
    return beginning(text, 60)


def _shown(text: object, characters: int) -> str:
    """Return a text on one line, with the middle of a long text left out.

    >>> _shown("a" * 20 + chr(10) + "b" * 20, 20)
    "'aaaaaaa ... bbbbbbb'"
    """
    return both_ends(repr(text), characters)
