"""Episodes: the rows of an episode as a tree of turns.

Rows that begin with the same tokens share branches. They part where a sampled turn begins or ends:

    branch 0: given (prompt), sampled      rows 0 and 1
     ├─ branch 1: given, sampled           row 1
     └─ branch 2: given, sampled           row 0, the longest: it continues branch 0

An episode with sub-agents or a rewritten history has several trees. A turn that several rows contain
appears once, with the values of the row that trains on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ...dataflow.errors import UserError
from ...dataflow.prompts.tokenizer import Tokenizer
from .metrics import numbers
from .sample_index import SampleIndex
from .sample_pages import MOST_TOKENS, NAMES, NOT_COLUMNS, exact, gaps
from .turns import (
    cut,
    gist,
    only_real_markers,
    token_texts,
    tokenizer_of,
    turns_of_text,
    turns_of_tokens,
)

MOST_ROWS = 256
MOST_OTHERS = 256
"""Maximum number of episodes of the same group to list."""
TURNS_OF_PAGE, TOKENS_OF_PAGE = 50, MOST_TOKENS
"""Limits of a page: it has at least one turn."""
TITLE = 256
"""Maximum number of tokens to decode for the title of a branch."""


@dataclass(frozen=True)
class EpisodeRow:
    """A row of an episode, with P prompt tokens and L response tokens."""

    scalars: Mapping[str, Any]
    ids: np.ndarray
    """[P + L] of prompt and response."""
    prompt_length: int
    """P."""
    columns: Mapping[str, np.ndarray]
    """Column -> [L]."""
    turns: tuple[tuple[int, int], ...] = ()
    """(start, end) of each sampled turn, as positions in `ids`."""
    turn_rewards: Sequence[float] = ()
    was_sampled: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    """[L] whether a token is trained or has a log-probability. A sampled token may have one of 0."""

    @classmethod
    def of(cls, table: pa.Table) -> EpisodeRow:
        """Read a table of one row. Ignores columns of the wrong type or length."""
        lists = {
            name: values for name in table.column_names if (values := _values(table, name)) is not None
        }
        plain = [column.name for column in table.schema if not pa.types.is_nested(column.type)]
        scalars = table.select(plain).to_pylist()[0]
        prompt, response = (
            lists[name].astype(np.int64)
            if name in lists and lists[name].dtype.kind in "iu"
            else np.empty(0, int)
            for name in ("prompt_ids", "response_ids")
        )
        columns = {
            name: values
            for name, values in lists.items()
            if len(values) == len(response) and name not in (*NOT_COLUMNS, "draw_path", "made_before")
        }
        mask = columns.get("response_mask", np.ones(len(response))) != 0
        logprobs = columns.get("response_logprobs", np.where(mask, 1.0, 0.0))
        was_sampled = mask | (np.nan_to_num(logprobs) != 0)
        turns = _turns(mask, was_sampled, lists.get("turn_ends"))
        rewards = lists.get("turn_rewards", np.empty(0))
        return cls(
            scalars,
            np.concatenate([prompt, response]),
            len(prompt),
            columns,
            tuple((len(prompt) + start, len(prompt) + end) for start, end in turns),
            rewards.tolist() if len(rewards) == len(turns) else (),
            was_sampled,
        )

    @property
    def marks(self) -> np.ndarray:
        """Positions where rows may part, in order: starts and ends of turns."""
        edges = [edge for turn in self.turns for edge in turn]
        return np.unique(np.array([self.prompt_length, *edges, len(self.ids)], np.int64))


def _values(table: pa.Table, name: str) -> np.ndarray | None:
    """Return the numbers of a ragged column of one row; None for other columns and nulls."""
    kind = table.schema.field(name).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or table[name].null_count:
        return None
    item = kind.value_type
    if not (pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)):
        return None
    values = table[name][0].values.to_numpy(zero_copy_only=False)
    # Integers with nulls became floats with NaN, which cannot be ids.
    is_whole = values.dtype != object and not (pa.types.is_integer(item) and values.dtype.kind == "f")
    return values if is_whole else None


def _turns(mask: np.ndarray, was_sampled: np.ndarray, ends: np.ndarray | None) -> list[tuple[int, int]]:
    """Return (start, end) of the sampled turns of a response of L tokens.

    A turn starts at the first trained token after the previous turn, or, if it is not trained at
    all, at the first token with a log-probability.

    Args:
        mask: [L] whether each token is trained.
        was_sampled: [L] whether each token is trained or has a log-probability.
        ends: [turns] ends of the turns. With None, each run of trained tokens is a turn.
    """
    if ends is None:
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    turns: list[tuple[int, int]] = []
    begin = 0
    for end in np.unique(ends[(ends > 0) & (ends <= len(mask))]).astype(int).tolist():
        trained = np.flatnonzero(mask[begin:end])
        sampled = trained if len(trained) else np.flatnonzero(was_sampled[begin:end])
        turns.append((begin + int(sampled[0]) if len(sampled) else begin, end))
        begin = end
    return turns


# Tree


@dataclass(eq=False)
class Branch:
    """Tokens that the same rows share, from a start position to an end position."""

    start: int
    end: int
    rows: list[int]
    marks: np.ndarray
    """Positions in the branch where rows may part."""
    children: list[Branch] = field(default_factory=list)

    def split(self, at: int) -> None:
        """End the branch at a position; the rest becomes its only child."""
        rest = Branch(at, self.end, [*self.rows], self.marks[self.marks >= at], self.children)
        self.end, self.children, self.marks = at, [rest], self.marks[self.marks <= at]

    @property
    def tokens_below(self) -> int:
        return self.end - self.start + sum(child.tokens_below for child in self.children)


def trees(rows: Sequence[EpisodeRow]) -> list[Branch]:
    """Return the roots of the trees that rows form, in the order of the rows."""
    roots: list[Branch] = []
    for number, row in enumerate(rows):
        at, siblings, marks = 0, roots, row.marks
        while at < len(row.ids):
            best, shared = None, at
            for branch in siblings:
                known = rows[branch.rows[0]].ids[branch.start : branch.end]
                common = at + _common(known, row.ids[at : at + len(known)])
                part = max(_last(branch.marks, common), _last(marks, common))
                if part > shared:
                    best, shared = branch, part
            if best is None:
                siblings.append(Branch(at, len(row.ids), [number], marks[marks >= at]))
                break
            if shared < best.end:
                best.split(shared)
            best.rows.append(number)
            best.marks = np.union1d(best.marks, marks[(marks >= at) & (marks <= shared)])
            at, siblings = shared, best.children
    return roots


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common start of two arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _last(marks: np.ndarray, most: int) -> int:
    """Return the last mark that is at most `most`; -1 if there is none."""
    number = int(np.searchsorted(marks, most, "right"))
    return int(marks[number - 1]) if number else -1


def in_order(
    branches: Sequence[Branch], depth: int = 0, parent: Branch | None = None
) -> Iterator[tuple[Branch, int, Branch | None]]:
    """Yield (branch, depth, parent) in reading order. The longest child follows its siblings, at the
    depth of its parent, so a long conversation stays at one depth."""
    main = max(branches, key=lambda branch: branch.tokens_below) if parent and branches else None
    for branch in [*(branch for branch in branches if branch is not main), *([main] if main else [])]:
        own = depth if parent is None or branch is main else depth + 1
        yield branch, own, parent
        yield from in_order(branch.children, own, branch)


@dataclass(frozen=True)
class ShownTurn:
    """A part of a branch: a sampled turn, or the tokens given between two of them."""

    branch: int
    row: int
    """The row that trains on the turn; for given tokens, any row that has them."""
    start: int
    end: int
    number_in_row: int | None
    """Number of the sampled turn in its row; None for given tokens."""


def turns_of_branch(branch: Branch, place: int, rows: Sequence[EpisodeRow]) -> list[ShownTurn]:
    """Return the turns of a branch, which is the `place`-th in reading order."""
    owned = {
        _part_in(branch, rows[number], start, end): (number, at)
        for number in reversed(branch.rows)
        for at, (start, end) in enumerate(rows[number].turns)
        if start < branch.end and end > branch.start
    }
    found: list[ShownTurn] = []
    at = branch.start
    for start, end in sorted(owned):
        if start < at or end <= start:  # damaged, or in two rows with different starts
            continue
        row, number = owned[start, end]
        if at < start:
            found.append(ShownTurn(place, branch.rows[0], at, start, None))
        found.append(ShownTurn(place, row, start, end, number))
        at = end
    if at < branch.end:
        found.append(ShownTurn(place, branch.rows[0], at, branch.end, None))
    return found


def _part_in(branch: Branch, row: EpisodeRow, start: int, end: int) -> tuple[int, int]:
    """Return the part of a turn in a branch. A row may continue from the middle of another row's turn;
    and in a row that is not trained, the turns of other rows and the given tokens after them belong to
    its first own turn."""
    end = min(end, branch.end)
    if start < branch.start:
        known = row.was_sampled[branch.start - row.prompt_length : end - row.prompt_length]
        start = branch.start + (int(np.argmax(known)) if known.any() else 0)
    return start, end


# Page


@dataclass(frozen=True)
class _Episode:
    rows: Sequence[EpisodeRow]
    branches: Sequence[tuple[Branch, int, Branch | None]]
    turns: Sequence[ShownTurn]

    @classmethod
    def of(cls, tables: Sequence[pa.Table]) -> _Episode:
        rows = [EpisodeRow.of(table) for table in tables]
        branches = list(in_order(trees(rows)))
        turns = [
            turn
            for place, (branch, _, _) in enumerate(branches)
            for turn in turns_of_branch(branch, place, rows)
        ]
        return cls(rows, branches, turns)


class EpisodePages:
    def __init__(self, index: SampleIndex) -> None:
        self._index = index
        self._read: tuple[object, _Episode] | None = None
        """((version of the index, id), episode) of the last request."""

    def episode(self, id: int, first: int, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return an episode: its rows, its branches in reading order, and the turns of a page, which
        begins with turn `first`. Raises UserError if it is not recorded."""
        self._index.table()  # looks for new samples
        key = self._index.version, id
        read = self._read
        if read is None or read[0] != key:
            read = self._read = key, _Episode.of(self._index.rows("episode_id", id, MOST_ROWS))
        episode, tokenizer = read[1], tokenizer_of(config)
        if not episode.rows:
            progress = self._index.progress
            left = progress["files"] - progress["read"]
            more = f"; {left} sample files have not been read yet" if left else ""
            raise UserError(f"the run has recorded no episode {id}{more}")
        scalars = episode.rows[0].scalars
        first = min(first, max(0, len(episode.turns) - 1))
        last = _end_of_page(episode.turns, first)
        return {
            "episode": str(id),
            "group": scalars["group_id"],
            "step": scalars["step"],
            "prompt": cut(gist(str(scalars.get("prompt") or "")), 500),
            "prompt_key": scalars["prompt_key"],
            "has_texts": tokenizer is not None,
            "others": self._of_group(scalars["group_id"]),
            "rows_made": scalars.get("episode_rows") or len(episode.rows),
            "rows": [_row(row) for row in episode.rows],
            "branches": _branches(episode, tokenizer),
            "total": len(episode.turns),
            "first": first,
            "last": last,
            "turns": [
                _turn(number, episode.turns[number], episode.rows, tokenizer)
                for number in range(first, last)
            ],
        }

    def _of_group(self, group: int) -> list[dict[str, Any]]:
        """Return the episodes of a group, in the order of their rows."""
        table = self._index.table()
        wanted = ("sample_id", "episode_id", "reward", "length", "turns", "finish_reason")
        places = self._index.places(table, "group_id", group)
        named = table.select([name for name in wanted if name in table.column_names])
        found: dict[int, dict[str, Any]] = {}
        for row in sorted(named.take(pa.array(places)).to_pylist(), key=lambda row: row["sample_id"]):
            if row.get("episode_id") is None:
                continue
            start = {"reward": row.get("reward"), "rows": 0, "tokens": 0, "turns": 0, "truncated": False}
            one = found.setdefault(row["episode_id"], {"episode": str(row["episode_id"]), **start})
            one["rows"] += 1
            one["tokens"] += row.get("length") or 0
            one["turns"] += row.get("turns") or 0
            one["truncated"] |= row.get("finish_reason") == "length"
        return list(found.values())[:MOST_OTHERS]


def _end_of_page(turns: Sequence[ShownTurn], first: int) -> int:
    tokens = 0
    for number in range(first, len(turns)):
        tokens += turns[number].end - turns[number].start
        if number - first >= TURNS_OF_PAGE or (number > first and tokens > TOKENS_OF_PAGE):
            return number
    return len(turns)


def _row(row: EpisodeRow) -> dict[str, Any]:
    scalars = row.scalars
    return {
        "id": exact(scalars["sample_id"]),
        "reward": scalars.get("reward"),
        "advantage": _mean(row.columns.get("advantages"), row.columns.get("response_mask")),
        "truncated": scalars.get("finish_reason") == "length",
        "tokens": len(row.ids),
        "turns": len(row.turns),
        "trained": _trained(row, row.prompt_length, len(row.ids)),
    }


def _branches(episode: _Episode, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    places = {id(branch): place for place, (branch, _, _) in enumerate(episode.branches)}
    firsts = [0] * len(places)
    counts = [0] * len(places)
    trained = [0] * len(places)
    for number, turn in reversed([*enumerate(episode.turns)]):
        firsts[turn.branch] = number
        if turn.number_in_row is not None:
            counts[turn.branch] += 1
            trained[turn.branch] += _trained(episode.rows[turn.row], turn.start, turn.end)
    return [
        {
            "depth": depth,
            "parent": None if parent is None else places[id(parent)],
            "first": firsts[place],
            "turns": counts[place],
            "tokens": branch.end - branch.start,
            "trained": trained[place],
            "rows": branch.rows if len(branch.rows) <= 8 else [*branch.rows[:8], None],
            "ends": [number for number in branch.rows if len(episode.rows[number].ids) == branch.end][
                :8
            ],
            "title": _title(episode.turns[firsts[place]], episode.rows, tokenizer),
        }
        for place, (branch, depth, parent) in enumerate(episode.branches)
    ]


def _title(turn: ShownTurn, rows: Sequence[EpisodeRow], tokenizer: Tokenizer | None) -> str:
    """Return one line of a branch's first turn: the last given message, or the sampled text."""
    if tokenizer is None:
        return ""
    own, is_given = rows[turn.row].ids[turn.start : turn.end], turn.number_in_row is None
    ids = (own[-TITLE:] if is_given else own[:TITLE]).tolist()
    text = tokenizer.backend.decode(ids, skip_special_tokens=False)
    turns = turns_of_text(text, "" if is_given else "assistant") or ()
    said = [part["text"] for one in turns for part in one["parts"]]
    text = said[-1 if is_given else 0] if said else tokenizer.decode([ids])[0]
    return " ".join(text.split())[:160]


def _turn(
    number: int, turn: ShownTurn, rows: Sequence[EpisodeRow], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    row = rows[turn.row]
    length = turn.end - turn.start
    ids = row.ids[turn.start : turn.end][:MOST_TOKENS].tolist()
    tokens = token_texts(tokenizer, ids)
    marked = only_real_markers(tokenizer, ids, tokens)
    found = {
        "number": number,
        "branch": turn.branch,
        "row": exact(row.scalars["sample_id"]),
        "tokens": length,
        "cut": length if length > MOST_TOKENS else None,
    }
    if turn.number_in_row is None:
        text = "".join(tokens)
        messages = turns_of_text(text, "", marked) if tokenizer is not None else None
        for part in (part for one in messages or () for part in one["parts"]):
            part |= {"text": cut(part["text"])}
            del part["start"], part["end"]
        # The last header belongs to the sampled turn.
        messages = [one for one in messages or () if one["parts"]]
        return {**found, "sampled": False, "messages": messages, "text": None if messages else cut(text)}
    own = slice(turn.start - row.prompt_length, turn.end - row.prompt_length)
    values = {name: column[own] for name, column in row.columns.items()}
    mask, versions = values.get("response_mask"), values.get("response_versions")
    messages = turns_of_tokens(tokens, marked) if tokenizer is not None else None
    # The mask decides who wrote a turn. Markers of other speakers in a sampled turn are its text.
    if messages and any(one["role"] != "assistant" for one in messages):
        messages = None
    return {
        **found,
        "sampled": True,
        "trained": _trained(row, turn.start, turn.end),
        "truncated": row.scalars.get("finish_reason") == "length" and turn.end == len(row.ids),
        "version": None if versions is None else numbers([versions.min(), versions.max()]),
        "logprob": _mean(values.get("response_logprobs"), None),
        "advantage": _mean(values.get("advantages"), mask),
        "reward": numbers([row.turn_rewards[turn.number_in_row]])[0] if row.turn_rewards else None,
        "texts": tokens,
        "columns": {
            NAMES.get(name, name): numbers(column[:MOST_TOKENS].astype(np.float64), 6)
            for name, column in values.items()
        }
        | gaps(values.get("old_logprobs"), values.get("response_logprobs"), length),
        "messages": messages,
    }


def _trained(row: EpisodeRow, start: int, end: int) -> int:
    """Return the number of trained tokens between two positions."""
    mask = row.columns.get("response_mask")
    if mask is None:
        return end - max(start, row.prompt_length)
    return int(np.count_nonzero(mask[max(0, start - row.prompt_length) : end - row.prompt_length]))


def _mean(values: np.ndarray | None, mask: np.ndarray | None) -> float | None:
    """Return the mean over the trained tokens, or over all if none is trained; None without values."""
    if values is None:
        return None
    kept = values[mask != 0] if mask is not None and mask.any() else values
    kept = kept[np.isfinite(kept)]
    return float(kept.mean()) if len(kept) else None
