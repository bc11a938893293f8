"""Ranks as processes: a function of a module beside this one is called in each of them."""

from collections.abc import Callable
from pathlib import Path

from forked import Forked


def run_processes(main: Callable[[Path, int], None], argument: Path, ranks: int, timeout_s: float = 240) -> None:
    """Call `main(argument, rank)` in a process for each rank, all at once; what a rank that fails has said is in the assertion."""
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
