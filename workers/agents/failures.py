"""Failures of episodes: where they happen, and whether the episode is scored, repeated or dropped.

    EpisodeFailure         where      the episode is
     ├─ EpisodeTimedOut    harness    scored 0
     ├─ TurnTimedOut       tool       scored 0
     ├─ ContextFull        model      scored 0
     ├─ UnparsableCall     model      scored 0
     ├─ ModelUnreachable   model      run again, then dropped
     ├─ SetupTimedOut      task       run again, then dropped
     ├─ HarnessRaised      harness    run again, then dropped
     ├─ HarnessDied        harness    run again, then dropped
     ├─ NoSandbox          sandbox    run again, then dropped
     ├─ NoVerdict          grader     run again, then dropped
     ├─ InvalidResult      grader     dropped
     └─ Discarded          harness    dropped

The policy can cause the scored failures, so they count as reward 0. It cannot cause the others:
they have no reward, and do not vote in a baseline. A harness may raise any of these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

Where = Literal["model", "harness", "tool", "sandbox", "task", "grader"]


class EpisodeFailure(Exception):
    """An episode has no result. The message says why.

    >>> failure = NoVerdict("the tests did not run")
    >>> failure.where, failure.scored, failure.retried
    ('grader', False, True)
    >>> EpisodeFailure.from_json(failure.to_json())
    NoVerdict('the tests did not run')
    """

    where: ClassVar[Where] = "harness"
    scored: ClassVar[bool] = False
    """The policy can cause the failure, so the episode counts, with reward 0."""
    retried: ClassVar[bool] = True
    """Another attempt may succeed."""

    @property
    def failure(self) -> str:
        """Name of the class. Harnesses without Weft may raise any exception with this attribute."""
        return type(self).__name__

    @classmethod
    def named(cls, name: str) -> type[EpisodeFailure]:
        """Return the class of failures with this name. Raises a KeyError if there is none."""
        return {each.__name__: each for each in cls.__subclasses__()}[name]

    def to_json(self) -> dict[str, str]:
        return {"failure": self.failure, "text": str(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpisodeFailure:
        return cls.named(value["failure"])(value["text"])


class EpisodeTimedOut(EpisodeFailure):
    """The harness worked for longer than `deadline_s`. Time of sampling does not count."""

    scored, retried = True, False


class TurnTimedOut(EpisodeFailure):
    """The harness worked for longer than `turn_deadline_s` after the model's last answer."""

    where, scored, retried = "tool", True, False


class ContextFull(EpisodeFailure):
    """The conversation reached the model's context length, and the harness could not continue."""

    where, scored, retried = "model", True, False


class UnparsableCall(EpisodeFailure):
    """A harness rejects a tool call of the model. Most harnesses answer the model instead."""

    where, scored, retried = "model", True, False


class ModelUnreachable(EpisodeFailure):
    """The model did not answer: the engine failed, or the gateway refused the request."""

    where = "model"


class SetupTimedOut(EpisodeFailure):
    """The harness did not ask the model for its first turn within `setup_deadline_s`."""

    where = "task"


class HarnessRaised(EpisodeFailure):
    """The harness raised an exception."""


class HarnessDied(EpisodeFailure):
    """The process of the harness ended before it had a result."""


class NoSandbox(EpisodeFailure):
    """The sandbox of an episode could not be started, or something outside ended it."""

    where = "sandbox"


class NoVerdict(EpisodeFailure):
    """The episode ended without a reward, for example because the reward file is missing."""

    where = "grader"


class InvalidResult(EpisodeFailure):
    """The result is not a finite number, or lacks a declared column."""

    where, retried = "grader", False


class Discarded(EpisodeFailure):
    """The harness returned None."""

    retried = False
