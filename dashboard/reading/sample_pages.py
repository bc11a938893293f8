"""The sample pages: lists of samples and groups, a sample, a group, and a prompt over training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...dataflow.cgroups import usable_cpus
from ...dataflow.errors import UserError, nearest
from .metrics import numbers
from .sample_index import SampleIndex
from .turns import (
    cut,
    gist,
    only_real_markers,
    token_texts,
    tokenizer_of,
    turns_of_prompt,
    turns_of_text,
    turns_of_tokens,
)

# Filtering, searching and sorting


PIECE = 8192
"""Rows that a thread searches at once."""
compute: Any = pyarrow.compute  # its functions are created on import
OPERATORS = {
    "<=": compute.less_equal,
    ">=": compute.greater_equal,
    "!=": compute.not_equal,
    "=": compute.equal,
    "<": compute.less,
    ">": compute.greater,
}


def chosen(table: pa.Table, filters: str, search: str) -> np.ndarray:
    """Return the indexes of the matching rows, without copying texts.

    Args:
        filters: conditions `COLUMN OPERATOR VALUE` with <=, >=, !=, =, <, > or ~ (contains the
            text), joined by `and`.
        search: text to find in the prompt, response or answer, ignoring case.

    Raises:
        UserError: a filter has no operator, an unknown column, or a value of the wrong type.
    """
    passes = np.ones(len(table), bool)
    for one in re.split(r"\s+and\s+", filters.strip(), flags=re.IGNORECASE) if filters.strip() else ():
        passes &= _condition(table, one).to_numpy()
    if search and "_text" in table.column_names:
        passes &= _contains(table["_text"], search.lower())
    return np.flatnonzero(passes)


_POOL = ThreadPoolExecutor(max_workers=usable_cpus(), thread_name_prefix="search")


def _contains(column: pa.ChunkedArray, text: str) -> np.ndarray:
    """Return whether each row contains a text: [rows] bool. Uses all cores."""
    pieces = [chunk.slice(at, PIECE) for chunk in column.chunks for at in range(0, len(chunk), PIECE)]
    found = _POOL.map(lambda piece: _has(piece, text).to_numpy(zero_copy_only=False), pieces)
    return np.concatenate([np.empty(0, bool), *found])


def _has(column: Any, text: str, **options: Any) -> Any:
    return compute.fill_null(compute.match_substring(column, text, **options), False)


def _condition(table: pa.Table, text: str) -> Any:
    # The first operator in the text, and the longest one there: <= before <.
    operator = min(
        (op for op in (*OPERATORS, "~") if op in text),
        key=lambda op: (text.index(op), -len(op)),
        default=None,
    )
    if operator is None:
        raise UserError(
            f"filter {text!r} has no operator: write COLUMN OPERATOR VALUE, such as reward>=0.5, step=12 or response~sorry"
        )
    name, _, value = (part.strip() for part in text.partition(operator))
    column = table[require_column(table, name)]
    if operator == "~":
        return _has(column.cast(pa.string()), value, ignore_case=True)
    try:
        wanted = pa.scalar(value, pa.string()).cast(column.type)
    except pa.ArrowException:
        raise UserError(
            f"filter {text!r}: {value!r} cannot be read as {column.type}, the type of column {name!r}"
        ) from None
    return compute.fill_null(OPERATORS[operator](column, wanted), False)


QUERY_NAMES = {"id": "sample_id", "group": "group_id", "episode": "episode_id", "kind": "graph"}
"""Maps column names on the pages to names in the index."""


def require_column(table: pa.Table, name: str) -> str:
    """Return a column's name in the index. Raises UserError if there is no such column."""
    name = QUERY_NAMES.get(name, name)
    if name.startswith("_") or name not in table.column_names:
        columns = [column for column in table.column_names if not column.startswith("_")]
        hint = nearest(name, columns) or f"; they have {', '.join(columns)}"
        raise UserError(f"samples have no column {name!r}{hint}")
    return name


def ordered(table: pa.Table, places: np.ndarray, sort: str) -> np.ndarray:
    """Sort row indexes by a column, descending with a leading minus."""
    name = require_column(table, sort.removeprefix("-"))
    order = "descending" if sort.startswith("-") else "ascending"
    # Pages request a list in parts, so equal values need a fixed order.
    keys = [(name, order), *([("sample_id", "ascending")] if name != "sample_id" else [])]
    values = table.select([key for key, _ in keys])
    values = values if len(places) == len(table) else values.take(pa.array(places))
    return places[compute.sort_indices(values, sort_keys=keys).to_numpy()]


def rows_at(table: pa.Table, places: np.ndarray) -> list[dict[str, Any]]:
    """Return a few rows. `take` would scan the whole table."""
    return [table.slice(place, 1).to_pylist()[0] for place in places.tolist()]


# Sample pages

PREVIEW = 200
MOST_TOKENS = 20_000
MOST_TEXT = 400_000
"""Maximum characters of a text to send."""
MOST_OF_GROUP, MOST_VISITS = 64, 500
NAMES = {
    "response_logprobs": "logprob",
    "response_versions": "version",
    "response_mask": "mask",
    "old_logprobs": "trainer_logprob",
    "entropies": "entropy",
    "reference_logprobs": "reference_logprob",
    "values": "value",
    "advantages": "advantage",
    "token_rewards": "reward",
}
"""Maps token columns to names on a page; other columns keep their names."""
_PAGES = {column: name for name, column in QUERY_NAMES.items()}
NOT_COLUMNS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids", "turn_ends", "turn_rewards")
"""Lists that do not have a value for each token, even if they have as many."""


class SamplePages:
    def __init__(self, index: SampleIndex) -> None:
        self._index = index
        self._grouped: tuple[object, pa.Table, _Groups] | None = None
        """(query, table, groups) of the last group query; pages request a list in parts."""

    def samples(self, filters: str, search: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
        table = self._index.table()
        if not len(table):
            return {"total": 0, "columns": [], "rows": [], **self._state}
        places = ordered(table, chosen(table, filters, search), sort or "-step")
        columns = [_PAGES.get(name, name) for name in table.column_names if not name.startswith("_")]
        rows = [_line(row) for row in rows_at(table, places[offset : offset + limit])]
        return {"total": len(places), "columns": columns, "rows": rows, **self._state}

    def groups(self, filters: str, search: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
        """Return a part of the list of groups, with the rewards of their responses. `sort` is step,
        mean, spread, length or group, descending with a leading minus."""
        table = self._index.table()
        key = self._index.version, filters, search
        if self._grouped is None or self._grouped[0] != key:
            places = chosen(table, filters, search) if len(table) else np.empty(0, np.int64)
            self._grouped = key, table, _Groups(table, places)
        _, table, groups = self._grouped
        return {
            "total": len(groups),
            "groups": groups.page(table, sort or "-step", offset, limit),
            **self._state,
        }

    @property
    def _state(self) -> dict[str, Any]:
        return {"indexed": self._index.progress}

    def sample(self, id: int) -> dict[str, Any] | None:
        """Return a sample with all columns and the texts of its tokens; None if it is not
        recorded."""
        row = self._index.row(id)
        return None if row is None else _whole(row, {})

    def group(self, id: int, config: Mapping[str, Any]) -> dict[str, Any]:
        tables = self._index.rows("group_id", id, MOST_OF_GROUP)
        rows = [table.to_pylist()[0] for table in tables]
        if not rows:
            raise UserError(f"the run has recorded no group {id}{self._hint}")
        first = rows[0]
        return {
            "group": id,
            "step": first["step"],
            "prompt": _cut(first.get("prompt")),
            "prompt_key": first["prompt_key"],
            "turns": turns_of_prompt(first),
            "answer": _cut(first.get("answer")),
            "samples": [_whole(row, config) | _own_prompt(row, first, config) for row in rows],
        }

    def prompt(self, key: str) -> dict[str, Any]:
        """Return the groups of a prompt, in the order of steps."""
        table = self._index.table()
        places = np.flatnonzero(np.asarray(table["prompt_key"].to_numpy(zero_copy_only=False)) == key)
        if not len(places):
            raise UserError(f"the run has recorded no prompt {key!r}{self._hint}")
        visits: dict[int, list[dict[str, Any]]] = {}
        for row in rows_at(table, places[one_of_episode(table, places)]):
            visits.setdefault(row["group_id"], []).append(row)
        found = [_visit(group, own) for group, own in visits.items()]
        found.sort(key=lambda visit: (visit["step"], visit["group"]))
        return {"visits": found[-MOST_VISITS:]}

    @property
    def _hint(self) -> str:
        read = self._index.progress
        left = read["files"] - read["read"]
        return f"; {left} sample files have not been read yet" if left else ""


def one_of_episode(table: pa.Table, places: np.ndarray) -> np.ndarray:
    """Return which of some rows of a table count: all but the second and further rows of an episode."""
    if "episode_id" not in table.column_names or not len(places):
        return np.ones(len(places), bool)
    column = table["episode_id"].combine_chunks().take(pa.array(places))
    # Numbers of distinct values: ids with nulls, as numpy floats, would be rounded.
    codes = column.dictionary_encode().indices
    has_episode = codes.is_valid().to_numpy(zero_copy_only=False)
    counts = ~has_episode
    _, firsts = np.unique(codes.drop_null().to_numpy(), return_index=True)
    counts[np.flatnonzero(has_episode)[firsts]] = True
    return counts


class _Groups:
    """Groups of the samples at some row indexes of a table, with their sort keys. An episode counts
    as one sample, with the length of all its rows."""

    def __init__(self, table: pa.Table, places: np.ndarray) -> None:
        group_ids, lengths = table["group_id"].to_numpy(), _floats(table, "length")
        everything, places = places, places[one_of_episode(table, places)]
        self._places = places
        ids = group_ids[places]
        self.ids, self.first, of_row, counts = np.unique(
            ids, return_index=True, return_inverse=True, return_counts=True
        )
        self._rewards = _floats(table, "reward")[places]
        self._rows, self._ends = np.argsort(of_row, kind="stable"), np.cumsum(counts)
        """Row indexes, group by group, and the end of each group in them."""

        def mean(values: np.ndarray) -> np.ndarray:
            return (
                np.bincount(of_row, np.nan_to_num(values, posinf=0.0, neginf=0.0), len(counts)) / counts
            )

        rewards = mean(self._rewards)
        self.keys = {
            "step": table["step"].to_numpy()[places[self.first]],
            "mean": rewards,
            # Rounding may give slightly negative differences.
            "spread": np.sqrt(np.maximum(mean(self._rewards**2) - rewards**2, 0.0)),
            "length": np.bincount(
                np.searchsorted(self.ids, group_ids[everything]),
                np.nan_to_num(lengths[everything]),
                len(counts),
            )
            / counts,
            "group": self.ids,
        }

    def __len__(self) -> int:
        return len(self.ids)

    def page(self, table: pa.Table, sort: str, offset: int, limit: int) -> list[dict[str, Any]]:
        name = sort.removeprefix("-")
        if name not in self.keys:
            raise UserError(f"groups are sorted by {', '.join(self.keys)}, not by {name!r}")
        values = self.keys[name]
        order = np.lexsort((self.ids, -values if sort.startswith("-") else values))[
            offset : offset + limit
        ]
        firsts = rows_at(table, self._places[self.first[order]])
        return [
            {
                "group": row["group_id"],
                "step": row["step"],
                "kind": row["graph"],
                "prompt": _preview(row.get("prompt") and gist(row["prompt"])),
                "prompt_key": row["prompt_key"],
                "rewards": numbers(self._rewards[self._rows_of(place)], 4),
                "mean": float(self.keys["mean"][place]),
            }
            for place, row in zip(order.tolist(), firsts, strict=True)
        ]

    def _rows_of(self, place: int) -> np.ndarray:
        return self._rows[self._ends[place - 1] if place else 0 : self._ends[place]]


def _floats(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as float64; NaN for null or a missing column."""
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    return np.asarray(table[name].cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)


def exact(value: Any) -> Any:
    """Return a value for JSON. Integers that a browser would round become text.

    >>> exact(7), exact(2**60 + 1)
    (7, '1152921504606846977')
    """
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else value


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the list: scalars and the beginnings of texts."""
    cut = {
        name: _preview(value) if isinstance(value, str) else exact(value) for name, value in row.items()
    }
    return {_PAGES.get(name, name): value for name, value in cut.items() if not name.startswith("_")}


def _visit(group: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    best = max(rows, key=lambda row: row["reward"] if row.get("reward") is not None else -np.inf)
    return {
        "step": rows[0]["step"],
        "group": group,
        "rewards": [row.get("reward") for row in rows],
        "response": _preview(best.get("response")),
    }


def _whole(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = tokenizer_of(config)
    ids = list(row.get("response_ids") or row.get("chosen_ids") or [])
    columns = {
        NAMES.get(name, name): numbers(np.array(value[:MOST_TOKENS], np.float64), 6)
        for name, value in row.items()
        if isinstance(value, list)
        and name not in NOT_COLUMNS
        and len(value) == len(ids)
        and all(isinstance(number, int | float) for number in value[:16])
    }
    parts, text = _reward_parts(row), _cut(row.get("response"))
    shown = {"prompt", "response", "reward_parts", "episode_id", *(f"reward/{name}" for name in parts)}
    scalars = {
        name: _cut(value) if isinstance(value, str) else exact(value)
        for name, value in row.items()
        if not isinstance(value, list) and name not in shown
    }
    advantages = row.get("advantages")
    tokens = token_texts(tokenizer, ids[:MOST_TOKENS])
    turns = (
        turns_of_tokens(tokens, only_real_markers(tokenizer, ids[:MOST_TOKENS], tokens))
        if tokenizer
        else turns_of_text(str(row.get("response") or ""), "assistant")
    )
    return {
        "id": row["sample_id"],
        "group": row["group_id"],
        "episode": None if row.get("episode_id") is None else str(row["episode_id"]),
        "reward": row.get("reward"),
        "parts": parts,
        "advantage": float(np.mean(advantages)) if advantages else None,
        "truncated": row.get("finish_reason") == "length",
        "prompt": _cut(row.get("prompt")),
        "response": text,
        "tokens": tokens,
        "cut": len(ids) if len(ids) > MOST_TOKENS else None,
        "columns": columns | gaps(row.get("old_logprobs"), row.get("response_logprobs"), len(ids)),
        "turns": turns,
        "scalars": scalars,
    }


def _reward_parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a reward: columns `reward/NAME`, and the JSON in `reward_parts`.

    >>> _reward_parts({"reward": 1.1, "reward/style": 0.1, "reward_parts": '{"right": 1.0, "style": 0.1}'})
    {'style': 0.1, 'right': 1.0}
    """
    parts = {
        name.removeprefix("reward/"): part for name, part in row.items() if name.startswith("reward/")
    }
    try:
        recorded = json.loads(row.get("reward_parts") or "{}")
    except (TypeError, ValueError):  # the user's own column of this name
        recorded = {}
    parts |= recorded if isinstance(recorded, dict) else {}
    return {str(name): part for name, part in parts.items() if isinstance(part, int | float)}


def _own_prompt(
    row: Mapping[str, Any], first: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row's prompt if it differs from the group's, as for turns of a dialogue."""
    has_same_text, ids = row.get("prompt") == first.get("prompt"), row.get("prompt_ids")
    if has_same_text and ids == first.get("prompt_ids"):
        return {}
    tokenizer = tokenizer_of(config)
    if has_same_text and ids and tokenizer is not None:
        # The text is the prompt of the data, not of a sub-agent.
        text = tokenizer.backend.decode(ids[:MOST_TOKENS], skip_special_tokens=False)
        return {"prompt": text, "prompt_turns": turns_of_prompt({"prompt": text}), "own_prompt": True}
    return {"prompt_turns": turns_of_prompt(row), "own_prompt": True}


def gaps(
    own: Sequence[float] | np.ndarray | None,
    generated: Sequence[float] | np.ndarray | None,
    length: int,
) -> dict[str, Any]:
    """Return each token's gap and ratio between trainer and generator, if both have log-probabilities
    of all `length` tokens."""
    if own is None or generated is None or not 0 < length == len(own) == len(generated):
        return {}
    gap = np.array(own[:MOST_TOKENS], np.float64) - np.array(generated[:MOST_TOKENS], np.float64)
    return {"gap": numbers(np.abs(gap), 6), "ratio": numbers(np.exp(np.clip(gap, -50, 50)), 6)}


def _preview(text: Any) -> str | None:
    return None if text is None else str(text)[:PREVIEW]


def _cut(text: Any) -> str | None:
    return None if text is None else cut(str(text), MOST_TEXT)
