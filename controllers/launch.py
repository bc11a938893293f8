"""launch: a script's `main` as a command, with checked settings and honest exit codes."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import typing
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ..dataflow.config import Config
from ..dataflow.errors import UserError, WeftError
from ..dataflow.redaction import redacted
from .dry_run import note_settings
from .settings import compose
from .signals import end_run, terminals

P = ParamSpec("P")
R = TypeVar("R")


def launch(main: Callable[[Any], Any], arguments: list[str] | None = None) -> int:
    """Run `main(settings)`, its settings read from the command line, and from a YAML or TOML file if it has `--config FILE`; the type of
    its parameter says which there are.

    Returns the exit code: 0; 2 when the user can mend it (one message, no traceback); 1 when the run cannot go on; 130 after
    Ctrl-C, at which a run that makes checkpoints writes one first. SIGTERM, or SIGHUP from a terminal that is closed (unless it
    is ignored, as `nohup` has it), has a run that makes checkpoints write one and leave with 0; a second one, or a run that makes
    none, leaves at once with 143 (129). All with everything cleaned up. Other exceptions pass through.
    """
    parameter = next(iter(inspect.signature(main).parameters))
    settings_class: type[Config] = typing.get_type_hints(main)[parameter]
    try:
        words = sys.argv[1:] if arguments is None else arguments
        composed = compose(settings_class, words, main.__doc__ or settings_class.__doc__)
        note_settings(composed)
        settings = composed.settings
        heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        standing = terminals()

        def end(number: int, frame: object) -> None:
            end_run(number, standing)

        previous = {number: signal.signal(number, end) for number in heeded}
        try:
            main(settings)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 0
    except UserError as error:
        print(redacted(f"error: {error}"), file=sys.stderr)
        return 2
    except (WeftError, TimeoutError, ConnectionError) as error:
        said = error.text if isinstance(error, WeftError) else str(error)
        print(redacted(f"{type(error).__name__}: {said}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Have a script end with the message of a `UserError` of this function, without a traceback, as `launch` does.

    Only an error that nobody catches is shown so, and only where nobody else has said how such errors are shown.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            if sys.excepthook in (sys.__excepthook__, _show):
                sys.excepthook = _show
                _Shortly.error = error
            raise

    return called


class _Shortly:
    """What is shown in one message, if it ends the script."""

    error: UserError | None = None


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Show what ends a script: this error in one message, any other as always."""
    if error is _Shortly.error:
        print(redacted(f"error: {error}"), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
