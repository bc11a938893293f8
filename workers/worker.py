"""Worker: one process of a worker group (or an object in this process, for tests and debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..dataflow.config import Config
from .dispatch import Coordinates, Dispatch
from .remote import remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node, Source


MAX_FAILED = 0.05
"""Share of the rows of a node that may fail three times each and be dropped, where a group's configuration has no `max_failed`."""


@dataclass(frozen=True)
class Context:
    """What a worker is told of its surroundings."""

    name: str = "worker"
    rank: int = 0
    world_size: int = 1
    rendezvous: str | None = None
    """URL for `torch.distributed.init_process_group`, or None in a group of one."""
    run_dir: Path | None = None
    seed: int = 0
    watched: bool = False
    """This process is ended and replaced when it is silent for too long; otherwise a worker keeps its own deadlines."""
    at: Callable[[int | None], None] = lambda sample_id: None
    """To be told which sample is worked on (None: none), where one of them may hang or end the process: it is blamed then, instead of
    all that the call has not finished."""
    advance: Callable[[], None] = lambda: None
    """To be told that a part of the work is done, such as a microbatch or a step of an engine: a rank that says so for a long call is not
    taken to hang, and one that does not is given up after the driver's `call_timeout_s`."""


class Worker:
    """Parent of every worker class. A subclass is constructed as `Cls(config, context)`, loads its model there, and
    marks what may be called on a group with `@remote`.

    A *handle* made by `weft.group` is typed as its worker class, so what a script may say of a handle stands here too.
    """

    Config: ClassVar[type[Config]]
    """Configuration class; `weft.group` builds it from keyword arguments."""
    replaceable: ClassVar[bool] = False
    """A rank knows nothing of the others, and holds nothing but its configuration and weights that it follows: what it failed at
    is requeued (and dropped when it fails for the third time, see `MAX_FAILED`), and when its process ends or hangs, another
    takes its place, and the run goes on."""

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
    def longest_prompt(cls, config: Any, nodes: Sequence[Node]) -> int | None:
        """Tokens of the longest prompt that these calls can take; None: any."""
        return None

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the mesh of its group; registered with the driver."""
        return Coordinates(dp=self.context.rank)

    def follows(self, leader: Worker, *, every: int = 1) -> None:
        """Take over `leader`'s weights after each `every`-th update of it. Said of handles, before a graph runs."""
        raise TypeError(
            f"follows() is said of the handles that weft.group returns, not of a {type(self).__name__} itself"
        )

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def register(self) -> Coordinates:
        """Said by a process that has come up in the place of another."""
        return self.coordinates

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Bring device memory back before this group's turn on a shared pool."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Give device memory up after this group's turn on a shared pool."""

    def close(self) -> None:
        """Release processes, memory and files."""
