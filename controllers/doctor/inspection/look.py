"""The look at a machine: everything that can be seen without starting or importing anything, in well under two seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from . import environment, gpus, limits, network, packages, room
from .finding import Finding


def look(runs: Path, variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """All findings about this machine.

    Args:
        runs: the folder of runs, which need not be there.
        variables: the environment of this process.
    """
    return [
        *packages.look(),
        *room.look(runs),
        *limits.look(),
        *network.look(variables),
        *gpus.look(variables),
        *environment.look(variables, Path.home(), len(os.sched_getaffinity(0))),
    ]
