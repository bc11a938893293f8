"""A finding: something of this machine that is as it should be, or not, and what to do about it. Nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Outcome = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what is there."""

    about: str
    """The part of the machine: packages, room, limits, network, GPUs or environment."""
    name: str
    outcome: Outcome
    """ok; warn: it disturbs some runs; fail: runs fail."""
    found: str
    todo: str = ""
    """What to do; empty: nothing."""

    def json(self) -> dict[str, str]:
        """The values of JSON."""
        return asdict(self)


def ok(about: str, name: str, found: str) -> Finding:
    """It is as it should be."""
    return Finding(about, name, "ok", found)


def warn(about: str, name: str, found: str, todo: str) -> Finding:
    """It disturbs some runs."""
    return Finding(about, name, "warn", found, todo)


def fail(about: str, name: str, found: str, todo: str) -> Finding:
    """Runs fail because of it."""
    return Finding(about, name, "fail", found, todo)


def text_of(findings: Sequence[Finding]) -> str:
    """The findings for a person: a line for each, and one for what to do.

    >>> print(text_of([ok("room", "memory", "20.0 GiB free"), fail("room", "disk", "0.1 GiB free", "remove old runs")]))
    room
      ok    memory: 20.0 GiB free
      fail  disk: 0.1 GiB free
            -> remove old runs
    1 ok, 0 warn, 1 fail
    """
    lines: list[str] = []
    for about in dict.fromkeys(finding.about for finding in findings):
        lines.append(about)
        for one in (finding for finding in findings if finding.about == about):
            lines.append(f"  {one.outcome:<4}  {one.name}: {one.found}")
            lines += [f"        -> {one.todo}"] if one.todo else []
    outcomes = [finding.outcome for finding in findings]
    counted: tuple[Outcome, ...] = ("ok", "warn", "fail")
    return "\n".join([*lines, ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in counted)])
