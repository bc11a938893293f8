"""What an operation takes in one call: rows, groups, a quorum of a group, or a training batch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


class Unit(enum.Enum):
    """What an operation takes when it has no parameters."""

    ROWS = "rows"
    """Rows as they become ready, of any number of groups."""
    GROUPS = "groups"
    """All rows of a group together."""
    FINISHED_GROUPS = "finished groups"
    """Groups that all other nodes are done with. Nothing waits for this node: neither the end of a step nor the next prompts."""


ROWS, GROUPS, FINISHED_GROUPS = Unit


@dataclass(frozen=True)
class Quorum:
    """The first rows of a group that are ready; the others are cancelled. For a filter."""

    n: int
    """Number of rows of a group that suffice."""
    deadline_s: float | None = None
    """Seconds after the first row is ready until the ready rows go on without the others; None: wait for `n`."""


@dataclass(frozen=True)
class TrainingBatch:
    """The groups of one update, which makes a new version of the parameters of its worker group."""

    whole_groups: bool = False
    """The rows of a group stay together on one rank."""
    accumulates: bool = False
    """The rows may come in several calls; each says whether it is the last (`last=True`)."""


Takes: TypeAlias = Unit | Quorum | TrainingBatch

_RECORDS: Mapping[str, type[Quorum] | type[TrainingBatch]] = {"quorum": Quorum, "training batch": TrainingBatch}


def takes_as_json(takes: Takes) -> dict[str, Any]:
    """The value as JSON, for `takes_from_json`.

    >>> takes_as_json(Quorum(2))
    {'kind': 'quorum', 'n': 2, 'deadline_s': None}
    """
    if isinstance(takes, Unit):
        return {"kind": takes.value}
    return {"kind": next(kind for kind, record in _RECORDS.items() if record is type(takes)), **asdict(takes)}


def takes_from_json(fields: Mapping[str, Any]) -> Takes:
    """The value that `takes_as_json` described.

    >>> takes_from_json({"kind": "rows"}) is ROWS
    True
    """
    kind, rest = fields["kind"], {k: v for k, v in fields.items() if k != "kind"}
    return _RECORDS[kind](**rest) if kind in _RECORDS else Unit(kind)
