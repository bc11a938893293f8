"""Prompts: a source of rows, read from Parquet and JSONL in the column formats of TRL, verl and OpenRLHF.

    prompts = Prompts.read("gsm8k_train.parquet", "models/qwen2-tiny", max_prompt_tokens=512)

Files are read by pyarrow and tokenised by the `tokenizers` library, so that whatever is wrong with them is known
before torch is imported. docs/data.md shows every format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from ..batch import Batch, ragged_array
from ..errors import UserError, nearest
from .files import Origin, read_files, short, table_of
from .formats import find_answers, find_format, is_text
from .texts import Texts, texts_of
from .tokenizer import Tokenizer

TooLong = Literal["error", "drop"]

_WRITTEN = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids", "sample_id", "group_id", "parent_id")
"""Columns that Weft makes: a file that has one of its own would be misread, so it is refused."""

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns in which TRL, verl and OpenRLHF look for what goes to a model beside the text."""


@dataclass(frozen=True)
class Prompts:
    """A source of rows: one row per prompt, tokenised, in the order of the file.

    Columns of `table`, each a single chunk (with 64-bit offsets where it has over 2 GiB), in this order:

    - `prompt_ids` (list of int32): the tokens of the prompt. Messages go through the chat template, with the header of
      the assistant's turn at the end; plain text gets the special tokens that the tokenizer adds by default.
    - `response_ids`, or `chosen_ids` and `rejected_ids` (lists of int32), where the format has responses: the tokens
      that follow those of `prompt_ids`, with the token that ends a response.
    - `prompt` (string): the text of the prompt, after the chat template.
    - `answer` (string), where the format has a ground truth; one that is a list or struct is written as JSON.
    - every other column of the file, as it is. Messages in a column called `prompt` are kept as `prompt_messages`.

    >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
    >>> backend = Backend(models.WordLevel({"<unk>": 0, "2": 1, "+": 2}, unk_token="<unk>"))
    >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> prompts = Prompts.from_rows([{"prompt": "2 + 2", "answer": 4, "level": "easy"}], Tokenizer(backend))
    >>> len(prompts), prompts.columns
    (1, ('prompt_ids', 'prompt', 'answer', 'level'))
    >>> prompts.table.to_pylist()
    [{'prompt_ids': [1, 2, 1], 'prompt': '2 + 2', 'answer': '4', 'level': 'easy'}]
    """

    name: str
    table: pa.Table = field(repr=False)
    format: str = ""
    """The format that was found."""
    dropped: int = 0
    """Rows left out because their prompt was longer than `max_prompt_tokens`, or than whoever answers it can read."""
    too_long: TooLong = field(default="error", repr=False)
    """Whether a prompt that is longer than the model which answers it can read is refused or dropped."""

    @classmethod
    def read(
        cls,
        path: str | Path | Sequence[str | Path],
        tokenizer: str | Path | Tokenizer,
        *,
        prompt: str | None = None,
        answer: str | None = None,
        response: str | None = None,
        chat: bool = False,
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
        limit: int | None = None,
    ) -> Prompts:
        """Reads prompts from one file or several (their rows one after the other).

        Args:
            path: `.parquet`, `.jsonl` (one object per line) or `.json` (the same, or one array of objects).
            tokenizer: the model's folder, a Hugging Face hub id, or a loaded `Tokenizer`.
            prompt: the column to take prompts from, where the file has no known format; `a.b` is a field of a struct.
            answer: the column to take the ground truth from.
            response: the column to take responses from, for supervised training.
            chat: a plain-text prompt is sent as a user's message, through the chat template.
            max_prompt_tokens: the longest prompt allowed, inclusive.
            too_long: what a longer prompt is: an `error`, or a row to `drop` (`Prompts.dropped` counts them). It holds as well for prompts
                that leave no room for an answer in the context of the model that is to answer them; the driver finds these
                before it starts anything.
            limit: read no more than this many rows.

        Raises:
            UserError: with the file, the row, the rule, the value, and the nearest right thing.

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
        paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(p) for p in path]
        table, origin = read_files(paths, limit)
        names = list(dict.fromkeys(file.stem for file in paths))
        return cls._from_table(
            "+".join(names) if len(names) <= 3 else f"{names[0]}+{len(names) - 1}",
            table,
            origin,
            tokenizer,
            columns={"prompt": prompt, "answer": answer, "response": response},
            chat=chat,
            max_prompt_tokens=max_prompt_tokens,
            too_long=too_long,
        )

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: str | Path | Tokenizer,
        *,
        name: str = "rows",
        prompt: str | None = None,
        answer: str | None = None,
        response: str | None = None,
        chat: bool = False,
        max_prompt_tokens: int | None = None,
        too_long: TooLong = "error",
    ) -> Prompts:
        """Prompts from Python dictionaries, in any of the formats that files may have. Arguments as for `read`."""
        return cls._from_table(
            name,
            table_of(rows, name),
            Origin(((name, 0),)),
            tokenizer,
            columns={"prompt": prompt, "answer": answer, "response": response},
            chat=chat,
            max_prompt_tokens=max_prompt_tokens,
            too_long=too_long,
        )

    @classmethod
    def _from_table(
        cls,
        name: str,
        table: pa.Table,
        origin: Origin,
        tokenizer: str | Path | Tokenizer,
        *,
        columns: Mapping[str, str | None],
        chat: bool,
        max_prompt_tokens: int | None,
        too_long: TooLong,
    ) -> Prompts:
        if too_long not in get_args(TooLong):
            hint = nearest(too_long, get_args(TooLong)) or "; it is 'error' or 'drop'"
            raise UserError(f"too_long={too_long!r}{hint}")
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise UserError(f"max_prompt_tokens={max_prompt_tokens}: a prompt has at least one token")
        taken = next((column for column in _WRITTEN if column in table.column_names), None)
        if taken:
            raise UserError(f"{origin.files}: column {taken!r} is one that Weft writes; rename it in the file")
        _refuse_media(table, origin)
        format = find_format(table, origin, columns)
        loaded = Tokenizer.load(tokenizer)
        texts = texts_of(table, format, origin, loaded, chat)
        made: dict[str, Any] = _tokenise(texts, origin, loaded)
        made["prompt"] = pa.array(texts.prompts, pa.string())
        truth = find_answers(table, format, origin, columns["answer"])
        if truth is not None:
            made["answer"] = truth
        kept = {column: table.column(column) for column in table.column_names if column not in made}
        if "prompt" in table.column_names and not is_text(table.schema.field("prompt").type):
            kept.setdefault("prompt_messages", table.column("prompt"))
        result = pa.table({**made, **kept})

        dropped = 0
        if max_prompt_tokens is not None:
            lengths = np.diff(made["prompt_ids"].offsets.to_numpy())
            long = np.flatnonzero(lengths > max_prompt_tokens)
            dropped = len(long)
            if dropped and (too_long == "error" or dropped == len(lengths)):
                more = f" ({dropped} of {len(lengths)} rows are longer)"
                way = "raise max_prompt_tokens" + (", or say too_long='drop'" if dropped < len(lengths) else "")
                raise UserError(
                    f"{origin(int(long[0]))}: the prompt has {lengths[long[0]]} tokens, "
                    f"max_prompt_tokens is {max_prompt_tokens}{more}; {way}"
                )
            if dropped:
                result = result.filter(pa.array(lengths <= max_prompt_tokens))
        whole = pa.Table.from_batches([Batch.of_table(result).record])
        return cls(name, whole, format.name, dropped, too_long)

    def up_to(self, tokens: int) -> Prompts:
        """Without the prompts that are longer, where these are rows to `drop`; all of them are an error."""
        lengths = Batch.of_table(self.table.select(["prompt_ids"])).lengths("prompt_ids")
        table = self.table.filter(pa.array(lengths <= tokens))
        if self.too_long != "drop" or len(table) in (0, len(self)):
            return self
        whole = pa.Table.from_batches([Batch.of_table(table).record])
        return replace(self, table=whole, dropped=self.dropped + len(self) - len(table))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows


def _refuse_media(table: pa.Table, origin: Origin) -> None:
    """A column of images beside the prompts: the model would be asked about them without seeing them."""
    for column in _MEDIA:
        values = table.column(column) if column in table.column_names else ()
        row = next((row for row, value in enumerate(values) if value.as_py() not in (None, [], "")), None)
        if row is not None:
            raise UserError(
                f"{origin(row)}: column {column!r} holds what a model would have to see or hear, and Weft gives models text alone; "
                "leave the column out, or rename it if only a reward function is to have it"
            )


def _tokenise(texts: Texts, origin: Origin, tokenizer: Tokenizer) -> dict[str, pa.Array]:
    """The `*_ids` columns."""
    special = not texts.chat
    values, offsets = tokenizer.encode(texts.prompts, add_special_tokens=special)
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise UserError(f"{origin(int(empty[0]))}: the prompt {short(texts.prompts[empty[0]])} has no tokens")
    if not texts.responses and not texts.whole:
        return {"prompt_ids": ragged_array(values, offsets, pa.int32())}
    prompts = np.split(values, offsets[1:-1])
    # Templates write the token that ends a turn; plain text has none, and a model must learn to stop.
    stop = tokenizer.token_id("eos_token") if special else None
    if texts.whole:
        return _whole(prompts, texts, origin, tokenizer, stop)
    # Prompt and response are tokenised together, so that the response's first word is split as in running text.
    wholes = {
        name: _rows(tokenizer, [prompt + tail for prompt, tail in zip(texts.prompts, tails, strict=True)], special)
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
    for name, rows in responses.items():
        if stop is not None:
            responses[name] = rows = [_stopped(response, stop) for response in rows]
        for row, response in enumerate(rows):
            if len(response) == 0:
                raise UserError(
                    f"{origin(row)}: the response {short(texts.responses[name][row])} has no tokens ({name})"
                )
    return {"prompt_ids": _lists(prompts), **{name: _lists(rows) for name, rows in responses.items()}}


def _part(
    prompt: np.ndarray, wholes: Mapping[str, np.ndarray], tails: Mapping[str, str], tokenizer: Tokenizer
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Prompt and responses of a row where a token reaches from one into the other.

    The prompt keeps its own tokens, as in generation, and responses are tokenised by themselves. Where that would
    change the text (some tokenizers begin every text with a space), the token that reaches over goes to the responses.
    """
    alone = {name: _rows(tokenizer, [tail], False)[0] for name, tail in tails.items()}
    decode = tokenizer.backend.decode
    if all(
        decode([*prompt, *alone[name]], skip_special_tokens=False) == decode(whole.tolist(), skip_special_tokens=False)
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
    """Language modeling: the first token of a text is its context, all others are predicted."""
    if stop is not None:
        rows = [_stopped(row, stop) for row in rows]
    for index, row in enumerate(rows):
        if len(row) < 2:
            raise UserError(f"{origin(index)}: the text {short(texts.prompts[index])} has fewer than two tokens")
    texts.prompts[:] = tokenizer.backend.decode_batch([row[:1].tolist() for row in rows], skip_special_tokens=False)
    return {"prompt_ids": _lists([row[:1] for row in rows]), "response_ids": _lists([row[1:] for row in rows])}


def _stopped(response: np.ndarray, stop: int) -> np.ndarray:
    """The response with the token that stops generation at its end."""
    ended = len(response) > 0 and response[-1] == stop
    return response if ended else np.concatenate([response, np.array([stop], np.int32)])


def _rows(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[np.ndarray]:
    values, offsets = tokenizer.encode(texts, add_special_tokens=add_special_tokens)
    return np.split(values, offsets[1:-1])


def _lists(rows: Sequence[np.ndarray]) -> pa.Array:
    """A list<int32> array, one list per row."""
    return ragged_array(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), pa.int32())
