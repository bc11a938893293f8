"""Events: what happens to the rows of a graph. A ledger notes each in the log before it takes effect; `replay.py` does it again.

Issue ── rows come in                    Claim ── a node leases rows
SetSource ── where they lie              Publish ── some of them are done, and what was written of them
Offer ── a quorum is short               Finish, Release ── the lease is over, or gives rows back
Drop, Lose ── rows, or a group, go
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from .log import Record


@dataclass(frozen=True)
class Issue:
    """Rows of the source are issued, with ids from `first` and groups from `group` on."""

    first: int
    group: int
    step: int
    positions: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class SetSource:
    """The rows of the source lie in this segment from now on."""

    segment: list[Any]


@dataclass(frozen=True)
class Claim:
    """A node leases these rows. The other fields are what it asked for: from them alone the same rows follow."""

    lease: int
    node: str
    ids: list[int]
    rows: int | None = None
    """At most so many."""
    groups: int | None = None
    stale: list[Any] | None = None
    """Version, bound and fate of a `Staleness`."""
    version: int | None = None
    holder: str = ""


@dataclass(frozen=True)
class Publish:
    """Rows of a lease are done; of an EXPAND, rows of these parents are made, and the `finished` parents are done."""

    lease: int
    ids: list[int]
    tokens: list[int]
    segment: list[Any] | None = None
    versions: list[int] | None = None
    parents: list[int] | None = None
    finished: list[int] | None = None


@dataclass(frozen=True)
class Finish:
    """A lease is over, and what it left out is decided by the shape of its node."""

    lease: int
    step: int | None = None
    """For an update: the step that it belongs to."""


@dataclass(frozen=True)
class Release:
    """A lease gives rows back: these, and goes on, or all that are not published, and is void."""

    lease: int
    why: str
    ids: list[int] | None = None


@dataclass(frozen=True)
class Drop:
    """A node does without rows at which it fails."""

    node: str
    ids: list[int]
    why: str


@dataclass(frozen=True)
class Lose:
    """The columns of a group are lost or no longer wanted. `again` says whether its prompt is issued again."""

    group: int
    why: str
    again: bool = True


@dataclass(frozen=True)
class Offer:
    """A group is offered to a node short of its quorum, whose deadline has passed."""

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
_NAMES = {event: name for name, event in _RECORDS.items()}
_DEFAULTS = {event: [(f.name, f.default) for f in fields(event)] for event in _NAMES}


def to_record(event: Event, graph: str) -> Record:
    """The record of an event in the log; fields that have their defaults are left out.

    >>> to_record(Finish(3), "train")
    {'do': 'finish', 'graph': 'train', 'lease': 3}
    """
    record: dict[str, Any] = {"do": _NAMES[type(event)], "graph": graph}
    for name, default in _DEFAULTS[type(event)]:
        value = getattr(event, name)
        if value is not default and value != default:
            record[name] = value
    return record


def from_record(record: Record) -> Event:
    """The event of a record.

    >>> from_record({"do": "finish", "graph": "train", "lease": 3})
    Finish(lease=3, step=None)

    Raises:
        LookupError: another version of Weft wrote it.
        TypeError: it lacks what it needs.
    """
    kind = _RECORDS.get(record["do"])
    if kind is None:
        raise LookupError(f"no event is called {record['do']!r}; there are {', '.join(_RECORDS)}")
    return kind(**{name: value for name, value in record.items() if name not in ("do", "graph")})
