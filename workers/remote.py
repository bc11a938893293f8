"""`@remote`: how a worker's method is called on a group, and which columns it reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..dataflow.operation import Columns, Declaration, Shape
from ..dataflow.takes import Takes
from .dispatch import Dispatch

F = TypeVar("F", bound=Callable[..., object])


def remote(
    *,
    dispatch: Dispatch,
    shape: Shape = Shape.MAP,
    reads: Columns = (),
    may_read: Columns = (),
    writes: Columns = (),
    takes: Takes | Callable[..., Takes] | None = None,
    interruptible: bool = False,
) -> Callable[[F], F]:
    """Attach a `Declaration` and a `Dispatch` to a method, which stays what it is.

    A method with columns takes a `Batch` first and returns a `Batch`, metrics, `(Batch, metrics)`, or an iterator of
    these. Each part of an iterator is published as soon as it is yielded; None has no rows and lets another call have its turn.
    A map returns a row for each row, in the same order. A method without rows returns its result, or a generator that yields None
    and returns its result with metrics.

    Args:
        dispatch: how rows are distributed over the ranks, and whose results are kept.
        shape: what comes out of the method.
        reads: columns that it requires, or a function of the call's arguments and of the group's `config` that returns
            them: `lambda loss: (RESPONSE_IDS, *loss.reads)`.
        may_read: columns that it uses where there are any.
        writes: columns that it adds.
        takes: what it is given at once; None: groups for a GROUP, rows for all others.
        interruptible: whether other calls on the worker may have a turn each time it yields.

    Raises:
        UserError: when the method is declared and `reads`, say, depends on an argument that it does not have.
    """

    def attach(method: F) -> F:
        declaration = Declaration(method.__name__, shape, reads, may_read, writes, takes, interruptible)
        method.__declaration__ = declaration.check(method, 2)  # pyright: ignore[reportFunctionMemberAccess]
        method.__dispatch__ = dispatch  # pyright: ignore[reportFunctionMemberAccess]
        return method

    return attach


def dispatch_of(worker_class: type, method: str) -> Dispatch | None:
    """The dispatch protocol of a worker's method, or of the method that it overrides; None: it is not remote."""
    for each in worker_class.__mro__:
        dispatch = getattr(vars(each).get(method), "__dispatch__", None)
        if dispatch is not None:
            return dispatch
    return None
