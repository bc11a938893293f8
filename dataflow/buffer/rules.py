"""Rules: the law of rows, rule by rule. The ledger keeps the law, and the checker (`checker.py`) finds where a log breaks it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Rule(enum.Enum):
    """The law of rows. `weft buffer check` names each rule that a log breaks."""

    KNOWN_RECORD = "a record is of a known kind, has all its fields, and names graphs and nodes that exist"
    NEW_ID = (
        "a sample id or group id is assigned once and in order; a child's id is one of those reserved for its lease"
    )
    READY = "a node claims rows of its level that all nodes before it are done with"
    ONCE = "a node consumes a row at most once: a row that is not leased, that it has not consumed, and that was not dropped"
    COMPLETE_GROUP = "a node that takes groups claims or drops complete groups, which can get no more rows"
    QUORUM = "a quorum takes the first rows of a group that were ready"
    LEASE = "only the holder of an open lease publishes, finishes or releases rows, and only rows of that lease"
    NOTHING_LEFT_OUT = "a map or a group publishes all rows of its lease"
    STALENESS = "no update trains on rows that are older than its bound, unless they are masked"
    OLDEST_FIRST = "an update takes the ready groups with the oldest tokens first"
    STEP = "an update is part of the current step"
    ONE_UPDATE = "a step is one update: each group that is trained gets one new version in it"
    ONE_WRITER = "a restarted run holds no lease from before the restart, and its epoch is larger than all earlier ones"
    ACCOUNTED = "every row is exactly one of waiting, leased, done or dropped"
    SOUND_LOG = "each record of the log follows the one before"
    CHECKPOINT = "a checkpoint and the log agree on the rows in flight"
    SAMPLES = "the samples are the rows that were recorded according to the log, each once, under its step"


@dataclass(frozen=True)
class Violation:
    """A broken rule, and where the log breaks it."""

    rule: Rule
    text: str
    at: int | None = None
    """Byte of the log at which the record begins; None if no single record breaks the rule."""

    def __str__(self) -> str:
        return self.text if self.at is None else f"byte {self.at}: {self.text}"
