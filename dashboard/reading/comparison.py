"""Differences between two runs in settings, versions, data, metrics and samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...dataflow.runs.tables import present, read_metrics
from .metrics import meaning
from .run_reader import RunReader

OF_ONE_START = ("origin", "starts", "versions", "sources", "data")
"""Parts of a configuration to compare separately or not at all."""
OF_THE_CLOCK = ("_s", "idle_share", "_per_device", "flops_utilisation", "_bytes")
"""Suffixes of metrics that always differ between runs."""
MISSING = "(not there)"


def compare_configs(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the differences in settings, versions and data, each as a mapping of names to both
    values."""
    own = [{key: value for key, value in one.items() if key not in OF_ONE_START} for one in (a, b)]
    for one in own:
        if isinstance(one.get("graphs"), Mapping):
            one["graphs"] = {name: _nodes(lines) for name, lines in one["graphs"].items()}
    data = [{"sources": one.get("sources", {}), "data": one.get("data", {})} for one in (a, b)]
    return (
        dict(_differences(own[0], own[1])),
        dict(_differences(a.get("versions", {}), b.get("versions", {}))),
        dict(_differences(data[0], data[1])),
    )


def _nodes(lines: Any) -> Any:
    """Convert the printed lines of a graph to a mapping of its nodes.

    >>> _nodes(["graph grpo", "  source train: prompt_ids", "  1. reward.score  [map; takes rows]", "       writes reward"])
    {'graph': 'grpo', 'source train': 'prompt_ids', 'reward.score': {'kind': 'map; takes rows', 'writes': 'reward'}}
    """
    if not isinstance(lines, list):
        return lines
    found: dict[str, Any] = {}
    node: dict[str, str] | None = None
    for text in map(str.strip, map(str, lines)):
        first, _, rest = text.partition(" ")
        if header := re.fullmatch(r"\d+\. (\S+)\s+\[(.*)\]", text):
            node = found[header[1]] = {"kind": header[2]}
        elif node is not None and first in ("reads", "writes"):
            node[first] = rest
        elif ": " in text:
            name, _, value = text.partition(": ")
            found[name] = value
        elif " follows " in text:
            name, _, value = text.partition(" follows ")
            found[f"{name} follows"] = value
        else:
            found[first] = rest
    return found


def _differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted name and both values of each difference; a missing part is one difference.

    >>> dict(_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": {"e": 4, "f": 5}}))
    {'a.b': [1, 3], 'd': ['(not there)', {'e': 4, 'f': 5}]}
    """
    if _are_records(a) and _are_records(b) and len(a) == len(b):
        a, b = ({str(place): entry for place, entry in enumerate(one)} for one in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(
                a.get(key, MISSING), b.get(key, MISSING), f"{name}.{key}" if name else str(key)
            )
    elif a != b:
        yield name, [a, b]


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def compare_metrics(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]
) -> tuple[int | None, dict[str, list[float]]]:
    """Return the first step at which metrics differ, and these metrics, largest relative difference
    first. Skips metrics that always differ, such as times."""
    for step in sorted(set(a) & set(b)):
        parts: dict[str, float] = {}
        for name in a[step].keys() & b[step].keys():
            x, y = a[step][name], b[step][name]
            same = x == y or (math.isnan(x) and math.isnan(y))
            if not same and not name.endswith(OF_THE_CLOCK):
                parts[name] = abs(x - y) / max(abs(x), abs(y)) if math.isfinite(x - y) else math.inf
        if parts:
            order = sorted((name for name in a[step] if name in parts), key=lambda name: -parts[name])
            return step, {name: [a[step][name], b[step][name]] for name in order}
    return None, {}


def _at_last_common_step(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return the metrics of both runs at their last common step.

    >>> _at_last_common_step({1: {"loss": 1.0}, 2: {"loss": 0.5}}, {1: {"loss": 2.0}})
    [{'name': 'loss', 'a': 1.0, 'b': 2.0}]
    """
    step = max(set(a) & set(b), default=None)
    if step is None:
        return []
    names = dict.fromkeys([*a[step], *b[step]])
    return [{"name": n, "a": a[step].get(n), "b": b[step].get(n)} for n in names if n != "step"]


def metrics_of(run: Path, notes: list[str]) -> dict[int, dict[str, float]]:
    """Return the metrics of each step of a run; adds to `notes` if they cannot be read."""
    try:
        table = read_metrics(run)
    except (OSError, pa.ArrowException) as error:
        notes.append(f"damaged: metrics of {run}: {error}")
        return {}
    if table is None or "step" not in table.column_names:
        return {}
    return {int(row["step"]): present(row) for row in table.to_pylist() if row["step"] is not None}


# The first sample that differs


AROUND = 4
"""Tokens to show before and after the first difference."""
IDS = ("prompt_ids", "response_ids")
LOGPROBS = "response_logprobs"


@dataclass(frozen=True)
class _SampleDifference:
    graph: str
    step: int
    sample_id: int
    what: str
    """What differs first: a column or a missing sample."""
    place: int | None = None
    """Index of the first different token, from 0."""
    tokens: tuple[dict[str, Any], ...] = ()
    """Tokens around the first difference, each with `place`, ids `a` and `b`, `logprob_a` and
    `logprob_b`; None after the end of a response."""
    texts: tuple[str, str] = ("", "")
    values: tuple[Any, Any] = (None, None)

    def __str__(self) -> str:
        lines = [
            f"the first difference is in sample {self.sample_id} of graph {self.graph!r}, step {self.step}: {self.what}"
        ]
        if self.place is not None:
            lines[0] += f", from token {self.place} on"
            lines.append("    place     token     logprob  |    token     logprob")
            for pair in self.tokens:
                sides = "  | ".join(_side(pair[side], pair[f"logprob_{side}"]) for side in "ab")
                lines.append(f"  {' ' if pair['a'] == pair['b'] else '>'} {pair['place']:>6}  {sides}")
        elif self.values != (None, None):
            lines.append(f"  {self.values[0]!r} | {self.values[1]!r}")
        if self.texts != ("", ""):
            lines += [f"  A: {self.texts[0]!r}", f"  B: {self.texts[1]!r}"]
        return "\n".join(lines)


def _side(token: int | None, logprob: float | None) -> str:
    return f"{'end' if token is None else token!s:>8} {'' if logprob is None else f'{logprob:.6f}':>11}"


def first_difference(a: Path, b: Path, notes: list[str]) -> _SampleDifference | None:
    """Return the first recorded sample that differs, in the order of steps, or None. Adds to
    `notes` a line for each unreadable file and each log with lost records."""
    from ...dataflow.runs.samples import files_by, recorded, tables

    of_a, of_b = (files_by(recorded(run, notes), "step", "graph") for run in (a, b))
    for step, graph in sorted(set(of_a) & set(of_b)):
        ones, twos = (_rows(tables(of[step, graph], notes)) for of in (of_a, of_b))
        for sample in sorted(set(ones) | set(twos)):
            if sample not in ones or sample not in twos:
                only = "A" if sample in ones else "B"
                return _SampleDifference(graph, step, sample, f"only run {only} has it")
            if found := _difference(ones[sample], twos[sample]):
                return _SampleDifference(graph, step, sample, **found)
    return None


def _rows(parts: Iterator[pa.Table]) -> dict[int, dict[str, Any]]:
    """Map sample ids to the compared columns."""
    kept = (*IDS, LOGPROBS, "reward", "response", "sample_id")
    found: dict[int, dict[str, Any]] = {}
    for table in parts:
        own = table.select([name for name in kept if name in table.column_names])
        found |= {row["sample_id"]: row for row in own.to_pylist() if row.get("sample_id") is not None}
    return found


def _difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return the first difference of two rows as fields of `_SampleDifference`, if any."""
    texts = str(a.get("response") or ""), str(b.get("response") or "")
    for what in (*IDS, LOGPROBS):
        one, two = a.get(what) or [], b.get(what) or []
        if one != two:
            pairs = enumerate(zip_longest(one, two))
            place = next((k for k, (x, y) in pairs if x != y), len(one))
            tokens = _around(a, b, what if what in IDS else IDS[1], place)
            return {"what": what, "place": place, "tokens": tokens, "texts": texts}
    rewards = a.get("reward"), b.get("reward")
    return {"what": "reward", "texts": texts, "values": rewards} if rewards[0] != rewards[1] else {}


def _around(a: dict[str, Any], b: dict[str, Any], ids: str, place: int) -> tuple[dict[str, Any], ...]:
    columns = {"a": a.get(ids) or [], "b": b.get(ids) or []}
    longest = max(map(len, columns.values()))
    for side, row in (("a", a), ("b", b)):
        columns[f"logprob_{side}"] = (row.get(LOGPROBS) or []) if ids == IDS[1] else []
    return tuple(
        {"place": k, **{name: own[k] if k < len(own) else None for name, own in columns.items()}}
        for k in range(max(0, place - AROUND), min(longest, place + AROUND + 1))
    )


# The page that compares two runs


READ_S = 5.0
"""[s] Longest wait for reading a run's samples."""


def compare_page(a: RunReader, b: RunReader) -> dict[str, Any]:
    notes: list[str] = []
    compared = compare_configs(a.facts.config, b.facts.config)
    metrics = _at_last_common_step(metrics_of(a.path, notes), metrics_of(b.path, notes))
    found = first_difference(a.path, b.path, notes)
    return {
        "a": a.name,
        "b": b.name,
        **{
            part: [{"name": name, "a": one, "b": two} for name, (one, two) in pairs.items()]
            for part, pairs in zip(("settings", "versions", "data"), compared, strict=True)
        },
        "notes": [*a.facts.damage, *b.facts.damage, *notes],
        "metrics": [{**row, "unit": meaning(row["name"])["unit"]} for row in metrics],
        "first_difference": found
        and {
            "step": found.step,
            "why": found.what,
            "token": found.place,
            "a": _sample(a, found.sample_id),
            "b": _sample(b, found.sample_id),
        },
    }


def _sample(reader: RunReader, id: int) -> dict[str, Any] | None:
    reader.samples.wait(READ_S)
    return reader.sample_pages.sample(id)
