"""Prompts: a source of rows, read from files or data sets in common formats.

    prompts = Prompts.read("gsm8k_train.parquet", "models/qwen2-tiny", max_prompt_tokens=512)
    print(prompts.understood)

pyarrow reads the files and the `tokenizers` library tokenizes them, so that errors show before
torch is imported. docs/data.md shows every format.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import xxhash

from ..batch import Batch
from ..column import IDENTITY, IMAGES
from ..errors import UserError
from ..json_values import is_json, readable_by_arrow
from .datasets import Rows, read_rows
from .files import HasArrow, Origin, refuse_mixed, table_of
from .formats import Answers, find_answers, find_format, is_text, refuse_quoted_messages
from .images import COLUMNS as IMAGE_COLUMNS
from .images import Images, find_images
from .rendering import MAX_CHARACTERS, Rendering, tokenise, too_many_characters
from .settings import ReadArguments, ReadSettings, TooLong
from .tokenizer import Tokenizer
from .understanding import Observer, Understanding

_WRITTEN = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
"""Token columns. Files with one are refused, because another tokenizer may have made its tokens."""

_MASKS = ("response_mask", "chosen_mask", "rejected_mask")

_RENAMED = (*map(str, IDENTITY), *_MASKS)
"""Columns that Weft adds to rows. A file's column with this name is kept as `file_NAME`."""

_MEDIA = ("video", "videos", "audio", "audios")
"""Columns for other media in TRL, verl and OpenRLHF."""

_PART = 8192
"""Rows to hold as Python text at a time; the rest stays in Arrow."""


@dataclass(frozen=True)
class Prompts:
    """A source of rows: one row per prompt, tokenised, in the order of the file.

    Columns of `table`, each a single chunk (with 64-bit offsets above 2 GiB), in this order:

    - `prompt_ids` (list of int32): tokens of the prompt. Prompts in the chat template end with the
      header of the assistant's turn; plain text has the special tokens that the tokenizer adds by
      default.
    - `response_ids`, or `chosen_ids` and `rejected_ids` (lists of int32), if the format has
      responses: the tokens after `prompt_ids`, with the token that ends a response.
    - `response_mask`, or `chosen_mask` and `rejected_mask` (lists of uint8), if a response has
      several turns: 1 for trained tokens, 0 for turns of others.
    - `prompt` (string): the text of the prompt, after the chat template.
    - `images` (list of large binary), if rows have images: the encoded images of each row, in the
      order of their placeholders in `prompt_ids`, one for each.
    - `answer`, if the format has a ground truth: the final answer of a worked solution, or the
      value of the file. Text is a string; numbers, booleans, lists and objects are JSON text on
      disk and values in Python (`JsonType`).
    - all other columns of the file, unchanged. Values without an exact Arrow type are a `JsonType`.
      Messages in a column `prompt` are kept as `prompt_messages`, worked solutions in a column
      `answer` as `full_answer`. A column with the name of a Weft column gets the prefix `file_`
      (`file_parent_id`), and so does a column `prompt` that is not the source of the prompts.

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
    """Rows dropped by `filter`, or because a text exceeded `max_prompt_tokens`, the model's
    context, or the limit for tokenising."""
    too_long: TooLong = field(default="error", repr=False)
    """Whether to refuse or drop prompts that exceed the context of the model that answers them."""
    file_columns: frozenset[str] = field(default=frozenset(), repr=False)
    """Columns of the file that were kept unchanged. They belong to the user, whatever their names."""
    understood: Understanding | None = field(default=None, repr=False)
    """How the rows were read; None if the table was not read here."""

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
            path: a file or a list of files: `.parquet`, `.jsonl` (one object per line), `.json`
                (the same, or one array of objects), `.csv` or `.tsv` (with a header), `.arrow`.
                Text files may be compressed (`.jsonl.gz`). Or a folder of files. Or a Hugging Face
                id, from the local cache or the network (needs the extra `datasets`).
            tokenizer: the model's folder, a Hugging Face hub id, or a loaded `Tokenizer`.
            split: split of a folder or data set: `train`, `test`, ...; the default is the only one,
                else `train`.
            subset: subset of a folder or data set; the default is the only one, else `default` or
                `main`.
            settings: the fields of `ReadSettings`.

        Raises:
            UserError: naming the file, the row, the rule, the value, and the nearest valid value.

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
        rows: Sequence[Mapping[str, Any]] | HasArrow | pa.Table,
        tokenizer: str | Path | Tokenizer,
        *,
        name: str = "rows",
        **settings: Unpack[ReadArguments],
    ) -> Prompts:
        """Make prompts from rows in memory, in any of the formats for files.

        Args:
            rows: dictionaries, a `datasets.Dataset`, a pandas data frame, or an Arrow table.
            tokenizer: as for `read`.
            name: name of the source.
            settings: the fields of `ReadSettings`.

        Raises:
            UserError: as for `read`.
        """
        how = ReadSettings(**settings)
        return cls._of(Rows(name, table_of(rows, name, how.limit), Origin(((name, 0),))), tokenizer, how)

    @classmethod
    def _of(cls, rows: Rows, source: str | Path | Tokenizer, how: ReadSettings) -> Prompts:
        exact, origin = rows.table, rows.origin
        _refuse_columns(exact, origin)
        table = readable_by_arrow(exact)
        names = [f"file_{name}" if name in _RENAMED else name for name in table.column_names]
        exact, table = exact.rename_columns(names), table.rename_columns(names)
        images = find_images(table, origin)
        format = find_format(
            table, origin, {"prompt": how.prompt, "answer": how.answer, "response": how.response}
        )
        # `prompt` will hold the rendered text, so rename the file's column.
        if format.prompt != "prompt" and "prompt" in names:
            names = ["file_prompt" if name == "prompt" else name for name in names]
            exact, table = exact.rename_columns(names), table.rename_columns(names)
        if how.prompt is None and how.response is None:
            refuse_quoted_messages(table, format, origin)
        for column in format.texts:
            name = column.partition(".")[0]
            if is_json(table.schema.field(name).type):
                refuse_mixed(name, table.column(name).to_pylist(), origin)
        # After the checks above, because loading may download files.
        tokenizer = Tokenizer.load(source)
        rendering = Rendering.of(table, format, origin, tokenizer, how)
        answers = find_answers(exact, format, origin, how.answer, how.extract_answer)
        observer = Observer(rendering, how)
        parts: list[pa.Table] = []
        sources: list[np.ndarray] = []
        dropped = 0
        for start in range(0, len(table), _PART):
            part, there = table.slice(start, _PART), origin.at(start)
            counts = None if images is None else images.counts[start : start + _PART].tolist()
            texts = rendering.texts(part, there, counts)
            # Drop these before tokenising, which would take minutes.
            if how.too_long == "drop" and (long := too_many_characters(texts)):
                dropped += len(long)
                texts = texts.keeping([row for row in range(len(texts.prompts)) if row not in long])
                if not texts.prompts:
                    continue
            # One conversation may become several rows.
            of_part = np.arange(len(part)) if texts.rows is None else np.asarray(texts.rows)
            ids = tokenise(texts, there, tokenizer)
            observer.see(
                texts, ids, None if answers is None else answers.values.slice(start, _PART).take(of_part)
            )
            parts.append(pa.table({**ids, "prompt": pa.array(texts.prompts, pa.string())}))
            sources.append(start + of_part)
        if not parts:
            raise UserError(
                f"{origin.files}: all {dropped} rows have texts of more than {MAX_CHARACTERS:,} characters"
            )
        made, source_rows = _with_useful_masks(pa.concat_tables(parts)), np.concatenate(sources)
        lengths = {name: _lengths(made, name) for name in made.column_names if name.endswith("_ids")}
        understood = observer.understanding(replace(rows, table=table), answers, lengths, images)
        if dropped:
            understood = understood.without(dropped, f"longer than {MAX_CHARACTERS:,} characters")
        if dropped or len(source_rows) > len(exact):  # conversations were split
            exact = exact.take(source_rows)
            answers = answers and replace(answers, values=answers.values.take(source_rows))
            images = images and replace(images, values=images.values.take(pa.array(source_rows)))
        result = _with_the_rest(made, exact, answers, images)
        own = {*made.column_names, *(["answer"] if answers else []), *([str(IMAGES)] if images else [])}
        kept = frozenset(result.column_names) - own
        whole = cls(rows.name, result, format.name, dropped, how.too_long, kept, understood)
        return whole._up_to_setting(lengths["prompt_ids"], how, origin, source_rows)

    def _up_to_setting(
        self, lengths: np.ndarray, how: ReadSettings, origin: Origin, source_rows: np.ndarray
    ) -> Prompts:
        """Drop prompts that are longer than `max_prompt_tokens`, or raise an error."""
        limit = how.max_prompt_tokens
        if limit is None:
            return self._compact()
        long = np.flatnonzero(lengths > limit)
        if len(long) and (how.too_long == "error" or len(long) == len(lengths)):
            more = f" ({len(long)} of {len(lengths)} rows are longer)"
            way = "raise max_prompt_tokens" + (
                ", or set too_long='drop'" if len(long) < len(lengths) else ""
            )
            raise UserError(
                f"{origin(int(source_rows[long[0]]))}: the prompt has {lengths[long[0]]} tokens, max_prompt_tokens is {limit}{more}; {way}"
            )
        return (
            self._keeping(lengths <= limit, f"longer than max_prompt_tokens={limit}")
            if len(long)
            else self._compact()
        )

    def up_to(self, tokens: int) -> Prompts:
        """Drop prompts with more tokens, if `too_long` is `drop` and some prompts are left."""
        reason = f"longer than {tokens} tokens, which leaves the model no room for a response"
        return self.keeping_short(_lengths(self.table, "prompt_ids") <= tokens, reason)

    def keeping_short(self, kept: np.ndarray, reason: str) -> Prompts:
        """Drop rows that are too long for a model, if `too_long` is `drop` and some rows are left.

        Args:
            kept: [rows] bool, False for rows that are too long.
            reason: completes "rows were dropped: ...".
        """
        if self.too_long != "drop" or kept.all() or not kept.any():
            return self
        return self._keeping(kept, reason)

    def hold_out(self, rows: int, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Split off rows for evaluation. Returns two sources without common prompts: the rows to
        train on, and `rows` random ones to evaluate on.

        If a drawn prompt occurs several times, its other rows are dropped.

        Args:
            rows: number of rows to hold out, at least 1 and fewer than there are.
            seed: seed of the draw.

        Raises:
            UserError: `rows` is not an integer, or leaves nothing to train or evaluate on.

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
        # Remove all copies of held-out prompts, so that evaluation stays unseen.
        taken = {one for one, is_drawn in zip(asked, drawn, strict=True) if is_drawn}
        rest = self.table.filter(pa.array([one not in taken for one in asked], pa.bool_()))
        if rows < 1 or not len(rest):
            raise UserError(
                f"{self.name}: hold_out(rows={rows}) of {len(self)} rows leaves {len(rest)} to train on and {len(held_out)} to "
                "evaluate on; each needs at least one"
            )
        train = replace(self, table=rest)._compact()
        return train, replace(
            self, name=f"{self.name}_held_out", table=held_out, dropped=0, understood=None
        )._compact()

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Prompts:
        """Keep the rows that a function accepts, in their order. `dropped` counts the other rows.

        Args:
            keep: called with each row as a dictionary of its columns.

        Raises:
            UserError: the function does not return True or False, or keeps no row. An error inside
                the function is raised unchanged, with a note that names the row.

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
        """Sort the rows by a key. The sort is stable. A schedule with `shuffle=False` issues rows in this order.

        Args:
            key: called with each row as a dictionary of its columns.
            reverse: largest keys first.

        Raises:
            UserError: two keys cannot be compared, or a key is nan. An error inside the function is
                raised unchanged, with a note that names the row.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> byte = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))
        >>> prompts = Prompts.from_rows([{"prompt": f"{i}+1", "level": i} for i in (3, 1, 2)], byte, name="sums")
        >>> prompts.sort(lambda row: row["level"]).table["prompt"].to_pylist()
        ['1+1', '2+1', '3+1']
        """
        keys = list(self._of_each_row(key))
        name = getattr(key, "__name__", repr(key))
        unordered = next(
            (k for k, value in enumerate(keys) if isinstance(value, float) and value != value), None
        )
        if unordered is not None:
            raise UserError(
                f"{self.name}, row {unordered + 1}: the key of sort({name}) is nan, which has no order"
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
                    # Keep the user's traceback, and add the row.
                    error.add_note(f"{self.name}, row {number}")
                    raise
                yield answer

    @property
    def _asked(self) -> list[tuple[Hashable, ...]]:
        """By row, a key that identifies its prompt: the text, and hashes of its images."""
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
        rest = replace(
            self,
            table=self.table.filter(pa.array(kept)),
            dropped=self.dropped + dropped,
            understood=understood,
        )
        return rest._compact()

    def _compact(self) -> Prompts:
        return replace(self, table=pa.Table.from_batches([Batch.of_table(self.table).record]))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows


def _with_useful_masks(made: pa.Table) -> pa.Table:
    """Drop the masks if they exclude no token."""
    masks = [name for name in _MASKS if name in made.column_names]
    trained = (chunk.flatten() for name in masks for chunk in made.column(name).chunks)
    # Masks of all ones cost memory and mean nothing.
    useful = any(len(values) and not values.to_numpy().all() for values in trained)
    return made if useful else made.drop_columns(masks)


def _with_the_rest(
    made: pa.Table, table: pa.Table, answers: Answers | None, images: Images | None
) -> pa.Table:
    """Return the new columns, and the columns of the file that they do not replace."""
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


def _refuse_columns(table: pa.Table, origin: Origin) -> None:
    """Refuse duplicate columns, columns of tokens, videos and sounds."""
    names = table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{origin.files}: there are two columns {twice!r}; rename one of them")
    taken = next((column for column in _WRITTEN if column in names), None)
    if taken:
        raise UserError(
            f"{origin.files}: column {taken!r} is one that Weft writes; rename it in the file"
        )
    for column in _MEDIA:
        values = table.column(column) if column in table.column_names else ()
        row = next((row for row, value in enumerate(values) if value.as_py() not in (None, [], "")), None)
        if row is not None:
            raise UserError(
                f"{origin(row)}: column {column!r} holds video or audio, which Weft does not support; "
                "leave the column out, or rename it if only a reward function should have it"
            )
