"""launch: run a script's `main` as a command, with checked settings and exit codes."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

from ..dataflow.config import Config
from ..dataflow.errors import UserError, WeftError
from ..dataflow.untrusted_text import show
from .placement_file import OPTION as PLACEMENT
from .placement_file import chosen_placement
from .prechecks.dry_run import note_settings
from .settings import compose, without_file
from .signals import signals_end_script


def launch(main: Callable[[Any], Any], arguments: list[str] | None = None) -> int:
    """Run `main(settings)` with settings from flags and a YAML or TOML file (`--config FILE`).

    The type of `main`'s parameter declares the settings. `--placement FILE.json` replaces the
    placement of its drivers by one that `weft plan --search` wrote.

    Return the exit code, after cleaning up:

    - 0: success; also after SIGTERM or SIGHUP in a run with checkpoints, which saves one first
    - 1: the run cannot continue
    - 2: an error that the user can fix, printed without a traceback
    - 130: Ctrl-C; a run with checkpoints saves one first
    - 143 (SIGTERM), 129 (SIGHUP): the run has no checkpoints, or a second signal came

    SIGHUP is ignored under `nohup`. Other exceptions pass through.
    """
    parameter = next(iter(inspect.signature(main).parameters))
    # Under `from __future__ import annotations`, the signature has strings instead of types.
    settings_class: type[Config] = typing.get_type_hints(main)[parameter]
    try:
        words = sys.argv[1:] if arguments is None else arguments
        words, placement = without_file(settings_class, words, PLACEMENT, "plan.json", suffix=".json")
        about = f"{main.__doc__ or settings_class.__doc__ or ''}\n\n{PLACEMENT} FILE.json uses a placement that weft plan --search wrote."
        settings, origins = compose(settings_class, words, about.strip())
        note_settings(settings, origins)
        with signals_end_script(), chosen_placement(placement):
            main(settings)
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
