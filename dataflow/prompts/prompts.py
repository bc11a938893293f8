"""Prompts: a source of rows, read from files or data sets in common formats.

    prompts = Prompts.read("gsm8k_train.parquet", "models/qwen2-tiny", max_prompt_tokens=512)
    print(prompts.understood)

pyarrow and `tokenizers` read and tokenise the data without torch, so that errors in data appear
early. docs/data.md shows all formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ..batch import Batch
from ..column import IDENTITY, IMAGES, TEACHER_PROMPT_IDS
from ..errors import UserError
from ..json_values import CANNOT_HOLD, is_json, joined, readable_by_arrow
from ..untrusted_text import beginning, both_ends, one_line
from .answers import IMAGE_COLUMNS, Answers, Images, find_answers, find_images
from .conversations import Texts
from .curriculum import Curriculum
from .files import Rows, read_rows, refuse_mixed, rows_in_memory
from .formats import (
    Format,
    ReadArguments,
    ReadSettings,
    TooLong,
    find_format,
    is_text,
    item_type,
    refuse_quoted_messages,
    type_name,
)
from .rendering import (
    MAX_CHARACTERS,
    ReadPlan,
    first_with_value,
    mask_of,
    tokenise,
    too_many_characters,
)
from .tokenizer import Tokenizer

# Understanding: a summary of how Weft read a data set, for users to check before training.

_EXAMPLES = 3
"""Number of example rows to print."""

_SHOWN = 240
"""Number of characters to print of a prompt; half of it for a response, a quarter for others."""

_NAMED = 8
"""Number of unused columns to print by name. The summary only counts the others."""

_PARTS = 6
"""Number of parts of a response to print."""

_UNREAD_FIELDS = ("weight", "train", "mask", "masked", "loss")
"""Message fields that select trained turns in other libraries. Weft ignores them."""


@dataclass(frozen=True)
class _Lengths:
    """Distribution of lengths [tokens]."""

    shortest: int
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> _Lengths:
        """Summarise the token counts of at least one row.

        >>> _Lengths.of(range(1, 101))
        _Lengths(shortest=1, p50=51, p90=91, p99=100, longest=100)
        """
        # `higher` returns a length that occurs in the data.
        quantiles = np.quantile(np.asarray(tokens), [0, 0.5, 0.9, 0.99, 1], method="higher")
        return cls(*(int(value) for value in quantiles))

    def limit(self, multiple: int = 64) -> int:
        """Return a suitable limit: the 99th percentile, rounded up to a multiple of `multiple`, but
        at most the longest length.

        >>> _Lengths(10, 60, 90, 130, 5000).limit(), _Lengths(10, 60, 90, 130, 135).limit(), _Lengths(1, 2, 3, 4, 9).limit()
        (192, 135, 9)
        """
        # `-(-a // b)` is a / b rounded up.
        return min(-(-self.p99 // multiple) * multiple, self.longest)

    def __str__(self) -> str:
        return f"{self.shortest:,} to {self.longest:,} tokens; half up to {self.p50:,}, 90 % {self.p90:,}, 99 % {self.p99:,}"


@dataclass(frozen=True)
class _Example:
    """An example row as the model sees it."""

    prompt: str
    response: str | None = None
    """The trained response; of a pair, the chosen one."""
    answer: Any = None
    rejected: str | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps token columns to the trained and untrained parts of a response, which alternate."""


@dataclass(frozen=True)
class _Understanding:
    """Summary of how Weft read a data set. Lengths include dropped rows."""

    source: str
    """The files, or the data set's id with subset and split."""
    rows: int
    format: str
    columns: Mapping[str, str]
    roles: Mapping[str, str]
    """Maps roles (`prompt`, `answer`, `response`, ...) to columns."""
    trains: str
    chat: bool
    chat_reason: str
    chat_settings: str
    """The user's template variables and system prompt."""
    prompts: _Lengths
    responses: _Lengths | None
    examples: tuple[_Example, ...]
    extraction: str
    choices: tuple[str, ...]
    """Defaults that were used, such as `subset 'main' of main, socratic`."""
    images: str
    """The number of images and of rows with images; empty without images."""
    notes: tuple[str, ...]
    """Warnings, for example about empty responses, equal pairs or ignored fields."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[_Understanding, ...] = ()
    """Summaries of the sources of a mixture."""

    @classmethod
    def of_mixture(cls, sources: Sequence[_Understanding], lengths: np.ndarray) -> _Understanding:
        """Return the summary of joined sources whose prompts have these lengths [tokens]."""
        return replace(
            sources[0],
            source=" + ".join(one.source for one in sources),
            rows=len(lengths),
            prompts=_Lengths.of(lengths),
            dropped={},
            sources=tuple(sources),
        )

    def without(self, rows: int, reason: str) -> _Understanding:
        return replace(self, dropped={**self.dropped, reason: self.dropped.get(reason, 0) + rows})

    def __str__(self) -> str:
        roles = {
            column: [role for role, name in self.roles.items() if f"{name}.".startswith(f"{column}.")]
            for column in self.columns
        }
        named = {name: f"{_clipped(name)} ({_clipped(kind)})" for name, kind in self.columns.items()}
        used = [f"{named[name]} as {' and '.join(roles[name])}" for name in named if roles[name]]
        kept = [named[name] for name in named if not roles[name]]
        more = f" and {len(kept) - _NAMED:,} more columns" if len(kept) > _NAMED else ""
        dropped = [f"{rows:,} of {self.rows:,}: {reason}" for reason, rows in self.dropped.items()]
        if self.sources:
            of_mixture = [f"left out of the mixture: {'; '.join(dropped)}"] if dropped else []
            return "\n".join([*map(str, self.sources), *of_mixture])
        lines = [f"{self.source}: {_rows(self.rows)}, read as {self.format}"]
        lines += [f"  default   {choice}" for choice in self.choices]
        lines.append(f"  reads     {'; '.join(used)}")
        if kept:
            lines.append(
                f"  keeps     {', '.join(kept[:_NAMED])}{more}; not trained on, for rewards and nodes of your own"
            )
        applied = "applied" if self.chat else "not applied"
        lines.append(f"  template  {applied}: {self.chat_reason}{self.chat_settings}")
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
        lines.append(f"  left out  {'; '.join(dropped) or 'none'}")
        for number, example in enumerate(self.examples, start=1):
            lines += _example_lines(number, example)
        return "\n".join(map(one_line, lines))


class _Observer:
    """Collects the summary while `Prompts` reads rows part by part."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._examples: list[_Example] = []
        self._own_system = self._turns = self._trained_turns = self._split = self._rows = 0
        self._empty = self._equal = 0

    def see(self, texts: Texts, ids: Mapping[str, pa.Array], answers: pa.ChunkedArray | None) -> None:
        """Add a part of the rows. `ids` maps token columns to tokens."""
        self._own_system += texts.own_system
        self._turns += texts.turns
        self._trained_turns += texts.trained_turns
        self._rows += len(texts.prompts)
        # Count the additional rows of split conversations.
        self._split += len(texts.prompts) - len(set(texts.rows)) if texts.rows is not None else 0
        columns = list(texts.responses.values())
        stops = self._plan.tokenizer.special_texts
        for column in columns:
            ends = (next((end for end in stops if end and text.endswith(end)), "") for text in column)
            texts_only = (text.removesuffix(end) for text, end in zip(column, ends, strict=True))
            self._empty += sum(not text.strip() for text in texts_only)
        if len(columns) == 2:
            self._equal += sum(one == other for one, other in zip(*columns, strict=True))
        for row in range(min(_EXAMPLES - len(self._examples), len(texts.prompts))):
            answer = None if answers is None else answers[row].as_py()
            self._add_example({name: column[row].as_py() for name, column in ids.items()}, answer)

    def _add_example(self, tokens: Mapping[str, list[int]], answer: Any) -> None:
        # Show decoded tokens, because the model sees these.
        decode = self._plan.tokenizer.backend.decode
        columns = [name for name in tokens if name.endswith("_ids")]
        shown = [decode(tokens[name], skip_special_tokens=False) for name in columns]
        parts: dict[str, tuple[str, ...]] = {}
        for column in columns:
            mask = tokens.get(mask_of(column)) or []
            if 0 in mask:
                pairs = zip(mask, tokens[column], strict=True)
                pieces = [[t for _, t in part] for _, part in itertools.groupby(pairs, lambda p: p[0])]
                parts[column] = tuple(decode(piece, skip_special_tokens=False) for piece in pieces)
        # `prompt_ids` is always the first column.
        prompt, response, rejected, *_ = (*shown, None, None)
        self._examples.append(_Example(prompt, response, answer, rejected, parts))

    def _trains(self) -> str:
        format, plan = self._plan.format, self._plan
        if format.text:
            return "every token of a text but the first"
        turns = "; of several turns only the assistant's" if plan.many_turns else ""
        if format.chosen:
            return f"the chosen and the rejected response, compared with each other{turns}"
        if format.dialogue and plan.settings.train_on == "all":
            split = (
                "; the template changes earlier turns when later ones follow, so some conversations became several rows "
                f"({self._split:,} more)"
            )
            rows = f"{self._trained_turns:,} in {_rows(self._rows)}"
            return f"every assistant turn, {rows} (train_on='all'){split if self._split else ''}"
        if format.dialogue and plan.answered:
            turns = (
                f"{self._trained_turns:,} of {self._turns:,} turns (train_on='last'; 'all' trains each)"
            )
            more = f", {turns}" if self._turns > self._trained_turns else ""
            return f"the last assistant turn of each conversation{more}"
        if format.response:
            return f"the response{turns}"
        return "no text of these rows: they are prompts, which the model is to answer"

    def _notes(self, rows: Rows, num_responses: int) -> Iterator[str]:
        format = self._plan.format
        if self._plan.repeats:
            yield "every response begins with its prompt, which is taken once"
        if self._empty:
            yield f"empty responses: {self._empty:,} of {num_responses:,}; they train the model to answer nothing"
        if self._equal:
            yield f"pairs of equal responses: {self._equal:,} of {_rows(len(rows.table))}; they have no preference"
        for column in (format.dialogue, format.prompt, *format.responses.values()):
            if column not in rows.table.column_names:
                continue
            kind = rows.table.schema.field(column).type
            item = item_type(kind)
            fields = [field.name for field in item] if pa.types.is_struct(item) else []
            if "tool_calls" in fields and _has_arguments(kind):
                yield f"arguments of tool calls in {column!r} are objects: those that are null are left out; JSON text keeps them"
            if unread := [name for name in _UNREAD_FIELDS if name in fields]:
                yield f"the messages in {column!r} have a field {unread[0]!r}, which does not change what is trained"

    def _chat_settings(self) -> str:
        system, variables = self._plan.settings.system, self._plan.variables or {}
        said = "".join(f"; {name}={value!r}" for name, value in variables.items())
        if system is None:
            return said
        own = f" (rows that keep their own: {self._own_system:,})" if self._own_system else ""
        return f"{said}; system prompt {_shown(system, _SHOWN // 4)}{own}"

    def understanding(
        self,
        rows: Rows,
        answers: Answers | None,
        lengths: Mapping[str, npt.ArrayLike],
        images: Images | None = None,
    ) -> _Understanding:
        """Return the summary of all rows. `lengths` maps token columns to token counts [rows]."""
        plan = self._plan
        responses = [np.asarray(value) for name, value in lengths.items() if name != "prompt_ids"]
        return _Understanding(
            source=rows.files,
            rows=len(rows.table),
            format=plan.format.name,
            columns={field.name: type_name(field.type) for field in rows.table.schema},
            roles=_roles(plan.format, answers, rows.table.column_names, plan.chat, images),
            trains=self._trains(),
            chat=plan.chat,
            chat_reason=plan.reason,
            chat_settings=self._chat_settings(),
            prompts=_Lengths.of(lengths["prompt_ids"]),
            responses=_Lengths.of(np.concatenate(responses)) if responses else None,
            examples=tuple(self._examples),
            extraction=_extraction(answers, rows, plan.settings.extract_answer) if answers else "",
            choices=rows.choices,
            images="" if images is None else str(images),
            notes=tuple(self._notes(rows, sum(map(len, responses)))),
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


def _has_arguments(kind: pa.DataType) -> bool:
    return any(
        (kind.field(k).name == "arguments" and pa.types.is_struct(kind.field(k).type))
        or _has_arguments(kind.field(k).type)
        for k in range(kind.num_fields)
    )


def _extraction(answers: Answers, rows: Rows, extract: bool) -> str:
    number, missing = len(answers.values), np.flatnonzero(answers.values.is_null().to_numpy()).tolist()
    none = ""
    if missing:
        none = f"; none in {len(missing):,} of {number:,} rows, the first {rows.place(missing[0])}"
    if not extract:
        return f"as written (extract_answer=False){none}"
    found = ((answers.after_hashes, "what follows ####"), (answers.boxed, r"what \boxed{} holds"))
    said = [f"{what}, in {count:,} of {number:,} rows" for count, what in found if count]
    if not said:
        return f"as written{none}"
    if answers.first_whole is not None:
        whole = number - answers.shortened - len(missing)
        said.append(f"as written in {whole:,}, the first {rows.place(answers.first_whole)}")
    return "; ".join(said) + none


def _example_lines(number: int, example: _Example) -> list[str]:
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
    """Return a text on one line, without the middle of a long text.

    >>> _shown("a" * 20 + chr(10) + "b" * 20, 20)
    "'aaaaaaa ... bbbbbbb'"
    """
    return both_ends(repr(text), characters)


# Prompts

_WRITTEN = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
"""Token columns. Files may not have them, because another tokenizer may have made them."""

_MASKS = ("response_mask", "chosen_mask", "rejected_mask")

_RENAMED = (*map(str, IDENTITY), *_MASKS, str(TEACHER_PROMPT_IDS))
"""Columns that Weft adds to rows. Weft renames the file's columns of these names to `file_NAME`."""

_MEDIA = ("video", "videos", "audio", "audios")
"""Columns of video and audio in TRL, verl and OpenRLHF."""

_PART = 8192
"""Number of rows to hold as Python text at the same time. Other rows stay in Arrow."""


@dataclass(frozen=True)
class Prompts:
    """A source with one tokenised row per prompt, in the order of the file.

    `table` has these columns, in this order. Each is one chunk, with 64-bit offsets above 2 GiB.

    - `prompt_ids` (list of int32): tokens of the prompt. With the chat template, a prompt ends with
      the header of the assistant's turn. Plain text gets the tokenizer's default special tokens.
    - `response_ids`, or `chosen_ids` and `rejected_ids` (lists of int32), if the format has
      responses: the tokens after `prompt_ids`, including the token that ends a response.
    - `response_mask`, or `chosen_mask` and `rejected_mask` (lists of uint8), if a response has
      several turns: 1 for trained tokens, 0 for turns of users and tools.
    - `prompt` (string): text of the prompt, after the chat template.
    - `images` (list of large binary), if rows have images: a row's encoded images, in the order of
      their placeholders in `prompt_ids`.
    - `answer`, if the rows have a ground truth: the final answer of a worked solution, or the
      file's value. Text is a string. Numbers, booleans, lists and objects have the type `JsonType`:
      JSON text on disk, and values in Python.
    - The file's other columns, unchanged. Values without an exact Arrow type become `JsonType`.

    Weft renames some columns of the file. Messages in a column `prompt` become `prompt_messages`,
    and worked solutions in a column `answer` become `full_answer`. A column with the name of a Weft
    column gets the prefix `file_` (`file_parent_id`), as does a column `prompt` that is not the
    source of the prompts.

    >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
    >>> backend = Backend(models.WordLevel({"<unk>": 0, "2": 1, "+": 2}, unk_token="<unk>"))
    >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> prompts = Prompts.from_rows([{"prompt": "2 + 2", "answer": 4, "level": "easy"}], Tokenizer(backend))
    >>> len(prompts), prompts.columns
    (1, ('prompt_ids', 'prompt', 'answer', 'level'))
    >>> prompts.table.to_pylist()
    [{'prompt_ids': [1, 2, 1], 'prompt': '2 + 2', 'answer': 4, 'level': 'easy'}]
    """

    name: str
    table: pa.Table = field(repr=False)
    format: str = ""
    dropped: int = 0
    """Number of rows dropped: by `filter`, or because a text exceeds `max_prompt_tokens`, the
    model's context, or the limit for tokenising."""
    too_long: TooLong = field(default="error", repr=False)
    """How to handle prompts that exceed the model's context: "error" or "drop"."""
    file_columns: frozenset[str] = field(default=frozenset(), repr=False)
    """Columns copied unchanged from the file. Weft never takes them for its own."""
    understood: _Understanding | None = field(default=None, repr=False)
    """Summary of how Weft read the rows; None without `read` or `from_rows`. That of a mixture has the
    columns and roles of its first source."""
    curriculum: Curriculum | None = field(default=None, repr=False)
    """Which rows training draws next; None draws them in the order of the schedule."""

    @classmethod
    def read(
        cls,
        path: str | Path | Sequence[str | Path],
        tokenizer: str | Path | Tokenizer,
        *,
        split: str | None = None,
        subset: str | None = None,
        **settings: Unpack[ReadArguments],
    ) -> Prompts:
        """Read prompts from files, a folder, or a data set of the Hugging Face hub.

        Args:
            path: a file, a list of files, a folder, or the Hugging Face id of a data set. Files are
                `.parquet`, `.jsonl` (one object per line), `.json` (the same, or one array of
                objects), `.csv` or `.tsv` (with a header), or `.arrow`. Text files may be
                compressed (`.jsonl.gz`). Data sets come from the cache or the network, and need the
                extra `datasets`.
            tokenizer: the model's folder or Hugging Face id, or a loaded `Tokenizer`.
            split: split of a folder or data set. Default: the only split or `train`.
            subset: subset of a folder or data set. Default: the only subset, `default` or `main`.
            settings: fields of `ReadSettings`.

        Raises:
            UserError: the data is invalid. The message names the file, the row, the rule, the value
                and the closest valid value.

        >>> import json, pathlib, tempfile
        >>> from tokenizers import Tokenizer as Backend, models
        >>> byte = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))
        >>> file = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
        >>> _ = file.write_text('{"prompt": "1+2", "answer": "3"}\\n{"prompt": "20+21", "answer": "41"}\\n')
        >>> prompts = Prompts.read(file, byte)
        >>> prompts.name, prompts.format, prompts.table["prompt_ids"].to_pylist()
        ('sums', 'TRL prompt-only', [[1, 10, 2], [2, 0, 10, 2, 1]])
        >>> Prompts.read(file, byte, max_prompt_tokens=4, too_long="drop").dropped
        1
        """
        how = ReadSettings(**settings)
        return cls._of(read_rows(path, subset, split, how.limit), tokenizer, how)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]] | pa.Table | Any,
        tokenizer: str | Path | Tokenizer,
        *,
        name: str = "rows",
        **settings: Unpack[ReadArguments],
    ) -> Prompts:
        """Create prompts from rows in memory, in any format for files.

        Args:
            rows: dictionaries, a `datasets.Dataset`, a pandas `DataFrame`, or an Arrow table.
            tokenizer: see `read`.
            name: name of the source.
            settings: fields of `ReadSettings`.
        """
        how = ReadSettings(**settings)
        return cls._of(rows_in_memory(rows, name, how.limit), tokenizer, how)

    @classmethod
    def reasoning_gym(
        cls,
        task: str,
        tokenizer: str | Path | Tokenizer,
        *,
        size: int = 1000,
        seed: int = 0,
        level: int | None = None,
        difficulty: Mapping[str, Any] | None = None,
        **settings: Unpack[ReadArguments],
    ) -> Prompts:
        """Create prompts of a task of reasoning-gym, which needs the extra `reasoning-gym` but no
        download. `ReasoningGym()` grades the responses.

            prompts = weft.Prompts.reasoning_gym("chain_sum", model, size=10_000, seed=0)
            train, held_out = prompts.hold_out(200)

        Args:
            task: one of its hundred tasks, such as "chain_sum", "countdown" or "maze".
            size: rows to make. Equal questions are kept once, so there may be fewer.
            seed: first seed of the rows. Neighbouring seeds share nearly all rows, so use `hold_out`
                for evaluations.
            level: level of the task's curriculum, from 0; None for its default settings.
            difficulty: settings of the task, such as `{"max_terms": 3}`.
            settings: fields of `ReadSettings`.
        """
        from .procedural_tasks import task_rows

        rows = task_rows(task, size, seed, level, difficulty or {})
        return cls.from_rows(rows, tokenizer, name=task, **settings)

    @classmethod
    def _of(cls, exact: Rows, source: str | Path | Tokenizer, how: ReadSettings) -> Prompts:
        _refuse_columns(exact)
        unchanged = exact
        names = [f"file_{name}" if name in _RENAMED else name for name in exact.table.column_names]
        exact = replace(exact, table=exact.table.rename_columns(names))
        # Texts, messages and images need plain types; other columns stay exact.
        rows = replace(exact, table=readable_by_arrow(exact.table))
        images = find_images(rows)
        format = find_format(rows, how)
        # The column `prompt` will hold the rendered text.
        if format.prompt != "prompt" and "prompt" in names:
            names = ["file_prompt" if name == "prompt" else name for name in names]
            exact = replace(exact, table=exact.table.rename_columns(names))
            rows = replace(rows, table=rows.table.rename_columns(names))
        if how.prompt is None and how.response is None:
            refuse_quoted_messages(rows, format)
        for column in format.texts:
            name = column.partition(".")[0]
            if is_json(rows.table.schema.field(name).type):
                refuse_mixed(name, rows)
        # Load this after the checks, because it may download files.
        tokenizer = Tokenizer.load(source)
        plan = ReadPlan.decide(rows, format, tokenizer, how)
        answers = find_answers(exact, format, how.answer, how.extract_answer)
        observer = _Observer(plan)
        parts: list[pa.Table] = []
        sources: list[np.ndarray] = []
        dropped = 0
        for start in range(0, len(rows.table), _PART):
            part = rows.part(start, _PART)
            counts = None if images is None else images.counts[start : start + _PART].tolist()
            texts = plan.texts(part, counts)
            # Tokenising such long texts would take minutes.
            if how.too_long == "drop" and (long := too_many_characters(texts)):
                dropped += len(long)
                texts = texts.keeping([row for row in range(len(texts.prompts)) if row not in long])
                if not texts.prompts:
                    continue
            # One conversation may become several rows.
            of_part = np.arange(len(part.table)) if texts.rows is None else np.asarray(texts.rows)
            ids = tokenise(texts, part, tokenizer)
            observer.see(
                texts, ids, None if answers is None else answers.values.slice(start, _PART).take(of_part)
            )
            parts.append(pa.table({**ids, "prompt": pa.array(texts.prompts, pa.string())}))
            sources.append(start + of_part)
        if not parts:
            raise rows.error(f"all {dropped} rows have texts of more than {MAX_CHARACTERS:,} characters")
        made, source_rows = _with_useful_masks(pa.concat_tables(parts)), np.concatenate(sources)
        lengths = {name: _lengths(made, name) for name in made.column_names if name.endswith("_ids")}
        understood = observer.understanding(rows, answers, lengths, images)
        if dropped:
            understood = understood.without(dropped, f"longer than {MAX_CHARACTERS:,} characters")
        if dropped or len(source_rows) > len(exact.table):  # rows dropped, or conversations split
            exact = replace(exact, table=exact.table.take(source_rows))
            answers = answers and replace(answers, values=answers.values.take(source_rows))
            images = images and replace(images, values=images.values.take(pa.array(source_rows)))
        result = _with_the_rest(made, exact.table, answers, images)
        own = {*made.column_names, *(["answer"] if answers else []), *([str(IMAGES)] if images else [])}
        if how.teacher is not None:
            theirs, column = _prompts_of_teacher(unchanged, how, len(result)), str(TEACHER_PROMPT_IDS)
            result, own = result.append_column(column, theirs), {*own, column}
        kept = frozenset(result.column_names) - own
        whole = cls(exact.name, result, format.name, dropped, how.too_long, kept, understood)
        if how.max_prompt_tokens is None:
            return whole._compact()
        return whole._up_to_limit(lengths["prompt_ids"], how.max_prompt_tokens, rows, source_rows)

    def _up_to_limit(
        self, lengths: np.ndarray, limit: int, rows: Rows, source_rows: np.ndarray
    ) -> Prompts:
        """Drop prompts longer than `limit`, or raise a UserError (see `too_long`)."""
        long = np.flatnonzero(lengths > limit)
        if not len(long):
            return self._compact()
        is_some = len(long) < len(lengths)
        if self.too_long == "error" or not is_some:
            way = "raise max_prompt_tokens" + (", or set too_long='drop'" if is_some else "")
            raise rows.error(
                f"the prompt has {lengths[long[0]]} tokens, max_prompt_tokens is {limit} "
                f"({len(long)} of {len(lengths)} rows are longer); {way}",
                int(source_rows[long[0]]),
            )
        return self._keeping(lengths <= limit, f"longer than max_prompt_tokens={limit}")

    @classmethod
    def mix(cls, sources: Mapping[str, Prompts]) -> Prompts:
        """Join sources to one, whose column `source` names the source of each row. A row has null in
        the columns that its source lacks. `Curriculum(sources="source")` weights the sources.

        Raises:
            UserError: `sources` is empty, or a column has different types in two of them.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> byte = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))
        >>> sums = Prompts.from_rows([{"prompt": "1+2", "level": 1}], byte)
        >>> mixed = Prompts.mix({"easy": sums, "hard": Prompts.from_rows([{"prompt": "12+34"}], byte)})
        >>> mixed.table.select(["prompt", "level", "source"]).to_pylist()
        [{'prompt': '1+2', 'level': 1, 'source': 'easy'}, {'prompt': '12+34', 'level': None, 'source': 'hard'}]
        """
        if not sources:
            raise UserError("Prompts.mix() got no sources; give a mapping of names to Prompts")
        names = list(dict.fromkeys(column for one in sources.values() for column in one.columns))
        if "source" in names:
            raise UserError(
                "Prompts.mix() writes the column 'source', which a source has; rename it there"
            )
        columns: dict[str, pa.ChunkedArray] = {}
        for name in names:
            parts = [
                one.table.column(name) if name in one.columns else pa.chunked_array([pa.nulls(len(one))])
                for one in sources.values()
            ]
            try:
                columns[name] = joined(parts)
            except CANNOT_HOLD:
                kinds = {
                    of: type_name(one.table.schema.field(name).type)
                    for of, one in sources.items()
                    if name in one.columns
                }
                raise UserError(
                    f"Prompts.mix(): column {name!r} has different types ({', '.join(f'{k}: {v}' for k, v in kinds.items())}); "
                    "convert it in the files, or rename it"
                ) from None
        of_rows = [name for name, one in sources.items() for _ in range(len(one))]
        columns["source"] = pa.chunked_array([pa.array(of_rows, pa.string())])
        first = next(iter(sources.values()))
        understood = [one.understood for one in sources.values() if one.understood is not None]
        whole = replace(
            first,
            name="+".join(sources),
            table=pa.table(columns),
            format=" + ".join(dict.fromkeys(one.format for one in sources.values())),
            dropped=sum(one.dropped for one in sources.values()),
            file_columns=frozenset({"source"}).union(*(one.file_columns for one in sources.values())),
        )
        if understood:
            lengths = _lengths(whole.table, "prompt_ids")
            whole = replace(whole, understood=_Understanding.of_mixture(understood, lengths))
        return whole._compact()

    def with_curriculum(self, curriculum: Curriculum) -> Prompts:
        """Let training draw the prompts by their measured solve rates. Evaluations ignore this."""
        return replace(self, curriculum=curriculum)

    def up_to(self, tokens: int) -> Prompts:
        """Like `keeping_short`, for prompts of at most `tokens` tokens."""
        reason = f"longer than {tokens} tokens, which leaves the model no room for a response"
        return self.keeping_short(_lengths(self.table, "prompt_ids") <= tokens, reason)

    def keeping_short(self, kept: np.ndarray, reason: str) -> Prompts:
        """Drop rows that are too long for a model. Does nothing unless `too_long` is `drop` and
        some rows remain.

        Args:
            kept: [rows] bool, whether to keep each row.
            reason: completes "rows were dropped: ...".
        """
        if self.too_long != "drop" or kept.all() or not kept.any():
            return self
        return self._keeping(kept, reason)

    def hold_out(self, rows: int, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Split off random rows for evaluation.

        Returns:
            Two sources without common prompts: rows to train on, and `rows` random rows to evaluate
            on. Other rows with prompts of the second source are dropped.

        Raises:
            UserError: `rows` is not an integer, or one of the sources would be empty.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> byte = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))
        >>> prompts = Prompts.from_rows([{"prompt": f"{i}+1"} for i in range(10)], byte, name="sums")
        >>> train, held_out = prompts.hold_out(2)
        >>> train.name, len(train), held_out.name, len(held_out)
        ('sums', 8, 'sums_held_out', 2)
        """
        if not isinstance(rows, int | np.integer) or isinstance(rows, bool):
            raise UserError(
                f"{self.name}: hold_out(rows={rows!r}): a number of rows is an integer, such as {len(self) // 10 or 1}"
            )
        drawn = np.zeros(len(self), bool)
        drawn[np.random.default_rng(seed).permutation(len(self))[: max(rows, 0)]] = True
        held_out, asked = self.table.filter(pa.array(drawn)), self._asked
        # Training must not see copies of held-out prompts.
        taken = {one for one, is_drawn in zip(asked, drawn, strict=True) if is_drawn}
        rest = self.table.filter(pa.array([one not in taken for one in asked], pa.bool_()))
        if rows < 1 or not len(rest):
            raise UserError(
                f"{self.name}: hold_out(rows={rows}) of {len(self)} rows leaves {len(rest)} to train on and {len(held_out)} to "
                "evaluate on; each needs at least one"
            )
        name = f"{self.name}_held_out"
        held_out = replace(self, name=name, table=held_out, dropped=0, understood=None)
        return replace(self, table=rest)._compact(), held_out._compact()

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Prompts:
        """Keep the rows for which a function returns True. `dropped` counts the others.

        The function gets each row as a dictionary. If it raises, a note on the error names the row.

        Raises:
            UserError: the function returns something other than True or False, or keeps no row.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> byte = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))
        >>> prompts = Prompts.from_rows([{"prompt": f"{i}+1", "level": i} for i in (3, 1, 2)], byte, name="sums")
        >>> prompts.filter(lambda row: row["level"] < 3).table["prompt"].to_pylist()
        ['1+1', '2+1']
        """
        name = getattr(keep, "__name__", repr(keep))
        kept = np.zeros(len(self), bool)
        for number, answer in enumerate(self._of_each_row(keep)):
            if not isinstance(answer, bool | np.bool_):
                raise UserError(
                    f"{self.name}, row {number + 1}: filter({name}) returned {answer!r}; it must return True to keep a row, or False"
                )
            kept[number] = answer
        if not kept.any():
            raise UserError(f"{self.name}: filter({name}) keeps none of {len(self)} rows")
        return self if kept.all() else self._keeping(kept, f"filter({name})")

    def sort(self, key: Callable[[dict[str, Any]], Any], *, reverse: bool = False) -> Prompts:
        """Sort the rows by a key function, which gets each row as a dictionary. The sort is stable.
        Schedules with `shuffle=False` keep this order.

        Raises:
            UserError: two keys cannot be compared, or a key is NaN.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> byte = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))
        >>> prompts = Prompts.from_rows([{"prompt": f"{i}+1", "level": i} for i in (3, 1, 2)], byte, name="sums")
        >>> prompts.sort(lambda row: row["level"]).table["prompt"].to_pylist()
        ['1+1', '2+1', '3+1']
        """
        keys = list(self._of_each_row(key))
        name = getattr(key, "__name__", repr(key))
        for row, value in enumerate(keys, start=1):
            if isinstance(value, float) and value != value:
                raise UserError(
                    f"{self.name}, row {row}: the key of sort({name}) is nan, which has no order"
                )
        try:
            order = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)
        except TypeError as error:
            raise UserError(
                f"{self.name}: the keys of sort({name}) cannot be compared ({error})"
            ) from None
        return replace(self, table=self.table.take(pa.array(order, pa.int64())))._compact()

    def _of_each_row(self, function: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        for start in range(0, len(self), _PART):
            for number, row in enumerate(self.table.slice(start, _PART).to_pylist(), start=start + 1):
                try:
                    answer = function(row)
                except Exception as error:
                    # Add the row to the user's error.
                    error.add_note(f"{self.name}, row {number}")
                    raise
                yield answer

    @property
    def _asked(self) -> list[tuple[Hashable, ...]]:
        """A key for each row that identifies its prompt: the text, and hashes of images."""
        texts = self.table["prompt"].to_pylist()
        if str(IMAGES) not in self.columns:
            return [(text,) for text in texts]
        images = (
            [xxhash.xxh3_128_digest(one.as_buffer()) for one in row.values]
            for row in self.table[str(IMAGES)]
        )
        return [(text, *digests) for text, digests in zip(texts, images, strict=True)]

    def _keeping(self, kept: np.ndarray, reason: str) -> Prompts:
        dropped = int((~kept).sum())
        understood = self.understood.without(dropped, reason) if self.understood else None
        table = self.table.filter(pa.array(kept))
        rest = replace(self, table=table, dropped=self.dropped + dropped, understood=understood)
        return rest._compact()

    def _compact(self) -> Prompts:
        return replace(self, table=pa.Table.from_batches([Batch.of_table(self.table).record]))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows


def _prompts_of_teacher(exact: Rows, how: ReadSettings, rows: int) -> pa.ChunkedArray:
    """Return the prompts in the tokens of `how.teacher`, for this number of rows."""
    assert how.teacher is not None
    settings = how.model_copy(update={"teacher": None, "max_prompt_tokens": None})
    theirs = Prompts._of(exact, how.teacher, settings)  # pyright: ignore[reportPrivateUsage]
    if len(theirs) != rows:
        raise exact.error(
            f"teacher={str(how.teacher)!r}: its chat template makes {len(theirs):,} rows of the conversations, and the student's "
            f"{rows:,}; leave train_on='all' out"
        )
    return theirs.table.column("prompt_ids")


def _with_useful_masks(made: pa.Table) -> pa.Table:
    masks = [name for name in _MASKS if name in made.column_names]
    trained = (chunk.flatten() for name in masks for chunk in made.column(name).chunks)
    # Masks that are 1 everywhere only cost memory.
    useful = any(len(values) and not values.to_numpy().all() for values in trained)
    return made if useful else made.drop_columns(masks)


def _with_the_rest(
    made: pa.Table, table: pa.Table, answers: Answers | None, images: Images | None
) -> pa.Table:
    """Return the new columns, followed by the file's columns that they do not replace."""
    columns: dict[str, pa.ChunkedArray] = dict(zip(made.column_names, made.columns, strict=True))
    if answers is not None:
        columns["answer"] = answers.values
    if images is not None:
        columns[str(IMAGES)] = pa.chunked_array([images.values])
    taken = {*columns, *IMAGE_COLUMNS} if images is not None else {*columns}
    kept = {name: table.column(name) for name in table.column_names if name not in taken}
    if "prompt" in table.column_names and not is_text(table.schema.field("prompt").type):
        kept.setdefault("prompt_messages", table.column("prompt"))
    if answers is not None and answers.shortened and "answer" in table.column_names:
        kept.setdefault("full_answer", table.column("answer"))
    return pa.table({**columns, **kept})


def _lengths(table: pa.Table, column: str) -> np.ndarray:
    return Batch.of_table(table.select([column])).lengths(column)


def _refuse_columns(rows: Rows) -> None:
    """Raise a UserError for duplicate columns, and for tokens, video or audio."""
    names = rows.table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise rows.error(f"there are two columns {twice!r}; rename one of them")
    taken = next((column for column in _WRITTEN if column in names), None)
    if taken:
        raise rows.error(f"column {taken!r} is one that Weft writes; rename it in the file")
    for column in _MEDIA:
        row = first_with_value(rows.table, column)
        if row is not None:
            raise rows.error(
                f"column {column!r} holds video or audio, which Weft does not support; "
                "leave the column out, or rename it if only a reward function should have it",
                row,
            )
