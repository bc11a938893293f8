"""The first sample in which two runs differ, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

AROUND = 4
"""Tokens that are shown before and after the first that differs."""
IDS = ("prompt_ids", "response_ids")
LOGPROBS = "response_logprobs"


@dataclass(frozen=True)
class TokenPair:
    """A place in a response; None where it has ended."""

    place: int
    a: int | None
    b: int | None
    logprob_a: float | None
    logprob_b: float | None

    def __str__(self) -> str:
        mark = " " if self.a == self.b else ">"
        a, b = (f"{'end' if i is None else i!s:>8} {'' if p is None else f'{p:.6f}':>11}" for i, p in self._sides)
        return f"{mark} {self.place:>6}  {a}  | {b}"

    @property
    def _sides(self) -> tuple[tuple[int | None, float | None], ...]:
        return (self.a, self.logprob_a), (self.b, self.logprob_b)


@dataclass(frozen=True)
class SampleDifference:
    """Where two runs part."""

    graph: str
    step: int
    sample_id: int
    what: str
    """What differs first: prompt_ids, response_ids, response_logprobs, reward, or that one run lacks the sample."""
    place: int | None = None
    """Of the first token that differs, from 0."""
    tokens: tuple[TokenPair, ...] = ()
    """Around it."""
    texts: tuple[str, str] = ("", "")
    values: tuple[Any, Any] = (None, None)

    @property
    def for_programs(self) -> dict[str, Any]:
        """The values of JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"the first that differs is sample {self.sample_id} of graph {self.graph!r}, step {self.step}: {self.what}"
        ]
        if self.place is not None:
            lines[0] += f", from token {self.place} on"
            lines.append("    place     token     logprob  |    token     logprob")
            lines += [f"  {pair}" for pair in self.tokens]
        elif self.values != (None, None):
            lines.append(f"  {self.values[0]!r} | {self.values[1]!r}")
        if self.texts != ("", ""):
            lines += [f"  A: {self.texts[0]!r}", f"  B: {self.texts[1]!r}"]
        return "\n".join(lines)


def first_difference(a: Path, b: Path, notes: list[str]) -> SampleDifference | None:
    """The first recorded sample in which two runs differ, in the order of steps; None: there is none, or they have no step in common.

    Args:
        a, b: directories of the runs.
        notes: gets a line for each file that cannot be read, and for each log with lost records.
    """
    from ...dataflow.buffer.samples import SampleFile, recorded, tables

    def parts(run: Path) -> dict[tuple[int, str], list[SampleFile]]:
        found: dict[tuple[int, str], list[SampleFile]] = {}
        for part in recorded(run, notes):
            found.setdefault((part.step, part.graph), []).append(part)
        return found

    of_a, of_b = parts(a), parts(b)
    for step, graph in sorted(set(of_a) & set(of_b)):
        rows = [_rows(tables(of[step, graph], notes)) for of in (of_a, of_b)]
        for sample in sorted(set(rows[0]) | set(rows[1])):
            one, two = rows[0].get(sample), rows[1].get(sample)
            if one is None or two is None:
                return SampleDifference(graph, step, sample, f"only run {'A' if two is None else 'B'} has it")
            if one != two and (found := _compare(graph, step, sample, one, two)):
                return found
    return None


def _rows(parts: Iterator[pa.Table]) -> dict[int, dict[str, Any]]:
    """Number of a sample -> what is compared of it."""
    kept = (*IDS, LOGPROBS, "reward", "response", "sample_id")
    found: dict[int, dict[str, Any]] = {}
    for table in parts:
        own = table.select([name for name in kept if name in table.column_names])
        found |= {row["sample_id"]: row for row in own.to_pylist() if row.get("sample_id") is not None}
    return found


def _compare(graph: str, step: int, sample: int, a: dict[str, Any], b: dict[str, Any]) -> SampleDifference | None:
    texts = str(a.get("response") or ""), str(b.get("response") or "")
    for what in (*IDS, LOGPROBS):
        one, two = a.get(what) or [], b.get(what) or []
        if one != two:
            place = _first(one, two)
            pairs = _around(a, b, what if what in IDS else IDS[1], place)
            return SampleDifference(graph, step, sample, what, place, pairs, texts)
    if a.get("reward") != b.get("reward"):
        return SampleDifference(graph, step, sample, "reward", texts=texts, values=(a.get("reward"), b.get("reward")))
    return None


def _first(a: Sequence[Any], b: Sequence[Any]) -> int:
    """
    >>> _first([1, 2, 3], [1, 2]), _first([1], [2])
    (2, 0)
    """
    return next((k for k, (one, two) in enumerate(zip_longest(a, b)) if one != two), len(a))


def _around(a: dict[str, Any], b: dict[str, Any], ids: str, place: int) -> tuple[TokenPair, ...]:
    def at(row: dict[str, Any], name: str, k: int) -> Any:
        values = row.get(name) or []
        return values[k] if k < len(values) else None

    def pair(k: int) -> TokenPair:
        logprobs = [at(row, LOGPROBS, k) if ids == IDS[1] else None for row in (a, b)]
        return TokenPair(k, at(a, ids, k), at(b, ids, k), *logprobs)

    longest = max(len(a.get(ids) or []), len(b.get(ids) or []))
    return tuple(pair(k) for k in range(max(0, place - AROUND), min(longest, place + AROUND + 1)))
