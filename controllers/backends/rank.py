"""Rank: the Ray actor process of one rank of a group, and how it is started."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.buffer.disk import make_folder
from ...dataflow.errors import UserError
from ...dataflow.handle import Handle
from ...workers.dispatch import Coordinates
from ...workers.rendezvous import Rendezvous, take_port
from ...workers.worker import Context, Worker
from ..bundles import devices, position
from ..placement import Place
from ..ranks.executor_thread import Activity, ExecutorThread
from ..ranks.tasks import Failure, Reply, Task
from .backend import Files
from .forwarded import forwarded
from .model_folders import ModelFolders
from .network_interface import network_environment
from .pools import ReservedPool
from .rank_process import rank_process
from .sample_note import SampleNote
from .witness.stacks import write_on_request

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
    models: ModelFolders | None = None
    """The folders of models that its settings name; None: there are none, or all nodes are the driver's."""
    written_on: str | None = None
    """Name of the driver's node, for a group that writes into the run's directory."""
    alone: bool = False
    """Whether the cluster has one node, and can have no other."""


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
    """One rank of a group in a process of its own (`rank_process.py`), with its log in the run directory.

        started ──take_port (rank 0 of a group whose ranks meet)──> has a port ──begin──> its worker is made ──close──> closed
            └─────────────────────────────────────────────────────────────────┘

    Ray calls in on a thread for each call; the work is done on the executor's thread.
    """

    def __init__(
        self, worker_class: type, config: Any, context: Context, files: RankFiles, gpus: Sequence[str] | None = None
    ) -> None:
        import ray

        if gpus is not None:
            context = replace(context, devices=tuple(gpus))
        for variable, value in network_environment(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(variable, value)
        write_on_request()
        self._activity = Activity()
        address = "" if files.alone else ray.util.get_node_ip_address()
        context = replace(context, advance=self._activity, address=address)
        self._note: SampleNote | None = None
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._node = files.node_names.get(self._node_id) or f"node-{self._node_id}"  # it joined the cluster just now
        self._hidden: str | None = None
        """Why its worker cannot be made here."""
        if (run := context.run_dir) is not None:
            logs = files.files.logs_of_node(self._node, run)
            _log_to(logs / f"{context.name}_{context.rank}.log")
            self._note = SampleNote(SampleNote.path(logs, context.name, context.rank))
            context = replace(context, at=self._note)
            if not files.files.are_beside(run):
                if files.written_on not in (None, self._node):
                    self._hidden = (
                        f"node {self._node!r} does not see the run's directory, {run} on the driver's node, and {context.name!r} has "
                        "checkpoints or samples to write there: choose a root that all nodes see (Driver(root=...)), or place "
                        f"{context.name!r} on the driver's node"
                    )
                context = replace(context, run_dir=None)
        again = f"-again{files.replaced}" if files.replaced else ""
        self._data = files.files.access(self._node, f"{context.name}-{context.rank}{again}")
        if files.peers is not None:
            self.connect(files.peers)
        self._worker_class, self._config, self._context = worker_class, config, context
        self._models = files.models
        self._port: socket.socket | None = None
        self._begun: Future[ExecutorThread] = Future()

    def process(self) -> tuple[str, int]:
        """Name of its node, and number of its process there; from here on it writes its stacks when it is asked to."""
        return self._node, os.getpid()

    def take_port(self, host: str, secret: str, timeout_s: float) -> Rendezvous:
        """Take a free port, at which the ranks of its group will meet; returns where they come to.

        Args:
            host: address of this machine.
            secret: of the group.
            timeout_s: longest wait for the others, from when their workers are made.
        """
        self._port = take_port(host)
        return replace(Rendezvous.at(self._port, secret, timeout_s), taken=None)

    def begin(self, rendezvous: Rendezvous | None, *, offload: bool = False) -> Standing:
        """Make the worker, and wait until it is up.

        Args:
            rendezvous: of its group; None: its ranks do not meet.
            offload: give the memory of its devices back at once, for a group that is made next.

        Returns:
            Where it stands, or why it could not start.
        """
        if rendezvous is not None:
            rendezvous = replace(rendezvous, taken=self._port)
        context = replace(self._context, rendezvous=rendezvous)

        def make() -> Worker:
            if self._hidden is not None:
                raise UserError(self._hidden)
            config = self._config
            if self._models is not None:
                config = self._models.on_node(self._node_id, config, self._activity)
            worker = self._worker_class(config, context)
            if offload:
                worker.offload()
            return worker

        thread = ExecutorThread(make, self._data, self._activity)
        self._begun.set_result(thread)
        worker = thread.worker()
        return Standing(worker if isinstance(worker, Failure) else worker.coordinates, self._node, self._node_id)

    def advanced(self) -> bool:
        """Whether its worker has done anything since this was asked last; one that is being made may fetch a model."""
        return self._activity.is_new()

    def connect(self, peers: Peers) -> None:
        """Tell it where the servers of the other nodes are."""
        self._data.reader.fetch = peers.fetch

    def call(self, task: Task) -> Iterator[Reply]:
        yield from self._begun.result().call(task)

    def cancel(self, number: int) -> None:
        self._begun.result().cancel(number)

    def give_up(self, number: int, sample_ids: list[int]) -> None:
        self._begun.result().give_up(number, sample_ids)

    def close(self) -> None:
        if self._begun.done():
            self._begun.result().close()
        if self._port is not None:
            self._port.close()
        self._data.close()
        if self._note is not None:
            self._note.close()


def start_rank(
    handle: Handle, place: Place, context: Context, pool: ReservedPool, sharing: int, files: RankFiles
) -> Any:
    """Start the process of a rank.

    Args:
        place: of its group; its pool has its number of nodes.
        context: with its group, and its number there.
        sharing: groups on the pool.

    Returns:
        Its actor, which has no worker yet.
    """
    import ray
    from ray import cloudpickle

    at = position(place, context.rank)
    part = pool.parts[at.node_rank]
    gpus = devices(place, context.rank, part.gpus)
    found: Any = None
    if place.gpus and (files.replaced or not part.node):
        first = part.first_gpu + at.local_rank * place.gpus
        found = replace(part, first_gpu=first, own_gpus=place.gpus).find_gpus()
    context = replace(context, node_rank=at.node_rank, local_rank=at.local_rank, nodes=at.nodes, devices=gpus)
    remote: Any = ray.remote
    actor = remote(concurrency_groups={CONTROL: CONTROL_CALLS})(rank_process(Rank)).options(
        num_cpus=pool.cpus / (sharing * place.ranks),
        num_gpus=0,
        scheduling_strategy=part.strategy,
        max_restarts=0,
        max_concurrency=MAX_CALLS,
    )
    rank = cloudpickle.dumps((Rank, handle.worker_class, handle.config, context, files))  # pyright: ignore[reportPrivateImportUsage]
    return actor.remote(_environment(place, gpus), rank, found)


def _environment(place: Place, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a rank's process, which it has before anything in it imports what reads it."""
    return {
        **forwarded(os.environ),
        # Threads must be known before anything in the process imports torch.
        "OMP_NUM_THREADS": str(place.threads),
        "MKL_NUM_THREADS": str(place.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        # Rank i of every group on a pool sees the same devices; on a pool without GPUs, none. Ray, asked for shares of GPUs, would
        # not promise the former; asked for none, it hides nothing, or hides all, as the last variable says.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _log_to(path: Path) -> None:
    """Send everything that this process prints, libraries in C included, to a file."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
