"""Events of the rows of a graph. A ledger logs each event before applying it; `replay`
(`recovery.py`) applies them again.

Issue ── add rows                        Claim ── lease rows to a node
SetSource ── locate the source's rows    Publish ── report finished rows and their segments
Offer ── accept a short quorum           Finish, Release ── end a lease, or give rows back
Drop, Lose ── remove rows or a group
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, TypeAlias

import numpy as np

from ..runs.log import Record


@dataclass(slots=True)
class Issue:
    """Rows of the source are issued; ids start at `first`, groups at `group`."""

    first: int
    group: int
    step: int
    positions: list[int]
    tokens: list[int]


@dataclass(slots=True)
class SetSource:
    """This segment has the rows of the source."""

    segment: list[Any]


@dataclass(slots=True)
class Claim:
    """A node leases these rows. The other fields are its request, which determines the rows."""

    lease: int
    node: str
    ids: list[int]
    rows: int | None = None
    groups: int | None = None
    stale: list[Any] | None = None
    """Version, bound and fate of a `Staleness`."""
    too_old: list[int] | None = None
    """Ids of groups that were set aside as too old; None without a bound, and in logs of format 5
    and earlier."""
    version: int | None = None
    holder: str = ""


@dataclass(slots=True)
class Publish:
    """Rows of a lease are done. For an EXPAND, children of `parents` exist, and the `finished`
    parents are done."""

    lease: int
    ids: list[int]
    tokens: list[int]
    segment: list[Any] | None = None
    versions: list[int] | None = None
    parents: list[int] | None = None
    finished: list[int] | None = None
    segments: list[list[Any]] | None = None
    """[number of rows, *segment] for each rank, in row order, if several ranks wrote the rows."""


@dataclass(slots=True)
class Finish:
    """A lease ends. The shape of its node decides about the rows that it left out."""

    lease: int
    step: int | None = None


@dataclass(slots=True)
class Release:
    """A lease gives back the rows in `ids` and stays open. Without `ids`, it gives back all
    unpublished rows and is void."""

    lease: int
    why: str
    ids: list[int] | None = None


@dataclass(slots=True)
class Drop:
    """A node drops rows that it repeatedly failed on."""

    node: str
    ids: list[int]
    why: str


@dataclass(slots=True)
class Lose:
    """The columns of a group are lost or not needed. If `again`, its prompt is issued again."""

    group: int
    why: str
    again: bool = True


@dataclass(slots=True)
class Offer:
    """A group is offered to a node whose quorum is short after its deadline."""

    node: str
    group: int


Event: TypeAlias = Issue | SetSource | Claim | Publish | Finish | Release | Drop | Lose | Offer

_RECORDS: Mapping[str, type[Event]] = {
    "issue": Issue,
    "source": SetSource,
    "claim": Claim,
    "publish": Publish,
    "finish": Finish,
    "release": Release,
    "drop": Drop,
    "lose": Lose,
    "offer": Offer,
}
# These names are part of the log format.
_NAMES = {event: name for name, event in _RECORDS.items()}


FEW = 8
"""Lists up to this length are written in full, without looking for a shorter form."""


def _numbers(numbers: list[int]) -> str:
    return f"[{numbers[0]}]" if len(numbers) == 1 else str(numbers).replace(" ", "")


def _ids(ids: list[int]) -> str:
    """Write runs of consecutive ids as [first, number] (see `unpacked` in `log.py`); complete
    groups have such runs."""
    # A cheap test of the first ids rejects most lists without runs.
    if len(ids) <= FEW or not (ids[1] - ids[0] == 1 or ids[2] - ids[1] == 1 or ids[3] - ids[2] == 1):
        return _numbers(ids)
    begins = [0, *(np.flatnonzero(np.diff(np.array(ids, np.int64)) != 1) + 1).tolist()]
    if len(begins) > len(ids) // 2:
        return _numbers(ids)
    ends = [*begins[1:], len(ids)]
    runs = [
        f"[{ids[k]},{end - k}]" if end - k > 1 else str(ids[k])
        for k, end in zip(begins, ends, strict=True)
    ]
    return f"[{','.join(runs)}]"


def _values(values: list[int]) -> str:
    # A single int instead of a list; `unpacked` repeats it.
    same = len(values) > FEW and values.count(values[0]) == len(values)
    return str(values[0]) if same else _numbers(values)


def _of_segment(segment: list[Any]) -> str:
    node, file, offset, num_bytes, checksum = segment
    return f"[{_names(node, file)},{offset},{num_bytes},{checksum}]"


def _of_rows(rows_and_segment: list[Any]) -> str:
    rows, node, file, offset, num_bytes, checksum = rows_and_segment
    return f"[{rows},{_names(node, file)},{offset},{num_bytes},{checksum}]"


@lru_cache(maxsize=1 << 14)
def _names(node: str, file: str) -> str:
    return f"{_quoted(node)},{_quoted(file)}"


_encode = json.JSONEncoder(separators=(",", ":")).encode
_BY_TYPE: Mapping[str, Callable[[Any], str]] = {
    "int": str,
    "int | None": str,
    "str": _quoted,
    "list[int]": _numbers,
    "list[int] | None": _numbers,
}
_BY_NAME: Mapping[str, Callable[[Any], str]] = {"segment": _of_segment, "ids": _ids}
_FIELDS = {
    event: [
        (f.name, f.default, f',"{f.name}":', _BY_NAME.get(f.name) or _BY_TYPE.get(str(f.type), _encode))
        for f in fields(event)
    ]
    for event in _NAMES
}
"""Event -> name, default, prefix and encoder of each field. Precomputed, because the driver writes
some events for each row."""


def to_json(event: Event, graph: str) -> str:
    """Return the log record of an event, without fields that have their defaults.

    >>> to_json(Finish(3), "train")
    '{"do":"finish","graph":"train","lease":3}'
    """
    if type(event) is Publish:
        return _publish_to_json(event, graph)
    kind = type(event)
    text = [f'{{"do":"{_NAMES[kind]}","graph":{_quoted(graph)}']
    for name, default, begin, encode in _FIELDS[kind]:
        value = getattr(event, name)
        if value is not default and value != default:
            text.append(begin)
            text.append(encode(value))
    text.append("}")
    return "".join(text)


def _publish_to_json(event: Publish, graph: str) -> str:
    """`to_json` for Publish, which is logged for each generated row and must be fast."""
    head = f'{{"do":"publish","graph":{_quoted(graph)},"lease":{event.lease},"ids":'
    segment = "" if event.segment is None else f',"segment":{_of_segment(event.segment)}'
    # The most frequent record: one sample of a generation.
    if len(event.ids) == 1 and event.parents and event.versions and event.finished == []:
        one = f'[{event.ids[0]}],"tokens":[{event.tokens[0]}]{segment}'
        return (
            f'{head}{one},"versions":[{event.versions[0]}],"parents":[{event.parents[0]}],"finished":[]}}'
        )
    versions = "" if event.versions is None else f',"versions":{_values(event.versions)}'
    parents = "" if event.parents is None else f',"parents":{_numbers(event.parents)}'
    finished = "" if event.finished is None else f',"finished":{_numbers(event.finished)}'
    ids, tokens = _ids(event.ids), _values(event.tokens)
    spread = "" if event.segments is None else f',"segments":[{",".join(map(_of_rows, event.segments))}]'
    return f'{head}{ids},"tokens":{tokens}{segment}{versions}{parents}{finished}{spread}}}'


def from_record(record: Record) -> Event:
    """Return the event of a record.

    >>> from_record({"do": "finish", "graph": "train", "lease": 3})
    Finish(lease=3, step=None)

    Raises:
        LookupError: the record was written by another version of Weft.
        TypeError: a field is missing or unknown.
    """
    kind = _RECORDS.get(record["do"])
    if kind is None:
        raise LookupError(f"unknown event {record['do']!r}; known events are {', '.join(_RECORDS)}")
    return kind(**{name: value for name, value in record.items() if name not in ("do", "graph")})
