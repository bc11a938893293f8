"""Ranks as processes: each calls a function of a module in this folder."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from forked import Forked

from weft.workers.rendezvous import LOOPBACK, Rendezvous, take_port

SECRET = "of this test"
TIMEOUT_S = 120.0


def rendezvous(folder: Path, rank: int, name: str = "rendezvous") -> Rendezvous:
    """Return the rendezvous of a group; a file passes on its port, as the driver would."""
    told = folder / f"{name}.port"
    if rank == 0:
        meeting = Rendezvous.at(take_port(LOOPBACK), SECRET, TIMEOUT_S)
        told.with_suffix(".new").write_text(str(meeting.port))
        os.replace(told.with_suffix(".new"), told)
        return meeting
    deadline = time.monotonic() + TIMEOUT_S
    while not told.exists():
        assert time.monotonic() < deadline, f"rank 0 has not told its port in {told}"
        time.sleep(0.01)
    return Rendezvous(LOOPBACK, int(told.read_text()), SECRET, TIMEOUT_S)


def run_processes(
    main: Callable[[Path, int], None], argument: Path, ranks: int, timeout_s: float = 240
) -> None:
    """Call `main(argument, rank)` in one process per rank; on failure, show the rank's output."""
    folder = argument if argument.is_dir() else argument.parent
    started = [Forked(folder / f"rank{rank}.log", main, argument, rank) for rank in range(ranks)]
    try:
        for rank in started:
            rank.process.join(timeout_s)
        failed = [rank.said for rank in started if rank.process.exitcode != 0]
        assert not failed, "\n".join(failed)
    finally:
        for rank in started:
            rank.kill()
