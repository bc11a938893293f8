"""Worker: one process of a worker group, or an object in this process for tests and debugging."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.operation import Columns, Declaration, Shape, Takes
from .cuda_driver import reason_without_cuda
from .dispatch import Coordinates, Dispatch, RowCost

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source
    from .rendezvous import GatewayAddress, Rendezvous


IDLE: Final = "idle"
"""What an interruptible method yields instead of None while it waits for another process."""

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
    """Decorator: make a method callable on a worker group. Does not change the method.

    A method with columns takes a `Batch` as its first argument. It returns a `Batch`, metrics,
    `(Batch, metrics)`, or an iterator of these. The worker publishes each item of an iterator as
    soon as the method yields it; None publishes nothing, but lets another call run. IDLE also says
    that the call waits for something: while all calls do, the rank sleeps until `Context.wake`. A map
    returns one row for each input row, in the same order.

    A method without columns returns a result, or a generator that yields None and finally returns
    the result with metrics.

    Args:
        dispatch: how to split rows over the ranks, and which ranks' results to keep.
        shape: how output rows relate to input rows.
        reads: required columns, or a function of the call's arguments and the group's `config`:
            `lambda loss: (RESPONSE_IDS, *loss.reads)`.
        may_read: optional columns, read if they exist.
        writes: added columns.
        takes: input of one call. Default: groups for GROUP, rows for all other shapes.
        interruptible: whether other calls on the worker may run when the method yields.

    Raises:
        UserError: a function such as `reads` has a parameter that the method lacks.
    """

    def attach(method: F) -> F:
        declaration = Declaration(method.__name__, shape, reads, may_read, writes, takes, interruptible)
        method.__declaration__ = declaration.checked(method, 2)  # pyright: ignore[reportFunctionMemberAccess]
        method.__dispatch__ = dispatch  # pyright: ignore[reportFunctionMemberAccess]
        return method

    return attach


def dispatch_of(worker_class: type, method: str) -> Dispatch | None:
    """Return the dispatch protocol of a worker's method; None if not remote."""
    for each in worker_class.__mro__:
        # An override without @remote inherits the protocol.
        dispatch = getattr(vars(each).get(method), "__dispatch__", None)
        if dispatch is not None:
            return dispatch
    return None


MAX_FAILED = 0.05
"""Default of `max_failed`: the share of a node's rows that may fail three times each."""


@dataclass(frozen=True)
class Context:
    """The environment of a worker."""

    name: str = "worker"
    rank: int = 0
    world_size: int = 1
    rendezvous: Rendezvous | None = None
    """Where the ranks meet for `torch.distributed`; None in a group of one, and for independent
    ranks (`replaceable`)."""
    run_dir: Path | None = None
    seed: int = 0
    watched: bool = False
    """Whether the driver replaces this process if it makes no progress for too long. If not, the
    worker itself enforces deadlines."""
    at: Callable[[int | None], None] = lambda sample_id: None
    """Call this with a sample's id before work in which the sample may hang or end the process, and
    with None afterwards. The driver then blames this sample, not all samples of the call."""
    local_rank: int = 0
    """Index of this rank among the group's ranks on its node."""
    node_rank: int = 0
    """Index of this node among the group's nodes."""
    nodes: int = 1
    """Number of nodes of the group. Each node has the same number of ranks."""
    deadline_s: float = 900.0
    """[s] Longest silence of a rank that the driver accepts, while it starts or works. Ranks wait for
    each other twice as long."""
    address: str = ""
    """Address of this node for ranks on other nodes; empty without other nodes."""
    devices: tuple[str, ...] = ()
    """GPUs that only this process sees, as in `CUDA_VISIBLE_DEVICES`. If empty, the process sees
    all GPUs of its node, and uses the one numbered like its local rank."""
    gateway: GatewayAddress | None = None
    """Where the run's gateway listens; None in a run without agents."""
    advance: Callable[[], None] = lambda: None
    """Call this after each part of the work, such as a microbatch or an engine step. If a rank does
    not call it for `call_timeout_s`, the driver considers the rank hung."""
    wake: Callable[[], object] = lambda: None
    """Call this, on any thread, when calls that have yielded IDLE may continue."""


def device_index(context: Context, visible: int) -> int:
    """Return the index of this rank's GPU among the `visible` ones (at least 1).

    >>> device_index(Context(local_rank=3, devices=("3",)), 1), device_index(Context(local_rank=3), 8)
    (0, 3)

    Raises:
        UserError: the process sees all GPUs of its node, but the node has more ranks than GPUs.
    """
    # The process sees only its own GPUs, so they count from 0.
    if context.devices:
        return 0
    if context.local_rank >= visible:
        raise UserError(
            f"rank {context.rank} of {context.name!r} is number {context.local_rank} of its "
            f"group on its node, counted from 0, but sees only {visible} GPUs there: two "
            "ranks would share one; use fewer ranks per node"
        )
    return context.local_rank


def peak_device_bytes() -> int:
    """Return the peak number of bytes that PyTorch has reserved on the current GPU, or 0."""
    # Do not import torch: a process without torch uses no GPU.
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_available() or not loaded.cuda.is_initialized():
        return 0
    return loaded.cuda.max_memory_reserved()


def rank_device(context: Context) -> torch.device:
    """Make a rank's device the current one, and return it.

    Raises:
        UserError: the rank has GPUs, but torch cannot use them, or see `device_index`.
    """
    if not torch.cuda.is_available():
        if context.devices:
            gpus = f"GPU{'s' * (len(context.devices) > 1)} {', '.join(context.devices)}"
            raise UserError(
                f"rank {context.rank} of {context.name!r} has {gpus}, but torch cannot use CUDA: {reason_without_cuda()}"
            )
        return torch.device("cpu")
    device = torch.device("cuda", device_index(context, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


class Worker:
    """Base class of every worker.

    The constructor of a subclass, `Cls(config, context)`, loads the model. A worker group can call
    the methods marked with `@remote`. `weft.group` returns a *handle* that is typed as the worker
    class, so this class also declares the methods of handles.
    """

    Config: ClassVar[type[Config]]
    """Configuration class; `weft.group` constructs it from keyword arguments."""
    replaceable: ClassVar[bool] = False
    """Whether ranks are independent: a rank holds only its configuration and the weights that it
    follows. Failed rows are requeued, and dropped at the third failure (see `MAX_FAILED`). The
    driver replaces a process that ends or hangs, and the run continues."""
    must_follow: ClassVar[bool] = False
    """Whether a group of this class needs a leader."""

    def __init__(self, config: Any, context: Context = Context()) -> None:
        self.config = config
        self.context = context

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        """Find mistakes before any process starts, without importing torch, ray or vllm.

        Args:
            nodes: calls on this group in one graph (`node.arguments` maps names to values).
            source: the graph's rows (`source.table`, a `pyarrow.Table`, and `source.name`).

        Raises:
            UserError: a setting is wrong. The message names the rule and the closest valid value.
        """

    @classmethod
    def check_machine(cls, config: Any, ranks: int) -> None:
        """Check that this machine, which has no GPUs, has room for all ranks of the group."""

    @classmethod
    def default_ranks(cls, config: Any, cpus: int) -> int:
        """Return the number of ranks of a group without a place, on a node with GPUs and this many
        CPUs."""
        return 1

    @classmethod
    def row_cost(cls, config: Any) -> RowCost:
        """Return the function that computes row costs. Replicas get rows of similar total cost."""
        return RowCost()

    @classmethod
    def shares_prompts(cls, config: Any) -> bool:
        """Return whether a rank computes a prompt once for all its rows of a call. The rows of a
        group then stay on one replica, unless splitting them balances better."""
        return False

    @classmethod
    def longest_prompt(cls, config: Any, nodes: Sequence[Node]) -> int | None:
        """Return the maximum number of prompt tokens that these calls allow, or None."""
        return None

    @classmethod
    def longest_row(cls, config: Any) -> int | None:
        """Return the maximum number of tokens (prompt and response) of a row; None for no limit."""
        return None

    @classmethod
    def refuses_adapter(cls, config: Any, leader: Any) -> str:
        """Return why a group with this configuration cannot load only the adapter of a leader with
        the configuration `leader`, or "" if it can. Then, the run sets `config.adapters`."""
        return f"{cls.__name__} takes complete weights"

    @classmethod
    def discards_weights(cls, config: Any) -> bool:
        """Return whether `offload` takes `discard_weights=True`: free the weights without a copy,
        because new ones arrive after the next `onload`."""
        return False

    @classmethod
    def refuses_vllm_backends(cls, config: Any) -> str:
        """Return why vLLM's backends cannot send weights to such a group, or "" if they can."""
        return f"{cls.__name__} does not run vLLM"

    @classmethod
    def needs_gateway(cls, nodes: Sequence[Node]) -> bool:
        """Return whether these calls on the group need the gateway of a run's agents."""
        return False

    @classmethod
    def sent_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a node's arguments as the ranks get them. The driver calls this once per node."""
        return arguments

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank in its group's mesh. The rank registers them with the driver."""
        return Coordinates(dp=self.context.rank)

    def follows(self, *leaders: Worker, every: int = 1) -> None:
        """Load the weights of a leader, or the adapters of several, after every `every`-th update. Call
        it before graphs run."""
        raise TypeError(
            "follows() belongs to the handles that weft.group returns, not to a "
            f"{type(self).__name__} itself"
        )

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def register(self) -> Coordinates:
        """Return the coordinates. The driver calls this on a replacement process."""
        return self.coordinates

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Claim device memory before this group's turn on a shared pool of devices."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Free device memory after this group's turn on a shared pool of devices."""

    def close(self) -> None:
        """Release processes, memory and files."""


@dataclass(frozen=True)
class Children:
    """New rows of some parents. An expansion that yields or returns a plain `Batch` states that
    these are all rows of their parents.

    A row's parent and number identify the row, and determine its `sample_id`. If a worker dies, its
    parents keep the rows that it has yielded. The next worker finds their numbers in the column
    `made_before`, and makes only the missing rows.
    """

    rows: Batch
    """Rows with the column `parent_id`."""
    numbers: np.ndarray
    """[rows] int64: number of each row among its parent's rows, from 0."""
    finished: np.ndarray
    """int64 sample ids of the parents that get no more rows."""


@dataclass(frozen=True)
class Unfinished:
    """Children that an expansion gives up, for another replica to continue. The next worker finds
    their numbers in the column `begun_number`, and `rows` as further columns."""

    rows: Batch
    """The children so far, with `parent_id` and all columns that the operation writes."""
    numbers: np.ndarray
    """[rows] int64: number of each child among its parent's rows."""
    left: np.ndarray
    """int64 sample ids of the input rows that get no more children from this worker."""
