"""The command `weft`, which is also `python -m weft`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of `commands/`; returns the exit code."""
    from .commands import command_line

    return command_line.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
