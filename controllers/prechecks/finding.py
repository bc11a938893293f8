"""Finding: the result of one check of a machine, with advice if something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Outcome = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    about: str
    """The part of the machine: packages, room, limits, network, GPUs or environment."""
    name: str
    outcome: Outcome
    """"ok"; "warn": some runs may suffer; "fail": runs fail."""
    found: str
    todo: str = ""
    """Advice, or empty if there is nothing to do."""

    def json(self) -> dict[str, str]:
        """Return the finding as JSON values."""
        return asdict(self)


def ok(about: str, name: str, found: str) -> Finding:
    """Make a finding without problems."""
    return Finding(about, name, "ok", found)


def warn(about: str, name: str, found: str, todo: str) -> Finding:
    """Make a finding that disturbs some runs."""
    return Finding(about, name, "warn", found, todo)


def fail(about: str, name: str, found: str, todo: str) -> Finding:
    """Make a finding that makes runs fail."""
    return Finding(about, name, "fail", found, todo)


def text_of(findings: Sequence[Finding]) -> str:
    """Format findings for a terminal: one line each, and one for advice.

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
