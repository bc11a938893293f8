"""Rank: the Ray actor process of one rank of a group, and how it is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.buffer.disk import make_folder
from ...dataflow.handle import Handle
from ...workers.dispatch import Coordinates
from ...workers.worker import Context
from ..placement import Place
from ..ranks.executor_thread import Activity, ExecutorThread
from ..ranks.tasks import Failure, Reply, Task
from .backend import Files
from .forwarded import forwarded
from .network_interface import network_environment
from .pools import ReservedPool
from .sample_note import SampleNote

if TYPE_CHECKING:
    from ...dataflow.buffer.peers import Peers


MAX_CALLS = 64
"""Calls with rows on one rank that may be under way. Each has a thread there, and all but one of them wait for their turn."""
CONTROL = "control"
"""Threads for calls without rows (weights, checkpoints, cancelling, closing), which calls with rows cannot occupy."""
CONTROL_CALLS = 16


@dataclass(frozen=True)
class RankFiles:
    """How a rank reaches rows."""

    files: Files
    node_names: Mapping[str, str]
    """Ray's id of a node -> its name in references."""
    replaced: int
    """How often the rank was replaced: each process has files of its own."""
    peers: Peers | None
    """The other nodes, if they are known already."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the driver's environment that are not in the rank's."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stands."""

    at: Coordinates | Failure
    """In the mesh of its group; or why it could not start."""
    node: str
    """Name of its node in references."""
    node_id: str
    """Ray's id of the node."""


class Rank:
    """One rank of a group in a process of its own, with its log in the run directory.

    Ray calls in on a thread for each call; the work is done on the executor's thread.
    """

    def __init__(self, worker_class: type, config: Any, context: Context, files: RankFiles) -> None:
        import ray

        own = network_environment(ray.util.get_node_ip_address())
        for variable, value in {**own, **files.secrets}.items():
            os.environ.setdefault(variable, value)
        activity = Activity()
        context = replace(context, advance=activity)
        self._note: SampleNote | None = None
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._node = files.node_names.get(self._node_id) or f"node-{self._node_id}"  # it joined the cluster just now
        if context.run_dir is not None:
            logs = files.files.logs_of_node(self._node, context.run_dir)
            _log_to(logs / f"{context.name}_{context.rank}.log")
            self._note = SampleNote(SampleNote.path(logs, context.name, context.rank))
            context = replace(context, at=self._note)
        again = f"-again{files.replaced}" if files.replaced else ""
        self._data = files.files.access(self._node, f"{context.name}-{context.rank}{again}")
        if files.peers is not None:
            self.connect(files.peers)
        self._thread = ExecutorThread(lambda: worker_class(config, context), self._data, activity)

    def standing(self) -> Standing:
        """Where it stands; waits until it is up."""
        worker = self._thread.worker()
        return Standing(worker if isinstance(worker, Failure) else worker.coordinates, self._node, self._node_id)

    def connect(self, peers: Peers) -> None:
        """Tell it where the servers of the other nodes are."""
        self._data.reader.fetch = peers.fetch

    def call(self, task: Task) -> Iterator[Reply]:
        yield from self._thread.call(task)

    def cancel(self, number: int) -> None:
        self._thread.cancel(number)

    def give_up(self, number: int, sample_ids: list[int]) -> None:
        self._thread.give_up(number, sample_ids)

    def close(self) -> None:
        self._thread.close()
        self._data.close()
        if self._note is not None:
            self._note.close()


def start_rank(
    handle: Handle, place: Place, context: Context, pool: ReservedPool, sharing: int, files: RankFiles
) -> Any:
    """Start the process of a rank.

    Args:
        sharing: groups on the pool.

    Returns:
        Its actor; the worker in it is not up yet.
    """
    import ray

    remote: Any = ray.remote
    actor = remote(concurrency_groups={CONTROL: CONTROL_CALLS})(Rank).options(
        num_cpus=pool.cpus / (sharing * place.ranks),
        num_gpus=0,
        runtime_env={"env_vars": forwarded(os.environ) | _environment(place, context.rank, pool.gpus)},
        scheduling_strategy=pool.strategy,
        max_restarts=0,
        max_concurrency=MAX_CALLS,
    )
    return actor.remote(handle.worker_class, handle.config, context, files)


def _environment(place: Place, rank: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a rank's process, as far as anything in it reads it before our code runs."""
    return {
        # Threads must be known before anything in the process imports torch.
        "OMP_NUM_THREADS": str(place.threads),
        "MKL_NUM_THREADS": str(place.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        # Rank i of every group on a pool sees the same devices; on a pool without GPUs, none. Ray, asked for shares of GPUs, would
        # not promise the former; asked for none, it hides nothing, or hides all, as the last variable says.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * place.gpus : (rank + 1) * place.gpus]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _log_to(path: Path) -> None:
    """Send everything that this process prints, libraries in C included, to a file."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
