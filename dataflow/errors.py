"""Weft's exceptions. Their messages name the problem and, if possible, the fix.

    WeftError
     ├─ UserError (ValueError)                 the user can fix it: settings, graph, data, placement; exit code 2
     │   ├─ SettingError                       a configuration class rejects its settings
     │   ├─ GraphError                         the graph breaks a rule
     │   ├─ NoSuchNodeError (AttributeError)   a worker class has no such node
     │   ├─ NoSuchRunError                     a dashboard page requests a run that does not exist
     │   ├─ NoSandboxError                     no sandbox for a model's programs works on this machine
     │   ├─ SymptomError                       the run shows a symptom that `stop_on` names
     │   │   └─ NoSignalError                  the first steps of a run have nothing to learn from
     │   └─ SampleError                        certain samples are invalid
     │       └─ ResultError                    a function returned an invalid result
     ├─ RunError (RuntimeError)                the run cannot continue; exit code 1
     │   ├─ StalledError                       rows are in flight, but nothing can run
     │   ├─ StalenessError                     rows are older than the schedule allows
     │   ├─ WeightSyncError                    a receiver's weights differ from the published ones
     │   │   └─ GroupBroken                    another receiver has broken the group of a transfer; internal
     │   ├─ TakenOverError                     another driver has taken over the run
     │   ├─ RecoveryError                      the log of a run cannot be replayed
     │   │   └─ FormatError                    another version of Weft wrote the log
     │   ├─ DamagedSegment                     stored columns can no longer be read
     │   ├─ LeaseError                         a lease was used for rows that it does not hold
     │   ├─ DivergedError                      too many bad optimizer steps in a row
     │   ├─ GenerationError                    the inference engine failed
     │   │   └─ GatewayLost                    the gateway of the run's agents is gone
     │   ├─ SandboxError                       a sandbox did not start, or was ended from outside
     │   └─ WorkerError                        a call on a worker failed
     │       └─ WorkerDied                     the process of a worker is gone
     │           └─ DeadlineError (TimeoutError)   a call was not answered in time
     ├─ RequestError                           a client of the gateway sent a request that it cannot answer
     └─ BrokenRule                             an event of a log breaks a rule; `weft buffer check` reports it

    BaseException
     ├─ Cancelled                              a call on a rank is canceled; internal
     ├─ Silent                                 a call in the driver's process was silent for too long; internal
     ├─ NeedsMainThread                        a reward function sets a signal handler outside the main thread; internal
     ├─ Planned                                `weft plan` has reached the driver of a script; internal
     └─ SystemExit
         └─ Ended                              a signal ended the process

`launch` and the `weft` command print the message and the advice of an error, without a traceback. A
script that ends with a `UserError` prints only its message. Every folder may import this module,
because it imports no other Weft module at its top level.
"""

from __future__ import annotations

import difflib
import enum
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, ClassVar


class WeftError(Exception):
    """Base class of Weft's errors. Tracebacks and notebooks show `advice` below the message."""

    advice: ClassVar[str] = ""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.advice:
            self.add_note(self.advice)

    @property
    def text(self) -> str:
        """The message, followed by the advice."""
        return "\n".join([str(self), *getattr(self, "__notes__", ())])


class Ended(SystemExit):
    """A signal ended the process. Unlike `sys.exit`, it also ends a worker under `Local`."""


class Silent(BaseException):
    """A call in the driver's process was silent for too long. `stack` is its stack trace."""

    def __init__(self, stack: str = "") -> None:
        super().__init__(stack)
        self.stack = stack


class Cancelled(BaseException):
    """A call on a rank is canceled. The call still publishes the rows that it has finished."""


class NeedsMainThread(BaseException):
    """A reward function sets a signal handler outside the main thread."""

    # Not an `Exception`, because graders catch those and return 0.


class Planned(BaseException):
    """Ends the script that `weft plan` runs, once the script has created its driver."""


# Errors that the user can fix


class UserError(WeftError, ValueError):
    """A mistake in the user's settings, graph, data or placement.

    If no code catches the error, the command or script prints the message and exits with code 2.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Keep the hook of a notebook, a debugger or the user.
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _end_script


def _end_script(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    # Interactive sessions and `python -X dev` keep the traceback.
    keeps = sys.flags.dev_mode or sys.flags.interactive or hasattr(sys, "ps1")
    if keeps or not isinstance(error, UserError):
        sys.__excepthook__(kind, error, traceback)
        return
    # Import here, because every module may import this one.
    from .untrusted_text import show

    show(f"error: {error}")
    sys.exit(2)


class SettingError(UserError):
    """A configuration class rejects its settings. The message has a line for each problem."""

    def __init__(self, message: str, of: str = "", problems: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.of = of
        self.problems = tuple(problems)


class GraphError(UserError):
    """The graph breaks rules. The message names each rule and the closest valid name."""


class NoSuchNodeError(UserError, AttributeError):
    """A worker class has no node with this name. The message suggests the closest one."""


class NoSuchRunError(UserError):
    """A dashboard page requests a run that does not exist, or no longer exists."""


class NoSandboxError(UserError):
    """No sandbox for a model's programs works on this machine. The message says why for each."""

    failure: ClassVar[str] = "NoSandbox"
    """Class of the failure if a harness raises it (`workers/agents/failures.py`)."""


class SampleError(UserError):
    """Certain samples are invalid. The message names them; `sample_ids` lists their ids."""

    def __init__(self, message: str, sample_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.sample_ids = tuple(sample_ids)


class ResultError(SampleError):
    """A function returned an invalid result. The run ends without a retry."""


class SymptomError(UserError):
    """A run shows a symptom that `Driver(stop_on=...)` names. The message includes a sample."""

    def __init__(self, message: str, sample: object = None) -> None:
        super().__init__(f"{message}\n{sample}" if sample else message)
        self.sample = sample
        """A recently recorded sample, or None."""


class NoSignalError(SymptomError):
    """In the first steps, all rewards within each group are equal, so all advantages are 0."""


# Errors that end a run


class RunError(WeftError, RuntimeError):
    """A run cannot continue. The command prints the message without a traceback. Exit code 1."""


class StalledError(RunError):
    """Rows are in flight, but no node can run. The message says what the rows wait for."""

    advice = "`weft buffer why RUN GROUP` shows what a group waits for, or how it ended."


class StalenessError(RunError):
    """Rows are older than the schedule allows: their worker group did not get newer weights."""

    advice = (
        "Check that each generating group follows the group that is trained: rollout.follows(actor)."
    )


class WeightSyncError(RunError):
    """The weights of a receiver differ from the published ones."""

    advice = "Nothing was generated with the wrong weights. Continue from the last checkpoint with resume='latest'."


class GroupBroken(WeightSyncError):
    """Another receiver has broken the group of a transfer. A receiver that
    connects again is served."""


class TakenOverError(RunError):
    """Another driver has taken over the run, because this driver appeared to be dead."""

    advice = (
        "If another driver has the run, there is nothing to do: it continues from the last checkpoint. If the run's folder was moved, "
        "continue there with resume=PATH."
    )


class RecoveryError(RunError):
    """The log of a run cannot be replayed: it belongs to other graphs or another Weft version."""

    advice = "Continue with the graphs and the version of Weft that wrote the log, or start a run with another name."


class FormatError(RecoveryError):
    """This version of Weft cannot read the format of a run's log."""

    advice = (
        "resume='weights' continues with the saved model at its place in the data, without the rows that were in flight. To keep them, "
        "or to inspect the log, use the version of Weft that wrote it."
    )


class DamagedSegment(RunError):
    """A segment can no longer be read, because its file is missing, too short or changed."""

    advice = "Continue with resume='latest': prompts with damaged rows are issued again."

    def __init__(self, segment: Any, path: object, problem: str) -> None:
        super().__init__(segment, str(path), problem)  # arguments for unpickling
        self.segment = segment

    def __str__(self) -> str:
        segment, path, problem = self.args
        return f"segment of node {segment.node!r} in {path}, offset {segment.offset}, {segment.num_bytes} bytes: {problem}"


class LeaseError(RunError):
    """A lease was used after its release, or for rows that it does not hold."""

    advice = "A backend or a worker group handled rows that it did not own. `weft buffer check RUN` checks whether the log is sound."


class DivergedError(RunError):
    """Too many bad optimizer steps in a row. The model keeps the state of the last applied step."""

    advice = (
        "Try a smaller learning rate or stronger clipping, and look at the rows that the message names."
    )

    def __init__(self, message: str, sample_ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.sample_ids = tuple(sample_ids)
        """Ids of the samples on this rank whose loss was not finite in the last step."""


class GenerationError(RunError):
    """An inference engine failed. Holds only text, so the driver can unpickle it without vLLM."""

    advice = "The engine's own log is in the run's logs/; engine='transformers' generates without vLLM, slowly."


class GatewayLost(GenerationError):
    """The gateway of the run's agents is gone. The driver starts it again."""


class SandboxError(RunError):
    """A sandbox did not start, or something outside ended it. The program in it is not to blame."""

    failure: ClassVar[str] = "NoSandbox"
    """Class of the failure if a harness raises it (`workers/agents/failures.py`)."""


class WorkerError(RunError):
    """A call on a worker failed. The message has the worker, node, sample and traceback."""


class WorkerDied(WorkerError):
    """A worker's process has died, and the run must restart from a checkpoint to replace it."""

    advice = "If the run makes checkpoints, continue from the last one with resume='latest'. The process's log is in the run's logs/."


class DeadlineError(WorkerDied, TimeoutError):
    """A call was not answered in time. The message names the call."""

    advice = "If the call needs more time, raise Driver(call_timeout_s=...); otherwise see the process's log in the run's logs/."


# Requests of clients


class RequestError(WeftError):
    """A client of the gateway sent a request that it cannot answer.

    Args:
        status: HTTP status of the reply.
        kind: the error's type in OpenAI's and Anthropic's protocols, such as `invalid_request_error`.
        message: names the field, its value and the rule.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(status, kind, message)
        self.status = status
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[2])


# Findings of the checker


class BrokenRule(WeftError):
    """An event of a log breaks a rule. `weft buffer check` reports the event and skips it."""

    def __init__(self, message: str, rule: enum.Enum | None = None) -> None:
        super().__init__(message)
        self.rule = rule


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a "did you mean" suffix for an error message; empty if no candidate is close.

    >>> nearest("advantage", ["advantages", "reward"])
    "; did you mean 'advantages'?"
    >>> nearest("xyz", ["advantages"])
    ''
    >>> nearest("gpro", ["gspo", "grpo"])  # two swapped letters are nearer than another letter
    "; did you mean 'grpo'?"
    """
    close = difflib.get_close_matches(str(name), [str(c) for c in candidates], n=3, cutoff=0.6)
    # Prefer candidates with the same letters, because swapped letters are the most common typo.
    close.sort(key=lambda near: sorted(near) != sorted(str(name)))
    return f"; did you mean {close[0]!r}?" if close else ""
