"""Understanding: what was understood of a data set, to be read by the user before anything is trained on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .answers import Answers
from .conversations import Texts
from .formats import Format, type_name
from .images import Images
from .rows import Rows
from .settings import ReadSettings
from .texts import Rendering

EXAMPLES = 3
"""Rows that are shown."""

_SHOWN = 240
"""Characters that are printed of an example, and of an answer a quarter of them."""


@dataclass(frozen=True)
class Lengths:
    """How long the rows are, in tokens."""

    shortest: int
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> Lengths:
        """Summarise the rows' numbers of tokens; there must be at least one row.

        >>> Lengths.of(range(1, 101))
        Lengths(shortest=1, p50=51, p90=91, p99=100, longest=100)
        """
        quantiles = np.quantile(np.asarray(tokens), [0, 0.5, 0.9, 0.99, 1], method="higher")
        return cls(*(int(value) for value in quantiles))

    def limit(self, multiple: int = 64) -> int:
        """A limit for such rows: the 99th percentile, rounded up to a multiple, and no more than the longest needs.

        >>> Lengths(10, 60, 90, 130, 5000).limit(), Lengths(10, 60, 90, 130, 135).limit(), Lengths(1, 2, 3, 4, 9).limit()
        (192, 135, 9)
        """
        return min(-(-self.p99 // multiple) * multiple, self.longest)

    def __str__(self) -> str:
        return f"{self.shortest:,} to {self.longest:,} tokens; half up to {self.p50:,}, 90 % {self.p90:,}, 99 % {self.p99:,}"


@dataclass(frozen=True)
class Example:
    """A row as the model will see it."""

    prompt: str
    response: str | None = None
    """The response that is trained on (of a pair, the chosen one), where rows have any."""
    answer: str | None = None


@dataclass(frozen=True)
class Understanding:
    """What was understood of a data set; `str` of it is what a run prints at its start.

    Lengths are those of all rows that were read, the dropped ones too.
    """

    source: str
    """Files, or the id of a data set with its subset and split."""
    rows: int
    """Rows that were read."""
    format: str
    columns: Mapping[str, str]
    """Column of the source -> its type."""
    roles: Mapping[str, str]
    """`prompt`, `answer`, `response`, ... -> the column that it is taken from."""
    chat: bool
    """Whether the chat template was applied."""
    chat_reason: str
    prompts: Lengths
    examples: tuple[Example, ...]
    variables: Mapping[str, object]
    """Of the chat template, as the user set them."""
    system: str | None = None
    own_system: int = 0
    """Rows that kept a system message of their own."""
    responses: Lengths | None = None
    extraction: str = ""
    """How answers were taken out of worked solutions."""
    choices: tuple[str, ...] = ()
    """Defaults that were taken: `subset 'main' of main, socratic`."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows that were left out."""
    images: str = ""
    """How many images there are, in how many rows; empty: none."""

    def without(self, rows: int, reason: str) -> Understanding:
        """With rows that were left out later."""
        return replace(self, dropped={**self.dropped, reason: self.dropped.get(reason, 0) + rows})

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.rows:,} {'row' if self.rows == 1 else 'rows'}, read as {self.format}"]
        lines += [f"  default   {choice}" for choice in self.choices]
        lines.append(f"  columns   {', '.join(self._column(name) for name in self.columns)}")
        lines.append(f"  template  {'applied' if self.chat else 'not applied'}: {self.chat_reason}{self._settings()}")
        if "answer" in self.roles:
            lines.append(f"  answers   from {self.roles['answer']!r}: {self.extraction}")
        else:
            lines.append("  answers   none: no column has a known name; answer='...' names one")
        if self.images:
            lines.append(f"  images    {self.images}")
        lines.append(f"  prompts   {self.prompts}")
        if self.responses is not None:
            lines.append(f"  responses {self.responses}")
        dropped = [f"{rows:,} of {self.rows:,}: {reason}" for reason, rows in self.dropped.items()]
        lines.append(f"  left out  {'; '.join(dropped) or 'none'}")
        for number, example in enumerate(self.examples, start=1):
            lines.append(f"  row {number}     {_shown(example.prompt, _SHOWN)}")
            if example.response is not None:
                lines.append(f"    response {_shown(example.response, _SHOWN // 4)}")
            if example.answer is not None:
                lines.append(f"    answer {_shown(example.answer, _SHOWN // 4)}")
        return "\n".join(map(_printable, lines))

    def _column(self, name: str) -> str:
        roles = [role for role, column in self.roles.items() if column == name or column.startswith(f"{name}.")]
        return f"{name} ({'; '.join([self.columns[name], *roles])})"

    def _settings(self) -> str:
        said = [f"{name}={value!r}" for name, value in self.variables.items()]
        if self.system is not None:
            own = f" (rows that keep their own: {self.own_system:,})" if self.own_system else ""
            said.append(f"system prompt {_shown(self.system, _SHOWN // 4)}{own}")
        return "".join(f"; {text}" for text in said)


class Observer:
    """Collects what is understood while rows are read, part by part."""

    def __init__(self, rendering: Rendering, settings: ReadSettings) -> None:
        self._rendering = rendering
        self._settings = settings
        self._examples: list[Example] = []
        self._own_system = 0

    def see(self, texts: Texts, ids: Mapping[str, pa.Array], answers: pa.ChunkedArray | None) -> None:
        """Look at a part of the rows.

        Args:
            texts: their texts.
            ids: their tokens, by column.
            answers: their answers.
        """
        self._own_system += texts.own_system
        tokenizer = self._rendering.tokenizer
        for row in range(min(EXAMPLES - len(self._examples), len(texts.prompts))):
            # From the tokens, not from the text: what the model sees.
            shown = {
                name: tokenizer.backend.decode(column[row].as_py(), skip_special_tokens=False)
                for name, column in ids.items()
            }
            prompt, *responses = (shown[name] for name in ids)
            answer = None if answers is None else answers[row].as_py()
            self._examples.append(Example(prompt, responses[0] if responses else None, answer))

    def understanding(
        self,
        rows: Rows,
        answers: Answers | None,
        lengths: Mapping[str, npt.ArrayLike],
        images: Images | None = None,
    ) -> Understanding:
        """What was understood of all rows.

        Args:
            rows: as they were read.
            answers: of the rows.
            lengths: [rows] tokens, by column of tokens.
            images: of the rows, if they have any.
        """
        rendering, format = self._rendering, self._rendering.format
        responses = [np.asarray(value) for name, value in lengths.items() if name != "prompt_ids"]
        return Understanding(
            source=rows.origin.files,
            rows=len(rows.table),
            format=format.name,
            columns={field.name: type_name(field.type) for field in rows.table.schema},
            roles=_roles(format, answers),
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
        )


def _roles(format: Format, answers: Answers | None) -> dict[str, str]:
    named: dict[str, str | None] = {
        "prompt": format.prompt or format.text,
        "conversation": format.dialogue,
        "response": format.response,
        "chosen": format.chosen,
        "rejected": format.rejected,
        "answer": answers.column if answers else None,
    }
    return {role: column for role, column in named.items() if column is not None}


def _extraction(answers: Answers | None, rows: Rows, extract: bool) -> str:
    """How the answers were taken, in a sentence."""
    if answers is None:
        return ""
    if not extract:
        return "as written (extract_answer=False)"
    found: Sequence[tuple[int, str]] = [
        (answers.after_hashes, "what follows ####"),
        (answers.boxed, r"what \boxed{} holds"),
    ]
    said = [f"{what}, in {count:,} of {len(answers.texts):,} rows" for count, what in found if count]
    if not said:
        return "as written"
    if answers.first_whole is not None:
        whole = len(answers.texts) - answers.shortened
        said.append(f"as written in {whole:,}, the first {rows.origin(answers.first_whole)}")
    return "; ".join(said)


def _printable(line: str) -> str:
    """A line whose control characters are written as escapes: a terminal must not obey the name of a column.

    >>> _printable("an" + chr(27) + "[2Jswer")
    'an\\\\x1b[2Jswer'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _shown(text: str, characters: int) -> str:
    """A text on one line, its middle left out where it is long.

    >>> _shown("a" * 20 + chr(10) + "b" * 20, 20)
    "'aaaaaaa ... bbbbbbb'"
    """
    text = repr(text)
    if len(text) <= characters:
        return text
    half = (characters - 5) // 2
    return f"{text[: half + 1]} ... {text[-half - 1 :]}"
