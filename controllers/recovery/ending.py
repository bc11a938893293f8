"""Ending a run early: a signal asks the process, and the run saves itself when its loop comes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _Ending:
    """Between a signal and the runs of this process."""

    runs = 0
    """Runs that can save themselves."""
    asked = False


def ask_to_end() -> bool:
    """Have the run that goes on write a checkpoint and end; False when no run could, or it was asked already."""
    if _Ending.asked or not _Ending.runs:
        return False
    _Ending.asked = True
    return True


def asked_to_end() -> bool:
    """Whether the run that goes on was asked to end."""
    return _Ending.asked


@contextmanager
def can_be_ended(able: bool) -> Iterator[None]:
    """While a run goes on, it can be asked to end, if it is `able` to save itself."""
    _Ending.runs += able
    try:
        yield
    finally:
        _Ending.runs -= able
        _Ending.asked = False
