"""Entry point of the command `weft`, and of `python -m weft`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `commands/`, and return its exit code."""
    from .commands import command_line

    return command_line.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
