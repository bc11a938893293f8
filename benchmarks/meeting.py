"""Where processes of a benchmark meet that are the ranks of one group."""

from __future__ import annotations

from typing import Any

SECRET = "of this benchmark"


def meetings(ranks: int, timeout_s: float) -> list[Any]:
    """For each rank, where it meets the others.

    Args:
        timeout_s: longest time that a rank waits for them.
    """
    from weft.workers.rendezvous import LOOPBACK, Rendezvous, take_port

    taken = take_port(LOOPBACK)
    port = Rendezvous.at(taken, SECRET).port
    taken.close()
    return [Rendezvous(LOOPBACK, port, SECRET, timeout_s) for _ in range(ranks)]
