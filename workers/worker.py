"""Worker: one process of a worker group (or an object in this process, for tests and debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.config import Config
from ..dataflow.operation import Columns, Declaration, Shape, Takes
from .dispatch import Coordinates, Dispatch, RowCost

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source
    from .rendezvous import Rendezvous


# Remote
#
# `@remote`: how a worker's method is called on a group, and which columns it reads and writes.


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


MAX_FAILED = 0.05
"""Share of the rows of a node that may be dropped after failing three times each, if a group's configuration has no `max_failed`."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a worker."""

    name: str = "worker"
    rank: int = 0
    world_size: int = 1
    rendezvous: Rendezvous | None = None
    """Where the ranks meet for `torch.distributed`; None in a group of one, and where each rank works for itself (`replaceable`)."""
    run_dir: Path | None = None
    seed: int = 0
    watched: bool = False
    """Whether the driver replaces this process when it is silent for too long; otherwise a worker keeps its own deadlines."""
    at: Callable[[int | None], None] = lambda sample_id: None
    """A worker calls this with the sample that it works on (None: none) where a sample may hang or end the process: then that sample is
    blamed, and not all that the call has not finished."""
    local_rank: int = 0
    """Number of this rank among those of its group on its node."""
    node_rank: int = 0
    """Number of its node among those of its group."""
    nodes: int = 1
    """Nodes that the group is spread over, with equally many ranks on each."""
    address: str = ""
    """Of its node, where ranks on other nodes reach it; empty: there are no others."""
    devices: tuple[str, ...] = ()
    """The GPUs that this process alone sees, as `CUDA_VISIBLE_DEVICES` names them. None: those that it sees, if any, are its node's, and
    it takes the one of its local rank."""
    advance: Callable[[], None] = lambda: None
    """A worker calls this when a part of its work is done, such as a microbatch or a step of an engine. A rank that does not is taken to
    hang after the driver's `call_timeout_s`."""


class Worker:
    """Parent of every worker class. A subclass is constructed as `Cls(config, context)`, loads its model there, and
    marks with `@remote` the methods that can be called on a group.

    A *handle* made by `weft.group` is typed as its worker class, so methods of handles are declared here too.
    """

    Config: ClassVar[type[Config]]
    """Configuration class; `weft.group` builds it from keyword arguments."""
    replaceable: ClassVar[bool] = False
    """Whether a rank is independent of the others, and holds nothing but its configuration and weights that it follows. Rows at which
    it fails are requeued (and dropped at the third failure, see `MAX_FAILED`); a process that ends or hangs is replaced, and the run
    goes on."""

    def __init__(self, config: Any, context: Context = Context()) -> None:
        self.config = config
        self.context = context

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        """Find mistakes before any process is started, and without importing torch, ray or vllm.

        `nodes` are the calls on this group in one graph (`node.arguments` by name), `source` the rows that feed it
        (`source.table`, a `pyarrow.Table`, and `source.name`).

        Raises:
            UserError: naming the setting, the rule and the nearest right value.
        """

    @classmethod
    def check_machine(cls, config: Any, ranks: int) -> None:
        """Check that this machine, which has no GPU, has room for all ranks of the group. Called where they run on it.

        Raises:
            UserError: naming the setting, and what there is.
        """

    @classmethod
    def row_cost(cls, config: Any) -> RowCost:
        """What a row costs a rank of such a group: rows are balanced by it over data-parallel replicas."""
        return RowCost()

    @classmethod
    def longest_prompt(cls, config: Any, nodes: Sequence[Node]) -> int | None:
        """Tokens of the longest prompt that these calls can take; None: there is no limit."""
        return None

    @classmethod
    def longest_row(cls, config: Any) -> int | None:
        """Longest row (prompt and response) that a group's model can read, in tokens, or None without a limit."""
        return None

    @classmethod
    def refuses_adapter(cls, config: Any, leader: Any) -> str:
        """The reason why a group of this class cannot take only its leader's adapter. Empty if it can: it finds it in `config.adapter`.

        Args:
            config: configuration of the group, as given by the user.
            leader: configuration of the group that it follows, which has `lora`.
        """
        return f"{cls.__name__} takes complete weights"

    @classmethod
    def refuses_vllm_backends(cls, config: Any) -> str:
        """Why a group of this class cannot take weights that its leader sends by one of vLLM's own backends; empty: it can.

        Args:
            config: of the group, as it was given.
        """
        return f"{cls.__name__} has no engine of vLLM"

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the mesh of its group; registered with the driver."""
        return Coordinates(dp=self.context.rank)

    def follows(self, leader: Worker, *, every: int = 1) -> None:
        """Load the weights of `leader` after each `every`-th of its updates. For handles, before a graph runs.

        Raises:
            TypeError: this is a worker, not a handle.
        """
        raise TypeError(
            f"follows() is said of the handles that weft.group returns, not of a {type(self).__name__} itself"
        )

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def register(self) -> Coordinates:
        """Called on a process that replaces another."""
        return self.coordinates

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Claim device memory before this group's turn on a shared pool."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Free device memory after this group's turn on a shared pool."""

    def close(self) -> None:
        """Release processes, memory and files."""


# Children
#
# Children: what an expansion yields of its rows where they come one by one.


@dataclass(frozen=True)
class Children:
    """New rows of some parents. An expansion that returns or yields a plain `Batch` gives all rows of the parents in it.

    A row is the same row, with the same `sample_id`, by its parent and its number, whoever makes it and when. So a parent whose worker
    died keeps the rows that were yielded, and the next worker makes the others: it finds their numbers in the column `made_before`.
    """

    rows: Batch
    """[rows] with a column `parent_id`."""
    numbers: np.ndarray
    """[rows] int64 number of each row among those of its parent, from 0."""
    finished: np.ndarray
    """int64 sample ids of the parents that get no more rows."""
