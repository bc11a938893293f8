"""`@remote`: says of a worker's method how it is called on a group and which columns it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..dataflow.operation import Shape, declare
from .dispatch import Dispatch

F = TypeVar("F", bound=Callable[..., object])


def remote(
    *,
    dispatch: Dispatch,
    shape: Shape = Shape.MAP,
    reads: Iterable[object] = (),
    may_read: Iterable[object] = (),
    writes: Iterable[object] = (),
    whole_groups: bool = False,
    whole_groups_if: str | None = None,
    updates: bool = False,
    interruptible: bool = False,
    accumulates: tuple[str, ...] | None = None,
    behind: bool = False,
) -> Callable[[F], F]:
    """Attach an `Operation` (which explains the arguments) and a `Dispatch` to a method. The method itself stays what it is.

    A method with columns takes a `Batch` first and returns a `Batch`, metrics, `(Batch, metrics)`, or an iterator of
    these (each is passed on as soon as it is yielded; None says nothing and gives way). A map returns a row for each
    row, in the same order.
    """

    def attach(method: F) -> F:
        method.__operation__ = declare(  # pyright: ignore[reportFunctionMemberAccess]
            method,
            shape=shape,
            reads=reads,
            may_read=may_read,
            writes=writes,
            whole_groups=whole_groups,
            whole_groups_if=whole_groups_if,
            updates=updates,
            interruptible=interruptible,
            accumulates=accumulates,
            behind=behind,
        )
        method.__dispatch__ = dispatch  # pyright: ignore[reportFunctionMemberAccess]
        return method

    return attach


def dispatch_of(worker_class: type, method: str) -> Dispatch | None:
    """The dispatch protocol of a worker's method, its own or that of the one which it overrides; None: not remote."""
    for each in worker_class.__mro__:
        dispatch = getattr(vars(each).get(method), "__dispatch__", None)
        if dispatch is not None:
            return dispatch
    return None
