"""Worker: one process of a worker group (or an object in this process, for tests and debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..dataflow.config import Config
from .dispatch import Coordinates, Dispatch
from .remote import remote
from .row_cost import RowCost

if TYPE_CHECKING:
    from ..dataflow.node import Node
    from ..dataflow.source import Source
    from .rendezvous import Rendezvous


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
