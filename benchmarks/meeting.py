"""Rendezvous for benchmark processes that are ranks of one group."""

from __future__ import annotations

from typing import Any

SECRET = "of this benchmark"


def meetings(ranks: int, timeout_s: float) -> list[Any]:
    """Return one rendezvous per rank. `timeout_s` is the longest wait of a rank for the others."""
    from weft.workers.rendezvous import LOOPBACK, Rendezvous, take_port

    taken = take_port(LOOPBACK)
    port = Rendezvous.at(taken, SECRET).port
    taken.close()
    return [Rendezvous(LOOPBACK, port, SECRET, timeout_s) for _ in range(ranks)]
