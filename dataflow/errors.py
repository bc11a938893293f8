"""Every exception of Weft, in one tree. Each says what went wrong, and what the user can do about it.

    WeftError
     ├─ UserError (ValueError)                 the user can fix it: settings, graph, data, placement; exit code 2
     │   ├─ SettingError                       a configuration class refuses its settings
     │   ├─ GraphError                         the graph breaks a rule
     │   ├─ NoSuchNodeError (AttributeError)   a worker class has no such node
     │   ├─ NoSuchRunError                     a page of the dashboard asks for a run that is not there
     │   ├─ SymptomError                       a sign that a run cannot learn, which `stop_on` names
     │   │   └─ NoSignalError                  the first steps of a run have nothing to learn from
     │   └─ SampleError                        a mistake that shows on particular samples
     │       └─ ResultError                    a function returned what it never should
     ├─ RunError (RuntimeError)                the run cannot go on; exit code 1
     │   ├─ StalledError                       rows are in flight, and nothing can move
     │   ├─ StalenessError                     rows are older than the schedule allows
     │   ├─ WeightSyncError                    a receiver holds other weights than were published
     │   ├─ TakenOverError                     another driver goes on with the run
     │   ├─ RecoveryError                      the log of a run cannot be replayed
     │   │   └─ FormatError                    another version of Weft wrote it
     │   ├─ DamagedSegment                     columns of rows cannot be read any more
     │   ├─ LeaseError                         rows were handled that belong to another lease
     │   ├─ DivergedError                      too many bad optimizer steps in a row
     │   ├─ GenerationError                    the engine that samples tokens failed
     │   └─ WorkerError                        a call on a worker failed
     │       └─ WorkerDied                     the process of a worker is gone
     │           └─ DeadlineError (TimeoutError)   a call was not answered in time
     └─ BrokenRule                             an event of a log breaks the law of rows; `weft buffer check` reports it

    BaseException
     ├─ Cancelled                              a call on a rank is ended where it stands; no user sees it
     ├─ Silent                                 a call in the driver's process said nothing for too long; no user sees it
     ├─ NeedsMainThread                        a reward function sets a signal handler on another thread; no user sees it
     ├─ Planned                                `weft plan` has seen the driver of a script; no user sees it
     └─ SystemExit
         └─ Ended                              a signal ended the process, wherever it was

`launch` and the command `weft` print the message and the advice, without a traceback. A script that a `UserError` ends does the same.
Tracebacks and notebooks show the advice below the message. This module imports nothing of Weft at its top level, so that every folder
may import it.
"""

from __future__ import annotations

import difflib
import enum
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import ClassVar, Protocol


class WeftError(Exception):
    """The root of the tree: `except WeftError` catches every exception that Weft raises itself, and no other."""

    advice: ClassVar[str] = ""
    """What the user can do, unless the message already says it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.advice:
            self.add_note(self.advice)

    @property
    def text(self) -> str:
        """The message, and the advice below it."""
        return "\n".join([str(self), *getattr(self, "__notes__", ())])


class Ended(SystemExit):
    """A signal ended the process, wherever it was: in a worker under `Local`, too, whose own `sys.exit` ends nothing."""


class Silent(BaseException):
    """A call in this process was silent for too long. No method catches it by `except Exception`."""

    def __init__(self, stack: str = "") -> None:
        super().__init__(stack)
        self.stack = stack
        """Where it stood."""


class Cancelled(BaseException):
    """A call on a rank is ended where it stands: it publishes what is finished."""


class NeedsMainThread(BaseException):
    """A reward function sets a signal handler on another thread than the main one. No grader catches it by `except Exception`."""


class Planned(BaseException):
    """A script that is planned has made its driver, and ends there."""


# What the user can fix


class UserError(WeftError, ValueError):
    """A mistake in what the user wrote (settings, graph, data, placement). The message says the place, the rule, the value and
    the nearest right name: fix it there. A command, or a script that does not catch it, ends with the message and exit code 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if (
            sys.excepthook is sys.__excepthook__
        ):  # else a notebook, a debugger or the user decides what is shown
            sys.excepthook = _end_script


def _end_script(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """End a script with the message of its `UserError` and exit code 2. Other exceptions, an interactive session and Python's
    development mode (`python -X dev`) keep the traceback and the exit code."""
    if (
        not isinstance(error, UserError)
        or sys.flags.dev_mode
        or sys.flags.interactive
        or hasattr(sys, "ps1")
    ):
        sys.__excepthook__(kind, error, traceback)
        return
    from .untrusted_text import show

    show(f"error: {error}")
    sys.exit(2)


class SettingError(UserError):
    """A configuration class refuses its settings. The message has a line for each; `problems` has them by name, without the class."""

    def __init__(self, message: str, of: str = "", problems: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.of = of
        """Name of the class."""
        self.problems = tuple(problems)


class GraphError(UserError):
    """The graph breaks a rule. The message has a line for each break, with the nearest column or group that exists."""


class NoSuchNodeError(UserError, AttributeError):
    """A worker class has no such node. The message offers the nearest node; `hasattr(actor, "logprobs")` tests for
    one."""


class NoSuchRunError(UserError):
    """A page of the dashboard asks for a run that is not there, or not any more."""


class SampleError(UserError):
    """A mistake that shows on particular samples: the message names them, and `sample_ids` has them."""

    def __init__(self, message: str, sample_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.sample_ids = tuple(sample_ids)


class ResultError(SampleError):
    """A function returned something other than a reward, such as a list for one sample. A retry would not help, so the first such error
    ends the run."""


class SymptomError(UserError):
    """A run shows a sign that it cannot learn, and `Driver(stop_on=...)` names it. The message says what was seen, and has a sample
    with its reward."""

    def __init__(self, message: str, sample: object = None) -> None:
        super().__init__(f"{message}\n{sample}" if sample else message)
        self.sample = sample
        """One of the last samples that were recorded; None: there are none."""


class NoSignalError(SymptomError):
    """The rewards within every group of a run's first steps are equal: all advantages are 0, and nothing is learned. A run that makes
    checkpoints has made one, and goes on from there with `resume="latest"`."""


# What ends a run


class RunError(WeftError, RuntimeError):
    """A run cannot go on. The message is complete; a traceback of the driver would not help. A run that makes
    checkpoints goes on from the last of them with `resume="latest"`. The command line ends with exit code 1."""


class StalledError(RunError):
    """Rows are in flight, nothing can run, and nothing is under way. The message says what they wait for."""

    advice = "`weft buffer why RUN GROUP` shows what a group waits for, or what became of it."


class StalenessError(RunError):
    """Rows are older than the schedule allows: a weight update did not reach the group that generated them."""

    advice = "Check that each generating group follows the group that is trained: rollout.follows(actor)."


class WeightSyncError(RunError):
    """A receiver did not arrive at the weights that the sender published."""

    advice = "Nothing was generated with the wrong weights. Go on from the last checkpoint with resume='latest'."


class TakenOverError(RunError):
    """Another driver goes on with the run: this one was considered dead, and writes no more. The message names the other driver."""

    advice = (
        "If another driver has the run, there is nothing to do: it goes on from the last checkpoint. If the run's folder was moved, "
        "go on there with resume=PATH."
    )


class RecoveryError(RunError):
    """The log of a run cannot be replayed: it was written for other graphs, or by another version."""

    advice = "Go on with the graphs and the version of Weft that wrote the log, or begin a run of another name."


class FormatError(RecoveryError):
    """The log of a run is of a format that this version of Weft does not read."""

    advice = (
        "resume='weights' goes on with the saved model at its place in the data, without the rows that were in flight. To go on with them, "
        "or to look into the log, use the version of Weft that wrote it."
    )


class MessageReference(Protocol):
    """The place of a message in a segment, for an error (a `Segment` has it)."""

    @property
    def node(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class DamagedSegment(RunError):
    """A message that cannot be read any more: its file is missing or too short, or its bytes have changed."""

    advice = "Go on with resume='latest': prompts whose rows are damaged are issued again."

    def __init__(self, segment: MessageReference, path: object, problem: str) -> None:
        super().__init__(segment, str(path), problem)  # the arguments from which a pickle makes it again
        self.segment = segment

    def __str__(self) -> str:
        segment, path, problem = self.args
        return f"segment of node {segment.node!r} in {path}, offset {segment.offset}, {segment.num_bytes} bytes: {problem}"


class LeaseError(RunError):
    """A lease was used after it was released or finished, or for rows that are not its own."""

    advice = "A backend or a worker group handled rows that were not given to it. `weft buffer check RUN` checks whether the log is sound."


class DivergedError(RunError):
    """Too many optimizer steps in a row were bad. Weights and optimizer are those of the last step that was applied."""

    advice = (
        "Try a smaller learning rate or stronger clipping, and look at the rows that the message names."
    )

    def __init__(self, message: str, sample_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.sample_ids = tuple(sample_ids)
        """Samples of the last step, on this rank, whose loss is not finite."""


class GenerationError(RunError):
    """An inference engine failed. The message is plain text, so that it can be sent to the driver."""

    advice = "The engine's own log is in the run's logs/; engine='transformers' generates without vLLM, slowly."


class WorkerError(RunError):
    """A call on a worker failed. The message names the worker, the node and the sample, and has the worker's own traceback."""


class WorkerDied(WorkerError):
    """The process of a worker that cannot be replaced by itself has ended or hangs, or rows that it needs are gone: the run can go on
    from a checkpoint only."""

    advice = "A run that makes checkpoints goes on from the last of them with resume='latest'. The process's log is in the run's logs/."


class DeadlineError(WorkerDied, TimeoutError):
    """A call was not answered in time; the message names what was waited for."""

    advice = "If the call needs that long, raise Driver(call_timeout_s=...); otherwise see the process's log in the run's logs/."


# What the checker finds


class BrokenRule(WeftError):
    """An event of a log breaks a rule, and the checker ignores the event. `weft buffer check` lists it."""

    def __init__(self, message: str, rule: enum.Enum | None = None) -> None:
        super().__init__(message)
        self.rule = rule


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The tail of an error message that offers the nearest right name, or nothing when none is near.

    >>> nearest("advantage", ["advantages", "reward"])
    "; did you mean 'advantages'?"
    >>> nearest("xyz", ["advantages"])
    ''
    >>> nearest("gpro", ["gspo", "grpo"])  # two letters exchanged are nearer than another letter
    "; did you mean 'grpo'?"
    """
    close = difflib.get_close_matches(str(name), [str(c) for c in candidates], n=3, cutoff=0.6)
    close.sort(key=lambda near: sorted(near) != sorted(str(name)))
    return f"; did you mean {close[0]!r}?" if close else ""
