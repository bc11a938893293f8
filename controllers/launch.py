"""launch: a script's `main` as a command, with checked settings and honest exit codes."""

from __future__ import annotations

import inspect
import signal
import sys
import typing
from collections.abc import Callable
from typing import Any

from ..dataflow.config import Config
from ..dataflow.errors import UserError, WeftError
from ..dataflow.untrusted_text import show
from .prechecks.dry_run import note_settings
from .settings import compose
from .signals import end_run, terminals


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
        show(f"error: {error}")
        return 2
    except (WeftError, TimeoutError, ConnectionError) as error:
        said = error.text if isinstance(error, WeftError) else str(error)
        show(f"{type(error).__name__}: {said}")
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
