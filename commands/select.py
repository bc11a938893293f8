"""`weft select`: choose prompts before training."""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from ..dataflow.errors import UserError
from .command_line import Answer, Name

if TYPE_CHECKING:
    import numpy as np

    from ..dataflow.prompts.files import Rows
    from ..dataflow.prompts.selection import Dropped, Selection

SHOWN = 3
"""Number of dropped rows to print as examples of each reason."""
_CHARACTERS = 60
_REASONS = {
    "held_out": "like a held-out prompt",
    "near_duplicate": "near-duplicate of an earlier row",
    "redundant": "less information than the chosen rows",
}


def select(
    data: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="DATA", help="Files, a folder, or a Hugging Face id, in any format of Prompts.read."
        ),
    ],
    *,
    out: Annotated[Path, arg(metavar="FILE")],
    rows: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
    held_out: Annotated[
        UseAppendAction[tuple[str, ...]], arg(metavar="DATA", help_behavior_hint="(repeatable)")
    ] = (),
    similarity: float = 0.8,
    labels: Name = None,
    quality: Name = None,
    prompt: Name = None,
    answer: Name = None,
    split: Name = None,
    subset: Name = None,
    seed: int = 0,
) -> Answer:
    """Drop near-duplicates and held-out prompts, and choose the rows with the most information. Writes
    the kept rows unchanged, and the dropped rows with their reasons to FILE.dropped.jsonl.

    Args:
        out: The file to write: .jsonl or .parquet.
        rows: Keep at most this number of rows. Default: all that are left.
        held_out: Data that training must not see, such as a test set; of a folder or data set, its split
            test.
        similarity: Smallest similarity of near-duplicates, from 0.7 to 1.
        labels: Column with the labels of a row: a text, or a list of texts. Default: the words of the
            prompt.
        quality: Column with the quality of a row, a number of at least 0. Default: all are equal.
        prompt: Column of the prompts. Default: by the detected format.
        answer: Column of the answers. Weft keeps similar prompts with different answers. Default: by the
            detected format.
        split: Split of a folder or data set. Default: the only one, or train.
        subset: Subset of a folder or data set. Default: the only one, default or main.
        seed: Seed of the choice among many rows.
    """
    from ..dataflow.json_values import readable_by_arrow
    from ..dataflow.prompts.answers import find_answers
    from ..dataflow.prompts.formats import ReadSettings, find_format
    from ..dataflow.prompts.selection import prompt_texts
    from ..dataflow.prompts.selection import select as choose

    report = out.with_name(f"{out.stem}.dropped.jsonl")
    for path in (out, report):
        if path.exists():
            raise UserError(f"{path} exists already; name a new file")
    if out.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"--out {out}: the file ends in .jsonl or .parquet")
    if not data:
        raise UserError("name the data: weft select train.jsonl --out selected.jsonl")
    if rows is not None and rows < 1:
        raise UserError(f"--rows {rows}: it must be at least 1")
    how = ReadSettings(prompt=prompt, answer=answer)
    exact = _read(data, subset, split)
    plain = replace(exact, table=readable_by_arrow(exact.table))
    format = find_format(plain, how)
    texts = prompt_texts(plain, format)
    found = find_answers(exact, format, answer, True)
    apart = [_read((one,), None, _split_of(one)) for one in held_out]
    asked: list[str] = []
    for one in apart:
        of_rows = replace(one, table=readable_by_arrow(one.table))
        asked += prompt_texts(of_rows, find_format(of_rows, ReadSettings()))
    selection = choose(
        texts,
        answers=None if found is None else [_key(value) for value in found.values.to_pylist()],
        held_out=asked,
        labels=None if labels is None else _labels(plain, labels),
        quality=None if quality is None else _quality(plain, quality),
        threshold=similarity,
        rows=rows,
        seed=seed,
    )
    if not len(selection.kept):
        raise UserError(f"{exact.files}: every row is like a held-out prompt; check --held-out")
    _write(exact, selection.kept, out)
    places = _Places([exact]), _Places(apart)
    _write_report(selection.dropped, *places, report)
    counts = Counter(one.reason for one in selection.dropped)
    answered = {
        "rows": len(texts),
        "kept": len(selection.kept),
        "dropped": {reason: counts[reason] for reason in _REASONS},
        "information": selection.information,
        "random_information": selection.random_information,
        "file": str(out),
        "report": str(report),
    }
    lines = [f"{exact.files}: {len(texts):,} rows, read as {format.name}"]
    lines += _reasons(selection, texts, asked, *places)
    lines.append(f"  kept      {len(selection.kept):,} rows, in {out}; the others are in {report}")
    if selection.information is not None:
        lines.append(
            f"  they have {selection.information:.1%} of the information of all rows that could be kept; a random choice has "
            f"{selection.random_information:.1%}"
        )
    return Answer(answered, "\n".join(lines))


def _read(data: Sequence[str], subset: str | None, split: str | None) -> Rows:
    from ..dataflow.prompts.files import read_rows

    return read_rows(data[0] if len(data) == 1 else list(data), subset, split, None)


def _split_of(held_out: str) -> str | None:
    """Return the split of held-out data: files have none."""
    from ..dataflow.prompts.files import is_hub_id

    return "test" if Path(held_out).is_dir() or is_hub_id(held_out) else None


def _key(value: object) -> str:
    """Return a text that is equal for equal answers; an answer may be a list or an object."""
    return json.dumps(value, sort_keys=True, default=str)


def _labels(rows: Rows, column: str) -> list[list[str]]:
    values = rows.column(column, "labels").to_pylist()
    found: list[list[str]] = []
    for row, value in enumerate(values):
        own = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(own, list) or not all(isinstance(label, str) for label in own):
            raise rows.error(f"--labels {column}: {value!r} is neither a text nor a list of texts", row)
        found.append([label.strip().lower() for label in own if label.strip()])
    return found


def _quality(rows: Rows, column: str) -> np.ndarray:
    import numpy as np

    values = rows.column(column, "quality").to_pylist()
    for row, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise rows.error(f"--quality {column}: {value!r} is not a number of at least 0", row)
    return np.array(values, np.float64)


def _write(rows: Rows, kept: np.ndarray, out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ..dataflow.runs.files import replacing

    table = rows.table.take(pa.array(kept))
    if out.suffix == ".parquet":
        with replacing(out) as partial:
            pq.write_table(table, partial)
        return
    with replacing(out) as partial, partial.open("w", encoding="utf-8") as file:
        for start in range(0, len(table), 8192):
            for number, row in enumerate(table.slice(start, 8192).to_pylist(), start):
                try:
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                except (TypeError, ValueError) as error:
                    raise rows.error(
                        f"a value has no form in JSON ({error}); write a .parquet file",
                        int(kept[number]),
                    ) from None


class _Places:
    """The file, and the number in it from 1, of rows of several data sets."""

    def __init__(self, sets: Sequence[Rows]) -> None:
        self._files: list[str] = []
        self._starts: list[int] = []
        total = 0
        for rows in sets:
            self._files += [file for file, _ in rows.runs]
            self._starts += [total + start for _, start in rows.runs]
            total += len(rows.table)

    def of(self, row: int) -> tuple[str, int]:
        k = bisect.bisect_right(self._starts, row) - 1
        return self._files[k], row - self._starts[k] + 1


def _write_report(dropped: Sequence[Dropped], rows: _Places, apart: _Places, path: Path) -> None:
    from ..dataflow.runs.files import replacing

    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for one in dropped:
            where, number = rows.of(one.row)
            said: dict[str, Any] = {"file": where, "row": number, "reason": one.reason}
            if one.of is not None:
                like, its_number = (apart if one.reason == "held_out" else rows).of(one.of)
                said |= {"like_file": like, "like_row": its_number, "similarity": one.similarity}
            file.write(json.dumps(said, ensure_ascii=False) + "\n")


def _reasons(
    selection: Selection, texts: Sequence[str], asked: Sequence[str], rows: _Places, apart: _Places
) -> list[str]:
    from ..dataflow.untrusted_text import both_ends

    lines: list[str] = []
    for reason, said in _REASONS.items():
        own = [one for one in selection.dropped if one.reason == reason]
        lines += [f"  dropped   {len(own):,}: {said}"] if own else []
        for one in own[:SHOWN] if reason != "redundant" else ():
            other = asked if reason == "held_out" else texts
            place = apart if reason == "held_out" else rows
            assert one.of is not None
            how = (
                "shares a run of words with" if one.similarity is None else f"{one.similarity:.0%} like"
            )
            lines.append(
                f"            row {rows.of(one.row)[1]} {both_ends(repr(texts[one.row]), _CHARACTERS)} {how} row {place.of(one.of)[1]} "
                f"{both_ends(repr(other[one.of]), _CHARACTERS)}"
            )
    return lines
