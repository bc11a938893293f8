"""Rules: the law of rows, rule by rule. The ledger keeps it, and the checker (`checker.py`) says where a log breaks it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Rule(enum.Enum):
    """The law of rows. `weft buffer check` names each rule that a log breaks."""

    KNOWN_RECORD = "a record is of a known kind, has all its fields, and speaks of graphs and nodes that exist"
    NEW_ID = "a sample id or group id is given out once and in order; a child's is one of those set aside for its lease"
    READY = "a node claims rows of its level with which everything is done that it comes after"
    ONCE = "a node consumes a row once: one that nobody holds, that it has not consumed, and that was not dropped before it"
    COMPLETE_GROUP = "a node that takes groups claims or drops complete ones, when no more rows of them can come"
    QUORUM = "a quorum takes the first rows of a group that were ready"
    LEASE = "only the holder of a live lease publishes, finishes or gives back, and only rows of that lease"
    NOTHING_LEFT_OUT = "a map or a group publishes all rows of its lease"
    STALENESS = "no update trains on rows that are older than its bound, unless they are masked"
    STEP = "an update's rows are of the step under way"
    ONE_WRITER = "a run that was started again holds no lease from before, and its epoch is larger than all before"
    ACCOUNTED = "every row is exactly one of waiting, leased, done or dropped"
    SOUND_LOG = "each record of the log follows the one before"
    CHECKPOINT = "a checkpoint says of the rows in flight what the log says"
    SAMPLES = "the samples are the rows that the log says were recorded, each once, under its step"


@dataclass(frozen=True)
class Violation:
    """A rule that is broken, and where."""

    rule: Rule
    text: str
    at: int | None = None
    """Byte of the log at which the record begins; None: no single record breaks the rule."""

    def __str__(self) -> str:
        return self.text if self.at is None else f"byte {self.at}: {self.text}"
