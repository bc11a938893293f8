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


def launch(main: Callable[[Any], Any], arguments: list[str] | None = None) -> int:
    """Run `main(settings)`, its settings read from the command line; the type of its parameter says which there are.

    Returns the exit code: 0; 2 when the user can mend it (one message, no traceback); 1 when the run cannot go on; 130 after
    Ctrl-C. SIGTERM has a run that makes checkpoints write one and leave with 0; a second one, or a run that makes none, leaves
    at once with 143. All with everything cleaned up. Other exceptions pass through.
    """
    import tyro

    parameter = next(iter(inspect.signature(main).parameters))
    settings_class: type[Config] = typing.get_type_hints(main)[parameter]
    try:
        settings = tyro.cli(settings_class, description=main.__doc__ or settings_class.__doc__, args=arguments)
        previous = signal.signal(signal.SIGTERM, _terminate)
        try:
            main(settings)
        finally:
            signal.signal(signal.SIGTERM, previous)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (WeftError, TimeoutError, ConnectionError) as error:
        said = error.text if isinstance(error, WeftError) else str(error)
        print(f"{type(error).__name__}: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _terminate(number: int, frame: object) -> None:
    """SIGTERM leaves the way an exception does, so that every `with` closes what it opened."""
    from .checkpoints import ask_to_end

    if not ask_to_end():
        raise SystemExit(128 + number)
